"""What each rank runs: a copy of the user's function on its part of the batch, and backward.

The objective of a rank is ℓ_r = Σ_i ⟨w_i, y_i⟩ over the outputs y_i of the function. A 0-d output is a loss: its weight
is 1, or, if there are several, a number that is the same on all ranks. Other outputs have random weights, so every rank
has other cotangents. A function that calls backward itself, as a training step does, has its gradients already.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from diffcoll.core.errors import message
from diffcoll.core.torch_private.autograd import leaves_of_graph
from diffcoll.core.trees import tree_flatten, tree_paths
from diffcoll.engines.devices import device_of_backend
from diffcoll.engines.rank_state import seed_rank
from diffcoll.testing.failures import RanksFailedError
from diffcoll.testing.harness.cuts import Cuts, Detaches, recorded
from diffcoll.testing.harness.fill import Code, Held, held_on_rank, local
from diffcoll.testing.harness.layout import spans
from diffcoll.testing.harness.mesh import NAME, Ranks
from diffcoll.testing.harness.packing import Packed, Subject
from diffcoll.testing.harness.precision import Seen
from diffcoll.testing.harness.submodules import Traces, traced
from diffcoll.testing.numbers import differentiable, numbers, real_inner
from diffcoll.testing.simulate import simulate
from diffcoll.testing.spawn import Ranks as Processes

#: Streams of random numbers, see `numbers.numbers`: weights of the outputs, directions, and changes of last digits.
WEIGHTS, DIRECTIONS, JITTER = 1, 2, 3
#: Distances at which losses are evaluated along a direction.
STEPS = (1, -1, 2, -2)


class Machines:
    """Runs functions on ranks, with this default dtype; real processes are started once for a check."""

    def __init__(self, timeout: float, dtype: torch.dtype | None = None) -> None:
        self._timeout, self._dtype = timeout, dtype
        self._processes: dict[tuple[str, int], Processes] = {}

    def run(self, kind: str, fn: Callable[..., Any], *per_rank: Sequence[Any], seed: int = 0) -> list[Any]:
        """Run fn once per rank, on simulated ranks or on processes with a backend."""
        if kind == "simulated":
            with _around_ranks(self._dtype):
                return simulate(fn, *per_rank, seed=seed)
        rows = list(zip(*per_rank, strict=True))
        key = kind, len(rows)
        if key not in self._processes:
            self._processes[key] = Processes(len(rows), kind)
        try:
            return self._processes[key].call(partial(_within, self._dtype, fn), rows, seed=seed, timeout=self._timeout)
        except RanksFailedError:
            del self._processes[key]
            raise

    def close(self) -> None:
        """End the processes."""
        for processes in self._processes.values():
            processes.close()


@contextlib.contextmanager
def _around_ranks(dtype: torch.dtype | None) -> Iterator[None]:
    """Set what is one for all threads of a process: the default dtype, and a hook on optimizers."""
    before, hook = torch.get_default_dtype(), register_optimizer_step_post_hook(_keep_gradients)
    try:
        torch.set_default_dtype(dtype or before)
        yield
    finally:
        hook.remove()
        torch.set_default_dtype(before)


def _within(dtype: torch.dtype | None, fn: Callable[..., Any], *given: Any) -> Any:
    with _around_ranks(dtype):
        return fn(*given)


#: The attribute of a tensor that has its gradient at an optimizer's first step; `zero_grad` may leave none afterwards.
_FIRST_GRADIENT = "_diffcoll_first_gradient"


def _keep_gradients(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.grad is not None and getattr(p, _FIRST_GRADIENT, p) is None:
            setattr(p, _FIRST_GRADIENT, p.grad.detach().clone())


class Moved(NamedTuple):
    """The tensors are moved along directions first: the inputs, followed by the module's, are numbered so."""

    directions: Mapping[int, Tensor]
    distance: float


class Perturbed(NamedTuple):
    """The last digits of the tensors are changed first, to see how large rounding is."""

    sample: int
    eps: float


class Undetached(NamedTuple):
    """Calls of detach() keep the graph, in these lines; None: in all."""

    lines: frozenset[str] | None = None


class Watched(NamedTuple):
    """Graph cuts, and what submodules return, are recorded."""


class Precision(NamedTuple):
    """The least precise dtype of a computation is recorded."""


#: How a measurement differs from a plain one.
Experiment: TypeAlias = Moved | Perturbed | Undetached | Watched | Precision


