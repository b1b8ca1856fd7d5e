"""`diffcoll verify`: check every collective against a reference gradient, on real processes, next to PyTorch's own.

Starts processes on this machine, with gloo or, with `--engine mpi`, under mpiexec, and keeps them for all checks. Under
`torchrun` (or any launcher that sets RANK and WORLD_SIZE) and under `mpiexec` it uses the launched processes, which may
be on several hosts. PyTorch's own collectives always run on torch.distributed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import zip_longest

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from diffcoll.cli.checks import NOT_OFFERED, Errors, jobs, worst
from diffcoll.cli.competitors import SYSTEMS
from diffcoll.cli.launch import UnreachableError
from diffcoll.cli.page import MARKS, STYLES, Cell, document, table
from diffcoll.cli.ranks import Launched, Spawned
from diffcoll.cli.tally import KINDS, STYLE, Counts, headline, in_words, kind, picture
from diffcoll.core.torch_private.release import COMPILES


@dataclass
class CheckedCall:
    """One call at one world size."""

    collective: str
    call: str
    world_size: int
    systems: dict[str, Errors] = field(default_factory=dict)

    def passes(self) -> bool:
        """Whether all errors of diffcoll are within the tolerance."""
        return kind("diffcoll", self.systems["diffcoll"]) == "right"


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    world: Spawned | Launched
    if options.launched:
        try:
            world = Launched("mpi" if options.launched == "mpi" else options.backend)
        except UnreachableError as error:
            print(f"diffcoll verify: {error}", file=sys.stderr)
            return 2
    else:
        world = Spawned("mpi" if options.engine == "mpi" else options.backend)
    sizes = [dist.get_world_size()] if options.launched else options.world_size or [2, 3]
    todo = list(jobs(sizes, options.names))
    rows: list[CheckedCall] = []
    with progress(len(todo) * len(SYSTEMS), quiet=not world.speaks) as advance:
        for checks, timeout in todo:
            new = [CheckedCall(check.collective, check.call, check.world_size) for check in checks]
            for system in SYSTEMS:
                advance(f"{checks[0].collective}, {checks[0].world_size} processes")
                for row, outcome in zip(new, world.run(checks, timeout, system, options.seed), strict=True):
                    row.systems[system] = outcome
            rows += new
    passed = all(row.passes() for row in rows)
    if world.speaks:
        about = f"{world.description}, torch {torch.__version__}, float64, seed {options.seed}"
        about += "" if COMPILES else "; compiled: not run, which needs torch 2.12 or later"
        show(rows, about)
        content = {"about": about, "torch": torch.__version__, "passed": passed, "counts": counts(rows)}
        content["rows"] = [asdict(row) for row in rows]
        try:
            if options.json:
                options.json.write_text(json.dumps(content, indent=1) + "\n")
            if options.html:
                options.html.write_text(page(rows, about), encoding="utf-8")
        except OSError as error:  # the file was writable when the run began
            print(f"diffcoll verify: {error}", file=sys.stderr)
            passed = False
    world.close()
    return 0 if passed else 1


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def progress(total: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show the progress on stderr; yields a function that says what is checked next.

    On a terminal it is a bar. In a pipe or a file it is a line for each that is not as the one before.
    """
    console, begun, last = Console(stderr=True), itertools.count(1), [""]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=quiet or not console.is_terminal, console=console) as bar:
        task = bar.add_task("verify", total=total)

        def advance(what: str) -> None:
            bar.update(task, advance=1, description=what)
            number = next(begun)
            if not quiet and not console.is_terminal and what != last[0]:
                last[0] = what
                print(f"diffcoll verify: {what} ({number} of {total})", file=sys.stderr, flush=True)

        yield advance


def wide_console() -> Console:
    """Return a console of the terminal's width, or 160 columns if the width is unknown."""
    console = Console()
    known = console.is_terminal and os.get_terminal_size(console.file.fileno()).columns > 0  # 0 under mpiexec
    return console if known else Console(width=160)


