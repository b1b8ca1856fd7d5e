"""GradientAverager: gradients equal those of one process with the whole batch, bitwise the same on all ranks."""

import copy
import os
import re
import signal
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from runs import gloo, profiled, rules
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import (
    RUNS,
    SMALL,
    attach,
    by_each_reduction,
    each,
    equal,
    equal_on_all_ranks,
    everywhere,
    gradients,
    on_two,
    refused,
    same,
    shares,
)

import diffcoll as dc
from diffcoll.testing import RanksFailedError, new_group, simulate, spawn


class Norm(nn.Module):
    """Batch norm over all ranks, by two sums."""

    def forward(self, x):
        dims = [0, 2, 3]
        count = dc.all_reduce(torch.tensor(float(x.shape[0] * x.shape[2] * x.shape[3]), dtype=x.dtype))
        mean = dc.all_reduce(x.sum(dims, keepdim=True)) / count
        variance = dc.all_reduce(((x - mean) ** 2).sum(dims, keepdim=True)) / count
        return (x - mean) * (variance + 1e-5).rsqrt()


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def convolution():
    return nn.Sequential(nn.Conv2d(1, 4, 2), Norm(), nn.Tanh(), nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(8, 3))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.layer(self.embed(x))).mean(1)


MODELS = {"mlp": (mlp, (5,)), "convolution": (convolution, (1, 3, 3)), "transformer": (Transformer, (4, 3))}
SIZES = {2: [5, 2], 3: [4, 0, 3]}


def made(make, seed=0):
    torch.manual_seed(seed)
    return make().double()


def data(shape, n, seed=1):
    g = torch.Generator().manual_seed(seed)
    total = sum(SIZES[n])
    x = torch.randn(total, *shape, generator=g, dtype=torch.double)
    t = torch.randint(3, (total,), generator=g)
    return list(zip(x.split(SIZES[n]), t.split(SIZES[n]), strict=True))


# ── compared with one process ────────────────────────────────────────────────────────────────────────────


ON_ONE = [(name, n, where) for name in MODELS for n, where in ((1, "rules"), (2, "rules"), (3, "rules"), (3, "gloo"))]


