"""What each rank runs: a copy of the user's function on its part of the batch, and backward.

The objective of a rank is ℓ_r = Σ_i ⟨w_i, y_i⟩ over the outputs y_i of the function. A 0-d output is a loss: its weight
is 1, or, if there are several, a number that is the same on all ranks. Other outputs have random weights, so every rank
has other cotangents. A function that calls backward itself, as a training step does, has its gradients already.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diffcoll.core.errors import message
from diffcoll.core.torch_private.autograd import leaves_of_graph
from diffcoll.core.trees import tree_flatten
from diffcoll.engines.simulated.group import LostGradientWarning
from diffcoll.testing.failures import RanksFailedError
from diffcoll.testing.harness.cuts import Cuts, Detaches, GraphCuts
from diffcoll.testing.harness.layout import (
    NAME,
    Code,
    Fact,
    FreshIsNan,
    Ranks,
    facts_of,
    fill,
    local,
    tensors_of,
)
from diffcoll.testing.harness.packing import Packed, Subject
from diffcoll.testing.harness.submodules import Traces, traced
from diffcoll.testing.numbers import numbers, real_inner
from diffcoll.testing.simulate import simulate
from diffcoll.testing.spawn import Ranks as Processes

#: Streams of random numbers, see `numbers.numbers`: weights of the outputs, directions, and changes of last digits.
WEIGHTS, DIRECTIONS, JITTER = 1, 2, 3


class Machines:
    """Runs functions on ranks; real processes are started once for a check."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._processes: dict[tuple[str, int], Processes] = {}

    def run(self, kind: str, fn: Callable[..., Any], *per_rank: Sequence[Any], seed: int = 0) -> list[Any]:
        """Run fn once per rank, on simulated ranks or on processes with a backend."""
        if kind == "simulated":
            return simulate(partial(_without_warnings, fn), *per_rank, seed=seed)
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


def _without_warnings(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Call fn without warnings of lost gradients, which the report names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LostGradientWarning)
        return fn(*arguments)


@dataclass(frozen=True)
class Constant:
    """A tensor of the batch that gets no gradient."""

    tensor: Tensor


@dataclass(frozen=True)
class Task:
    """What one rank measures."""

    ranks: Ranks
    #: Its part of the batch, a tree.
    part: Any
    device: str = "cpu"
    #: The numbers to write into tensors that `shard` makes anew, by name.
    write: Mapping[str, Tensor] = field(default_factory=dict)
    #: The weights of the outputs; None: those that `weight_of` gives for this stream.
    weights: Sequence[Tensor | None] | None = None
    stream: int = 0
    #: 2: the gradients of ⟨v, the gradients⟩ too, with directions v for each input and each tensor of the module.
    order: int = 1
    directions: tuple[Sequence[Tensor], Sequence[Tensor | None]] | None = None
    #: How far inputs and tensors are moved along these directions first.
    move: float = 0.0
    #: Whether to change the last digits of inputs and parameters first, to see how large rounding is.
    jitter: bool = False
    #: What the objective is multiplied by.
    factor: float = 1.0
    #: Whether calls of detach() keep the graph.
    undetached: bool = False
    #: Whether to record graph cuts, and what submodules return.
    watched: bool = False
    backward: bool = True
    #: Indices of the outputs of shape (1,) that are losses; None: all such.
    losses: Sequence[int] | None = None


@dataclass
class Measured:
    """What one rank has measured, on the CPU."""

    outputs: list[Tensor]
    #: Which outputs have a graph.
    has_graph: list[bool]
    #: Gradients of the inputs, and of the module's tensors in the order of `tensors_of`.
    inputs: list[Tensor]
    module: list[Tensor]
    #: The same of second order.
    second: tuple[list[Tensor], list[Tensor]] | None
    #: The module's tensors after the call.
    state: list[Tensor]
    #: Whether the function has called backward itself.
    own_backward: bool
    loss: float
    #: Σ |g · x| of first order: how large the value's changes are, also where the value itself cancels out.
    scale: float
    cuts: Cuts
    traces: Traces


