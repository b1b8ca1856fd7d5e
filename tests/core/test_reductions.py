"""The reductions that `op` names, on numbers for which naive rules fail; test_rules.py has their derivatives.

Simulated ranks reduce by parts; gloo reduces the stack of all ranks' small tensors on every rank, and large ones by
parts.
"""

import math
from functools import partial
from functools import reduce as fold
from operator import mul

import pytest
import torch
from runs import runs_on, truth

import diffcoll as dc
from benchmarks.collectives import peak_memory
from benchmarks.counting import bytes_sent
from benchmarks.measuring import Bench
from diffcoll.testing.cases import Case

INF, NAN = math.inf, math.nan
#: Each by PyTorch, over dim 0 of the stack of all ranks' tensors; torch.prod divides, so infinite factors give NaN.
OPS = {
    "mean": lambda s: s.mean(0),
    "product": lambda s: fold(mul, s.unbind(0)),
    "max": lambda s: s.amax(0),
    "min": lambda s: s.amin(0),
    "logsumexp": lambda s: s.logsumexp(0),
}
NOT_LINEAR = ("product", "max", "min", "logsumexp")


def whole(op, xs):
    """The result for a list of all ranks' tensors; half precisions and small integers in a wider dtype."""
    s = torch.stack(xs)
    wide = s.float() if s.dtype in (torch.float16, torch.bfloat16) else s
    return OPS[op](wide).to(s.dtype)


@pytest.mark.parametrize("op", NOT_LINEAR)
def test_truth_is_the_function_of_pytorch(op):
    xs = [torch.tensor([0.5 - r, 0.0, r % 2, 1e3]) for r in range(3)]
    for y in truth(partial(dc.all_reduce, op=op), xs):
        torch.testing.assert_close(y, whole(op, xs))


@runs_on("rules", "gloo")
@pytest.mark.parametrize("op", NOT_LINEAR)
def test_large_tensors(run, op):
    """By parts on gloo, too, and each in pieces: the same bits on every rank, the gradient of the loss that uses it."""

    def body(r):
        generator = torch.Generator().manual_seed(r)
        x = torch.randn(300_007, generator=generator, dtype=torch.float64).mul(4).round().div(4).requires_grad_()
        y = dc.all_reduce(x, op)
        at_root = dc.reduce(x, 2, op)
        gs = torch.autograd.grad((r == 1) * (y.mul_(1) * y.detach()).sum(), x)
        return x.detach(), y.detach(), at_root.detach(), *gs, *torch.autograd.grad((r == 2) * at_root.sum(), x)

    xs, ys, at_root, gs, rooted = zip(*run(body, range(3)), strict=True)
    xs = [x.requires_grad_() for x in xs]
    expected = whole(op, xs)
    torch.testing.assert_close(ys[0], expected.detach())
    assert torch.equal(ys[0], ys[1]) and torch.equal(ys[0], ys[2])
    torch.testing.assert_close([*at_root], [0 * ys[0], 0 * ys[0], ys[0]])
    torch.testing.assert_close([*gs], [*torch.autograd.grad(expected, xs, ys[1], retain_graph=True)])
    torch.testing.assert_close([*rooted], [*torch.autograd.grad(expected.sum(), xs)])


# ── numbers for which naive rules fail ───────────────────────────────────────────────────────────────────


def results(run, op, xs, ws):
    """Results, and gradients of Σ_r w_r y_r, of an all_reduce."""

    def body(x, w):
        x = x.clone().requires_grad_()
        y = dc.all_reduce(x, op)
        (w * y).sum().backward()
        return y.detach(), x.grad

    ys, gs = zip(*run(body, xs, ws), strict=True)
    for y in ys[1:]:
        torch.testing.assert_close(y, ys[0], rtol=0, atol=0, equal_nan=True)
    return ys[0], list(gs)


