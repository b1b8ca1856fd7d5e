"""Accelerate: DDP takes the mean over ranks, `backward` divides by the number of micro-batches."""

import accelerate
from trainings import as_it_is, loop, sgd, with_and_without_averager

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


RIGHT = with_and_without_averager(accelerated, passed=as_it_is)
FACTORS = [("Accelerate", RIGHT[f"{kind}: pairs"]) for kind in ("DDP", "GradientAverager")]
