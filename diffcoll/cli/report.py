"""Output of `diffcoll verify`: a table on the terminal, and a self-contained HTML page."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from diffcoll.cli.page import document

#: Tolerance: the largest relative error at which a collective passes.
TOLERANCE = 1e-10
#: The same for the training on real input.
TRAINING_TOLERANCE = 1e-9
#: A larger error is shown as wrong; a smaller one may be rounding.
WRONG = 1e-6

#: The result of one system on one call: errors by name, or the reason why there are none.
Errors = dict[str, float] | str


@dataclass
class Row:
    """One call at one world size."""

    collective: str
    call: str
    world_size: int
    systems: dict[str, Errors] = field(default_factory=dict)

    def passes(self) -> bool:
        """Whether all errors of diffcoll are within the tolerance."""
        own = self.systems["diffcoll"]
        return isinstance(own, dict) and max(own.values()) <= TOLERANCE


@dataclass
class Training:
    """Loss curves of a training on one process and, for each gather of the keys, on several."""

    world_size: int
    one_process: list[float]
    curves: dict[str, list[float]] = field(default_factory=dict)
    #: The largest differences from one process, of the loss and of the final parameters.
    differences: dict[str, tuple[float, float]] = field(default_factory=dict)
    #: The reason why there are none.
    error: str = ""

    def passes(self) -> bool:
        """Whether the training with diffcoll equals that of one process."""
        return not self.error and max(self.differences["diffcoll.all_gather"]) <= TRAINING_TOLERANCE


@contextmanager
def progress(total: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show a progress bar; yields a function that advances it by one and sets its description."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=quiet, console=Console(stderr=True)) as bar:
        task = bar.add_task("verify", total=total)

        def advance(what: str) -> None:
            bar.update(task, advance=1, description=what)

        yield advance


def wide_console() -> Console:
    """Return a console of the terminal's width, or 160 columns if the width is unknown."""
    console = Console()
    known = console.is_terminal and os.get_terminal_size(console.file.fileno()).columns > 0  # 0 under mpiexec
    return console if known else Console(width=160)


def show(rows: list[Row], training: Training | None, about: str) -> None:
    """Print the table; a call at several world sizes is one line, with the larger error."""
    console = wide_console()
    if rows:
        console.print(_matrix(rows, about))
    if training is not None:
        console.print(_training(training))
    failed = [row for row in rows if not row.passes()]
    for row in failed:
        own = row.systems["diffcoll"]
        why = own if isinstance(own, str) else "error above tolerance"
        console.print(Text(f"{why}: {row.collective}({row.call}), N = {row.world_size}", style="red"))
    if rows:
        style = "red" if failed else "green"
        console.print(f"diffcoll: {len(rows) - len(failed)} of {len(rows)} calls are right", style=style)


def _matrix(rows: list[Row], about: str) -> Table:
    systems = _systems(rows)
    grid = Table(
        title=f"relative error against the reference: output, gradient, second order\n"
        f"jvp: output, tangent; compiled (fullgraph, inductor): output, gradient\n{about}"
    )
    grid.add_column("collective", style="bold", no_wrap=True)
    grid.add_column("call")
    grid.add_column("N", no_wrap=True)
    for system in systems:
        grid.add_column(_short(system), min_width=26)
    before = ""
    for row in _merged(rows):
        if before not in ("", row.collective):
            grid.add_section()
        name = row.collective if row.collective != before else ""
        before = row.collective
        cells = [Text(_text(row.systems[system]), style=_STYLES[_verdict(row.systems[system])]) for system in systems]
        grid.add_row(name, Text(row.call), row.sizes, *cells)
    return grid


def _training(training: Training) -> Table:
    n, steps = training.world_size, len(training.one_process)
    grid = Table(title=f"digits with InfoNCE, {steps} steps: {n} processes against one process with the whole batch")
    for name in ("gather", "loss curve differs by", "final parameters differ by"):
        grid.add_column(name)
    for way, differences in training.differences.items():
        style = _STYLES["wrong" if max(differences) > WRONG else "right"]
        grid.add_row(way, *(Text(f"{value:.0e}", style=style) for value in differences))
    if training.error:
        grid.add_row("diffcoll.all_gather", Text(training.error, style=_STYLES["wrong"]))
    return grid


class _Merged:
    """One call at all its world sizes."""

    def __init__(self, rows: list[Row]) -> None:
        self.collective, self.call = rows[-1].collective, rows[-1].call
        self.sizes = " ".join(str(row.world_size) for row in rows)
        self.systems: dict[str, Errors] = {}
        for system in rows[0].systems:
            outcomes = [row.systems[system] for row in rows]
            words = [o for o in outcomes if isinstance(o, str)]
            numbers = [o for o in outcomes if isinstance(o, dict)]
            self.systems[system] = words[0] if words else {k: max(o[k] for o in numbers) for k in numbers[0]}


