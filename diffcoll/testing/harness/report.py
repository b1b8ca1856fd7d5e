"""The result of a check of gradients: a table for each run, the causes of what is wrong, and the error."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple


class Line(NamedTuple):
    """A line of the report, or several."""

    text: str
    #: "right", "wrong", "title" or "": how a terminal shows it.
    style: str = ""


@dataclass(frozen=True)
class Row:
    """One quantity of one run, compared with its reference."""

    #: "value", "gradient of image", "gradient of logit_scale", "buffer running_mean", "second order of image", …
    what: str
    #: The rank that it was compared on; None: after the reduction over ranks.
    rank: int | None
    #: max |got − wanted| / max |wanted|; inf if shapes differ or a value is not finite.
    error: float
    #: got / wanted, if one is a multiple of the other.
    ratio: float | None
    #: Whether the error is within the tolerance.
    ok: bool
    #: The tolerance; None: the quantity cannot be compared, because the loss has a kink here.
    allowed: float | None
    #: Whether the shapes differ.
    mismatched: bool = False

    def words(self, n: int) -> tuple[str, str, str, str]:
        """Return the quantity, the rank of N, the error, and got / wanted or why there is none."""
        if self.allowed is None:
            ratio = "kink"
        elif self.mismatched or math.isinf(self.error):
            ratio = "other shape" if self.mismatched else "not finite"
        else:
            ratio = "" if self.ok and self.ratio is None else ratio_in_words(self.ratio, n)
        return self.what, "all" if self.rank is None else str(self.rank), f"{self.error:.1e}", ratio


@dataclass(frozen=True)
class Table:
    """One run."""

    #: The kind of ranks, and the rows of each, in words.
    title: str
    #: N.
    world_size: int
    rows: tuple[Row, ...] = ()
    #: The error that was raised instead of a result.
    raised: str = ""
    #: Why the run was left out.
    skipped: str = ""

    @property
    def ok(self) -> bool:
        """Whether the run raised nothing, and every quantity is right."""
        return not self.raised and all(row.ok for row in self.rows)

    def lines(self) -> Iterator[Line]:
        """Yield what is wrong, and how large the largest error of the rest is."""
        wrong = [row.words(self.world_size) for row in self.rows if not row.ok]
        right = [row.error for row in self.rows if row.ok]
        largest = f"largest error {max(right, default=0.0):.1e}"
        if self.skipped:
            yield Line(f"── {self.title}: not run: {self.skipped}")
        elif self.raised:
            yield Line(f"── {self.title}: raised", "wrong")
            yield Line("  " + self.raised.rstrip().replace("\n", "\n  "))
        elif not wrong:
            yield Line(f"── {self.title}: right; {largest} in {len(right)} comparisons", "right")
        else:
            width = max(len(what) for what, *_ in wrong)
            yield Line(f"── {self.title}: wrong", "wrong")
            yield Line(f"  {'what':{width}}  rank      error  got/wanted")
            for what, rank, error, ratio in wrong:
                yield Line(f"✗ {what:{width}}  {rank:>4}  {error:>9}  {ratio}", "wrong")
            if right:
                yield Line(f"  right: {len(right)} other{'s' * (len(right) != 1)}, {largest}")


@dataclass(frozen=True)
class Cause:
    """Why something is wrong."""

    #: A short name, that of a `causes.Kind`.
    name: str
    #: What was seen.
    seen: str
    #: The usual bug behind it.
    usually: str = ""
    #: What to do.
    fix: str = ""

    def __str__(self) -> str:
        lines = [self.seen]
        lines += [f"  usual cause: {self.usually}"] if self.usually else []
        lines += [f"  fix: {self.fix}"] if self.fix else []
        return "\n".join(lines)


@dataclass(frozen=True)
class First:
    """The first submodules, of the same name on one process, where something differs; None: there is none."""

    #: In forward order, whose output has no placement of the whole's.
    output: str | None = None
    #: In backward order, whose output's gradient has none.
    gradient: str | None = None

    def __str__(self) -> str:
        each = (("output", self.output), ("gradient in backward order", self.gradient))
        return "; ".join(
            f"first {what} that differs: {name or 'the module'}" for what, name in each if name is not None
        )


@dataclass(frozen=True)
class Report:
    """What a check of gradients found. `print(report)` shows it; `report.ok` says whether all is right."""

    #: The check, in words.
    title: str
    tables: tuple[Table, ...]
    causes: tuple[Cause, ...] = ()
    #: Lines of code that take a tensor out of the autograd graph: "all_gather at loss.py:41 cuts the graph: …".
    cuts: tuple[str, ...] = ()
    #: What the check does not cover.
    notes: tuple[str, ...] = ()
    #: "mean" or "sum": the reduction over ranks that the tables show; "": the losses are summed.
    rank_reduction: str = ""
    #: With a mesh: the first submodules where something differs.
    first: First | None = None
    #: Whether the check fails if there are notes.
    strict: bool = False

    @property
    def ok(self) -> bool:
        """Whether every run is right, and with `strict` there are no notes."""
        return all(table.ok for table in self.tables) and not (self.strict and self.notes)

    @property
    def _verdict(self) -> str:
        right = [table.ok for table in self.tables]
        if all(right):
            return "right" if self.ok else "right, but strict=True fails with the notes below"
        raised = any(right) and all(table.ok or table.raised for table in self.tables)
        return "raised an error in some runs" if raised else "WRONG"

    def lines(self) -> Iterator[Line]:
        """Yield the verdict, the tables, the causes, the graph cuts and the notes."""
        yield Line(f"{self.title}: {self._verdict}", {"right": "right", "WRONG": "wrong"}.get(self._verdict, ""))
        if words := str(self.first or ""):
            yield Line(f"  {words}")
        for table in self.tables:
            yield from table.lines()
        for title, entries in (("diagnosis", self.causes), ("graph cuts", self.cuts), ("notes", self.notes)):
            if entries:
                yield Line(f"── {title} ──", "title")
                yield from (Line(_wrapped(str(entry))) for entry in entries)

    def __str__(self) -> str:
        return "\n".join(line.text for line in self.lines())


class GradientMismatchError(AssertionError):
    """A check of gradients failed. `report` has the details, and the message shows them."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[type[GradientMismatchError], tuple[Report]]:
        """Ranks of a test send their errors to another process."""
        return GradientMismatchError, (self.report,)