def show(rows: list[CheckedCall], about: str) -> None:
    """Print the table; a call at several world sizes is one line, with the larger error."""
    console = wide_console()
    console.print(_grid(rows, about))
    failed = [row for row in rows if not row.passes()]
    for row in failed:
        own = row.systems["diffcoll"]
        why = own if isinstance(own, str) else "error above tolerance"
        console.print(Text(f"{why}: {row.collective}({row.call}), N = {row.world_size}", style="red"))
    style, found = "wrong" if failed else "right", counts(rows)
    console.print(Text(MARKS[style] + headline(found), style=STYLES[style]))
    for system, of in list(found.items())[1:]:
        console.print(Text(f"  {system}: {in_words(of)}"))


def counts(rows: list[CheckedCall]) -> dict[str, Counts]:
    """Return how many calls of each system are right, are wrong, raise, and are not offered."""
    kinds = {system: [kind(system, row.systems[system]) for row in rows] for system in rows[0].systems}
    return {system: {each: found.count(each) for each in KINDS} for system, found in kinds.items()}


def _grid(rows: list[CheckedCall], about: str) -> Table:
    grid = Table(
        title=f"relative error against the reference: output, gradient, second order\n"
        f"jvp: output, tangent; compiled (fullgraph, inductor): output, gradient\n{about}"
    )
    grid.add_column("collective", style="bold", no_wrap=True)
    grid.add_column("call")
    grid.add_column("N", no_wrap=True)
    for system in rows[0].systems:
        grid.add_column(_short(system), min_width=26)
    for name, cells in _merged(rows):
        if name:
            grid.add_section()
        grid.add_row(name, *(Text(cell.marked, style=STYLES[cell.style]) for cell in cells))
    return grid


def _merged(rows: list[CheckedCall]) -> Iterator[tuple[str, list[Cell]]]:
    """Yield for each call its collective where another one begins, and the cells: words, world sizes, all outcomes.

    The n-th call of a collective is the same call at every world size.
    """
    groups: dict[str, dict[int, list[CheckedCall]]] = {}
    for row in rows:
        groups.setdefault(row.collective, {}).setdefault(row.world_size, []).append(row)
    for collective, by_size in groups.items():
        for number, each in enumerate(zip_longest(*by_size.values())):
            same = [row for row in each if row is not None]
            sizes = " ".join(str(row.world_size) for row in same)
            outcomes = [_cell(system, worst([row.systems[system] for row in same])) for system in same[0].systems]
            yield "" if number else collective, [Cell(same[-1].call or "defaults", "call"), Cell(sizes), *outcomes]


def _short(system: str) -> str:
    """Return the title of a column; PyTorch's own collectives get the release, on which their results depend."""
    short = system.removeprefix("torch.distributed.")
    return short if short == system else f"{short} of torch {torch.__version__}"


def _cell(system: str, outcome: Errors) -> Cell:
    style = {"right": "right", NOT_OFFERED: "none"}.get(kind(system, outcome), "wrong")
    return Cell(
        outcome if isinstance(outcome, str) else " ".join(f"{value:.0e}" for value in outcome.values()), style=style
    )


def page(rows: list[CheckedCall], about: str) -> str:
    """Return the page as HTML, without references to other files."""
    right, found = all(row.passes() for row in rows), counts(rows)
    head = ["collective", "call", "N", *map(_short, rows[0].systems)]
    text = f"""<p>A call at one number of ranks counts once. Of each system those calls are counted that it offers.
{picture(found)}
<p>Rank r computes a loss ℓ<sub>r</sub>; the objective is their sum. Each call ran on real processes with
data and cotangents that differ on every rank. Each cell has three numbers: the relative errors of the output, the
gradient and a second-order gradient, against reference gradients that PyTorch derives with all ranks in one autograd
graph. Rows jvp (forward mode) have two: output and tangent. Rows compiled (torch.compile(fullgraph=True)) have two:
output and gradient. The columns of PyTorch's own collectives hold for torch {torch.__version__}.
{table(head, _merged(rows), about)}"""
    return document("diffcoll verify", headline(found), right, text, STYLE)
