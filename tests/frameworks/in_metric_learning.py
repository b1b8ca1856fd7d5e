"""pytorch-metric-learning: its own trainer, with its own loss and with ours. It has no micro-batches."""

import torch
from pytorch_metric_learning.losses import SupConLoss
from pytorch_metric_learning.trainers import MetricLossOnly
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import nn
from trainings import EQUAL, RATE, Training
from variants import Way

import diffcoll as dc


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


def whole(model, micro_batches):
    ((x, labels),) = micro_batches
    return dc.nn.functional.supcon_loss(model(x), labels)


def trainer(make_loss):
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


UNEVEN = Training(Encoder, labelled, whole, ((2, 3, 4),))  # a DataLoader of each rank has one batch size
OF_EQUAL_ROWS = Training(Encoder, labelled, whole, EQUAL)
RIGHT = {"ours": Way(trainer(Ours), UNEVEN, (1,))}
PAGE = "pytorch-metric-learning"
WRAPPED = f"{PAGE}, its `DistributedLossWrapper(SupConLoss()"
FACTORS = [
    (f"{PAGE}, a loss of `dc.nn`", Way(trainer(Ours), UNEVEN)),
    (f"{WRAPPED})`", Way(trainer(lambda: DistributedLossWrapper(SupConLoss())), OF_EQUAL_ROWS)),
    (
        f"{WRAPPED}, efficient=True)`",
        Way(trainer(lambda: DistributedLossWrapper(SupConLoss(), efficient=True)), OF_EQUAL_ROWS),
    ),
]
