"""Moments and weighted means: equal to those of all values on one process, for any cut of them over ranks."""

import pytest
import torch
import torch.nn.functional as F
from references import data, holds, mean_of_tokens, of_moments
from references import moments as whole
from runs import rules

import diffcoll as dc
from diffcoll.nn.functional import moments, token_mean, weighted_mean
from diffcoll.testing import check_gradients

SIZES = ((8,), (5, 3), (1, 6, 1), (5, 0, 3))


def weights(n, *shape):
    """Those of the first row, which a rank has alone, are 0: their gradients are not."""
    return data(n, *shape, seed=1).square() * (torch.arange(n) > 0).view(-1, *[1] * len(shape))


weighted_or_not = pytest.mark.parametrize("weigh", [lambda w: w, lambda w: None], ids=["weighted", "not weighted"])


@weighted_or_not
@pytest.mark.parametrize("dims", [0, (0, 2), (-1, 0)])
def test_moments_of_uneven_and_empty_ranks(dims, weigh):
    def loss_of(moments, x, w):
        found = moments(x, dims, weight=weigh(w))
        return of_moments(found) + (0 if weigh(w) is None else found[0].sum())

    def batch(n):
        return data(n, 3, 4) + 5, weights(n, 1, 4)

    holds(
        lambda x, w: loss_of(moments, x, w) / dc.get_world_size(),
        lambda x, w: loss_of(whole, x, w),
        batch,
        sizes=SIZES,
        losses="sum",
    )
    x, w = batch(8)
    parts = (each.split([5, 0, 3]) for each in (x, w))
    for count, *others in rules(lambda x, w: moments(x, dims, weight=weigh(w), keepdim=True), *parts):
        right, *rights = whole(x, dims, weigh(w))
        assert weigh(w) is not None or count.shape == ()
        torch.testing.assert_close([count.expand_as(right), *others], [right, *rights])


def test_gradients_by_finite_differences():
    xs = [data(k, 2, seed=k) for k in (3, 0, 1)]
    ws = [data(k, 2, seed=9 + k).square() for k in (3, 0, 1)]
    factors = [1.0, -2.0, 3.0]  # each rank has its own loss
    check_gradients(lambda x, f: f * of_moments(moments(x, 0)), xs, factors, order=2, on=["simulated"])
    check_gradients(lambda x, w, f: f * of_moments(moments(x, 0, weight=w)), xs, ws, factors, on=["simulated"])
    check_gradients(lambda x, w, f: f * weighted_mean(x, weight=w).pow(3).sum(), xs, ws, factors, on=["simulated"])


def test_nothing_at_all_gives_zeros_and_zero_gradients():
    def zeros(x, w=None):
        x = x.clone().requires_grad_()
        found = [*moments(x, 0, weight=w), weighted_mean(x, weight=w)]
        sum(t.sum() for t in found).backward()
        return all((t == 0).all() for t in (*found, x.grad))

    assert all(rules(zeros, [torch.empty(0, 3)] * 3))
    assert all(rules(zeros, [data(2, 3), data(1, 3)], [torch.zeros(2, 1), torch.zeros(1, 1)]))


def test_a_class_that_no_rank_has():
    """Its statistics are 0 with zero gradients; those of the others are their own."""
    x, labels = data(5, 1), torch.tensor([0, 2, 2, 0, 2])

    def body(x, labels):
        x, w = x.clone().requires_grad_(), F.one_hot(labels, 4)
        found = [*moments(x.expand(-1, 4), 0, weight=w), weighted_mean(x.expand(-1, 4), weight=w)]
        (g,) = torch.autograd.grad(sum(t.sum() for t in found[1:]), x)
        return [t.detach() for t in found], g

    rows = [x[labels == c] if (labels == c).any() else torch.zeros(1, 1).double() for c in range(4)]
    mean, variance = (torch.cat(t) for t in zip(*((r.mean(0), r.var(0, correction=0)) for r in rows), strict=True))
    for found, g in rules(body, x.split([1, 0, 4]), labels.split([1, 0, 4])):
        torch.testing.assert_close(found, [torch.tensor([2.0, 0, 3, 0]).double(), mean, variance, mean])
        assert g.isfinite().all()


STATISTICS = {
    "mean": lambda x, w: moments(x, 0, weight=w).mean,
    "variance": lambda x, w: 2 * moments(x, 0, weight=w).variance,
    "weighted_mean": lambda x, w: weighted_mean(x, weight=w),
    "token_mean": lambda x, w: token_mean(x, w),
}


