"""`check_gradients(placements=)`: tensors that are one variable on all ranks, and a loss that all ranks return."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from verdicts import SIMULATED, causes, is_right, is_wrong, per_rank

import diffcoll as dc
from diffcoll.testing import check_gradients

ONE_LOSS = {"output": Replicate()}


def alike(*shape, n=3):
    return per_rank(*shape, n=1, seed=7) * n


def mlp(x, w, v, f=dc.sum_gradients, g="replicate"):
    """Column-parallel and row-parallel layers: f is the identity with a sum in backward, g a sum."""
    y = torch.tanh(f(x) @ w) @ v
    return dc.all_reduce(y, grad_placement=g).sin().sum()


def weights(n):
    return per_rank(3, 2, n=n, seed=20), per_rank(2, 4, n=n, seed=30)


def same(x):
    return x


def norm(x, w, reduce):
    """A norm of the rank's part of a sequence, with weights that all ranks have; the losses are summed."""
    return (reduce(w) * x / x.norm(dim=-1, keepdim=True)).pow(3).sum()


class Net(nn.Module):
    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce
        self.norm = nn.LayerNorm(4, dtype=torch.double)

    def forward(self, x):
        weight, bias = (self.reduce(p) for p in self.norm.parameters())
        return nn.functional.layer_norm(x, (4,), weight, bias).pow(3).sum()


class Labelled:
    """The ids are the same on all ranks."""

    def __call__(self, x, w, ids):
        return nn.functional.cross_entropy(dc.all_reduce(dc.sum_gradients(x) @ w, grad_placement="replicate"), ids)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_right_programs(n):
    w, v = weights(n)
    x = alike(5, 3, n=n)
    both = {"x": Replicate(), **ONE_LOSS}

    is_right(mlp, x, w, v, placements=both)
    is_right(mlp, [x[0].reshape(5, 3).t().contiguous().t()] * n, w, v, placements=both)
    is_right(lambda x, w, v: mlp(x, w, v, f=same), x, w, v, placements={"x": Partial(), **ONE_LOSS})
    is_right(lambda x, w, v: mlp(x, w, v, g="partial"), x, w, v, placements={"x": Replicate()})  # the sum of N losses
    is_right(
        lambda x, w, v: (mlp(x, w, v), {"y": dc.all_reduce(w, grad_placement="replicate")}), x, w, v, placements=both
    )
    rows = per_rank(2, 4, n=n)
    is_right(lambda x, w: norm(x, w, dc.sum_gradients), rows, alike(4, n=n), placements={"w": Replicate()})
    is_right(lambda x, w: norm(x, w, same), rows, alike(4, n=n), placements={"w": Partial(), "x": Shard(0)})
    net = Net(same)
    is_right(lambda x: net(x), rows, module=net, placements={"norm.*": Partial()})
    reduced = Net(dc.sum_gradients)
    is_right(lambda x: reduced(x), rows, module=reduced, placements={"*.weight": Replicate(), "norm.bias": Replicate()})
    ids = [torch.tensor([0, 1, 3, 3, 2])] * n
    is_right(Labelled(), x, per_rank(3, 4, n=n), ids, placements={**both, "ids": Replicate()})
    mask = [torch.ones(5, 4, dtype=torch.double)] * n  # a constant may be the same on all ranks
    is_right(lambda x, m: (dc.all_reduce(x * m)).sin().sum(), per_rank(5, 4, n=n), mask, constant=["m"], placements={})
    other = {"constant": ["m"], "placements": {"x": Partial()}}
    is_right(lambda x, w, m: (norm(x, w, same) * m).sum(), alike(5, 4, n=n), per_rank(4, n=n), mask, **other)
    is_right(lambda x: dc.all_reduce(x.sin()).sum() * x.sum(), alike((), n=n), placements={"x": Partial()})


def test_wrong_programs_are_named():
    n = 3
    w, v = weights(n)
    x, rows = alike(5, 3, n=n), per_rank(2, 4, n=n)
    both = {"x": Replicate(), **ONE_LOSS}

    def found(fn, *args, **more):
        report = is_wrong(fn, *args, **more)
        return causes(report), str(report)

    names, text = found(lambda x, w, v: mlp(x, w, v, f=same), x, w, v, placements=both)
    assert names == ["part of a sum"] and "  x: one rank's part of a sum over the ranks; the sum is right" in text
    assert "right: 8 others" in text
    names, text = found(lambda x, w, v: mlp(x, w, v, g="partial"), x, w, v, placements=both)
    assert names == ["scaled over an axis"] and "x, w and v: it is 3 = N times" in text and "grad_placement=" in text
    names, text = found(mlp, x, w, v, placements={"x": Partial(), **ONE_LOSS})
    assert names == ["scaled over an axis"] and "gradient of x   all" in text and "3 = N" in text
    names, text = found(lambda x, w, v: (torch.tanh(x @ w) @ v).sin().sum(), x, w, v, placements=both)
    assert names == ["not replicated"] and "output: other numbers on ranks 1 and 2 than on rank 0" in text
    names, text = found(lambda x, w: norm(x, w, same), rows, alike(4, n=n), placements={"w": Replicate()})
    assert names == ["part of a sum"]
    names, _ = found(
        lambda x, w: norm(x, w.detach(), dc.sum_gradients), rows, alike(4, n=n), placements={"w": Replicate()}
    )
    assert names == ["graph cut"]
    net = Net(same)
    names, text = found(lambda x: net(x), rows, module=net, placements={"norm.*": Replicate()})
    assert names == ["part of a sum"] and "norm.weight and norm.bias" in text
    # Variables of their own are still that: each rank's gradient, whatever the sum is.
    names, _ = found(lambda x, w, v: mlp(x.clone(), w, v, f=same), per_rank(5, 3), w, v, placements={"w": Shard(1)})
    assert names == ["scaled"]


def test_what_placements_say_is_checked():
    x, rows = alike(4), per_rank(4)

    def refused(error, text, *args, **more):
        with pytest.raises(error, match=text):
            check_gradients(lambda x, w: (x * w).sum(), *args, **{**SIMULATED, **more})

    one, name = {"x": Replicate()}, r"placements\['x'\]"
    refused(ValueError, "per_rank: got the same numbers on ranks 0 and 1", x, x, placements=one)
    refused(ValueError, "w: got other numbers on rank 1 than on rank 0", x, rows, placements={"*": Replicate()})
    refused(ValueError, r"placements: got 'v', expected one of x, w, output", x, rows, placements={"v": Replicate()})
    refused(TypeError, rf"{name}: got 'r', expected Replicate\(\), Partial\(\)", x, rows, placements={"x": "r"})
    refused(TypeError, "placements: got 3, expected placements by the name", x, rows, placements=3)
    refused(ValueError, r"placements\['output'\]: got Partial\(sum\)", x, rows, placements={"output": Partial()})
    refused(ValueError, "order: got 2 with placements=, expected 1", x, rows, placements=one, order=2)


def test_on_processes():
    w, v = weights(2)
    placements = {"x": Replicate(), **ONE_LOSS}
    is_right(mlp, alike(5, 3, n=2), w, v, placements=placements, on=["gloo"])
    is_wrong(lambda x, w, v: mlp(x, w, v, same), alike(5, 3, n=2), w, v, placements=placements, on=["gloo"])
