"""GradientAverager: gradients equal those of one process with the whole batch, bitwise the same on all ranks."""

import contextlib

import pytest
import torch
from runs import gloo, new_group, profiled
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import (
    RUNS,
    SMALL,
    cross_entropy,
    data,
    each,
    equal,
    equal_on_all_ranks,
    everywhere,
    gradients,
    made,
    mlp,
    on_two,
    same,
    summed_loss,
    whole,
)

import diffcoll as dc
from diffcoll.engines.simulated.engine import LocalEngine


class Norm(nn.Module):
    """Batch norm over all ranks, by two sums."""

    def forward(self, x):
        dims = [0, 2, 3]
        count = dc.all_reduce(torch.tensor(float(x.shape[0] * x.shape[2] * x.shape[3]), dtype=x.dtype))
        mean = dc.all_reduce(x.sum(dims, keepdim=True)) / count
        variance = dc.all_reduce(((x - mean) ** 2).sum(dims, keepdim=True)) / count
        return (x - mean) * (variance + 1e-5).rsqrt()


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
ON_ONE = [(name, n, where) for name in MODELS for n, where in ((1, "rules"), (2, "rules"), (3, "rules"), (3, "gloo"))]


@pytest.mark.parametrize(("name", "n", "where"), [*ON_ONE, ("convolution", 2, "mpi"), ("mlp", 3, "mpi")])
def test_one_process_on_the_whole_batch(name, n, where):
    """Three training steps on uneven and empty batches: sums of losses, means, counts, micro-batches."""
    make, shape = MODELS[name]
    parts = data(n, shape)

    def reference():
        model = made(make)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, t = whole(n, shape)
        for _ in range(3):
            optimizer.zero_grad()
            cross_entropy(model(x), t).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    def trained(how, r):
        model = made(make, seed=r)  # rank 0's parameters are broadcast
        averager = dc.GradientAverager(model, bucket_mb=SMALL, reduction="sum" if how == "sum" else "mean")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, t = parts[r]
        for _ in range(3):
            optimizer.zero_grad(set_to_none=r != 1)
            loss = summed_loss(model(x), t)
            if how == "micro-batches":
                model.zero_grad()
                for start in range(0, len(t), 2):  # their numbers differ
                    summed_loss(model(x[start : start + 2]), t[start : start + 2]).backward()
                with averager.reduce(count=len(t)):
                    pass
            elif how == "count":
                averager.backward(loss, count=torch.tensor(len(t)) if r else len(t))
            else:
                averager.backward(loss / 7 * (n if how == "mean" else 1))
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    expected = reference()
    ways = ["sum", "mean", "count", *["micro-batches"] * (name != "convolution")]
    found = RUNS[where](lambda r: [trained(how, r) for how in ways], range(n))
    for k in range(len(ways)):
        equal_on_all_ranks([of_rank[k] for of_rank in found])
        same(found[0][k], expected, 1e-10)


@pytest.mark.parametrize("n", [2, 3])
def test_torchs_own(n):
    """The same gradients as DistributedDataParallel, bitwise the same on all ranks."""

    def body(r):
        x, t = data(n, (4, 3))[r]
        t = t if len(t) else torch.tensor([1])
        x = x if len(x) else torch.ones(1, 4, 3, dtype=torch.double)
        ours, theirs = made(Transformer), made(Transformer)
        averager = dc.GradientAverager(ours, bucket_mb=SMALL)
        ddp = nn.parallel.DistributedDataParallel(theirs)
        for _ in range(3):
            ours.zero_grad()
            theirs.zero_grad()
            averager.backward(cross_entropy(ours(x), t))
            cross_entropy(ddp(x), t).backward()
        return gradients(ours), gradients(theirs)

    found = gloo(body, range(n))
    equal_on_all_ranks([ours for ours, _ in found])
    for ours, theirs in found:
        same(ours, theirs, 1e-14)


