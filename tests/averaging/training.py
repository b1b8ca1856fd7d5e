"""What the tests of averagers share: where ranks run, models, batches, comparisons."""

from functools import partial

import torch
from runs import rules, runs_on
from torch import nn

SMALL = 1e-4  # megabytes: several buckets, for small models too

everywhere = runs_on("rules", "gloo", "mpi")
on_two = runs_on("rules", "gloo")

#: Rows of the ranks' batches.
SIZES = {1: [7], 2: [5, 2], 3: [4, 0, 3]}


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def made(make=mlp, seed=0):
    torch.manual_seed(seed)
    return make().double()


def data(n, shape=(5,), seed=1):
    """Return for each of n ranks its rows and their classes: other values, unequal numbers, none on rank 1 of 3."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(7, *shape, generator=g, dtype=torch.double)
    t = torch.randint(3, (7,), generator=g)
    return list(zip(x.split(SIZES[n]), t.split(SIZES[n]), strict=True))


summed_loss = partial(nn.functional.cross_entropy, reduction="sum")


def loss(model, r, k=0):
    """The loss of an mlp on rank r in step k."""
    x = torch.linspace(-1, 1 + r + k, 10).double().view(2, 5)
    return model(x.to(model[0].weight.dtype)).square().sum()


def averaged(n, k=0):
    """The gradients of an mlp after a step of n ranks."""
    model = made()
    for r in range(n):
        (loss(model, r, k) / n).backward()
    return gradients(model)


def each(body, n, run=rules):
    """Run a function that returns tensors, the same on all ranks, and return them."""
    found = run(body, range(n))
    equal_on_all_ranks(found)
    return found[0]


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(found, expected, tolerance=1e-12):
    """Check that tensors differ by rounding only, and that the same ones are None."""
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def equal_on_all_ranks(found):
    for of_rank in found[1:]:
        same(of_rank, found[0], 0)
