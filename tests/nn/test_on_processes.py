"""Every layer and loss on gloo and MPI processes with unequal and empty batches equals one process, to second order."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

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


def cross_entropy(logits, positive=None):
    target = torch.arange(len(logits)) if positive is None else positive
    return F.cross_entropy(logits, target)


def test_contrastive_losses(on):
    scale, bias = nn.Parameter(torch.tensor(3.0).double()), nn.Parameter(torch.tensor(-1.0).double())

    def distributed(x, y, labels):
        pairs = dc.nn.functional.clip_loss(x, y, scale, normalize=True) + 2 * dc.nn.functional.siglip_loss(
            x, y, scale, bias
        )
        rows = dc.nn.functional.info_nce_loss(x, y, temperature=1 / scale) + 3 * dc.nn.functional.nt_xent_loss(x, y)
        return pairs + rows + 5 * dc.nn.functional.supcon_loss(x, labels)

    def single(x, y, labels):
        a, b = F.normalize(x), F.normalize(y)
        logits, n = scale * a @ b.T, len(x)
        clip = (cross_entropy(logits) + cross_entropy(logits.T)) / 2
        siglip = -F.logsigmoid((2 * torch.eye(n) - 1) * (scale * x @ y.T + bias)).sum() / n
        z = torch.cat([a, b])
        views = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e300)
        nt_xent = cross_entropy(views, torch.arange(2 * n).roll(n))
        others = ~torch.eye(n, dtype=torch.bool)
        positive = (labels[:, None] == labels) & others
        s = a @ a.T / 0.1
        each = s.masked_fill(~others, -1e300).logsumexp(1) - (s * positive).sum(1) / positive.sum(1).clamp(min=1)
        supcon = torch.where(positive.any(1), each, 0).mean()
        return clip + 2 * siglip + cross_entropy(logits) + 3 * nt_xent + 5 * supcon

    held(distributed, single, features, on, module=[scale, bias])


def test_losses_of_sums(on):
    def distributed(x, y, labels):
        twins = dc.nn.functional.barlow_twins_loss(x, y, lambd=0.02) + dc.nn.functional.vicreg_loss(x, y)
        return twins + dc.nn.functional.dice_loss(x.sigmoid(), y > 0, dims=0)

    def covariance(x):
        return (x - x.mean(0)).T @ (x - x.mean(0)) / (len(x) - 1)

    def single(x, y, labels):
        a, b = ((z - z.mean(0)) * (z.var(0, correction=0) + 1e-5).rsqrt() for z in (x, y))
        c, diagonal = a.T @ b / len(x), torch.eye(6, dtype=torch.bool)
        barlow = (c.diagonal() - 1).square().sum() + 0.02 * c.masked_fill(diagonal, 0).square().sum()
        std = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() / 2 for z in (x, y))
        cov = sum(covariance(z).masked_fill(diagonal, 0).square().sum() / 6 for z in (x, y))
        p, t = x.sigmoid(), (y > 0).double()
        dice = 1 - (2 * (p * t).sum(0) + 1) / (p.sum(0) + t.sum(0) + 1)
        return barlow + 25 * F.mse_loss(x, y) + 25 * std + cov + dice.mean()

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
