"""Reductions that are not linear, on results computed by hand, and on numbers for which naive rules fail."""

import math
import random
import re
from fractions import Fraction
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import gloo, mpi, rules, runs_on
from torch.autograd import forward_ad

import diffcoll as dc
from benchmarks import bench
from diffcoll.core.product import product
from diffcoll.core.reductions import REDUCTIONS
from diffcoll.engines.local import LocalEngine
from diffcoll.testing import cases, simulate

INF, NAN = math.inf, math.nan
FLOATS = [torch.float32, torch.float64, torch.complex64, torch.complex128]
XS, WS = [3.0, 5.0], [1.0, 10.0]


def weighted(op, **more):
    return lambda x, w: w * dc.all_reduce(x, op, **more).sum()


def on_ranks(body, *per_rank):
    """Check that simulated ranks, by parts and by whole stacks, and gloo agree; return the result."""
    found = [rules(body, *per_rank), gloo(body, *per_rank)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalEngine, "small", lambda engine, device: 1 << 20)
        found.append(rules(body, *per_rank))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], equal_nan=True)
    return found[0]


def gradients_of(op, xs, ws=None, **more):
    def body(x, w):
        x = x.clone().requires_grad_()
        y = dc.all_reduce(x, op, **more)
        (w * y).sum().real.backward(inputs=[x])
        return y.detach(), x.grad

    xs = [x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float64) for x in xs]
    ys, gs = zip(*on_ranks(body, xs, ws or [1.0] + [0.0] * (len(xs) - 1)), strict=True)
    for y in ys[1:]:
        torch.testing.assert_close(y, ys[0], rtol=0, atol=0, equal_nan=True)
    return ys[0].tolist(), [g.tolist() for g in gs]


SHARE = 1 / (1 + math.exp(2))  # of the smaller of XS in Σ exp x


@pytest.mark.parametrize(
    ("op", "expected"),
    [("max", (0, 11)), ("min", (11, 0)), ("product", (55, 33)), ("logsumexp", (11 * SHARE, 11 * (1 - SHARE)))],
)
def test_two_numbers(gradients, op, expected):
    assert tuple(gradients(weighted(op), XS, WS)) == pytest.approx(expected, rel=1e-12, abs=0)


def test_a_function(gradients):
    # the median of three, of each position independently
    xs = [[1.0, 9.0], [2.0, 8.0], [3.0, 1.0]]
    for op in (cases.median, dc.elementwise(cases.median)):
        assert gradients(weighted(op), xs, [1.0, 10.0, 100.0]) == [[0, 0], [111, 111], [0, 0]]


def test_a_function_of_whole_tensors(gradients):
    # the tensor of the largest norm, which depends on all positions
    def largest(s):
        return s[s.norm(dim=1).argmax()]

    xs = [[1.0, 9.0], [2.0, 8.0], [9.0, 3.0]]
    assert gradients(weighted(largest), xs, [1.0, 10.0, 100.0]) == [[0, 0], [0, 0], [111, 111]]


@pytest.mark.parametrize("zeros", range(4))
def test_product_with_zeros(gradients, zeros):
    xs = [[0.0 if k < zeros else k + 2.0] for k in range(3)]
    others = [math.prod(x[0] for j, x in enumerate(xs) if j != k) for k in range(3)]
    assert gradients(weighted("product"), xs, [1.0, 10.0, 100.0]) == [[111 * o] for o in others]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 40, 100])
def test_products_have_exact_gradients_where_they_can_be_represented(n):
    generator = torch.Generator().manual_seed(n)
    exponents = torch.randint(-900, 900, (n, 50), generator=generator).double()
    mantissas = torch.rand(n, 50, generator=generator, dtype=torch.float64) + 0.5
    s = (mantissas * (exponents * 0.5).exp2() * (exponents * 0.5).exp2()).requires_grad_()
    y = product(s)
    (g,) = torch.autograd.grad(y.sum(), s)

    def exact(rows):
        """Products in (mantissa, exponent) form; Python's exponents are unbounded."""
        found = []
        for column in rows.T.tolist():
            m, e = 1.0, 0
            for value in column:
                m, d = math.frexp(m * math.frexp(value)[0])
                e += d + math.frexp(value)[1]
            found.append(INF if e > 1024 else math.ldexp(m, e) if e > -1021 else NAN)
        return torch.tensor(found, dtype=torch.float64)

    compared = 0
    for expected, got in [(exact(s.detach()), y)] + [
        (exact(torch.cat([s[:k], s[k + 1 :]]).detach()), g[k]) for k in range(n) if n > 1
    ]:
        sure = ~expected.isnan()  # rounding differs below the normal numbers
        torch.testing.assert_close(got[sure].abs(), expected[sure].abs(), rtol=1e-12, atol=0)
        compared += int(sure.sum())
    assert compared > 10 * n