@dataclass(frozen=True)
class Task:
    """What one rank measures."""

    ranks: Ranks
    #: Its part of the batch, a tree, in which the variables require gradients.
    part: Any
    #: The numbers to write into tensors that `shard` makes anew, by name.
    write: Mapping[str, Tensor] = field(default_factory=dict)
    #: The names of the outputs; None: whatever the function returns.
    paths: Sequence[str] | None = None
    #: The weights of the outputs; None: those that `weight_of` gives for this stream, where shape (1,) is a loss.
    weights: Sequence[Tensor | None] | None = None
    stream: int = 0
    #: What the rank's objective is multiplied by.
    factor: float = 1.0
    #: Directions v of its tensors, numbered as in `Moved`: the gradients of ⟨v, the gradients⟩ are measured too.
    directions: Mapping[int, Tensor] = field(default_factory=dict)
    backward: bool = True
    experiment: Experiment | None = None


@dataclass
class Measured:
    """What one rank has measured, on the CPU."""

    outputs: list[Tensor]
    #: Which outputs have a graph.
    has_graph: list[bool]
    #: The gradients of the inputs, followed by those of the module's tensors in the order of `spans`.
    gradients: list[Tensor]
    #: The same of second order.
    second: list[Tensor]
    #: The inputs and tensors before and after the call.
    before: list[Tensor]
    state: list[Tensor]
    #: The first numbers of the tensors that were written.
    first: dict[str, Tensor]
    #: Whether the function has called backward itself.
    own_backward: bool
    loss: float
    #: What follows the names of the outputs.
    paths: list[str]
    cuts: Cuts
    traces: Traces
    #: The least precise dtype that was seen.
    dtype: torch.dtype | None = None

    @property
    def scale(self) -> float:
        """Σ |g · x|: how large the value's changes are, also where the value itself cancels out."""
        pairs = zip(self.gradients, self.state, strict=True)
        return sum(float((g * x).abs().sum()) for g, x in pairs if differentiable(g))


def weight_of(i: int, outputs: Sequence[Tensor], stream: int = 0) -> Tensor | None:
    """Return the weight of an output of one process; None: it can have no gradient."""
    y = outputs[i]
    if not differentiable(y):
        return None
    if y.dim() == 0 and sum(y.dim() == 0 and differentiable(y) for y in outputs) == 1:
        return torch.ones((), dtype=y.dtype)
    return numbers(tuple(y.shape), y.dtype, i, stream, WEIGHTS)


def layout_on_rank(packed: Packed, ranks: Ranks, with_positions: bool) -> list[Held]:
    """Shard copies of the module that are filled with the digits of positions, and return what this rank holds."""
    whole = packed.unpack().module
    assert whole is not None
    code = Code.of(spans(whole)) if with_positions else None
    modules, mesh = [], mesh_of(ranks, whole)
    for k in range(1 if code is None else code.digits + 1):
        subject = packed.unpack()
        assert subject.module is not None
        if code is not None:
            code.write(spans(subject.module), k)
        seed_rank(0, dist.get_rank())
        modules.append(sharded(subject, mesh))
    return held_on_rank(spans(whole), code, modules)


def mesh_of(ranks: Ranks, module: nn.Module) -> Any:
    """Return the mesh that `shard` gets."""
    axes, kinds = ranks.sizes, {s.tensor.device.type for s in spans(module)} - {"cpu", "meta"}
    device = kinds.pop() if kinds else device_of_backend(dist.get_backend())  # DTensor moves pieces to that of the mesh
    return dist.device_mesh.init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))


def sharded(subject: Subject, mesh: Any) -> nn.Module:
    """Return this rank's module."""
    assert subject.module is not None and subject.shard is not None
    module = subject.shard(subject.module, mesh)
    if not isinstance(module, nn.Module):
        raise TypeError(message(NAME, "shard", f"a function that returned {type(module).__name__}", "a module"))
    return module


