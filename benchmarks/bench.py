"""`benchmarks`: what a forward and backward costs, in time, bytes and memory, beside what PyTorch offers.

All systems take turns within one run, in an order that changes. A turn is two steps: the first follows a step of
another system, so caches are cold; the second follows a step of its own. The second is reported, and for 4 B the
first as well. Each step ends with a barrier, so that no system looks fast because its result is awaited later. Read
ratios; absolute times are those of this machine in this minute.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import diffcoll
from benchmarks import rows, training
from benchmarks.beside_mpi import gloo_beside_mpi, on_ranks
from benchmarks.competitors import SYSTEMS
from benchmarks.counting import bytes_sent, memory_of_process
from benchmarks.floor import floor
from benchmarks.rows import Row, Times
from diffcoll.collectives import COLLECTIVES
from diffcoll.testing.cases import Case
from diffcoll.testing.spawn import spawn

RAW = "raw calls and copies"
#: Under `--engine mpi`: the library on gloo, beside itself on MPI.
OURS_ON_GLOO = "diffcoll on gloo"
RAW_MPI = "raw MPI calls"
#: The library's own sum, beside its other reductions.
SUM = "diffcoll's sum"
#: The raw calls of the library's engine in an `autograd.Function` of two lines.
FLOOR = "a two-line Function"
SIZES = {"4 B": 1, "1 MB": 1 << 18, "16 MB": 1 << 22}
OPS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("sum", "mean", "product", "max", "logsumexp"),
    "reduce_scatter": ("sum", "product", "max"),
}
Steps = dict[str, Callable[[], object]]


def wide_console() -> Console:
    """Return a console of the terminal's width, or 160 columns if the width is unknown."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    names, collectives = options.names, [name for name in options.names if name in COLLECTIVES]
    bench, console = _Bench(options.engine, options.world_size, options.rounds), wide_console()
    measured = []
    if collectives:
        measured = bench.costs(collectives)
        console.print(rows.table(measured, bench.others, bench.title))
    if "trees" in names:
        console.print(bench.ratios("200 tensors of 327 float32 in one call", _trees))
    if "overlap" in names:
        console.print(bench.ratios("all_reduce of 16 MB, and as much work beside it", _overlap))
    if "averager" in names:
        console.print(training.table(bench.n, bench.rounds, bench.engine, bench.times))
    return _write(options, measured)


def _write(options: argparse.Namespace, measured: list[Row]) -> int:
    """Write the file that was asked for; returns the exit status."""
    content = {"schema": 1, "diffcoll": diffcoll.__version__, "rows": [row.as_json() for row in measured]}
    try:
        if options.json:
            options.json.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:  # the file was writable when the run began
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    return 0


@dataclass
class _Bench:
    """On what to run, and how often."""

    engine: str
    n: int
    rounds: int

    @property
    def title(self) -> str:
        engine = "diffcoll on MPI, the others on gloo" if self.engine == "mpi" else "gloo"
        return f"forward + backward, {engine}, N = {self.n}"

    @property
    def others(self) -> list[str]:
        """What stands beside the library."""
        ours = [OURS_ON_GLOO, RAW_MPI] if self.engine == "mpi" else []
        return ours + [name for name in SYSTEMS if name != "diffcoll"] + [SUM, RAW, FLOOR]

    def times(self, make: Callable[[int], Steps], rounds: int) -> dict[str, float]:
        """Median milliseconds of each step after a step of its own, as rank 0 saw them."""
        return {name: times.warm for name, times in self.both_times(make, rounds).items()}

    def both_times(self, make: Callable[[int], Steps], rounds: int) -> dict[str, Times]:
        """Median milliseconds of each step, as rank 0 saw them."""
        mpi = self.engine == "mpi"

        def body(rank: int) -> dict[str, Times]:
            world = gloo_beside_mpi() if mpi else None
            return _time(make(rank), rounds, world)

        return on_ranks(self.engine, body, self.n, timeout=600)[0]

    def costs(self, names: list[str]) -> list[Row]:
        """A row for each collective, op and size."""
        found = []
        for name, op in _calls(names):
            for size, numel in SIZES.items():
                case = _case(name, op, numel, self.n)
                turns = self.rounds * (10 if numel == 1 else 1)
                systems = self.both_times(lambda r: _steps(case, r, self.engine), turns)  # noqa: B023
                memory = peak_memory(case) if numel == max(SIZES.values()) else None
                facts = (_nbytes(case), self.n, self.engine, torch.__version__, systems, bytes_sent(case), memory)
                found.append(Row(name, _spelled(name, op), size, *facts))
        return found

    def ratios(self, what: str, make: Callable[[int], Steps]) -> Table:
        """A row for each way to do the same."""
        times = self.times(make, self.rounds)
        first = next(iter(times.values()))
        grid = Table("way", "median ms", "first, as a ratio to it", title=f"{what}: {self.title}")
        for name, value in times.items():
            grid.add_row(name, f"{value:.2f}", f"{first / value:.2f}×")
        return grid


