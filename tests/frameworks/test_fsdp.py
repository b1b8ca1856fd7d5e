"""FSDP2 takes the mean over all ranks of its mesh; nobody divides by the micro-batches."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from trainings import CLIP, TOKENS, parameters, row_of_the_table
from variants import assert_as_one_process, factors, loop, on_ranks

import diffcoll as dc
from diffcoll.testing import GradientMismatchError, RanksFailedError, assert_matches_single_process, spawn


class Scaled(nn.Module):
    """The model with a scale of shape (1,): fully_shard refuses 0-d parameters."""

    def __init__(self, model):
        super().__init__()
        self.image, self.text, self.scale = model.image, model.text, nn.Parameter(model.scale.detach()[None].clone())

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.scale[0].exp()


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def sharded(model, shape=(3,), **options):
    """Shard each encoder, and what is left with the module around them."""
    mesh = mesh_of(*shape)
    for module in (model.image, model.text, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def fsdp(change=None, sync=None, loss=CLIP.loss, divides=False, make=Scaled, of=sharded, **options):
    """Return a function that trains with FSDP2.

    `change(module)`: of each FSDP module; `sync(module, is_last)`: before each micro-batch.
    """

    def train(model, updates):
        model = of(make(model), **options)
        for module in model.modules() if change else ():
            if isinstance(module, FSDPModule):
                change(module)

        @contextlib.contextmanager
        def last_only(is_last):
            if sync:
                sync(model, is_last)
            yield

        loop(model, updates, loss, last_only=last_only, divides=divides)
        return whole(model)

    return train


def whole(model):
    full = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in model.named_parameters()}
    return {name: p.reshape(()) if name == "scale" else p for name, p in full.items()}


def factor_one(module):
    module.set_gradient_divide_factor(1.0)


def factor_three(module):
    module.set_gradient_divide_factor(3.0)


def encoders_alone(averages):
    """Shard the encoders: the scale is a plain parameter, of shape ()."""

    def shard(model, **options):
        for encoder in (model.image, model.text):
            fully_shard(encoder, mesh=mesh_of(3))
        if averages:
            model.averager = dc.GradientAverager([model.scale])
        return model

    return {"make": lambda model: model, "of": shard}


def scale_ignored(model, **options):
    fully_shard(model, mesh=mesh_of(3), ignored_params={model.scale})
    model.averager = dc.GradientAverager([model.scale])
    return model


def resumed(model, updates):
    """Half of the updates, then the rest in a new model that loads the saved one."""
    first = sharded(Scaled(model))
    loop(first, updates[:10], CLIP.loss, divides=True)
    saved, again = get_model_state_dict(first, options=StateDictOptions(full_state_dict=True)), Scaled(CLIP.model())
    again.load_state_dict({name: p.clone() for name, p in saved.items()})
    loop(sharded(again), updates[10:], CLIP.loss, divides=True)
    return whole(again)


def of_the_sum(model, *batch):
    return CLIP.loss(model, *batch, summed=True)


RIGHT = {
    "plain": fsdp(divides=True),
    "the root alone": fsdp(of=lambda model: fully_shard(model, mesh=mesh_of(3)), divides=True),
    "not resharded": fsdp(divides=True, reshard_after_forward=False),
    "sent once": fsdp(divides=True, sync=lambda model, is_last: model.set_requires_gradient_sync(is_last)),
    "force_sum_reduction": fsdp(lambda module: module.set_force_sum_reduction_for_comms(True), divides=True),
    "HSDP 1 × 3": fsdp(divides=True, shape=(1, 3)),
    "HSDP 3 × 1": fsdp(divides=True, shape=(3, 1)),
    "HSDP, sent once": fsdp(
        divides=True, shape=(3, 1), sync=lambda model, is_last: model.set_requires_all_reduce(is_last)
    ),
    "sums": fsdp(factor_one, divides=True, loss=of_the_sum),
    "scale outside, averaged": fsdp(divides=True, **encoders_alone(averages=True)),
    "scale ignored, averaged": fsdp(divides=True, make=lambda model: model, of=scale_ignored),
    "resumed": resumed,
}


def test_pairs_as_one_process():
    assert_as_one_process(CLIP, {way: RIGHT[way] for way in ("plain", "HSDP 1 × 3", "HSDP 3 × 1", "sums")}, 1)


def test_pairs_as_one_process_with_micro_batches():
    assert_as_one_process(CLIP, RIGHT, 2)


def test_tokens_as_one_process():
    def train(model, updates):
        fully_shard(model, mesh=mesh_of(3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for update in updates:
            total = dc.all_reduce(sum((labels != -100).sum() for _, labels in update))
            for batch in update:
                TOKENS.loss(model, *batch, total=total).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    assert_as_one_process(TOKENS, {"FSDP": train}, 2)


def test_factors_of_the_table():
    ways = {
        "[FSDP2](fsdp.md), and HSDP": fsdp(),
        "[FSDP2, `set_gradient_divide_factor(1.0)` on each module](fsdp.md)": fsdp(factor_one),
    }
    found = [factors(CLIP, ways, micro_batches) for micro_batches in (1, 2)]
    for row in ways:
        assert [each[row] for each in found] == [float(cell) for cell in row_of_the_table(row)[:2]]


def test_factors_of_mistakes():
    found = factors(
        CLIP,
        {
            "sum": fsdp(loss=of_the_sum),
            "factor of the root": fsdp(of=lambda model: divided_by_one(sharded(model))),
            "divided twice": fsdp(factor_three, shape=(3, 1)),
            "scale outside": fsdp(**encoders_alone(averages=False)),
            "0-d": fsdp(make=lambda model: model),
            "never sent": fsdp(sync=lambda model, is_last: model.set_requires_gradient_sync(False)),
            "averager": fsdp(of=lambda model: averaged(sharded(model))),
        },
    )
    encoders = dict.fromkeys(("image.weight", "image.bias", "text.weight", "text.bias"), 1.0)
    assert found["sum"] == found["divided twice"] == 0.333333
    assert found["factor of the root"] == {"scale": 3, **encoders}
    assert found["scale outside"] == {"scale": "differs", **encoders}
    assert "fully_shard doesn't support scalar parameters" in found["0-d"]
    assert found["never sent"] == 0
    assert "FSDP" in found["averager"]


def divided_by_one(model):
    model.set_gradient_divide_factor(1.0)
    return model


def averaged(model):
    dc.GradientAverager(model)
    return model


def test_a_divide_factor_in_float32_needs_sums_on_gloo():
    def gradient(rank, factor, is_forced=False, shape=(3,)):
        torch.manual_seed(0)
        net, x = nn.Linear(4, 3), torch.randn(3, 5, 4)
        alone = nn.Linear(4, 3)
        alone.load_state_dict(net.state_dict())
        fully_shard(net, mesh=mesh_of(*shape))
        net.set_gradient_divide_factor(factor)
        net.set_force_sum_reduction_for_comms(is_forced)
        net(x[rank]).square().mean().backward()
        alone(x.flatten(0, 1)).square().mean().backward()
        ratio = net.weight.grad.full_tensor() / alone.weight.grad
        assert ratio.max() - ratio.min() < 1e-4
        return round(ratio.mean().item(), 4)

    assert spawn(lambda rank: gradient(rank, 3.0), range(3)) == [1] * 3
    with pytest.raises(RanksFailedError, match=r"Cannot use ReduceOp\.PREMUL_SUM with Gloo"):
        spawn(lambda rank: gradient(rank, 1.0), range(3))
    assert spawn(lambda rank: gradient(rank, 1.0, True), range(3)) == [3] * 3
    assert spawn(lambda rank: gradient(rank, 3.0, shape=(3, 1)), range(3)) == [1] * 3
    assert spawn(lambda rank: gradient(rank, 3.0, True, (3, 1)), range(3)) == [0.3333] * 3  # as in float64: twice


def test_mixed_precision_rounds():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    (found, *_) = on_ranks(CLIP, {"": fsdp(mp_policy=policy)}, 1, 1)[""]
    start, right = parameters(CLIP.model()), CLIP.on_one_process(1, 1)
    moved, wanted = (torch.cat([(p[n] - start[n]).flatten() for n in start]) for p in (found, right))
    assert 1e-4 < (moved - wanted).norm() / wanted.norm() < 5e-2


def test_clipping_by_the_norm_of_sharded_and_plain_parameters():
    """torch's takes both."""

    def clipped(batch, clip, shards=True):
        model = CLIP.model()
        if shards:
            model = encoders_alone(averages=True)["of"](model)
        (model.averager.backward if shards else torch.Tensor.backward)(CLIP.loss(model, *batch))
        norm = clip(model)
        full = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}
        return norm.full_tensor() if isinstance(norm, DTensor) else norm, full

    def of_torch(model):
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def of_the_sharded(model):
        return nn.utils.clip_grad_norm_([*model.image.parameters(), *model.text.parameters()], 0.1)

    batches = [update[0] for (update,) in CLIP.batches(1, 1)]
    ((norm, right),) = spawn(
        lambda batch: clipped(batch, of_torch, False), [tuple(map(torch.cat, zip(*batches, strict=True)))]
    )
    for found, gradients in spawn(lambda batch: clipped(batch, of_torch), batches):
        torch.testing.assert_close(found, norm)
        torch.testing.assert_close(gradients, right)
    assert all(found < 0.9 * norm for found, _ in spawn(lambda batch: clipped(batch, of_the_sharded), batches))


@pytest.mark.parametrize("is_right", [True, False], ids=["all ranks", "one shard group"])
def test_group_of_the_loss_under_hybrid_sharding(is_right):
    """The loss's group has the ranks of both axes, which the default group is; that of one axis has other negatives."""

    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(6, 4, dtype=torch.double)

        def forward(self, x):
            return F.normalize(self.layer(x), dim=-1)

    def shard(model, mesh):
        model.group = None if is_right else mesh["shard"].get_group()
        return fully_shard(model, mesh=mesh)

    def on_ranks(model, x):
        return dc.nn.functional.clip_loss(*model(x).unbind(1), 5.0, group=model.group)

    def on_one_process(model, x):
        return dc.nn.functional.clip_loss(*model(x).unbind(1), 5.0)

    more = {
        "module": Tower(),
        "shard": shard,
        "ranks": {"replicate": 2, "shard": 2},
        "placements": {"x": lambda whole, at: whole.split([3, 1, 2, 4])[2 * at["replicate"] + at["shard"]]},
        "on": ["gloo"],
    }
    x = torch.randn(10, 2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    with contextlib.nullcontext() if is_right else pytest.raises(GradientMismatchError):
        assert_matches_single_process(on_ranks, on_one_process, x, **more)
