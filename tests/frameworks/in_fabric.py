"""Lightning's Fabric: DDP takes the mean over ranks, nobody divides by the micro-batches."""

import contextlib

import torch
from lightning.fabric import Fabric
from trainings import RATE, TOKENS, pairs, tokens, undivided
from variants import Way

import diffcoll as dc


def fabric(loss=pairs, averager=False):
    """Return a function that trains as Fabric's users do."""

    def train(model, updates):
        fabric = Fabric(accelerator="cpu", devices=dc.get_world_size(), strategy="ddp")
        fabric.launch()
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        if averager:
            held, optimizer = dc.GradientAverager(model), fabric.setup_optimizers(optimizer)
        else:
            model, optimizer = fabric.setup(model, optimizer)
        for update in updates:
            for k, batch in enumerate(update, 1):
                is_last = k == len(update)
                if averager:
                    around = held.reduce() if is_last else contextlib.nullcontext()
                else:
                    around = fabric.no_backward_sync(model, enabled=not is_last)
                with around:
                    fabric.backward(loss(model, batch, update))
            optimizer.step()
            optimizer.zero_grad()

    return train


RIGHT = {
    "DDP": Way(fabric()),
    "GradientAverager": Way(fabric(averager=True)),
    "DDP: tokens": Way(fabric(tokens), TOKENS),
    "GradientAverager: tokens": Way(fabric(tokens, averager=True), TOKENS),
}
FACTORS = [("Fabric", Way(fabric(undivided(pairs), averager))) for averager in (False, True)]
