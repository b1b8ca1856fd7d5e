"""Compares the gradients of every rank with finite differences of all ranks' losses by every rank's tensors.

∂ℓ_s/∂x_r along a direction v of rank r's tensor x_r is measured by moving x_r alone and evaluating the function on all
ranks:

    D = (8 (ℓ(h) − ℓ(−h)) − (ℓ(2h) − ℓ(−2h))) / 12h        an error of order h⁴

At a kink the two sides differ: |ℓ(h) − 2ℓ(0) + ℓ(−h)| falls as h, not as h².
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffcoll.core.errors import message
from diffcoll.testing.harness.batch import Batch, refuse_equal
from diffcoll.testing.harness.compare import SMALL, Piece, Quantity, multiple
from diffcoll.testing.harness.cuts import of_all_ranks
from diffcoll.testing.harness.layout import (
    RANKS,
    Placement,
    Ranks,
    parsed_placements,
    partial_axes,
    refuse_unknown,
    said_of,
    spans,
)
from diffcoll.testing.harness.packing import Packed
from diffcoll.testing.harness.rank import DIRECTIONS, STEPS, Machines, Measured, Task, leaves_of, losses_along, measured
from diffcoll.testing.harness.report import Report, Table, ratio_in_words, title_of, together
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


class Checking:
    """A function of each rank's tensors whose gradients are checked."""

    def __init__(
        self, machines: Machines, packed: Packed, per_rank: Sequence[Any], placements: object, order: int
    ) -> None:
        self._machines, self._packed, self._order, self._kind = machines, packed, order, "simulated"
        subject = packed.unpack()
        skip = int(subject.module is not None)
        batches = [Batch(subject.fn, tuple(each), skip, torch.double, _NAME) for each in per_rank]
        self._ranks, self._inputs = Ranks({RANKS: len(per_rank)}), batches[0].variables
        for r, batch in enumerate(batches):
            if batch.variables != self._inputs:
                got = f"tensors {batch.variables} on rank {r}, {self._inputs} on rank 0"
                raise ValueError(message(_NAME, "per_rank", got, "the same tensors on every rank"))
        module = [] if subject.module is None else spans(subject.module)
        #: The names of a rank's inputs, followed by those of its module; "": not checked.
        self._names = [*self._inputs, *(span.name if span.trained else "" for span in module)]
        if not any(self._names):
            raise ValueError(message(_NAME, "per_rank", "no floating-point tensor", "at least one, or a module"))
        self._said = self._parsed(placements, batches)
        own = [{k: x.detach() for k, x in batch.tensors.items() if k not in self._said} for batch in batches]
        refuse_equal(_NAME, "per_rank", dict(enumerate(own)))
        if self._said and order != 1:
            raise ValueError(message(_NAME, "order", f"{order} with placements=", "1"))
        self._once = "output" in self._said
        self._tasks = [Task(self._ranks, b.part(), stream=0 if self._once else r) for r, b in enumerate(batches)]
        #: The tensors of each rank, in the order of the names.
        self._leaves = [leaves_of(task.part) + [span.tensor.detach() for span in module] for task in self._tasks]

    def _parsed(self, placements: object, batches: Sequence[Batch]) -> dict[str, Placement]:
        """Return the placements of what all ranks share, by name."""
        from torch.distributed.tensor import Partial, Replicate

        if isinstance(placements, Mapping):
            placements = {key: {RANKS: said} for key, said in placements.items()}
        by_axis = parsed_placements(_NAME, placements, [RANKS])
        known = [*filter(None, self._names), "output"]
        for key, said in by_axis.items():
            if not isinstance(said[RANKS], Replicate if key == "output" else (Replicate, Partial)):
                raise TypeError(message(_NAME, f"placements[{key!r}]", repr(said[RANKS]), "Replicate() or Partial()"))
        refuse_unknown(_NAME, by_axis, known)
        found = {name: said for name in known if (said := said_of(by_axis, name)) is not None}
        for name in found.keys() & set(self._inputs):
            if any(not near(batch.tensors[name], batches[0].tensors[name]) for batch in batches):
                got, expected = "other numbers on some ranks", "one variable, the same on all ranks"
                raise ValueError(message(_NAME, f"placements[{name!r}]", got, expected))
        return found

    def report(self, on: Sequence[str]) -> Report:
        """Check on each kind of ranks, until one is wrong."""
        report, n = Report(_NAME, ()), self._ranks.size
        for self._kind in on:
            self._measured = self._measure() if self._order == 1 else self._twice()
            self._differences = self._along_directions()
            self._refuse_nothing()
            found = [*self._outputs(), *self._first_order(self._measured)]
            self._refuse_imprecise(found)
            if self._order > 1:
                found += self._second_order()
            table = Table(title_of(self._kind, n), n, tuple(row for q in found for row in q.rows))
            report = replace(report, tables=(*report.tables, table))
            if not table.ok:
                cuts = of_all_ranks(m.cuts for m in self._measure(watched=True))
                lines = tuple(self._observed([q for q in found if not q.ok], any(cuts.values())))
                return replace(report, observed=lines, cuts=tuple(cuts), notes=(_LIMIT,) * bool(cuts))
        return report

    # ── what is measured ──

    def _run(self, fn: Any, tasks: Sequence[Task], *more: Any) -> list[Any]:
        return self._machines.run(self._kind, fn, [self._packed] * self._ranks.size, tasks, *more)

    def _measure(self, **more: Any) -> list[Measured]:
        return self._run(measured, [replace(task, **more) for task in self._tasks])

    def _twice(self, **more: Any) -> list[Measured]:
        """Measure along directions of second order that are as long as the tensors."""
        lengths = [max(x, 1e-5) if x else 1.0 for x in (largest(*of) for of in zip(*self._leaves, strict=True))]
        tasks = []
        for r, task in enumerate(self._tasks):
            directions = {
                i: lengths[i] * numbers(tuple(x.shape), x.dtype, i, r, DIRECTIONS)
                for i, x in enumerate(self._leaves[r])
                if self._names[i]
            }
            tasks.append(replace(task, directions=directions, **more))
        return self._run(measured, tasks)

    def _along_directions(self) -> list[tuple[Direction, Difference]]:
        """Return derivatives; with smaller steps where there seems to be a kink, since fn may vary fast."""
        directions, n = list(self._directions()), self._ranks.size
        tried: list[list[Difference]] = [[] for _ in directions]
        again = list(range(len(directions)))
        for scale in _SCALES:
            moved = [(d, scale * d.step) for d in map(directions.__getitem__, again)]
            steps = [h for _, h in moved]
            per_rank = [
                [{d.leaf: h * d.vector} if d.rank == r or self._names[d.leaf] in self._said else {} for d, h in moved]
                for r in range(n)
            ]
            losses = self._run(losses_along, self._tasks, per_rank, range(n))
            # A loss that all ranks have counts once.
            for k, found in zip(again, differences(self._measured, losses, steps, n if self._once else 1), strict=True):
                tried[k].append(found)
            best = list(map(_surest, tried))
            floor = _DOUBTFUL * SMALL * max((abs(d.total) for d in best), default=0.0)
            doubtful = [d.kink or d.uncertainty > max(_DOUBTFUL * abs(d.total), floor) for d in best]
            again = [k for k, doubt in enumerate(doubtful) if doubt]
            if not again:
                break
        return list(zip(directions, best, strict=True))

    def _directions(self) -> Iterator[Direction]:
        """Yield directions for all ranks' tensors: each number if they are few in all, else random directions."""
        named = [(r, i, x) for r, xs in enumerate(self._leaves) for i, x in enumerate(xs) if self._names[i]]
        every = sum(x.numel() * (1 + x.is_complex()) for _, _, x in named) <= _FEW
        for r, i, x in named:
            if (self._names[i] in self._said and r > 0) or not x.numel():
                continue
            if every:
                each = list(torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape))
                each += [1j * v for v in each if x.is_complex()]
            else:  # the same on ranks whose tensors have the same shape
                count = 2 if len(self._names) < 20 else 1
                each = [numbers(tuple(x.shape), x.dtype, k, 0, 7 + i) for k in range(count)]
            for v in each:
                yield Direction(r, i, v / v.abs().max().clamp(min=1e-30), _STEP * (largest(x) or 1.0))

    # ── what is compared ──

    def _outputs(self) -> Iterator[Quantity]:
        """Compare the outputs of the ranks, if they should be the same."""
        each = [m.outputs for m in self._measured] if self._once else []
        for i, of_ranks in enumerate(zip(*each, strict=True)):
            index = torch.arange(of_ranks[0].numel())
            pieces, what = [[Piece(index, y)] for y in of_ranks], f"output[{i}]" if len(each[0]) > 1 else "output"
            yield Quantity(what, "output", of_ranks[0], pieces, self._ranks, largest(of_ranks[0]), _TOLERANCE)

    def _first_order(self, each: Sequence[Measured]) -> Iterator[Quantity]:
        """Compare each tensor of each rank along its directions."""
        most = max((abs(d.total) for _, d in self._differences), default=0.0)
        for leaf, name in enumerate(self._names):
            held = [(v, d) for v, d in self._differences if v.leaf == leaf]
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
            what, axes = f"gradient of {name}", partial_axes(self._said.get(name))
            yield Quantity(what, "gradient", wanted, pieces, self._ranks, unit, allowed, axes)

    def _second_order(self) -> Iterator[Quantity]:
        """Compare the Hessian-vector products with finite differences of the gradients."""
        moved = [self._twice(move=k * _STEP) for k in STEPS]
        wanted = {
            leaf: [_central([each[r].gradients[leaf] for each in moved], _STEP) for r in range(self._ranks.size)]
            for leaf, name in enumerate(self._names)
            if name
        }
        most = largest(*itertools.chain(*wanted.values()))
        for leaf, each in wanted.items():
            whole = torch.cat([w.flatten() for w in each])
            index = torch.split_with_sizes(torch.arange(len(whole)), [w.numel() for w in each])
            pieces = [[Piece(i, m.second[leaf].flatten())] for m, i in zip(self._measured, index, strict=True)]
            what, unit = f"second order of {self._names[leaf]}", max(largest(whole), SMALL * most)
            yield Quantity(what, "second order", whole, pieces, self._ranks, unit, _SECOND)

    def _refuse_nothing(self) -> None:
        """Raise if the losses are no numbers, or depend on no tensor, or on no parameter of the module."""
        if bad := [r for r, m in enumerate(self._measured) if not math.isfinite(m.loss)]:
            got = f"NaN or infinity in the results of rank {', '.join(map(str, bad))}"
            raise ValueError(message(_NAME, "fn", got, "a finite loss", "choose other data"))
        moving = {v.leaf for v, d in self._differences if d.partials.any()}
        moving |= {i for m in self._measured for i, g in enumerate(m.gradients) if g.any()}
        if not moving:
            got, remedy = "results that depend on no tensor", "return the loss itself, not a number taken from it"
            raise ValueError(message(_NAME, "fn", got, "a loss with a gradient to check", remedy))
        if any(self._names[len(self._inputs) :]) and max(moving) < len(self._inputs):
            got, expected = "parameters of which none has a gradient", "the module that fn uses"
            raise ValueError(message(_NAME, "module", got, expected, "use the argument, and not another copy"))

    def _refuse_imprecise(self, found: Sequence[Quantity]) -> None:
        """Raise if rounding hides derivatives."""
        hidden = [q.what for q in found if q.ok and (q.most_allowed or 0.0) > _PRECISE]
        if hidden:
            got = f"a loss that is too large, or varies too fast, for finite differences of the {', '.join(hidden)}"
            remedy = "subtract constants, or use assert_matches_single_process"
            raise ValueError(message(_NAME, "fn", got, "differences that rounding does not hide", remedy))

    # ── what is observed ──

    def _observed(self, wrong: Sequence[Quantity], detached: bool) -> Iterator[str]:
        yield from together((q.what, self._of_leaf(q)) for q in wrong if q.group == "gradient")
        if all(q.group == "second order" for q in wrong):
            yield "first order is right: it is the derivative of the backward that differs"
        if detached:
            with contextlib.suppress(Exception):
                right = {q.what for q in self._first_order(self._measure(undetached=True)) if q.ok}
                words = "right if the calls of detach() and .data below keep the graph"
                yield from together((q.what, words) for q in wrong if q.what in right)

    def _of_leaf(self, q: Quantity) -> str:
        """Say what a gradient is, as far as the derivatives of each rank's loss say it."""
        leaf, n = self._names.index(q.what.removeprefix("gradient of ")), self._ranks.size
        held = [(v, d) for v, d in self._differences if v.leaf == leaf]
        if any(d.kink for _, d in held):
            return "the loss is not differentiable here: its two sides have other slopes"
        zero = [c.rank for c in q.compared if not c.got.any() and c.wanted.abs().max() > _TOLERANCE * q.unit]
        if zero:
            return "zero on every rank" if len(zero) == n else f"zero on rank {', '.join(map(str, zero))}"
        got = torch.tensor([v.along(self._measured[v.rank].gradients[leaf]) for v, _ in held], dtype=torch.double)
        for words, predicted in self._candidates(held):
            ratio = multiple(got, predicted, 1e-6) if len(held) > 1 else None
            if ratio is not None:
                return words if math.isclose(ratio, 1, rel_tol=1e-4) else f"{words}, times {ratio_in_words(ratio, n)}"
        return "not proportional to the derivative of the losses"

    def _candidates(self, held: Sequence[tuple[Direction, Difference]]) -> Iterator[tuple[str, Tensor]]:
        """Yield in words what a gradient may be, and the derivatives along the directions then."""
        n, partials = self._ranks.size, torch.stack([d.partials for _, d in held])
        total = partials.sum(1)
        yield "the derivative of the losses", total
        yield "the derivative of the rank's own loss alone", partials[range(len(held)), [v.rank for v, _ in held]]
        for r in range(n):
            yield f"it lacks the loss of rank {r}", total - partials[:, r]
        leaf = held[0][0].leaf
        if n > 6 or self._names[leaf] in self._said or len({mine[leaf].shape for mine in self._leaves}) > 1:
            return  # else the directions are the same on all ranks
        by_rank = total.view(n, -1)
        for order in itertools.permutations(range(n)):
            words = ", ".join(f"rank {r} has that of rank {s}" for r, s in enumerate(order) if r != s)
            yield words, by_rank[list(order)].flatten()
