"""Compares the gradients of every rank with finite differences of all ranks' losses by every rank's tensors.

∂ℓ_s/∂x_r along a direction v of rank r's tensor x_r is measured by moving x_r alone and evaluating the function on all
ranks:

    D = (8 (ℓ(h) − ℓ(−h)) − (ℓ(2h) − ℓ(−2h))) / 12h        an error of order h⁴

At a kink the two sides differ: |ℓ(h) − 2ℓ(0) + ℓ(−h)| falls as h, not as h².
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffcoll.core.errors import message
from diffcoll.testing.harness.batch import Batch, refuse_equal, refuse_unmoved
from diffcoll.testing.harness.compare import SMALL, Piece, Quantity
from diffcoll.testing.harness.layout import Placement, parsed_placements, partial_axes, refuse_unknown, said_of
from diffcoll.testing.harness.matching import Check, Run
from diffcoll.testing.harness.mesh import RANKS, Ranks
from diffcoll.testing.harness.packing import Packed
from diffcoll.testing.harness.rank import DIRECTIONS, STEPS, Machines, Measured, Moved, Task, leaves_of, losses_along
from diffcoll.testing.numbers import largest, near, numbers, real_inner

_NAME = "check_gradients"
#: All numbers are moved one by one if the ranks have at most this many in all; else along random directions.
_FEW = 64
#: Steps of finite differences, relative to the largest number; the following ones where there seems to be a kink.
_STEP, _SCALES = 1e-4, (1.0, 1 / 16, 1 / 256)
#: A finite difference is taken again with smaller steps if its relative error may be larger.
_DOUBTFUL = 1e-4
#: The relative errors of a finite difference, and of one of second order, that are right.
_TOLERANCE, _SECOND = 1e-6, 1e-5
#: Gradients are not compared with finite differences whose relative error may be larger.
_PRECISE = 1e-2
#: A derivative smaller than this part of the largest one is compared with that part.
_LEAST = 1e-6
_LIMIT = "a tensor that is detached on purpose, such as a target, looks like a lost gradient to finite differences"


class Direction(NamedTuple):
    """A direction of one rank's tensor, or of one variable that all ranks have."""

    rank: int
    #: The tensor's number among the rank's inputs, followed by those of its module.
    leaf: int
    #: The largest component is 1.
    vector: Tensor
    step: float

    def along(self, gradient: Tensor) -> float:
        """Return the derivative that a gradient gives."""
        return float(real_inner(self.vector.to(gradient.dtype), gradient))


class Difference(NamedTuple):
    """The derivatives of all ranks' losses along one direction."""

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

    def allowed(self, unit: float) -> float:
        """The error of a right gradient: rounding and the finite step. At a kink nothing is right."""
        return -1.0 if self.kink else _TOLERANCE + self.uncertainty / unit


def _central(values: Sequence[Any], h: float) -> Any:
    plus, minus, plus2, minus2 = values
    return (8 * (plus - minus) - (plus2 - minus2)) / (12 * h)


def differences(
    each: Sequence[Measured], losses: Sequence[Sequence[float]], steps: Sequence[float], count: int = 1
) -> list[Difference]:
    """Return the derivatives along each direction from all ranks' `losses_along`, of which `count` are the same."""
    zero, table = (torch.tensor(x, dtype=torch.float64) / count for x in ([m.loss for m in each], losses))
    found = []
    for i, h in enumerate(steps):
        plus, minus, plus2, minus2 = table[:, 4 * i : 4 * i + 4].unbind(1)  # of each rank
        second, fourth = (plus - minus) / (2 * h), _central((plus, minus, plus2, minus2), h)
        bend, bend2 = (float((p - 2 * zero + m).sum().abs()) for p, m in ((plus, minus), (plus2, minus2)))
        slope, noise = float(fourth.sum().abs()), 1e-14 * float(zero.abs().sum())
        kink = bend > 0.02 * h * max(slope, 1e-3) + noise and bend2 < 3 * bend
        found.append(Difference(fourth, float((second - fourth).sum().abs()), noise / h, kink))
    return found