@pytest.mark.parametrize(("name", "n", "where"), [*ON_ONE, ("convolution", 2, "mpi")])
def test_one_process_on_the_whole_batch(name, n, where):
    """Three training steps on uneven and empty batches: sums of losses, weighted means, micro-batches."""
    make, shape = MODELS[name]
    parts = data(shape, n) if n > 1 else [tuple(torch.cat(v) for v in zip(*data(shape, 3), strict=True))]
    total = sum(len(t) for _, t in parts)

    def reference():
        model = made(make)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        whole = [torch.cat(v) for v in zip(*parts, strict=True)]
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(whole[0]), whole[1]).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    def trained(reduction, r):
        model = made(make, seed=r)  # rank 0's parameters are broadcast
        _, backward = attach(model, reduction, bucket_mb=SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, t = parts[r]
        for _ in range(3):
            optimizer.zero_grad(set_to_none=r != 1)
            if reduction == "weighted" and name != "convolution":
                for k, chunk in enumerate(range(0, max(len(t), 1), 2)):  # numbers of micro-batches differ
                    xs, ts = x[chunk : chunk + 2], t[chunk : chunk + 2]
                    loss = partial(lambda x, t: nn.functional.cross_entropy(model(x), t), xs, ts)  # NaN if empty
                    weight = len(ts) if k % 2 else torch.tensor(float(len(ts)))
                    backward(loss, weight, reduces=chunk + 2 >= len(t))
            else:
                loss = nn.functional.cross_entropy(model(x), t, reduction="sum") / total
                (loss if reduction == "sum" else loss * n).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    expected = reference()
    reductions = ["sum", "mean"] if name == "convolution" else ["sum", "mean", "weighted"]
    found = RUNS[where](lambda r: [trained(reduction, r) for reduction in reductions], range(n))
    for k in range(len(reductions)):
        equal_on_all_ranks([of_rank[k] for of_rank in found])
        same(found[0][k], expected, 1e-10)


@pytest.mark.parametrize("n", [2, 3])
def test_torchs_own(n):
    """The same gradients as DistributedDataParallel, bitwise the same on all ranks."""

    def body(r):
        parts = data((4, 3), n)
        x, t = parts[r]
        t = t if len(t) else torch.tensor([1])
        x = x if len(x) else torch.ones(1, 4, 3, dtype=torch.double)
        ours, theirs = made(Transformer), made(Transformer)
        dc.GradientAverager(ours, bucket_mb=SMALL)
        ddp = nn.parallel.DistributedDataParallel(theirs)
        for _ in range(3):
            for model, call in ((ours, ours), (theirs, ddp)):
                model.zero_grad()
                nn.functional.cross_entropy(call(x), t).backward()
        return gradients(ours), gradients(theirs)

    found = gloo(body, range(n))
    equal_on_all_ranks([ours for ours, _ in found])
    for ours, theirs in found:
        same(ours, theirs, 1e-14)


# ── unused parameters ────────────────────────────────────────────────────────────────────────────────────


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([torch.tensor([1.0, 2.0]) for _ in range(5)])

    def forward(self, which):
        return sum(((k + 1) * self.parts[k]).sum() for k in which)


@everywhere
def test_unused_parameters(where):
    """Zero on ranks that do not use it, None if no rank does; ranks may use different ones in every step."""
    steps = [[[0, 1], [1, 3]], [[3], [4, 0]], [[0, 1, 2, 3, 4], [2]], [[1], [1]]]

    def body(r):
        model = Branches()
        dc.GradientAverager(model, bucket_mb=8 / 2**20, reduction="sum")
        found = []
        for k, step in enumerate(steps):
            for p in model.parameters():
                p.grad = None
            ((k + 1) * model(step[r])).backward()
            found += gradients(model)
        return found

    found = each(body, 2, where)
    expected = []
    for k, step in enumerate(steps):
        counts = [sum(i in of_rank for of_rank in step) for i in range(5)]
        expected += [torch.full((2,), float(c * (k + 1) * (i + 1))) if c else None for i, c in enumerate(counts)]
    same(found, expected)


@on_two
def test_collectives_in_the_loss_and_ranks_that_use_different_parameters(where):
    """Messages of buckets and of the loss do not match each other, whatever their order on each rank."""

    def body(r):
        model = Branches()
        dc.GradientAverager(model, bucket_mb=8 / 2**20, reduction="sum")
        for _ in range(4):
            model.zero_grad()
            a, b, c, d, e = model.parts
            y = dc.all_reduce(a * a + (b if r == 0 else d * c))  # the gradient of c comes before y's on one rank
            z = dc.all_gather((y * c).sum() if r == 0 else (y + e).sum())
            ((r + 2) * z.sum() ** 2).backward()
        return gradients(model)

    def alone():
        model = Branches()
        a, b, c, d, e = model.parts
        y = 2 * a * a + b + d * c
        z = (y * c).sum() + (y + e).sum()
        (5 * z**2).backward()
        return gradients(model)

    same(each(body, 2, where), alone(), 1e-3)


def steps_of(reduction, body, n=3, where="rules"):
    """Run body(model, averager, loss, r) on MLPs with one (x, t) for each rank; return the gradients, equal on all."""
    parts = data((5,), n)

    def on_rank(r):
        model = made(mlp)
        averager = dc.GradientAverager(model, reduction=reduction, bucket_mb=SMALL)
        x, t = parts[r]

        def loss(scale=1.0):
            return scale * nn.functional.cross_entropy(model(x), t, reduction="sum")

        body(model, averager, loss, r)
        return gradients(model)

    return each(on_rank, n, where)


def summed(scale=1.0, n=3):
    """Return the gradient of the sum of all ranks' losses, in one process."""
    model = made(mlp)
    for x, t in data((5,), n):
        (scale * nn.functional.cross_entropy(model(x), t, reduction="sum")).backward()
    return gradients(model)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_and_accumulation(set_to_none):
    def body(model, averager, loss, r):
        for _ in range(3):
            model.zero_grad(set_to_none=set_to_none)
            with averager.no_sync():
                loss(1.0).backward()
                loss(2.0).backward()
            loss(3.0).backward()

    same(steps_of("sum", body), summed(6.0))
    same(steps_of("mean", body), [g / 3 for g in summed(6.0)])


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_second_backward_accumulates(reduction, set_to_none):
    """Reduced gradients stay, new ones are reduced and added: also through no_sync, and if a rank adds nothing."""
    scale = 1.0 if reduction == "sum" else 1 / 3

    def body(model, averager, loss, r):
        for _ in range(2):
            model.zero_grad(set_to_none=set_to_none)
            y = loss()
            y.backward(retain_graph=True)
            y.backward()
            with averager.no_sync():
                loss(3.0).backward()
            loss(5.0).backward()
            averager.synchronize()  # nothing new to reduce
            averager.synchronize()
        model[4].bias.grad.mul_(2.0)  # like gradient clipping
        with averager.no_sync():
            model[0].bias.sum().backward()
        averager.synchronize()  # reduces the one gradient that is new

    found = steps_of(reduction, body)
    expected = [g * scale for g in summed(10.0)]
    expected[5] *= 2
    expected[1] += 3 * scale
    same(found, expected)


@pytest.mark.parametrize("reduction", ["sum", "weighted"])
def test_what_is_zeroed_in_an_accumulation_is_gone(reduction):
    """zero_grad() also drops the reduced gradient that was set aside; any other change is an error."""

    def body(r):
        p = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([p], lr=0.0)
        _, of = attach([p], reduction)

        def backward(factor, reduces=True):
            of(lambda: (p * factor * (r + 1)).sum(), r + 1, reduces)

        backward(5.0)
        found = []
        for set_to_none in (True, False):
            backward(7.0, reduces=False)
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(1.0)
            found.append(p.grad.clone())
        backward(7.0, reduces=False)
        p.grad += 1
        with pytest.raises(RuntimeError, match=r"GradientAverager: 0: its gradient was changed .* zero_grad\(\)"):
            backward(1.0)
        return found

    expected = 3.0 if reduction == "sum" else (1 * 1 + 2 * 2) / 3
    same(each(body, 2, "gloo"), [torch.full((2,), expected)] * 2, 1e-6)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_weights_that_half_precision_does_not_know(as_tensor):
    def body(r):
        parameters = [torch.ones(2, dtype=d, requires_grad=True) for d in (torch.float16, torch.bfloat16)]
        _, backward = attach(parameters, "weighted")
        loss = sum((p * 0.01 * (r + 1)).sum().float() for p in parameters)
        backward(loss, torch.tensor(100_000.0) if as_tensor else 100_000)
        return [p.grad.float() for p in parameters]

    same(each(body, 2, "gloo"), [torch.full((2,), 0.015)] * 2, 1e-4)


@pytest.mark.parametrize("order", [1, -1])
def test_weights_are_as_fine_as_the_finest_gradient(order):
    def body(r):
        parameters = [torch.ones(2, dtype=d, requires_grad=True) for d in (torch.float32, torch.float64)][::order]
        _, backward = attach(parameters, "weighted")
        backward(sum((p.double() * (r + 1)).sum() for p in parameters), [0.1, 0.7][r])
        return [next(p.grad for p in parameters if p.dtype == torch.float64)]

    same(each(body, 2, "rules"), [torch.full((2,), (0.1 + 1.4) / 0.8, dtype=torch.double)], 1e-14)


@everywhere
def test_two_averagers_side_by_side(where):
    """Each averages one half of a model; the order of use differs between ranks."""

    def body(r):
        a, b = (torch.tensor([1.0, 2.0], requires_grad=True) for _ in range(2))
        dc.GradientAverager([a], reduction="sum")
        dc.GradientAverager([b], reduction="mean")
        for _ in range(2):
            a.grad = b.grad = None
            y = (a * b).sum() if r == 0 else (a * 2).sum() * b.detach().sum() + (b * 4).sum()
            (y * (r + 1)).backward()
        return [a.grad, b.grad]

    same(each(body, 2, where), [torch.tensor([1.0 + 12, 2.0 + 12]), torch.tensor([4.5, 5.0])])


def test_two_weighted_losses():
    def body(model, averager, loss, r):
        for _ in range(2):
            model.zero_grad()
            averager.set_weight([4, 0, 3][r])
            with averager.no_sync():
                loss(1.0).backward()
            loss(2.0).backward()
            if r == 0:
                with pytest.raises(RuntimeError, match=r"weight: got none for this batch, expected one; call"):
                    loss().backward()
            averager.set_weight([1, 1, 2][r])
            loss(5.0).backward()  # accumulates

    parts = data((5,), 3)
    expected = [0.0] * 6
    for weights, scale in (([4, 0, 3], 3.0), ([1, 1, 2], 5.0)):
        for (x, t), w in zip(parts, weights, strict=True):
            model = made(mlp)
            (scale * w / sum(weights) * nn.functional.cross_entropy(model(x), t, reduction="sum")).backward()
            expected = [e + g for e, g in zip(expected, gradients(model), strict=True)]
    same(steps_of("weighted", body), expected)


def test_all_weights_zero_and_autograd_grad():
    def body(model, averager, loss, r):
        averager.set_weight(0)
        loss().backward()
        (g,) = torch.autograd.grad(loss(), [model[4].bias])  # neither weighted nor reduced
        averager.set_weight(r * 5)
        (h,) = torch.autograd.grad(loss(), [model[4].bias])
        assert torch.equal(g, h)

    same(steps_of("weighted", body), [torch.zeros_like(g) for g in summed()])


@by_each_reduction
@pytest.mark.parametrize("how", ["hooks=False", "no_sync"])
def test_synchronize_after_several_backward_calls(reduction, how):
    """Weights are applied, and what was reduced before is not reduced again."""
    slopes = [[1.0, 4.0], [2.0, 5.0]]  # rank → backward → gradient

    def body(r):
        p = nn.Parameter(torch.zeros(1))
        averager, backward = attach([p], reduction, hooks=how != "hooks=False")
        found = []
        for slope in slopes[r]:
            backward((slope * p).sum(), 1 + 2 * r, reduces=how != "no_sync")
            if not found:  # nothing is reduced yet
                assert p.grad.item() == slope * (1 + 2 * r if reduction == "weighted" else 1)
            averager.synchronize()
            found.append(p.grad.item())
        return found

    both = {"mean": [1.5, 6.0], "sum": [3.0, 12.0], "weighted": [1.75, 6.5]}[reduction]
    assert rules(body, range(2)) == [both, both]


def test_a_weight_is_refused_for_a_gradient_that_no_backward_has_accumulated():
    def body(r):
        p = nn.Parameter(torch.zeros(1))
        averager, backward = attach([p], "weighted", hooks=False)
        averager.set_weight(1 + r)
        p.grad = torch.full((1,), r + 1.0)
        with pytest.raises(RuntimeError, match="0: its gradient was not multiplied by the weight, since no backward"):
            averager.synchronize()
        p.grad = None
        backward((p * (r + 1)).sum(), 1 + r)
        averager.synchronize()
        return p.grad.item()

    assert rules(body, range(2)) == [pytest.approx(5 / 3)] * 2


def test_frozen_shared_and_unfrozen_parameters():
    def body(r):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)).double()
        model[2].weight = model[0].weight
        model[1].requires_grad_(False)
        dc.GradientAverager(model, bucket_mb=8e-5)
        found = []
        x = torch.full((2, 3), r + 1.0, dtype=torch.double)
        for k in range(5):
            model.zero_grad()
            model[1].requires_grad_(k >= 2)
            model[0].bias.requires_grad_(k != 3)
            sent = dict(profiled(model(x).pow(2).sum().backward))
            found.append(gradients(model))
            trained = [p.numel() + 1 for p in model.parameters() if p.requires_grad]  # not frozen ones; 1: its flag
            assert dc.get_world_size() == 1 or sum(sent.values()) == 8 * (sum(trained) + 3), sent
        return [g for of_step in found for g in of_step]

    found = each(body, 2, "gloo")
    both = [simulate(lambda _, r=r: body(r), [0], rules=True)[0] for r in (0, 1)]
    same(found, [None if a is None else (a + b) / 2 for a, b in zip(*both, strict=True)])


