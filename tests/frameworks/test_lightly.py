"""lightly: its losses and ours in one training under DDP."""

import pytest
import torch
from torch import nn
from trainings import EQUAL, RATE, Training, cell, row_of_the_table, without_torchvision

import diffcoll as dc
from diffcoll.testing import RanksFailedError, spawn

SMALL = {"VICRegLoss": {"lambda_param": 1.0, "mu_param": 1.0, "nu_param": 0.04}}  # the defaults' steps are too large
OURS = {
    "NTXentLoss": dc.nn.NTXentLoss(),
    "VICRegLoss": dc.nn.VICRegLoss(**SMALL["VICRegLoss"]),
    "BarlowTwinsLoss": dc.nn.BarlowTwinsLoss(),
}


def theirs(name):
    without_torchvision()
    import lightly.loss

    return getattr(lightly.loss, name)(gather_distributed=True, **SMALL.get(name, {}))


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4, bias=False)).double()


def views_of(rows, generator):
    return tuple(torch.randn(rows, 6, generator=generator, dtype=torch.double) for _ in range(2))


def training(name, **more):
    def loss(model, *views):
        return OURS[name](*map(model, views))

    def mean(model, micro_batches):
        return sum(loss(model, *views) for views in micro_batches) / len(micro_batches)

    return Training(encoder, views_of, loss, mean, **more)


def under_ddp(make_loss, divides=True):
    """Return a training with DDP, in which nobody else divides by the micro-batches."""

    def train(model, updates):
        model, criterion = nn.parallel.DistributedDataParallel(model), make_loss()
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for update in updates:
            for views in update:
                (criterion(*map(model, views)) / (len(update) if divides else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


@pytest.mark.parametrize("name", OURS)
def test_the_same_loss(name):
    def on_rank(x, y):
        return float(theirs(name)(x, y)), float(OURS[name](x, y))

    ((found, expected),) = spawn(on_rank, *([view] for view in views_of(9, torch.Generator().manual_seed(3))))
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", OURS)
def test_ours_as_one_process(name, micro_batches):
    training(name).assert_as_one_process(under_ddp(lambda: OURS[name]), micro_batches)


def test_factors_of_ours():
    train = under_ddp(lambda: OURS["NTXentLoss"], divides=False)
    found = [training("NTXentLoss").factor(train, micro_batches).values() for micro_batches in (1, 2)]
    row = row_of_the_table("[lightly](lightly.md), a loss of `dc.nn`")
    assert [set(map(cell, each)) for each in found] == [{row[0]}, {row[1]}]


@pytest.mark.parametrize("name", OURS)
def test_factors_of_theirs(name):
    (found,) = set(training(name, sizes=EQUAL).factor(under_ddp(lambda: theirs(name))).values())
    assert cell(found) == row_of_the_table(f"[lightly](lightly.md), its `{name}`")[0]


def test_theirs_with_uneven_rows_ends_a_rank():
    with pytest.raises(RanksFailedError):
        training("NTXentLoss").on_ranks(under_ddp(lambda: theirs("NTXentLoss")), updates=1)
