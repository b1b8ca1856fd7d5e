"""Accelerate: DDP takes the mean over ranks, `backward` divides by the number of micro-batches."""

import contextlib

import accelerate
import pytest
import torch
from trainings import CLIP, RATE, TOKENS, row_of_the_table

import diffcoll as dc


def with_accelerate(loss, averager=False, accumulate=True):
    """Return a function that trains as Accelerate's users do; the loss takes the model, a micro-batch and its step."""

    def train(model, updates):
        steps = len(updates[0])
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps)
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), RATE))
        held = dc.GradientAverager(model) if averager else None
        model = model if averager else accelerator.prepare(model)
        for update in updates:
            for k, batch in enumerate(update):
                with contextlib.ExitStack() as around:
                    if accumulate:
                        around.enter_context(accelerator.accumulate(model))
                    if held and k + 1 < steps:
                        around.enter_context(held.no_sync())
                    accelerator.backward(loss(model, batch, update))
                    if accumulate or k + 1 == steps:
                        optimizer.step()
                        optimizer.zero_grad()

    return train


def of_pairs(model, batch, update):
    return CLIP.loss(model, *batch)


def of_tokens(model, batch, update):
    """The mean over the tokens of all micro-batches, times their number, by which `backward` divides."""
    total = dc.all_reduce(sum((labels != -100).sum() for _, labels in update))
    return len(update) * TOKENS.loss(model, *batch, total=total)


@pytest.mark.parametrize("averager", [False, True], ids=["DDP", "GradientAverager"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_pairs_as_one_process(averager, micro_batches):
    CLIP.assert_as_one_process(with_accelerate(of_pairs, averager), micro_batches)


@pytest.mark.parametrize("averager", [False, True], ids=["DDP", "GradientAverager"])
def test_tokens_as_one_process(averager):
    TOKENS.assert_as_one_process(with_accelerate(of_tokens, averager), 2)


def test_factors():
    found = [CLIP.factor(with_accelerate(of_pairs), steps) for steps in (1, 2)]
    assert [{str(int(factor)) for factor in factors.values()} for factors in found] == [
        {cell} for cell in row_of_the_table("[Accelerate](accelerate.md)")[:2]
    ]
