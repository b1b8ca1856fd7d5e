"""torch.distributed on gloo, in the processes of MPI."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

import diffcoll
from diffcoll.testing.spawn import spawn

T = TypeVar("T")


def gloo_beside_mpi() -> Any:
    """Make MPI.COMM_WORLD the library's default group, and set up gloo on the same processes, of one host."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    diffcoll.set_default_group(world)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rank, n = world.Get_rank(), world.Get_size()
    folder = world.bcast(tempfile.mkdtemp(prefix="diffcoll-") if rank == 0 else None)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n)
    return world


def on_ranks(engine: str, fn: Callable[[int], T], n: int, timeout: float) -> list[T]:
    """Run fn on n processes: those of `spawn`, or of a job of mpiexec, which the tests start, too."""
    if engine != "mpi":
        return spawn(fn, range(n), timeout=timeout)
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    with closing(import_module("mpi_ranks").MpiRanks(n)) as ranks:
        found: list[T] = ranks.call(fn, [(r,) for r in range(n)], timeout=timeout)
    return found
