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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffcoll.core.errors import message
from diffcoll.engines.rank_state import seed_rank
from diffcoll.testing.harness.batch import Batch, refuse_equal_parts
from diffcoll.testing.harness.compare import SMALL, Piece, Quantity, multiple
from diffcoll.testing.harness.cuts import Cuts
from diffcoll.testing.harness.layout import RANKS, Placement, Ranks, said_of, spans, tensors_of
from diffcoll.testing.harness.packing import Packed
from diffcoll.testing.harness.rank import (
    DIRECTIONS,
    Machines,
    Measured,
    Task,
    called,
    leaves_of,
    measured,
    objective,
    weight_of,
    with_leaves,
)
from diffcoll.testing.harness.report import Report, Table, ratio_in_words, title_of
from diffcoll.testing.numbers import largest, numbers, real_inner

_NAME = "check_gradients"
#: Distances in steps at which the losses are evaluated, after the point itself.
_STEPS = (1, -1, 2, -2)
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
    """A direction of one rank's tensor."""

    rank: int
    #: The tensor's index among the rank's inputs, followed by those of its module.
    leaf: int
    #: A number of the tensor (and for complex ones 1 or 1j), or the number of a random direction.
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

    def allowed(self, unit: float) -> float:
        """The error of a right gradient: rounding and the finite step. At a kink nothing is right."""
        return -1.0 if self.kink else _TOLERANCE + self.uncertainty / unit


def losses_along(packed: Packed, task: Task, each: Sequence[Direction], rank: int, scale: float) -> list[float]:
    """Evaluate this rank's loss at the point itself, and at each step along each direction; all ranks run it."""
    found = [_loss(packed, task, rank, None, 0.0)]
    for d in each:
        mine = d if d.together or d.rank == rank else None
        found += [_loss(packed, task, rank, mine, k * scale) for k in _STEPS]
    return found


def _loss(packed: Packed, task: Task, rank: int, along: Direction | None, scale: float) -> float:
    """Evaluate the objective of this rank, with one of its tensors moved, on a new copy of a function with state."""
    seed_rank(0, rank)
    subject = packed.unpack()
    with torch.inference_mode(False), torch.enable_grad():
        inputs = leaves_of(task.part)
        held = [] if subject.module is None else [x for _, _, x in tensors_of(subject.module)]
        if along is not None:
            with torch.no_grad():
                x = [*inputs, *held][along.leaf]
                x += scale * _step(x) * along.vector(x)
        outputs = called(subject.fn, subject.module, with_leaves(task.part, inputs))
        weights = [weight_of(i, outputs, task.stream) for i in range(len(outputs))]
        return float(objective(weights, outputs).detach())


def _step(x: Tensor) -> float:
    return _STEP * (largest(x) or 1.0)


def _central(values: Sequence[Any], h: float) -> Any:
    plus, minus, plus2, minus2 = values
    return (8 * (plus - minus) - (plus2 - minus2)) / (12 * h)


def differences(
    each: Sequence[Direction], losses: Sequence[Sequence[float]], steps: Sequence[float]
) -> list[Difference]:
    """Return the derivatives along each direction from all ranks' `losses_along` with these steps."""
    table = torch.tensor(losses, dtype=torch.float64)  # [rank, evaluation]
    zero = table[:, 0]
    found = []
    for i, (direction, h) in enumerate(zip(each, steps, strict=True)):
        plus, minus, plus2, minus2 = (table[:, 1 + 4 * i + k] for k in range(4))
        second, fourth = (plus - minus) / (2 * h), _central((plus, minus, plus2, minus2), h)
        bend, bend2 = (float((p - 2 * zero + m).sum().abs()) for p, m in ((plus, minus), (plus2, minus2)))
        slope, noise = float(fourth.sum().abs()), 1e-14 * float(zero.abs().sum())
        kink = bend > 0.02 * h * max(slope, 1e-3) + noise and bend2 < 3 * bend
        found.append(Difference(direction, fourth, float((second - fourth).sum().abs()), noise / h, kink))
    return found


