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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diffcoll.core.errors import message
from diffcoll.core.torch_private.autograd import leaves_of_graph
from diffcoll.core.trees import tree_flatten
from diffcoll.engines.devices import device_of_backend
from diffcoll.engines.rank_state import seed_rank
from diffcoll.testing.failures import RanksFailedError
from diffcoll.testing.harness.cuts import Cuts, Detaches, recorded
from diffcoll.testing.harness.layout import NAME, FreshIsNan, Held, Ranks, filled, held_on_rank, local, spans
from diffcoll.testing.harness.packing import Packed, Subject
from diffcoll.testing.harness.submodules import Traces, traced
from diffcoll.testing.numbers import differentiable, numbers, real_inner
from diffcoll.testing.simulate import simulate
from diffcoll.testing.spawn import Ranks as Processes

#: Streams of random numbers, see `numbers.numbers`: weights of the outputs, directions, and changes of last digits.
WEIGHTS, DIRECTIONS, JITTER = 1, 2, 3
#: Distances at which losses are evaluated along a direction.
STEPS = (1, -1, 2, -2)


class Machines:
    """Runs functions on ranks; real processes are started once for a check."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._processes: dict[tuple[str, int], Processes] = {}

    def run(self, kind: str, fn: Callable[..., Any], *per_rank: Sequence[Any], seed: int = 0) -> list[Any]:
        """Run fn once per rank, on simulated ranks or on processes with a backend."""
        if kind == "simulated":
            return simulate(fn, *per_rank, seed=seed)
        rows = list(zip(*per_rank, strict=True))
        key = kind, len(rows)
        if key not in self._processes:
            self._processes[key] = Processes(len(rows), kind)
        try:
            return self._processes[key].call(fn, rows, seed=seed, timeout=self._timeout)
        except RanksFailedError:
            del self._processes[key]
            raise

    def close(self) -> None:
        """End the processes."""
        for processes in self._processes.values():
            processes.close()


@dataclass(frozen=True)
class Task:
    """What one rank measures."""

    ranks: Ranks
    #: Its part of the batch, a tree, in which the variables require gradients.
    part: Any
    #: The numbers to write into tensors that `shard` makes anew, by name.
    write: Mapping[str, Tensor] = field(default_factory=dict)
    #: The weights of the outputs; None: those that `weight_of` gives for this stream, where shape (1,) is a loss.
    weights: Sequence[Tensor | None] | None = None
    stream: int = 0
    #: What the rank's objective is multiplied by.
    factor: float = 1.0
    #: Directions v of its tensors: the inputs, followed by those of the module, are numbered in this order.
    directions: Mapping[int, Tensor] = field(default_factory=dict)
    #: How far the tensors are moved along them first; 0: the gradients of ⟨v, the gradients⟩ are measured too.
    move: float = 0.0
    #: Whether to change the last digits of the tensors first, to see how large rounding is.
    jitter: bool = False
    backward: bool = True
    #: Whether calls of detach() keep the graph.
    undetached: bool = False
    #: Whether to record graph cuts, and what submodules return.
    watched: bool = False


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
    #: The inputs and tensors after the call.
    state: list[Tensor]
    #: Whether the function has called backward itself.
    own_backward: bool
    loss: float
    cuts: Cuts
    traces: Traces

    def numbered(self, i: int) -> str:
        """Return what follows the name of an output."""
        return f"[{i}]" if len(self.outputs) > 1 else ""

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
    """Shard a copy of the module whose numbers are their positions, and return what this rank holds."""
    subject = packed.unpack()
    assert subject.module is not None
    total = filled(subject.module) if with_positions else 0
    with FreshIsNan():
        module = sharded(subject, ranks)
    return held_on_rank(module, total)


def sharded(subject: Subject, ranks: Ranks) -> nn.Module:
    """Return this rank's module."""
    assert subject.module is not None
    if subject.shard is None:
        return subject.module
    axes, kinds = ranks.sizes, {s.tensor.device.type for s in spans(subject.module)} - {"cpu", "meta"}
    device = kinds.pop() if kinds else device_of_backend(dist.get_backend())  # DTensor moves pieces to that of the mesh
    mesh = dist.device_mesh.init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    module = subject.shard(subject.module, mesh)
    if not isinstance(module, nn.Module):
        raise TypeError(message(NAME, "shard", f"a function that returned {type(module).__name__}", "a module"))
    return module