@everywhere
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(where, reentrant):
    def body(r):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)]).double()
        plain = copy.deepcopy(model)
        dc.GradientAverager(model, bucket_mb=8e-5, reduction="sum")
        for _ in range(3):
            x = torch.full((2, 3), r + 1.0, dtype=torch.double, requires_grad=True)
            model.zero_grad()
            y = model[0](x) if r == 0 else x
            for k in (1, 2):  # nested checkpoints
                y = checkpoint(
                    lambda y, k=k: checkpoint(model[k], y, use_reentrant=reentrant) + y, y, use_reentrant=reentrant
                )
            (model[3](y) if r == 1 else y).sum().backward()
        plain.zero_grad()
        for s in range(2):
            x = torch.full((2, 3), s + 1.0, dtype=torch.double)
            y = plain[0](x) if s == 0 else x
            y = plain[1](y) + y
            y = plain[2](y) + y
            (plain[3](y) if s == 1 else y).sum().backward()
        same(gradients(model), gradients(plain))
        return gradients(model)

    each(body, 2, where)


def test_unfrozen_within_an_accumulation():
    """Weighted from its first gradient on."""

    def body(r):
        a, b = (torch.ones(1, dtype=torch.double, requires_grad=k == 0) for k in range(2))
        averager, backward = attach([a, b], "weighted")
        backward(a + b)
        a.grad = None
        b.requires_grad_()
        backward(a + b, 3, reduces=False)
        backward((a + b) * 2, 5, reduces=False)
        averager.synchronize()
        a.requires_grad_(False)
        b.requires_grad_(False)
        averager.synchronize()  # nothing left to reduce
        return [a.grad, b.grad]

    assert each(body, 2, "gloo") == [13 / 8, 13 / 8]


