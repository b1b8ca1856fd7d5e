"""From how a test body ended on each rank to one result and one report."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from diffcoll.testing.processes import RanksFailedError
from diffcoll.testing.rank_body import BodyEnd, text_of

#: The attribute of an error that holds the tracebacks of all ranks that failed, as in pytest's ExceptionChainRepr, and
#: how many notes the error had when they were formatted.
_ATTRIBUTE = "_diffcoll_report"


def conclude(outcomes: list[BodyEnd]) -> None:
    """Raise what the test has raised, if it has not passed on all ranks."""
    by_time = sorted((o for o in outcomes if o.kind != "passed"), key=lambda o: o.at)
    if not by_time:
        return
    for kind in ("interrupted", "rejected"):
        for outcome in by_time:
            if outcome.kind == kind:
                _raise(outcome)
    failed = [o for o in by_time if o.kind in ("failed", "lost")]
    if failed:
        _fail(failed, outcomes)
    kinds = {o.kind for o in outcomes}
    if len(kinds) == 1:
        _raise(by_time[0])
    states = [
        f"{_ranks([o.rank for o in outcomes if o.kind == kind])} {kind}{_reason(outcomes, kind)}" for kind in kinds
    ]
    pytest.fail(
        f"the ranks disagree: {', '.join(sorted(states))}; expected all ranks to call pytest.skip or pytest.xfail, or "
        "none; decide by something that is the same on all ranks",
        pytrace=False,
    )


def _raise(outcome: BodyEnd) -> NoReturn:
    """Raise the error of one rank as if the test had raised it."""
    error = outcome.error
    if error is None:
        raise RanksFailedError(f"an error on rank {outcome.rank} that cannot be sent to another process")
    if isinstance(error, (pytest.skip.Exception, unittest.SkipTest)):
        skip = pytest.skip.Exception(str(error))
        skip._use_item_location = True  # pytest's, without a public name: show the line of the test
        raise skip
    if error.__traceback__ is not None or outcome.line is None:
        raise error
    # The innermost frame of the traceback is the line that raised in the other process. Hypothesis tells failures apart
    # by this line.
    file, number = outcome.line
    exec(compile("\n" * (number - 1) + "raise error", file, "exec"), {"error": error})
    raise AssertionError("unreachable")


def _fail(failed: list[BodyEnd], outcomes: list[BodyEnd]) -> NoReturn:
    """Raise the first error, with a report of all."""
    first, n = failed[0], len(outcomes)
    if first.error is None:
        first.error = RanksFailedError(f"rank {first.rank} of {n}: {first.chain[-1][0]}")
    chain = []
    for ranks, elements in _alike(failed):
        others = ", the first to fail" if first.rank in ranks and len(ranks) < len(failed) else ""
        chain += [*text_of(f"── {_ranks(ranks)} of {n}{others} ──"), *elements]
    for kind in ("skipped", "xfailed"):
        if ranks := [o.rank for o in outcomes if o.kind == kind]:
            chain[:0] = text_of(f"── {_ranks(ranks)} of {n} {kind}{_reason(outcomes, kind)}, expected all or none ──")
    setattr(first.error, _ATTRIBUTE, (chain, len(getattr(first.error, "__notes__", ()))))
    _raise(first)


def _alike(failed: list[BodyEnd]) -> Iterator[tuple[list[int], list[Any]]]:
    """Yield ranks and their common traceback; that of the first failure is last, as in a chain of exceptions."""
    groups: dict[object, list[BodyEnd]] = {}
    for outcome in sorted(failed[1:], key=lambda o: o.rank) + failed[:1]:
        shown, crash, _ = outcome.chain[-1]
        same = (crash.path, crash.lineno, crash.message) if outcome.line and crash else str(shown)
        groups[same] = [*groups.pop(same, []), outcome]
    for alike in groups.values():
        yield sorted(o.rank for o in alike), alike[-1].chain


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _reason(outcomes: list[BodyEnd], kind: str) -> str:
    error = next(o.error for o in outcomes if o.kind == kind)
    return f" ({error})" if str(error or "") else ""


def report_of(error: BaseException) -> tuple[list[Any], list[str]]:
    """Return the tracebacks to show for an error, or the errors of an exception group, and notes that were added later.

    Both are empty if the error is not of ranks.
    """
    if (inner := getattr(error, "exceptions", None)) is not None:
        reports = [report_of(e) for e in inner]
        return [e for chain, _ in reports for e in chain], [note for _, notes in reports for note in notes]
    chain, notes = getattr(error, _ATTRIBUTE, ([], None))
    return chain, [] if notes is None else getattr(error, "__notes__", [])[notes:]
