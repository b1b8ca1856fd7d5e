"""lightly: its losses and ours in one training under DDP; nobody divides by the micro-batches."""

import torch
from torch import nn
from trainings import EQUAL, Training, undivided, without_torchvision
from variants import Way, loop

import diffcoll as dc

SMALL = {"VICRegLoss": {"lambda_param": 1.0, "mu_param": 1.0, "nu_param": 0.04}}  # the defaults' steps are too large
OURS = {
    "NTXentLoss": dc.nn.NTXentLoss(),
    "VICRegLoss": dc.nn.VICRegLoss(**SMALL["VICRegLoss"]),
    "BarlowTwinsLoss": dc.nn.BarlowTwinsLoss(),
}


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4, bias=False)).double()


def views_of(rows, generator):
    return tuple(torch.randn(rows, 6, generator=generator, dtype=torch.double) for _ in range(2))


def training(name, **more):
    def mean(model, micro_batches):
        return sum(OURS[name](*map(model, views)) for views in micro_batches) / len(micro_batches)

    return Training(encoder, views_of, mean, **more)


def ours(name):
    return lambda model, views, update: OURS[name](*map(model, views)) / len(update)


def under_ddp(loss):
    return lambda model, updates: loop(nn.parallel.DistributedDataParallel(model), updates, loss)


def theirs(name):
    def train(model, updates):
        without_torchvision()
        import lightly.loss

        criterion = getattr(lightly.loss, name)(gather_distributed=True, **SMALL.get(name, {}))
        under_ddp(lambda model, views, update: criterion(*map(model, views)))(model, updates)

    return train


RIGHT = {name: Way(under_ddp(ours(name)), training(name)) for name in OURS}
FACTORS = [("lightly, a loss of `dc.nn`", Way(under_ddp(undivided(ours(n))), training(n))) for n in OURS]
FACTORS += [(f"lightly, its `{n}`", Way(theirs(n), training(n, sizes=EQUAL))) for n in OURS]