def test_products_beyond_the_range():
    # y or a partial product overflows or underflows; no gradient does
    assert gradients_of("product", [1e200, 1e200]) == (INF, [1e200, 1e200])
    assert gradients_of("product", [1e-200, 1e-200, 1e-100]) == (0, pytest.approx([1e-300, 1e-300, 0], rel=1e-14))
    y, g = gradients_of("product", [1e200, 1e200, 1e-200, 1e-200])
    assert [y, *g] == pytest.approx([1, 1e-200, 1e-200, 1e200, 1e200], rel=1e-14)
    y, g = gradients_of("product", [torch.tensor(v) for v in (1e30, 1e30, 1e-30, 1e-30)])
    assert [y, *g] == pytest.approx([1, 1e-30, 1e-30, 1e30, 1e30], rel=1e-6)
    y, g = gradients_of("product", [5e-324, 2.0, 0.0])
    assert (y, g) == (0, [0, 0, 1e-323])


def test_product_of_complex_numbers(gradients):
    xs = [[1 + 2j, 0j], [3 - 1j, 2 + 0j], [0.5j, 1 + 1j]]

    def body(x, w):
        x = torch.tensor(x, requires_grad=True)
        (w * dc.all_reduce(x, "product")).sum().real.backward()
        return x.grad

    got = on_ranks(body, xs, [1.0, 10.0, 100.0])
    for k, g in enumerate(got):
        others = [math.prod(x[p] for j, x in enumerate(xs) if j != k) for p in (0, 1)]
        torch.testing.assert_close(g, 111 * torch.tensor(others, dtype=g.dtype).conj().resolve_conj())


def exact_product(factors):
    """Return real and imaginary part of a product of complex numbers, as fractions."""
    re, im = Fraction(1), Fraction(0)
    for z in factors:
        a, b = Fraction(z.real), Fraction(z.imag)
        re, im = re * a - im * b, re * b + im * a
    return re, im


def assert_near(got, exact, dtype, factors):
    """The error is relative to the larger part of the number, not to its smaller part; overflow must give infinity."""
    parts = torch.finfo(dtype)
    largest = max(abs(part) for part in exact)
    error = largest * Fraction(parts.eps) * 4 * (factors + 1) + Fraction(parts.smallest_normal) * Fraction(parts.eps)
    for value, right in zip((got.real, got.imag), exact, strict=True):
        if abs(right) - error > parts.max:
            assert value == (INF if right > 0 else -INF)
        elif abs(right) + error < parts.max:
            assert abs(Fraction(value) - right) <= error, (got, exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FLOATS], ids=str)
def test_products_of_extreme_numbers(dtype):
    """A product, and each product of all factors but one, is right if it is representable."""
    real = torch.empty((), dtype=dtype).real.dtype
    limits = torch.finfo(real)
    low, high = math.log2(limits.smallest_normal) + math.log2(limits.eps), math.log2(limits.max)
    sizes = st.floats(low, high) | st.sampled_from([low, low + 1, high, -high, 0.0])
    one = st.builds(lambda e, m: m * 2.0 ** min(e, high - 1), sizes, st.sampled_from([-1.9375, -1.0, 1.0, 1.25]))
    one = one | st.sampled_from([0.0, float(limits.max), -float(limits.max), float(limits.smallest_normal)])
    number = st.builds(complex, one, one if dtype.is_complex else st.just(0.0))

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.lists(number, min_size=2, max_size=5))
    def check(values):
        s = torch.tensor(values if dtype.is_complex else [z.real for z in values], dtype=dtype).requires_grad_()
        y = REDUCTIONS["even"]["product"].of(s)
        (g,) = torch.autograd.grad(y, s, torch.ones_like(y))
        factors = [complex(z) for z in s.tolist()]
        assert_near(complex(y.item()), exact_product(factors), real, len(factors))
        for k in range(len(factors)):
            others = exact_product(factors[:k] + factors[k + 1 :])
            if max(map(abs, others)) < Fraction(float(limits.max)) / 2:  # PyTorch multiplies it with gy
                assert_near(complex(g[k].item()).conjugate(), others, real, len(factors))

    check()


@pytest.mark.parametrize(
    ("xs", "ws", "dtype", "expected"),
    [
        ([20.0, 20, 20], [300.0, -300, 1], torch.float16, [400, 400, 400]),
        ([3e38, 1, 1], [2.0, -2, 0.5], torch.float32, [0.5, 1.5e38, 1.5e38]),
        ([1e30, 1e30, 3], [1.0, 0, 0], torch.float32, [3e30, 3e30, INF]),
        ([1.296875] * 3, [1.0, -0.99609375, 0], torch.bfloat16, [1.296875**2 * 0.00390625] * 3),
    ],
)
def test_gradients_of_losses_are_added_before_the_local_derivative(xs, ws, dtype, expected):
    """One loss's part of the gradient may overflow, or lose its digits, where the sum does not."""
    for size in (8, 50_000):  # below and above the size that is gathered whole

        def body(value, w, size=size):
            x = torch.full((size,), value, dtype=dtype, requires_grad=True)
            (g,) = torch.autograd.grad((dc.all_reduce(x, "product") * w).sum(), x)
            return g[0].item()

        assert on_ranks(body, xs, ws) == pytest.approx(expected, rel=torch.finfo(dtype).eps)