class Checking:
    """A function of each rank's tensors whose gradients are checked."""

    def __init__(
        self, machines: Machines, packed: Packed, per_rank: Sequence[Any], placements: object, order: int
    ) -> None:
        self._machines, self._packed, self._order, self._kind = machines, packed, order, "simulated"
        subject = packed.unpack()
        skip = int(subject.module is not None)
        self._batches = [Batch(subject.fn, tuple(each), skip, torch.double, _NAME) for each in per_rank]
        self._ranks = Ranks({RANKS: len(per_rank)})
        self._spans = [] if subject.module is None else spans(subject.module)
        names = self._batches[0].variables
        for r, batch in enumerate(self._batches):
            if batch.variables != names:
                got = f"tensors {batch.variables} on rank {r}, {names} on rank 0"
                raise ValueError(message(_NAME, "per_rank", got, "the same tensors on every rank"))
        #: The names of a rank's inputs, followed by those of its module; "": not checked.
        self._names = [*names]
        for k, span in enumerate(self._spans):
            first = not any(span.tensor is other.tensor for other in self._spans[:k])
            self._names.append(span.name if first and span.kind == "parameter" and span.tensor.requires_grad else "")
        if not any(self._names):
            raise ValueError(message(_NAME, "per_rank", "no floating-point tensor", "at least one, or a module"))
        self._shared = self._parsed(placements)
        refuse_equal_parts(_NAME, self._batches, self._shared)
        if self._shared and order != 1:
            raise ValueError(message(_NAME, "order", f"{order} with placements=", "1"))
        self._once = self._shared.pop("output", "") == "Replicate"
        self._tasks = [Task(self._ranks, b.part(), stream=0 if self._once else r) for r, b in enumerate(self._batches)]

    def _parsed(self, placements: object) -> dict[str, str]:
        """Return "Replicate" or "Partial" by the name of what all ranks share."""
        from torch.distributed.tensor import Partial, Replicate

        if not isinstance(placements, Mapping):
            raise TypeError(message(_NAME, "placements", repr(placements), "placements by the name of a tensor"))
        known = [*filter(None, self._names), "output"]
        for key, said in placements.items():
            if not isinstance(said, (Replicate, Partial)) or (key == "output" and isinstance(said, Partial)):
                raise TypeError(message(_NAME, f"placements[{key!r}]", repr(said), "Replicate() or Partial()"))
            if not any(said_of({key: said}, name) for name in known):
                raise ValueError(message(_NAME, "placements", repr(key), f"one of {', '.join(known)}"))
        said_by: dict[str, Placement] = dict(placements)
        found = {name: said_of(said_by, name) for name in known}
        for name, said in found.items():
            if said is not None and name in self._names and self._names.index(name) < len(self._batches[0].variables):
                each = [batch.tensors[name] for batch in self._batches]
                if any(x.shape != each[0].shape or not torch.equal(x, each[0]) for x in each):
                    got = "other numbers on some ranks"
                    raise ValueError(
                        message(_NAME, f"placements[{name!r}]", got, "one variable, the same on all ranks")
                    )
        return {name: type(said).__name__ for name, said in found.items() if said is not None}

    def report(self, on: Sequence[str]) -> Report:
        """Check on each kind of ranks, until one is wrong."""
        report = Report(_NAME, ())
        for self._kind in on:
            for name in ("_measured", "_differences"):
                self.__dict__.pop(name, None)
            self._refuse_nothing()
            found = [*self._outputs(), *self._first_order(self._measured)]
            self._refuse_imprecise(found)
            if self._order > 1:
                found += self._second_order()
            table = Table(
                title_of(self._kind, self._ranks.size), self._ranks.size, tuple(r for q in found for r in q.rows)
            )
            report = replace(report, tables=(*report.tables, table))
            if not table.ok:
                cuts = self._cuts()
                lines = self._observed([q for q in found if not q.ok], cuts)
                return replace(report, observed=tuple(lines), cuts=cuts.lines, notes=(_LIMIT,) * bool(cuts.lines))
        return report

    # ── what is measured ──

    def _run(self, fn: Any, tasks: Sequence[Task], *more: Any) -> list[Any]:
        n = self._ranks.size
        return self._machines.run(self._kind, fn, [self._packed] * n, tasks, *([each] * n for each in more))

    def _measure(self, **more: Any) -> list[Measured]:
        return self._run(measured, [replace(task, **more) for task in self._tasks])

    @cached_property
    def _leaves(self) -> list[list[Tensor]]:
        """The tensors of each rank, in the order of the names."""
        return [leaves_of(task.part) + [s.tensor.detach() for s in self._spans] for task in self._tasks]

    @cached_property
    def _measured(self) -> list[Measured]:
        """What backward gives on each rank."""
        return self._measure() if self._order == 1 else self._twice(order=2)

    def _twice(self, **more: Any) -> list[Measured]:
        """Measure along directions of second order that are as long as the tensors."""
        tasks, count = [], len(self._batches[0].variables)
        lengths = [max(x, 1e-5) if x else 1.0 for x in (largest(*of) for of in zip(*self._leaves, strict=True))]
        for r, task in enumerate(self._tasks):
            vs: list[Tensor | None] = []
            for i, (x, name) in enumerate(zip(self._leaves[r], self._names, strict=True)):
                stream = r if i < count else 0
                vs.append(lengths[i] * numbers(tuple(x.shape), x.dtype, i, stream, DIRECTIONS) if name else None)
            inputs = [v for v in vs[:count] if v is not None]
            tasks.append(replace(task, directions=(inputs, vs[count:]), **more))
        return self._run(measured, tasks)

    @cached_property
    def _differences(self) -> list[Difference]:
        """The derivatives along each direction; with smaller steps where there seems to be a kink: fn may vary fast."""
        tried: dict[Direction, list[Difference]] = {}
        best: list[Difference] = []
        each = self._directions()
        for scale in _SCALES:
            n = self._ranks.size
            per_rank = [self._packed] * n, self._tasks, [each] * n, range(n), [scale] * n
            losses = self._machines.run(self._kind, losses_along, *per_rank)
            steps = [scale * _step(self._leaves[d.rank][d.leaf]) for d in each]
            for found in differences(each, losses, steps):
                tried.setdefault(found.direction, []).append(found)
            best = list(map(_best, tried.values()))
            floor = _DOUBTFUL * SMALL * max((abs(d.total) for d in best), default=0.0)
            doubtful = [d for d in best if d.kink or d.uncertainty > max(_DOUBTFUL * abs(d.total), floor)]
            each = [d.direction for d in doubtful]
            if not each:
                break
        n = self._ranks.size if self._once else 1  # a loss that all ranks have counts once
        return [replace(d, partials=d.partials / n, error=d.error / n, rounding=d.rounding / n) for d in best]

    def _directions(self) -> list[Direction]:
        """Return directions for all ranks' tensors: each number if they are few in all, else random directions."""
        named = [(r, i, x) for r, xs in enumerate(self._leaves) for i, x in enumerate(xs) if self._names[i]]
        every = sum(x.numel() * (1 + x.is_complex()) for _, _, x in named) <= _FEW
        count, found = (2 if len(self._names) < 20 else 1), list[Direction]()
        for r, i, x in named:
            together = self._names[i] in self._shared
            if (together and r > 0) or not x.numel():
                continue
            if every:
                units = (1.0, 1j) if x.is_complex() else (1.0,)
                found += [Direction(r, i, e, unit, 0, together) for e in range(x.numel()) for unit in units]
            else:
                found += [Direction(r, i, None, 1.0, k, together) for k in range(count)]
        return found

    # ── what is compared ──

    def _quantity(
        self,
        what: str,
        group: str,
        wanted: Tensor,
        pieces: list[list[Piece]],
        tolerance: Any,
        unit: float,
        summed: bool,
    ) -> Quantity:
        axes = (RANKS,) if summed else ()
        return Quantity(what, group, wanted, pieces, self._ranks, axes, 1.0, unit, tolerance)

    def _outputs(self) -> Iterator[Quantity]:
        """Compare the outputs of the ranks, if they should be the same."""
        first = self._measured[0]
        for r, m in enumerate(self._measured if self._once else ()):
            if len(m.outputs) != len(first.outputs) or any(
                a.shape != b.shape for a, b in zip(m.outputs, first.outputs, strict=False)
            ):
                got = f"other outputs on rank {r} than on rank 0"
                raise ValueError(message(_NAME, "fn", got, "the same on every rank, as placements= says"))
        for i, y in enumerate(first.outputs if self._once else ()):
            what = f"output[{i}]" if len(first.outputs) > 1 else "output"
            index = torch.arange(y.numel()).view(y.shape)
            pieces = [[Piece(index, m.outputs[i])] for m in self._measured]
            yield self._quantity(what, "output", y, pieces, _TOLERANCE, largest(y), False)

    def _gradient(self, m: Measured, leaf: int, second: bool = False) -> Tensor:
        inputs, module = m.second if second and m.second is not None else (m.inputs, m.module)
        return inputs[leaf] if leaf < len(inputs) else module[leaf - len(inputs)]

    def _first_order(self, each: Sequence[Measured]) -> Iterator[Quantity]:
        """Compare each tensor of each rank along its directions."""
        most = max((abs(d.total) for d in self._differences), default=0.0)
        for leaf, name in enumerate(self._names):
            held = [d for d in self._differences if d.direction.leaf == leaf]
            if not name or not held:
                continue
            wanted = torch.tensor([d.total for d in held], dtype=torch.double)
            unit = max(largest(wanted), _LEAST * most) or 1.0
            allowed = torch.tensor([d.allowed(unit) for d in held], dtype=torch.double)
            pieces = []
            for r, m in enumerate(each):
                mine = [k for k, d in enumerate(held) if d.direction.together or d.direction.rank == r]
                g = self._gradient(m, leaf)
                got = torch.tensor([along(g, held[k].direction) for k in mine], dtype=torch.double)
                pieces.append([Piece(torch.tensor(mine, dtype=torch.long), got)] if mine else [])
            summed = self._shared.get(name) == "Partial"
            yield self._quantity(f"gradient of {name}", "gradient", wanted, pieces, allowed, unit, summed)

    def _second_order(self) -> Iterator[Quantity]:
        """Compare the Hessian-vector products with finite differences of the gradients."""
        moved = [self._twice(order=1, move=k * _STEP) for k in _STEPS]
        every: dict[int, list[Tensor]] = {}
        for leaf, name in enumerate(self._names):
            if name:
                of_steps = [[self._gradient(m, leaf) for m in each] for each in moved]
                every[leaf] = [_central([g[r] for g in of_steps], _STEP) for r in range(self._ranks.size)]
        most = largest(*(w for each in every.values() for w in each))
        for leaf, wanted in every.items():
            sizes = [w.numel() for w in wanted]
            pieces = []
            for r, m in enumerate(self._measured):
                index = torch.arange(sum(sizes[:r]), sum(sizes[: r + 1]))
                pieces.append([Piece(index, self._gradient(m, leaf, second=True).flatten())])
            whole = torch.cat([w.flatten() for w in wanted])
            unit = max(largest(whole), SMALL * most)
            what = f"second order of {self._names[leaf]}"
            yield self._quantity(what, "second order", whole, pieces, _SECOND, unit, False)

    def _refuse_nothing(self) -> None:
        """Raise if the losses are no numbers, or depend on no tensor, or on no parameter of the module."""
        if bad := [r for r, m in enumerate(self._measured) if not math.isfinite(m.loss)]:
            got = f"NaN or infinity in the results of rank {', '.join(map(str, bad))}"
            raise ValueError(message(_NAME, "fn", got, "a finite loss", "choose other data"))
        count = len(self._batches[0].variables)
        moving = {d.direction.leaf for d in self._differences if d.partials.any()}
        moving |= {i for m in self._measured for i, g in enumerate([*m.inputs, *m.module]) if g.any()}
        if not moving:
            got, remedy = "results that depend on no tensor", "return the loss itself, not a number taken from it"
            raise ValueError(message(_NAME, "fn", got, "a loss with a gradient to check", remedy))
        if any(self._names[count:]) and not any(leaf >= count for leaf in moving):
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

    def _cuts(self) -> Cuts:
        return Cuts.of_all(m.cuts for m in self._measure(watched=True))

    def _observed(self, wrong: Sequence[Quantity], cuts: Cuts) -> Iterator[str]:
        found: dict[str, list[str]] = {}
        for q in wrong:
            for words in [self._of_leaf(q)] if q.group == "gradient" else []:
                found.setdefault(words, []).append(q.what.removeprefix("gradient of "))
        yield from (f"{', '.join(names)}: {words}" for words, names in found.items())
        if all(q.group == "second order" for q in wrong):
            yield "first order is right: it is the derivative of the backward that differs"
        if cuts.detached:
            with contextlib.suppress(Exception):
                right = {q.what for q in self._first_order(self._measure(undetached=True)) if q.ok}
                names = [q.what.removeprefix("gradient of ") for q in wrong if q.what in right]
                if names:
                    yield f"{', '.join(names)}: right if the calls of detach() and .data below keep the graph"

    def _of_leaf(self, q: Quantity) -> str:
        """Say what a gradient is, as far as the derivatives of each rank's loss say it."""
        name, n = q.what.removeprefix("gradient of "), self._ranks.size
        held = [d for d in self._differences if d.direction.leaf == self._names.index(name)]
        if any(d.kink for d in held):
            return "the loss is not differentiable here: its two sides have other slopes"
        of = [self._gradient(m, self._names.index(name)) for m in self._measured]
        zero = [c.rank for c in q.compared if not c.got.any() and c.wanted.abs().max() > _TOLERANCE * q.unit]
        if zero:
            return "zero on every rank" if len(zero) == n else f"zero on rank {', '.join(map(str, zero))}"
        got = torch.tensor([along(of[d.direction.rank], d.direction) for d in held], dtype=torch.double)

        def fits(predicted: Sequence[float]) -> str | None:
            ratio = multiple(got, torch.tensor(predicted, dtype=torch.double), 1e-6) if len(held) > 1 else None
            return (
                None
                if ratio is None
                else ""
                if math.isclose(ratio, 1, rel_tol=1e-4)
                else f", times {ratio_in_words(ratio, n)}"
            )

        if (times := fits([d.total for d in held])) is not None:
            return f"the derivative of the losses{times}"
        if (times := fits([float(d.partials[d.direction.rank]) for d in held])) is not None:
            return f"the derivative of the rank's own loss alone{times}"
        for r in range(n):
            if (times := fits([d.total - float(d.partials[r]) for d in held])) is not None:
                return f"it lacks the loss of rank {r}{times}"
        return self._swapped(held, of) or "not proportional to the derivative of the losses"

    def _swapped(self, held: Sequence[Difference], of: Sequence[Tensor]) -> str | None:
        """Whether every rank has another one's gradient, or all have the sum or mean."""
        n = self._ranks.size
        each = [[d for d in held if d.direction.rank == r] for r in range(n)]
        if n > 6 or len({tuple(d.direction._replace(rank=0) for d in ds) for ds in each}) > 1 or len(each[0]) < 2:
            return None
        total = torch.tensor([[d.total for d in ds] for ds in each], dtype=torch.double)
        got = torch.tensor([[along(of[r], d.direction) for d in each[r]] for r in range(n)], dtype=torch.double)
        for word, wanted in (("sum", total.sum(0)), ("mean", total.mean(0))):
            if _close(got, wanted.expand_as(got)):
                return f"the {word} of all ranks' gradients on every rank"
        orders = [order for order in itertools.permutations(range(n)) if _close(got[list(order)], total)]
        if len(orders) == 1 and orders[0] != tuple(range(n)):
            return ", ".join(f"rank {q} has that of rank {r}" for r, q in enumerate(orders[0]) if r != q)
        return None


def along(gradient: Tensor, direction: Direction) -> float:
    """Return the derivative that a gradient gives along a direction."""
    return float(real_inner(direction.vector(gradient).to(gradient.dtype), gradient))


def _close(a: Tensor, b: Tensor) -> bool:
    return bool(((a - b).abs() <= 1e-5 * b.abs().max()).all())


def _best(tried: Sequence[Difference]) -> Difference:
    """Return the surest of the differences along one direction. Rounding hides a kink from a small step."""
    most = max(abs(d.total) for d in tried)
    return min(tried, key=lambda d: (d.kink or d.rounding > 0.1 * most, d.uncertainty))