def measured(packed: Packed, task: Task) -> Measured:
    """Run the function on this rank; all ranks run it."""
    with contextlib.ExitStack() as stack:
        subject = packed.unpack()
        module = None if subject.module is None else sharded(subject, task.ranks)
        inputs, named = leaves_of(task.part), [] if module is None else spans(module)
        tensors = [*inputs, *(span.tensor for span in named)]
        with torch.no_grad():
            for span in named:
                span.tensor.grad = None
                if span.name in task.write:
                    local(span.tensor).copy_(task.write[span.name])
            for k, v in task.directions.items() if task.move else ():
                local(tensors[k]).add_(task.move * v.to(local(tensors[k])))
            for x in filter(differentiable, tensors) if task.jitter else ():
                change = numbers(tuple(x.shape), x.dtype, 0, 0, JITTER)
                x.mul_(1 + torch.finfo(x.dtype).eps * change.to(x.device))
        if subject.context is not None:
            stack.enter_context(_entered(subject.context()))
        if task.undetached:
            stack.enter_context(Detaches())
        watching = recorded() if task.watched else contextlib.nullcontext(Cuts())
        with watching as cuts, traced(module if task.watched else None) as traces:
            outputs = called(subject.fn, module, task.part, inputs)
        weights = task.weights
        if weights is None:
            outputs = [y[0] if y.shape == (1,) else y for y in outputs]
            weights = [weight_of(i, outputs, task.stream) for i in range(len(outputs))]
        if len(weights) != len(outputs):
            got = f"{len(outputs)} outputs, where one process has {len(weights)}"
            raise ValueError(message(NAME, "distributed", got, "equally many"))
        total = task.factor * objective(weights, outputs)
        own = any(x.grad is not None for x in tensors)
        found = Measured([], [y.requires_grad for y in outputs], [], [], [], own, float(total.detach()), cuts, traces)
        if task.backward:
            others = _others(total, tensors) if subject.shard is None else []
            if task.directions and not task.move and not own and total.requires_grad:
                found.gradients, found.second = _twice(total, tensors, task.directions)
            else:
                if total.requires_grad and not own:
                    torch.autograd.backward(total)
                found.gradients = [_gradient(x, x.grad) for x in tensors]
            found.state = [_copy(x) for x in tensors]
        found.outputs = [y.detach().cpu() for y in outputs]
        if task.backward:
            del outputs, total
            _refuse_others(others)
    return found


def losses_along(packed: Packed, task: Task, each: Sequence[Mapping[int, Tensor]], rank: int) -> list[float]:
    """Evaluate the objective of this rank at each step along directions of its tensors; all ranks run it."""
    found = []
    for along in each:
        for k in STEPS:
            seed_rank(0, rank)
            found.append(measured(packed, replace(task, directions=along, move=k, backward=False)).loss)
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


def called(fn: Callable[..., Any], module: nn.Module | None, part: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Call the function, and return the leaves of its result as tensors.

    Its arguments are copies that depend on the inputs, so the function may modify them, and gets tensors that are not
    leaves, as between the layers of a model.
    """
    leaves, rebuild = tree_flatten(part)
    given, first = iter(inputs), [] if module is None else [module]
    part = rebuild([(next(given) if x.requires_grad else x).clone() if isinstance(x, Tensor) else x for x in leaves])
    if isinstance(part, dict):
        return list(_results(fn(*first, **part)))
    is_several = isinstance(part, (tuple, list)) and not hasattr(part, "_fields")
    return list(_results(fn(*first, *part) if is_several else fn(*first, part)))


def _results(y: Any) -> Iterator[Tensor]:
    """Yield what a function returned as whole tensors, numbers without gradient; None and words are no results."""
    from torch.distributed.tensor import DTensor

    for leaf in tree_flatten(y)[0]:
        if isinstance(leaf, Tensor):
            yield leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        elif isinstance(leaf, (bool, int, float, complex)):
            yield torch.tensor(leaf, dtype={float: torch.float64, complex: torch.complex128}.get(type(leaf)))
        elif isinstance(leaf, Mapping):  # such as an output of Transformers, which is a dataclass too
            yield from _results(list(leaf.values()))
        elif is_dataclass(leaf):
            yield from _results([getattr(leaf, part.name) for part in fields(leaf)])
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