#: A row for each rank; columns are independent.
NUMBERS = {
    "zeros": [[2.0, 0.0, 0.0, 0.0], [3.0, 5.0, 0.0, 0.0], [-4.0, -6.0, 7.0, 0.0]],
    "ties": [[7.0, 1.0, -0.0, 2.0], [7.0, 2.0, 0.0, 2.0], [7.0, 2.0, -1.0, 1.0]],
    "NaN": [[1.0, NAN, NAN, 0.0], [NAN, NAN, 2.0, 0.0], [2.0, 0.0, 1.0, NAN]],
    "infinities": [[INF, -INF, -INF, INF], [INF, 1.0, -INF, -INF], [1.0, -INF, -INF, 2.0]],
    "large": [[1e4, -1e4, 1e4, 700.0], [1e4, -1e4, -1e4, 800.0], [0.0, -2e4, 3.0, 0.5]],
    "small": [[1e-160, 5e-324, 1.0, 2.0], [1e-160, 2.0, 1e-300, 3.0], [1e160, 3.0, 2.0, 1.0]],
}


@runs_on("rules", "gloo")
@pytest.mark.parametrize("op", NOT_LINEAR)
def test_zeros_ties_nan_and_infinities_are_treated_as_pytorch_does(run, op):
    for name, numbers in NUMBERS.items():
        for w in ([1.0, 10.0, 100.0], [0.0, 0.0, 2.0]):
            xs = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in numbers]
            y, gs = results(run, op, [x.detach() for x in xs], w)
            expected = whole(op, xs)
            torch.testing.assert_close(y, expected.detach(), equal_nan=True, msg=f"{op} {name}")
            right = [*torch.autograd.grad(expected, xs, torch.full_like(expected, sum(w)))]
            torch.testing.assert_close(gs, right, equal_nan=True, msg=f"{op} {name}")


# ── dtypes ───────────────────────────────────────────────────────────────────────────────────────────────

HALVES = {  # values whose partial results overflow, or that are rounded twice, in half precision
    "mean": (60000.0, 60000.0, 50000.0),
    "product": (300.0, 300.0, 1 / 300),
    "logsumexp": (3.0, 3.125, 3.25),
    "max": (3.0, 3.0, -1.0),
}


@runs_on("rules", "gloo")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", HALVES)
def test_half_precisions_are_reduced_in_float32_and_rounded_once(run, op, dtype):
    steps = (1 + 27 * 2.0**-7,) * 3
    xs = [torch.tensor([a, b, a], dtype=dtype, requires_grad=True) for a, b in zip(HALVES[op], steps, strict=True)]
    y, gs = results(run, op, [x.detach() for x in xs], [0.0, 1.0, 0.0])
    expected = whole(op, xs)
    assert y.dtype == gs[0].dtype == dtype
    assert torch.equal(y, expected)
    torch.testing.assert_close(gs, [*torch.autograd.grad(expected.sum(), xs)])
    blocks = run(lambda x: dc.reduce_scatter(x, op), [x.detach() for x in xs])
    assert torch.equal(torch.cat(blocks), expected)
    assert torch.equal(run(lambda x: dc.reduce(x, 1, op), [x.detach() for x in xs])[1], expected)


# ── cost ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_memory_and_bytes_do_not_grow_with_the_ranks():
    """One stack of x's size on each rank for any N, and at most twice the bytes of a sum."""
    numel = 1 << 22
    case = {n: Case("all_reduce", ((numel,),) * n, {"op": "product"}, dtype=torch.float32) for n in (2, 4, 6)}
    assert bytes_sent(case[4]) <= 2 * bytes_sent(Case("all_reduce", ((numel,),) * 4, {}, dtype=torch.float32))
    peaks = {n: peak_memory(Bench("torch", n, 1), case[n]) / (4 * numel) for n in (2, 6)}
    assert max(peaks.values()) <= 6.2, peaks  # gx, the stack, what its derivative needs, messages
