"""Finite differences of every rank's loss by every rank's tensors, and what mistakes they confirm.

∂ℓ_s/∂x_r along a direction v of rank r's tensor x_r is measured by moving x_r alone and evaluating the function on all
ranks:

    D = (8 (ℓ(h) − ℓ(−h)) − (ℓ(2h) − ℓ(−2h))) / 12h        an error of order h⁴

At a kink the two sides differ: |ℓ(h) − 2ℓ(0) + ℓ(−h)| falls as h, not as h².

What common mistakes give, with D[s, r], the derivative of rank s's loss by rank r's tensor, each up to a factor:

    right                      g_r = Σ_s D[s, r]
    not reduced, local slice   g_r = D[r, r]
    the loss of rank q lost    g_r = Σ_{s≠q} D[s, r]
    ranks swapped              g_r = Σ_s D[s, π(r)]
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diffcoll.engines.process_state import seed_rank
from diffcoll.testing.harness.causes import Kind
from diffcoll.testing.harness.comparison import is_near, multiple
from diffcoll.testing.harness.measure import MeasurementPlan, leaves_of, objective, started, with_leaves
from diffcoll.testing.harness.packing import Packed
from diffcoll.testing.harness.report import ratio_in_words
from diffcoll.testing.numbers import numbers, real_inner

#: Distances in steps at which the losses are evaluated, after the point itself.
STEPS = (1, -1, 2, -2)


@dataclass(frozen=True)
class Direction:
    """A direction of one rank's tensor."""

    rank: int
    #: The tensor's index among the rank's inputs, followed by its parameters.
    leaf: int
    #: An element of the tensor (and for complex numbers 1 or 1j), or the number of a random direction.
    element: int | None
    unit: complex = 1.0
    number: int = 0
    #: Whether the tensors of all ranks are one variable, and are moved together.
    together: bool = False

    def vector(self, x: Tensor) -> Tensor:
        """Return the direction; its largest component is 1. The same on ranks whose tensors have the same shape."""
        if self.element is None:
            v = numbers(tuple(x.shape), x.dtype, self.number, 0, 7 + self.leaf)
            return v / v.abs().max().clamp(min=1e-30)
        v = torch.zeros_like(x, memory_format=torch.contiguous_format)
        v.view(-1)[self.element] = torch.tensor(self.unit).to(v.dtype) if x.is_complex() else 1.0
        return v


@dataclass(frozen=True)
class Difference:
    """The derivatives of all ranks' losses along one direction."""

    direction: Direction
    #: ∂ℓ_s/∂v for each rank s.
    partials: Tensor
    #: Estimated errors of their sum, of the finite step and of rounding.
    error: float
    rounding: float
    #: Whether the sum of the losses has a kink here.
    kink: bool

    @property
    def uncertainty(self) -> float:
        """How far their sum may be from the derivative."""
        return 0.1 * self.error + self.rounding

    @property
    def total(self) -> float:
        """∂(Σ_s ℓ_s)/∂v."""
        return float(self.partials.sum())


def directions(
    leaves: Sequence[Sequence[Tensor]], few: int, random: int, shared: Collection[int] = ()
) -> list[Direction]:
    """Return directions for all ranks' tensors: each element if they are few in all, else random directions.

    Those with a shared index are one variable of all ranks, and have directions once, as of rank 0.
    """
    every = sum(x.numel() * (1 + x.is_complex()) for xs in leaves for x in xs) <= few
    found: list[Direction] = []
    for rank, xs in enumerate(leaves):
        for leaf, x in enumerate(xs):
            if rank > 0 and leaf in shared:
                continue
            if every:
                units = (1.0, 1j) if x.is_complex() else (1.0,)
                found += [
                    Direction(rank, leaf, e, unit, together=leaf in shared) for e in range(x.numel()) for unit in units
                ]
            elif x.numel():
                found += [Direction(rank, leaf, None, number=k, together=leaf in shared) for k in range(random)]
    return found


