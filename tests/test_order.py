"""Backward runs the collectives in the reverse order of the forward, on every rank, whatever the shape of its graph."""

import random

import torch
from runs import gloo, new_group, profiled
from torch.utils.checkpoint import checkpoint

import diffcoll as dc

N = 3


def recorded(r, seed):
    """Return the bytes of the collectives in the forward and in the backward of a program with a graph of its own."""
    common, own = random.Random(seed), random.Random(f"{seed} {r}")
    pair = new_group([0, 1])
    x = torch.randn(1, dtype=torch.float64, requires_grad=True)
    terms, steps = [x], common.randrange(3, 12)

    def forward():
        for size in range(2, steps + 2):
            kind = common.choice(["plain", "pair", "checkpoint", "async"])
            a = own.choice(terms).sum().sin().expand(size)
            for _ in range(own.randrange(4)):
                a = a * own.random() + own.choice(terms).sum()
            if kind == "checkpoint":
                y = checkpoint(lambda a: dc.all_reduce(a.cos()).square(), a, use_reentrant=False)
            elif kind == "pair":
                y = dc.all_reduce(a, group=pair) if r < 2 else a
            elif kind == "async":
                y = dc.all_reduce(a, async_op=True).wait()
            else:
                y = dc.all_reduce(a)
            for _ in range(own.randrange(4)):
                y = (y * own.random()).tanh()
            terms.append(y)

    called = [nbytes for _, nbytes in profiled(forward) if nbytes]  # 0: a wait
    own.shuffle(terms)
    backward = profiled(sum(t.square().sum() for t in terms).backward)  # in which checkpoints run forwards again
    return called, [nbytes for name, nbytes in backward if name.endswith(" backward") and nbytes]


def test_reverse_order():
    def body(r):
        return [recorded(r, seed) for seed in range(12)]

    for of_rank in gloo(body, range(N)):
        for forward, backward in of_rank:
            assert backward == forward[::-1]
        assert sum(len(forward) for forward, _ in of_rank) > 40