def differentiable(x: Any) -> bool:
    """Whether x is a tensor that can have a gradient."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def weight_of(i: int, outputs: Sequence[Tensor], stream: int = 0) -> Tensor | None:
    """Return the weight of an output of one process; None: it can have no gradient."""
    y = outputs[i]
    if not differentiable(y):
        return None
    if y.dim() == 0 and sum(y.dim() == 0 and differentiable(y) for y in outputs) == 1:
        return torch.ones((), dtype=y.dtype)
    return numbers(tuple(y.shape), y.dtype, i, stream, WEIGHTS)


def layout_on_rank(packed: Packed, ranks: Ranks, device: str, code: Code | None) -> list[Fact]:
    """Shard copies of the module that are filled with positions, and return what this rank holds."""
    values: list[list[Tensor]] = []
    module = nn.Module()
    for step in code.passes if code is not None else [0]:
        subject = packed.unpack()
        assert subject.module is not None
        if code is not None:
            fill(subject.module, code, step)
        with FreshIsNan():
            module = sharded(subject, ranks, device)
        values.append([_double(local(x)) for _, _, x in tensors_of(module)])
    if code is None:
        return facts_of(module, [torch.full(v.shape, -1) for v in values[0]])
    return facts_of(module, [code.read(each) for each in zip(*values, strict=True)])


def _double(x: Tensor) -> Tensor:
    if x.is_meta or x.is_complex() or x.layout != torch.strided:
        return torch.full(x.shape, torch.nan, dtype=torch.double)
    return x.cpu().double()


def sharded(subject: Subject, ranks: Ranks, device: str) -> nn.Module:
    """Return this rank's module."""
    assert subject.module is not None
    if subject.shard is None:
        return subject.module
    axes = ranks.sizes
    mesh = dist.device_mesh.init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    module = subject.shard(subject.module, mesh)
    if not isinstance(module, nn.Module):
        raise TypeError(message(NAME, "shard", f"a function that returned {type(module).__name__}", "a module"))
    return module


def measured(packed: Packed, task: Task) -> Measured:
    """Run the function on this rank; all ranks run it."""
    with torch.inference_mode(False), torch.enable_grad(), contextlib.ExitStack() as stack:
        subject = packed.unpack()
        module = None if subject.module is None else sharded(subject, task.ranks, task.device)
        tensors = [] if module is None else [(name, x) for _, name, x in tensors_of(module)]
        inputs = leaves_of(task.part)
        _prepare(task, tensors, inputs)
        held = [x for _, x in tensors]
        if subject.context is not None:
            stack.enter_context(_entered(subject.context()))
        if task.undetached:
            stack.enter_context(Detaches())
        cuts = stack.enter_context(GraphCuts()) if task.watched else None
        traces = stack.enter_context(traced(module)) if task.watched and module is not None else Traces()
        outputs = called(subject.fn, module, with_leaves(task.part, inputs), task.losses)
        if cuts is not None:
            cuts.end()
        weights = task.weights
        if weights is None:
            weights = [weight_of(i, outputs, task.stream) for i in range(len(outputs))]
        if len(weights) != len(outputs):
            got = f"{len(outputs)} outputs, where one process has {len(weights)}"
            raise ValueError(message(NAME, "distributed", got, "equally many"))
        total = task.factor * objective(weights, outputs)
        loss = float(total.detach())
        own = any(x.grad is not None for x in [*inputs, *held])
        others = _Others(total, [*inputs, *held]) if subject.shard is None else None
        second = None
        if task.order > 1 and task.directions is not None and not own and total.requires_grad:
            first, second = _twice(total, inputs, held, task.directions)
        else:
            if total.requires_grad and not own and task.backward:
                torch.autograd.backward(total)
            first = [_gradient(x) for x in [*inputs, *held]]
        has_graph = [y.requires_grad for y in outputs]
        outputs = [y.detach().cpu() for y in outputs]
        del total
        if others is not None:
            others.refuse()
    return Measured(
        outputs,
        has_graph,
        first[: len(inputs)],
        first[len(inputs) :],
        second,
        [_copy(x) for x in held],
        own,
        loss,
        sum(
            float((g * _copy(x)).abs().sum()) for g, x in zip(first, [*inputs, *held], strict=True) if differentiable(g)
        ),
        cuts.found if cuts is not None else Cuts(),
        traces,
    )


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


