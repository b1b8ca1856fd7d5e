"""Asks the store of torch.distributed which ranks have noticed that a group failed."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from torch.distributed import distributed_c10d

# How long the ranks of a failed group wait for each other to report. All of them fail at about the same time.
SECONDS = 2.0
# How much longer they wait for the store itself.
STORE_SECONDS = 1.0
# How long a process waits at exit for a thread whose connection it has shut down.
EXIT_SECONDS = 1.0


def absent(key: str, rank: int, ranks: Sequence[int]) -> list[int]:
    """Report that this rank has noticed a failure of the group `key`; return the ranks that have not, if that is known.

    A process serves the store, usually rank 0's. If that is stopped, or its host is cut off, a call of the store
    returns never, whatever its timeout. So a thread calls it, and this function returns after `SECONDS +
    STORE_SECONDS`.
    """
    found: list[int] = []
    thread = threading.Thread(target=_ask, args=(key, rank, ranks, found), daemon=True, name="diffcoll store")
    _asking.add(thread)
    thread.start()
    thread.join(SECONDS + STORE_SECONDS)
    return found if not thread.is_alive() else []


def _ask(key: str, rank: int, ranks: Sequence[int], found: list[int]) -> None:
    store = distributed_c10d._get_default_store()  # there is no public access to it
    key, end = f"diffcoll/failed/{key}/{{}}", time.monotonic() + SECONDS
    with contextlib.suppress(RuntimeError):  # the process that serves the store has ended
        store.set(key.format(rank), "")
        silent = [r for r in ranks if r != rank]
        while silent and time.monotonic() < end:
            silent = [r for r in silent if not store.check([key.format(r)])]
            time.sleep(0.02)
        found += silent


_asking: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """End threads that still wait for the store: std::terminate ends the process if one returns from torch later on.

    The store has no call for that, so its connections are shut down.
    """
    waiting = [thread for thread in _asking if thread.is_alive()]
    if waiting and (port := _port()) is not None:
        for connection in _connections(port):
            with connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
    for thread in waiting:
        thread.join(EXIT_SECONDS)


def _port() -> int | None:
    """Return the port of the default group's store; None if it has none, or the group was destroyed."""
    try:
        store: Any = distributed_c10d._get_default_store()
    except ValueError:
        return None
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


def _connections(port: int) -> list[socket.socket]:
    """Return copies of this process's TCP connections to a port."""
    found = []
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else []:
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=os.dup(int(name)))
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                found.append(connection)
            else:
                connection.close()
    return found