def along(gradient: Tensor, direction: Direction) -> float:
    """Return the derivative that a gradient gives along a direction."""
    return float(real_inner(direction.vector(gradient).to(gradient.dtype), gradient))


def central(values: Sequence[Any], h: float) -> Any:
    """Return the derivative from the values at h, −h, 2h and −2h."""
    plus, minus, plus2, minus2 = values
    return (8 * (plus - minus) - (plus2 - minus2)) / (12 * h)


def step(dtype: torch.dtype) -> float:
    """Return the step h relative to the largest element, for numbers of this precision."""
    return 1e-4 if dtype in (torch.float64, torch.complex128) else 2e-2


def losses_along(
    packed: Packed, plan: MeasurementPlan, each: Sequence[Direction], rank: int, part: object, scale: float = 1.0
) -> list[float]:
    """Evaluate this rank's loss at the point itself, and at each step along each direction; all ranks run it.

    The steps are multiplied by the scale.
    """
    points = leaves_of(part) + list(packed.unpack().parameters.values())
    found = [_loss(packed, plan, rank, part, None)]
    for direction in each:
        mine = points[direction.leaf] if direction.together or direction.rank == rank else None
        for k in STEPS:
            move = None
            if mine is not None:
                move = direction.leaf, scale * k * size(mine) * direction.vector(mine.detach())
            found.append(_loss(packed, plan, rank, part, move))
    return found


def size(x: Tensor) -> float:
    """Return the step for a tensor."""
    largest = float(x.detach().abs().max()) if x.numel() else 0.0
    return step(x.dtype) * (largest or 1.0)


def _loss(packed: Packed, plan: MeasurementPlan, rank: int, part: object, move: tuple[int, Tensor] | None) -> float:
    """Evaluate the objective of this rank, with one of its tensors moved, on a new copy of a function with state."""
    seed_rank(plan.seed, rank)
    subject = started(packed, plan, rank)
    with torch.inference_mode(False), torch.enable_grad():
        inputs = leaves_of(part)
        if move is not None:
            with torch.no_grad():
                [*inputs, *subject.parameters.values()][move[0]] += move[1]
        outputs = subject.call(with_leaves(part, inputs))
        return float(objective(plan.weights(rank, outputs), outputs).detach())


def partials(each: Sequence[Direction], losses: Sequence[Sequence[float]], steps: Sequence[float]) -> list[Difference]:
    """Return the derivatives along each direction from all ranks' `losses_along` with these steps."""
    table = torch.tensor(losses, dtype=torch.float64)  # [rank, evaluation]
    zero = table[:, 0]
    found = []
    for i, (direction, h) in enumerate(zip(each, steps, strict=True)):
        plus, minus, plus2, minus2 = (table[:, 1 + 4 * i + k] for k in range(4))
        second = (plus - minus) / (2 * h)
        fourth = central((plus, minus, plus2, minus2), h)
        bend, bend2 = (float((p - 2 * zero + m).sum().abs()) for p, m in ((plus, minus), (plus2, minus2)))
        slope, noise = float(fourth.sum().abs()), 1e-14 * float(zero.abs().sum())
        kink = bend > 0.02 * h * max(slope, 1e-3) + noise and bend2 < 3 * bend
        found.append(Difference(direction, fourth, float((second - fourth).sum().abs()), noise / h, kink))
    return found


# ── evidence ─────────────────────────────────────────────────────────────────────────────────────────────

#: Relative error at which a finite difference confirms a cause.
_SURE = {torch.float64: 1e-5, torch.complex128: 1e-5}