class UncheckedWarning(UserWarning):
    """A check of gradients passed, and this is what it could not judge or did not compare."""


def concluded(report: Report, strict: bool) -> Report:
    """Return the report of a check, called by what the user calls: raise if something is wrong, and warn of notes."""
    __tracebackhide__ = True
    report = replace(report, strict=strict)
    if not report.ok:
        raise GradientMismatchError(report)
    for note in report.notes:
        warnings.warn(f"{report.title.partition(',')[0]}: {note}", UncheckedWarning, stacklevel=3)
    return report


def title_of(on: str, n: int, *more: str) -> str:
    """Return the title of a table: the kind of ranks, N, and what they have."""
    return ", ".join((on, f"{n} rank{'s' * (n != 1)}", *more))


def ratio_in_words(ratio: float | None, n: int, near: float = 1e-3) -> str:
    """Return a ratio as a number, and what it is in terms of N, as far as it is near enough."""
    if ratio is None:
        return "no multiple"
    named = {1.0: "", 1.0 * n: " = N", 1.0 / n: " = 1/N", 1.0 * n * n: " = N²", 1.0 / n / n: " = 1/N²"} if n > 1 else {}
    word = next((word for value, word in named.items() if math.isclose(ratio, value, rel_tol=near)), "")
    return f"{ratio:.4g}{word}"


def _wrapped(text: str) -> str:
    """Indent each line, and wrap it with a deeper indent."""
    found = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        found += textwrap.wrap(
            line.strip(), 110, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False
        )
    return "\n".join(found)
