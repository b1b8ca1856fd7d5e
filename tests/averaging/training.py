"""What the tests of averagers share: where ranks run, backward calls with their weights, and comparisons."""

import contextlib

import pytest
import torch
from runs import gloo, mpi, refusal, rules
from torch import nn

import diffcoll as dc

RUNS = {"rules": rules, "gloo": gloo, "mpi": mpi}
SMALL = 1e-4  # megabytes: several buckets, for small models too

everywhere = pytest.mark.parametrize("where", RUNS)
on_two = pytest.mark.parametrize("where", ["rules", "gloo"])
by_each_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
LEFT = "a rank has left this backward by an error"


def mlp(dtype=torch.double):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def batch(r, k=0, dtype=torch.double):
    """Different values on every rank and in every step, for `mlp`."""
    return torch.linspace(-1, 1 + r + k, 6, dtype=dtype).view(2, 3)


def attach(parameters, reduction="mean", **arguments):
    """Return an averager, and a function that calls backward, with the batch's weight where the reduction has one.

    A loss that is a function is called after set_weight, and within no_sync.
    """
    averager = dc.GradientAverager(parameters, reduction=reduction, **arguments)

    def backward(loss, weight=1, reduces=True):
        if reduction == "weighted":
            averager.set_weight(weight)
        with contextlib.nullcontext() if reduces else averager.no_sync():
            (loss() if callable(loss) else loss).backward()

    return averager, backward


def shares(reduction, batches):
    """Return what the gradients of batches, given as (rank, weight), are multiplied by in the reduced one."""
    total = {"sum": 1, "mean": len({r for r, _ in batches}), "weighted": sum(w for _, w in batches)}[reduction]
    return [(w if reduction == "weighted" else 1) / total for _, w in batches]


def each(body, n, where="rules"):
    """Run a function that returns tensors, the same on all ranks, and return them."""
    found = RUNS[where](body, range(n))
    equal_on_all_ranks(found)
    return found[0]


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(found, expected, tolerance=1e-12):
    """Check that tensors differ by rounding only, and that the same ones are None."""
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a - b).abs().max() <= tolerance, (a, b)


def equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def equal_on_all_ranks(found):
    for of_rank in found[1:]:
        equal(of_rank, found[0])


def refused(call, error=RuntimeError):
    """Return the text of the error that a call raises."""
    return refusal(error, call)
