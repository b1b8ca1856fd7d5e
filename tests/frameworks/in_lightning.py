"""Lightning: DDP, or our strategy, takes the mean over ranks; the Trainer divides by the micro-batches, Fabric not."""

import contextlib
import dataclasses
from datetime import timedelta

import lightning.pytorch as pl
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader
from trainings import CLIP, TOKENS, Training, Way, layers, loop, normal, sgd

import diffcoll as dc
from diffcoll.integrations.lightning import GradientAveragerStrategy


class Module(pl.LightningModule):
    """Takes (micro-batch, its update)."""

    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss = net, loss

    def training_step(self, both, batch_idx):
        return self.loss(self.net, *both)

    def configure_optimizers(self):
        return sgd(self.net)


class ByHand(Module):
    automatic_optimization = False

    def training_step(self, update, batch_idx):
        optimizer = self.optimizers()
        for batch in update:
            self.manual_backward(self.loss(self.net, batch, update) / len(update))  # nobody else divides
        optimizer.step()
        optimizer.zero_grad()


def fit(module, batches, strategy, **options):
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    options = {"max_epochs": 1, "use_distributed_sampler": False, **quiet, **options}
    if strategy == "ours":
        limit = timedelta(seconds=47)
        strategy = GradientAveragerStrategy(process_group_backend="gloo", timeout=limit, bucket_mb=1.0)
        assert strategy.process_group_backend == "gloo"
    trainer = pl.Trainer(accelerator="cpu", devices=dc.get_world_size(), strategy=strategy, **options)
    trainer.fit(module, DataLoader(list(batches), batch_size=None))


def lightning(strategy, convert=lambda model: model, **options):
    def train(model, updates, loss):
        batches = [(batch, update) for update in updates for batch in update]
        module = Module(convert(model), loss)
        fit(module, batches, strategy, accumulate_grad_batches=len(updates[0]), **options)

    return train


def by_hand(strategy):
    return lambda model, updates, loss: fit(ByHand(model, loss), updates, strategy)


def fitted_twice(model, updates, loss):
    """The strategy detaches its averager when a fit ends: DDP may follow."""
    for strategy, half in (("ours", updates[:3]), ("ddp", updates[3:])):
        lightning(strategy)(model, half, loss)


def fabric(averages):
    def train(model, updates, loss):
        fabric = Fabric(accelerator="cpu", devices=dc.get_world_size(), strategy="ddp")
        fabric.launch()
        averager, wrapped, optimizer = None, model, sgd(model)
        if averages:
            averager, optimizer = dc.GradientAverager(model), fabric.setup_optimizers(optimizer)
        else:
            wrapped, optimizer = fabric.setup(model, optimizer)

        def around(is_last):
            return contextlib.nullcontext() if averages else fabric.no_backward_sync(wrapped, enabled=not is_last)

        loop(wrapped, updates, loss, optimizer, averager, fabric.backward, around)

    return train


def rounded():
    """The towers as they are after a conversion to float32 and back."""
    return CLIP.model().float().double()


def normalized():
    first, tanh, last = layers(6, 8, 1)
    return nn.Sequential(first, nn.BatchNorm1d(8).double(), tanh, last)


def mean_of_squares(model, batch, update):
    return dc.nn.functional.token_mean(model(*batch).square().flatten())


BATCH_NORM = Training(normalized, normal(6), mean_of_squares)
CLIPPED = dataclasses.replace(CLIP, max_norm=0.3)
CONVERTED = dataclasses.replace(CLIP, model=rounded)
WAYS = [
    # The Trainer converts the model before the strategy makes an averager of it.
    Way(lightning("ours", nn.Module.float, precision="64-true"), CONVERTED),
    Way(fitted_twice),
]
for name in ("ddp", "ours"):
    WAYS += [
        Way(lightning(name)),
        Way(lightning(name), TOKENS),
        Way(lightning(name, dc.nn.convert_sync_batchnorm), BATCH_NORM),
        Way(lightning(name, gradient_clip_val=0.3), CLIPPED),
        Way(by_hand(name)),
    ]
ROWS = [("Lightning Trainer", way) for way in WAYS]
ROWS += [("Fabric", Way(fabric(averages), of)) for averages in (False, True) for of in (CLIP, TOKENS)]