def test_an_infinite_derivative_where_only_one_loss_uses_the_result():
    def root(s):
        return s.sqrt().sum(0)

    def body(value, w):
        found = []
        for op in (root, dc.elementwise(root)):
            x = torch.full((3,), value, dtype=torch.float64, requires_grad=True)
            for y in (w * dc.all_reduce(x, op), (1 + w) * dc.reduce(x, 0, op)):
                found += torch.autograd.grad(y.sum(), x)[0].tolist()
        return found

    assert on_ranks(body, [0.0, 4.0], [1.0, 0.0]) == [[INF] * 12, [0.25, 0.25, 0.25, 0.5, 0.5, 0.5] * 2]


def derivatives_by(op, x, g, t, tx):
    """The gradient of the reduction in all ways; its derivative along t, in both modes, and the tangent along tx."""

    def pulled(x):
        return torch.func.vjp(lambda x: dc.all_reduce(x, op), x)[1](g)[0]

    y = dc.all_reduce(x.requires_grad_(), op)
    (plain,) = torch.autograd.grad(y, x, g, retain_graph=True)
    (recorded,) = torch.autograd.grad(y, x, g, create_graph=True)
    first = [plain, recorded.detach(), pulled(x.detach())]
    tangent = torch.func.jvp(lambda x: dc.all_reduce(x, op), (x.detach(),), (tx,))[1]
    second = [torch.autograd.grad(recorded, x, t)[0], torch.func.jvp(pulled, (x.detach(),), (t,))[1]]
    return first, tangent, second


