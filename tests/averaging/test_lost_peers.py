"""A peer dies in one of an averager's small messages: the others raise CollectiveFailedError, as for gradients."""

import os
import re
import sys

import pytest
import torch
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
