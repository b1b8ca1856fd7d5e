"""Layers, and losses that are not contrastive, on processes with unequal and empty batches equal one process."""

import pytest
import torch
from references import barlow_twins, koleo, ratio, sigreg, vicreg
from torch import nn

import diffcoll as dc
from diffcoll.testing import assert_matches_single_process

pytestmark = pytest.mark.parametrize("on", ["gloo", "mpi"])


def held(distributed, single, rows, on, **more):
    """Assert that three ranks with 5, 0 and 3 rows compute what one process computes."""
    assert_matches_single_process(distributed, single, rows, sizes=[(5, 0, 3)], order=2, on=[on], **more)


def features(n):
    g = torch.Generator().manual_seed(n)
    x, y = (torch.randn(n, 6, generator=g, dtype=torch.double) for _ in range(2))
    return x, y, torch.randint(3, (n,), generator=g)


def test_losses_of_sums(on):
    def distributed(x, y, labels):
        twins = dc.nn.functional.barlow_twins_loss(x, y, lambd=0.02) + dc.nn.functional.vicreg_loss(x, y)
        others = dc.nn.functional.koleo_loss(x + y) + dc.nn.functional.sigreg_loss(x * y, seed=1)
        return twins + others + dc.nn.functional.dice_loss(x.sigmoid(), y > 0, dims=0)

    def single(x, y, labels):
        twins = barlow_twins(x, y, lambd=0.02) + vicreg(x, y)
        return twins + koleo(x + y) + sigreg(x * y, 1) + ratio("dice", x.sigmoid(), (y > 0).double(), dims=0)

    held(distributed, single, features, on)


def test_batch_norm_and_moments(on):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = dc.nn.SyncBatchNorm(6, dtype=torch.double)

        def forward(self, x, y, labels):
            _, mean, variance = dc.nn.functional.moments(y, 0)
            weighted = dc.nn.functional.weighted_mean(y.square(), weight=labels)
            return self.inner(x).pow(3).mul(y).sum() + (mean * variance * weighted).sum() / dc.get_world_size()

    model = Both()
    whole = nn.BatchNorm1d(6).double()
    whole.weight, whole.bias = model.inner.weight, model.inner.bias

    def single(x, y, labels):
        weighted = (labels[:, None] * y.square()).sum(0) / labels.sum()
        return whole(x).pow(3).mul(y).sum() + (y.mean(0) * y.var(0, correction=0) * weighted).sum()

    held(lambda *batch: model(*batch), single, features, on, module=[*model.parameters()], rank_reduction="sum")
