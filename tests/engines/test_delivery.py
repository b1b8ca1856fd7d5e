"""Simulated ranks whose calls do not fit together, and how often a sum is computed.

Every rank gets the error, with each rank's call and its line.
"""

import pytest
import torch
import torch.distributed as dist
from runs import noted, refusal, rules

import diffcoll as dc
from diffcoll.core.groups import resolve
from diffcoll.engines.simulated import blocks


def primitive(odd):
    engine, x = resolve(None, "test"), torch.ones(2)
    engine.broadcast(x, 0)() if odd else engine.all_reduce(x, torch.ones(2))()


#: A call that differs on rank 1, where `odd` is 1.
MISMATCHES = {
    "all_reduce": lambda odd: dc.all_reduce(torch.ones(2 + odd)),
    "dtype": lambda odd: dc.all_reduce(torch.ones(2, dtype=torch.float64 if odd else torch.float32)),
    "all_gather": lambda odd: dc.all_gather(torch.ones(2 + odd)),
    "dtype gathered": lambda odd: dc.all_gather(torch.ones(2, dtype=torch.int32 if odd else torch.float32)),
    "sizes": lambda odd: dc.reduce_scatter(torch.ones(6), sizes=[1, 2, 3] if odd else None),
    "src": lambda odd: dc.broadcast(torch.ones(2), src=2 - odd),
    "broadcast": lambda odd: dc.broadcast(torch.ones(3, 2) if odd else torch.ones(2, 3)),  # of as many numbers
    "dst": lambda odd: dc.reduce(torch.ones(2), dst=2 - odd),
    "reduce": lambda odd: dc.reduce(torch.ones(2 + odd), 2),
    "op": lambda odd: dc.all_reduce(torch.ones(3), "max" if odd else "product"),
    "blocks that fit": lambda odd: dc.all_gather(torch.ones(1)) if odd else dc.all_to_all(torch.ones(3)),
    "primitive": primitive,
    "all_to_all": lambda odd: dc.all_to_all(torch.ones(3 + 3 * odd)),
    "pairs": lambda odd: dc.permute(torch.ones(2), [] if odd else [(0, 1)]),
}


@pytest.mark.parametrize("call", MISMATCHES.values(), ids=MISMATCHES)
def test_ranks_that_disagree(call):
    texts = []

    def body(r):
        texts.append(refusal(dc.CollectiveMismatchError, call, int(r == 1)))

    rules(body, range(3))
    assert len(texts) == 3 and len(set(texts)) == 1
    assert all(
        any(f"rank {r} " in line and f" at {__file__}:" in line for line in texts[0].splitlines()) for r in range(2)
    )


def test_a_sum_is_computed_once_for_all_ranks(monkeypatch):
    """Else the cost of a sum would grow with the square of the number of ranks."""
    sums = noted(blocks, "add_up", setattr=monkeypatch.setattr)
    rules(lambda r: [dc.all_reduce(torch.ones(2)), dist.all_reduce(torch.ones(2))], range(5))
    assert len(sums) == 2