def test_a_compiled_model():
    def body(r):
        model, plain = made(mlp), made(mlp)
        dc.GradientAverager(model)
        call = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            model.zero_grad()
            call(torch.full((2, 5), r + 1.0, dtype=torch.double)).sum().backward()
        for s in range(2):
            (plain(torch.full((2, 5), s + 1.0, dtype=torch.double)).sum() / 2).backward()
        same(gradients(model), gradients(plain))
        return gradients(model)

    each(body, 2, "gloo")


def test_checkpoints_that_share_a_parameter():
    """Both gradients are included: the bucket is sent at the end of backward."""

    def body(r):
        layer = nn.Linear(2, 2, bias=False).double()
        dc.GradientAverager(layer, reduction="sum")
        x = torch.full((1, 2), r + 1.0, dtype=torch.double, requires_grad=True)
        y = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
        y.sum().backward()
        w = layer.weight.detach().requires_grad_()
        for s in range(2):
            (torch.full((1, 2), s + 1.0, dtype=torch.double) @ w.T @ w.T).sum().backward()
        same([layer.weight.grad], [w.grad])
        return gradients(layer)

    each(body, 2, "gloo")


def test_a_gradient_that_comes_after_its_bucket_was_sent():
    """It raises; in the last bucket, which is sent at the end of backward, it is included."""

    def body(r):
        def model_with(layers):
            model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(layers)]).double()
            dc.GradientAverager(model, bucket_mb=8e-6, reduction="sum")
            model(torch.ones(1, 2, dtype=torch.double)).sum().backward()  # the first sends no bucket before its end
            model.zero_grad()
            x = torch.full((1, 2), r + 1.0, dtype=torch.double, requires_grad=True)
            y = checkpoint(model[-1], x, use_reentrant=True)
            return model, y.sum() + model[-1](x.detach()).sum()

        _, loss = model_with(2)
        with pytest.raises(RuntimeError, match=r"GradientAverager: 1.weight: a second gradient in one backward"):
            loss.backward()
        model, loss = model_with(1)
        loss.backward()
        same(gradients(model), [torch.full((2, 2), 2.0 * (1 + 2), dtype=torch.double)])

    gloo(body, range(2))


