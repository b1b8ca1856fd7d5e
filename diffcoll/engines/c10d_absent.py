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
    try:
        store: Any = distributed_c10d._get_default_store()  # there is no public access to it
    except ValueError:  # the default group was destroyed
        return []
    found: list[int] = []
    thread = threading.Thread(target=_ask, args=(store, key, rank, ranks, found), daemon=True, name="diffcoll store")
    _asking[thread] = _address(store)  # now: at exit the group may have been destroyed
    thread.start()
    thread.join(SECONDS + STORE_SECONDS)
    return found if not thread.is_alive() else []


def _ask(store: Any, key: str, rank: int, ranks: Sequence[int], found: list[int]) -> None:
    key, end = f"diffcoll/failed/{key}/{{}}", time.monotonic() + SECONDS
    with contextlib.suppress(RuntimeError):  # the process that serves the store has ended
        store.set(key.format(rank), "")
        silent = [r for r in ranks if r != rank]
        while silent and time.monotonic() < end:
            silent = [r for r in silent if not store.check([key.format(r)])]
            time.sleep(0.02)
        found += silent


#: Threads that have called a store, and its host and port; None: a store without.
_asking: weakref.WeakKeyDictionary[threading.Thread, tuple[str, int] | None] = weakref.WeakKeyDictionary()


@atexit.register
def _end() -> None:
    """End threads that still wait for the store: std::terminate ends the process if one returns from torch later on.

    The store has no call for that, so its connections are shut down.
    """
    waiting = {thread: address for thread, address in _asking.items() if thread.is_alive()}
    for host, port in {address for address in waiting.values() if address is not None}:
        for connection in _connections(host, port):
            with connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
    for thread in waiting:
        thread.join(EXIT_SECONDS)


def _address(store: Any) -> tuple[str, int] | None:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return (store.host, store.port) if hasattr(store, "port") else None


def _connections(host: str, port: int) -> list[socket.socket]:
    """Return copies of this process's TCP connections to a server."""
    fds = [int(name) for name in os.listdir("/dev/fd")] if os.path.isdir("/dev/fd") else []
    found = {fd: peer[0] for fd in fds if (peer := _peer(fd)) is not None and peer[1] == port}
    # Only if there are connections to this port of several hosts: a name server may be out of reach as well.
    wanted = _addresses(host) if len({*found.values()}) > 1 else {*found.values()}
    return [socket.socket(fileno=os.dup(fd)) for fd, address in found.items() if address in wanted]


def _peer(fd: int) -> tuple[str, int] | None:
    """Return the address and the port to which a file descriptor is connected; None: it is no TCP connection."""
    try:
        with socket.socket(fileno=fd) as connection:
            try:
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                address, port = connection.getpeername()[:2] if is_tcp else ("", 0)
            finally:
                connection.detach()
    except OSError:
        return None
    return _plain(address), port


def _addresses(host: str) -> set[str]:
    """Return the numeric addresses of a host; none if no name server answers in time."""
    found: set[str] = set()

    def look_up() -> None:
        with contextlib.suppress(OSError, UnicodeError):  # of a name that is none
            found.update(_plain(str(info[4][0])) for info in socket.getaddrinfo(host, None))

    thread = threading.Thread(target=look_up, daemon=True, name="diffcoll name server")
    thread.start()
    thread.join(EXIT_SECONDS)
    return {*found}


def _plain(address: str) -> str:
    """Return an IPv4 address that is written as an IPv6 address as it is."""
    return address.removeprefix("::ffff:")
