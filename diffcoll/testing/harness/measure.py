"""What the checks of gradients run on each rank: a copy of the user's function, its loss, and its gradients.

The objective of rank r is ℓ_r = Σ_i ⟨w_i, y_i⟩ over the outputs y_i of the function. A 0-d output is a loss: its weight
is 1, or, if there are several, a number that is the same on all ranks. An output with rows has random weights for each
row, so every rank has other cotangents.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from diffcoll.core.torch_private.autograd import leaves_of_graph
from diffcoll.core.trees import tree_flatten
from diffcoll.engines.simulated_moves import LostGradientWarning
from diffcoll.testing.harness.cuts import Cuts, Detaches, GraphCuts
from diffcoll.testing.harness.packing import Packed, Subject
from diffcoll.testing.launched import LAUNCHED, call
from diffcoll.testing.layouts import same
from diffcoll.testing.numbers import numbers, real_inner
from diffcoll.testing.simulate import simulate
from diffcoll.testing.spawn import spawn

T = TypeVar("T")
#: Streams of random numbers, see `numbers.numbers`: weights of the outputs, directions of second order.
WEIGHTS, DIRECTIONS = 1, 2


def run_on(kind: str, fn: Callable[..., Any], *per_rank: Sequence[Any], seed: int, timeout: float) -> list[Any]:
    """Run fn once per rank, on simulated ranks, on those that were launched, or on new processes with a backend."""
    if kind == LAUNCHED:
        return call(fn, list(zip(*per_rank, strict=True)), seed, timeout)
    if kind == "simulated":
        return simulate(partial(_without_warnings, fn), *per_rank, torch_distributed=True, seed=seed)
    return spawn(fn, *per_rank, backend=kind, timeout=timeout, seed=seed)


def _without_warnings(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Call fn without warnings of lost gradients, which the report names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LostGradientWarning)
        return fn(*arguments)


# ── one rank's measurement ───────────────────────────────────────────────────────────────────────────────


@dataclass
class Gradients:
    """Gradients of one scalar, in the order of the inputs and of the parameters."""

    inputs: list[Tensor]
    parameters: list[Tensor]

    @property
    def every(self) -> list[Tensor]:
        """All of them."""
        return self.inputs + self.parameters


@dataclass
class Measurement:
    """One rank's results."""

    outputs: list[Tensor]
    first: Gradients
    #: Gradients of h_r = ⟨v_r, first_r⟩, with directions v_r of this rank; None: not measured.
    second: Gradients | None
    #: `Subject.state` after the call: buffers, and parameters that it changed.
    state: dict[str, Tensor]
    #: Names of plain attributes of modules that the call changed.
    attributes: tuple[str, ...]
    #: Σ |g · x| of first order: how large the value's changes are, also where the value itself cancels out.
    scale: float


@dataclass(frozen=True)
class MeasurementPlan:
    """What is measured, the same on all ranks."""

    #: 1, or 2 with second order.
    order: int = 1
    seed: int = 0
    #: Factor of the weights of outputs with rows: N if gradients are to be averaged.
    scale: float = 1.0
    #: How far the tensors are moved along the directions of second order before anything is measured.
    move: float = 0.0
    #: Whether the last digits of the inputs and parameters are changed, to see how large rounding is.
    jitter: bool = False
    #: Lengths of these directions, for each input and parameter; (): 1.
    lengths: tuple[float, ...] = ()
    #: For one process with the rows of all ranks: the rows of each rank, for each output and each input.
    outputs: tuple[tuple[int, ...], ...] | None = None
    #: Whether all ranks return the same outputs, and weight them alike.
    alike: bool = False
    inputs: tuple[int, ...] | None = None

    def weights(self, rank: int, outputs: list[Tensor]) -> list[Tensor | None]:
        """Return the weight of each output in the objective; None for an output without gradient."""
        if self.outputs is not None:
            _check_outputs(self.outputs, outputs)
        losses = sum(y.dim() == 0 for y in outputs)
        found: list[Tensor | None] = []
        for i, y in enumerate(outputs):
            if not differentiable(y):
                found.append(None)
            elif y.dim() == 0:
                found.append(
                    torch.ones_like(y) if losses == 1 else numbers((), y.dtype, self.seed + i, 0, WEIGHTS).to(y.device)
                )
            else:
                counts = None if self.outputs is None else self.outputs[i]
                found.append(self.scale * self._rows(y, 0 if self.alike else rank, counts, self.seed + i, WEIGHTS))
        return found

    def directions(self, rank: int, first: Gradients) -> list[Tensor]:
        """Return the directions v_r, in the order of inputs and parameters; the same on all ranks for parameters."""
        inputs = [self._rows(g, rank, self.inputs, self.seed + i, DIRECTIONS) for i, g in enumerate(first.inputs)]
        more = [
            numbers(tuple(g.shape), g.dtype, self.seed - 1 - i, 0, DIRECTIONS).to(g.device)
            for i, g in enumerate(first.parameters)
        ]
        lengths = self.lengths or (1.0,) * len(inputs + more)
        return [length * v for length, v in zip(lengths, inputs + more, strict=True)]

    def _rows(self, like: Tensor, rank: int, counts: Sequence[int] | None, seed: int, stream: int) -> Tensor:
        """Return random numbers for the rows of one rank, or, with counts, for those of all ranks."""
        if counts is None:
            return numbers(tuple(like.shape), like.dtype, seed, rank, stream).to(like.device)
        rows = [numbers((k, *like.shape[1:]), like.dtype, seed, r, stream) for r, k in enumerate(counts)]
        return torch.cat(rows).to(like.device)


