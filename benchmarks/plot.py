"""`benchmarks --plot`: a picture of the library's time as a ratio to that of the other systems, over size."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from benchmarks.rows import OURS, Row

#: Okabe and Ito's colours, which people with any colour vision can tell apart; and a marker each.
_STYLES = [
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#000000", "X"),
]
_COLUMNS = 4


def save(rows: Sequence[Row], file: Path) -> None:
    """Write the picture; the suffix says the format.

    Raises:
        OSError: the file cannot be written.
    """
    drawn(rows).savefig(file, dpi=150)


def drawn(rows: Sequence[Row]) -> Figure:
    """Return the picture: a panel for each collective and op that another system offers."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(row.label, []).append(row)
    alone = [label for label, found in panels.items() if not any(len(row.systems) > 1 for row in found)]
    shown = {label: found for label, found in panels.items() if label not in alone}
    systems = list(dict.fromkeys(name for row in rows for name in row.systems if name != OURS))
    columns = max(1, min(_COLUMNS, len(shown)))
    lines = ceil(len(shown) / columns)
    height = 1.7 + 2.3 * lines
    figure = Figure(figsize=(max(7.0, 1.0 + 2.9 * columns), height), layout="constrained")
    handles: dict[str, Any] = {}
    if shown:
        grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
        for axes in grid.flat[len(shown) :]:
            axes.remove()
        for axes, (label, found) in zip(grid.flat[: len(shown)], shown.items(), strict=True):
            _panel(axes, label, found, systems, handles)
        _ratios(grid.flat[0], [row.ratio(name) for row in rows for name in row.systems])
        for axes in list(grid.flat[: len(shown)])[-columns:]:  # the lowest of each column
            axes.set_xlabel("size of x")
        figure.supylabel("time of diffcoll / time of the other", fontsize=10)
    ordered = [name for name in systems if name in handles]
    where: Any = {"loc": "outside lower center", "ncols": 2, "fontsize": 9, "frameon": False}
    figure.legend([handles[name] for name in ordered], ordered, **where)
    first = rows[0]
    on = "diffcoll on MPI, the others on gloo" if first.engine == "mpi" else "gloo"
    title = (
        f"forward + backward, {on}, {first.world_size} ranks, float32, torch {first.torch}; below 1 diffcoll is faster"
    )
    figure.suptitle(title + (f"\nno other system offers {', '.join(alone)}" if alone else ""), fontsize=10)
    return figure


def _panel(axes: Any, label: str, rows: Sequence[Row], systems: Sequence[str], handles: dict[str, Any]) -> None:
    sizes = {row.nbytes: row.size for row in rows}
    axes.axhline(1.0, color="black", linewidth=1.0, zorder=1.5)
    for name, (colour, marker) in zip(systems, _styles(len(systems)), strict=True):
        found = [(row.nbytes, row.ratio(name)) for row in rows if name in row.systems]
        if found:
            x, y = zip(*found, strict=True)
            (handles[name],) = axes.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.4, alpha=0.9)
    axes.set_title(label, fontsize=10)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(sizes)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: sizes.get(round(value), "")))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.08)
    axes.grid(True, axis="y", color="#dddddd", linewidth=0.6)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _styles(count: int) -> list[tuple[str, str]]:
    return [_STYLES[i % len(_STYLES)] for i in range(count)]


def _ratios(axes: Any, ratios: Sequence[float]) -> None:
    """A logarithmic axis in steps of 2 with 1 in it, so that twice and half are equally far from 1."""
    low, high = min([*ratios, 0.5]) / 1.15, max([*ratios, 2.0]) * 1.15
    ticks = [2.0**k for k in range(-10, 11) if low <= 2.0**k <= high]
    axes.set_yscale("log", base=2)
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
