"""Calls of a store whose server is stopped: they are given up at exit, and nothing else of the process is touched."""

import contextlib
import socket

import pytest
from runs import launched

from diffcoll.engines.c10d_absent import absent
from diffcoll.engines.c10d_store import _connections

#: Rank 0 serves the store on 127.0.0.1, and stops. Rank 1 also has a connection to the same port of another address.
RANK = """
import atexit, os, signal, socket, sys, threading
from datetime import timedelta

rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])


def look():
    # runs after what the library does at exit
    print("waits" if "diffcoll store" in [thread.name for thread in threading.enumerate()] else "ended")
    accepted.settimeout(0.2)
    try:
        print(accepted.recv(1))
    except TimeoutError:
        print("open", flush=True)


if rank == 1:
    atexit.register(look)

import torch, torch.distributed as dist
import diffcoll as dc

server = socket.create_server((f"127.0.0.{rank + 1}", port))
if rank == 1:
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
fd = {} if rank else {"master_listen_fd": server.detach()}
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=20), **fd)
dist.init_process_group("gloo", timeout=timedelta(seconds=1), store=store, rank=rank, world_size=2)
del store
model = torch.nn.Linear(3, 2)
averager = dc.GradientAverager(model)
x = torch.full((1, 3), rank + 1.0)
model(x).sum().backward()
if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    model(x).sum().backward()
except dc.CollectiveFailedError:
    print("failed")
if "destroy" in sys.argv:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("then", ["destroy", "keep"])
def test_the_thread_that_waits_for_the_store_ends_at_exit(then):
    """Also if the group was destroyed before. A connection to the same port of another address stays open."""
    with launched(2, RANK, then) as (ranks, _):
        out, err = ranks[1].communicate(timeout=60)
    assert out.split() == ["failed", "ended", "open"], err
    assert ranks[1].returncode == 0, err


def connected(stack, *addresses):
    """Return connections to one port of several addresses."""
    port, found = 0, []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = stack.enter_context(socket.create_server((address, port), family=family))
        port = server.getsockname()[1]
        found.append(stack.enter_context(socket.create_connection((address, port))))
        stack.enter_context(server.accept()[0])
    return found, port


@pytest.mark.parametrize(
    ("host", "addresses", "which"),
    [
        ("127.0.0.1", ["127.0.0.1"], [0]),
        ("127.0.0.1", ["127.0.0.1", "127.0.0.2"], [0]),
        ("127.0.0.2", ["127.0.0.1", "127.0.0.2"], [1]),
        ("localhost", ["127.0.0.1", "127.0.0.2"], [0]),
        ("nowhere.invalid", ["127.0.0.1", "127.0.0.2"], []),
        ("nowhere.invalid", ["127.0.0.2"], [0]),  # the only one: no name server is asked
    ],
)
def test_the_connections_to_a_host(host, addresses, which):
    with contextlib.ExitStack() as stack:
        clients, port = connected(stack, *addresses)
        found = [stack.enter_context(each) for each in _connections(host, port)]
        assert sorted(each.getsockname() for each in found) == sorted(clients[i].getsockname() for i in which)


def test_the_group_was_destroyed_before():
    """No thread begins, which would raise."""
    assert absent("key", 0, [0, 1]) == []