def _prepare(task: Task, tensors: Sequence[tuple[str, Tensor]], inputs: Sequence[Tensor]) -> None:
    """Write the numbers of the whole, and move what is to be moved."""
    with torch.no_grad():
        for name, x in tensors:
            x.grad = None
            if name in task.write:
                local(x).copy_(task.write[name].to(x.dtype))
        if task.move and task.directions is not None:
            every = [*inputs, *(x for _, x in tensors)]
            for k, (x, v) in enumerate(zip(every, [*task.directions[0], *task.directions[1]], strict=True)):
                if v is not None and differentiable(x) and not any(x is other for other in every[:k]):
                    local(x).add_(task.move * v.to(x.dtype))
        if task.jitter:
            for x in [*inputs, *(x for _, x in tensors if differentiable(x))]:
                change = numbers(tuple(x.shape), x.dtype, 0, 0, JITTER)
                x.mul_(1 + torch.finfo(x.dtype).eps * change.to(x.device))


def _copy(x: Tensor) -> Tensor:
    found = local(x).cpu()
    return found.clone() if found.layout == torch.strided else found.to_dense()


def _gradient(x: Tensor, g: Tensor | None = None) -> Tensor:
    """Return this rank's gradient of a tensor, placed as the tensor is; zero if there is none."""
    from torch.distributed.tensor import DTensor

    g = x.grad if g is None else g
    if g is None:
        return torch.zeros_like(local(x), device="cpu")
    if isinstance(x, DTensor) and isinstance(g, DTensor) and g.placements != x.placements:
        g = g.redistribute(x.device_mesh, x.placements)
    g = local(g)
    return (g.to_dense() if g.is_sparse else g).cpu().clone()


def _twice(
    total: Tensor, inputs: Sequence[Tensor], held: Sequence[Tensor], along: tuple[Sequence[Any], Sequence[Any]]
) -> tuple[list[Tensor], tuple[list[Tensor], list[Tensor]]]:
    """Return the gradients of the objective, and those of ⟨v, the gradients⟩."""
    of = {id(x): (x, v) for x, v in zip([*inputs, *held], [*along[0], *along[1]], strict=True) if x.requires_grad}
    leaves, directions = [x for x, _ in of.values()], [v for _, v in of.values()]
    # In this thread, also on an accelerator: all ranks then run the next backward in one order.
    with torch.autograd.set_multithreading_enabled(False):
        once = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True, materialize_grads=True)
    terms = [real_inner(v.to(g), g) for v, g in zip(directions, once, strict=True)]
    following = torch.stack(terms).sum()
    if following.requires_grad:
        torch.autograd.backward(following)  # which raises where a function is differentiable once only
    again = [x.grad for x in leaves]
    found = []
    for each in (once, again):
        by_id = dict(zip(map(id, leaves), each, strict=True))
        found.append([_gradient(x, by_id.get(id(x))) for x in [*inputs, *held]])
    return found[0], (found[1][: len(inputs)], found[1][len(inputs) :])


# ── the function ─────────────────────────────────────────────────────────────────────────────────────────


def called(
    fn: Callable[..., Any], module: nn.Module | None, part: Any, losses: Sequence[int] | None = None
) -> list[Tensor]:
    """Call the function on a part of the batch, and return the leaves of its result as tensors."""
    args, named = arguments_of(part)
    found = [whole_of(y) for y in _results(fn(*([] if module is None else [module]), *args, **named))]
    return [y[0] if y.shape == (1,) and (losses is None or i in losses) else y for i, y in enumerate(found)]


