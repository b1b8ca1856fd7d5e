"""Accelerate: DDP takes the mean over ranks, `backward` divides by the number of micro-batches."""

import contextlib

import accelerate
import torch
from trainings import RATE, TOKENS, pairs, tokens, undivided
from variants import Way

import diffcoll as dc


def accelerated(loss=pairs, averager=False):
    """Return a function that trains as Accelerate's users do."""

    def train(model, updates):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=len(updates[0]))
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), RATE))
        held = dc.GradientAverager(model) if averager else None
        model = model if averager else accelerator.prepare(model)
        for update in updates:
            for batch in update:
                with accelerator.accumulate(model):
                    with held.reduce() if held and accelerator.sync_gradients else contextlib.nullcontext():
                        accelerator.backward(undivided(loss)(model, batch, update))
                    optimizer.step()
                    optimizer.zero_grad()

    return train


RIGHT = {
    "DDP": Way(accelerated()),
    "GradientAverager": Way(accelerated(averager=True)),
    "DDP: tokens": Way(accelerated(tokens), TOKENS),
    "GradientAverager: tokens": Way(accelerated(tokens, averager=True), TOKENS),
}
FACTORS = [("Accelerate", Way(accelerated(averager=averager))) for averager in (False, True)]