def _surest(tried: Sequence[Difference]) -> Difference:
    """Return the surest of the differences along one direction. Rounding hides a kink from a small step."""
    most = max(abs(d.total) for d in tried)
    return min(tried, key=lambda d: (d.kink or d.rounding > 0.1 * most, d.uncertainty))


class Checking(Check):
    """A function of each rank's tensors whose gradients are checked."""

    name, notes_on_cuts = _NAME, (_LIMIT,)

    def __init__(
        self, machines: Machines, packed: Packed, per_rank: Sequence[Any], placements: object, order: int
    ) -> None:
        super().__init__(machines, packed)
        batches = [Batch(self.subject, tuple(each), torch.double, _NAME) for each in per_rank]
        self.ranks, inputs = Ranks({RANKS: len(per_rank)}), batches[0].variables
        for r, batch in enumerate(batches):
            if batch.variables != inputs:
                got = f"tensors {batch.variables} on rank {r}, {inputs} on rank 0"
                raise ValueError(message(_NAME, "per_rank", got, "the same tensors on every rank"))
        #: A rank's inputs, followed by the tensors of its module, by number.
        self._spans = self.spans(batches[0])
        self._checked = {leaf: span.name for leaf, span in enumerate(self._spans) if span.trained}
        if not self._checked:
            raise ValueError(message(_NAME, "per_rank", "no floating-point tensor", "at least one, or a module"))
        self._said = self._parsed(placements, batches)
        own = [{k: x.detach() for k, x in batch.tensors.items() if k not in self._said} for batch in batches]
        refuse_equal(_NAME, "per_rank", dict(enumerate(own)))
        if self._said and order != 1:
            raise ValueError(message(_NAME, "order", f"{order} with placements=", "1"))
        self._once = "output" in self._said
        self._tasks = [Task(self.ranks, b.part(None), stream=0 if self._once else r) for r, b in enumerate(batches)]
        #: The tensors of each rank.
        module = [span.tensor.detach() for span in self.of_module]
        self._leaves = [leaves_of(task.part) + module for task in self._tasks]
        if order > 1:
            self._tasks = [replace(task, directions=self._of_second_order(r)) for r, task in enumerate(self._tasks)]

    def _parsed(self, placements: object, batches: Sequence[Batch]) -> dict[str, Placement]:
        """Return the placements of what all ranks share, by name."""
        from torch.distributed.tensor import Partial, Replicate

        if isinstance(placements, Mapping):
            placements = {key: {RANKS: said} for key, said in placements.items()}
        by_axis = parsed_placements(_NAME, placements, [RANKS])
        known = [*self._checked.values(), "output"]
        for key, said in by_axis.items():
            if not isinstance(said[RANKS], Replicate if key == "output" else (Replicate, Partial)):
                raise TypeError(message(_NAME, f"placements[{key!r}]", repr(said[RANKS]), "Replicate() or Partial()"))
        refuse_unknown(_NAME, by_axis, known)
        found = {name: said for name in known if (said := said_of(by_axis, name)) is not None}
        for name in found.keys() & set(batches[0].variables):
            if any(not near(batch.tensors[name], batches[0].tensors[name]) for batch in batches):
                got, expected = "other numbers on some ranks", "one variable, the same on all ranks"
                raise ValueError(message(_NAME, f"placements[{name!r}]", got, expected))
        return found

    def run(self, on: str, ranks: Ranks) -> Run:
        """Measure on the ranks, also their losses along directions, and compare."""
        each = self.on_ranks(on, self._tasks)
        self._moved = moved = self._along_directions(on, each)
        self._refuse_nothing(each, moved)
        compared = partial(self._first_order, moved)
        found = [*self._outputs(each), *compared(each)]
        self._refuse_imprecise(found)
        if any(task.directions for task in self._tasks):
            found += self._second_order(on, each)
        return Run(on, ranks, self._tasks, each, found, compared, own_losses=not self._once)

    def depends(self, run: Run, q: Quantity) -> bool:
        """By the differences that were measured."""
        of_tensor = ((v, d) for v, d in self._moved if q.what == f"gradient of {self._checked[v.leaf]}")
        return any(d.partials[r] for v, d in of_tensor for r in range(self.ranks.size) if r != v.rank)

    # ── what is measured ──

    def _of_second_order(self, r: int) -> dict[int, Tensor]:
        """Return directions of a rank's tensors that are as long as the tensors."""
        found = {}
        for leaf in self._checked:
            x, length = self._leaves[r][leaf], largest(*(mine[leaf] for mine in self._leaves))
            length = max(length, 1e-5) if length else 1.0
            found[leaf] = length * numbers(tuple(x.shape), x.dtype, leaf, r, DIRECTIONS)
        return found

    def _along_directions(self, on: str, each: Sequence[Measured]) -> list[tuple[Direction, Difference]]:
        """Return derivatives; with smaller steps where there seems to be a kink, since fn may vary fast."""
        directions, n = list(self._directions()), self.ranks.size
        tried: list[list[Difference]] = [[] for _ in directions]
        again = list(range(len(directions)))
        for scale in _SCALES:
            moved = [(d, scale * d.step) for d in map(directions.__getitem__, again)]
            steps = [h for _, h in moved]
            per_rank = [
                [{d.leaf: h * d.vector} if d.rank == r or self._checked[d.leaf] in self._said else {} for d, h in moved]
                for r in range(n)
            ]
            losses = self.on_ranks(on, self._tasks, losses_along, per_rank, range(n))
            # A loss that all ranks have counts once.
            for k, found in zip(again, differences(each, losses, steps, n if self._once else 1), strict=True):
                tried[k].append(found)
            best = list(map(_surest, tried))
            floor = _DOUBTFUL * SMALL * max((abs(d.total) for d in best), default=0.0)
            doubtful = [d.kink or d.uncertainty > max(_DOUBTFUL * abs(d.total), floor) for d in best]
            again = [k for k, doubt in enumerate(doubtful) if doubt]
            if not again:
                break
        self._refuse_fast([tried[k] for k in again], floor)
        return list(zip(directions, best, strict=True))

    def _refuse_fast(self, doubtful: Sequence[Sequence[Difference]], floor: float) -> None:
        """Raise if the differences at the two smallest scales disagree. At a kink they agree, or rounding hides it."""
        for *_, a, b in doubtful:
            rounding = 10 * (a.rounding + b.rounding) + floor
            if abs(a.total - b.total) > _PRECISE * max(abs(a.total), abs(b.total)) + rounding:
                got, remedy = "a loss that varies too fast: its differences at two scales disagree", "scale its inputs"
                raise ValueError(message(_NAME, "fn", got, "a loss that is smooth at 1e-6 of its inputs", remedy))

    def _directions(self) -> Iterator[Direction]:
        """Yield directions for all ranks' tensors: each number if they are few in all, else random directions."""
        named = [(r, leaf, xs[leaf]) for r, xs in enumerate(self._leaves) for leaf in self._checked]
        every = sum(x.numel() * (1 + x.is_complex()) for _, _, x in named) <= _FEW
        for r, leaf, x in named:
            if (self._checked[leaf] in self._said and r > 0) or not x.numel():
                continue
            if every:
                each = list(torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape))
                each += [1j * v for v in each if x.is_complex()]
            else:  # the same on ranks whose tensors have the same shape
                count = 2 if len(self._spans) < 20 else 1
                each = [numbers(tuple(x.shape), x.dtype, k, 0, 7 + leaf) for k in range(count)]
            for v in each:
                yield Direction(r, leaf, v / v.abs().max().clamp(min=1e-30), _STEP * (largest(x) or 1.0))

    # ── what is compared ──

    def _outputs(self, each: Sequence[Measured]) -> Iterator[Quantity]:
        """Compare the outputs of the ranks, if they should be the same."""
        for i, of_ranks in enumerate(zip(*(m.outputs for m in each if self._once), strict=True)):
            index = torch.arange(of_ranks[0].numel())
            pieces, what = [[Piece(index, y)] for y in of_ranks], f"output{each[0].paths[i]}"
            yield Quantity(what, "output", of_ranks[0], pieces, self.ranks, largest(of_ranks[0]), _TOLERANCE)

    def _first_order(self, moved: Sequence[tuple[Direction, Difference]], each: Sequence[Measured]) -> list[Quantity]:
        """Compare each tensor of each rank along its directions."""
        found = []
        most = max((abs(d.total) for _, d in moved), default=0.0)
        for leaf, name in self._checked.items():
            held = [(v, d) for v, d in moved if v.leaf == leaf]
            if not held:
                continue
            wanted = torch.tensor([d.total for _, d in held], dtype=torch.double)
            unit = max(largest(wanted), _LEAST * most) or 1.0
            allowed = torch.tensor([d.allowed(unit) for _, d in held], dtype=torch.double)
            pieces = []
            for r, m in enumerate(each):
                mine = [k for k, (v, _) in enumerate(held) if v.rank == r or name in self._said]
                got = torch.tensor([held[k][0].along(m.gradients[leaf]) for k in mine], dtype=torch.double)
                pieces.append([Piece(torch.tensor(mine), got)] if mine else [])
            what, axes = f"gradient of {name}", partial_axes(self._said.get(name), self.ranks)
            found.append(Quantity(what, "gradient", wanted, pieces, self.ranks, unit, allowed, axes))
        return found

    def _second_order(self, on: str, each: Sequence[Measured]) -> Iterator[Quantity]:
        """Compare the Hessian-vector products with finite differences of the gradients."""
        steps = [[Moved(task.directions, k * _STEP) for task in self._tasks] for k in STEPS]
        tasks = [[replace(t, directions={}, experiment=m) for t, m in zip(self._tasks, s, strict=True)] for s in steps]
        moved = [self.on_ranks(on, each) for each in tasks]
        wanted = {
            leaf: [_central([ranks[r].gradients[leaf] for ranks in moved], _STEP) for r in range(self.ranks.size)]
            for leaf in self._checked
        }
        most = largest(*itertools.chain(*wanted.values()))
        for leaf, of_ranks in wanted.items():
            whole = torch.cat([w.flatten() for w in of_ranks])
            index = torch.split_with_sizes(torch.arange(len(whole)), [w.numel() for w in of_ranks])
            pieces = [[Piece(i, m.second[leaf].flatten())] for m, i in zip(each, index, strict=True)]
            what, unit = f"second order of {self._checked[leaf]}", max(largest(whole), SMALL * most)
            yield Quantity(what, "second order", whole, pieces, self.ranks, unit, _SECOND)

    def _refuse_nothing(self, each: Sequence[Measured], moved: Sequence[tuple[Direction, Difference]]) -> None:
        """Raise if the losses are no numbers, or depend on no tensor, or on no parameter of the module."""
        if bad := [r for r, m in enumerate(each) if not math.isfinite(m.loss)]:
            got = f"NaN or infinity in the results of rank {', '.join(map(str, bad))}"
            raise ValueError(message(_NAME, "fn", got, "a finite loss", "choose other data"))
        moving = {v.leaf for v, d in moved if d.partials.any()}
        moving |= {i for m in each for i, g in enumerate(m.gradients) if g.any()}
        refuse_unmoved(_NAME, "fn", self._spans, [leaf in moving for leaf in range(len(self._spans))])

    def _refuse_imprecise(self, found: Sequence[Quantity]) -> None:
        """Raise if rounding hides derivatives."""
        hidden = [q.what for q in found if q.ok and (q.most_allowed or 0.0) > _PRECISE]
        if hidden:
            got = f"a loss that is too large, or varies too fast, for finite differences of the {', '.join(hidden)}"
            remedy = "subtract constants, or use assert_matches_single_process"
            raise ValueError(message(_NAME, "fn", got, "differences that rounding does not hide", remedy))
