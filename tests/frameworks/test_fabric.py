"""Lightning's Fabric: DDP takes the mean over ranks, nobody divides by the micro-batches."""

import contextlib
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.tensor import Shard
from trainings import CLIP, EQUAL, RATE, TOKENS, Towers, failures, parameters, row_of_the_table

import diffcoll as dc
from diffcoll.testing import GradientMismatchError, assert_matches_single_process, spawn


def launched(**options):
    fabric = Fabric(accelerator="cpu", devices=dc.get_world_size(), strategy="ddp", **options)
    fabric.launch()
    return fabric


def with_fabric(loss, averager=False, max_norm=None):
    """Return a function that trains as Fabric's users do; the loss takes the model, a micro-batch and its step."""

    def train(model, updates):
        fabric = launched()
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        if averager:
            held, optimizer = dc.GradientAverager(model), fabric.setup_optimizers(optimizer)
        else:
            model, optimizer = fabric.setup(model, optimizer)
        for update in updates:
            for k, batch in enumerate(update):
                accumulating = k + 1 < len(update)
                if averager:
                    around = contextlib.nullcontext() if accumulating else held.reduce()
                else:
                    around = fabric.no_backward_sync(model, enabled=accumulating)
                with around:
                    fabric.backward(loss(model, batch, update))
            if max_norm:
                fabric.clip_gradients(model, optimizer, max_norm=max_norm)
            optimizer.step()
            optimizer.zero_grad()

    return train


def of_pairs(model, batch, update):
    return CLIP.loss(model, *batch) / len(update)


def of_tokens(model, batch, update):
    total = dc.all_reduce(sum((labels != -100).sum() for _, labels in update))
    return TOKENS.loss(model, *batch, total=total)


AVERAGERS = pytest.mark.parametrize("averager", [False, True], ids=["DDP", "GradientAverager"])


@AVERAGERS
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_pairs_as_one_process(averager, micro_batches):
    CLIP.assert_as_one_process(with_fabric(of_pairs, averager), micro_batches)


@AVERAGERS
def test_tokens_as_one_process(averager):
    TOKENS.assert_as_one_process(with_fabric(of_tokens, averager), 2)


@AVERAGERS
def test_clipping_is_that_of_one_process(averager):
    clipped = CLIP.on_one_process(2, max_norm=0.3)
    assert (clipped["scale"] - CLIP.on_one_process(2)["scale"]).abs() > 0.01
    found = CLIP.on_ranks(with_fabric(of_pairs, averager, max_norm=0.3), 2)
    torch.testing.assert_close(found, clipped, rtol=1e-6, atol=1e-8)


# ── factors ──────────────────────────────────────────────────────────────────────────────────────────────


def factors(loss, micro_batches=1, **options):
    return set(CLIP.factor(with_fabric(loss, **options), micro_batches).values())


def as_it_is(model, batch, update):
    return CLIP.loss(model, *batch)


@AVERAGERS
def test_factors(averager):
    found = [factors(as_it_is, steps, averager=averager) for steps in (1, 2)]
    assert [{str(int(factor)) for factor in each} for each in found] == [
        {cell} for cell in row_of_the_table("[Fabric](lightning.md#fabric)")[:2]
    ]


def test_a_loss_that_is_a_share():
    assert factors(lambda model, batch, update: CLIP.loss(model, *batch, summed=True)) == {0.333333}


def of_gathered_rows(sync_grads):
    """Return the whole loss, which each rank computes of what Fabric gathers."""

    def loss(model, batch, update):
        fabric = launched()
        image, text, scale = model(*batch)
        image, text = (fabric.all_gather(z, sync_grads=sync_grads).flatten(0, 1) for z in (image, text))
        logits, own = scale * image @ text.T, torch.arange(len(image))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    return with_fabric(loss)


def test_all_gather_of_equal_rows():
    equal = dataclasses.replace(CLIP, sizes=EQUAL)
    assert set(equal.factor(of_gathered_rows(True)).values()) == {1.0}
    found = equal.factor(of_gathered_rows(False))
    assert found.pop("scale") == 1.0 and set(found.values()) == {0.0}


def gathered(rows):
    return launched().all_gather(torch.ones(rows, 2, requires_grad=True), sync_grads=True)


@pytest.mark.parametrize(("rows", "kinds"), [([3, 2, 4], {"died"}), ([3, 3, 0], {"hung"})])
def test_all_gather_of_different_rows(rows, kinds):
    spawn(gathered, [2, 2, 2])  # the processes' server has started, so that the time below is that of the call
    found = failures(gathered, rows, timeout=5)
    assert kinds <= {failed and failed[0] for failed in found}
    sizes = spawn(lambda n: len(dc.gather_batch(torch.ones(n, 2)).tree), rows)
    assert sizes == [sum(rows)] * 3


