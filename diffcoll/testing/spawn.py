"""The same call on real processes."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from diffcoll.engines.rank_threads import forward_mode
from diffcoll.testing._calls import missing, per_rank_arguments, seconds
from diffcoll.testing.launched import Launched
from diffcoll.testing.lifetime import temporary_folder
from diffcoll.testing.pickling import dumps
from diffcoll.testing.processes import GRACE, Forked, Processes, RanksFailedError, surroundings

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
    with temporary_folder() as folder:
        setups = [(rank, len(calls), backend, timeout, seed, folder, surroundings()) for rank in range(len(calls))]
        payloads = [dumps((fn, arguments)) for arguments in calls]
        ranks = Launched() if backend == "mpi" else Forked()
        try:
            ranks.begin(setups, payloads, timeout)
            results = _collect(ranks, folder, timeout)
            ranks.leave()
            return results
        finally:
            ranks.end()


def _collect(ranks: Processes, folder: str, timeout: float) -> list[Any]:
    """Wait for every rank's word; end all on the first failure."""
    pipes, n = ranks.pipes, len(ranks.pipes)
    sentinels = [ranks.sentinel(r) for r in range(n)]  # processes that a rank has started may hold its pipe open
    words: dict[int, tuple[str, Any]] = {}
    end = time.monotonic() + timeout
    hung = False
    while len(words) < n:
        silent = [r for r in range(n) if r not in words]
        watched = [*(pipes[r] for r in silent), *(sentinels[r] for r in silent)]
        ready = wait(watched, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            hung = not any(kind != "result" for kind, _ in words.values())
            break
        for r in silent:
            if pipes[r] in ready or sentinels[r] in ready:
                try:
                    if not pipes[r].poll():
                        raise EOFError
                    words[r] = pickle.loads(pipes[r].recv_bytes())
                except (EOFError, ConnectionResetError):
                    words[r] = "died", ranks.last_words(r)
                if words[r][0] != "result":
                    end = min(end, time.monotonic() + GRACE)
    if all(kind == "result" for kind, _ in words.values()) and len(words) == n:
        return [torch.load(io.BytesIO(words[r][1]), weights_only=False) for r in range(n)]

    reports = {r: "" if kind == "result" else text for r, (kind, text) in words.items()}
    for r, stack in stacks(ranks.pids, [r for r in range(n) if r not in words], folder).items():
        reports[r] = stack
    what = f"no end after {timeout:g} s" if hung else "a rank failed"
    text = "\n".join(f"── rank {r} of {n} ──\n{reports[r] or 'returned'}" for r in range(n))
    raise RanksFailedError(f"spawn: {what}\n{text}", dict(sorted(reports.items())))


def stacks(pids: list[int], hanging: list[int], folder: str) -> dict[int, str]:
    """Ask ranks that hang for their Python stacks."""
    for r in hanging:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[r], signal.SIGUSR1)
    found = {}
    end = time.monotonic() + GRACE
    for r in hanging:
        file = Path(folder, f"stack-{r}")
        while not (file.exists() and file.read_text().endswith("\n")) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.05)
        stack = file.read_text() if file.exists() else ""
        found[r] = f"hung in\n{stack}" if stack else "hung, and did not say where\n"
    return found
