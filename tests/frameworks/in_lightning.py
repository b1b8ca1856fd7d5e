"""Lightning's Trainer: DDP, or our strategy, takes the mean over ranks, the Trainer divides by the micro-batches."""

import dataclasses

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from trainings import CLIP, RATE, TOKENS, Towers, Training, pairs, tokens, undivided
from variants import Way

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
        return torch.optim.SGD(self.net.parameters(), RATE)


class ByHand(Module):
    automatic_optimization = False

    def training_step(self, update, batch_idx):
        optimizer = self.optimizers()
        for batch in update:
            self.manual_backward(self.loss(self.net, batch, update))
        optimizer.step()
        optimizer.zero_grad()


def fitted(module, batches, strategy, **options):
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    options = {"max_epochs": 1, "use_distributed_sampler": False, **quiet, **options}
    strategy = GradientAveragerStrategy() if strategy == "ours" else strategy
    trainer = pl.Trainer(accelerator="cpu", devices=dc.get_world_size(), strategy=strategy, **options)
    trainer.fit(module, DataLoader(list(batches), batch_size=None))


def lightning(strategy, loss=pairs, **options):
    def train(model, updates):
        batches = [(batch, update) for update in updates for batch in update]
        fitted(Module(model, undivided(loss)), batches, strategy, accumulate_grad_batches=len(updates[0]), **options)

    return train


def by_hand(strategy):
    return lambda model, updates: fitted(ByHand(model, pairs), updates, strategy)


def fitted_twice(model, updates):
    """The strategy detaches its averager when a fit ends: DDP may follow."""
    for strategy, half in (("ours", updates[:10]), ("ddp", updates[10:])):
        lightning(strategy)(model, half)


def converted(model, updates):
    """The Trainer converts the model before the strategy makes an averager of it."""
    lightning("ours", precision="64-true")(model.float(), updates)


class Rounded(Towers):
    def __init__(self):
        super().__init__()
        self.float().double()


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, x):
        return self.layers(x).square()


def mean_of_rows(model, batch, update):
    return dc.nn.functional.token_mean(model(*batch).flatten()) / len(update)


def synchronized(strategy):
    def train(model, updates):
        dc.nn.convert_sync_batchnorm(model)
        lightning(strategy, mean_of_rows)(model, updates)

    return train


BATCH_NORM = Training(
    Normalized,
    lambda n, generator: (torch.randn(n, 6, generator=generator, dtype=torch.double),),
    lambda model, batches: sum(model(x).mean() for (x,) in batches) / len(batches),
)
CLIPPED = dataclasses.replace(CLIP, max_norm=0.3)
RIGHT = {}
for name in ("ddp", "ours"):
    RIGHT |= {
        f"{name}: pairs": Way(lightning(name)),
        f"{name}: tokens": Way(lightning(name, tokens), TOKENS),
        f"{name}: batch norm": Way(synchronized(name), BATCH_NORM),
        f"{name}: clipped": Way(lightning(name, gradient_clip_val=0.3), CLIPPED),
        f"{name}: manual optimization": Way(by_hand(name)),
    }
RIGHT |= {"a second fit": Way(fitted_twice), "converted": Way(converted, dataclasses.replace(CLIP, model=Rounded))}
FACTORS = [("Lightning Trainer", Way(lightning(name))) for name in ("ddp", "ours")]
