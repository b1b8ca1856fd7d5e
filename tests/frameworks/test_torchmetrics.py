"""torchmetrics as losses: `dist_sync_fn` must keep gradients; then every rank has the loss of the whole batch."""

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainings import CLIP, RATE, Towers, Training, row_of_the_table

import diffcoll as dc
from diffcoll.testing import GradientMismatchError, RanksFailedError, assert_matches_single_process, spawn


def gather(x, group=None):
    """Return the states of all ranks, with gradients."""
    if x.ndim == 0:
        return list(dc.all_gather(x, stack=True, group=group))
    rows, sizes, *_ = dc.gather_batch(x, group=group)
    return list(rows.split(list(sizes)))


OURS = {"dist_sync_on_step": True, "dist_sync_fn": gather}
THEIRS = {"dist_sync_on_step": True}


class Contrastive(torchmetrics.Metric):
    """A loss of list states, whose rows differ in number between ranks."""

    full_state_update = False

    def __init__(self, **options):
        super().__init__(**options)
        self.add_state("image", [], dist_reduce_fx="cat")
        self.add_state("text", [], dist_reduce_fx="cat")

    def update(self, image, text, scale):
        self.image.append(image)
        self.text.append(text)
        self.scale = scale

    def compute(self):
        image, text = (torchmetrics.utilities.dim_zero_cat(z) for z in (self.image, self.text))
        logits, own = self.scale * image @ text.T, torch.arange(len(image))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 1).double()

    def forward(self, x):
        return self.layer(x).squeeze(1)


def rows(n, generator):
    return torch.randn(n, 6, generator=generator, dtype=torch.double), torch.randn(n, generator=generator).double()


METRICS = {  # by the kind of their states: sums; lists; means and variances, merged by the metric
    "sums": torchmetrics.MeanSquaredError,
    "lists": Contrastive,
    "moments": torchmetrics.ConcordanceCorrCoef,
}


def of(name, options, kept=None):
    """Return the function (model, *batch) that passes a batch to a new metric, or to one that is kept."""

    def value(model, *batch):
        metric = kept or METRICS[name](**options).set_dtype(torch.double)
        return metric(*model(*batch)) if name == "lists" else metric(model(batch[0]), batch[1])

    return value


def training(name):
    def whole(model, batches):
        return sum(of(name, {})(model, *batch) for batch in batches) / len(batches)

    model, drawn = (CLIP.model, CLIP.rows) if name == "lists" else (Regression, rows)
    return Training(model, drawn, of(name, OURS), whole)


def under_ddp(loss):
    def train(model, updates):
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for update in updates:
            for batch in update:
                (loss(parallel, *batch) / len(update)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


@pytest.mark.parametrize("name", ["sums", "lists"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_as_one_process(name, micro_batches):
    training(name).assert_as_one_process(under_ddp(of(name, OURS)), micro_batches)


def test_a_metric_that_is_kept_returns_the_value_of_the_batch():
    """Its states accumulate: list states hold the rows of all steps until `reset()`."""

    def train(model, updates):
        metric = Contrastive(**OURS)
        under_ddp(of("lists", OURS, metric))(model, updates)
        assert sum(map(len, metric.image)) == sum(len(image) for update in updates for image, _ in update)

    training("lists").assert_as_one_process(train)


def factors(name, options, micro_batches=1):
    """Return the factors of a metric that is passed as it is, not divided by the micro-batches."""

    def loss(model, *batch):
        return micro_batches * of(name, options)(model, *batch)

    return set(training(name).factor(under_ddp(loss), micro_batches).values())


@pytest.mark.parametrize("name", METRICS)
def test_factors(name):
    cells = row_of_the_table("[torchmetrics](torchmetrics.md), gathered with gradients, under DDP")[:2]
    assert [{str(int(factor)) for factor in factors(name, OURS, steps)} for steps in (1, 2)] == [{c} for c in cells]


@pytest.mark.parametrize("name", METRICS)
def test_gathered_without_gradients(name):
    found = training(name).factor(under_ddp(of(name, THEIRS)))
    if name == "lists":
        assert found.pop("scale") == 1.0  # not gathered: right under a mean over ranks
    assert set(found.values()) == {0.333333}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_of_this_ranks_rows(name):
    assert "wrong" in factors(name, {})


def test_compute_has_no_gradient():
    def computed(x):
        metric = torchmetrics.MeanSquaredError(dist_sync_fn=gather)
        metric.update(x.requires_grad_(), torch.zeros_like(x))
        return metric.compute().requires_grad, metric(x, torch.zeros_like(x)).requires_grad

    assert spawn(computed, list(torch.arange(6.0).split([3, 1, 2]))) == [(False, True)] * 3


def test_forward_without_sync_on_step_is_of_this_rank_and_compute_of_all():
    def values(x):
        metric = torchmetrics.MeanSquaredError(dist_sync_fn=gather)
        return metric(x, torch.zeros_like(x)).item(), metric.compute().item()

    ranks = spawn(values, list(torch.arange(6.0).split([3, 1, 2])))
    assert [own for own, _ in ranks] == pytest.approx([5 / 3, 9, 41 / 2])
    assert [whole for _, whole in ranks] == pytest.approx([55 / 6] * 3)


def test_a_state_that_is_reduced_by_a_mean_is_a_mean_of_means():
    class Mean(torchmetrics.Metric):
        def __init__(self, **options):
            super().__init__(**options)
            self.add_state("value", torch.zeros(()), dist_reduce_fx="mean")

        def update(self, x):
            self.value = x.mean()

        def compute(self):
            return self.value

    x = list(torch.arange(6.0).split([3, 1, 2]))
    assert spawn(lambda x: Mean(**OURS)(x).item(), x) == pytest.approx([(1 + 3 + 4.5) / 3] * 3)  # 2.5 on one process


@pytest.mark.parametrize(("options", "kind"), [({}, "died"), ({"dist_sync_fn": gather}, "raised")])
def test_a_rank_that_never_updated_a_list(options, kind):
    def computed(x):
        metric = torchmetrics.CosineSimilarity(**options)
        if len(x):
            metric.update(x, x)
        return metric.compute()

    with pytest.raises(RanksFailedError) as caught:
        spawn(computed, list(torch.randn(5, 4).split([2, 3, 0])), timeout=20)
    kinds = [failed and failed.kind for failed in caught.value.failures.values()]
    assert kind in kinds and (kind == "died" or kinds == ["raised"] * 3)


def test_cosine_similarity_keeps_its_state_in_float32():
    metric = torchmetrics.CosineSimilarity().set_dtype(torch.double)
    assert metric(*torch.randn(2, 3, 4).double().unbind()).dtype == torch.float32


@pytest.mark.parametrize("name", METRICS)
def test_the_harness(name):
    def judged(options):
        model = Towers() if name == "lists" else Regression()
        batch = tuple(torch.randn(8, *d).double() for d in (((6,), (5,)) if name == "lists" else ((6,), ())))
        ranks, whole = of(name, options), of(name, {})
        return assert_matches_single_process(ranks, whole, batch, module=model, ranks=[(5, 3), (2, 3, 3)])

    assert judged(OURS).ok
    with pytest.raises(GradientMismatchError):
        judged(THEIRS)
