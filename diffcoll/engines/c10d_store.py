"""Calls the store of torch.distributed, whose calls do not return while the process that serves it is stopped.

Nor do they while its host is cut off, whatever their timeout. So threads call it, and its connections are shut down.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

# How long a process waits for a thread whose connection it has shut down.
EXIT_SECONDS = 1.0
# How long PyTorch calls the store before this library asks it, and between two questions.
PAUSE_SECONDS = 1.0

Address = tuple[str, int]


def ask(call: Callable[[], None], address: Address | None, seconds: float) -> bool:
    """Call the store at an address in a thread; return whether the call has ended within some seconds."""
    thread = threading.Thread(target=call, daemon=True, name="diffcoll store")
    _asking[thread] = address  # now: at exit the group may have been destroyed
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


@contextlib.contextmanager
def while_it_answers(timeout: timedelta) -> Iterator[None]:
    """Within the block PyTorch calls the store: raise if that has not answered for so long.

    Then this process's connections to the store are shut down, which ends PyTorch's call.

    Raises:
        RuntimeError: it has not answered.
    """
    address = address_of(distributed_c10d._get_default_store())  # there is no public access to it
    if address is None:
        yield
        return
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    has_ended, is_silent, has_answered = threading.Event(), threading.Event(), threading.Event()
    seconds = timeout.total_seconds()

    def call() -> None:
        try:
            # First without PyTorch: a thread that connects to a host out of reach could not be ended at exit.
            socket.create_connection(address, seconds).close()
            if has_ended.is_set():  # the host came back late: at exit PyTorch's call might be under way
                return
            tcp_store(*address, is_master=False, wait_for_workers=False, timeout=timeout)
        # The process that serves it has ended: PyTorch's call fails, too.
        except (ConnectionRefusedError, RuntimeError):
            pass
        except OSError:
            return
        has_answered.set()

    def watch() -> None:
        last, missing = time.monotonic(), 0
        while not has_ended.wait(PAUSE_SECONDS):
            has_answered.clear()
            ask(call, address, PAUSE_SECONDS if missing else seconds)
            if has_answered.is_set():
                last, missing = time.monotonic(), 0
                continue
            missing += 1  # not only once: while this process is stopped, time passes, too
            if missing > 1 and time.monotonic() - last > seconds and not has_ended.is_set():
                is_silent.set()
                shut_down(*address)
                return

    watcher = threading.Thread(target=watch, daemon=True, name="diffcoll store")
    watcher.start()
    error = None
    try:
        yield
    except RuntimeError as failed:
        error = failed
        if not is_silent.is_set():
            raise
    finally:
        has_ended.set()
    if is_silent.is_set():
        raise RuntimeError(
            f"the store of torch.distributed at {address[0]}:{address[1]} has not answered for {seconds:g} s: the "
            "process that serves it, usually rank 0's, is stopped, or its host is cut off"
        ) from error


#: Threads that have called a store, and its host and port; None: a store without.
_asking: weakref.WeakKeyDictionary[threading.Thread, Address | None] = weakref.WeakKeyDictionary()


@atexit.register
def _end() -> None:
    """End threads that still wait for the store: std::terminate ends the process if one returns from torch later on.

    The store has no call for that, so its connections are shut down.
    """
    waiting = {thread: address for thread, address in _asking.items() if thread.is_alive()}
    for host, port in {address for address in waiting.values() if address is not None}:
        shut_down(host, port)
    for thread in waiting:
        thread.join(EXIT_SECONDS)


def address_of(store: Any) -> Address | None:
    """Return the host and the port of a store; None: it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return (store.host, store.port) if hasattr(store, "port") else None


def shut_down(host: str, port: int) -> None:
    """Shut this process's TCP connections to a server down: calls that wait for it raise."""
    for connection in _connections(host, port):
        with connection, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _connections(host: str, port: int) -> list[socket.socket]:
    """Return copies of this process's TCP connections to a server."""
    fds = [int(name) for name in os.listdir("/dev/fd")] if os.path.isdir("/dev/fd") else []
    found = {fd: peer[0] for fd in fds if (peer := _peer(fd)) is not None and peer[1] == port}
    # Only if there are connections to this port of several hosts: a name server may be out of reach as well.
    wanted = _addresses(host) if len({*found.values()}) > 1 else {*found.values()}
    return [socket.socket(fileno=os.dup(fd)) for fd, address in found.items() if address in wanted]


def _peer(fd: int) -> Address | None:
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
