"""Random sharded models on random meshes pass the check; with one planted bug they are caught."""

import os
import random
from functools import partial

import pytest
import torch.distributed as dist
from sharded_programs import MLP, ShardedMLP, ShardedSequence, joined
from torch import nn
from torch.distributed.tensor import Shard
from verdicts import differs, matches, numbers, ruled

import diffcoll as dc

#: Programs in the long run.
COUNT = int(os.environ.get("DIFFCOLL_FUZZ", "2000"))
ROWS = 12


class JoinedSequence(ShardedSequence):
    """Each rank takes its part of rows that all have, and the results are joined."""

    def forward(self, x):
        split, joined_again = (partial(call, group=self.group) for call in (dc.split, dc.all_gather))
        return joined(super().forward(ruled(split, joined_again)(x)), self.group, self.bug == "joined twice")


#: How a layer is divided, and the bugs of each.
KINDS = {ShardedMLP: ("f", "g", "bias"), JoinedSequence: ("norm", "bias", "slice", "joined twice")}


class Model(nn.Sequential):
    """Layers that a seed draws."""

    def __init__(self, seed):
        self.kinds = random.Random(seed).choices(list(KINDS), k=1 + seed % 3)
        super().__init__(*(MLP() for _ in self.kinds))
        for i, p in enumerate(self.parameters()):
            p.data = numbers(*p.shape, seed=1000 * seed + i) / 2

    def forward(self, x):
        for layer in self:
            x = x + layer(x)
        return x


def program(seed, wrong):
    """Return the program, and the bug that is planted if it is to be wrong."""
    rng = random.Random(-1 - seed)
    model, tp, dp = Model(seed), rng.choice((2, 3)), rng.choice((1, 2, 2))
    places = [(i, bug) for i, kind in enumerate(model.kinds) for bug in KINDS[kind]]
    places += [(None, "loss summed"), (None, "local mean")] * (dp > 1)
    place, planted = rng.choice(places) if wrong else (None, "")
    axes = {"dp": dp, "tp": tp} if rng.random() < 0.5 else {"tp": tp, "dp": dp}
    how = rng.choice(("mean", "sum"))

    def shard(whole, mesh):
        for i, kind in enumerate(whole.kinds):
            whole[i] = kind(mesh["tp"].get_group(), planted if i == place else "")
        return whole

    def single(module, x, mask):
        return (module(x).sin().sum(1) * mask).sum() / mask.sum()

    def distributed(module, x, mask):
        values = module(x).sin().sum(1) * mask
        if planted == "local mean":
            return values.sum() / mask.sum() / (dp if how == "sum" else 1)
        count = dc.all_reduce(mask.sum().double(), group=dist.group.WORLD) / tp
        factor = dp if (how == "mean") != (planted == "loss summed") else 1
        return factor * values.sum() / count

    mask = numbers(ROWS, seed=seed) > -0.5
    mask[0] = mask[-1] = True
    if mask[: ROWS // 2].sum() == mask[ROWS // 2 :].sum():  # ranks have other counts
        mask[1] = ~mask[1]
    of_rows = {"x": {"dp": Shard(0)}, "mask": {"dp": Shard(0)}}
    divided = {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}}
    more = {"module": model, "shard": shard, "ranks": axes, "placements": {**of_rows, **divided}}
    batch = numbers(ROWS, 4, seed=seed), mask
    return (distributed, single, batch, {**more, "losses": {"dp": how}}), planted


def run(seeds):
    """Check a right and a wrong program for each seed."""
    for seed in seeds:
        matches(program(seed, wrong=False)[0])
        wrong, planted = program(seed, wrong=True)
        print(f"{seed}: {planted}")
        assert differs(wrong).observed, f"{seed}, {planted}"


def test_some_programs():
    run(range(4))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_programs(part):
    run(range(part * COUNT // 10, (part + 1) * COUNT // 10))
