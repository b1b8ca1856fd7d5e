"""GradientAverager: gradients equal those of one process with the whole batch, bitwise the same on all ranks."""

import pytest
import torch
from runs import gloo, new_group, profiled
from torch import nn
from training import SMALL, data, each, equal_on_all_ranks, everywhere, gradients, made, mlp, same, summed_loss

import diffcoll as dc


def convolution():
    """With a collective in the model."""
    norm = dc.nn.SyncBatchNorm(4)
    return nn.Sequential(nn.Conv2d(1, 4, 2), norm, nn.Tanh(), nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(8, 3))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.layer(self.embed(x))).mean(1)


MODELS = {"mlp": (mlp, (5,)), "convolution": (convolution, (1, 3, 3)), "transformer": (Transformer, (4, 3))}
ON = [(name, n, where) for name in MODELS for n, where in ((1, "rules"), (2, "rules"), (3, "rules"), (3, "gloo"))]
ON += [("convolution", 2, "mpi"), ("mlp", 3, "mpi")]


@pytest.mark.parametrize(("name", "n", "run"), ON, indirect=["run"])
def test_one_process_on_the_whole_batch(name, n, run):
    """Three training steps on uneven and empty batches: sums of losses, means, counts, micro-batches."""
    make, shape = MODELS[name]
    parts = data(n, shape)

    def reference():
        model = made(make)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, t = map(torch.cat, zip(*parts, strict=True))
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), t).backward()
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
    found = run(lambda r: [trained(how, r) for how in ways], range(n))
    for k in range(len(ways)):
        equal_on_all_ranks([of_rank[k] for of_rank in found])
        same(found[0][k], expected, 1e-10)


@pytest.mark.parametrize("n", [2, 3])
def test_torchs_own(n):
    """The same gradients as DistributedDataParallel, bitwise the same on all ranks."""

    def body(r):
        ((x, t),) = data(1, (4, 3), seed=r)
        ours, theirs = made(Transformer), made(Transformer)
        averager = dc.GradientAverager(ours, bucket_mb=SMALL)
        ddp = nn.parallel.DistributedDataParallel(theirs)
        for _ in range(3):
            ours.zero_grad()
            theirs.zero_grad()
            averager.backward(nn.functional.cross_entropy(ours(x), t))
            nn.functional.cross_entropy(ddp(x), t).backward()
        return gradients(ours), gradients(theirs)

    found = gloo(body, range(n))
    equal_on_all_ranks([ours for ours, _ in found])
    for ours, theirs in found:
        same(ours, theirs, 1e-14)


@everywhere
def test_collectives_in_the_loss_and_ranks_that_use_different_parameters(run):
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

    same(each(body, 2, run), alone(), 1e-9)


def test_parameters_that_are_unfrozen_and_frozen_later():
    """A first gradient is a message of its own, and in a bucket from then on; a frozen parameter keeps its gradient."""

    def body(r):
        p, unfrozen, frozen = parts = [nn.Parameter(torch.full((2,), r + 2.0)) for _ in range(3)]
        unfrozen.requires_grad_(False)
        averager = dc.GradientAverager(parts, broadcast=False)
        averager.backward(p.sum())  # after which the order is that of rank 0
        unfrozen.requires_grad_(True)
        frozen.grad = frozen.detach().clone()
        frozen.requires_grad_(False)
        found = []
        for _ in range(2):
            p.grad = unfrozen.grad = None
            messages = " ".join(name for name, _ in profiled(lambda: averager.backward((p * unfrozen).sum())))
            found.append(("late gradients" in messages, unfrozen.grad.tolist()))
            assert torch.equal(frozen.grad, frozen)
        return found

    assert gloo(body, range(2)) == [[(True, [2.5, 2.5]), (False, [2.5, 2.5])]] * 2


# ── dtypes and layouts ───────────────────────────────────────────────────────────────────────────────────


