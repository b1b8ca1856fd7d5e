"""Accelerate: DDP takes the mean over ranks, `backward` divides by the number of micro-batches."""

import accelerate
from trainings import CLIP, TOKENS, Way, loop, sgd

import diffcoll as dc


def accelerated(averages):
    def train(model, updates, loss):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=len(updates[0]))
        optimizer = accelerator.prepare(sgd(model))
        averager = dc.GradientAverager(model) if averages else None
        wrapped = model if averages else accelerator.prepare(model)

        def around(is_last):
            return accelerator.accumulate(wrapped)

        loop(wrapped, updates, loss, optimizer, averager, accelerator.backward, around)

    return train


ROWS = [("Accelerate", Way(accelerated(averages), of)) for averages in (False, True) for of in (CLIP, TOKENS)]
