"""Detects the launcher of this process, and sets up gloo next to MPI in one job."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch.distributed as dist

import diffcoll

#: Values of `--engine`: a process group of torch.distributed, or an MPI communicator.
ENGINES = ("torch", "mpi")


def launcher(engine: str | None) -> str | None:
    """Return the engine of the processes that were launched together with this one; None if there are none.

    Args:
        engine: the value of `--engine`; only with "mpi" is a launcher that sets no world size (`srun --mpi=pmix`)
            recognised as MPI's.
    """
    if engine != "torch" and any(map(_several, ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))):
        return "mpi"
    if engine == "mpi":
        return "mpi" if "PMIX_NAMESPACE" in os.environ else None
    return "torch" if _several("WORLD_SIZE") else None


def _several(variable: str) -> bool:
    value = os.environ.get(variable, "")
    return value.isdigit() and int(value) > 1


def gloo_beside_mpi() -> Any:
    """Make MPI.COMM_WORLD the library's default group and set up torch.distributed on gloo in the same processes."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    diffcoll.set_default_group(world)
    one_host = world.Split_type(MPI.COMM_TYPE_SHARED).Get_size() == world.Get_size()
    host = "127.0.0.1" if one_host else socket.gethostname()
    if one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    n, rank = world.Get_size(), world.Get_rank()
    tcp: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = tcp(host, 0, n, is_master=True, wait_for_workers=False) if rank == 0 else None
    host, port = world.bcast((host, store.port) if store else None)
    dist.init_process_group("gloo", store=store or tcp(host, port, n), rank=rank, world_size=n)
    return world