@everywhere
def test_mixed_dtypes(run):
    """Several dtypes in one model, complex ones included, with counts that half precision cannot represent."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.float16]
    factors = [1 - 2j if dtype.is_complex else 1 for dtype in dtypes]
    counts, numbers = [1001.0, 3.0], torch.tensor([1.0, 2.0, 3.0])
    ways = [(count, comm) for count in (False, True) for comm in (None, torch.float32, torch.bfloat16, torch.float64)]

    def one(r, has_count, comm):
        parameters = [torch.ones(3, dtype=dtype, requires_grad=True) for dtype in dtypes]
        averager = dc.GradientAverager(parameters, comm_dtype=comm)
        coefficients = (numbers + r) * (counts[r] if has_count else 1)
        for _ in range(2):
            for p in parameters:
                p.grad = None
            terms = (p * coefficients.to(p.dtype) * factor for p, factor in zip(parameters, factors, strict=True))
            loss = sum(term.real.sum().double() for term in terms)
            averager.backward(loss, count=counts[r] if has_count else None)
        return [p.grad for p in parameters]

    found = each(lambda r: [g for way in ways for g in one(r, *way)], 2, run)
    for k, (has_count, comm) in enumerate(ways):
        share = counts[1] / sum(counts) if has_count else 0.5
        for g, dtype, factor in zip(found[k * len(dtypes) :], dtypes, factors, strict=False):
            assert g.dtype == dtype
            expected = (numbers.double() + share) * factor.conjugate()
            lowest = max((comm or dtype).to_real(), dtype.to_real(), key=lambda d: torch.finfo(d).eps)
            error = ((g.to(expected.dtype) - expected).abs() / expected.abs()).max()
            assert error <= 3 * torch.finfo(lowest).eps, (has_count, comm, dtype, error)


@pytest.mark.parametrize(
    ("dtype", "comm_dtype", "values", "counts", "mean"),
    [
        (torch.float16, None, [57600.0, 64000.0], [None] * 2, 60800.0),  # their sum is no number of this dtype
        (torch.float32, torch.bfloat16, [1 + 2**-10] * 2, [None] * 2, 1.0),  # nor is what is sent
        (torch.float16, torch.float32, [2**-24] * 2, [None] * 2, 2**-24),  # nor are halves of these
        (torch.bfloat16, None, [0.0, 1.0], [258, 1], 1 / 259),  # nor are the counts
    ],
)
def test_a_mean_in_the_dtype_in_which_it_is_sent(dtype, comm_dtype, values, counts, mean):
    def body(r):
        p = torch.ones(2, dtype=dtype, requires_grad=True)
        dc.GradientAverager([p], comm_dtype=comm_dtype).backward((p * values[r]).sum(), count=counts[r])
        return [p.grad]

    same(each(body, 2, gloo), [torch.full((2,), mean, dtype=dtype)], 0)


@pytest.mark.parametrize("size", [3, 200])
def test_gradients_in_other_layouts(size):
    """In one bucket: expanded, complex and empty ones; transposed and channels-last parameters keep their layout.

    All lie at addresses that vectorized kernels expect, with zeros between them.
    """

    def layouts(r):
        x = torch.arange(float(size * size)).view(size, size) + r
        image = x.expand(2, 3, size, size).contiguous(memory_format=torch.channels_last)
        return [x.t().contiguous().t(), x[:1].expand(size, size), x * (1 + 2j), x, torch.zeros(0), image]

    def body(r):
        parameters = [nn.Parameter(torch.ones(g.shape, dtype=g.dtype)) for g in layouts(r)]
        for i in (0, -1):
            parameters[i].data = torch.ones_like(layouts(r)[i])
        for i, p in enumerate(parameters):
            p.register_post_accumulate_grad_hook(lambda p, i=i: setattr(p, "grad", layouts(r)[i]))
        torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
        averager = dc.GradientAverager(parameters)
        for _ in range(2):
            for p in parameters:
                p.grad = None
            averager.backward(sum(p.abs().sum() for p in parameters))
        torch.use_deterministic_algorithms(False)
        assert p.grad.is_contiguous(memory_format=torch.channels_last) and not parameters[0].grad.is_contiguous()
        for p in parameters:
            bucket = torch.empty(0, dtype=p.dtype).set_(p.grad.untyped_storage())
            assert p.grad.data_ptr() % 16 == 0 and bucket.isfinite().all()
        return [p.grad for p in parameters]

    same(each(body, 4), layouts(1.5), 0)


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

        if what != "model":
            step = torch.compile(step, backend="aot_eager" if what == "step" else "eager")
        batches = [torch.full((2, 5), s + 1.0, dtype=torch.double) for s in range(2)]
        with dynamo.config.patch(compiled_autograd=what == "compiled autograd"):
            for _ in range(3):
                model.zero_grad()
                step(batches[r])
        plain(torch.cat(batches)).sum().div(2).backward()
        same(gradients(model), gradients(plain))
        return gradients(model)

    each(body, 2, gloo)


@everywhere
def test_in_a_subgroup(run):
    def body(r):
        pair = new_group([0, 2])
        if r == 1:
            return None
        model = made(seed=r)
        averager = dc.GradientAverager(model, group=pair)
        assert averager.group is pair
        averager.backward(model(torch.ones(1, 5, dtype=torch.double)).sum() * (r + 1))
        assert dc.global_mean(float(r), r + 1, group=pair) == 1.5
        assert [*dc.in_step(range(r), empty=-1, group=pair)] == ([0, 1] if r else [-1, -1])
        return gradients(model)

    model = made()
    (model(torch.ones(1, 5, dtype=torch.double)).sum() * 2).backward()
    first, nothing, last = run(body, range(3))
    assert nothing is None
    for found in (first, last):
        same(found, gradients(model))


def test_buckets_are_sent_while_backward_runs_in_the_order_of_rank_0():
    """From the second block on; in the first, in reverse order of the parameters."""

    def body(r):
        parts = [nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(5)]
        averager = dc.GradientAverager(parts, bucket_mb=16 / 2**20)  # one of them, padded
        orders = []
        for _ in range(2):
            for p in parts:
                p.grad = None
            a, b, c, d, e = parts
            y = (((e * b).sum() * d).sum() * c).sum() * a  # a is accumulated first
            if r == 1:
                y = (((a * b).sum() * c).sum() * d).sum() * e  # e is accumulated first

            def step(y=y):
                with averager.reduce():
                    y.sum().backward()
                    with torch.profiler.record_function("diffcoll.end of backward"):
                        pass

            names = [name for name, _ in profiled(step)]
            sent = names[: names.index("end of backward")]
            orders.append([name.split("(")[1][0] for name in sent if "bucket" in name])
        return orders

    for first, second in gloo(body, range(2)):
        assert first == list("4321")
        assert second[:3] == list("023")