def _check_outputs(of_ranks: Sequence[Sequence[int]], outputs: Sequence[Tensor]) -> None:
    """Raise if one process returned other kinds of outputs than the ranks; −1 stands for a 0-d one."""
    if len(outputs) != len(of_ranks):
        raise ValueError(f"distributed returned {len(of_ranks)} outputs, single {len(outputs)}, expected equally many")
    if not any(map(differentiable, outputs)):
        raise ValueError("single returned no floating-point tensor, expected a loss or outputs with rows")
    for i, (rows, y) in enumerate(zip(of_ranks, outputs, strict=True)):
        got = "a 0-d loss" if max(rows) < 0 else f"{sum(rows)} rows"
        expected = f"{len(y)} rows" if y.dim() else "a 0-d loss"
        if min(rows) < 0 <= max(rows) or got != expected:
            hint = ""
            if y.dim() and set(rows) == {len(y)}:
                hint = "; if every rank returns the whole output, state it with mesh= and placements="
            raise ValueError(f"output {i}: distributed returned {got} on all ranks together, single {expected}{hint}")


@dataclass(frozen=True)
class Constant:
    """A tensor of the batch that gets no gradient, such as a mask."""

    tensor: Tensor


def differentiable(x: Any) -> bool:
    """Whether x is a tensor that can have a gradient."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


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


def on_rank(packed: Packed, plan: MeasurementPlan, rank: int, part: Any) -> Measurement:
    """Measure on this rank; all ranks run it."""
    subject = started(packed, plan, rank)
    with torch.inference_mode(False), torch.enable_grad():
        inputs, parameters = leaves_of(part), list(subject.parameters.values())
        if plan.move:
            with torch.no_grad():
                at = Gradients(inputs, parameters)
                for x, v in zip(inputs + parameters, plan.directions(rank, at), strict=True):
                    x += plan.move * v
        if plan.jitter:
            with torch.no_grad():
                for x in inputs + parameters:
                    x += torch.finfo(x.dtype).eps * x * numbers(tuple(x.shape), x.dtype, 0, 0, 0).to(x.device)
        before = (packed.unpack() if packed.before else subject).state
        held = {name: x.clone() for name, x in subject.attributes.items()}
        outputs = subject.call(with_leaves(part, inputs))
        total = objective(plan.weights(rank, outputs), outputs)
        others = _Others(total, inputs + parameters)
        first = _gradients(total, inputs, parameters, create_graph=plan.order > 1)
        second = None
        if plan.order > 1:
            following = objective(plan.directions(rank, first), first.every)
            second = _gradients(following, inputs, parameters)
            del following
    state = {name: x for name, x in subject.state.items() if name.startswith("buffer") or differs(x, before.get(name))}
    changed = tuple(name for name, x in subject.attributes.items() if differs(x, held.get(name)))
    outputs = [y.detach().cpu() for y in outputs]
    first, second = _detached(first), second and _detached(second)
    del total
    others.refuse()
    xs = [x.detach().cpu() for x in inputs + parameters]
    scale = sum(float((g * x).abs().sum()) for g, x in zip(first.every, xs, strict=True))
    return Measurement(outputs, first, second, state, changed, scale)


def started(packed: Packed, plan: MeasurementPlan, rank: int) -> Subject:
    """Return a new copy after the steps that come before, each with its backward; all ranks run it."""
    subject = packed.unpack()
    parameters = list(subject.parameters.values())
    for part in packed.before:
        with torch.inference_mode(False), torch.enable_grad():
            inputs = leaves_of(part)
            outputs = subject.call(with_leaves(part, inputs))
            total = objective(plan.weights(rank, outputs), outputs)
            others = _Others(total, inputs + parameters)
            _gradients(total, inputs, parameters)
        del total, outputs
        others.refuse()
        for p in parameters:
            p.grad = None
    return subject


def differs(x: Tensor, y: Tensor | None) -> bool:
    """Whether two tensors have other numbers; NaNs are equal."""
    return y is None or x.dtype != y.dtype or not same(x, y)


class _Others:
    """The leaf tensors that the loss depends on, and that are neither inputs nor parameters of the module.

    Nothing would check their gradients. Those that the function has made itself are gone with the graph.
    """

    def __init__(self, total: Tensor, known: Sequence[Tensor]) -> None:
        ids = set(map(id, known))
        found = [leaf for leaf in leaves_of_graph(total) if id(leaf) not in ids]
        self._kept = [(weakref.ref(leaf), leaf.grad) for leaf in found]
        for leaf in found:
            leaf.grad = None

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
                f"module: the function uses a {shapes} that requires a gradient, expected only those of the module or "
                "list that module= names, since others are not checked; pass it by module=, in a closure and not as a "
                "global of another module, or call requires_grad_(False)"
            )


def objective(weights: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> Tensor:
    """Return Σ ⟨w, y⟩, in the precision of the outputs."""
    terms = [real_inner(w, y) for w, y in zip(weights, outputs, strict=True) if w is not None]
    return torch.stack([t.to(terms[0]) for t in terms]).sum() if terms else torch.zeros(())


def _gradients(total: Tensor, inputs: list[Tensor], parameters: list[Tensor], create_graph: bool = False) -> Gradients:
    """Return the gradients by the inputs and the parameters, zero where the objective does not depend on one."""
    leaves = inputs + parameters
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if total.requires_grad:
        if create_graph:
            # In this thread, also on an accelerator: all ranks then run the next backward in one order.
            with torch.autograd.set_multithreading_enabled(False):
                found = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        else:  # as users call it: hooks run, and checkpoints of either kind work
            for leaf in leaves:
                leaf.grad = None
            torch.autograd.backward(total)
            found = [leaf.grad for leaf in leaves]
    dense = [
        torch.zeros_like(x) if g is None else g.to_dense() if g.is_sparse else g
        for x, g in zip(leaves, found, strict=True)
    ]
    return Gradients(dense[: len(inputs)], dense[len(inputs) :])


def _detached(gradients: Gradients) -> Gradients:
    return Gradients([g.detach().cpu() for g in gradients.inputs], [g.detach().cpu() for g in gradients.parameters])


def cuts_on_rank(packed: Packed, part: Any) -> Cuts:
    """Run the forward on this rank, and return its graph cuts."""
    subject = started(packed, MeasurementPlan(), 0)
    with torch.inference_mode(False), torch.enable_grad(), GraphCuts() as cuts:
        subject.call(with_leaves(part, leaves_of(part)))
    return cuts.found


def undetached(measure: Callable[..., T], *arguments: Any) -> T:
    """Measure on this rank, where the user's calls of `detach()` keep the graph."""
    with Detaches():
        return measure(*arguments)


def outputs_on_rank(packed: Packed, part: Any) -> list[Tensor]:
    """Run the forward on this rank."""
    subject = started(packed, MeasurementPlan(), 0)
    with torch.inference_mode(False), torch.enable_grad():
        return [y.detach().cpu() for y in subject.call(with_leaves(part, leaves_of(part)))]