def test_hooks_of_the_user_clipping_and_two_optimizers():
    def body(model, averager, loss, r):
        seen = []
        model[0].weight.register_hook(lambda g: seen.append(1) or 2 * g)
        model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(2))
        optimizers = [torch.optim.SGD(model[:2].parameters(), lr=0.0), torch.optim.Adam(model[2:].parameters(), lr=0.0)]
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
        assert seen == [1, 2] * 2
        assert norm > 1

    found = steps_of("sum", body)
    expected = summed()
    expected[0] = expected[0] * 2
    norm = torch.stack([g.norm() for g in expected]).norm()
    same(found, [g / (norm + 1e-6) for g in expected])


# ── dtypes ───────────────────────────────────────────────────────────────────────────────────────────────


@everywhere
def test_mixed_dtypes(where):
    """Several dtypes in one model, complex ones included, with weights that half precision cannot represent."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.float16]
    weights = [1001.0, 3.0]
    comms = [None, torch.float32, torch.bfloat16, torch.float64]
    ways = [(reduction, comm) for reduction in ("mean", "weighted") for comm in comms]

    def one(r, reduction, comm):
        parameters = [(f"p{i}", torch.ones(3, dtype=d, requires_grad=True)) for i, d in enumerate(dtypes)]
        _, backward = attach(parameters, reduction, comm_dtype=comm)
        for _ in range(2):
            for _, p in parameters:
                p.grad = None
            coefficients = torch.tensor([1.0, 2.0, 3.0]) + r
            losses = [(p * coefficients.to(p.dtype) * (1 - 2j if p.is_complex() else 1)) for _, p in parameters]
            backward(sum(y.real.sum().double() if y.is_complex() else y.sum().double() for y in losses), weights[r])
        return [p.grad for _, p in parameters]

    found = each(lambda r: [g for way in ways for g in one(r, *way)], 2, where)
    for k, (reduction, comm) in enumerate(ways):
        share = weights[1] / sum(weights) if reduction == "weighted" else 0.5
        for g, dtype in zip(found[k * len(dtypes) :], dtypes, strict=False):
            assert g.dtype == dtype
            lowest = max((comm or dtype).to_real(), dtype.to_real(), key=lambda d: torch.finfo(d).eps)
            expected = torch.tensor([1.0, 2.0, 3.0], dtype=torch.double) + share
            expected = expected * (1 + 2j) if dtype.is_complex else expected
            error = ((g.to(expected.dtype) - expected).abs() / expected.abs()).max()
            assert error <= 3 * torch.finfo(lowest).eps, (reduction, comm, dtype, error)


@pytest.mark.parametrize(
    ("dtype", "comm_dtype", "values", "mean"),
    [
        (torch.float16, None, [57600.0, 64000.0], 60800.0),  # their sum is no number of this dtype
        (torch.float32, torch.bfloat16, [1 + 2**-10, 1 + 2**-10], 1.0),  # nor is what is sent
    ],
)
def test_a_mean_in_the_dtype_in_which_it_is_sent(dtype, comm_dtype, values, mean):
    def body(r):
        p = torch.ones(2, dtype=dtype, requires_grad=True)
        dc.GradientAverager([p], comm_dtype=comm_dtype)
        (p * values[r]).sum().backward()
        return [p.grad]

    equal(each(body, 2, "gloo"), [torch.full((2,), mean, dtype=dtype)])


def test_half_precision_alone_and_channels_last():
    def body(r):
        model = nn.Conv2d(4, 6, 3).bfloat16().to(memory_format=torch.channels_last)
        _, backward = attach(model, "weighted")
        backward(model.weight.sum().mul(r), 4097 if r == 0 else 1)
        assert model.weight.grad.is_contiguous(memory_format=torch.channels_last) and model.bias.grad is None
        return [model.weight.grad]

    (g,) = each(body, 2, "gloo")
    assert torch.equal(g, torch.full_like(g, 1 / 4098))


@pytest.mark.parametrize("size", [3, 200])
def test_gradients_in_other_layouts(size):
    """Small and large, in one bucket with contiguous ones: transposed and expanded, complex ones and empty ones."""

    def body(r):
        def assign(p):
            values = torch.arange(float(p.numel())).view(p.shape) + r
            if p is parameters[0]:
                p.grad = torch.empty_strided(p.shape, (1, p.shape[0]), dtype=p.dtype).copy_(values)
            elif p is parameters[1]:
                p.grad = torch.empty_strided(p.shape, (0, 1), dtype=p.dtype)
                p.grad[:1].copy_(values[:1])
            else:
                p.grad = values * (1 + 2j) if p.is_complex() else values

        shapes = [(size, size)] * 4 + [(0,)]
        dtypes = [torch.float, torch.float, torch.cfloat, torch.float, torch.float]
        parameters = [nn.Parameter(torch.ones(*pair[0], dtype=pair[1])) for pair in zip(shapes, dtypes, strict=True)]
        for p in parameters:
            p.register_post_accumulate_grad_hook(assign)
        dc.GradientAverager(parameters)
        for _ in range(2):
            for p in parameters:
                p.grad = None
            sum(p.abs().sum() for p in parameters).backward()
        return [p.grad for p in parameters]

    values = torch.arange(size * size).view(size, size) + 1.5
    expected = [values, values[:1].expand(size, size), values * (1 + 2j), values, torch.zeros(0)]
    for found in rules(body, range(4)):
        equal(found, expected)


def test_sparse_gradients_are_refused_before_training():
    with pytest.raises(TypeError, match=r"GradientAverager: module_or_params: 1: got sparse gradients, expected dense"):
        dc.GradientAverager(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True)))
    embedding = nn.Embedding(3, 2, sparse=True)
    dc.GradientAverager(embedding.parameters())
    with pytest.raises(TypeError, match=r"GradientAverager: 0: got sparse gradients, expected dense ones"):
        embedding(torch.tensor([1])).sum().backward()


# ── construction and detach ──────────────────────────────────────────────────────────────────────────────

FORMATS = [torch.contiguous_format, torch.channels_last]
DIFFERENT = {
    "name": lambda p, r: [("b" if r == 1 else "a", p(3))],
    "shape": lambda p, r: [("z", p(1)), ("a", p(4 if r == 1 else 3)), ("b", p(r + 1))],
    "dtype": lambda p, r: [("a", p(3, dtype=torch.float64 if r == 1 else torch.float32))],
    "memory format": lambda p, r: [("a", p(2, 3, 2, 2).to(memory_format=FORMATS[r == 1]).detach().requires_grad_())],
    "number": lambda p, r: [("a", p(3)), ("b", p(3))][: 2 - (r == 1)],
}


@everywhere
def test_parameters_that_differ(where):
    def body(r):
        texts = [
            refused(
                lambda named=named: dc.GradientAverager(named(partial(torch.ones, requires_grad=True), r)),
                dc.CollectiveMismatchError,
            )
            for named in DIFFERENT.values()
        ]
        return texts, dc.all_reduce(torch.tensor(1)).item()

    found = RUNS[where](body, range(3))
    assert found[0] == found[1] == found[2]
    texts, n = found[0]
    assert n == 3
    words = [
        "index 0:\n  rank 0: a (3,) torch.float32\n  rank 1: b (3,)",
        "index 1:\n  rank 0: a (3,) torch.float32\n  rank 1: a (4,)",
        "index 0:\n  rank 0: a (3,) torch.float32\n  rank 1: a (3,) torch.float64",
        "index 0:\n  rank 0: a (2, 3, 2, 2) torch.float32\n  rank 1: a (2, 3, 2, 2) torch.float32 channels_last\n",
        "index 1:\n  rank 0: b (3,) torch.float32\n  rank 1: nothing\n  rank 2: b",
    ]
    for text, word in zip(texts, words, strict=True):
        assert text.startswith("GradientAverager: the ranks' parameters differ; the first difference is at " + word)


def test_broadcast_at_the_start_and_detach():
    def body(r):
        torch.manual_seed(r)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model[1].running_mean.fill_(r)
        keys, version = list(model.state_dict()), [type(m) for m in model.modules()]
        averager = dc.GradientAverager(model)
        assert list(model.state_dict()) == keys
        assert [type(m) for m in model.modules()] == version
        parameters = [p.detach().clone() for p in model.parameters()]
        model[1].running_mean.fill_(r)
        dc.GradientAverager(model, broadcast_parameters=False, broadcast_buffers="never").detach()
        averager.detach()
        (model[0].weight.sum() * r).backward()
        return parameters, model[1].running_mean.clone(), model[0].weight.grad

    found = gloo(body, range(2))
    equal_on_all_ranks([p for p, _, _ in found])
    assert found[1][1].tolist() == [1.0, 1.0]
    assert found[1][2].tolist() == [[1.0, 1.0]] * 2
    assert found[0][2].tolist() == [[0.0, 0.0]] * 2


@everywhere
def test_join(where):
    """Unequal numbers of batches, with micro-batches: all ranks take the same steps and keep the same parameters."""
    lengths = [5, 2, 4]

    def batch(r, k):
        return torch.full((2, 5), 1.0 + r + 0.1 * k, dtype=torch.double), 1.0 + k

    def body(r, reduction):
        model = made(mlp)
        averager, backward = attach(model, reduction, bucket_mb=SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            for k, (x, w) in enumerate(averager.join(batch(r, k) for k in range(lengths[r]))):
                backward(lambda x=x: model(x).pow(2).mean(), w, reduces=k % 2 == 1)
                if k % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            averager.synchronize()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    def alone(reduction):
        model = made(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            for ks in ((0, 1), (2, 3), (4,)):
                batches = [(r, k) for r in range(3) for k in ks if k < lengths[r]]
                weights = shares(reduction, [(r, 1.0 + k) for r, k in batches])
                optimizer.zero_grad()
                for (r, k), w in zip(batches, weights, strict=True):
                    (w * model(batch(r, k)[0]).pow(2).mean()).backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    reductions = ["mean", "sum", "weighted"]
    found = each(lambda r: [p for reduction in reductions for p in body(r, reduction)], 3, where)
    same(found, [p for reduction in reductions for p in alone(reduction)])


# ── order and overlap ────────────────────────────────────────────────────────────────────────────────────


def test_buckets_follow_the_order_in_which_gradients_come():
    """Sent when the last gradient is accumulated; from the second step on in rank 0's order on all ranks."""

    def body(r):
        model = Branches()
        dc.GradientAverager(model, bucket_mb=8 / 2**20)
        for i, p in enumerate(model.parts):

            def note(_, i=i):
                with torch.profiler.record_function(f"diffcoll.{i}: 0 B"):
                    pass

            p.register_post_accumulate_grad_hook(note)
        events = []
        for _ in range(2):
            a, b, c, d, e = model.parts
            y = (((a * b).sum() * c).sum() * d).sum() * e  # e is accumulated first
            if r == 1:
                y = (((e * b).sum() * d).sum() * c).sum() * a  # a is accumulated first
            names = [name for name, _ in profiled(y.sum().backward)]
            parts = [int(part) for name in names for part in re.findall(r"\(parts\.(\d)\)", name)]
            events.append((list(dict.fromkeys(parts)), names))  # every bucket is started and waited for
        return events

    (first, (order, names)), (first_of_1, (order_of_1, _)) = gloo(body, range(2))
    assert first[0] == first_of_1[0] == [4, 3, 2, 1, 0]  # the first step uses the reverse order of parameters
    assert order == order_of_1 == [int(name) for name in names if name.isdigit()]
    starts = [f"GradientAverager bucket {k} of 5 (parts.{i})" for k, i in enumerate(order[:2])]
    assert names[:4] == [starts[0], str(order[0]), starts[1], str(order[1])]  # each is sent immediately


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["killed", "does not call backward", "alone"])
def test_a_peer_that_does_not_come(how, tmp_path):
    def body(r):
        try:
            step(r)
        finally:
            (tmp_path / str(r)).touch()

    def stay_away():
        while not all((tmp_path / str(r)).exists() for r in (0, 2)):  # until the others have failed
            time.sleep(0.05)

    def step(r):
        group = dist.new_group(timeout=timedelta(seconds=2))
        model = mlp()
        dc.GradientAverager(model, group=group)
        x = torch.ones(2, 5)
        model(x).sum().backward()
        if r == 1 and how == "killed":
            model[0].weight.register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL))
        if r == 1 and how == "does not call backward":
            stay_away()
            return
        if r == 1 and how == "alone":
            torch.ones(1, requires_grad=True).sum().backward()  # nothing of the model
            stay_away()
            return
        model(x).sum().backward()

    with pytest.raises(RanksFailedError) as caught:
        spawn(body, range(3), timeout=40)
    for r in (0, 2):
        text = caught.value.reports[r]
        text = text[text.rindex("CollectiveFailedError") :]
        assert re.match(
            r"CollectiveFailedError: GradientAverager, bucket 0 of 1 \(\d\.\w+ … \d\.\w+, 6 parameters\)", text
        )
        assert f"failed on rank {r} of a gloo group of 3 ranks" in text
        assert "died, hangs, has not called backward, or its loss uses none of" in text
        assert "call backward equally often on all ranks, see join() for unequal numbers" in text


