"""Finite differences of every rank's loss by every rank's tensors.

∂ℓ_s/∂x_r along a direction v of rank r's tensor x_r is measured by moving x_r alone and evaluating the function on all
ranks:

    D = (8 (ℓ(h) − ℓ(−h)) − (ℓ(2h) − ℓ(−2h))) / 12h        an error of order h⁴

At a kink the two sides differ: |ℓ(h) − 2ℓ(0) + ℓ(−h)| falls as h, not as h².
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffcoll.engines.process_state import seed_rank
from diffcoll.testing.cases import numbers, real_inner
from diffcoll.testing.harness.measure import MeasurementPlan, leaves_of, objective, started, with_leaves
from diffcoll.testing.harness.packing import Packed

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


def _loss(
    packed: Packed,
    plan: MeasurementPlan,
    rank: int,
    part: object,
    move: tuple[int, Tensor] | None,
) -> float:
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
