"""Simulated ranks whose calls do not fit together: every rank gets the error, with each rank's call and its line."""

import re

import pytest
import torch
from runs import refusal, rules

import diffcoll as dc
from diffcoll.core.groups import resolve


def got(receiver, expected, sender, sent):
    return re.escape(f"rank {receiver} expects {expected} from rank {sender}, which sends {sent}")


def ones(n):
    return f"torch.float32 ({n},)"


def primitive(odd):
    engine, x = resolve(None, "test"), torch.ones(2)
    engine.broadcast(x, 0)() if odd else engine.all_reduce(x, torch.ones(2))()


#: A call that differs on rank 1, where `odd` is 1, and what is said of it.
MISMATCHES = {
    "all_reduce": (lambda odd: dc.all_reduce(torch.ones(2 + odd)), got(0, ones(2), 1, ones(3))),
    "dtype": (
        lambda odd: dc.all_reduce(torch.ones(2).double() if odd else torch.ones(2)),
        got(0, ones(2), 1, "torch.float64 (2,)"),
    ),
    "all_gather": (lambda odd: dc.all_gather(torch.ones(2 + odd)), got(0, ones(2), 1, ones(3))),
    "dtype gathered": (
        lambda odd: dc.all_gather(torch.ones(2).int() if odd else torch.ones(2)),
        got(0, ones(2), 1, "torch.int32 (2,)"),
    ),
    "sizes": (
        lambda odd: dc.reduce_scatter(torch.ones(6), sizes=[1, 2, 3] if odd else None),
        got(0, ones(2), 1, ones(1)),
    ),
    "src": (lambda odd: dc.broadcast(torch.ones(2), src=2 - odd), "expects nothing"),
    "broadcast": (lambda odd: dc.broadcast(torch.ones(2 + odd)), got(1, ones(3), 0, ones(2))),
    "dst": (lambda odd: dc.reduce(torch.ones(2), dst=2 - odd), "which sends nothing"),
    "reduce": (lambda odd: dc.reduce(torch.ones(2 + odd), 2), got(2, ones(2), 1, ones(3))),
    "op": (lambda odd: dc.all_reduce(torch.ones(3), "max" if odd else "sum"), "rank 0 needs .*rank 1 max"),
    "collective": (
        lambda odd: (dc.all_gather if odd else dc.all_reduce)(torch.ones(2)),
        r"different collectives\n  rank 0 waits in all_reduce .*\n  rank 1 waits in all_gather ",
    ),
    "primitive": (primitive, "rank 0 needs .*rank 1 "),
    "all_to_all": (lambda odd: dc.all_to_all(torch.ones(3 + 3 * odd)), got(0, ones(1), 1, ones(2))),
    "pairs": (lambda odd: dc.permute(torch.ones(2), [] if odd else [(0, 1)]), got(1, "nothing", 0, ones(2))),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_disagree(name):
    """The error says what differs, and where each rank made its call; every rank gets it."""
    call, words = MISMATCHES[name]
    texts = []

    def body(r):
        texts.append(refusal(dc.CollectiveMismatchError, call, int(r == 1)))

    rules(body, range(3))
    assert len(texts) == 3 and len(set(texts)) == 1
    assert re.search(words, texts[0]), texts[0]
    for r in range(2):
        assert re.search(rf"rank {r} waits in \w+ at .*test_delivery\.py:\d+", texts[0])
