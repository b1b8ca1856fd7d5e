"""Accelerate: DDP takes the mean over ranks, `backward` divides by the number of micro-batches."""

import contextlib

import accelerate
import pytest
import torch
import torch.nn.functional as F
from trainings import CLIP, RATE, TOKENS, cell, row_of_the_table

import diffcoll as dc
from diffcoll.testing import GradientMismatchError, RanksFailedError, assert_matches_single_process, spawn


def with_accelerate(loss, averager=False, accumulate=True, steps=None):
    """Return a function that trains as Accelerate's users do; the loss takes the model, a micro-batch and its step."""

    def train(model, updates):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps or len(updates[0]))
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), RATE))
        held = dc.GradientAverager(model) if averager else None
        model = model if averager else accelerator.prepare(model)
        for update in updates:
            for k, batch in enumerate(update, 1):
                with contextlib.ExitStack() as around:
                    if accumulate:
                        around.enter_context(accelerator.accumulate(model))
                    with held.reduce() if held and accelerator.sync_gradients else contextlib.nullcontext():
                        accelerator.backward(loss(model, batch, update))
                    if accumulate or k == len(update):
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


def factors(loss, micro_batches=2, training=CLIP, **options):
    return set(training.factor(with_accelerate(loss, **options), micro_batches).values())


def test_factors_of_the_table():
    found = [factors(of_pairs, micro_batches) for micro_batches in (1, 2)]
    assert [set(map(cell, each)) for each in found] == [
        {c} for c in row_of_the_table("[Accelerate](accelerate.md)")[:2]
    ]


def test_factors_of_mistakes():
    def summed(model, batch, update):
        return CLIP.loss(model, *batch, summed=True)

    def divided(model, batch, update):
        return CLIP.loss(model, *batch) / len(update)

    def of_own_tokens(model, batch, update):
        x, labels = batch
        losses = F.cross_entropy(model(x).flatten(0, 1), labels.flatten(), reduction="sum")
        return losses / (labels != -100).sum().clamp(min=1)

    assert factors(summed) == {0.333333}
    assert factors(divided) == {0.5}
    assert factors(of_pairs, accumulate=False, steps=1) == {2}
    assert factors(of_pairs, 1, accumulate=False, steps=2) == {0.5}
    assert factors(of_own_tokens, training=TOKENS) == {"wrong"}


def test_last_step_of_an_epoch_divides_by_all_steps():
    """Three micro-batches, two in a step: the second step has one, whose loss is halved."""

    def on_rank(x):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, loader = accelerator.prepare(torch.nn.Linear(1, 1, bias=False), torch.utils.data.DataLoader(x))
        gradients = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                if accelerator.sync_gradients:
                    gradients.append(float(model.module.weight.grad))
                    model.zero_grad()
        return gradients

    x = torch.ones(9, 1)
    assert spawn(on_rank, [x] * 3) == [[1.0, 0.5]] * 3


def test_prepared_loaders_repeat_rows():
    """Ten rows on three ranks become twelve: `even_batches` takes rows of the start again."""

    def on_rank(even):
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.even_batches = even
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(10), batch_size=2))
        return [int(i) for batch in loader for i in batch]

    assert sum(map(len, spawn(on_rank, [True] * 3))) == 12
    assert sorted(i for rows in spawn(on_rank, [False] * 3) for i in rows) == list(range(10))


def test_gather_has_no_gradient():
    def rows_of(image, text):
        logits = 10 * image @ text.T
        return F.cross_entropy(logits, torch.arange(len(logits)))

    def gathered(image, text):
        every = accelerate.Accelerator(cpu=True).gather
        return rows_of(every(image), every(text))

    def batch(rows):
        generator = torch.Generator().manual_seed(rows)
        return tuple(torch.randn(rows, 4, generator=generator, dtype=torch.double) for _ in range(2))

    with pytest.raises(GradientMismatchError, match=r"graph cuts(.|\n)*accelerate/utils/operations.py"):
        assert_matches_single_process(gathered, rows_of, batch, ranks=(4, 4), on=["gloo"])


def test_gather_of_uneven_rows_ends_a_rank():
    rows = [torch.randn(n, 4) for n in (2, 3)]
    with pytest.raises(RanksFailedError):
        spawn(lambda x: accelerate.Accelerator(cpu=True).gather(x).shape, rows, timeout=20)
