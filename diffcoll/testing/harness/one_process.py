"""The report of ranks that have rows of the batch: what differs from one process, and why."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial

from typing_extensions import override

from diffcoll.core.trees import tree_flatten
from diffcoll.testing.harness.causes import Kind, cause_of
from diffcoll.testing.harness.comparison import Quantity, all_near, compare, right, rows_of
from diffcoll.testing.harness.cuts import Cuts
from diffcoll.testing.harness.differences import Evidence, directions, losses_along, partials, size
from diffcoll.testing.harness.hypotheses import HYPOTHESES, diagnose
from diffcoll.testing.harness.matching import Matching
from diffcoll.testing.harness.measure import Measurement, cuts_on_rank, leaves_of, on_rank, outputs_on_rank, undetached
from diffcoll.testing.harness.parts import joined, rolled
from diffcoll.testing.harness.report import Cause, Report
from diffcoll.testing.harness.runs import ComparedRun, WrongMatch, changed_attributes
from diffcoll.testing.numbers import largest

#: Random directions of each tensor along which finite differences are taken for the diagnosis.
_DIRECTIONS = 4


def report_of(
    matching: Matching, tolerance: float | None, each_sizes: Sequence[tuple[int, ...]], on: Sequence[str]
) -> Report:
    """Return the report of ranks that have parts of the batch."""
    first, most = each_sizes[0], max(each_sizes, key=sum)
    matching = matching.with_tolerance(tolerance, tree_flatten(matching.whole(first))[0])
    _, single, _, whole = matching.at(most, 0)
    outputs = matching.on_one(outputs_on_rank, single, whole)
    matching = matching.with_losses(outputs if sum(most) > 1 else [])  # else one of shape (1,) may have a row
    return _concluded(matching, matching.runs(itertools.product(each_sizes, range(matching.steps)), on))


def _concluded(matching: Matching, runs: list[ComparedRun]) -> Report:
    """Return the report. The run that is diagnosed is the first wrong one with equal sizes, or else the first."""
    asked = _closest(runs) if matching.rank_reduction == "any" else matching.rank_reduction
    tables = tuple(run.table(asked) for run in runs)
    words = f"gradients {'averaged' if asked == 'mean' else 'summed'} over ranks"
    if matching.rank_reduction == "any" and not all(table.ok or table.raised for table in tables):
        words = f"no reduction is right for all, shown {words}"
    report = Report(f"{matching.name}, {words}", tables, rank_reduction=asked)
    if report.ok:
        return replace(report, notes=tuple(_unchecked(runs, matching.tolerance)))
    scope = tuple(_scope([run for run in runs if not run.skipped], asked))
    wrong = sorted((run for run in runs if run.quantities and not run.ok(asked)), key=lambda run: not run.even)
    if not wrong:
        return replace(report, causes=scope)
    diagnosed = _WrongRows(matching, wrong[0], asked)
    causes = diagnose(diagnosed, HYPOTHESES)
    if shared_state := matching.shared_state(runs, wrong[0], causes, asked):
        causes, scope = [shared_state], ()
    report = replace(report, tables=tuple(run.table(asked) for run in runs))
    if any(cause.name == str(Kind.NOT_FINITE) for cause in causes):
        scope = tuple(cause for cause in scope if cause.name != str(Kind.EMPTY))
    return replace(report, causes=(*causes, *scope), cuts=diagnosed.cuts.lines)


def _closest(runs: list[ComparedRun]) -> str:
    """Return the reduction under which the fewest quantities are wrong, gradients of first order first."""

    def wrong(rank_reduction: str) -> tuple[int, int]:
        groups = [q.group for run in runs for q in run.under(rank_reduction) if not q.ok]
        return groups.count("gradient"), len(groups)

    return min(("mean", "sum"), key=wrong)


def _scope(runs: Sequence[ComparedRun], rank_reduction: str) -> Iterator[Cause]:
    """Say which runs raised errors, and in which runs alone something is wrong."""

    def sizes(of: Sequence[ComparedRun]) -> str:
        return ", ".join(dict.fromkeys(str(run.sizes) for run in of))

    def steps(of: Sequence[ComparedRun]) -> str:
        return ", ".join(f"step {step + 1}" for step in sorted({run.step for run in of}))

    wrong = [run for run in runs if not run.ok(rank_reduction)]
    right = [run for run in runs if run not in wrong]
    raised = [run for run in wrong if run.raised]
    if raised and not any(run.even for run in raised):
        yield cause_of(Kind.RAISED, f"raised an error with rows {sizes(raised)}, and none with equal ranks")
    elif raised:
        yield Cause(str(Kind.RAISED), f"raised an error with rows {sizes(raised)}")
    even = any(run.even and len(run.sizes) > 1 for run in right) and not any(run.even for run in wrong)
    small = max((len(run.sizes) for run in right if run.even), default=0)
    if right and wrong and all(run.step for run in wrong) and not all(run.step for run in right):
        yield cause_of(Kind.LATER_STEP, f"right in the first step, wrong in {steps(wrong)}")
    elif small > 1 and all(len(run.sizes) > small for run in wrong) and any(run.even for run in wrong):
        yield cause_of(Kind.MORE_RANKS, f"right with equal ranks up to {small}, wrong with rows {sizes(wrong)}")
    elif even and len(raised) < len(wrong):
        if all(0 in run.sizes for run in wrong):
            yield cause_of(Kind.EMPTY, f"wrong only with empty ranks: rows {sizes(wrong)}")
        else:
            yield cause_of(Kind.UNEVEN, f"right with equal ranks, wrong with rows {sizes(wrong)}")
    if any(run.on == "simulated" for run in right) and not any(run.on == "simulated" for run in wrong):
        kinds = ", ".join(dict.fromkeys(run.on for run in wrong))
        yield cause_of(Kind.ON_PROCESSES, f"right on simulated ranks, wrong on {kinds}")


def _unchecked(runs: Sequence[ComparedRun], tolerance: float) -> Iterator[str]:
    """Say which wrong gradients would pass, because of the precision or because there is nothing to compare."""
    if tolerance > 1e-3:
        yield f"errors below {tolerance:.1g} pass, because of the precision of the tensors: pass float64"
    yield from changed_attributes(runs)
    remedy = "pass float64" if tolerance > 1e-8 else "choose other data"
    each = [q for run in runs for q in run.under("sum") if q.group == "gradient" and q.wanted.numel()]
    for name in dict.fromkeys(q.what for q in each if (q.most_allowed or 0.0) > tolerance):
        yield f"{name}: rounding on one process is larger than the tolerance: {remedy}"
    for name in dict.fromkeys(q.what for q in each):
        most = max(largest(q.wanted) / (q.unit or 1.0) for q in each if q.what == name)
        if most == 0:
            yield f"{name}: zero in every run"
        elif most < 10 * tolerance:
            yield f"{name}: too small beside the others to be checked in this precision: {remedy}"


class _WrongRows(WrongMatch):
    """A wrong run of ranks that have rows."""

    check: Matching

    def __init__(self, matching: Matching, run: ComparedRun, rank_reduction: str) -> None:
        super().__init__(matching, run, rank_reduction, matching.at(run.sizes, run.step))
        self._names = matching.names(run.sizes)
        self.sizes = run.sizes
        self.not_finite = [r for r, m in enumerate(run.measured) if not all(y.isfinite().all() for y in m.outputs)]

    @cached_property
    def cuts(self) -> Cuts:
        """Where tensors leave the graph of a forward."""
        return Cuts.of_all(self.check.on(self.run.on, cuts_on_rank, self.distributed, self.parts))

    @cached_property
    def evidence(self) -> Evidence:
        """Finite differences of each rank's loss by each rank's tensors."""
        run = self.run
        parameters = list(self.check.distributed.unpack().parameters.values())
        leaves = [leaves_of(part) + parameters for part in self.parts]
        each = directions(leaves, few=0, random=_DIRECTIONS if len(leaves[0]) < 20 else 1)
        losses = self.on_ranks(losses_along, self.check.plan_of(run.size), each)
        found = partials(each, losses, [size(leaves[d.rank][d.leaf]) for d in each])
        gradients = [m.first.every for m in run.measured]
        return Evidence(run.sizes, self._names.inputs + self._names.parameters, gradients, found, self.cuts.seen)

    @override
    def undetached(self) -> list[Quantity]:
        measured = self.on_ranks(partial(undetached, on_rank), replace(self.check.plan_of(self.run.size), order=1))
        assert self.run.reference is not None
        return self._compared(measured, replace(self.run.reference, second=None))

    @cached_property
    def unstopped(self) -> set[str]:
        """The names of the gradients that one process has too, if its calls of detach() keep the graph."""
        plan = replace(self.check.plan, order=1, outputs=rows_of(self.run.measured), inputs=self.run.sizes)
        with contextlib.suppress(Exception):
            one = self.check.on_one(partial(undetached, on_rank), self.single, plan, 0, self.whole)
            return right(self._compared(self.run.measured, one))
        return set()

    def _compared(self, measured: Sequence[Measurement], reference: Measurement) -> list[Quantity]:
        quantities = compare(measured, reference, self.run.sizes, self._names, self.check.tolerance)
        return replace(self.run, quantities=quantities).under(self.rank_reduction)

    @cached_property
    def local_statistics(self) -> str | None:
        """Whether the distributed code takes statistics of each rank's rows alone, in words; None: it does not.

        Either each rank returns what one process returns for the rank's rows alone, or what is wrong with equally many
        rows on all ranks is right as soon as all ranks have the same rows, each in another order, and each rank's
        result is that of its own rows, wherever they are: with the ranks in reverse order it is the same.
        """
        run, matching, n = self.run, self.check, self.run.size
        if run.step:
            return None
        quantities = self.quantities
        wrong = {q.what for q in quantities if not q.ok and q.group in ("value", "output", "state")}
        of_rows = [q for q in quantities if q.group == "gradient" and q.rank is not None]
        if (
            of_rows
            and all(q.ok for q in of_rows)
            and any(not q.ok for q in quantities if q.group in ("value", "output"))
        ):
            return None  # what is wrong does not depend on the rows, such as a penalty that every rank adds
        plan = replace(matching.plan_of(n), order=1)
        of_one = replace(matching.plan, order=1)
        try:
            alone = [
                matching.on_one(on_rank, matching.single, of_one, 0, part)
                for part, k in zip(self.parts, run.sizes, strict=True)
                if k
            ]
            busy = [m for m, k in zip(run.measured, run.sizes, strict=True) if k]
            if all(_same(mine, other, wrong) for mine, other in zip(busy, alone, strict=True)):
                return "each rank returns what one process returns for the rank's own rows"
            if not run.even:
                return None
            swapped = matching.on_parts(run.on, on_rank, self.distributed, self.parts[::-1], plan)
            if not all(_same(mine, other, wrong) for mine, other in zip(swapped[::-1], run.measured, strict=True)):
                return None
            first = self.parts[0]
            parts = [rolled(first, r) for r in range(n)]
            together = matching.on_parts("simulated", on_rank, self.distributed, parts, plan)
            of_one = replace(of_one, outputs=rows_of(together), inputs=run.sizes)
            one = matching.on_one(on_rank, matching.single, of_one, 0, joined(parts))
            again = replace(run, quantities=compare(together, one, run.sizes, self._names, matching.tolerance))
        except Exception:
            return None
        if any(all(q.ok for q in again.under(kind) if q.what in wrong) for kind in ("mean", "sum")):
            return "right if all ranks have the same rows, wrong if they differ"
        return None


def _same(mine: Measurement, other: Measurement, wrong: set[str]) -> bool:
    """Whether two measurements agree in these values, outputs and pieces of state."""
    named = [name for name in wrong if name in mine.state or name in other.state]
    if any(name not in each.state for name in named for each in (mine, other)):
        return False
    states = [[each.state[name] for name in named] for each in (mine, other)]
    return all_near(*states) and (len(named) == len(wrong) or all_near(mine.outputs, other.outputs))
