"""Lightning's Trainer: what goes wrong, and how it shows."""

import pytest
import torch
from lightning_trainings import Module, by_hand, loader, summed, trainer, with_trainer
from test_lightning import BATCH_NORM, Normalized
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainings import CLIP, Towers, failures

import diffcoll as dc
from diffcoll.testing import spawn


@pytest.mark.parametrize(
    ("train", "micro_batches", "factor"),
    [
        pytest.param(with_trainer(summed), 1, 1 / 3, id="sum"),
        pytest.param(with_trainer(lambda *given: CLIP.loss(*given) / 2), 2, 1 / 2, id="divided twice"),
        pytest.param(with_trainer(steps=2), 1, 1 / 2, id="fewer batches than accumulate_grad_batches"),
        pytest.param(by_hand, 1, 1, id="manual optimization"),
        pytest.param(by_hand, 2, 2, id="manual optimization, two"),
    ],
)
def test_factors_of_mistakes(train, micro_batches, factor):
    assert set(CLIP.factor(train, micro_batches).values()) == {round(factor, 6)}


def test_an_averager_within_ddp_raises():
    def train(model, updates):
        _averager = dc.GradientAverager(model)
        with_trainer()(model, updates)

    for kind, text in failures(train, [Towers() for _ in range(3)], CLIP.batches(1, 1)):
        assert kind == "raised" and "backward has run outside of a block" in text


def test_a_parameter_that_no_rank_uses():
    class More(Towers):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(2, 2)

    def train(strategy, updates):
        with_trainer(strategy=strategy)(More(), updates)

    for kind, text in failures(train, ["ddp"] * 3, CLIP.batches(1, 2)):
        assert kind == "raised" and "parameters that were not used" in text
    for strategy in "ddp_find_unused_parameters_true", {}:
        spawn(train, [strategy] * 3, CLIP.batches(1, 2))


def test_torch_synchronized_batch_norm_refuses_the_cpu_and_replaces_ours():
    def train(convert, updates):
        model = dc.nn.convert_sync_batchnorm(Normalized()) if convert else Normalized()
        with_trainer(BATCH_NORM.loss, sync_batchnorm=True)(model, updates)

    for convert in False, True:
        for kind, text in failures(train, [convert] * 3, BATCH_NORM.batches(1, 1)):
            assert kind == "raised" and text == "SyncBatchNorm layers only work with GPU modules"


def test_a_sampler_that_lightning_adds_takes_a_third_of_this_ranks_rows():
    class Notes(Module):
        def training_step(self, batch, batch_idx):
            seen.extend(batch[0].tolist())
            return self.net(batch[0][:, None]).mean()

    seen = []

    def rows_seen(rows, added):
        trainer(use_distributed_sampler=added).fit(Notes(nn.Linear(1, 1)), DataLoader(TensorDataset(rows)))
        return len(seen)

    rows = list(torch.arange(21.0).split(7))
    assert spawn(rows_seen, rows, [True] * 3) == [3] * 3
    assert spawn(rows_seen, rows, [False] * 3) == [7] * 3


def test_a_rank_with_more_batches_hangs():
    def train(n):
        batches = [[torch.randn(2, d).double() for d in (6, 5)] for _ in range(n)]
        with_trainer()(Towers(), [[batch] for batch in batches])

    spawn(train, [1, 1, 1])  # the processes' server has started, so that the time below is that of the training
    first, *others = failures(train, [3, 2, 2], timeout=6)
    assert first[0] == "hung" and others == [None, None]


def test_a_rank_that_skips_its_step_raises():
    def loss(model, *batch):
        return CLIP.loss(model, *batch) if len(batch[0]) else None

    def train(rows):
        with_trainer(loss)(Towers(), [[[torch.randn(rows, d).double() for d in (6, 5)]]])

    texts = [text for _, text in failures(train, [2, 0, 3])]
    assert "returning None in distributed training is not supported" in texts[1]


def test_limit_train_batches_ends_with_the_rank_that_has_fewest():
    def steps(n):
        held = trainer(limit_train_batches=int(dc.all_reduce(torch.tensor(n), op="min")))
        held.fit(Module(Towers()), loader([torch.randn(2, d).double() for d in (6, 5)] for _ in range(n)))
        return held.global_step

    assert spawn(steps, [3, 2, 4]) == [2, 2, 2]


class Adversaries(Module):
    """Two optimizers, each of whose steps freezes the parameters of the other."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for k, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            self.manual_backward((-1) ** k * CLIP.loss(self.net, *batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.net.image, self.net.text)]


def test_two_optimizers_that_are_toggled():
    def train(strategy, batches):
        module = Adversaries(Towers())
        trainer(strategy).fit(module, loader(batches))
        return module.net.text.weight

    ranks = [[batch for (batch,) in updates] for updates in CLIP.batches(1, 4)]
    whole = [tuple(map(torch.cat, zip(*batches, strict=True))) for batches in zip(*ranks, strict=True)]
    (expected,) = spawn(train, [{}], [whole])
    for strategy in "ddp_find_unused_parameters_true", {}:
        for found in spawn(train, [strategy] * 3, ranks):
            torch.testing.assert_close(found, expected)
    for kind, text in failures(train, ["ddp"] * 3, ranks):
        assert kind == "raised" and "parameters that were not used" in text
