"""The MPI library of this process: whether it reads GPU memory, and how an error ends the job."""

from __future__ import annotations

import ctypes
import os
import sys
import time
import warnings
from functools import cache
from types import TracebackType
from typing import Any


def mpi_library() -> Any:
    """Return `mpi4py.MPI`, which a user who passes a communicator has imported."""
    return sys.modules["mpi4py.MPI"]


@cache
def reads_cuda() -> bool:
    """Whether this MPI reads and writes GPU memory, according to itself or to DIFFCOLL_MPI_CUDA; warns if not."""
    said = os.environ.get("DIFFCOLL_MPI_CUDA", "")
    try:
        aware = said == "1" if said else bool(ctypes.CDLL(mpi_library().__file__).MPIX_Query_cuda_support())
    except AttributeError:
        aware = False
    if not aware:
        warnings.warn(
            "diffcoll: this MPI library does not report that it reads CUDA memory, so CUDA tensors are copied through "
            "pinned memory of the CPU; if it does, set DIFFCOLL_MPI_CUDA=1",
            stacklevel=2,
        )
    return aware


@cache
def end_the_job_on_errors() -> None:
    """Call MPI_Abort on an uncaught exception.

    Without it the rank would wait in MPI_Finalize for the other ranks, which wait for this one in a collective.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        world = mpi_library().COMM_WORLD
        if not mpi_library().Is_finalized():
            words = "the other ranks may wait for this one, so it ends the job (MPI_Abort)"
            print(f"diffcoll: rank {world.Get_rank()} of {world.Get_size()}: {words}", file=sys.stderr, flush=True)
            time.sleep(0.5)  # some launchers drop output that they have not read before the abort
            world.Abort(1)

    sys.excepthook = hook
