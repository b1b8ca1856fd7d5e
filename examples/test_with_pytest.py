"""Tests of distributed code with pytest: each body runs once per rank.

pytest examples/test_with_pytest.py
"""

import pytest
import torch
from torch import nn

import diffcoll as dc
from diffcoll.testing import ranks

SIZES = [4, 0, 3]  # of each rank's batch


def batch():
    """Return this rank's batch."""
    rank = dc.get_rank()
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SIZES[rank], 5, generator=generator, dtype=torch.double) + rank


def mean_of_all(x):
    """The mean over the rows of all ranks."""
    count = dc.all_reduce(torch.tensor(float(len(x)), dtype=x.dtype))
    return dc.all_reduce(x.sum(0)) / count


@ranks(1, 2, 3)
def test_mean():
    rows = dc.all_gather(batch(), sizes=SIZES[: dc.get_world_size()])
    torch.testing.assert_close(mean_of_all(batch()), rows.mean(0))


@ranks(3)
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_the_whole_batch(bias):
    torch.manual_seed(0)
    model = nn.Linear(5, 2, bias=bias, dtype=torch.double)
    rows = dc.all_gather(batch(), sizes=SIZES).detach()
    expected = torch.autograd.grad(model(rows).square().sum(), list(model.parameters()))

    model(batch()).square().sum().backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(dc.all_reduce(p.grad), gradient)


@ranks(2, on="gloo")
def test_on_processes():
    with pytest.raises(ValueError, match="src: got 2"):
        dc.broadcast(torch.ones(1), src=2)
    assert dc.all_reduce(torch.tensor(dc.get_rank()), op="max") == 1


if __name__ == "__main__":
    if code := pytest.main([__file__, "-q"]):
        raise SystemExit(code)