def test_a_backward_left_by_an_error():
    """The others raise when that rank calls the averager again; the next step is right."""

    def body(r):
        model = Branches()
        dc.GradientAverager(model, bucket_mb=8 / 2**20, reduction="sum")
        model([0, 1, 2, 3, 4]).backward()
        model.zero_grad()

        def refuse(g):
            raise KeyError("in a hook")

        if r == 1:
            handle = model.parts[0].register_hook(refuse)
            with pytest.raises(KeyError):
                model([0, 1, 2, 3, 4]).backward()
            handle.remove()
        else:
            with pytest.raises(RuntimeError, match=r"GradientAverager: a rank has left this backward by an error"):
                model([0, 1, 2, 3, 4]).backward()
        model.zero_grad()
        model([0, 1, 2, 3, 4]).backward()
        return gradients(model)

    found = gloo(body, range(2))
    equal_on_all_ranks(found)
    same(found[0], [torch.full((2,), 2.0 * (k + 1)) for k in range(5)])


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("later", [False, True])
@on_two
def test_ranks_that_freeze_different_parameters(where, later, check):
    """An error on all ranks, instead of sums of different parameters."""

    def body(r):
        model = made(mlp)
        dc.GradientAverager(model, bucket_mb=SMALL)
        x = torch.full((1, 5), r + 1.0, dtype=torch.double)
        if later:
            model(x).sum().backward()
        frozen = model[2].bias if r == 1 else model[2].weight
        frozen.requires_grad_(False)
        with dc.check_mode(check):
            text = refused(lambda: model(x).sum().backward(), dc.CollectiveMismatchError)
            frozen.requires_grad_()
            model.zero_grad()
            model(x).sum().backward()  # the group works
        return text, gradients(model)

    found = RUNS[where](body, range(3))
    equal_on_all_ranks([g for _, g in found])
    for text, _ in found:
        first, *of_ranks = text.splitlines()
        assert first.startswith("the ranks of a ")
        for r in range(3):
            assert f"rank {r}: GradientAverager, 5 parameters that are not frozen: " in of_ranks[r]
            assert ("2.weight" in of_ranks[r]) == ("2.bias" not in of_ranks[r]) == (r == 1)
    plain = made(mlp)
    for s in range(3):
        (plain(torch.full((1, 5), s + 1.0, dtype=torch.double)).sum() / 3).backward()
    same(found[0][1], gradients(plain))