def measured(packed: Packed, task: Task) -> Measured:
    """Run the function on this rank; all ranks run it."""
    with contextlib.ExitStack() as stack:
        subject = packed.unpack()
        module = subject.module
        if module is not None and subject.shard is not None:
            module = sharded(subject, mesh_of(task.ranks, module))
        inputs, named = leaves_of(task.part), [] if module is None else spans(module)
        tensors = [*inputs, *(span.tensor for span in named)]
        for x in tensors:
            x.grad = None
            setattr(x, _FIRST_GRADIENT, None)
        held = {span.name: local(span.tensor) for span in named if span.name in task.write}
        first = {name: x.cpu().clone() for name, x in held.items()}
        with torch.no_grad():
            for name, x in held.items():
                x.copy_(task.write[name])
            _changed(tensors, task.experiment)
        before = [_copy(x) for x in tensors] if task.backward else []
        if subject.context is not None:
            stack.enter_context(_entered(subject.context()))
        cuts, seen = Cuts(), Seen()
        match task.experiment:
            case Undetached(lines):
                stack.enter_context(Detaches(kept=lines))
            case Watched():
                cuts = stack.enter_context(recorded())
            case Precision():
                stack.enter_context(seen)
        own: list[Tensor] = []
        leaves = [x for x in tensors if x.is_leaf and x.requires_grad]
        hooks = [x.register_post_accumulate_grad_hook(own.append) for x in leaves]  # type: ignore[no-untyped-call]
        with traced(module if isinstance(task.experiment, Watched) else None) as traces:
            paths, outputs = called(subject.fn, module, task.part, inputs, task.paths)
        for hook in hooks:
            hook.remove()
        has_run_backward = bool(own) or any(x.grad is not None for x in tensors)
        del own
        weights = task.weights
        if weights is None:
            outputs = [y[0] if y.shape == (1,) else y for y in outputs]
            weights = [weight_of(i, outputs, task.stream) for i in range(len(outputs))]
        total = task.factor * objective(weights, outputs)
        has_graph = [y.requires_grad for y in outputs]
        found = Measured(
            [], has_graph, [], [], before, [], first, has_run_backward, float(total.detach()), paths, cuts, traces
        )
        if task.backward:
            others = _others(total, tensors) if subject.shard is None else []
            if task.directions and not has_run_backward and total.requires_grad:
                found.gradients, found.second = _twice(total, tensors, task.directions)
            else:
                if total.requires_grad and not has_run_backward:
                    torch.autograd.backward(total)
                kept = [getattr(x, _FIRST_GRADIENT) for x in tensors]
                found.gradients = [_gradient(x, x.grad if g is None else g) for x, g in zip(tensors, kept, strict=True)]
            found.state = [_copy(x) for x in tensors]
        found.outputs, found.dtype = [y.detach().cpu() for y in outputs], seen.dtype
        if task.backward:
            del outputs, total
            _refuse_others(others)
    return found


def _changed(tensors: Sequence[Tensor], experiment: Experiment | None) -> None:
    """Move the tensors along directions, or change their last digits."""
    match experiment:
        case Moved(directions, distance):
            for k, v in directions.items():
                local(tensors[k]).add_(distance * v.to(local(tensors[k])))
        case Perturbed(sample, eps):
            for k, x in enumerate(tensors):
                if differentiable(x):
                    change = numbers(tuple(x.shape), x.dtype, k, sample, JITTER)
                    x.mul_(1 + eps * change.to(x.device))


def losses_along(
    packed: Packed, task: Task, each: Sequence[Mapping[int, Tensor]], rank: int, steps: Sequence[int] = STEPS
) -> list[float]:
    """Evaluate the objective of this rank at each step along directions of its tensors; all ranks run it."""
    found = []
    for along in each:
        for k in steps:
            seed_rank(0, rank)
            found.append(measured(packed, replace(task, backward=False, experiment=Moved(along, k))).loss)
    return found


@contextlib.contextmanager
def _entered(context: Any) -> Iterator[None]:
    """Enter a context until all ranks are done: some, such as `loss_parallel`, belong to the process, not to a rank."""
    context.__enter__()
    try:
        yield
        if dist.is_initialized():
            dist.barrier()
    finally:
        with contextlib.suppress(KeyError):  # another simulated rank has left it already
            context.__exit__(*sys.exc_info())


def _copy(x: Tensor) -> Tensor:
    found = local(x).cpu()
    return found.clone() if found.layout == torch.strided else found.to_dense()


def _gradient(x: Tensor, g: Tensor | None) -> Tensor:
    """Return this rank's gradient of a tensor, placed as the tensor is; zero if there is none."""
    from torch.distributed.tensor import DTensor

    if g is None:
        return torch.zeros_like(local(x), device="cpu")
    if isinstance(x, DTensor) and isinstance(g, DTensor) and g.placements != x.placements:
        g = g.redistribute(x.device_mesh, x.placements)
    return _copy(g)


