from functools import partial

import pytest
import torch
from runs import gloo, rules, runs_on

import diffcoll as dc
from diffcoll.testing import simulate

XS = [[1.0, -2.0], [3.0, 0.5], [-7.0, 4.0]]
WS = [1.0, 10.0, 100.0]


def test_every_loss_counts(gradients):
    # L = (1 + 10 + 100) Σ y
    assert gradients(lambda x, w: w * dc.all_reduce(x).sum(), XS, WS) == [[111, 111]] * 3


@runs_on("rules", "gloo")
def test_a_mean_overflows_only_if_it_is_too_large(run):
    def body(r):
        x = torch.tensor([[3e38, 1.0 + r]]).T.requires_grad_()
        y = dc.all_reduce(x, "mean")
        (g,) = torch.autograd.grad(y, x, torch.tensor([[3e38], [2.0]]))
        return y.tolist(), g.tolist()

    big = torch.tensor(3e38).item()
    assert run(body, range(2)) == [([[big], [1.5]], [[big], [2.0]])] * 2


def means_near_the_largest(dtype, n, r):
    """Whether the mean of numbers near the largest is finite, computed in several ways."""
    x = torch.tensor([0.9 * torch.finfo(dtype).max, 1.0 + r], dtype=dtype).repeat(n, 1)
    ways = [
        dc.all_reduce(x, "mean"),
        dc.all_reduce(x, "mean", deterministic=True),
        dc.all_reduce(x, "mean", grad_placement="replicate"),
        dc.reduce(x, 0, "mean"),
        dc.reduce_scatter(x, "mean"),
    ]
    assert r > 0 or all(y[0, 1] == (n + 1) / 2 for y in ways)
    return [bool(y[0, 0].isfinite()) for y in ways]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_where_a_mean_overflows_with_the_sum(n, dtype):
    """Finite only where the terms are divided before they are added; bfloat16 is summed in float32, of its range."""
    body, late = partial(means_near_the_largest, dtype, n), [False] * 4
    assert rules(body, range(n))[0] == [n != 3, *late]
    assert simulate(body, range(n))[0] == [False, *late]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_mean_of_float16_does_not_overflow(n):
    """It is computed in float32."""
    body = partial(means_near_the_largest, torch.float16, n)
    assert rules(body, range(n))[0] == simulate(body, range(n))[0] == [True] * 5


def test_means_near_the_largest_on_processes():
    dtypes = (torch.float16, torch.float32)
    found = gloo(lambda r: [means_near_the_largest(dtype, 3, r) for dtype in dtypes], range(3))
    assert found[0] == [[True] * 5, [False] * 5]
    assert gloo(partial(means_near_the_largest, torch.float32, 2), range(2))[0] == [True, *[False] * 4]


def test_mean(gradients):
    assert gradients(lambda x, w: w * dc.all_reduce(x, "avg").sum(), XS, [3.0, 30.0, 300.0]) == [[111, 111]] * 3
    replicated = gradients(lambda x: 3 * dc.all_reduce(x, "mean", grad_placement="replicate").sum(), XS)
    assert replicated == [[1, 1]] * 3  # one loss, 3 · mean, which counts once


def test_replicated_counts_once(gradients):
    # ℓ = y_0² + y_1² on all ranks; y = (-3, 2.5)
    def loss(x):
        return dc.all_reduce(x, grad_placement="replicate").square().sum()

    assert gradients(loss, XS) == [[-6, 5]] * 3


def test_a_rank_that_multiplies_the_output_by_zero_takes_part(gradients):
    def loss(x, w):
        return w * dc.all_reduce(x).sum() if dc.get_rank() else 0 * dc.all_reduce(x).sum()

    assert gradients(loss, XS, WS) == [[110, 110]] * 3


def test_0d_and_empty(run):
    assert run(lambda r: dc.all_reduce(torch.tensor(2.0**r)).item(), range(3)) == [7, 7, 7]
    assert [tuple(y.shape) for y in run(lambda r: dc.all_reduce(torch.ones(0, 4) * r), range(3))] == [(0, 4)] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_results_are_bitwise_equal_on_all_ranks(dtype):
    def body(r):
        generator = torch.Generator().manual_seed(r)
        x = torch.randn(10_007, generator=generator) * 10 ** torch.randint(-4, 4, (10_007,), generator=generator)
        return dc.all_reduce(x.to(dtype))

    a, b, c = gloo(body, range(3))
    assert torch.equal(a, b)
    assert torch.equal(a, c)


def test_replicated_gradients_share_no_memory():
    def body(r):
        a, b = (torch.full((3,), float(r + i), requires_grad=True) for i in range(2))
        g = torch.tensor([1.0, 2.0, 3.0])
        (dc.all_reduce(a, grad_placement="replicate") + dc.all_reduce(b, grad_placement="replicate")).backward(g)
        return len({t.data_ptr() for t in (a.grad, b.grad, g)})

    assert rules(body, range(3)) == [3, 3, 3]


def test_a_replicated_gradient_that_differs_is_found_in_truth():
    xs = [torch.tensor(float(r), requires_grad=True) for r in range(3)]
    losses = simulate(lambda x, w: w * dc.all_reduce(x, grad_placement="replicate"), xs, WS)
    with pytest.raises(ValueError, match="declared replicated, or its gradient, differs between rank 0 and rank 1"):
        torch.autograd.backward(losses)