def _case(name: str, op: str | None, numel: int, n: int) -> Case:
    rows = n if name in ("reduce_scatter", "all_to_all", "scatter", "split") else 1
    arguments: dict[str, Any] = {} if op in (None, "sum") else {"op": op}
    if name == "permute":
        arguments["pairs"] = [(r, (r + 1) % n) for r in range(n)]
    return Case(name, ((max(numel // rows, 1) * rows,),) * n, arguments, dtype=torch.float32)


def _nbytes(case: Case) -> int:
    assert case.shapes[0] is not None
    return 4 * case.shapes[0][0]


def _calls(names: list[str]) -> list[tuple[str, str | None]]:
    return [(name, op) for name in names for op in OPS.get(name, (None,))]


def _spelled(name: str, op: str | None) -> str | None:
    return "sum" if name == "reduce" else op


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────


def _steps(case: Case, rank: int, engine: str) -> Steps:
    x = case.x(rank, 0).requires_grad_()
    with torch.no_grad():
        gy = torch.randn(case.call(x, rank).shape)
    calls = {name: adapter(case, rank) for name, adapter in SYSTEMS.items()}
    ours = partial(getattr(diffcoll, case.name), **case.arguments)
    calls["diffcoll"] = ours  # as users write it
    if "op" in case.arguments:
        calls[SUM] = getattr(diffcoll, case.name)
    if engine == "mpi":
        calls[OURS_ON_GLOO] = partial(ours, group=dist.group.WORLD)
    steps: Steps = {}
    for name, call in calls.items():
        if call is not None:
            steps[name] = lambda call=call: torch.autograd.grad(call(x), x, gy)  # type: ignore[misc]
    if case.name == "all_reduce" and not case.arguments:
        steps[RAW] = lambda: (_raw_all_reduce(x), _raw_all_reduce(gy))
        if engine == "mpi":
            steps[RAW_MPI] = _raw_mpi(x, gy)
    if not case.arguments and (raw := floor(case.name, engine)) is not None:
        steps[FLOOR] = lambda: torch.autograd.grad(raw(x), x, gy)
    return steps


def _raw_mpi(*xs: Tensor) -> Callable[[], object]:
    from mpi4py import MPI

    world, at = MPI.COMM_WORLD.Dup(), MPI.buffer.fromaddress
    into = [torch.empty_like(x) for x in xs]

    def step() -> None:
        for x, y in zip(xs, into, strict=True):
            world.Allreduce([at(x.data_ptr(), x.nbytes), MPI.FLOAT], [at(y.data_ptr(), y.nbytes), MPI.FLOAT])

    return step


def _raw_all_reduce(x: Tensor) -> Tensor:
    y = x.detach().clone()
    dist.all_reduce(y)
    return y


def _time(steps: Steps, rounds: int, mpi: Any = None) -> dict[str, Times]:
    """Median milliseconds of each step, with the barrier that it ends with: of MPI, where `mpi` is, and the step is."""
    warnings.simplefilter("ignore")  # the others' deprecation
    on_gloo = () if mpi is None else (OURS_ON_GLOO, RAW, *[name for name in SYSTEMS if name != "diffcoll"])
    times: dict[str, list[Times]] = {name: [] for name in steps}
    shuffle = random.Random(0).sample  # nobody always comes first, or after the same one; alike on all ranks
    for i in range(rounds + 2):
        for name, step in shuffle([*steps.items()], len(steps)):
            barrier = dist.barrier if mpi is None or name in on_gloo else mpi.Barrier
            barrier()
            try:
                taken = Times(_timed(step, barrier), _timed(step, barrier))
            except Exception:  # what the other systems do not offer after all; on all ranks alike
                if name.startswith(rows.OURS):
                    raise
                times.pop(name, None)
                _meet_after_failure(barrier)
                continue
            if i >= 2:
                times[name].append(taken)
        steps = {name: steps[name] for name in times}
    return {name: Times(*map(statistics.median, zip(*values, strict=True))) for name, values in times.items()}


def _timed(step: Callable[[], object], barrier: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    barrier()
    return 1e3 * (time.perf_counter() - start)


def _meet_after_failure(barrier: Callable[[], None]) -> None:
    """Meet the other ranks; gloo's barrier first waits for earlier calls, and sends nothing if one of those failed."""
    try:
        barrier()
    except RuntimeError:
        barrier()


# ── memory ─────────────────────────────────────────────────────────────────────────────────────


def peak_memory(case: Case) -> float:
    """Return the peak memory of a forward and backward above x and y, in bytes, the largest of all ranks (gloo).

    The kernel's count of pages in memory, so everything counts: the gradient, scratch, and what gloo allocates.
    """

    def body(r: int) -> float:
        y = case.call(x := torch.ones(case.size, requires_grad=True), r)
        torch.autograd.grad(y, x, torch.ones(()).expand(y.shape))  # loads what PyTorch loads at such a call
        x = case.x(r, 0).requires_grad_()
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # start the peak anew
        before = memory_of_process("VmRSS")
        y = case.call(x, r)
        torch.autograd.grad(y, x, torch.ones(()).expand(y.shape))
        above: float = memory_of_process("VmHWM") - before - y.numel() * y.element_size()
        return above

    found: list[float] = spawn(body, range(case.size), timeout=120)
    return max(found)


# ── trees and overlap ────────────────────────────────────────────────────────────────────────────────────


def _trees(rank: int) -> Steps:
    xs = [torch.randn(327, requires_grad=True) for _ in range(200)]
    gs = [torch.randn(327) for _ in xs]

    def by_hand() -> object:
        y = diffcoll.all_reduce(torch.cat([x.reshape(-1) for x in xs]))
        return torch.autograd.grad([piece.clone() for piece in torch.split(y, [x.numel() for x in xs])], xs, gs)

    def one() -> object:
        return torch.autograd.grad(diffcoll.all_reduce(row), row, gy)

    row, gy = torch.randn(200 * 327, requires_grad=True), torch.randn(200 * 327)
    return {
        "diffcoll.all_reduce(list)": lambda: torch.autograd.grad(diffcoll.all_reduce(xs), xs, gs),
        "one tensor, cat and split by hand": by_hand,
        "one tensor of their size, no copies": one,
        "200 calls": lambda: torch.autograd.grad([diffcoll.all_reduce(x) for x in xs], xs, gs),
    }


def _overlap(rank: int) -> Steps:
    x, w = torch.randn(1 << 22, requires_grad=True), torch.randn(500, 500, requires_grad=True)
    gy = torch.randn(1 << 22)

    def work() -> Tensor:
        y = w
        for _ in range(4):
            y = torch.tanh(y @ w)
        return y.sum()

    def both(later: bool) -> object:
        if later:
            pending = diffcoll.all_reduce(x, async_op=True)
            z = work()
            return torch.autograd.grad([pending.wait(), z], [x, w], [gy, torch.ones(())])
        y = diffcoll.all_reduce(x)
        return torch.autograd.grad([y, work()], [x, w], [gy, torch.ones(())])

    return {
        "async_op=True": lambda: both(True),
        "one after the other": lambda: both(False),
        "the collective alone": lambda: torch.autograd.grad(diffcoll.all_reduce(x), x, gy),
        "the work alone": lambda: torch.autograd.grad(work(), w),
    }