def _merged(rows: list[Row]) -> list[_Merged]:
    """Merge the rows of one call: the n-th call of a collective is the same call at every world size."""
    groups: dict[tuple[str, int], list[Row]] = {}
    count: dict[tuple[str, int], int] = {}
    for row in rows:
        at = row.collective, row.world_size
        count[at] = count.get(at, 0) + 1
        groups.setdefault((row.collective, count[at]), []).append(row)
    order = list(dict.fromkeys(row.collective for row in rows))
    return [_Merged(groups[key]) for key in sorted(groups, key=lambda key: (order.index(key[0]), key[1]))]


def _systems(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(system for row in rows for system in row.systems))


def _short(system: str) -> str:
    """Return the title of a column; PyTorch's own collectives get the release, on which their results depend."""
    short = system.removeprefix("torch.distributed.")
    return short if short == system else f"{short} of torch {torch.__version__}"


def _text(outcome: Errors) -> str:
    return outcome if isinstance(outcome, str) else " ".join(f"{value:.0e}" for value in outcome.values())


_STYLES = {"right": "green", "wrong": "red", "none": "dim"}


def _verdict(outcome: Errors) -> str:
    if isinstance(outcome, str):
        return "none" if outcome == "not offered" else "wrong"
    return "wrong" if max(outcome.values()) > WRONG else "right"


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────


def page(rows: list[Row], training: Training | None, about: str) -> str:
    """Return the page as HTML, without references to other files."""
    systems = _systems(rows)
    failed = sum(not row.passes() for row in rows)
    verdict = f"{len(rows) - failed} of {len(rows)} calls of diffcoll are right"
    head = "".join(f"<th>{html.escape(_short(system))}" for system in systems)
    body = []
    before = ""
    for row in _merged(rows):
        name = row.collective if row.collective != before else ""
        before = row.collective
        outcomes = [row.systems[system] for system in systems]
        cells = [f'<td class="n {_verdict(o)}">{html.escape(_text(o))}' for o in outcomes]
        call = f'<td class="call">{html.escape(row.call)}<td class="n">{row.sizes}'
        body.append(f"<tr><th>{html.escape(name)}{call}{''.join(cells)}")
    text = f"""<p>Rank r computes a loss ℓ<sub>r</sub>; the objective is their sum. Each call ran on real processes with
data and cotangents that differ on every rank. Each cell has three numbers: the relative errors of the output, the
gradient and a second-order gradient, against reference gradients that PyTorch derives with all ranks in one autograd
graph. Rows jvp (forward mode) have two: output and tangent. Rows compiled (torch.compile(fullgraph=True)) have two:
output and gradient. The columns of PyTorch's own collectives hold for torch {html.escape(torch.__version__)}.
<table>
<caption>{html.escape(about)}</caption>
<thead><tr><th>collective<th>call<th>N{head}
<tbody>
{chr(10).join(body)}
</table>
{_section(training) if training else ""}"""
    return document("diffcoll verify", verdict, not failed, text)


def _section(training: Training) -> str:
    n = training.world_size
    rows = "".join(
        f'<tr><td>{html.escape(way)}<td class="n {"wrong" if max(d) > WRONG else "right"}">{d[0]:.0e} {d[1]:.0e}'
        for way, d in training.differences.items()
    )
    if training.error:
        rows = f'<tr><td>diffcoll.all_gather<td class="wrong">{html.escape(training.error)}'
    return f"""<h2>Training on real input</h2>
<p>An encoder of handwritten digits with InfoNCE: the loss of the whole batch at each step, on one process and on {n}.
{_chart({"one process": training.one_process, **training.curves})}
<table><thead><tr><th>gather<th>loss curve and final parameters differ from one process by<tbody>{rows}</table>"""


def _chart(curves: dict[str, list[float]]) -> str:
    width, height, left, bottom = 640, 300, 40, 30
    top = max(max(curve) for curve in curves.values())
    colours = ("currentColor", "var(--right)", "var(--wrong)")
    lines = []
    for i, (name, curve) in enumerate(curves.items()):
        across = (width - left) / (len(curve) - 1)
        heights = [5 + (height - bottom) * (1 - value / top) for value in curve]
        points = " ".join(f"{left + k * across:.1f},{y:.1f}" for k, y in enumerate(heights))
        dashes = "2 6" if i == 1 else "none"  # it coincides with the first curve
        look = f'style="stroke:{colours[i]}" stroke-dasharray="{dashes}" stroke-width="{4 if i == 1 else 1.5}"'
        lines.append(f'<polyline points="{points}" fill="none" {look}/>')
        lines.append(f'<text x="{width - 230}" y="{20 + 18 * i}" style="fill:{colours[i]}">{html.escape(name)}</text>')
    axis = f'<path d="M{left} 5V{height - bottom + 5}H{width}" fill="none" stroke="currentColor" opacity=".4"/>'
    labels = f'<text x="0" y="14">{top:.1f}</text><text x="{left}" y="{height - 6}">step 0</text>'
    return f'<svg viewBox="0 0 {width} {height}">{axis}{labels}{"".join(lines)}</svg>'


def memory_of_process(key: str) -> float:
    """Return one of this process's memory counts, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(key))