@pytest.mark.parametrize(
    ("xs", "gy", "dtype", "expected"),
    [
        ([1e-25] * 3, 1e30, torch.float32, 1e-20),
        ([1e30] * 3, 1e-30, torch.float32, 1e30),
        ([2e-4] * 3, 3e4, torch.float16, 1.2e-3),
        ([1e-25] * 3, 1e30, torch.bfloat16, 1e-20),
        ([1e-200] * 3, 1e250, torch.float64, 1e-150),
        ([1e200] * 3, 1e-200, torch.float64, 1e200),
        ([1e-25j] * 3, 1e30, torch.complex64, -1e-20),
        ([1e200j] * 3, 1e-200, torch.complex128, -1e200),
    ],
)
def test_gy_is_multiplied_before_the_gradient_of_a_product_is_rounded(xs, gy, dtype, expected):
    """Π_{s≠r} x_s is 0 or inf in this dtype, gy · Π_{s≠r} x_s is not; in both modes, and in second order."""
    g, n = torch.tensor(gy, dtype=dtype), len(xs)

    def body(r):
        x = torch.tensor(xs[r], dtype=dtype)
        # Σ_k t_k ∂/∂x_k gradient_r = (N − 1)/2 · gradient_r for t = x/2, and the same the other way round
        first, tangent, second = derivatives_by("product", x, g if r == 0 else 0 * g, x / 2, g)
        return [*first, tangent / n, *(h * 2 / (n - 1) for h in second)]

    right = [torch.tensor(expected, dtype=dtype)] * 6
    for of_rank in rules(body, range(n)):
        torch.testing.assert_close(of_rank, right, atol=0, rtol=20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("xs", "gy", "dtype"),
    [
        ([0, -120], 1e30, torch.float32),
        ([3, -117, -200], 1e30, torch.float32),
        ([0, -1000], 1e300, torch.float64),
        ([0, -120 + 1j], 1e30, torch.complex64),
    ],
)
def test_gy_is_multiplied_before_the_gradient_of_a_logsumexp_is_rounded(xs, gy, dtype):
    """exp(x_1 − y) is 0 in this dtype, gy · exp(x_1 − y) is not; in both modes, and in second order."""
    stack = torch.tensor(xs, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    right = ((stack[1] - stack.logsumexp(0)).conj() + math.log(gy)).exp().to(dtype)
    g = torch.tensor(gy, dtype=dtype)

    def body(r):
        x, one = torch.tensor(xs[r], dtype=dtype), torch.tensor(float(r == 1), dtype=dtype)
        # ∂gradient_1/∂x_1 = gradient_1 · (1 − exp(x_1 − y))
        first, tangent, second = derivatives_by("logsumexp", x, g if r == 0 else 0 * g, one, g * one)
        return [*first, tangent.conj().resolve_conj(), *second]

    found = rules(body, range(len(xs)))[1]
    torch.testing.assert_close(found, [right] * 6, atol=0, rtol=300 * torch.finfo(dtype).eps)


def test_products_of_any_size_to_second_order():
    """Against fractions: each derivative, in each mode, is right to rounding of its largest term."""
    rng = random.Random(3)
    limits = torch.finfo(torch.float64)

    def drawn(n):
        def one():
            e = rng.choice([rng.uniform(-680, 680), rng.uniform(-3, 3)])
            return rng.choice([0.0, *[rng.choice([-1, 1]) * (1 + rng.random()) * 2.0**e] * 9])

        return torch.tensor([one() for _ in range(n)], dtype=torch.float64)

    def rest(values, *without):
        return math.prod(v for k, v in enumerate(values) if k not in without)

    def compare(got, terms):
        exact, largest = sum(terms), max(map(abs, terms), default=Fraction(0))
        if largest < Fraction(limits.max) / 4:
            error = largest * Fraction(limits.eps) * 30 + Fraction(limits.tiny) * Fraction(limits.eps) * 4
            assert math.isfinite(got) and abs(Fraction(got) - exact) <= error, (got, float(exact))

    for n in (1, 2, 3, 3, 5, 5) * 8:
        s, v, w, gy = drawn(n), drawn(n), drawn(n), drawn(1)[0]
        ss, vs, ws, g = ([Fraction(x) for x in t.view(-1).tolist()] for t in (s, v, w, gy))
        ks = range(n)
        leaf, leaf_of_g = s.clone().requires_grad_(), gy.clone().requires_grad_()
        (gs,) = torch.autograd.grad(product(leaf), leaf, leaf_of_g, create_graph=True)
        second, of_g = torch.autograd.grad(gs, (leaf, leaf_of_g), v, materialize_grads=True)
        forward = torch.func.jvp(lambda s, gy=gy: torch.func.vjp(product, s)[1](gy)[0], (s,), (v,))[1]
        along_v = partial(torch.func.jvp, product, tangents=(v,))
        twice = torch.func.jvp(lambda s, f=along_v: f((s,))[1], (s,), (w,))[1]
        tangent = [vs[k] * rest(ss, k) for k in ks]
        compare(along_v((s,))[1].item(), tangent)
        compare(of_g.item(), tangent)
        compare(twice.item(), [vs[i] * ws[j] * rest(ss, i, j) for i in ks for j in ks if i != j])
        for j in ks:
            compare(gs[j].item(), [g[0] * rest(ss, j)])
            terms = [g[0] * vs[i] * rest(ss, i, j) for i in ks if i != j]
            compare(second[j].item(), terms)
            compare(forward[j].item(), terms)


def test_products_whose_modulus_overflows():
    for dtype, big, small in [(torch.complex64, 3e38, 1e-10), (torch.complex128, 1.5e308, 1e-100)]:
        y, g = gradients_of("product", [torch.tensor(z, dtype=dtype) for z in (big + big * 1j, small)])
        torch.testing.assert_close(torch.tensor(y, dtype=dtype), torch.tensor(big * small * (1 + 1j), dtype=dtype))
        torch.testing.assert_close(torch.tensor(g, dtype=dtype), torch.tensor([small, big - big * 1j], dtype=dtype))
        s = torch.tensor([big + big * 1j, small, 0.5j], dtype=dtype, requires_grad=True)
        (g,) = torch.autograd.grad(product(s).real, s, create_graph=True)
        (h,) = torch.autograd.grad(g[1].real, s)  # the derivative of the factor of s_1, with respect to s_1
        torch.testing.assert_close(h[2], torch.tensor(big - big * 1j, dtype=dtype))
        _, ty = torch.func.jvp(product, (s.detach(),), (torch.tensor([0, small, 0], dtype=dtype),))
        torch.testing.assert_close(ty, torch.tensor(big * small * 0.5 * (-1 + 1j), dtype=dtype))
    y, _ = gradients_of("product", [torch.tensor(complex(INF, 0)), torch.tensor(2 + 0j)])
    assert y.real == INF  # the imaginary part is ∞·0 in PyTorch's multiplication


TIED = [[7.0, 1.0], [7.0, 2.0], [7.0, 2.0]]


@pytest.mark.parametrize(
    ("op", "ties", "xs", "expected"),
    [
        ("max", "even", TIED, [[37, 0], [37, 55.5], [37, 55.5]]),
        ("max", "first", TIED, [[111, 0], [0, 111], [0, 0]]),
        ("min", "even", TIED, [[37, 111], [37, 0], [37, 0]]),
        ("min", "first", TIED, [[111, 111], [0, 0], [0, 0]]),
        ("max", "first", [[NAN, 1.0], [2.0, NAN], [NAN, NAN]], [[111, 0], [0, 111], [0, 0]]),
    ],
)
def test_ties(gradients, op, ties, xs, expected):
    assert gradients(weighted(op, ties=ties), xs, [1.0, 10.0, 100.0]) == expected


@pytest.mark.parametrize("op", ["max", "min", "logsumexp"])
@pytest.mark.parametrize("values", [(1, NAN, 2), (NAN, NAN, 0), (INF, INF, 1), (-INF, 1, -INF), (-INF,) * 3])
def test_nan_and_infinities_are_treated_as_torch_does(op, values):
    s = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    y = getattr(torch, {"max": "amax", "min": "amin"}.get(op, op))(s, 0)
    (g,) = torch.autograd.grad(y, s)
    found = gradients_of(op, [torch.tensor(float(v), dtype=torch.float64) for v in values], [1.0, 0.0, 0.0])
    torch.testing.assert_close(torch.tensor(found[0], dtype=torch.float64), y.detach(), equal_nan=True)
    torch.testing.assert_close(torch.tensor(found[1], dtype=torch.float64), g, equal_nan=True)


def test_logsumexp_is_shifted():
    y, g = gradients_of("logsumexp", [[1e4, -1e4, 1e4], [1e4, -1e4, -1e4]])
    assert y == pytest.approx([1e4 + math.log(2), -1e4 + math.log(2), 1e4])
    assert g == [pytest.approx([0.5, 0.5, 1]), pytest.approx([0.5, 0.5, 0])]
    (in_truth, _) = simulate(lambda x: dc.all_reduce(x, "logsumexp"), [torch.tensor([1e4, -1e4])] * 2)
    assert in_truth.tolist() == pytest.approx(y[:2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precisions_are_reduced_in_float32(dtype):
    # 300 · 300 · 1/300 overflows in float16 at the second factor; (1 + 27/128)³ would be rounded twice
    values = [torch.full((3,), v, dtype=dtype) for v in (300.0, 300.0, 1 / 300)]
    expected = torch.stack(values).float().prod(0).to(dtype)
    y, g = gradients_of("product", values)
    assert y == expected.tolist()
    assert g[0] == torch.stack(values[1:]).float().prod(0).to(dtype).tolist()
    steps = [torch.full((3,), 1 + 27 * 2.0**-7, dtype=dtype)] * 3
    assert gradients_of("product", steps)[0] == torch.stack(steps).float().prod(0).to(dtype).tolist()
    logs = [torch.full((2,), v, dtype=dtype) for v in (3.0, 3.125, 3.25)]
    assert gradients_of("logsumexp", logs)[0] == torch.stack(logs).float().logsumexp(0).to(dtype).tolist()


def test_spellings_and_reduce_ops(run):
    def body(x):
        ops = [("prod", "PRODUCT"), ("maximum", "MAX"), ("amin", "MIN"), ("avg", "AVG"), ("SUM", "SUM")]
        pairs = [[dc.all_reduce(x, a).item(), dc.all_reduce(x, getattr(dist.ReduceOp, b)).item()] for a, b in ops]
        return *pairs, dc.reduce_scatter(x.repeat(2), dist.ReduceOp(dist.ReduceOp.MAX)).item()

    assert run(body, torch.tensor([3.0, 5.0])) == [([15, 15], [5, 5], [3, 3], [4, 4], [8, 8], 5)] * 2


def test_premul_sum_multiplies_by_its_factor(gradients):
    def loss(x, w):
        return w * dc.all_reduce(x, dist._make_nccl_premul_sum(0.5)).sum()

    assert gradients(loss, XS, WS) == [5.5, 5.5]


def test_integers_and_bools_pass_forward(run):
    def body(r):
        x = torch.tensor([r, 2, -r])
        ops = ("product", "max", "min", cases.median)
        flags = [dc.all_reduce(torch.tensor([r == 1, True]), op).tolist() for op in ("max", "min")]
        found = [dc.all_reduce(x, op) for op in ops]
        return [y.tolist() for y in found], {y.dtype for y in found}, flags

    expected = [[0, 8, 0], [2, 2, 0], [0, 2, -2], [1, 2, -1]], {torch.int64}, [[True, True], [False, True]]
    assert run(body, range(3)) == [expected] * 3


def test_large_tensors_are_reduced_by_parts_on_gloo_too():
    def body(r):
        generator = torch.Generator().manual_seed(r)
        x = torch.randn(10_007, generator=generator, dtype=torch.float64).requires_grad_()
        found = []
        for op in ("product", "max", "logsumexp", cases.median, cases.median_in_parts, cases.largest_whole):
            y = dc.all_reduce(x, op)
            found += [y.detach().clone(), *torch.autograd.grad(((r + 1) * y.mul_(1)).sum(), x)]
        return found

    a, b = rules(body, range(3)), gloo(body, range(3))
    torch.testing.assert_close(a, b)
    for y in range(0, 12, 2):
        assert torch.equal(b[0][y], b[1][y])
        assert torch.equal(b[0][y], b[2][y])


@pytest.mark.parametrize(
    ("op", "most"),
    [
        ("product", 4.2),
        pytest.param("max", 4.2, marks=pytest.mark.slow),
        pytest.param("logsumexp", 4.2, marks=pytest.mark.slow),
        (cases.median_in_parts, 5.1),
    ],
)
def test_memory_and_bytes_do_not_grow_with_the_ranks(op, most):
    """One stack of x's size on each rank for any N, and at most twice the bytes of a sum."""
    numel = 1 << 22
    by_sum = bench.bytes_sent(cases.Case("all_reduce", ((numel,),) * 4, {}, dtype=torch.float32))
    case = {n: cases.Case("all_reduce", ((numel,),) * n, {"op": op}, dtype=torch.float32) for n in (2, 4, 6)}
    assert bench.bytes_sent(case[4]) <= 2 * by_sum
    peaks = {n: bench.peak_memory(case[n]) / (4 * numel) for n in (2, 6)}
    # gx, the stack, its gradient, and (N − 1)/N of x received in backward. The stack of all ranks' x would be N.
    assert max(peaks.values()) <= most, peaks


# ── users' functions ─────────────────────────────────────────────────────────────────────────────────────


def clipped(s):
    return s.mean(0) * torch.clamp(4 / s.norm(), max=1)


def short_ones(s):
    return (s * (s.flatten(1).norm(dim=1) < s.flatten(1).norm(dim=1).mean())[:, None, None]).sum(0)


def nearest_to_all(s):  # Krum
    return s[torch.cdist(s.flatten(1), s.flatten(1)).sum(1).argmin()]


def row_weights(s):
    return (s * torch.arange(s.shape[1], dtype=s.dtype)[:, None]).square().sum(0)


#: In each, the result at one position depends on other positions, or on where the position is.
WHOLE = (
    *(clipped, short_ones, nearest_to_all, row_weights, cases.largest_whole),
    lambda s: s.softmax(1).prod(0),
    lambda s: s.square().sum(0).cumsum(0),
    lambda s: s.exp().sum(0).flip(1),
    lambda s: s.prod(0) / s.sum(),
    lambda s: s.square().mean((0, 1)).expand(s.shape[1:]),
    lambda s: s[0] * s[-1].T.reshape(s.shape[1:]),
)


def trimmed(s):
    return s.sort(0).values[: max(1, len(s) - 1)].mean(0)


IN_PARTS = (
    *(cases.median, trimmed),
    lambda s: s.norm(dim=0),
    lambda s: s.softmax(0).square().sum(0),
    lambda s: s[0],
    lambda s: s.amax(0).sigmoid(),
)


def numbers(shape, r):
    return torch.randn(shape, generator=torch.Generator().manual_seed(r), dtype=torch.float64).requires_grad_()


@runs_on("rules", "gloo", "mpi")
def test_functions_get_the_stack_they_expect(run):
    """At sizes at which named ops are gathered whole and at which they are not; gradients to second order."""
    n = 3
    shapes = [(3, 2), (51, 45)] if run is gloo else [(3, 2)]  # the second is larger than 16 KB
    ops = [*WHOLE, *IN_PARTS, *map(dc.elementwise, IN_PARTS)] if run is not mpi else [*WHOLE[:5], cases.median_in_parts]
    ways = {
        "everywhere": lambda x, op: dc.all_reduce(x, op),
        "block": lambda x, op: dc.reduce_scatter(x, op, sizes=[len(x) - 1, 0, 1]),
        "equal blocks": lambda x, op: dc.reduce_scatter(x, op),
        "at": lambda x, op: dc.reduce(x, 1, op),
    }

    def derived(xs, ys, weights):
        total = sum((w * y.sin()).sum() for w, y in zip(weights, ys, strict=True))
        gs = torch.autograd.grad(total, xs, create_graph=True)
        again = sum(((k + 2) * g.square()).sum() for k, g in enumerate(gs))
        return [*ys, *gs, *torch.autograd.grad(again, xs)]

    def body(r):
        seen, found = set(), []
        for shape in shapes:
            for op in ops:
                for way in ways.values():
                    x = numbers(shape, r)
                    y = way(x, lambda s, op=op: (seen.add(tuple(s.shape)), op(s))[1] if op in WHOLE else op(s))
                    y = way(x, op) if isinstance(op, dc.elementwise) else y
                    (g,) = torch.autograd.grad((numbers(y.shape, 10 + r) * y.sin()).sum(), x, create_graph=True)
                    (h,) = torch.autograd.grad(((r + 2) * g.square()).sum() + 0 * x.square().sum(), x)
                    found.append([y.detach(), g.detach(), h])
        return seen, found

    def expected(shape, op, way):
        xs = [numbers(shape, r) for r in range(n)]
        ys = {
            "everywhere": lambda y: [y] * n,
            "block": lambda y: y.split([len(y) - 1, 0, 1]),
            "equal blocks": lambda y: y.split(len(y) // n),
            "at": lambda y: [0 * y, y, 0 * y],
        }[way](op(torch.stack(xs)))
        found = derived(xs, ys, [numbers(y.shape, 10 + r) for r, y in enumerate(ys)])
        return [[t.detach() for t in found[r::n]] for r in range(n)]

    got = run(body, range(n))
    for seen, _ in got:
        assert seen == {(n, *shape) for shape in shapes}
    calls = [(shape, op, way) for shape in shapes for op in ops for way in ways]
    for i, call in enumerate(calls):
        for r, of_rank in enumerate(expected(*call)):
            torch.testing.assert_close(got[r][1][i], of_rank, msg=lambda text, call=call, r=r: f"{call} {r}: {text}")


def test_an_elementwise_function_gets_parts():
    """Unless x is small, a rank holds one stack of the size of x for any N; a tree is sent in one message."""

    def body(r):
        seen = []
        op = dc.elementwise(lambda s: (seen.append(tuple(s.shape)), s.sum(0))[1])
        dc.all_reduce(torch.ones(10, 3), op)
        dc.reduce(torch.ones(10, 3), 1, op)
        dc.reduce_scatter(torch.ones(10, 3), op, sizes=[3, 2, 5])
        dc.all_reduce([torch.ones(4), {"a": torch.ones(3, 2)}], op)
        dc.all_reduce(torch.ones(2), op)  # parts would be empty
        return seen

    found = rules(body, range(3))
    assert found == [[(3, 10), (3, 10), (3, size, 3), (3, 3 + (r == 0)), (3, 2)] for r, size in enumerate((3, 2, 5))]


def test_elementwise_equality_repr_and_errors():
    op = dc.elementwise(cases.median)
    assert repr(op) == "elementwise(median)"
    assert op == dc.elementwise(op) == dc.elementwise(cases.median)
    assert len({op, dc.elementwise(op)}) == 1
    assert op not in (cases.median, dc.elementwise(trimmed))
    assert op(torch.tensor([[1.0], [5.0], [2.0]])).tolist() == [2]
    with pytest.raises(TypeError, match=r"elementwise: f: got 'max', expected a function .*; pass op='max' itself"):
        dc.elementwise("max")
    with pytest.raises(TypeError, match=r"elementwise: f: got 3, expected a function that reduces dim 0 of a stack$"):
        dc.elementwise(3)
    assert simulate(lambda x: dc.all_reduce(x, op, ties="first").item(), torch.tensor([3.0, 1.0, 2.0])) == [2] * 3


def test_an_attribute_called_op_is_no_spelling():
    class Largest:
        op = "sum"

        def __call__(self, s):
            return s.amax(0)

    assert rules(lambda x: dc.all_reduce(x, Largest()).item(), torch.tensor([3.0, 1.0])) == [3, 3]


@runs_on("rules", "gloo")
def test_check_mode_verifies_that_functions_are_elementwise(run):
    def raised(call):
        try:
            with dc.check_mode():
                call()
        except (ValueError, dc.CollectiveMismatchError) as error:
            return str(error)
        return ""

    ways = [
        *(dc.all_reduce, dc.reduce_scatter),
        lambda x, op: dc.reduce(x, op=op),
        lambda x, op: dc.all_reduce(x, op, async_op=True).wait(),
        lambda x, op: dc.all_reduce([x, x], op),
    ]

    few = slice(1) if run is gloo else slice(None)

    def body(r):
        x = numbers((6, 4), r)
        honest, broken = [], []
        for way in ways:
            for op in (*IN_PARTS[few], *WHOLE[:-1][few], *map(dc.elementwise, IN_PARTS[few])):
                honest.append(raised(lambda way=way, op=op, x=x: way(x, op)))
            for op in WHOLE[few] if way is not ways[-1] else [clipped]:  # the leaves of a tree are one row
                broken.append(raised(lambda way=way, op=op: way(x, dc.elementwise(op))))
        different = [
            raised(lambda: dc.all_reduce(x, lambda s: s.sum(0) * torch.rand(()))),
            raised(lambda: dc.all_reduce(x, lambda s: s[r])),
            raised(lambda: dc.all_reduce(x, dc.elementwise(lambda s: s[r]))),
            raised(lambda: dc.all_reduce(x, cases.median_in_parts if r else cases.median)),
        ]
        return honest, broken, different

    got = run(body, range(3))
    for honest, broken, different in got:
        assert set(honest) == {""}
        words = r"whose result at one position depends on other positions, expected .* itself without dc\.elementwise"
        assert [text for text in broken if not re.search(words, text)] == []
        assert all("different values for the same stack on rank 1 and on rank 0" in text for text in different[:3])
        assert "elementwise(a function)" in different[3]
    assert len({tuple(re.sub("<.*?>", "", text) for text in broken) for _, broken, _ in got}) == 1


def test_a_function_of_the_wrong_shape():
    for f, words in [
        (lambda s: s * 2, r"got a function that returns \(2, 3\), expected \(3,\): dim 0 of \(2, 3\) reduced"),
        (lambda s: 1.0, "got a function that returns float"),
    ]:
        with pytest.raises(ValueError, match=rf"all_reduce: op: {words}.*; reduce with dim=0"):
            rules(lambda x, f=f: dc.all_reduce(x, f), [torch.zeros(3)] * 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_product_is_differentiable_to_third_order(n, dtype):
    s = torch.tensor([[2.0, 0.0], [3.0, 0.0], [-1.0, 4.0], [0.5, 1.5], [0.7, -1.1]], dtype=dtype)[:n]
    s = (s * (1 + 0.3j) if dtype.is_complex else s).requires_grad_()

    def gradient(s):
        y = product(s)
        return torch.autograd.grad(y, s, s.sum(0), create_graph=True)[0]

    modes = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": not dtype.is_complex}
    assert torch.autograd.gradcheck(product, (s,), **modes)
    assert torch.autograd.gradgradcheck(product, (s,), check_fwd_over_rev=True, check_rev_over_rev=True)
    assert torch.autograd.gradgradcheck(gradient, (s,))


def test_the_result_is_not_a_view_of_the_stack(run):
    def body(x):
        y = dc.all_reduce(x, lambda s: s[0])
        return y.untyped_storage().nbytes()

    assert run(body, [torch.zeros(5)] * 3)[0] == 20


# ── stacks that are reduced in pieces ────────────────────────────────────────────────────────────────────

TORCHS = {"product": torch.prod, "max": torch.amax, "min": torch.amin, "logsumexp": torch.logsumexp}


def large_stack(n, dtype=torch.float64):
    """More numbers than one piece has, with ties, a zero in most columns, infinities and NaN."""
    generator = torch.Generator().manual_seed(n)
    s = torch.randn(n, 90_001, generator=generator, dtype=dtype)
    if not dtype.is_complex:
        s = (s * 2).round() / 2
        for k, value in enumerate((INF, -INF, NAN)):
            s[k % n, k::7919] = value
    return s


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("op", [*TORCHS, "logsumexp of complex numbers"])
def test_pieces_give_what_torch_gives_for_the_whole(op, n):
    name = op.split()[0]
    s = large_stack(n, torch.complex128 if " " in op else torch.float64)
    if op == "product":
        s = s.nan_to_num(2.0, 3.0, -1.5)
    gy = torch.randn(s.shape[1] * 2, dtype=s.dtype)[::2]
    found, expected = s.clone().requires_grad_(), s.clone().requires_grad_()
    y, z = REDUCTIONS["even"][name].of(found), TORCHS[name](expected, 0)
    torch.testing.assert_close(y, z, equal_nan=True)
    for graph in (False, True):
        (g,) = torch.autograd.grad(y, found, gy, retain_graph=True, create_graph=graph)
        (h,) = torch.autograd.grad(z, expected, gy, retain_graph=True)
        torch.testing.assert_close(g, h, equal_nan=True)
        assert g.is_contiguous()
    torch.testing.assert_close(found, s, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", [*TORCHS])
def test_pieces_give_every_derivative(op):
    s = torch.randn(3, 40_000, dtype=torch.float64).requires_grad_()
    t, gy = torch.randn_like(s), torch.randn(40_000, dtype=torch.float64).requires_grad_()

    def derivatives(f):
        (batched,) = torch.autograd.grad(f(s), s, torch.stack([gy, -gy]).detach(), is_grads_batched=True)
        (first,) = torch.autograd.grad(f(s), s, gy, create_graph=True)
        second = torch.autograd.grad(first, (s, gy), t, allow_unused=True)
        by_vmap = torch.func.vmap(torch.func.grad(lambda s: (f(s) * gy[:10_000]).sum()), 2, 2)(s.view(3, -1, 4))
        found = [
            batched,
            first,
            *second,
            *torch.func.jvp(f, (s,), (t,)),
            torch.func.vmap(f, 2)(s.view(3, -1, 4)),
            by_vmap,
        ]
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(s, t)
            found += forward_ad.unpack_dual(torch.autograd.grad(f(dual), dual, gy)[0])
        return found

    for found, expected in zip(
        derivatives(REDUCTIONS["even"][op].of), derivatives(partial(TORCHS[op], dim=0)), strict=True
    ):
        zero = torch.zeros_like(s)  # PyTorch leaves out derivatives that are zero
        torch.testing.assert_close(zero if found is None else found, zero if expected is None else expected)


def test_products_of_which_one_piece_leaves_the_range():
    """Only there are the factors scaled, or multiplied in a wider dtype."""
    for dtype, big in ((torch.float32, 1e30), (torch.float64, 1e300), (torch.complex64, 1e30)):
        s = torch.full((4, 70_000), 2.0, dtype=dtype)
        s[:, 50_000] = torch.tensor([big, big, 1 / big, 1 / big], dtype=dtype)
        s[1, 3] = 0
        s.requires_grad_()
        y = product(s)
        (g,) = torch.autograd.grad(y.real.sum(), s)
        assert y.detach()[[0, 3]].tolist() == [16, 0]
        assert g[:, [0, 3]].tolist() == [[8, 0], [8, 8], [8, 0], [8, 0]]
        torch.testing.assert_close(y[50_000].detach(), torch.tensor(1.0, dtype=dtype))
        inverse = 1 / s.detach()[:, 50_000]
        torch.testing.assert_close(g[:, 50_000], inverse)