@everywhere
def test_collectives_in_the_loss_and_ranks_that_use_different_parameters(where):
    """Messages of buckets and of the loss do not match each other, whatever their order on each rank."""

    def body(r):
        parts = [nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.double)) for _ in range(5)]
        averager = dc.GradientAverager(parts, bucket_mb=16 / 2**20, reduction="sum")
        for _ in range(4):
            for p in parts:
                p.grad = None
            a, b, c, d, e = parts
            y = dc.all_reduce(a * a + (b if r == 0 else d * c))  # the gradient of c comes before y's on one rank
            z = dc.all_gather((y * c).sum() if r == 0 else (y + e).sum())
            averager.backward((r + 2) * z.sum() ** 2)
        return [p.grad for p in parts]

    def alone():
        a, b, c, d, e = parts = [torch.tensor([1.0, 2.0], dtype=torch.double, requires_grad=True) for _ in range(5)]
        y = 2 * a * a + b + d * c
        z = (y * c).sum() + (y + e).sum()
        return torch.autograd.grad(5 * z**2, parts)

    same(each(body, 2, where), alone(), 1e-9)


@on_two
def test_two_averagers_at_once(where):
    """A step of the generator, whose loss also gives gradients to the discriminator; then one of both."""

    def body(r):
        maker, judge = made(seed=1), made(lambda: nn.Linear(3, 1), seed=2)
        of_maker, of_judge = dc.GradientAverager(maker, bucket_mb=SMALL), dc.GradientAverager(judge)
        optimizer = torch.optim.SGD(maker.parameters(), lr=0.1)
        xs = [data(2)[s][0] for s in range(2) if r in (s, None)]

        def loss():
            return sum(judge(maker(x)).tanh().mean() for x in xs) / len(xs)

        of_maker.backward(loss())
        optimizer.step()
        maker.zero_grad()
        judge.zero_grad()
        with of_maker.reduce(), of_judge.reduce():
            loss().backward()
        return gradients(maker) + gradients(judge)

    same(each(body, 2, where), body(None))


@everywhere
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(where, reentrant):
    """The second one shares its layer with the first: its gradient comes after the bucket may have been sent."""

    def body(r):
        model = made(lambda: nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(3)]))
        averager = dc.GradientAverager(model, bucket_mb=1e-6, reduction="sum")

        def again(k, x):
            return checkpoint(model[k], x, use_reentrant=reentrant)

        for _ in range(3):
            model.zero_grad()
            losses = []
            for s in range(2) if r is None else [r]:
                x = torch.full((1, 2), s + 1.0, dtype=torch.double, requires_grad=True)
                losses += [model[2](again(0, again(1, x))).sum(), (model[2](again(0, x)) + model[2](x)).square().sum()]
            averager.backward(sum(losses))
        return gradients(model)

    same(each(body, 2, where), body(None), 1e-9)


@on_two
def test_unused_frozen_and_unfrozen_parameters(where):
    """Zeros from ranks that do not use one, None if no rank does; freezing needs no agreement."""
    steps = [[[0, 1], [1, 3]], [[3], [4, 0]], [[0, 1, 2, 3, 4], [2]], [[1], []], [[], []]]

    def body(r):
        parts = [nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(5)]
        parts[4].requires_grad_(False)  # unfrozen later: its gradients are late, and have a place from then on
        averager = dc.GradientAverager(parts, bucket_mb=8 / 2**20, reduction="sum")
        found = []
        for k, step in enumerate(steps):
            for p in parts:
                p.grad = None
            parts[4].requires_grad_(k >= 1)
            parts[3].requires_grad_(not (k == 2 and r == 0))
            used = [((k + 1) * (i + 1) * parts[i]).sum() for i in step[r]]
            with averager.reduce():
                if any(y.requires_grad for y in used):
                    sum(used).backward()
            found += [p.grad for p in parts]
        return found

    found = each(body, 2, where)
    for k, step in enumerate(steps):
        for i, grad in enumerate(found[5 * k : 5 * k + 5]):
            count = sum(i in of_rank for of_rank in step) - ((k, i) == (2, 3))
            expected = torch.full((2,), float(count * (k + 1) * (i + 1)))
            assert grad is None if not count or (k, i) == (0, 4) else torch.equal(grad, expected), (k, i)


