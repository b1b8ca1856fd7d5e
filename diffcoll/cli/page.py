"""HTML pages: one file, readable in light and dark, without scripts; the page of `diffcoll check`."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diffcoll.testing.harness.report import Cause, Report, Row, Table

_FRAME_STYLE = """
:root { color-scheme: light dark; --line: #8884; --right: #1a7f37; --wrong: #cf222e; --none: #8888 }
@media (prefers-color-scheme: dark) { :root { --right: #3fb950; --wrong: #ff7b72 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
h1, h2, p, pre, dl, ul { overflow-wrap: anywhere } .wide { overflow-x: auto }
table { border-collapse: collapse; width: 100% } caption { text-align: left; padding: .5rem 0; color: GrayText }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
tbody th { font-weight: 600 } td.call { font-family: ui-monospace, monospace; font-size: 13px }
td.n { white-space: nowrap; font: 13px ui-monospace, monospace }
.right { color: var(--right) } .wrong { color: var(--wrong) } .none { color: var(--none) }
svg { width: 100%; max-width: 44rem } svg text { font: 12px system-ui; fill: currentColor }
"""


def document(title: str, verdict: str, right: bool, body: str, style: str = "") -> str:
    """Return a page without references to other files.

    Args:
        title: of the page.
        verdict: its first sentence.
        right: whether the verdict is shown as right or as wrong.
        body: HTML; title and verdict are escaped here, the body is not.
        style: further rules of CSS.
    """
    title = html.escape(title)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>{_FRAME_STYLE}{style}</style>
<h1>{title}</h1>
<p class="{"right" if right else "wrong"}"><strong>{"✓" if right else "✗"} {html.escape(verdict)}.</strong>
{body}
</html>
"""


@dataclass(frozen=True)
class Cell:
    """One cell of a table, on a page or in a terminal."""

    text: str
    #: "n": numbers, "call": code, "bar": a picture.
    kind: str = "n"
    #: A key of `STYLES`.
    style: str = ""
    #: HTML that follows the text.
    picture: str = ""

    @property
    def marked(self) -> str:
        """The text, after a tick or a cross."""
        return MARKS.get(self.style, "") + self.text

    def __str__(self) -> str:
        kinds = f"{self.kind} {self.style}".rstrip()
        if not self.text and not self.picture:
            return f'<td class="{kinds} none">–'
        return f'<td class="{kinds}">{html.escape(self.marked)}{self.picture}'


#: What is before a text that is right or wrong.
MARKS = {"right": "✓ ", "wrong": "✗ "}


#: How a terminal shows what is right, wrong or missing, and titles.
STYLES = {"right": "green", "wrong": "red", "none": "dim", "title": "bold", "": ""}


def table(head: Iterable[str | Cell], rows: Iterable[tuple[str, Sequence[Cell]]], caption: str = "") -> str:
    """Return a table that scrolls where the page is too narrow. Each row has a title and its cells.

    The title of a row stands for the rows after it that have none.
    """
    title = f"<caption>{html.escape(caption)}</caption>\n" if caption else ""
    top = "".join(str(each) if isinstance(each, Cell) else f"<th>{html.escape(each)}" for each in head)
    groups: list[list[str]] = []
    titles = []
    for name, cells in rows:
        if name or not groups:
            groups.append([])
            titles.append(html.escape(name))
        groups[-1].append("".join(map(str, cells)))
    spans = [f' rowspan="{len(group)}"' if len(group) > 1 else "" for group in groups]
    body = "\n".join(
        f"<tr><th{span}>{name}" + "\n<tr>".join(group) for name, span, group in zip(titles, spans, groups, strict=True)
    )
    return f"""<div class="wide"><table>
{title}<thead><tr>{top}
<tbody>
{body}
</table></div>"""


# ── the page of `diffcoll check` ─────────────────────────────────────────────────────────────────────────

#: Decimal exponents of the errors at the left and the right end of a bar, and those that are labelled.
_LEAST, _MOST = -18, 2
_TICKS = range(-16, 1, 4)
#: Sizes of the pictures of an error and of a ratio, in pixels.
_WIDTH, _RATIO_WIDTH, _HEIGHT = 320, 100, 14
#: The powers of N at the ends of the picture of a ratio.
_POWERS = 2.5

_STYLE = """
h2 { font-size: 1.1rem; margin-top: 2rem } td, tbody th { vertical-align: middle } td.bar { padding: 0 .3rem }
.bar svg { display: block; height: auto } .bar svg text { font-size: 10px }
.bar svg.error { width: 20rem } .bar svg.ratio { width: 6.25rem }
svg .right { fill: var(--right) } svg .wrong { fill: var(--wrong) } svg .line { stroke: currentColor; opacity: .25 }
svg .allowed { stroke: currentColor; stroke-width: 1.5; stroke-dasharray: 3 2 }
svg.key { width: 1rem; height: 14px; vertical-align: middle } pre { white-space: pre-wrap }
dt { font-weight: 600; margin-top: .6rem } dd { margin-left: 1.5rem }
"""

_READ = f"""<p>The bars on the right are the errors of one quantity on one rank, on a logarithmic scale: the largest
difference from the reference, relative to the largest number of the reference. The dashed line
<svg class="key" viewBox="0 0 16 {_HEIGHT}"><path class="allowed" d="M8 0V{_HEIGHT}"/></svg> is the allowed error: a bar
that ends before it is right (✓), one that crosses it is wrong (✗). Rank "all" is the result after the reduction over
ranks. Rounding errors are near 1e-16 in float64 and near 1e-7 in float32; finite differences are exact to 1e-6 or
better.
<p><em>got/wanted</em> is a number if the result is this multiple of the reference; N is the number of ranks. Where it
is wrong, a bar next to it shows it on a logarithmic scale: too small on the left of 1, too large on the right."""


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


def _table(of: Table) -> str:
    title = html.escape(of.title)
    if of.skipped:
        return f"<h2>{title}: not run</h2>\n<p>{html.escape(of.skipped)}"
    if of.raised:
        return f'<h2>{title}: <span class="wrong">✗ raised</span></h2>\n<pre>{html.escape(of.raised)}</pre>'
    verdict = f'<span class="{"right" if of.ok else "wrong"}">{"✓ right" if of.ok else "✗ wrong"}</span>'
    pictured = any(_has_picture(row, of.world_size) for row in of.rows)
    ratios = [Cell("", "bar", picture=_ratio_axis())] * pictured
    columns = "quantity", "rank", "error", "allowed", "got/wanted"
    head: list[str | Cell] = [*columns, *ratios, Cell("", "bar", picture=_axis())]
    rows = ((row.what, _cells(row, of.world_size, pictured)) for row in of.rows)
    return f"<h2>{title}: {verdict}</h2>\n{table(head, rows)}"


def _cells(row: Row, n: int, pictured: bool) -> list[Cell]:
    _, rank, error, ratio = row.words(n)
    allowed = "" if row.allowed is None else f"{row.allowed:.1e}"
    bar = _ratio_bar(row.ratio or 0.0, n) if _has_picture(row, n) else ""
    cells = [Cell(rank), Cell(error, style="right" if row.ok else "wrong"), Cell(allowed), Cell(ratio)]
    return [*cells, *[Cell("", "bar", picture=bar)] * pictured, Cell("", "bar", picture=_bar(row))]


def _bar(row: Row) -> str:
    style = "right" if row.ok else "wrong"
    length = _at(math.log10(row.error)) if 0 < row.error < math.inf else _WIDTH * (row.error > 0)
    lines = "".join(f'<path class="line" d="M{_at(k):g} 0V{_HEIGHT}"/>' for k in _TICKS)
    if (allowed := row.allowed) is not None and allowed > 0:
        at = _at(math.log10(allowed))
        lines += f'<path class="allowed" d="M{at:.1f} 0V{_HEIGHT}"/>'
    words = f"{row.what}: error {row.error:.1e}, allowed {row.allowed}, {style}"
    bar = f'<rect class="{style}" y="2" width="{length:.1f}" height="{_HEIGHT - 4}"/>'
    return _picture("error", _WIDTH, f"{bar}{lines}", words)


def _axis() -> str:
    return _picture("error", _WIDTH, "".join(_label(_at(k), f"1e{k}" if k else "1") for k in _TICKS))


def _at(exponent: float) -> float:
    """Return the position of 10^exponent."""
    return min(max((exponent - _LEAST) / (_MOST - _LEAST), 0.0), 1.0) * _WIDTH


def _has_picture(row: Row, n: int) -> bool:
    return not row.ok and row.ratio is not None and math.isfinite(row.ratio) and n > 1


def _ratio_bar(ratio: float, n: int) -> str:
    """Return the picture of got / wanted, from 1 to the ratio. The sign is in the number next to it."""
    end = _at_power(math.log(abs(ratio), n) if ratio else -_POWERS)
    left, right = sorted((end, _at_power(0)))
    bar = f'<rect class="wrong" x="{left:.1f}" y="2" width="{right - left:.1f}" height="{_HEIGHT - 4}"/>'
    lines = "".join(f'<path class="line" d="M{_at_power(k):g} 0V{_HEIGHT}"/>' for k in (-1, 0, 1))
    return _picture("ratio", _RATIO_WIDTH, bar + lines, f"{ratio:.4g} times the reference")


def _ratio_axis() -> str:
    return _picture(
        "ratio", _RATIO_WIDTH, "".join(_label(_at_power(k), w) for k, w in ((-1, "1/N"), (0, "1"), (1, "N")))
    )


def _at_power(power: float) -> float:
    """Return the position of N^power."""
    return (min(max(power / _POWERS, -1.0), 1.0) + 1) / 2 * _RATIO_WIDTH


def _label(x: float, text: str) -> str:
    return f'<text x="{x:g}" y="11" text-anchor="middle">{text}</text>'


def _picture(kind: str, width: int, content: str, words: str = "") -> str:
    label = f' role="img" aria-label="{html.escape(words)}"' if words else ""
    return f'<svg class="{kind}" viewBox="0 0 {width} {_HEIGHT}"{label}>{content}</svg>'
