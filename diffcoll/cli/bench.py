"""`diffcoll bench`: what a forward and backward costs, side by side with what PyTorch offers.

All systems take turns within one run, and a step ends with a barrier, so that no system looks fast because its
result is awaited later. Read ratios; absolute times are those of this machine in this minute.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from diffcoll.cli.competitors import SYSTEMS
from diffcoll.testing.cases import Case
from diffcoll.testing.spawn import spawn

__all__ = ["add_to"]

RAW = "raw calls and copies"
SIZES = {"4 B": 1, "1 MB": 1 << 18, "16 MB": 1 << 22}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def add_to(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("bench", help="time forward + backward beside PyTorch's own, interleaved")
    parser.add_argument("--world-size", type=int, default=2, metavar="N")
    parser.add_argument("--only", default="", metavar="NAMES", help=f"of {', '.join(COLLECTIVES)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    names = [name for name in options.only.split(",") if name] or list(COLLECTIVES)
    unknown = [name for name in names if name not in COLLECTIVES]
    if unknown:
        raise SystemExit(f"diffcoll bench: --only: got {unknown[0]!r}, expected names of {', '.join(COLLECTIVES)}")
    n = options.world_size
    console = Console()
    grid = Table(title=f"forward + backward, gloo, N = {n}, float32: median ms (diffcoll's as a ratio to it)")
    for column in ("collective", "x", "diffcoll", *(name.removeprefix("torch.distributed.") for name in _others())):
        grid.add_column(column)
    for name in names:
        for size, numel in SIZES.items():
            times = spawn(lambda r: _time(r, n, name, numel, options.rounds), range(n), timeout=600)[0]  # noqa: B023
            ours = times["diffcoll"]
            others = [f"{times[s]:.2f} ({ours / times[s]:.2f}×)" if s in times else "" for s in _others()]
            grid.add_row(name, size, f"{ours:.2f}", *others)
    console.print(grid)
    return 0


def _others() -> list[str]:
    return [name for name in SYSTEMS if name != "diffcoll"] + [RAW]


def _time(rank: int, n: int, name: str, numel: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of a step, by system."""
    warnings.simplefilter("ignore")  # the others' deprecation
    rows = n if name in ("reduce_scatter", "all_to_all") else 1
    x = torch.randn(max(numel // rows, 1) * rows, requires_grad=True)
    case = Case(name, (tuple(x.shape),) * n)
    calls = {system: adapter(case, rank) for system, adapter in SYSTEMS.items()}
    with torch.no_grad():
        like = case.call(x, rank)
    gy = torch.randn(like.shape)
    steps: dict[str, Callable[[], object]] = {}
    for system, call in calls.items():
        if call is not None:
            steps[system] = lambda call=call: torch.autograd.grad(call(x), x, gy)  # type: ignore[misc]
    if name == "all_reduce":
        steps[RAW] = lambda: (_raw_all_reduce(x), _raw_all_reduce(gy))
    if numel == 1:
        rounds *= 10
    times: dict[str, list[float]] = {system: [] for system in steps}
    for i in range(rounds + 2):
        turn = i % len(steps)  # nobody always comes first, or after the same one
        for system, step in [*steps.items()][turn:] + [*steps.items()][:turn]:
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            if i >= 2:
                times[system].append(1e3 * (time.perf_counter() - start))
    return {system: statistics.median(values) for system, values in times.items()}


def _raw_all_reduce(x: Tensor) -> Tensor:
    y = x.detach().clone()
    dist.all_reduce(y)
    return y