@pytest.mark.parametrize("mean", STATISTICS.values(), ids=STATISTICS)
def test_values_of_weight_zero_may_be_nan(mean):
    """Also where a rank has no others; the mean of nothing but weights of zero is 0."""
    x = torch.tensor([1.0, torch.nan, 3.0, torch.inf, torch.nan])

    def body(x, w):
        x = x.clone().requires_grad_()
        y = mean(x, w)
        return y.item(), torch.autograd.grad(y, x)[0].isfinite().all()

    for w, value in ((torch.tensor([True, False, True, False, False]), 2.0), (torch.zeros(5), 0.0)):
        assert rules(body, x.split([1, 3, 1]), w.split([1, 3, 1])) == [(value, True)] * 3


@pytest.mark.parametrize("many", [2, 64])
def test_a_large_mean_does_not_cost_precision(many):
    """Mean over deviation is 1000; the ranks' means differ by a deviation, which a rounded mean would not resolve."""
    xs = [(1000 + r + data(many, 5, seed=r)).float() for r in range(3)]
    _, _, variance = rules(lambda x: moments(x, 0), xs)[0]
    exact = torch.cat(xs).double().var(0, correction=0)
    assert ((variance.double() - exact) / exact).abs().max() < 1e-5
    together = torch.cat(xs)
    assert (((together**2).mean(0) - together.mean(0) ** 2 - exact) / exact).abs().max() > 0.01  # E[x²] − E[x]²


def test_half_precision_is_computed_in_float32():
    x = (data(3000, 1, dtype=torch.float) + 2).bfloat16()
    for count, mean, variance in rules(lambda x: moments(x, 0), x.split([2999, 1])):
        assert {count.dtype, mean.dtype, variance.dtype} == {torch.float32} and count == 3000
        torch.testing.assert_close(variance.double(), x.double().var(0, correction=0), rtol=1e-5, atol=0)
        torch.testing.assert_close(mean.double(), x.double().mean(0), rtol=1e-5, atol=0)
    assert weighted_mean(x).dtype == torch.float32


@weighted_or_not
def test_weighted_mean_equals_one_process(weigh):
    holds(
        lambda x, w: weighted_mean(x, weight=weigh(w)).pow(3).sum() / dc.get_world_size(),
        lambda x, w: whole(x, 0, weigh(w[:, None]))[1].pow(3).sum(),
        lambda n: (data(n, 3), weights(n)),
        sizes=SIZES,
        losses="sum",
    )


def test_weighted_mean_of_complex_values_and_along_another_dimension():
    z = torch.complex(data(4), data(4, seed=1))
    assert all(torch.isclose(m, z.mean()) for m in rules(weighted_mean, z.split([3, 1])))
    x, w = data(3, 4), data(4, seed=1)
    along = rules(lambda x, w: weighted_mean(x, weight=w, dim=1), x.split([1, 3], 1), w.split([1, 3]))
    torch.testing.assert_close(along[0], (x * w).sum(1) / w.sum())


# ── the mean over tokens ─────────────────────────────────────────────────────────────────────────────────


def tokens(n):
    """Losses (n, 3), and weights, of which some are zero."""
    weight = data(n, 3, seed=1).square() * (data(n, 3, seed=2) > -0.5)
    return data(n, 3), weight


def test_token_mean_is_that_of_one_process():
    """Of losses with a second derivative, and of weights that broadcast; an empty rank, too."""

    def of(mean):
        return lambda x, w: mean((x.sin() + x.square()).exp(), w) + mean(x.cos(), w[:, :1]) + mean(x, torch.tensor(1.0))

    holds(of(token_mean), of(mean_of_tokens), tokens, sizes=((6,), (4, 4), (5, 0, 3), (0, 4, 1)))


def test_kinds_of_weights():
    """A bool mask, counts, weights in half precision, and one weight for all."""
    x, w = tokens(7)
    for weight in (w > 0.5, (3 * w).int(), w.bfloat16(), torch.full((7, 1), 0.25)):
        want = mean_of_tokens(x, weight.double()).item()
        found = rules(lambda x, w: token_mean(x, w).item(), x.split([4, 0, 3]), weight.split([4, 0, 3]))
        assert found == [pytest.approx(want, rel=1e-12)] * 3
    assert token_mean(x, torch.tensor(0.5)) == token_mean(x)
