"""The page of `diffcoll check`: tables of errors with bars, and the diagnosis."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from diffcoll.cli.page import document
from diffcoll.testing.harness.report import Cause, Report, Row, Table, ratio_in_words

#: Decimal exponents of the errors at the left and the right end of a bar, and those that are labelled.
_LEAST, _MOST = -18, 2
_TICKS = range(-16, 1, 4)
#: Size of the picture of a bar, in pixels.
_WIDTH, _HEIGHT = 320, 14

_STYLE = """
h2 { font-size: 1.1rem; margin-top: 2rem } td, tbody th { vertical-align: middle } td.bar { width: 21rem; padding: 0 }
.bar svg { display: block; width: 20rem; height: auto } .bar svg text { font-size: 10px }
svg .right { fill: var(--right) } svg .wrong { fill: var(--wrong) } svg .line { stroke: currentColor; opacity: .25 }
svg .allowed { stroke: currentColor; stroke-dasharray: 3 2 } pre { white-space: pre-wrap; overflow-wrap: anywhere }
dt { font-weight: 600; margin-top: .6rem } dd { margin-left: 1.5rem }
"""

_READ = """<p>Each bar is the error of one quantity on one rank, on a logarithmic scale: the largest difference from the
reference, relative to the largest number of the reference. Rank "all" is the result after the reduction over ranks.
Rounding errors are near 1e-16 in float64 and near 1e-7 in float32; finite differences are exact to 1e-6 or better.
<em>got/wanted</em> is a number if the result is this multiple of the reference; N is the number of ranks."""


def page(report: Report, target: str, about: str) -> str:
    """Return the page as HTML, without references to other files."""
    run = [table for table in report.tables if not table.skipped]
    wrong, left = sum(not table.ok for table in run), len(report.tables) - len(run)
    runs = f"{len(run)} run{'s' * (len(run) != 1)}"
    verdict = f"{wrong} of {runs} wrong" if wrong else f"{runs}, all right"
    verdict += f"; {left} not run" * bool(left)
    parts = [
        f"<p>{html.escape(report.title)}. {html.escape(about)}.",
        _section("Diagnosis", f"<dl>{''.join(map(_cause, report.causes))}</dl>" if report.causes else ""),
        _section("Graph cuts", _list(report.cuts)),
        _READ,
        *map(_table, report.tables),
        _section("Notes", _list(report.notes)),
    ]
    return document(f"diffcoll check {target}", verdict, report.ok, "\n".join(filter(None, parts)), _STYLE)


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>\n{content}" if content else ""


def _list(entries: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(entry)}' for entry in entries)}</ul>" if entries else ""


def _cause(cause: Cause) -> str:
    usually = f"<dd>Usual cause: {html.escape(cause.usually)}." if cause.usually else ""
    fix = f"<dd>Fix: {html.escape(cause.fix)}." if cause.fix else ""
    return f"<dt>{html.escape(cause.name)}<dd>{html.escape(cause.seen)}.{usually}{fix}"


def _table(table: Table) -> str:
    title = html.escape(table.title)
    if table.skipped:
        return f"<h2>{title}: not run</h2>\n<p>{html.escape(table.skipped)}"
    verdict = f'<span class="{"right" if table.ok else "wrong"}">{"right" if table.ok else "wrong"}</span>'
    if table.raised:
        return f'<h2>{title}: <span class="wrong">raised</span></h2>\n<pre>{html.escape(table.raised)}</pre>'
    rows = "\n".join(_row(row, table.world_size) for row in table.rows)
    return f"""<h2>{title}: {verdict}</h2>
<table>
<thead><tr><th>quantity<th>rank<th>error<td class="bar">{_axis()}<th>got/wanted
<tbody>
{rows}
</table>"""


def _row(row: Row, n: int) -> str:
    rank = "all" if row.rank is None else row.rank
    style = "right" if row.ok else "wrong"
    ratio = html.escape(ratio_in_words(row.ratio, n)) if row.ratio is not None or not row.ok else ""
    error = f'<td class="n {style}">{"✓" if row.ok else "✗"} {row.error:.1e}'
    return f'<tr><th>{html.escape(row.what)}<td class="n">{rank}{error}<td class="bar">{_bar(row)}<td class="n">{ratio}'


def _bar(row: Row) -> str:
    style = "right" if row.ok else "wrong"
    length = _at(math.log10(row.error)) if 0 < row.error < math.inf else _WIDTH * (row.error > 0)
    lines = "".join(f'<path class="line" d="M{_at(k):g} 0V{_HEIGHT}"/>' for k in _TICKS)
    if (allowed := row.allowed) is not None and allowed > 0:
        at = _at(math.log10(allowed))
        lines += f'<path class="allowed" d="M{at:.1f} 0V{_HEIGHT}"/>'
    words = f"{row.what}: {row.error:.1e}, {style}"
    bar = f'<rect class="{style}" y="2" width="{length:.1f}" height="{_HEIGHT - 4}"/>'
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(words)}">{bar}{lines}</svg>'


def _axis() -> str:
    labels = "".join(f'<text x="{_at(k):g}" y="11" text-anchor="middle">1e{k}</text>' for k in _TICKS if k)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{labels}<text x="{_at(0):g}" y="11" text-anchor="middle">1</text></svg>'
    )


def _at(exponent: float) -> float:
    """Return the position of 10^exponent."""
    return min(max((exponent - _LEAST) / (_MOST - _LEAST), 0.0), 1.0) * _WIDTH
