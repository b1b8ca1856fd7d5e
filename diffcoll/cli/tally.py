"""How many calls each system of `diffcoll verify` gets right: the headline, and its picture."""

from __future__ import annotations

import html
from collections.abc import Mapping

from diffcoll.cli.checks import NOT_OFFERED, Errors
from diffcoll.cli.page import Cell, table

#: Tolerance: the largest relative error at which a call of diffcoll is right.
TOLERANCE = 1e-10
#: Of PyTorch's own a larger error is wrong; a smaller one may be rounding.
WRONG = 1e-6

#: What a call may be, in the order of the picture.
KINDS = ("right", "wrong", "raises", NOT_OFFERED)
#: How many calls are of each kind.
Counts = dict[str, int]

#: Size of a picture, in pixels.
_WIDTH, _HEIGHT = 440, 14
STYLE = """
td.bar { vertical-align: middle } .bar svg { display: block; width: 27.5rem; height: auto }
svg .right { fill: var(--right) } svg .wrong { fill: var(--wrong) } svg .none { fill: var(--line) }
svg .raises { fill: var(--wrong); opacity: .4 }
"""


def kind(system: str, outcome: Errors) -> str:
    """Return which of `KINDS` a system's outcome is."""
    if isinstance(outcome, str):
        return NOT_OFFERED if outcome == NOT_OFFERED else "raises"
    return "right" if max(outcome.values()) <= (TOLERANCE if system == "diffcoll" else WRONG) else "wrong"


def headline(counts: Mapping[str, Counts]) -> str:
    """Return how many calls of each system are right, of those that it offers."""
    offered = {system: sum(of.values()) - of[NOT_OFFERED] for system, of in counts.items()}
    words = [f"{system} {of['right']} of {offered[system]}" for system, of in counts.items() if offered[system]]
    return ", ".join([f"{words[0]} calls are right", *words[1:]])


def in_words(of: Counts) -> str:
    """Return the counts that are not 0."""
    return ", ".join(f"{of[kind]} {kind}" for kind in KINDS if of[kind])


def picture(counts: Mapping[str, Counts]) -> str:
    """Return a table with a bar for each system."""
    styles = {"right": "right", "wrong": "wrong", "raises": "wrong", NOT_OFFERED: "none"}

    def cells(system: str, of: Counts) -> list[Cell]:
        numbers = [Cell(str(of[kind]), style=styles[kind] * bool(of[kind])) for kind in KINDS]
        return [*numbers, Cell("", "bar", picture=_bar(system, of))]

    head = ["system", "right ✓", "wrong ✗", "raises", NOT_OFFERED, "all calls"]
    return table(head, ((system, cells(system, of)) for system, of in counts.items()))


def _bar(system: str, of: Counts) -> str:
    total, at, parts = sum(of.values()), 0.0, ""
    for kind in KINDS:
        if of[kind]:
            width = of[kind] / total * _WIDTH
            style = "none" if kind == NOT_OFFERED else kind
            parts += f'<rect class="{style}" x="{at + 0.5:.1f}" y="1" width="{max(width - 1, 0.5):.1f}" height="12"/>'
            at += width
    label = html.escape(f"{system}: {in_words(of)}")
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{parts}</svg>'
