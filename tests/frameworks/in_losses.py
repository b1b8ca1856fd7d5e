"""Libraries of losses, theirs and ours, in a loop of DDP or their own: nobody divides by the micro-batches."""

import dataclasses
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from pytorch_metric_learning.losses import SupConLoss
from pytorch_metric_learning.trainers import MetricLossOnly
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainings import CLIP, EQUAL, SIZES, Training, Way, ddp, layers, normal, of_page, sgd

import diffcoll as dc


def encoder():
    return layers(6, 8, 4, bias=False)


def without_torchvision(*more):
    """Let packages be imported that import torchvision, and others: PyPI's loads with a CUDA build of PyTorch alone."""
    names = ["", ".transforms", ".transforms.functional", ".ops", ".ops.misc", ".datasets", ".models"]
    for name in [*(f"torchvision{name}" for name in names), *more]:
        sys.modules[name] = MagicMock()


# ── lightly ──────────────────────────────────────────────────────────────────────────────────────────────

SMALL = {"VICRegLoss": {"lambda_param": 1.0, "mu_param": 1.0, "nu_param": 0.04}}  # the defaults' steps are too large
LIGHTLY = {
    "NTXentLoss": dc.nn.NTXentLoss(),
    "VICRegLoss": dc.nn.VICRegLoss(**SMALL["VICRegLoss"]),
    "BarlowTwinsLoss": dc.nn.BarlowTwinsLoss(),
}


def of_views(name, sizes=SIZES):
    return Training(encoder, normal(6, 6), lambda model, views, update: LIGHTLY[name](*map(model, views)), sizes)


def lightly(name):
    def train(model, updates, loss):
        without_torchvision()
        import lightly.loss

        criterion = getattr(lightly.loss, name)(gather_distributed=True, **SMALL.get(name, {}))
        ddp()(model, updates, lambda model, views, update: criterion(*map(model, views)) / loss.factor)

    return train


# ── pytorch-metric-learning: its own trainer, which has no micro-batches ─────────────────────────────────

Ours = of_page("README.md", "Loss")


def metric_learning(make_loss):
    def train(model, updates, loss):
        assert loss.factor == 1
        batches = [batch for update in updates for batch in update]
        dataset = [row for x, labels in batches for row in zip(x, labels, strict=True)]
        MetricLossOnly(
            models={"trunk": DistributedDataParallel(model), "embedder": nn.Identity()},
            optimizers={"trunk_optimizer": sgd(model)},
            batch_size=len(batches[0][0]),
            loss_funcs={"metric_loss": make_loss()},
            dataset=dataset,
            sampler=torch.utils.data.SequentialSampler(dataset),
            data_device=torch.device("cpu"),
            dataloader_num_workers=0,
        ).train()

    return train


def wrapped(**options):
    return DistributedLossWrapper(SupConLoss(), **options)


def labelled(rows, generator):
    return *normal(6)(rows, generator), torch.arange(rows) % 2


def supcon(model, batch, update):
    x, labels = batch
    return dc.nn.functional.supcon_loss(model(x), labels)


LABELLED = Training(encoder, labelled, supcon, ((2, 3, 4),))  # a DataLoader of each rank has one batch size
LABELLED_EQUAL = dataclasses.replace(LABELLED, sizes=EQUAL)

# ── open_clip: its own training loop, which calls backward for each micro-batch on the loss of all of them ────────


class OpenClip(nn.Module):
    """The towers as open_clip calls its models."""

    def __init__(self, towers):
        super().__init__()
        self.towers = towers

    @property
    def logit_scale(self):
        return self.towers.scale

    def forward(self, images, texts):
        return dict(zip(("image_features", "text_features", "logit_scale"), self.towers(images, texts), strict=True))


def open_clip(divides_the_scale):
    """Return a function that trains with `train_one_epoch`; each update is one of `accum_freq` batches."""

    def train(towers, updates, loss):
        assert loss.factor == 1
        without_torchvision("ftfy")
        from open_clip_train.train import train_one_epoch

        class Loader(list):
            num_batches = num_samples = sum(map(len, updates))

        steps = len(updates[0])

        def of_features(logit_scale, **features):
            if divides_the_scale:  # its gradient, which each of the backward calls has whole
                logit_scale = logit_scale / steps + (logit_scale - logit_scale / steps).detach()
            return of_page("open_clip.md", "loss")(logit_scale=logit_scale, **features)

        loader = Loader(batch for update in updates for batch in update)
        data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
        off = dict.fromkeys(("distill", "horovod", "wandb", "grad_clip_norm", "log_local"))
        args = SimpleNamespace(**off, device="cpu", precision="fp32", skip_scheduler=True, accum_freq=steps)
        args.rank = args.local_rank = dc.get_rank()
        args.world_size, args.batch_size, args.log_every_n_steps = 3, 3, 1000
        model = DistributedDataParallel(OpenClip(towers))
        train_one_epoch(model, data, of_features, 0, sgd(model), None, None, None, args)

    return train


def of_all_rows(model, batch, update):
    """What `accum_freq` means: one batch, of all micro-batches."""
    return dc.nn.functional.clip_loss(*model(*map(torch.cat, zip(*update, strict=True))))


ALL_ROWS = dataclasses.replace(CLIP, loss=of_all_rows)

# ── all ──────────────────────────────────────────────────────────────────────────────────────────────────

OPEN_CLIP = "open_clip, a loss of `dc.nn`"
WRAPPED = "pytorch-metric-learning, its `DistributedLossWrapper(SupConLoss()"
ROWS = [
    *(("lightly, a loss of `dc.nn`", Way(ddp(), of_views(name))) for name in LIGHTLY),
    *((f"lightly, its `{name}`", Way(lightly(name), of_views(name, EQUAL))) for name in LIGHTLY),
    ("pytorch-metric-learning, a loss of `dc.nn`", Way(metric_learning(Ours), LABELLED)),
    (f"{WRAPPED})`", Way(metric_learning(wrapped), LABELLED_EQUAL)),
    (f"{WRAPPED}, efficient=True)`", Way(metric_learning(partial(wrapped, efficient=True)), LABELLED_EQUAL)),
    (OPEN_CLIP, Way(open_clip(divides_the_scale=False), ALL_ROWS)),
    (None, Way(open_clip(divides_the_scale=True), ALL_ROWS)),
]
