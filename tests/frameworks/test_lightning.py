"""Lightning's Trainer: DDP takes the mean over ranks, the Trainer divides by `accumulate_grad_batches`."""

import pytest
import torch
from lightning_trainings import Module, loader, summed, trainer, with_trainer
from torch import nn
from trainings import CLIP, TOKENS, Towers, Training, parameters, row_of_the_table

import diffcoll as dc
from diffcoll.testing import GradientMismatchError, assert_matches_single_process, spawn

STRATEGIES = pytest.mark.parametrize("strategy", ["ddp", {}], ids=["DDP", "GradientAverager"])


# ── trainings ────────────────────────────────────────────────────────────────────────────────────────────


@STRATEGIES
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_pairs_as_one_process(strategy, micro_batches):
    CLIP.assert_as_one_process(with_trainer(strategy=strategy), micro_batches)


@STRATEGIES
def test_tokens_as_one_process(strategy):
    """The mean over the tokens of all micro-batches, times their number, by which the Trainer divides."""

    def train(model, updates):
        counted = []
        for update in updates:
            total = dc.all_reduce(sum((labels != -100).sum() for _, labels in update))
            counted.append([(*batch, total) for batch in update])
        with_trainer(lambda *given: 2 * TOKENS.loss(*given[:3], total=given[3]), strategy)(model, counted)

    TOKENS.assert_as_one_process(train, 2)


def test_factors():
    found = [CLIP.factor(with_trainer(), steps) for steps in (1, 2)]
    assert [{str(int(factor)) for factor in factors.values()} for factors in found] == [
        {cell} for cell in row_of_the_table("[Lightning Trainer](lightning.md)")[:2]
    ]


def test_clipping_is_that_of_one_process():
    """The Trainer clips what DDP has averaged."""
    clipped = CLIP.on_one_process(2, max_norm=0.3)
    assert (clipped["scale"] - CLIP.on_one_process(2)["scale"]).abs() > 0.01
    for strategy in "ddp", {}:
        found = CLIP.on_ranks(with_trainer(strategy=strategy, gradient_clip_val=0.3), 2)
        torch.testing.assert_close(found, clipped, rtol=1e-6, atol=1e-8)  # torch clips to 0.3 / (norm + 1e-6)


@STRATEGIES
def test_resume_from_a_checkpoint(strategy, tmp_path):
    file = str(tmp_path / "half.ckpt")

    def train(model, updates):
        first = trainer(strategy)
        first.fit(Module(Towers()), loader(batch for update in updates[:10] for batch in update))
        first.save_checkpoint(file)
        rest = loader(batch for update in updates[10:] for batch in update)
        trainer(strategy, max_epochs=2).fit(Module(model), rest, ckpt_path=file)

    CLIP.assert_as_one_process(train)


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, x):
        return self.layers(x).square()


BATCH_NORM = Training(
    Normalized,
    lambda n, generator: (torch.randn(n, 6, generator=generator, dtype=torch.double),),
    lambda model, x: dc.nn.functional.token_mean(model(x).flatten()),
    lambda model, batches: sum(model(x).mean() for (x,) in batches) / len(batches),
)


@STRATEGIES
def test_batch_norm_as_one_process(strategy):
    def train(model, updates):
        dc.nn.convert_sync_batchnorm(model)
        with_trainer(BATCH_NORM.loss, strategy)(model, updates)

    BATCH_NORM.assert_as_one_process(train, 2)


def test_precision_converts_before_the_averager_is_made():
    def train(model, updates):
        with_trainer(strategy={}, precision="64-true")(model.float(), updates)
        assert model.scale.dtype == torch.double

    assert CLIP.on_ranks(train).keys() == parameters(Towers()).keys()


def test_a_second_fit_and_another_averager_afterwards():
    """The strategy detaches its averager when a fit ends."""

    def train(model, updates):
        for strategy, half in (({}, updates[:10]), ("ddp", updates[10:])):
            with_trainer(strategy=strategy)(model, half)

    CLIP.assert_as_one_process(train)


# ── what is printed ──────────────────────────────────────────────────────────────────────────────────────


class Logs(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        both = {"on_step": True, "on_epoch": True}
        self.log("own", loss, **both)
        self.log("right", loss, batch_size=1, **both)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validated", super().training_step(batch, batch_idx), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)  # the parameters of the start


def test_logged_values():
    def logged(updates):
        held, batches = trainer(log_every_n_steps=1), loader(batch for update in updates for batch in update)
        held.fit(Logs(Towers()), batches, batches)
        return {name: value.item() for name, value in held.callback_metrics.items()}

    found = spawn(logged, CLIP.batches(1, 2))
    updates = [[batch for (batch,) in update] for update in zip(*CLIP.batches(1, 2), strict=True)]
    whole = [CLIP.whole(Towers(), [tuple(map(torch.cat, zip(*ranks, strict=True)))]).item() for ranks in updates]
    for name in "own_step", "right_step":
        assert all(abs(rank[name] - whole[1]) < 1e-6 for rank in found), name
    mean = sum(whole) / 2
    for name in "right_epoch", "validated":
        assert all(abs(rank[name] - mean) < 1e-6 for rank in found), name
    assert all(abs(rank["own_epoch"] - mean) > 1e-4 for rank in found)
    assert len({rank["own_epoch"] for rank in found}) == 3


# ── the harness ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_harness_runs_the_training_step():
    def step(module, *batch):
        return module.training_step(batch, 0)

    def whole(module, *batch):
        return CLIP.whole(module.net, [batch])

    batch = tuple(torch.randn(8, d).double() for d in (6, 5))
    module = Module(Towers())
    assert assert_matches_single_process(step, whole, batch, module=module).ok
    module = Module(Towers(), summed)
    with pytest.raises(GradientMismatchError, match='exact under "sum"'):
        assert_matches_single_process(step, whole, batch, module=module, on=["simulated"])
