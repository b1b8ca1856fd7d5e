"""Backward runs the collectives in the reverse order of the forward, on every rank, whatever the shape of its graph."""

import random

import torch
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from diffcoll.core import moves
from diffcoll.testing import new_group, spawn

N = 3


def recorded(r, seed):
    """The sizes of the tensors that collectives move, forward and backward, in a program with a graph of its own."""
    sizes, begin = [], moves._begin

    def noting(f, x, later=False):
        sizes.append(x.numel())
        return begin(f, x, later)

    common, own = random.Random(seed), random.Random(f"{seed} {r}")
    pair = new_group([0, 1])
    x = torch.randn(1, dtype=torch.float64, requires_grad=True)
    terms, steps = [x], common.randrange(3, 12)
    moves._begin = noting
    try:
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
        made = len(sizes)
        own.shuffle(terms)
        sum(t.square().sum() for t in terms).backward()
    finally:
        moves._begin = begin
    forward, backward = sizes[:made], sizes[made:]
    return forward, list(dict.fromkeys(backward))  # a checkpoint runs its collectives again before their backward


def test_reverse_order():
    def body(r):
        return [recorded(r, seed) for seed in range(25)]

    for of_rank in spawn(body, range(N), timeout=60):
        for forward, backward in of_rank:
            assert backward == forward[::-1]
        assert sum(len(forward) for forward, _ in of_rank) > 80
