"""The HF Trainer: DDP takes the mean over ranks; who else multiplies or divides depends on five settings.

They are the model's forward (`**kwargs`), a column `labels`, `compute_loss_func`, `loss_is_scaled_for_ga` and
`average_tokens_across_devices`.
"""

import contextlib
import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
import transformers
from in_trainer import (
    DividedLoss,
    Keywords,
    OwnLoss,
    Plain,
    clip,
    returning,
    run,
    summed_tokens,
    tokens,
    trainer,
)
from trainings import CLIP, RANKS, RATE, TOKENS, row_of_the_table
from variants import assert_as_one_process, factors

from diffcoll.testing import GradientMismatchError, assert_matches_single_process, spawn

own_counts = {"average_tokens_across_devices": False}
ROWS = {
    "`compute_loss` overridden, `loss_is_scaled_for_ga = False`": {
        "": trainer(kind=DividedLoss),
        "no labels": trainer(kind=DividedLoss, labelled=False),
        "keywords": trainer(kind=DividedLoss, model=Keywords),
        "GradientAverager": trainer(kind=DividedLoss, averager=True),
    },
    "`compute_loss` overridden, `**kwargs` in forward, `labels` in the batch": {
        "": trainer(kind=OwnLoss, model=Keywords),
        "own tokens": trainer(kind=OwnLoss, model=Keywords, **own_counts),
    },
    "`compute_loss_func`, `labels` in the batch": {"": trainer(clip), "keywords": trainer(clip, Keywords)},
    "`compute_loss_func`, no `labels` or `average_tokens_across_devices=False`": {
        "no labels": trainer(clip, labelled=False),
        "own tokens": trainer(clip, **own_counts),
    },
    "the model's own loss, `**kwargs` in forward, `labels` in the batch": {
        "": trainer(model=returning(clip, Keywords)),
    },
    "the model's own loss, no `**kwargs` or no `labels`": {
        "": trainer(model=returning(clip)),
        "no labels": trainer(model=returning(clip, Keywords), labelled=False),
    },
}


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_factors_of_the_table(micro_batches):
    for row, trains in ROWS.items():
        cell = row_of_the_table(f"[Trainer](trainer.md), {row}")[micro_batches - 1]
        assert factors(CLIP, trains, micro_batches) == dict.fromkeys(trains, float(cell)), row


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_pairs_as_one_process(micro_batches):
    summed = functools.partial(clip, summed=True)
    trains = {
        "compute_loss": trainer(kind=DividedLoss, model=Keywords),
        "GradientAverager": trainer(kind=DividedLoss, averager=True),
        "compute_loss_func": trainer(summed, scaled=False),
        "compute_loss_func, False": trainer(clip, scaled=False, **own_counts),
        "model": trainer(model=returning(summed, Keywords), scaled=False),
    }
    assert_as_one_process(CLIP, trains, micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_tokens_as_one_process(micro_batches):
    assert_as_one_process(
        TOKENS, {"": trainer(summed_tokens), "keywords": trainer(summed_tokens, Keywords)}, micro_batches
    )


def test_factors_of_mistakes():
    def own_sum(outputs, labels, num_items_in_batch):
        return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch

    def own_mean(outputs, labels, num_items_in_batch):
        return own_sum(outputs, labels, (labels != -100).sum().clamp(min=1))

    found = factors(
        TOKENS,
        {
            "own sum": trainer(own_sum),
            "mean": trainer(tokens),
            "own counts": trainer(summed_tokens, **own_counts),
            "own sum, own counts": trainer(own_sum, **own_counts),
            "own mean": trainer(own_mean),
            "smoothing": trainer(summed_tokens, label_smoothing_factor=0.3),
        },
        2,
    )
    assert found["own sum"] == 1
    assert found["mean"] == 3
    assert found["own counts"] == found["own sum, own counts"] == found["own mean"] == "wrong"
    assert found["smoothing"] == 1  # the loss without smoothing: nobody reads the setting


@pytest.mark.parametrize("options", [{"optim": "adamw_torch"}, {"max_grad_norm": 1e-3}], ids=["AdamW", "clipping"])
def test_what_hides_a_factor(options):
    """The defaults, AdamW and `max_grad_norm=1`, give nearly the same parameters for three times the gradient."""
    right, three_times = (TOKENS.on_ranks(trainer(loss, **options)) for loss in (summed_tokens, tokens))
    for name in right:
        torch.testing.assert_close(right[name], three_times[name], rtol=1e-3, atol=1e-4)


def test_label_smoothing_of_the_trainer():
    """Without `compute_loss_func`. Its sum over classes is in float32."""

    def smoothed(model, micro_batches):
        x, labels = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
        return F.cross_entropy(model(x).flatten(0, 1), labels.flatten(), label_smoothing=0.3)

    training = dataclasses.replace(TOKENS, whole=smoothed)
    expected = training.on_one_process(2)

    def is_right(**options):
        found = training.on_ranks(trainer(label_smoothing_factor=0.3, **options), 2)
        return all(torch.allclose(found[name], expected[name], rtol=1e-5) for name in expected)

    assert is_right(model=Keywords)
    assert not is_right()  # the mean over this rank's tokens
    assert not is_right(model=Keywords, **own_counts)


def llama():
    config = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, **config))


def gpt2():
    config = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "attn_pdrop": 0, "embd_pdrop": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=11, resid_pdrop=0, **config))


def of_next_tokens(outputs, labels, num_items_in_batch):
    labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return summed_tokens(outputs, labels, num_items_in_batch)


@pytest.mark.parametrize("loss", [None, of_next_tokens], ids=["own loss", "compute_loss_func"])
@pytest.mark.parametrize(("make", "factor"), [(llama, 1.0), (gpt2, 0.8)])
def test_causal_models(make, factor, loss):
    """A row has five labels, of which four are predicted; of a GPT2LMHeadModel the Trainer counts all five."""

    def on_rank(rank):
        torch.manual_seed(0)
        model, ids = make().double(), torch.randint(0, 11, (6, 5))
        start = [p.detach().clone() for p in model.parameters()]
        whole = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, [*model.parameters()])
        mine = ids.split([3, 1, 2])[rank]
        run(model, [{"input_ids": mine, "labels": mine}], loss=loss)
        moved = [(old - new.detach()).flatten() / RATE for old, new in zip(start, model.parameters(), strict=True)]
        return torch.cat(moved), torch.cat([g.flatten() for g in whole])

    for found, whole in spawn(on_rank, range(RANKS)):
        torch.testing.assert_close(found, factor * whole, rtol=1e-4, atol=1e-7)  # its loss is of float32 logits


@pytest.mark.parametrize("loss", [summed_tokens, tokens])
def test_verdict_of_the_harness(loss):
    model = Plain(TOKENS.model())

    def on_ranks(model, x, labels):
        arguments = transformers.TrainingArguments("unused", use_cpu=True, report_to=[])
        of = transformers.Trainer(model, arguments, compute_loss_func=loss)
        (batch,), count = of.get_batch_samples(iter([{"x": x, "labels": labels}]), 1, x.device)
        return of.compute_loss(model, batch, num_items_in_batch=count)

    batch = TOKENS.rows(7, torch.Generator().manual_seed(3))
    wrong = contextlib.nullcontext() if loss is summed_tokens else pytest.raises(GradientMismatchError, match="3 = N")
    with wrong:
        assert_matches_single_process(
            on_ranks,
            lambda model, x, labels: TOKENS.whole(model.inner, [(x, labels)]),
            batch,
            module=model,
            ranks=(4, 0, 3),
            on=["gloo"],
        )