@dataclass
class Evidence:
    """Finite differences of the losses, and the gradients that backward gave, for one run."""

    sizes: tuple[int, ...]
    #: Names of the leaves of a rank: inputs, then parameters.
    names: list[str]
    #: Each rank's gradients, in the order of the names.
    gradients: list[list[Tensor]]
    differences: list[Difference]
    #: Names of the collectives that ran in the forward.
    seen: Sequence[str] = ()

    def cause(self, name: str) -> tuple[Kind, str] | None:
        """Return the name of the cause that explains the gradient of this leaf, and words for what was seen."""
        each = [d for d in self.differences if self.names[d.direction.leaf] == name and not d.kink]
        if not each:
            return None
        n = len(self.sizes)
        leaf = each[0].direction.leaf
        dtype = self.gradients[0][leaf].dtype
        got = torch.tensor([along(self.gradients[d.direction.rank][leaf], d.direction) for d in each]).double()
        sure = _SURE.get(dtype, 3e-2)

        def explains(predicted: Iterable[float]) -> float | None:
            return multiple(got, torch.tensor(list(predicted)).double(), sure / 10)

        ratio = explains(d.total for d in each)
        if ratio is not None:
            return (
                Kind.CONSISTENT,
                f"it is {ratio_in_words(ratio, n)} times the derivative of the losses that the ranks return",
            )
        ratio = explains(float(d.partials[d.direction.rank]) for d in each)
        if ratio is not None:
            of_one = "it is the derivative of the rank's own loss alone"
            return (Kind.LOCAL_SLICE if any("gather" in s for s in self.seen) else Kind.NOT_REDUCED), of_one + _times(
                ratio, n
            )
        for q in range(n):
            ratio = explains(d.total - float(d.partials[q]) for d in each)
            if ratio is not None:
                return Kind.RANK_MISSING, f"it lacks the loss of rank {q}{_times(ratio, n)}"
        return self._swapped(each, leaf, sure)

    def _swapped(self, each: Sequence[Difference], leaf: int, sure: float) -> tuple[Kind, str] | None:
        """Whether ranks have each other's gradients, or each other's parts of them from other ranks' losses."""
        n = len(self.sizes)
        if n == 1 or n > 6 or len({tuple(g[leaf].shape) for g in self.gradients}) > 1:
            return None
        of = [[d for d in each if d.direction.rank == r] for r in range(n)]
        if len({tuple(replace(d.direction, rank=0) for d in ds) for ds in of}) > 1:
            return None
        got = torch.tensor([[along(self.gradients[r][leaf], d.direction) for d in of[r]] for r in range(n)]).double()
        total = torch.tensor([[d.total for d in ds] for ds in of]).double()
        own = torch.tensor([[float(d.partials[r]) for d in of[r]] for r in range(n)]).double()
        ratio = multiple(got, total.mean(0).expand_as(got), sure / 10)
        for right, word in ((1.0, "mean"), (float(n), "sum")):
            if is_near(ratio, right):
                return Kind.AVERAGED, f"it is the {word} of all ranks' gradients on every rank"
        powers = (1.0, float(n), 1.0 / n)
        hypotheses: list[tuple[Tensor, Tensor, str, tuple[float, ...]]] = [(got, total, "", powers)]
        # If one rank alone has such a part, as in a broadcast, another may have this number for other reasons: an
        # identity as the backward of two ranks' broadcast.
        if int((total - own).abs().amax(1).gt(sure * total.abs().max()).sum()) > 1:
            hypotheses.append((got - own, total - own, "of the part that comes from other ranks' losses, ", powers[:1]))
        for a, b, part, known in hypotheses:
            ratios = {order: multiple(a[list(order)], b, sure / 10) for order in itertools.permutations(range(n))}
            found = [(order, ratio) for order, ratio in ratios.items() if any(is_near(ratio, x) for x in known)]
            if len(found) == 1 and found[0][0] != tuple(range(n)):  # else they are equal, and do not say whose they are
                ((order, ratio),) = found
                where = ", ".join(f"rank {q} has that of rank {r}" for r, q in enumerate(order) if r != q)
                return Kind.RANKS_SWAPPED, part + where + _times(ratio or 0.0, n)
        return None


def _times(ratio: float, n: int) -> str:
    return "" if is_near(ratio, 1.0) else f", times {ratio_in_words(ratio, n)}"
