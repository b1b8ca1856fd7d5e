"""Times and peak memory of steps on ranks, for all benchmarks.

All variants take turns within one run, in an order that changes. A turn is two steps: the first follows a step of
another variant, so caches are cold; the second follows a step of its own. Each step ends with a barrier, so that none
looks fast because its result is awaited later. Read ratios; absolute times are those of this machine in this minute.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from diffcoll.testing import spawn

T = TypeVar("T")
Step = Callable[[], object]
Steps = dict[str, Step]
#: Variants whose names begin so run on the library's engine, and end with its barrier; the others run on gloo.
OURS = "diffcoll"


class Times(NamedTuple):
    """Median milliseconds of a step."""

    #: After a step of another variant.
    cold: float
    #: After a step of its own.
    warm: float


@dataclass
class Bench:
    """On what to run, and how often."""

    engine: str
    n: int
    rounds: int

    @property
    def title(self) -> str:
        engine = "diffcoll on MPI, the others on gloo" if self.engine == "mpi" else "gloo"
        return f"forward + backward, {engine}, N = {self.n}"

    def on_ranks(self, fn: Callable[[int], T]) -> list[T]:
        """Run fn on the processes of `spawn`, or of a job of mpiexec, which the tests start, too."""
        if self.engine != "mpi":
            return spawn(fn, range(self.n), timeout=600)
        sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

        def body(rank: int) -> T:
            gloo_beside_mpi()
            return fn(rank)

        with closing(import_module("mpi_ranks").MpiRanks(self.n)) as ranks:
            found: list[T] = ranks.call(body, [(r,) for r in range(self.n)], timeout=600)
        return found

    def times(self, make: Callable[[int], Steps], rounds: int) -> dict[str, Times]:
        """Return the median milliseconds of each step, with the barrier that it ends with, as rank 0 saw them."""
        mpi = self.engine == "mpi"

        def turns(rank: int) -> dict[str, Times]:
            warnings.simplefilter("ignore")  # deprecations of what is compared
            steps = make(rank)
            barrier_of_ours: Step = import_module("mpi4py.MPI").COMM_WORLD.Barrier if mpi else dist.barrier
            times: dict[str, list[Times]] = {name: [] for name in steps}
            shuffle = random.Random(0).sample  # alike on all ranks
            for i in range(rounds + 2):
                for name, step in shuffle([*steps.items()], len(steps)):
                    barrier = barrier_of_ours if name.startswith(OURS) else dist.barrier
                    barrier()
                    turn = Times(timed(step, barrier), timed(step, barrier))
                    if i >= 2:
                        times[name].append(turn)
            return {name: Times(*map(statistics.median, zip(*of, strict=True))) for name, of in times.items()}

        return self.on_ranks(turns)[0]

    def peaks(self, make: Callable[[int], Steps], name: str, warm: str = "") -> list[float]:
        """Return each rank's peak memory in a step above what the process had before it, in bytes.

        The kernel's count of pages in memory, so everything counts: gradients, scratch, and what gloo allocates. Before
        it the step `warm`, such as a smaller one, allocates what is kept; "": the step itself, a first time.
        """

        def peak(rank: int) -> float:
            # M_MMAP_THRESHOLD of glibc: freed tensors do not stay in the process.
            ctypes.CDLL(None).mallopt(-3, 1 << 16)
            torch.set_num_threads(1)
            steps = make(rank)
            steps[warm or name]()
            gc.collect()
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            before = memory_of_process("VmRSS")
            steps[name]()
            return memory_of_process("VmHWM") - before

        return self.on_ranks(peak)


def gloo_beside_mpi() -> None:
    """Set up gloo on the processes of an MPI job, of one host."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = world.bcast(tempfile.mkdtemp(prefix="diffcoll-") if world.Get_rank() == 0 else None)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=world.Get_rank(), world_size=world.Get_size())


def timed(step: Step, barrier: Step) -> float:
    """Return the milliseconds of a step and the barrier after it."""
    start = time.perf_counter()
    step()
    barrier()
    return 1e3 * (time.perf_counter() - start)


def memory_of_process(key: str) -> float:
    """Return one of this process's memory counts, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(key))
