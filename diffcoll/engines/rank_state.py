"""Which simulated rank this thread is, and with which random numbers and variables of a launcher any rank begins."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _OfThread(threading.local):
    #: The simulated rank that this thread is.
    rank: Any = None
    #: The one that has started this thread, which may ask for its rank but call no collective.
    started_by: Any = None
    #: Why this thread may not call collectives now; "": it may.
    refusal: str = ""


class _OfProcess:
    """What a process sets for itself, as each simulated rank does: the group that None means, and check mode."""

    default_group: Any = None
    check_mode: Any = None


THREAD, PROCESS = _OfThread(), _OfProcess()
#: While ranks are simulated: the threads that were there before, which are none of them.
outsiders: set[threading.Thread] = set()
#: A graph is compiled or traced for one rank, but simulated ranks share one cache of graphs.
NO_GRAPHS = (
    "torch.compile, export, make_fx and linearize do not work on simulated ranks, which share compiled and traced "
    "graphs; call the function without them, or compile on processes (diffcoll.testing.spawn)"
)


class NotARankError(RuntimeError):
    """A thread that is no rank called a collective while ranks are simulated."""


def refuse_thread(operation: str) -> None:
    """Raise if this thread may not call collectives: a rank has started it, or it differentiates a joint graph."""
    if THREAD.refusal:
        raise RuntimeError(f"{operation}: {THREAD.refusal}")
    if outsiders and THREAD.rank is None and threading.current_thread() not in outsiders:
        raise NotARankError(
            f"{operation}: called in a thread that a simulated rank has started; call collectives in the rank's own "
            "thread, or run the program on processes (diffcoll.testing.spawn)"
        )


@contextmanager
def threads_followed() -> Iterator[None]:
    """Let threads know which simulated rank has started them."""
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        rank, run = THREAD.rank or THREAD.started_by, thread.run

        def run_for_rank() -> None:
            THREAD.started_by = rank
            run()

        if rank is not None:
            thread.run = run_for_rank  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = started  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def launched_as(rank: int, size: int, port: int = 29500) -> dict[str, str]:
    """Return the variables of the environment that torchrun sets for a rank on one host."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {**{name: str(number) for name, number in numbers.items()}, "MASTER_ADDR": "127.0.0.1"}


def seed_rank(seed: int, rank: int) -> int:
    """Seed the generators of this process for one rank: torch's on all devices, Python's, NumPy's if imported.

    Returns:
        The seed of all of them.
    """
    stream = seed * 1_000_003 + rank
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(stream)  # `torch.manual_seed` formats a stack trace for absent devices
    else:
        torch.manual_seed(stream)
    random.seed(stream)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(stream % 2**32)
    return stream