def _twice(
    total: Tensor, tensors: Sequence[Tensor], directions: Mapping[int, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of the objective, and those of ⟨v, the gradients⟩."""
    along = {k: v for k, v in directions.items() if tensors[k].requires_grad}
    leaves = [tensors[k] for k in along]
    # In this thread, also on an accelerator: all ranks then run the next backward in one order.
    with torch.autograd.set_multithreading_enabled(False):
        once = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True, materialize_grads=True)
    following = torch.stack([real_inner(v.to(g), g) for v, g in zip(along.values(), once, strict=True)]).sum()
    if following.requires_grad:
        torch.autograd.backward(following)  # which raises where a function is differentiable once only
    first = {id(x): g for x, g in zip(leaves, once, strict=True)}
    return [_gradient(x, first.get(id(x))) for x in tensors], [_gradient(x, x.grad) for x in tensors]


# ── the function ─────────────────────────────────────────────────────────────────────────────────────────


def leaves_of(part: Any) -> list[Tensor]:
    """Return a new leaf tensor for each variable of a tree."""
    variables = [x for x in tree_flatten(part)[0] if isinstance(x, Tensor) and x.requires_grad]
    return [x.detach().clone().requires_grad_() for x in variables]


def called(
    fn: Callable[..., Any], module: nn.Module | None, part: Any, inputs: Sequence[Tensor], paths: Sequence[str] | None
) -> tuple[list[str], list[Tensor]]:
    """Call the function, and return the leaves of its result as tensors, and their names, which are `paths`.

    Its arguments are copies that depend on the inputs, so the function may modify them, and gets tensors that are not
    leaves, as between the layers of a model.
    """
    leaves, rebuild = tree_flatten(part)
    given, first = iter(inputs), [] if module is None else [module]
    part = rebuild([(next(given) if x.requires_grad else x).clone() if isinstance(x, Tensor) else x for x in leaves])
    if isinstance(part, dict):
        result = fn(*first, **part)
    else:
        is_several = isinstance(part, (tuple, list)) and not hasattr(part, "_fields")
        result = fn(*first, *part) if is_several else fn(*first, part)
    found = dict(_results(result))
    if paths is not None and {*paths} != {*found}:
        got, expected = (", ".join(f"output{path}" for path in each) for each in (found, paths))
        raise ValueError(message(NAME, "distributed", got, f"{expected}, as on one process"))
    names = list(found if paths is None else paths)
    return names, [found[path] for path in names]


def _results(y: Any, at: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield what a function returned as whole tensors, numbers without gradient; None and words are no results."""
    from torch.distributed.tensor import DTensor

    for path, leaf in zip((at + path for path in tree_paths(y)), tree_flatten(y)[0], strict=True):
        if isinstance(leaf, Tensor):
            yield path, leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        elif isinstance(leaf, (bool, int, float, complex)):
            dtype = {float: torch.float64, complex: torch.complex128}.get(type(leaf))
            yield path, torch.tensor(leaf, dtype=dtype)
        elif isinstance(leaf, Mapping):  # such as an output of Transformers, which is a dataclass too
            yield from _results(dict(leaf), path)
        elif is_dataclass(leaf):
            for part in fields(leaf):
                yield from _results(getattr(leaf, part.name), f"{path}.{part.name}")
        elif leaf is not None and not isinstance(leaf, str):
            got, expected = f"a function that returned {type(leaf).__name__}", "a loss, or a tree of tensors"
            raise TypeError(message(NAME, "distributed", got, expected))


def objective(weights: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> Tensor:
    """Return Σ ⟨w, y⟩."""
    terms = [real_inner(w.to(y), y) for w, y in zip(weights, outputs, strict=True) if w is not None]
    return torch.stack([t.to(terms[0]) for t in terms]).sum() if terms else torch.zeros(())


def _others(total: Tensor, known: Sequence[Tensor]) -> list[weakref.ref[Tensor]]:
    """Return the leaf tensors that the loss depends on and that are neither inputs nor parameters."""
    ids = set(map(id, known))
    return [weakref.ref(leaf) for leaf in leaves_of_graph(total) if id(leaf) not in ids] if total.requires_grad else []


def _refuse_others(others: Sequence[weakref.ref[Tensor]]) -> None:
    """Raise if there are leaves whose gradients nothing checks; those of the function are gone with the graph."""
    if any(ref() is not None for ref in others):
        gc.collect()  # what is in a cycle; it takes tenths of a second in a large program
    if left := [leaf for ref in others if (leaf := ref()) is not None]:
        shapes = ", ".join(f"{type(leaf).__name__} of shape {tuple(leaf.shape)}" for leaf in left)
        got, expected = f"a function that uses a {shapes} that requires a gradient", "only those of the module"
        remedy = "others are not checked: pass it by module=, or call requires_grad_(False)"
        raise ValueError(message(NAME, "module", got, expected, remedy))