def arguments_of(part: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the positional and the keyword arguments that a part of the batch is."""
    if isinstance(part, (tuple, list)) and not hasattr(part, "_fields"):
        return part, {}
    return ((), part) if isinstance(part, dict) else ((part,), {})


def whole_of(y: Any) -> Tensor:
    """Return an output as an ordinary tensor: of a DTensor the whole one."""
    from torch.distributed.tensor import DTensor

    found: Tensor = y.full_tensor() if isinstance(y, DTensor) else y
    return found


def _results(y: Any) -> Iterator[Tensor]:
    """Yield what a function returned as tensors, numbers without gradient; None and words are no results."""
    for leaf in tree_flatten(y)[0]:
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, (bool, int, float, complex)):
            yield torch.tensor(leaf, dtype={float: torch.float64, complex: torch.complex128}.get(type(leaf)))
        elif isinstance(leaf, Mapping):  # such as an output of Transformers, which is a dataclass too
            yield from _results(list(leaf.values()))
        elif is_dataclass(leaf):
            yield from _results([getattr(leaf, part.name) for part in fields(leaf)])
        elif leaf is not None and not isinstance(leaf, str):
            got, expected = f"a function that returned {type(leaf).__name__}", "a loss, or a tree of tensors"
            raise TypeError(message(NAME, "distributed", got, expected))


def leaves_of(part: Any) -> list[Tensor]:
    """Return a new leaf tensor for each differentiable leaf of a tree."""
    return [leaf.detach().clone().requires_grad_() for leaf in tree_flatten(part)[0] if differentiable(leaf)]


def with_leaves(part: Any, inputs: Sequence[Tensor]) -> Any:
    """Return the tree with copies of these tensors as its differentiable leaves.

    The copies depend on the tensors, so the function may modify its arguments, and gets tensors that are not leaves, as
    between the layers of a model.
    """
    leaves, rebuild = tree_flatten(part)
    given = iter(inputs)
    held = [leaf.tensor.clone() if isinstance(leaf, Constant) else leaf for leaf in leaves]
    return rebuild([next(given).clone() if differentiable(leaf) else x for leaf, x in zip(leaves, held, strict=True)])


def objective(weights: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> Tensor:
    """Return Σ ⟨w, y⟩."""
    terms = [real_inner(w.to(y), y) for w, y in zip(weights, outputs, strict=True) if w is not None]
    return torch.stack([t.to(terms[0]) for t in terms]).sum() if terms else torch.zeros(())


class _Others:
    """The leaf tensors that the loss depends on, and that are neither inputs nor parameters of the module.

    Nothing would check their gradients. Those that the function has made itself are gone with the graph.
    """

    def __init__(self, total: Tensor, known: Sequence[Tensor]) -> None:
        ids = set(map(id, known))
        found = [leaf for leaf in leaves_of_graph(total) if id(leaf) not in ids] if total.requires_grad else []
        self._kept = [(weakref.ref(leaf), leaf.grad) for leaf in found]

    def refuse(self) -> None:
        """Raise if one is left, after giving it back its own gradient."""
        if all(ref() is None for ref, _ in self._kept):
            return
        gc.collect()  # what is in a cycle; it takes tenths of a second in a large program
        left = [(leaf, grad) for ref, grad in self._kept if (leaf := ref()) is not None]
        for leaf, grad in left:
            leaf.grad = grad
        if left:
            shapes = ", ".join(f"{type(leaf).__name__} of shape {tuple(leaf.shape)}" for leaf, _ in left)
            raise ValueError(
                f"module: the function uses a {shapes} that requires a gradient, expected only those of the module, "
                "since others are not checked; pass it by module=, or call requires_grad_(False)"
            )
