"""deterministic=True: sums have the bits of the sum in the order of ranks on one process, on every engine."""

import functools
from functools import partial

import pytest
import torch
from releases import compiles, one_graph
from runs import gloo, refusal, runs_on

import diffcoll as dc
from diffcoll import truth
from diffcoll.core.dtypes import wider
from diffcoll.testing import simulate

RUNS = [*(("rules", n) for n in (1, 2, 3, 5)), ("gloo", 3), ("mpi", 3)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
SHAPES = [(), (1,), (2, 0), (5, 7), (67, 131)]  # the last is above `Engine.small` in every dtype


def hostile(s, shape, dtype, stream=0):
    """Rank s's numbers, of very different sizes, some of which cancel those of the next rank."""
    own = torch.Generator().manual_seed(100 * s + stream)
    x = torch.randn(shape, generator=own, dtype=torch.float64)
    x = x * 10.0 ** torch.randint(-3, 4, shape, generator=own)
    common = torch.Generator().manual_seed(7)
    x = x + (-1) ** s * 1e4 * torch.randint(0, 2, shape, generator=common)
    return (torch.complex(x, x.flip(-1) if x.dim() else -x) if dtype.is_complex else x).to(dtype)


def fold(xs):
    """The sum on one process, in the order of the list; half precisions in float32, rounded once."""
    return functools.reduce(torch.add, [x.to(wider(x.dtype)) for x in xs]).to(xs[0].dtype)


def same(got, expected):
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    bits = [
        torch.empty(t.numel(), dtype=t.dtype).copy_(t.detach().reshape(-1)).view(torch.uint8) for t in (got, expected)
    ]
    assert torch.equal(*bits), (got - expected).abs().max()


def layouts(x):
    """The same numbers, contiguous and not."""
    return [x, x.mT.contiguous().mT] if x.dim() > 1 else [x, torch.stack([x, x], -1)[..., 1]]


def derived(call, r, shape, dtype):
    """y, gradient, gradient of the gradient, for each memory layout; the second with async_op."""
    found = []
    for later, x in enumerate(layouts(hostile(r, shape, dtype))):
        x = x.detach().requires_grad_()
        y = call(x, deterministic=True, async_op=bool(later))
        y = y.wait() if later else y
        gy = hostile(r, tuple(y.shape), dtype, 1).requires_grad_()
        (gx,) = torch.autograd.grad(y, x, gy, create_graph=True)
        (ggy,) = torch.autograd.grad(gx, gy, hostile(r, shape, dtype, 2))
        found += [y.detach(), gx.detach(), ggy]
    return found


def reduced(r, dtype):
    return [t for shape in SHAPES for t in derived(dc.all_reduce, r, shape, dtype)]


def scattered(r, n, dtype):
    """With blocks of different sizes."""
    calls = [(partial(dc.reduce_scatter, dim=1, sizes=sizes), sizes) for sizes in (sizes_of(n, 3), sizes_of(n, 5000))]
    return [t for call, sizes in calls for t in derived(call, r, (2, sum(sizes)), dtype)]


def sizes_of(n, k):
    return [k * (s % 3) for s in range(1, n + 1)]


@pytest.mark.parametrize(("run", "n"), RUNS, indirect=["run"])
def test_every_bit_of_sums_and_of_their_derivatives(run, n):
    found = run(lambda r: [(reduced(r, dtype), scattered(r, n, dtype)) for dtype in DTYPES], range(n))
    for r, of_rank in enumerate(found):
        for dtype, (of_reduced, of_scattered) in zip(DTYPES, of_rank, strict=True):
            results = iter(of_reduced)
            for shape in SHAPES:
                totals = [fold([hostile(s, shape, dtype, stream) for s in range(n)]) for stream in range(3)]
                for total in totals * 2:
                    same(next(results), total)
            results = iter(of_scattered)
            for k in (3, 5000):
                sizes = sizes_of(n, k)
                x, v = (fold([hostile(s, (2, sum(sizes)), dtype, stream) for s in range(n)]) for stream in (0, 2))
                gys = torch.cat([hostile(s, (2, size), dtype, 1) for s, size in enumerate(sizes)], 1)
                for total in (x.split(sizes, 1)[r], gys, v.split(sizes, 1)[r]) * 2:
                    same(next(results), total)


def transformed(r):
    """Trees, fused tensors, ranks that hold zeros, mean, max, transforms, a replicated sum, joint_backward."""
    total = partial(dc.all_reduce, deterministic=True)
    a, b = (hostile(r, (k,), torch.float32, k) for k in (11, 6000))
    zeros = a if r < 2 else torch.zeros(11)
    x = a.clone().requires_grad_()
    largest = total(x, "max")
    (g,) = torch.autograd.grad(largest, x, hostile(r, (11,), torch.float32, 1))
    w, gw = torch.zeros(11, requires_grad=True), torch.zeros(11, requires_grad=True)
    (gx,) = torch.autograd.grad(total(w, grad_placement="replicate"), w, gw, create_graph=True)
    (replicated,) = torch.autograd.grad(gx, gw, a)
    x2 = a.clone().requires_grad_()
    with dc.joint_backward() as joint:
        y = total(x2)
        joint((y * a).sum() if r == 0 else b.sum()).backward()
    return {
        "tree": total({"a": a, "b": b}),
        "fused": total(torch.cat([b, a])),
        "zeros": total(zeros),
        "mean": total(a, "mean"),
        "half": total(a.bfloat16(), "mean"),
        "max": g,
        "jvp": torch.func.jvp(total, (b,), (a[:1] * b,))[1],
        "vmap": torch.func.vmap(total, in_dims=1, out_dims=1)(b.view(60, 100)),
        "replicated": replicated,
        "joint": x2.grad,
        "integers": total(torch.tensor([r, 1 << 40])),
    }


@pytest.mark.parametrize(("run", "n"), RUNS[2:], indirect=["run"])
def test_the_bits_do_not_depend_on_how_tensors_are_sent(run, n):
    as_, bs = ([hostile(s, (k,), torch.float32, k) for s in range(n)] for k in (11, 6000))
    a, b, gy = fold(as_), fold(bs), fold([hostile(s, (11,), torch.float32, 1) for s in range(n)])
    for r, found in enumerate(run(transformed, range(n))):
        same(found["tree"]["a"], a)
        same(found["tree"]["b"], b)
        same(found["fused"], torch.cat([b, a]))
        same(found["zeros"], fold(as_[:2]))
        same(found["mean"], a / n)
        same(found["half"], (fold([x.bfloat16().float() for x in as_]) / n).bfloat16())
        same(found["max"] + 0, gy * (as_[r] == torch.stack(as_).amax(0)) + 0)
        same(found["jvp"], fold([x[:1] * y for x, y in zip(as_, bs, strict=True)]))
        same(found["vmap"], b.view(60, 100))
        same(found["replicated"], a)
        same(found["joint"], as_[0])
        assert found["integers"].tolist() == [n * (n - 1) // 2, n << 40]


@pytest.mark.parametrize("dtype", DTYPES)
def test_joint_simulation(dtype):
    n, shape = 5, (5, 7)
    xs = [hostile(s, shape, dtype).requires_grad_() for s in range(n)]
    gys = [hostile(s, shape, dtype, 1).requires_grad_() for s in range(n)]
    ys = simulate(partial(dc.all_reduce, deterministic=True), xs)
    gxs = torch.autograd.grad(ys, xs, gys, create_graph=True)
    ggys = torch.autograd.grad(gxs, gys, [hostile(s, shape, dtype, 2) for s in range(n)])
    for stream, of_ranks in enumerate((ys, gxs, ggys)):
        for t in of_ranks:
            same(t, fold([hostile(s, shape, dtype, stream) for s in range(n)]))
    ys = simulate(partial(dc.reduce_scatter, sizes=[0, 2, 1, 0, 2], deterministic=True), xs)
    same(torch.cat(ys), fold(xs))
    gxs = torch.autograd.grad(ys, xs, list(gys[0].split([0, 2, 1, 0, 2])), create_graph=True)
    ggys = torch.autograd.grad(gxs, gys[:1], [hostile(s, shape, dtype, 2) for s in range(n)])
    same(gxs[3], gys[0])
    same(ggys[0], fold([hostile(s, shape, dtype, 2) for s in range(n)]))


def test_truth_in_forward_mode():
    xs, ts = ([hostile(s, (4,), torch.float32, k) for s in range(3)] for k in (0, 1))
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(*pair) for pair in zip(xs, ts, strict=True)]
        tangents = [
            torch.autograd.forward_ad.unpack_dual(y).tangent for y in truth.all_reduce(duals, deterministic=True)
        ]
    for t in tangents:
        same(t, fold(ts))


def test_a_plain_sum_has_another_order():
    """Of 1e8, 1 and −1e8, in order 0, gloo's all-reduce makes 0 or 1, which depends on the position."""

    def body(r):
        x = torch.full((3000,), [1e8, 1.0, -1e8][r])
        return set(dc.all_reduce(x).tolist()), set(dc.all_reduce(x, deterministic=True).tolist())

    for plain, ordered in gloo(body, range(3)):
        assert ordered == {0.0}
        assert plain == {0.0, 1.0}


@compiles
@pytest.mark.timeout(200)
def test_compiled():
    def program(x):
        return dc.reduce_scatter(dc.all_reduce(x, deterministic=True), dim=1, deterministic=True)

    def body(r):
        x = hostile(r, (3, 33), torch.float32).requires_grad_()
        y = one_graph(program)(x)
        (g,) = torch.autograd.grad(y, x, hostile(r, (3, 11), torch.float32, 1))
        return y.detach(), g

    x = fold([hostile(s, (3, 33), torch.float32) for s in range(3)])
    g = torch.cat([hostile(s, (3, 11), torch.float32, 1) for s in range(3)], 1)
    for r, (y, gx) in enumerate(gloo(body, range(3), timeout=150)):
        same(y, fold([x] * 3).split(11, 1)[r])
        same(gx, fold([g] * 3))


# ── GradientAverager ─────────────────────────────────────────────────────────────────────────────────────


def averaged(r, reduction, bucket_mb, comm_dtype=None):
    """Gradients of parameters of different sizes: this rank's data are their own gradients."""
    parameters = [torch.nn.Parameter(torch.zeros(k)) for k in (3, 700, 50, 9000)]
    averager = dc.GradientAverager(
        parameters, reduction=reduction, bucket_mb=bucket_mb, comm_dtype=comm_dtype, deterministic=True
    )
    found = []
    for step in range(2):  # the second in buckets of another order
        if reduction == "weighted":
            averager.set_weight(r + 1.0)
        sum((p * hostile(r, p.shape, torch.float32, step)).sum() for p in parameters).backward()
        found += [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
    return found


HOW = [("sum", None), ("mean", None), ("weighted", None), ("sum", torch.bfloat16)]


@runs_on("rules", "gloo", "mpi")
def test_averaged_gradients_do_not_depend_on_buckets(run):
    n = 3
    scale = {"sum": lambda g, s: g, "mean": lambda g, s: g * (1 / n), "weighted": lambda g, s: g * (s + 1.0)}

    def expected(reduction, comm_dtype, k, step):
        gs = [scale[reduction](hostile(s, (k,), torch.float32, step), s).to(comm_dtype) for s in range(n)]
        return (fold(gs) / (6.0 if reduction == "weighted" else 1.0)).float()

    for bodies in run(lambda r: [[averaged(r, a, mb, b) for mb in (1e-4, 25)] for a, b in HOW], range(n)):
        for (reduction, dtype), (small, large) in zip(HOW, bodies, strict=True):
            keys = [(k, step) for step in range(2) for k in (3, 700, 50, 9000)]
            for a, b, key in zip(small, large, keys, strict=True):
                same(a, b)
                same(a, expected(reduction, dtype or torch.float32, *key))


def test_arguments_of_the_averager():
    p = torch.nn.Parameter(torch.zeros(2))
    assert (
        refusal(TypeError, dc.GradientAverager, [p], deterministic=1)
        == "GradientAverager: deterministic: got int, expected True or False"
    )
    with pytest.raises(ValueError, match="deterministic: got True with a comm_hook, expected False, since the hook"):
        dc.GradientAverager([p], deterministic=True, comm_hook=lambda bucket: bucket.row)

    def body(r):
        return refusal(
            dc.CollectiveMismatchError, dc.GradientAverager, [torch.nn.Parameter(torch.zeros(2))], deterministic=r == 1
        )

    assert all("rank 0: deterministic=False\n  rank 1: deterministic=True" in text for text in gloo(body, range(2)))


@runs_on("rules", "gloo")
def test_the_gradient_of_a_mean_is_the_ordered_sum_divided(run):
    def body(r):
        generator = torch.Generator().manual_seed(r)
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            x, gy = torch.randn(2, 1000, generator=generator).to(dtype)
            y = dc.all_reduce(x.requires_grad_(), "mean", deterministic=True)
            found += [x.detach(), y.detach(), gy, *torch.autograd.grad(y, x, gy)]
        return found

    of_ranks = run(body, range(3))
    for k in range(0, 8, 2):
        right = (fold([found[k].float() for found in of_ranks]) / 3).to(of_ranks[0][k].dtype)
        assert all(torch.equal(found[k + 1], right) for found in of_ranks)
