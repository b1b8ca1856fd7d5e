"""The same call on real processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, TypeVar

from diffcoll.engines.rank_threads import forward_mode
from diffcoll.testing._calls import missing, per_rank_arguments, seconds
from diffcoll.testing.pool import Pool

T = TypeVar("T")


def spawn(
    fn: Callable[..., T],
    *per_rank: Sequence[Any],
    backend: str = "gloo",
    timeout: float = 60,
    seed: int = 0,
) -> list[T]:
    """Run fn on N real processes of this machine, as `simulate` does on simulated ranks.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import spawn
    >>> def gradient(x, w):
    ...     x.requires_grad_()
    ...     (w * dc.all_reduce(x)).backward()
    ...     return x.grad
    >>> spawn(gradient, [torch.tensor(3.0), torch.tensor(5.0)], [1.0, 10.0])
    [tensor(11.), tensor(11.)]

    Needs the `test` extra (cloudpickle). The processes find each other through a file and listen on loopback
    only. Each uses one thread.

    Args:
        fn: called as fn(a_r, b_r, …) on rank r with torch's default process group set up; closures and
            lambdas work. What it holds is copied to every process.
        per_rank: one or more sequences of equal length N, one element for each rank.
        backend: a backend of torch.distributed, by name; or "mpi", for processes under mpiexec, with
            `MPI.COMM_WORLD` as the default group (needs the `mpi` extra).
        timeout: seconds until the whole call ends at the latest, also if ranks hang; at most a million.
        seed: rank r starts its streams of random numbers from (seed, r), the same as under `simulate`.

    Each rank has the caller's environment, and the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR, …) with a free port.

    Returns:
        The ranks' results, in order; tensors in them come detached, on the CPU.

    Raises:
        TypeError, ValueError: per_rank are no sequences of one length, or timeout is no number of seconds.
        FileNotFoundError: the current folder was removed.
        ModuleNotFoundError, RuntimeError: cloudpickle, or, for "mpi", mpi4py or mpiexec, is not installed.
        RanksFailedError: a rank raised, died or hung; all are ended then, and the message shows every rank's
            traceback, or the Python stack it hung in.
    """
    try:
        import cloudpickle  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing("spawn", "cloudpickle", "test") from error
    calls = per_rank_arguments("spawn", per_rank)
    timeout = seconds("spawn", timeout)
    if forward_mode()[0] >= 0:
        raise RuntimeError(
            "spawn: called within forward_ad.dual_level(), expected a call outside of it: tangents are not sent to "
            "other processes; enter the level in fn, or use simulate"
        )
    with closing(Pool(start=timeout, once=True)) as pool:
        return pool.call(fn, calls, backend, timeout, seed)