def test_all_reduce_changes_its_argument_and_divides_the_gradient():
    def loss(model, batch, update):
        return launched().all_reduce(CLIP.loss(model, *batch))

    assert factors(loss) == {0.333333}

    def value(x):
        printed = launched().all_reduce(x)
        return printed.item(), x.item()

    assert spawn(value, list(torch.tensor([3.0, 6.0, 30.0]))) == [(13.0, 13.0)] * 3


# ── errors and silent mistakes ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("first", ["averager", "setup"])
def test_an_averager_and_ddp_raise(first):
    def train(first, updates):
        fabric, model = launched(), Towers()
        if first == "averager":
            averager = dc.GradientAverager(model)
            model = fabric.setup(model)
        else:
            model = fabric.setup(model)
            averager = dc.GradientAverager(model)
        with averager.reduce():
            fabric.backward(CLIP.loss(model, *updates[0][0]))

    for kind, text in failures(train, [first] * 3, CLIP.batches(1, 1)):
        assert kind == "raised" and "DistributedDataParallel" in text


def test_fabric_blocks_no_averager():
    def block(model):
        with launched().no_backward_sync(model):
            pass

    for kind, text in failures(block, [Towers() for _ in range(3)]):
        assert kind == "raised" and "need to set up the model first" in text


class Encoders(nn.Module):
    def __init__(self):
        super().__init__()
        towers = Towers()
        self.image, self.text = towers.image, towers.text

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)


def scales(set_up, updates):
    fabric, model = launched(), Encoders()
    loss = dc.nn.CLIPLoss(torch.nn.Parameter(torch.tensor(2.0))).double()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], RATE)
    model, optimizer = fabric.setup(model, optimizer)
    loss = fabric.setup(loss) if set_up else loss
    for (batch,) in updates:
        fabric.backward(loss(*model(*batch)))
        optimizer.step()
        optimizer.zero_grad()
    (scale,) = parameters(loss).values()
    return scale.item()


def test_a_scale_that_is_not_set_up_drifts_apart():
    batches = CLIP.batches(1, 3)
    assert len(set(spawn(scales, [False] * 3, batches))) == 3
    assert len(set(spawn(scales, [True] * 3, batches))) == 1


def test_a_method_other_than_forward():
    class More(Towers):
        def encoded(self, image):
            return self.image(image)

    def call(image):
        return launched().setup(More()).encoded(image).sum()

    for kind, text in failures(call, [torch.ones(2, 6).double()] * 3):
        assert kind == "raised" and "mark_forward_method('encoded')" in text


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_precision(precision):
    """The averager is made of the model that has its dtype; gathered features keep theirs under autocast."""

    def gradient(convert_first):
        fabric = launched(precision=precision)
        model, dtype = nn.Linear(3, 2), {"64-true": torch.double, "bf16-true": torch.bfloat16}.get(precision)
        if convert_first:
            model.to(dtype)
        averager = dc.GradientAverager(model)
        if not convert_first:
            model.to(dtype)
        with fabric.autocast():
            features = dc.gather_batch(model(torch.ones(2 + dc.get_rank(), 3, dtype=dtype))).tree
        with averager.reduce():
            fabric.backward(features.float().square().mean())
        return features.dtype, model.weight.grad

    ranks = spawn(gradient, [True] * 3)
    assert {features for features, _ in ranks} == {torch.double if precision == "64-true" else torch.bfloat16}
    assert all(torch.equal(weight, ranks[0][1]) for _, weight in ranks)
    if precision != "bf16-mixed":
        for kind, text in failures(gradient, [False] * 3):
            assert kind == "raised" and "make a new one" in text


# ── the harness ──────────────────────────────────────────────────────────────────────────────────────────

BATCH = tuple(torch.randn(7, d).double() for d in (6, 5))


@pytest.mark.parametrize("on", ["simulated", "gloo"])
def test_the_harness(on):
    def judged(summed):
        return assert_matches_single_process(
            lambda model, x, y: CLIP.loss(model, x, y, summed),
            lambda model, x, y: CLIP.whole(model, [(x, y)]),
            BATCH,
            module=Towers(),
            shard=lambda model, mesh: launched().setup(model),
            ranks={"dp": 3},
            placements={"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}},
            on=[on],
        )

    assert judged(False).ok
    with pytest.raises(GradientMismatchError, match="1/N"):
        judged(True)
