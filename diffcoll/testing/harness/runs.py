"""The runs of a check against one process, and what is concluded from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from diffcoll.core.torch_private.trees import tree_flatten
from diffcoll.testing.harness.causes import OBSERVED, Kind, cause_of
from diffcoll.testing.harness.comparison import Run, tolerance_of, unchecked
from diffcoll.testing.harness.hypotheses import diagnose
from diffcoll.testing.harness.matching import Matching
from diffcoll.testing.harness.one_process import case_of
from diffcoll.testing.harness.report import Cause, Report


def report_of(
    matching: Matching, tolerance: float | None, each_sizes: Sequence[tuple[int, ...]], on: Sequence[str]
) -> Report:
    """Return the report of ranks that have parts of the batch."""
    if tolerance is None:
        tolerance = tolerance_of([*tree_flatten(matching.whole(each_sizes[0]))[0], *matching.single.unpack().tensors])
    matching = replace(matching, tolerance=tolerance).with_losses(max(each_sizes, key=sum))
    runs: list[Run] = []
    for kind in on:
        for each, step in itertools.product(each_sizes, range(matching.steps)):
            known = [r for r in runs if r.sizes == each and not r.skipped and not _is_right(r, matching.rank_reduction)]
            if wrong := [r for r in known if r.on != kind or r.step < step]:
                where = "in the step before" if wrong[-1].on == kind else f"on {wrong[-1].on} ranks"
                runs.append(Run(kind, each, [], [], None, skipped=f"wrong already {where}", step=step))
            else:
                runs.append(matching.attempt(kind, each, step) if runs else matching.run(kind, each, step))
    return _concluded(matching, runs)


def _is_right(run: Run, rank_reduction: str) -> bool:
    asked = ("mean", "sum") if rank_reduction == "any" else (rank_reduction,)
    return any(run.ok(each) for each in asked)


def _concluded(matching: Matching, runs: list[Run]) -> Report:
    """Return the report. The run that is diagnosed is the first wrong one with equal sizes, or else the first."""
    asked = _closest(runs) if matching.rank_reduction == "any" else matching.rank_reduction
    tables = tuple(run.table(asked) for run in runs)
    words = f"gradients {'averaged' if asked == 'mean' else 'summed'} over ranks"
    if matching.rank_reduction == "any" and not all(table.ok or table.raised for table in tables):
        words = f"no reduction is right for all, shown {words}"
    report = Report(f"{matching.name}, {words}", tables, rank_reduction=asked)
    if report.ok:
        return replace(report, notes=tuple(unchecked(runs, matching.tolerance)))
    scope = tuple(_scope([run for run in runs if not run.skipped], asked))
    wrong = sorted((run for run in runs if run.quantities and not run.ok(asked)), key=lambda run: not run.even)
    if not wrong:
        return replace(report, causes=scope)
    case = case_of(matching, wrong[0], asked)
    causes = diagnose(case)
    same = (wrong[0].sizes, wrong[0].step)
    skipped = [i for i, run in enumerate(runs) if run.skipped and (run.sizes, run.step) == same]
    if skipped and wrong[0].on == "simulated" and OBSERVED.issuperset(cause.name for cause in causes):
        (i, *_), kind = skipped, runs[skipped[0]].on
        runs[i] = matching.attempt(kind, *same)
        report = replace(report, tables=tuple(run.table(asked) for run in runs))
        if runs[i].ok(asked):
            causes, scope = [cause_of(Kind.SHARED_STATE, f"wrong on simulated ranks, right on {kind}")], ()
    if any(cause.name == Kind.NOT_FINITE for cause in causes):
        scope = tuple(cause for cause in scope if cause.name != Kind.EMPTY)
    return replace(report, causes=(*causes, *scope), cuts=case.cuts.lines)


def _closest(runs: list[Run]) -> str:
    """Return the reduction under which the fewest quantities are wrong, gradients of first order first."""

    def wrong(rank_reduction: str) -> tuple[int, int]:
        groups = [q.group for run in runs for q in run.under(rank_reduction) if not q.ok]
        return groups.count("gradient"), len(groups)

    return min(("mean", "sum"), key=wrong)


def _scope(runs: Sequence[Run], rank_reduction: str) -> Iterator[Cause]:
    """Say which runs raised errors, and in which runs alone something is wrong."""

    def sizes(of: Sequence[Run]) -> str:
        return ", ".join(dict.fromkeys(str(run.sizes) for run in of))

    def steps(of: Sequence[Run]) -> str:
        return ", ".join(f"step {step + 1}" for step in sorted({run.step for run in of}))

    wrong = [run for run in runs if not run.ok(rank_reduction)]
    right = [run for run in runs if run not in wrong]
    raised = [run for run in wrong if run.raised]
    if raised and not any(run.even for run in raised):
        yield cause_of(Kind.RAISED, f"raised an error with rows {sizes(raised)}, and none with equal ranks")
    elif raised:
        yield Cause(Kind.RAISED.value, f"raised an error with rows {sizes(raised)}")
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
