"""How Lightning's Trainer is used in the tests: quiet, on the ranks that `spawn` has started."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from trainings import CLIP, RATE

import diffcoll as dc
from diffcoll.integrations.lightning import GradientAveragerStrategy


class Module(pl.LightningModule):
    def __init__(self, net, loss=CLIP.loss):
        super().__init__()
        self.net, self.loss = net, loss

    def training_step(self, batch, batch_idx):
        return self.loss(self.net, *batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), RATE)


class ByHand(Module):
    automatic_optimization = False

    def training_step(self, update, batch_idx):
        optimizer = self.optimizers()
        for batch in update:
            self.manual_backward(self.loss(self.net, *batch))
        optimizer.step()
        optimizer.zero_grad()


def trainer(strategy="ddp", **options):
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    given = {"max_epochs": 1, "use_distributed_sampler": False, **quiet, **options}
    averager = GradientAveragerStrategy(**strategy) if isinstance(strategy, dict) else strategy
    return pl.Trainer(accelerator="cpu", devices=dc.get_world_size(), strategy=averager, **given)


def loader(batches):
    return DataLoader(list(batches), batch_size=None)


def with_trainer(loss=CLIP.loss, strategy="ddp", steps=None, **options):
    """Return a function that trains with a loss of a micro-batch; `strategy`: a dict for `GradientAverager`."""

    def train(model, updates):
        held = trainer(strategy, accumulate_grad_batches=steps or len(updates[0]), **options)
        held.fit(Module(model, loss), loader(batch for update in updates for batch in update))

    return train


def by_hand(model, updates):
    trainer().fit(ByHand(model), loader(updates))


def summed(model, *batch):
    return CLIP.loss(model, *batch, summed=True)
