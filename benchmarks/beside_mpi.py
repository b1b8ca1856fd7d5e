"""torch.distributed on gloo, in the processes of MPI."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch.distributed as dist

import diffcoll


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
