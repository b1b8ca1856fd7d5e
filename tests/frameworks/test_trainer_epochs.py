"""The HF Trainer, epochs: rows that do not divide, the last step, logs, evaluation, a resumed training."""

import functools

import pytest
import torch
import transformers
from in_trainer import DividedLoss, Plain, clip, columns, run
from trainings import CLIP, RANKS, RATE, Towers, parameters

import diffcoll as dc
from diffcoll.testing import RanksFailedError, spawn

SUMMED = functools.partial(clip, summed=True)


def on_ranks(train, *per_rank, **options):
    return spawn(train, *(per_rank or [range(RANKS)]), **options)


def largest_difference(found, expected):
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def after_sgd(model, losses):
    """Return the parameters after a step on each of these losses, functions of the model."""
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for loss in losses:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return parameters(model)


def pairs(rows, **more):
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(rows, d, generator=generator).double() for d in (6, 5))
    return [{"x": x[i], "y": y[i], **more} for i in range(rows)]


def of_rows(data):
    return lambda model: dc.nn.functional.clip_loss(*model(*(torch.stack([row[k] for row in data]) for k in "xy")))


def test_last_step_of_an_epoch_has_fewer_micro_batches():
    """Three micro-batches, two in a step: a user who divides by two halves the second step."""
    mine = [update[0] for update in CLIP.batches(3, 1)]

    def train(batches, kind, loss, scaled):
        model = Towers()
        run(Plain(model), [columns(b) for b in batches], kind, loss, scaled=scaled, gradient_accumulation_steps=2)
        return parameters(model)

    whole = [tuple(map(torch.cat, zip(*ranks, strict=True))) for ranks in zip(*mine, strict=True)]

    def expected(factor):
        def second(model):
            return factor * CLIP.whole(model, whole[2:])

        return after_sgd(Towers(), [lambda model: CLIP.whole(model, whole[:2]), second])

    def halved(outputs, labels, num_items_in_batch):
        return SUMMED(outputs) / 2

    for kind, loss, scaled, factor in (
        (DividedLoss, None, None, 1),
        (transformers.Trainer, SUMMED, False, 1),
        (transformers.Trainer, halved, None, 0.5),
    ):
        found = on_ranks(functools.partial(train, kind=kind, loss=loss, scaled=scaled), mine)
        assert largest_difference(found[0], expected(factor)) < 1e-12


@pytest.mark.parametrize(("rows", "even", "seen"), [(7, True, [*range(7), 0, 1]), (7, False, range(7))])
def test_rows_that_do_not_divide(rows, even, seen):
    """Three rows for each of three ranks: the loader repeats the first rows, or the last rank has one."""
    data = pairs(rows)

    def train(_):
        model = Towers()
        run(Plain(model), data, DividedLoss, per_device_train_batch_size=3, accelerator_config={"even_batches": even})
        return parameters(model)

    expected = after_sgd(Towers(), [of_rows([data[i] for i in seen])])
    assert largest_difference(on_ranks(train)[0], expected) < 1e-12


def test_ranks_with_different_numbers_of_steps_wait():
    def train(_):
        options = {"per_device_train_batch_size": 3, "accelerator_config": {"even_batches": False}}
        run(Plain(Towers()), pairs(10), DividedLoss, **options)

    with pytest.raises(RanksFailedError, match=r"rank 0 of 3 ──\nhung in(.|\n)*in clip_loss\n"):
        on_ranks(train, timeout=8)


def test_losses_that_the_trainer_shows():
    """Logged is the mean over ranks of what they passed: the loss of the batch. `train_loss` is this rank's.

    Evaluation has that of the batch where all ranks have equally many rows, and needs labels to call the loss at all.
    """
    data, labelled = pairs(9), pairs(9, labels=torch.tensor(0))

    def on_rank(_):
        def show(kind, loss, rows, **options):
            return run(Plain(Towers()), rows, kind, loss, per_device_train_batch_size=3, logging_steps=1, **options)

        shown = (
            show(DividedLoss, None, data),
            show(transformers.Trainer, SUMMED, labelled),
            show(transformers.Trainer, clip, labelled),
        )
        logged = [[each.state.log_history[0][name] for each in shown] for name in ("loss", "grad_norm")]
        own = run(Plain(Towers()), data, DividedLoss, per_device_train_batch_size=3)
        options = {"learning_rate": 0.0, "per_device_train_batch_size": 3, "per_device_eval_batch_size": 3}
        of = run(Plain(Towers()), data, DividedLoss, **options)
        evaluated = [of.evaluate(rows).get("eval_loss") for rows in (labelled, labelled[:7], data)]
        return logged, own.state.log_history[-1]["train_loss"], evaluated

    loss_of = [float(of_rows(data[:n])(Towers()).detach()) for n in (9, 7)]
    ranks = spawn(on_rank, range(RANKS))
    assert len({own for _, own, _ in ranks}) == RANKS  # without a logging step nobody averages it
    for logged, _, (of_nine, of_seven, without_labels) in ranks:
        assert logged[0] == pytest.approx([loss_of[0], loss_of[0], 3 * loss_of[0]])
        assert logged[1] == pytest.approx([logged[1][0], logged[1][0], 3 * logged[1][0]])
        assert of_nine == pytest.approx(loss_of[0])
        assert of_seven != pytest.approx(loss_of[1], rel=1e-2)
        assert without_labels is None


def test_resumed_training_goes_on(tmp_path):
    mine = CLIP.batches(2, 4)

    def on_rank(updates):
        found = []
        for resume in None, str(tmp_path / "checkpoint-2"):
            model = Towers()
            batches = [columns(batch) for update in updates for batch in update]
            options = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
            run(Plain(model), batches, DividedLoss, output=str(tmp_path), resume=resume, optim="adamw_torch", **options)
            found.append(parameters(model))
        return found

    for whole, resumed in spawn(on_rank, mine):
        assert largest_difference(resumed, whole) == 0