def test_an_unfrozen_parameter_gets_a_place():
    """Its first gradient is a message of its own; from then on it is in a bucket."""

    def body(r):
        p, q = (nn.Parameter(torch.ones(2)) for _ in range(2))
        q.requires_grad_(False)
        averager = dc.GradientAverager([p, q])
        q.requires_grad_(True)
        names = [" ".join(name for name, _ in profiled(lambda: averager.backward((p * q).sum()))) for _ in range(2)]
        return ["late gradients" in each for each in names]

    assert gloo(body, range(2)) == [[True, False]] * 2


# ── dtypes and layouts ───────────────────────────────────────────────────────────────────────────────────


@everywhere
def test_mixed_dtypes(where):
    """Several dtypes in one model, complex ones included, with counts that half precision cannot represent."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.float16]
    counts = [1001.0, 3.0]
    ways = [(count, comm) for count in (False, True) for comm in (None, torch.float32, torch.bfloat16, torch.float64)]

    def one(r, has_count, comm):
        parameters = [(f"p{i}", torch.ones(3, dtype=d, requires_grad=True)) for i, d in enumerate(dtypes)]
        averager = dc.GradientAverager(parameters, comm_dtype=comm)
        for _ in range(2):
            for _, p in parameters:
                p.grad = None
            coefficients = (torch.tensor([1.0, 2.0, 3.0]) + r) * (counts[r] if has_count else 1)
            losses = [(p * coefficients.to(p.dtype) * (1 - 2j if p.is_complex() else 1)) for _, p in parameters]
            loss = sum(y.real.sum().double() if y.is_complex() else y.sum().double() for y in losses)
            averager.backward(loss, count=counts[r] if has_count else None)
        return [p.grad for _, p in parameters]

    found = each(lambda r: [g for way in ways for g in one(r, *way)], 2, where)
    for k, (has_count, comm) in enumerate(ways):
        share = counts[1] / sum(counts) if has_count else 0.5
        for g, dtype in zip(found[k * len(dtypes) :], dtypes, strict=False):
            assert g.dtype == dtype
            lowest = max((comm or dtype).to_real(), dtype.to_real(), key=lambda d: torch.finfo(d).eps)
            expected = torch.tensor([1.0, 2.0, 3.0], dtype=torch.double) + share
            expected = expected * (1 + 2j) if dtype.is_complex else expected
            error = ((g.to(expected.dtype) - expected).abs() / expected.abs()).max()
            assert error <= 3 * torch.finfo(lowest).eps, (has_count, comm, dtype, error)


@pytest.mark.parametrize(
    ("dtype", "comm_dtype", "values", "mean"),
    [
        (torch.float16, None, [57600.0, 64000.0], 60800.0),  # their sum is no number of this dtype
        (torch.float32, torch.bfloat16, [1 + 2**-10, 1 + 2**-10], 1.0),  # nor is what is sent
        (torch.float16, torch.float32, [2**-24, 2**-24], 2**-24),  # nor are halves of these
    ],
)
def test_a_mean_in_the_dtype_in_which_it_is_sent(dtype, comm_dtype, values, mean):
    def body(r):
        p = torch.ones(2, dtype=dtype, requires_grad=True)
        dc.GradientAverager([p], comm_dtype=comm_dtype).backward((p * values[r]).sum())
        return [p.grad]

    equal(each(body, 2, "gloo"), [torch.full((2,), mean, dtype=dtype)])


def test_half_precision_alone_and_channels_last():
    """A count that half precision does not know; the gradient has the layout of the parameter."""

    def body(r):
        model = nn.Conv2d(4, 6, 3).bfloat16().to(memory_format=torch.channels_last)
        averager = dc.GradientAverager(model)
        averager.backward(model.weight.sum().mul(r), count=258 if r == 0 else 1)
        assert model.weight.grad.is_contiguous(memory_format=torch.channels_last) and model.bias.grad is None
        return [model.weight.grad]

    (g,) = each(body, 2, "gloo")
    assert torch.equal(g, torch.full_like(g, 1 / 259))


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
        averager = dc.GradientAverager(parameters)
        for _ in range(2):
            for p in parameters:
                p.grad = None
            averager.backward(sum(p.abs().sum() for p in parameters))
        return [p.grad for p in parameters]

    values = torch.arange(size * size).view(size, size) + 1.5
    expected = [values, values[:1].expand(size, size), values * (1 + 2j), values, torch.zeros(0)]
    for found in RUNS["rules"](body, range(4)):
        equal(found, expected)


# ── how it is run ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("what", ["model", "step", "compiled autograd"])
def test_compiled(what):
    """A compiled model; a compiled function with the block in it, which is not traced; compiled autograd."""

    def body(r):
        from torch import _dynamo as dynamo

        model, plain = made(), made()
        averager = dc.GradientAverager(model, bucket_mb=SMALL)
        call = torch.compile(model, backend="aot_eager") if what == "model" else model

        def step(x):
            averager.backward(call(x).sum())

        step = torch.compile(step, backend="aot_eager") if what == "step" else step
        with contextlib.ExitStack() as stack:
            if what == "compiled autograd":
                stack.enter_context(dynamo.config.patch(compiled_autograd=True))
                step = torch.compile(step, backend="eager")
            for _ in range(3):
                model.zero_grad()
                step(torch.full((2, 5), r + 1.0, dtype=torch.double))
        for s in range(2):
            (plain(torch.full((2, 5), s + 1.0, dtype=torch.double)).sum() / 2).backward()
        same(gradients(model), gradients(plain))
        return gradients(model)

    each(body, 2, "gloo")


@everywhere
def test_in_a_subgroup(where):
    def body(r):
        pair = new_group([0, 2])
        if r == 1:
            return None
        model = made(seed=r)
        averager = dc.GradientAverager(model, group=pair)
        assert averager.group is pair
        averager.backward(model(torch.ones(1, 5, dtype=torch.double)).sum() * (r + 1))
        assert dc.global_mean(float(r), r + 1, group=pair) == 1.5
        return gradients(model)

    model = made()
    (model(torch.ones(1, 5, dtype=torch.double)).sum() * 2).backward()
    found = RUNS[where](body, range(3))
    assert found[1] is None
    same(found[0], gradients(model))
    same(found[2], gradients(model))


@pytest.mark.parametrize("where", ["gloo", "rules"])
def test_buckets_are_sent_while_backward_runs_in_the_order_of_rank_0(where, monkeypatch):
    """From the second block on; in the first, in reverse order of the parameters."""
    monkeypatch.setattr(LocalEngine, "overlaps", lambda self, x: True)

    def body(r):
        parts = [nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(5)]
        averager = dc.GradientAverager(parts, bucket_mb=8 / 2**20)
        orders = []
        for _ in range(2):
            for p in parts:
                p.grad = None
            a, b, c, d, e = parts
            y = (((e * b).sum() * d).sum() * c).sum() * a  # a is accumulated first
            if r == 1:
                y = (((a * b).sum() * c).sum() * d).sum() * e  # e is accumulated first
            with averager.reduce():
                names = [name for name, _ in profiled(y.sum().backward)]
            orders.append([name.split("(")[1][0] for name in names if "bucket" in name])
        return orders

    for first, second in RUNS[where](body, range(2)):
        assert first == list("4321")
        assert second[:3] == list("023")
