"""Contrastive losses of a whole batch on one process, from their formulas, and programs that run ours against them."""

import torch
import torch.nn.functional as F
from torch import nn

from diffcoll.testing import assert_matches_single_process

SIZES = ((8,), (4, 4), (5, 3), (5, 0, 3), (0, 4, 0))

OPTIONS = ({}, {"chunk_size": 3}, {"exchange": "ring"}, {"exchange": "ring", "chunk_size": 2})


class Scale(nn.Module):
    """Parameters of a loss."""

    def __init__(self, **values):
        super().__init__()
        for name, value in values.items():
            setattr(self, name, nn.Parameter(torch.tensor(value, dtype=torch.double)))


def softmax(logits, positive, excluded):
    """Mean over rows of −log softmax, averaged over each row's positives; 0 for a row without one."""
    log_p = logits.masked_fill(excluded, -torch.inf).log_softmax(1)
    weight = positive.to(logits.dtype) / positive.sum(1, keepdim=True).clamp(min=1)
    return -(log_p.masked_fill(~positive, 0) * weight).sum(1).mean()


def masks(rows, labels=None, ids=None):
    """(positive, excluded) for pairs of two sets of features."""
    same = torch.eye(rows, dtype=torch.bool)
    positive = same if labels is None else labels[:, None] == labels
    return positive, same & ~same if ids is None else (ids[:, None] == ids) & ~positive


def batch(features, marks=0):
    """A function of a number of rows: features of 6 dimensions, then labels or ids with few values."""

    def make(rows):
        g = torch.Generator().manual_seed(rows)
        xs = [torch.randn(rows, 6, generator=g, dtype=torch.double) for _ in range(features)]
        return *xs, *(torch.randint(0, 3, (rows,), generator=g) for _ in range(marks))

    return make


def holds(ours, reference, make, module=None, **more):
    """Assert value, gradients and second order of our loss, for "mean" and "sum"."""
    more = {"sizes": SIZES, "order": 2, "on": ["simulated"], "tolerance": 1e-10} | more
    report = assert_matches_single_process(ours, reference, make, module=module, **more)
    assert report.ok


def precision(ours, reference, dtype, tolerance, **options):
    """Compare value and gradients of features at scale 100 with the reference in float64 of the same numbers."""
    g = torch.Generator().manual_seed(0)
    xs = [F.normalize(torch.randn(16, 32, generator=g)).to(dtype).requires_grad_() for _ in range(2)]
    exact = [x.detach().double().requires_grad_() for x in xs]
    loss, right = ours(*xs, **options), reference(*exact)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), right, rtol=1e-5, atol=1e-5)
    for found, want in zip(torch.autograd.grad(loss, xs), torch.autograd.grad(right, exact), strict=True):
        assert found.dtype == dtype
        assert (found.double() - want).abs().max() <= tolerance * want.abs().max()
