"""pytorch-metric-learning: its own trainer, with its own loss and with ours."""

import pytest
import torch
from pytorch_metric_learning.losses import ProxyAnchorLoss, SupConLoss
from pytorch_metric_learning.trainers import MetricLossOnly
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import nn
from trainings import EQUAL, RATE, Training, cell, row_of_the_table

import diffcoll as dc
from diffcoll.testing import RanksFailedError, spawn

UNEVEN = ((2, 3, 4),)  # a DataLoader of each rank has one batch size


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4, bias=False)).double()

    def forward(self, x):
        return self.layers(x)


class Ours(dc.nn.SupConLoss):
    """The trainer passes the tuples of a miner, or None, too."""

    def forward(self, embeddings, labels, indices_tuple=None):
        assert indices_tuple is None
        return super().forward(embeddings, labels)


def labelled(rows, generator):
    return torch.randn(rows, 6, generator=generator, dtype=torch.double), torch.arange(rows) % 2


def loss(model, x, labels):
    return dc.nn.functional.supcon_loss(model(x), labels)


def whole(model, micro_batches):
    ((x, labels),) = micro_batches
    return loss(model, x, labels)


def with_trainer(make_loss):
    def train(model, updates):
        batches = [batch for update in updates for batch in update]
        dataset = [row for x, labels in batches for row in zip(x, labels, strict=True)]
        MetricLossOnly(
            models={"trunk": nn.parallel.DistributedDataParallel(model), "embedder": nn.Identity()},
            optimizers={"trunk_optimizer": torch.optim.SGD(model.parameters(), RATE)},
            batch_size=len(batches[0][0]),
            loss_funcs={"metric_loss": make_loss()},
            dataset=dataset,
            sampler=torch.utils.data.SequentialSampler(dataset),
            data_device=torch.device("cpu"),
            dataloader_num_workers=0,
        ).train()

    return train


def training(sizes):
    return Training(Encoder, labelled, loss, whole, sizes)


def check_factor(name, make_loss, sizes=EQUAL):
    (found,) = set(training(sizes).factor(with_trainer(make_loss)).values())
    assert cell(found) == row_of_the_table(f"[pytorch-metric-learning](pytorch-metric-learning.md), {name}")[0]


def test_the_same_loss():
    x, labels = labelled(9, torch.Generator().manual_seed(3))
    torch.testing.assert_close(SupConLoss()(x, labels), dc.nn.SupConLoss()(x, labels))


def test_ours_as_one_process():
    training(UNEVEN).assert_as_one_process(with_trainer(Ours))


def test_factors_of_the_table():
    check_factor("a loss of `dc.nn`", Ours, UNEVEN)
    check_factor("its `DistributedLossWrapper(SupConLoss())`", lambda: DistributedLossWrapper(SupConLoss()))
    efficient = "its `DistributedLossWrapper(SupConLoss(), efficient=True)`"
    check_factor(efficient, lambda: DistributedLossWrapper(SupConLoss(), efficient=True))


def test_parameters_of_their_loss_and_its_value():
    """Proxies come after the gather: every rank has their whole gradient, N times, and DDP's mean keeps the N."""

    def on_rank(x, labels):
        torch.manual_seed(0)
        criterion = ProxyAnchorLoss(2, 6).double()
        whole = criterion(*labelled(9, torch.Generator().manual_seed(3)))
        (expected,) = torch.autograd.grad(whole, criterion.proxies)
        ddp = nn.parallel.DistributedDataParallel(DistributedLossWrapper(criterion))
        value = ddp(x, labels)
        value.backward()
        return float(value / whole), float((criterion.proxies.grad / expected).mean())

    x, labels = labelled(9, torch.Generator().manual_seed(3))
    for value, proxies in spawn(on_rank, x.split(3), labels.split(3)):
        assert value == pytest.approx(3) and proxies == pytest.approx(3)


def test_theirs_with_uneven_rows_ends_a_rank():
    with pytest.raises(RanksFailedError):
        training(UNEVEN).on_ranks(with_trainer(lambda: DistributedLossWrapper(SupConLoss())), updates=1)