def test_one_rank_freezes_a_parameter_after_the_first_reduction():
    def body(r):
        model = made(mlp)
        dc.GradientAverager(model)
        x = torch.full((1, 5), r + 1.0, dtype=torch.double)
        model(x).sum().backward()
        model[2].bias.requires_grad_(r != 1)
        return refused(lambda: model(x).sum().backward(), dc.CollectiveMismatchError)

    for text in rules(body, range(3)):
        assert "rank 0 waits in GradientAverager, bucket 0 of 1 at " in text
        assert "rank 1 waits in GradientAverager, which parameters are frozen at " in text


WRONG = [
    (mlp(), {"reduction": "max"}, ValueError, "reduction: got 'max', expected"),
    (mlp(), {"bucket_mb": 0}, ValueError, "bucket_mb: got 0, expected a number of megabytes"),
    (mlp(), {"bucket_mb": "1"}, ValueError, "bucket_mb: got '1', expected a number"),
    (mlp(), {"group": "gloo"}, TypeError, "group: got str, expected None, a torch"),
    ([], {}, ValueError, "module_or_params: got nothing, expected at least one parameter"),
    (3, {}, TypeError, "module_or_params: got int, expected a module, parameters, or pairs"),
    (torch.ones(2), {}, TypeError, "module_or_params: got Tensor, expected a module, param"),
    ([("a", 3)], {}, TypeError, "module_or_params: got ('a', 3), expected a module"),
    ([torch.ones(2).int()], {}, ValueError, "module_or_params: got 0, which is of"),
    (
        [torch.ones(2, requires_grad=True) * 2],
        {},
        ValueError,
        "module_or_params: got 0, which is not a leaf, expected leaf tensors",
    ),
]
WRONG_WEIGHTS = [
    (-1, "weighted", ValueError, "got -1, expected a finite non-negative number"),
    (float("nan"), "weighted", ValueError, "got nan, expected a finite non-negative number"),
    ("3", "weighted", TypeError, "got str, expected a number or a 0-d tensor"),
    (torch.ones(2), "weighted", ValueError, "got a tensor of (2,)"),
    (3, "mean", ValueError, 'got 3, expected none; say reduction="weighted"'),
]


