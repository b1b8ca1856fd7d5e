"""Compares the gradients of every rank with finite differences of the sum of all ranks' losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.core.errors import message
from diffcoll.testing.harness.comparison import SMALL, Quantity, unused
from diffcoll.testing.harness.cuts import Cuts
from diffcoll.testing.harness.differences import (
    STEPS,
    Difference,
    Direction,
    Evidence,
    along,
    central,
    directions,
    losses_along,
    partials,
    size,
    step,
)
from diffcoll.testing.harness.hypotheses import HYPOTHESES, diagnose, not_replicated, part_of_sum
from diffcoll.testing.harness.joint import joint_graph
from diffcoll.testing.harness.measure import (
    Measurement,
    MeasurementPlan,
    cuts_on_rank,
    leaves_of,
    objective,
    on_rank,
    run_on,
    undetached,
)
from diffcoll.testing.harness.packing import Packed
from diffcoll.testing.harness.report import Cause, Report, Table, title_of
from diffcoll.testing.harness.variables import Variables
from diffcoll.testing.harness.wrong_run import WrongRun
from diffcoll.testing.numbers import largest
from diffcoll.testing.sharding.placements import PARTIAL, REPLICATE

#: All elements are moved one by one if the ranks have at most this many in all; else along random directions.
_FEW = 48
#: Steps of finite differences, relative to the first; the following ones where there seems to be a kink.
_SCALES = (1.0, 1 / 16, 1 / 256)
#: A finite difference is taken again with smaller steps if its relative error may be larger.
_DOUBTFUL = 1e-4
#: The relative errors of a finite difference, and of one of second order, that are right.
_TOLERANCE, _SECOND = 1e-6, 1e-5
#: Gradients are not compared with finite differences whose relative error may be larger.
_PRECISE = 1e-2
#: A derivative smaller than this part of the largest one is compared with that part.
_SMALL = 1e-6
_LIMIT = "a tensor that is detached on purpose, such as a target, looks like a lost gradient to finite differences"


@dataclass(eq=False)
class Checking(WrongRun):
    """A function of each rank's tensors whose gradients are checked, and what one kind of ranks measures of it."""

    reference = "the derivative of the losses that the ranks return"
    tolerance = _TOLERANCE

    name: str
    packed: Packed
    parts: list[Any]
    #: Names of a rank's inputs, followed by those of its parameters.
    names: list[str]
    plan: MeasurementPlan
    timeout: float
    variables: Variables
    #: The kind of ranks.
    kind: str = "simulated"
    cuts: Cuts = field(default_factory=Cuts)

    def __post_init__(self) -> None:
        self.one_loss, self.sizes = self.variables.once, (1,) * len(self.parts)

    def report(self, on: Sequence[str]) -> Report:
        """Check on each kind of ranks, until one is wrong."""
        cuts = Cuts.of_all(replace(self, kind=on[0])._on_ranks(cuts_on_rank, self.parts))
        report = Report(f"{self.name}, {self.size} ranks", ())
        for kind in on:
            if report.ok:
                tables, causes = replace(self, kind=kind, cuts=cuts)._result()
                report = replace(report, tables=(*report.tables, *tables), causes=(*report.causes, *causes))
        return replace(report, cuts=cuts.lines, notes=(_LIMIT,) * bool(cuts.lines and not report.ok))

    def _result(self) -> tuple[list[Table], list[Cause]]:
        """Check on one kind of ranks."""
        self._refuse_not_finite()
        self._refuse_unused()
        quantities = [*self._outputs(), *self._first_order(self.measured)]
        self._refuse_imprecise(quantities)
        if self.plan.order > 1:
            quantities += self._second_order()
        tables = [Table(title_of(self.kind, self.size), self.size, tuple(q.row for q in quantities))]
        causes = []
        if not tables[0].ok:
            self.quantities = quantities
            causes = diagnose(self, [not_replicated, part_of_sum, *HYPOTHESES])
        return tables + ([self.joint] if self.joint is not None else []), causes

    # ── what is measured ──

    def _on_ranks(self, fn: Callable[..., Any], *per_rank: Any) -> list[Any]:
        """Run fn on all ranks with the packed function and these arguments."""
        return run_on(self.kind, fn, [self.packed] * self.size, *per_rank, seed=self.plan.seed, timeout=self.timeout)

    def _measure(self, plan: MeasurementPlan, on_rank: Callable[..., Measurement] = on_rank) -> list[Measurement]:
        return self._on_ranks(on_rank, [plan] * self.size, range(self.size), self.parts)

    @cached_property
    def leaves(self) -> list[list[Tensor]]:
        """The tensors of each rank, in the order of the names."""
        parameters = list(self.packed.unpack().parameters.values())
        return [leaves_of(part) + parameters for part in self.parts]

    @cached_property
    def scaled_plan(self) -> MeasurementPlan:
        """The plan with directions of second order that are as long as the tensors."""
        lengths = tuple(max(x, 1e-5) if x else 1.0 for x in (largest(*of) for of in zip(*self.leaves, strict=True)))
        return replace(self.plan, lengths=lengths)

    @cached_property
    def measured(self) -> list[Measurement]:
        """What backward gives on each rank."""
        return self._measure(self.scaled_plan)

    @cached_property
    def joint(self) -> Table | None:
        """The comparison with the joint graph, which differentiates the sum of all losses by each rank's tensors."""
        if self.kind != "simulated" or self.variables:
            return None
        return joint_graph(self.packed, self.parts, self.names, self.plan, self.measured)

    @property
    def _agrees_with_joint(self) -> bool:
        """Whether the joint graph shows that all gradients are right."""
        return self.joint is not None and bool(self.joint.rows) and self.joint.ok

    @cached_property
    def differences(self) -> list[Difference]:
        """The derivatives along each direction; with smaller steps where there seems to be a kink: fn may vary fast."""
        n, tried = self.size, dict[Direction, list[Difference]]()
        shared = {leaf for leaf, name in enumerate(self.names) if name in self.variables.shared}
        each = directions(self.leaves, _FEW, 2 if len(self.names) < 20 else 1, shared)
        for scale in _SCALES:
            losses = self._on_ranks(losses_along, [self.plan] * n, [each] * n, range(n), self.parts, [scale] * n)
            for d in partials(each, losses, [scale * size(self.leaves[d.rank][d.leaf]) for d in each]):
                tried.setdefault(d.direction, []).append(d)
            best = list(map(_best, tried.values()))
            floor = _DOUBTFUL * SMALL * max((abs(d.total) for d in best), default=0.0)
            doubtful = [d for d in best if d.kink or d.uncertainty > max(_DOUBTFUL * abs(d.total), floor)]
            each = [d.direction for d in doubtful]
            if not each:
                break
        return [d for each in best for d in self._of_ranks(each)]

    def _of_ranks(self, d: Difference) -> Iterator[Difference]:
        """Yield the difference for each rank whose gradient should be this derivative of the objective."""
        if self.variables.once:
            n = self.size
            d = replace(d, partials=d.partials / n, error=d.error / n, rounding=d.rounding / n)
        every = self.variables.shared.get(self.names[d.direction.leaf]) == REPLICATE
        for r in range(self.size) if every else [d.direction.rank]:
            yield replace(d, direction=replace(d.direction, rank=r))

    def _gradients(self, measured: Sequence[Measurement]) -> list[list[Tensor]]:
        """Return the gradients of each rank; of a variable whose gradient is spread over the ranks, their sum."""
        each = [m.first.every for m in measured]
        for leaf, name in enumerate(self.names):
            if self.variables.shared.get(name) == PARTIAL:
                total = torch.stack([of_rank[leaf] for of_rank in each]).sum(0)
                for of_rank in each:
                    of_rank[leaf] = total
        return each

    # ── what is compared ──

    def _outputs(self) -> Iterator[Quantity]:
        """Compare the outputs of the ranks, if they should be the same."""
        first, *others = self.measured if self.variables.once else self.measured[:1]
        for r, m in enumerate(others, 1):
            if len(m.outputs) != len(first.outputs):
                got = f"{len(m.outputs)} outputs on rank {r}, {len(first.outputs)} on rank 0"
                raise ValueError(message(self.name, "fn", got, "the same on every rank, as placements= says"))
            for i, (y, wanted) in enumerate(zip(m.outputs, first.outputs, strict=True)):
                what = f"output[{i}]" if len(m.outputs) > 1 else "output"
                yield Quantity(what, "output", r, y, wanted, largest(wanted), _TOLERANCE)

    def _refuse_not_finite(self) -> None:
        """Raise if a rank's loss is NaN or infinite, and has no differences."""
        losses = [objective(self.plan.weights(r, m.outputs), m.outputs) for r, m in enumerate(self.measured)]
        if bad := [r for r, loss in enumerate(losses) if not loss.isfinite()]:
            got = f"NaN or infinity in the results of rank {', '.join(map(str, bad))}"
            raise ValueError(message(self.name, "fn", got, "a finite loss", "choose other data"))

    def _refuse_unused(self) -> None:
        """Raise if the losses depend on no tensor, or on no parameter of the module."""
        measured, found = self.measured, self.differences
        count = len(measured[0].first.inputs)
        every = [g for m in measured for g in m.first.every]
        if not any(g.any() for g in every) and not any(d.partials.any() for d in found):
            got, remedy = "results that depend on no tensor", "return the loss itself, not a number taken from it"
            raise ValueError(message(self.name, "fn", got, "a loss with a gradient to check", remedy))
        gradients = [g for m in measured for g in m.first.parameters]
        if gradients and not any(g.any() for g in gradients):
            if not any(d.partials.any() for d in found if d.direction.leaf >= count):
                raise unused(self.name, "fn")

    def _refuse_imprecise(self, quantities: Sequence[Quantity]) -> None:
        """Raise if rounding hides derivatives, and no joint graph shows that the gradients are right."""
        hidden = [q.what for q in quantities if q.ok and (q.most_allowed or 0.0) > _PRECISE]
        if hidden and not self._agrees_with_joint:
            names = ", ".join(dict.fromkeys(hidden))
            got = f"a loss that is too large, or varies too fast, for finite differences of the {names}"
            remedy = "subtract constants, or use assert_matches_single_process"
            raise ValueError(message(self.name, "fn", got, "differences that rounding does not hide", remedy))

    def _first_order(self, measured: Sequence[Measurement]) -> Iterator[Quantity]:
        """Compare each tensor of each rank along its directions."""
        found, gradients = self.differences, self._gradients(measured)
        most = max((abs(d.total) for d in found), default=0.0)
        for leaf, name in enumerate(self.names):
            of_leaf = [d for d in found if d.direction.leaf == leaf]
            unit = max([abs(d.total) for d in of_leaf] + [_SMALL * most]) or 1.0
            is_sum = self.variables.shared.get(name) == PARTIAL
            for r, of_rank in enumerate(gradients[:1] if is_sum else gradients):
                each = [d for d in of_leaf if d.direction.rank == r]
                numbers = [(along(of_rank[leaf], d.direction), d.total, _allowed(d, unit)) for d in each]
                got, wanted, allowed = torch.tensor(numbers, dtype=torch.float64).view(-1, 3).unbind(1)
                what, rank = f"gradient of {name}", None if is_sum else r
                yield Quantity(what, "gradient", rank, got, wanted, unit, allowed)

    def _second_order(self) -> Iterator[Quantity]:
        """Compare the Hessian-vector products with finite differences of the gradients."""
        h = step(torch.float64)
        moved = [self._measure(replace(self.scaled_plan, order=1, move=k * h)) for k in STEPS]
        count = len(self.measured[0].first.inputs)
        got = [m.second.every for m in self.measured if m.second is not None]
        at = [[m.first.every for m in each] for each in moved]
        wanted = [[central([each[r][i] for each in at], h) for i in range(len(self.names))] for r in range(self.size)]
        most = largest(*(w for each in wanted for w in each))
        for i, name in enumerate(self.names):
            ranks: list[int | None] = list(range(self.size))
            of_ranks = [[each[i] for each in of] for of in (got, wanted)]
            if i >= count:  # parameters are moved on all ranks together, so their derivatives are compared as sums
                ranks, of_ranks = [None], [[torch.stack(each).sum(0)] for each in of_ranks]
            unit = max(largest(*of_ranks[1]), SMALL * most)
            for r, g, w in zip(ranks, *of_ranks, strict=True):
                yield Quantity(f"second order of {name}", "second order", r, g, w, unit, _SECOND)

    # ── for the diagnosis ──

    @cached_property
    def evidence(self) -> Evidence:
        """The differences that the gradients were compared with."""
        gradients = self._gradients(self.measured)
        return Evidence(self.sizes, self.names, gradients, self.differences, self.cuts.seen)

    @cached_property
    def replicated(self) -> set[str]:
        """The names of the gradients that every rank should have whole."""
        return {f"gradient of {name}" for name, kind in self.variables.shared.items() if kind == REPLICATE}

    @cached_property
    def detached(self) -> str | None:
        """Words if the graph of all ranks has these gradients too, so that something is detached."""
        if self._agrees_with_joint:
            return "backward agrees with the joint graph of all ranks, and not with finite differences"
        return None

    @override
    def undetached(self) -> list[Quantity]:
        return list(self._first_order(self._measure(self.plan, partial(undetached, on_rank))))


def _best(tried: Sequence[Difference]) -> Difference:
    """Return the surest of the differences along one direction. Rounding hides a kink from a small step."""
    most = max(abs(d.total) for d in tried)
    return min(tried, key=lambda d: (d.kink or d.rounding > 0.1 * most, d.uncertainty))


def _allowed(difference: Difference, unit: float) -> float:
    """The error of a right gradient: rounding and the finite step. At a kink nothing is right."""
    return -1.0 if difference.kink else _TOLERANCE + difference.uncertainty / unit
