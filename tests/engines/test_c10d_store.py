"""Making a group while the process that serves the store is stopped, where PyTorch's calls wait without limit."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from runs import launched
from torch.distributed import distributed_c10d

from diffcoll.engines import c10d_store

#: Rank 0 serves the store. When the ranks have agreed to make the group of an averager, it stops, or is late.
RANK = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import diffcoll as dc
from diffcoll.engines import c10d, c10d_store

rank, what, new_group = int(os.environ["RANK"]), sys.argv[1], c10d.new_group


def late(*args, **more):
    if what == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1.5)
    return new_group(*args, **more)


if rank == 0:
    c10d.new_group = late
c10d_store.PAUSE_SECONDS = 0.3
dist.init_process_group("gloo", timeout=timedelta(seconds=2))
model = torch.nn.Linear(3, 2)
begin = time.monotonic()
try:
    dc.GradientAverager(model)
    model(torch.ones(1, 3)).sum().backward()
    print("made")
except dc.CollectiveFailedError as error:
    print(error)
assert time.monotonic() - begin < 20
"""


@pytest.mark.parametrize("what", ["stops", "is late"])
def test_the_server_of_the_store(what):
    with launched(2, RANK, what) as (ranks, port):
        out, err = ranks[1].communicate(timeout=60)
    assert ranks[1].returncode == 0, err
    if what == "is late":
        assert out == "made\n"
        return
    assert out.startswith("making a group, forward: failed on rank 1 of a gloo group of 2 ranks, called at <string>:")
    assert f"the store of torch.distributed at 127.0.0.1:{port} has not answered for 2 s: the process that" in out


def test_no_call_of_pytorch_begins_when_the_group_is_made_or_has_failed(monkeypatch):
    """A host that is out of reach may come back then; a thread within PyTorch at exit ends the process with −6."""
    connects, comes_back, calls, threads = threading.Event(), threading.Event(), [], []

    def create_connection(address, timeout):
        threads.append(threading.current_thread())
        connects.set()
        assert comes_back.wait(10)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(c10d_store, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(c10d_store.socket, "create_connection", create_connection)
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **more: calls.append(args))
    store = SimpleNamespace(host="127.0.0.1", port=1)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    with c10d_store.while_it_answers(timedelta(seconds=5)):
        assert connects.wait(10)
    comes_back.set()
    threads[0].join(10)
    assert not threads[0].is_alive() and calls == []
