"""Lightning's Trainer: DDP takes the mean over ranks, the Trainer divides by `accumulate_grad_batches`."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset
from trainings import CLIP, RATE, TOKENS, Towers, Training, parameters, row_of_the_table

import diffcoll as dc
from diffcoll.integrations.lightning import GradientAveragerStrategy
from diffcoll.testing import GradientMismatchError, RanksFailedError, assert_matches_single_process, spawn


class Module(pl.LightningModule):
    def __init__(self, net, loss=CLIP.loss):
        super().__init__()
        self.net, self.loss = net, loss

    def training_step(self, batch, batch_idx):
        return self.loss(self.net, *batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), RATE)


class ByHand(Module):
    automatic_optimization = False

    def training_step(self, update, batch_idx):
        optimizer = self.optimizers()
        for batch in update:
            self.manual_backward(self.loss(self.net, *batch))
        optimizer.step()
        optimizer.zero_grad()


def trainer(strategy="ddp", **options):
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    given = {"max_epochs": 1, "use_distributed_sampler": False, **quiet, **options}
    averager = GradientAveragerStrategy(**strategy) if isinstance(strategy, dict) else strategy
    return pl.Trainer(accelerator="cpu", devices=dc.get_world_size(), strategy=averager, **given)


def loader(batches):
    return DataLoader(list(batches), batch_size=None)


def with_trainer(loss=CLIP.loss, strategy="ddp", steps=None, **options):
    """Return a function that trains with a loss of a micro-batch; `strategy`: a dict for `GradientAverager`."""

    def train(model, updates):
        held = trainer(strategy, accumulate_grad_batches=steps or len(updates[0]), **options)
        held.fit(Module(model, loss), loader(batch for update in updates for batch in update))

    return train


def by_hand(model, updates):
    trainer().fit(ByHand(model), loader(updates))


def failures(*arguments, timeout=30):
    """Return (kind, message) of each rank's failure."""
    with pytest.raises(RanksFailedError) as caught:
        spawn(*arguments, timeout=timeout)
    return [failed and (failed.kind, failed.message) for failed in caught.value.failures.values()]


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
    """The Trainer clips what DDP has averaged; a hook clips on this process alone."""

    def clip(optimizer, *_):
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.3)

    hook = register_optimizer_step_pre_hook(clip)
    try:
        clipped = CLIP.on_one_process(2)
    finally:
        hook.remove()
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


# ── what goes wrong otherwise ────────────────────────────────────────────────────────────────────────────


def summed(model, *batch):
    return CLIP.loss(model, *batch, rank_reduction="sum")


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


def test_weighted_means_are_divided_too():
    def loss(model, x, labels):
        valid = labels.flatten() != -100
        averager = model.strategy.averager
        averager.set_weight(int(valid.sum()))
        return F.cross_entropy(model(x).flatten(0, 1)[valid], labels.flatten()[valid], reduction="sum") / max(
            valid.sum(), 1
        )

    def train(model, updates):
        held = trainer({"reduction": "weighted"}, accumulate_grad_batches=len(updates[0]))
        object.__setattr__(model, "strategy", held.strategy)
        held.fit(Module(model, loss), loader(batch for update in updates for batch in update))

    assert [set(TOKENS.factor(train, steps).values()) for steps in (1, 2)] == [{1.0}, {0.5}]


def test_an_averager_within_ddp_raises():
    def train(model, updates):
        dc.GradientAverager(model)
        with_trainer()(model, updates)

    for kind, text in failures(train, [Towers() for _ in range(3)], CLIP.batches(1, 1)):
        assert kind == "raised" and "DistributedDataParallel averages this parameter, too" in text


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


# ── what is printed ──────────────────────────────────────────────────────────────────────────────────────


class Logs(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        both = {"on_step": True, "on_epoch": True}
        self.log("own", loss, **both)
        self.log("synced", loss, sync_dist=True, **both)
        self.log("one", loss, sync_dist=True, batch_size=1, **both)
        self.log("ours", dc.global_mean(loss.detach()), **both)
        self.log("right", dc.global_mean(loss.detach()), batch_size=1, **both)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validated", dc.global_mean(super().training_step(batch, batch_idx)), batch_size=1)

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
    for name, right in (("synced_step", True), ("ours_step", True), ("own_step", False)):
        assert all((abs(rank[name] - whole[1]) < 1e-6) == right for rank in found), name
    mean = sum(whole) / 2
    for name in "one_epoch", "right_epoch", "validated":
        assert all(abs(rank[name] - mean) < 1e-6 for rank in found), name
    for name in "own_epoch", "synced_epoch", "ours_epoch":
        assert all(abs(rank[name] - mean) > 1e-4 for rank in found), name
    assert len({rank["ours_epoch"] for rank in found}) == 3
    assert len({rank["synced_epoch"] for rank in found}) == 1


# ── the harness ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_harness_runs_the_training_step():
    def step(*batch):
        return module.training_step(batch, 0)

    def whole(*batch):
        return CLIP.whole(module.net, [batch])

    batch = tuple(torch.randn(8, d).double() for d in (6, 5))
    module = Module(Towers())
    assert assert_matches_single_process(step, whole, batch, module=module).ok
    module = Module(Towers(), summed)
    with pytest.raises(GradientMismatchError, match='exact under "sum"'):
        assert_matches_single_process(step, whole, batch, module=module, on=["simulated"])
