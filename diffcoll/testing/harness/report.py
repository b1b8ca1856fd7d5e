"""The result of a check of gradients: a table for each run, what was observed of what is wrong, and the error."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Row(NamedTuple):
    """One quantity of one run, compared with its reference."""

    #: "value", "gradient of image", "gradient of logit_scale", "buffer running_mean", "second order of image", …
    what: str
    #: The ranks that it was compared on, or their coordinates; "all": the same on all of them.
    rank: str
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
    #: False: rounding on one process hides it, and nothing is said of it.
    decided: bool = True
    #: Factors nearer to 1 are not seen.
    seen: float = 0.0
    #: Integers or flags that differ, in words.
    numbers: str = ""

    def words(self, n: int) -> tuple[str, str, str, str]:
        """Return the quantity, the ranks of N, the error, and got / wanted or why there is none."""
        if self.allowed is None:
            ratio = "kink"
        elif self.numbers:
            return self.what, self.rank, "", self.numbers
        elif self.mismatched or math.isinf(self.error):
            ratio = "other shape" if self.mismatched else "not finite"
        else:
            ratio = "" if self.ok and self.ratio is None else ratio_in_words(self.ratio, n)
        return self.what, self.rank, f"{self.error:.1e}", ratio


@dataclass(frozen=True)
class Table:
    """One run."""

    #: The kind of ranks, and what each has, in words.
    title: str
    #: N.
    world_size: int
    rows: tuple[Row, ...] = ()
    #: The least precise dtype of the program, and the error that is right in it, in words.
    precision: str = ""
    #: The error that was raised instead of a result.
    raised: str = ""

    @property
    def ok(self) -> bool:
        """Whether the run raised nothing, and every quantity is right."""
        return not self.raised and all(row.ok for row in self.rows)

    def lines(self) -> Iterator[str]:
        """Yield what is wrong, and how large the largest error of the rest is."""
        wrong = [row.words(self.world_size) for row in self.rows if not row.ok]
        right = [row.error for row in self.rows if row.ok and row.decided]
        largest = f"largest error {max(right, default=0.0):.1e}"
        if self.raised:
            yield f"── {self.title}: raised"
            yield "  " + self.raised.rstrip().replace("\n", "\n  ")
        elif not wrong:
            allowed = f" ({self.precision})" if self.precision else ""
            yield f"── {self.title}: right; {largest} in {len(right)} comparisons{allowed}"
        else:
            width, held = (max(len(row[k]) for row in wrong) for k in (0, 1))
            held = max(held, 4)
            yield f"── {self.title}: wrong" + f" ({self.precision})" * bool(self.precision)
            yield f"  {'what':{width}}  {'rank':>{held}}      error  got/wanted"
            for what, rank, error, ratio in wrong:
                yield f"✗ {what:{width}}  {rank:>{held}}  {error:>9}  {ratio}"
            if right:
                yield f"  right: {len(right)} other{'s' * (len(right) != 1)}, {largest}"


@dataclass(frozen=True)
class Report:
    """What a check of gradients found. `print(report)` shows it; `report.ok` says whether all is right."""

    #: The check, in words.
    title: str
    tables: tuple[Table, ...]
    #: What was observed of the first wrong run; each was tested on all ranks.
    observed: tuple[str, ...] = ()
    #: Lines of code that take a tensor out of the autograd graph: "all_gather at loss.py:41 cuts the graph: …".
    cuts: tuple[str, ...] = ()
    #: What the check took for granted, or could not judge.
    notes: tuple[str, ...] = ()
    #: On what condition the verdict holds, such as "if you average gradients over dp (…)"; "": none.
    condition: str = ""
    #: What the verdict says nothing of: "bias: frozen: …".
    not_compared: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every run is right."""
        return all(table.ok for table in self.tables)

    def lines(self) -> Iterator[str]:
        """Yield the verdict, the tables, the observations, the graph cuts and the notes."""
        right = [table.ok for table in self.tables]
        raised = any(right) and all(table.ok or table.raised for table in self.tables)
        verdict = "right" if all(right) else "raised an error in some runs" if raised else "WRONG"
        yield f"{self.title}: {', '.join(filter(None, (verdict, self.condition)))}"
        for table in self.tables:
            yield from table.lines()
        parts = {"observed": self.observed, "graph cuts": self.cuts, "notes": self.notes}
        for title, entries in (parts | {"not compared": self.not_compared}).items():
            if entries:
                yield f"── {title} ──"
                wrap = {"initial_indent": "  ", "subsequent_indent": "    ", "break_long_words": False}
                yield from (textwrap.fill(entry, 112, **wrap) for entry in entries)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return "\n".join(self.lines())


class GradientMismatchError(AssertionError):
    """A check of gradients failed. `report` has the details, and the message shows them."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[type[GradientMismatchError], tuple[Report]]:
        """Ranks of a test send their errors to another process."""
        return GradientMismatchError, (self.report,)


def scale_in_words(ratio: float, sizes: Mapping[str, int], near: float = 1e-3) -> str:
    """Return which power of a size a ratio is, as far as it is near enough; "": none."""
    for name, n in sizes.items():
        for power, words in {1: name, -1: f"1/{name}", 2: f"{name}²", -2: f"1/{name}²"}.items():
            if n > 1 and math.isclose(ratio, float(n) ** power, rel_tol=near):
                return words
    return ""


def ratio_in_words(ratio: float | None, n: int) -> str:
    """Return a ratio as a number, and what it is in terms of N."""
    if ratio is None:
        return "no multiple"
    words = scale_in_words(ratio, {"N": n})
    return f"{ratio:.4g} = {words}" if words else f"{ratio:.4g}"


def together(each: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield "names: words" for quantities and words; what several have in common is said once."""
    found: dict[str, dict[str, None]] = {}
    for what, words in each:
        found.setdefault(words, {})[what.removeprefix("gradient of ")] = None
    for words, names in found.items():
        *others, last = names
        yield f"{', '.join(others)} and {last}: {words}" if others else f"{last}: {words}"
