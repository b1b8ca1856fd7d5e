"""The frame of the HTML pages that the commands write: one file, readable in light and dark, without scripts."""

from __future__ import annotations

import html
from collections.abc import Iterable

_STYLE = """
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
<style>{_STYLE}{style}</style>
<h1>{title}</h1>
<p class="{"right" if right else "wrong"}"><strong>{"✓" if right else "✗"} {html.escape(verdict)}.</strong>
{body}
</html>
"""


def table(head: str, rows: Iterable[str], caption: str = "") -> str:
    """Return a table that scrolls where the page is too narrow; head and rows are HTML, the caption is escaped here."""
    title = f"<caption>{html.escape(caption)}</caption>\n" if caption else ""
    body = "\n".join(rows)
    return f"""<div class="wide"><table>
{title}<thead><tr>{head}
<tbody>
{body}
</table></div>"""
