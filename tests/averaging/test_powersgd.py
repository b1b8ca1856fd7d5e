"""The example that replaces communication hooks: what PowerSGD has not sent, it sends later."""

import sys

import torch
from runs import ROOT
from torch import nn
from training import each, same

import diffcoll as dc

sys.path.append(str(ROOT / "examples"))
from powersgd import PowerSGD


def steps(r, rank):
    """Return the sums over five steps of what was used and of the exact means, and the last residuals' mean."""
    torch.manual_seed(0)
    net, powersgd = nn.Sequential(nn.Conv2d(4, 5, 2), nn.Tanh(), nn.Flatten(), nn.Linear(5, 3)).double(), PowerSGD(rank)
    net.to(memory_format=torch.channels_last)
    used, exact = [], []
    for k in range(5):
        net.zero_grad()
        x = torch.randn(3, 4, 2, 2, generator=torch.Generator().manual_seed(10 * r + k), dtype=torch.double)
        net(x).square().sum().backward()
        exact.append(dc.all_reduce([p.grad for p in net.parameters()], "mean"))
        powersgd.reduce(net)
        used.append([p.grad for p in net.parameters()])
    left = dc.all_reduce(powersgd.residuals, "mean")
    sums = (sum(of_steps) for each_step in (used, exact) for of_steps in zip(*each_step, strict=True))
    return [*sums, *(left.get(i, torch.zeros_like(p)).view_as(p) for i, p in enumerate(net.parameters()))]


def test_nothing_is_lost():
    found = each(lambda r: steps(r, 1), 3)
    used, exact, left = found[:4], found[4:8], found[8:]
    same([a + b for a, b in zip(used, left, strict=True)], exact)
    assert (used[0] - exact[0]).abs().max() > 1e-2


def test_in_full_rank_it_is_exact():
    found = each(lambda r: steps(r, 6), 2)
    same(found[:4], found[4:8])
