"""`python -m benchmarks`: which tables to print, on how many ranks of which engine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import collectives, losses, training
from benchmarks.measuring import Bench, Steps
from diffcoll.collectives import COLLECTIVES

#: Ways to do the same: the title of a table, and its rows.
COMPARED: dict[str, dict[str, Callable[[int], Steps]]] = {
    "trees": {"200 tensors of 327 float32 in one call": collectives.trees},
    "overlap": {"all_reduce of 16 MB, and as much work beside it": collectives.overlap},
    "clip": {"CLIP, 1,024 pairs a rank of 512 dimensions": losses.clip},
    "grad_cache": {"an encoder of 8 layers and InfoNCE, 1,024 pairs a rank of 512 dimensions": losses.grad_cache},
    "vocabulary": {"cross-entropy of 1,024 tokens, 8,192 words on all ranks": losses.vocabulary},
    "batch_norm": {
        "15 convolutions with batch norm, 4 images of 32 × 32 a rank": losses.batch_norm,
        "SyncBatchNorm of (2, 512, 7, 7)": partial(losses.batch_norm_layer, (2, 512, 7, 7)),
        "SyncBatchNorm of (64, 256, 56, 56)": partial(losses.batch_norm_layer, (64, 256, 56, 56)),
    },
    "averager": training.MODELS,
}
NAMES = (*COLLECTIVES, *COMPARED)


def compared(bench: Bench, title: str, make: Callable[[int], Steps]) -> Table:
    """Return a row for each way to do the same: time, and peak memory above what was there before the step.

    Ratios are to the first way, or to a faster variant, whose name begins as that of the first.
    """
    times = {name: taken.warm for name, taken in bench.times(make, bench.rounds).items()}
    first = next(iter(times))
    fastest = min(value for name, value in times.items() if name.startswith(first))
    grid = Table("way", "median ms", f"ratio to {first}", "peak memory, MB")
    grid.title = f"{title}: {bench.title}"
    for name, value in times.items():
        memory = max(bench.peaks(make, name)) / 2**20
        grid.add_row(name, f"{value:.2f}", f"{value / fastest:.2f}×", f"{memory:.0f}")
    return grid


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    command = argparse.ArgumentParser(
        prog="benchmarks", description="time of forward + backward next to PyTorch's own, bytes and memory"
    )
    add = command.add_argument
    add("names", nargs="*", choices=[*NAMES, []], metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    add("--engine", choices=("torch", "mpi"), default="torch", help="mpi: run diffcoll on MPI; baselines on gloo")
    add("--world-size", type=int, default=2, metavar="N")
    add("--rounds", type=int, default=15)
    add("--json", type=Path, metavar="FILE", help="what collectives took; schema: benchmarks/README.md")
    options = command.parse_args(arguments)
    names = options.names or NAMES
    bench = Bench(options.engine, options.world_size, options.rounds)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    if chosen := [name for name in names if name in COLLECTIVES]:
        rows = collectives.costs(bench, chosen)
        console.print(collectives.table(bench, rows))
        if options.json:
            options.json.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n", encoding="utf-8")
    for name in names:
        for title, make in COMPARED.get(name, {}).items():
            console.print(compared(bench, title, make))


if __name__ == "__main__":
    main()