@pytest.mark.parametrize(("given", "arguments", "error", "text"), WRONG)
def test_wrong_arguments(given, arguments, error, text):
    assert refused(lambda: dc.GradientAverager(given, **arguments), error).startswith(f"GradientAverager: {text}")


@pytest.mark.parametrize(("value", "reduction", "error", "text"), WRONG_WEIGHTS)
def test_wrong_weights(value, reduction, error, text):
    averager = dc.GradientAverager(mlp(), reduction=reduction)
    message = refused(lambda: averager.set_weight(value), error)
    assert message.startswith(f"GradientAverager.set_weight: weight: {text}")


def test_a_graph_of_gradients_and_a_joint_world():
    model = mlp()
    dc.GradientAverager(model)
    with pytest.raises(RuntimeError, match=r"part of a graph \(create_graph=True\).*dc.average_gradients"):
        model(torch.ones(1, 5)).pow(2).sum().backward(create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"GradientAverager: group: got simulated ranks that share one .*, expected ranks"
    ):
        simulate(lambda r: dc.GradientAverager(mlp()), range(2))


def test_in_a_subgroup():
    def body(r):
        pair = new_group([0, 2])
        if r == 1:
            return None
        model = made(mlp)
        dc.GradientAverager(model, group=pair)
        (model(torch.ones(1, 5, dtype=torch.double)).sum() * (r + 1)).backward()
        assert dc.global_mean(float(r), r + 1, group=pair) == 1.5
        return gradients(model)

    model = made(mlp)
    (model(torch.ones(1, 5, dtype=torch.double)).sum() * 2).backward()
    for where in RUNS:
        found = RUNS[where](body, range(3))
        assert found[1] is None
        same(found[0], gradients(model))
        same(found[2], gradients(model))
