"""Random sharded models on random meshes pass the check; with one planted bug they are caught."""

import os
import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from sharded_programs import copied, joined, parameter, scattered, summed
from torch import nn
from torch.distributed.tensor import Shard
from verdicts import differs, matches, numbers, ruled

import diffcoll as dc

#: Programs in the long run.
COUNT = int(os.environ.get("DIFFCOLL_FUZZ", "2000"))
WIDTH, ROWS = 6, 12


class Layer(nn.Module):
    """A layer and its sharded twin, for a group of ranks (None: the whole), with a bug or without."""

    bugs = ()
    #: The dim along which parameters are divided.
    dims = ()

    def __init__(self, seed):
        super().__init__()
        self.seed, self.group, self.bug = seed, None, ""

    def sharded(self, group, bug):
        self.group, self.bug = group, bug
        for name, dim in self.dims:
            part = getattr(self, name).chunk(group.size(), dim)[0]
            setattr(self, name, nn.Parameter(torch.empty_like(part)))
        return self

    def f(self, x):
        return x if self.bug == "f" else copied(x, self.group)

    def g(self, x):
        if self.bug == "sum in backward":
            return dc.all_reduce(x, group=self.group)
        return x if self.bug == "g" else summed(x, self.group)


class Pair(Layer):
    """Column-parallel, then row-parallel."""

    bugs = ("f", "g", "bias", "sum in backward", "divided", "detached")
    dims = (("up", 1), ("first", 0), ("down", 0))

    def __init__(self, seed):
        super().__init__(seed)
        self.up, self.down = parameter(WIDTH, 12, seed=seed), parameter(12, WIDTH, seed=seed + 1)
        self.first, self.bias = parameter(12, seed=seed + 2), parameter(WIDTH, seed=seed + 3)

    def forward(self, x):
        if self.group is None:
            return x + (x @ self.up + self.first).tanh() @ self.down + self.bias
        y = (self.f(x) @ self.up + self.first).tanh()
        y = (y.detach() if self.bug == "detached" else y) @ self.down
        y = self.g(y + self.bias) if self.bug == "bias" else self.g(y) + self.bias
        return x + (y / self.group.size() if self.bug == "divided" else y)


class Joining(Layer):
    """Column-parallel, and the columns of all ranks are joined."""

    bugs = ("f", "joined twice", "order")
    dims = (("weight", 1),)

    def __init__(self, seed):
        super().__init__(seed)
        self.weight = parameter(WIDTH, WIDTH, seed=seed)

    def forward(self, x):
        if self.group is None:
            return x + (x @ self.weight).sin()
        y = (self.f(x) @ self.weight).sin()
        y = joined(y.T.contiguous(), self.group, self.bug == "joined twice")
        return x + (y.flip(0) if self.bug == "order" else y).T


class Sequence(Layer):
    """A norm of each rank's rows, whose weights' gradients are summed."""

    bugs = ("not summed", "joined twice")

    def __init__(self, seed):
        super().__init__(seed)
        self.weight, self.bias = parameter(WIDTH, seed=seed), parameter(WIDTH, seed=seed + 1)

    def sharded(self, group, bug):
        super().sharded(group, bug)
        for p in (self.weight, self.bias) if bug != "not summed" else ():
            p.register_hook(lambda g: dc.all_reduce(g, group=group))
        return self

    def forward(self, x):
        if self.group is None:
            return nn.functional.layer_norm(x, (WIDTH,), self.weight, self.bias)
        split, joined_again = (partial(call, group=self.group) for call in (dc.split, dc.all_gather))
        mine = ruled(split, joined_again)(x)  # this rank's rows of what all ranks have
        y = nn.functional.layer_norm(mine, (WIDTH,), self.weight, self.bias)
        return joined(y, self.group, self.bug == "joined twice")


class Scattering(Pair):
    """The sum is scattered along the rows, and joined again."""

    bugs = ("f", "joined twice")

    def g(self, x):
        return joined(scattered(x, self.group), self.group, self.bug == "joined twice")


class Replicated(Layer):
    """The same on all ranks."""

    def __init__(self, seed):
        super().__init__(seed)
        self.weight, self.scale = parameter(WIDTH, WIDTH, seed=seed), nn.Parameter(torch.tensor(0.7).double())

    def forward(self, x):
        return x * self.scale + (x @ self.weight).tanh()


KINDS = (Pair, Joining, Sequence, Scattering, Replicated)


class Model(nn.Sequential):
    """Layers that a seed draws."""

    def __init__(self, seed):
        rng = random.Random(seed)
        kinds = [rng.choice(KINDS) for _ in range(rng.randint(1, 3))]
        super().__init__(*(kind(1000 * seed + 10 * i) for i, kind in enumerate(kinds)))


def program(seed, wrong):
    """Return the program, and the bug that is planted."""
    rng = random.Random(-1 - seed)
    model, tp, dp = Model(seed), rng.choice((2, 3)), rng.choice((1, 2, 2))
    places = [(i, bug) for i, each in enumerate(model) for bug in each.bugs]
    places += [(None, "loss summed"), (None, "local mean")] * (dp > 1)
    place, planted = rng.choice(places) if wrong and places else (None, "")
    axes = {"dp": dp, "tp": tp} if rng.random() < 0.5 else {"tp": tp, "dp": dp}
    how = rng.choice(("mean", "sum"))

    def shard(whole, mesh):
        for i, each in enumerate(whole):
            each.sharded(mesh["tp"].get_group(), planted if i == place else "")
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

    divided = {f"{i}.{name}": {"tp": Shard(dim)} for i, each in enumerate(model) for name, dim in each.dims}
    mask = numbers(ROWS, seed=seed) > -0.5
    mask[0] = mask[-1] = True
    if mask[: ROWS // 2].sum() == mask[ROWS // 2 :].sum():  # ranks have other counts
        mask[1] = ~mask[1]
    of_ranks = {"x": {"dp": Shard(0)}, "mask": {"dp": Shard(0)}}
    more = {"module": model, "shard": shard, "ranks": axes, "placements": {**of_ranks, **divided}}
    batch = numbers(ROWS, WIDTH, seed=seed), mask
    return (distributed, single, batch, {**more, "rank_reduction": {"dp": how}}), planted


def run(seeds):
    """Check a right and a wrong program for each seed."""
    for seed in seeds:
        matches(program(seed, wrong=False)[0])
        wrong, planted = program(seed, wrong=True)
        if planted:
            print(f"{seed}: {planted}")
            assert differs(wrong).observed, f"{seed}, {planted}"


def test_some_programs():
    run(range(4))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_programs(part):
    run(range(part * COUNT // 10, (part + 1) * COUNT // 10))
