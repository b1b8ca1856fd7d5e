"""A peer dies in one of an averager's small messages: the others raise CollectiveFailedError, as for gradients."""

import os
import re
import sys
import time

import pytest
import torch
from runs import launched
from torch import nn

import diffcoll as dc
from diffcoll.engines.c10d import C10dEngine
from diffcoll.testing import RanksFailedError, spawn

N = 3
#: What is between the call of a function of the library and the message in which rank 1 dies.
WHERE = {
    "comparison of the parameters": "agree_on_each",
    "copy of the parameters": "broadcast_from_first",
    "new group": "twin",
    "order of the buckets": "_agree_on_order",
    "flags of join": "joined",
}
PRIMITIVES = "all_reduce", "all_gather", "broadcast", "messages"


def dies(where):
    """Let this process die when it starts a message within a function of this name."""

    def wrapped(primitive):
        def call(self, *arguments):
            frame = sys._getframe()
            while frame is not None:
                if frame.f_code.co_name == where:
                    os._exit(5)
                frame = frame.f_back
            return primitive(self, *arguments)

        return call

    for name in PRIMITIVES:
        setattr(C10dEngine, name, wrapped(getattr(C10dEngine, name)))


def train(r, where):
    if r == 1:
        dies(where)
    model = nn.Linear(3, 2)
    averager = dc.GradientAverager(model)
    for x in averager.join([torch.full((1, 3), r + 1.0)] * (r + 1)):
        model.zero_grad()
        model(x).sum().backward()


@pytest.mark.parametrize("what", WHERE)
def test_a_peer_dies_in_a_small_message(what):
    with pytest.raises(RanksFailedError) as caught:
        spawn(train, range(N), [WHERE[what]] * N, timeout=60)
    reports = caught.value.reports
    assert "exit code 5" in reports[1], reports
    for r in (0, 2):
        last = reports[r].strip().splitlines()[-1]
        assert re.match(rf"diffcoll.*CollectiveFailedError: .*failed on rank {r} of a gloo group of 3 ranks", last), (
            last
        )


STOPPED = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import diffcoll as dc

rank = int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 3, rank == 0, timedelta(seconds=60))
store.set(str(rank), "")
store.wait(["0", "1", "2"])  # all have imported PyTorch: gloo waits for a second only
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=1))
model = torch.nn.Linear(3, 2)
averager = dc.GradientAverager(model, reduction=sys.argv[1])
x = torch.full((1, 3), rank + 1.0)
model(x).sum().backward()
before = [p.grad.clone() for p in model.parameters()]
values = [p.detach().clone() for p in model.parameters()]
if rank == 0:
    model.bias.register_hook(lambda g: os.kill(os.getpid(), signal.SIGSTOP))
try:
    model(x).sum().backward()
except dc.CollectiveFailedError as error:
    print(time.monotonic(), error)
for p, g, value in zip(model.parameters(), before, values):
    assert p.grad is None if sys.argv[1] == "mean" else torch.equal(p.grad, g), p.grad
    assert torch.equal(p, value)
"""


@pytest.mark.parametrize("reduction", [pytest.param("mean", marks=pytest.mark.slow), "sum"])
def test_the_process_that_serves_the_store_is_stopped(reduction):
    """Calls of a TCPStore do not return then. The others raise all the same, and end.

    No sum over some ranks is left in `.grad`: means that were added to are gone, sums are as before the step.
    """
    with launched(N, STOPPED, reduction) as (ranks, _):
        for r in (1, 2):
            out, err = ranks[r].communicate(timeout=40)
            ended = time.monotonic()
            assert ranks[r].returncode == 0, err
            raised, text = out.split(maxsplit=1)
            assert re.match(rf"GradientAverager, bucket 0 of 1 .*: failed on rank {r} of a gloo group of 3 ranks", text)
            assert "a rank died, hangs, has not called backward" in text
            assert ended - float(raised) < 10
