"""Barlow Twins and VICReg on ranks against one process with the whole batch, written from the papers' formulas."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from references import barlow_twins, vicreg
from releases import compiles, one_graph
from runs import gloo, gloo_messages, refusal, rules

import diffcoll as dc
from diffcoll.nn import BarlowTwinsLoss
from diffcoll.nn.functional import barlow_twins_loss, vicreg_loss
from diffcoll.testing import assert_matches_single_process, simulate

SIZES = ((6,), (4, 4), (5, 3), (1, 6), (5, 0, 3), (0, 2, 1))
LOSSES = [barlow_twins_loss, vicreg_loss]


def barlow_paper(z1, z2, lambd=5e-3, eps=1e-5):
    """Zbontar et al. 2021, equations 1 and 2, with the batch norm of the published code."""
    n1, n2 = (F.batch_norm(z, None, None, training=True, eps=eps) for z in (z1, z2))
    loss = 0
    for i in range(z1.shape[1]):
        for j in range(z1.shape[1]):
            c = (n1[:, i] * n2[:, j]).mean()
            loss = loss + ((1 - c) ** 2 if i == j else lambd * c**2)
    return loss


PAPERS = {barlow_twins_loss: barlow_twins, vicreg_loss: vicreg}


def rows(n, features=4, dtype=torch.double, seed=0):
    """Features of two views whose means and scales differ, some with a standard deviation above 1, some below."""
    g = torch.Generator().manual_seed(100 * seed + n)
    scale, offset = torch.linspace(0.3, 2.0, features), torch.linspace(-3, 5, features)
    first = torch.randn(n, features, generator=g)
    second = first + 0.5 * torch.randn(n, features, generator=g)
    return (first * scale + offset).to(dtype), (second * scale.flip(0) - offset).to(dtype)


def test_the_reference_is_the_published_formula():
    for n in (2, 7):
        torch.testing.assert_close(barlow_twins(*rows(n)), barlow_paper(*rows(n)))


@pytest.mark.parametrize("rank_reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES)
def test_matches_one_process(loss, rank_reduction):
    def distributed(z1, z2):
        return loss(z1, z2, rank_reduction=rank_reduction)

    on = ["simulated", "gloo"] if rank_reduction == "mean" else ["simulated"]
    report = assert_matches_single_process(
        distributed, PAPERS[loss], rows, sizes=SIZES, rank_reduction=rank_reduction, order=2, on=on, tolerance=1e-10
    )
    assert report.ok


def test_matches_one_process_on_mpi():
    def both(z1, z2):
        return barlow_twins_loss(z1, z2, lambd=0.02) + vicreg_loss(z1, z2, cov_coeff=3.0)

    def single(z1, z2):
        return barlow_paper(z1, z2, lambd=0.02) + vicreg(z1, z2, cov=3.0)

    assert_matches_single_process(both, single, rows, sizes=[(3, 0, 4)], order=2, on=["mpi"], tolerance=1e-10)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_an_encoder_under_a_mean(loss):
    """The mean over ranks of the gradients of an encoder's parameters, as DDP takes it."""
    encoder = torch.nn.Linear(3, 5).double()

    def of(function):
        return lambda x1, x2: function(torch.tanh(encoder(x1)), torch.tanh(encoder(x2)))

    batch = partial(rows, features=3, seed=1)
    assert_matches_single_process(
        of(loss), of(PAPERS[loss]), batch, module=encoder, sizes=[(5, 0, 3)], order=2, on=["simulated"], tolerance=1e-10
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_ranks_that_weight_the_loss_differently(loss):
    """The gradient is that of Σ_r w_r · (the value on rank r): what arrives differs between ranks."""
    weights = [1.0, 10.0, -3.0]
    parts = list(zip(*(z.split([3, 1, 2]) for z in rows(6)), strict=True))
    leaves = [[z.clone().requires_grad_() for z in part] for part in parts]
    torch.autograd.backward(simulate(lambda zs, w: w * loss(*zs), leaves, weights))

    def gradients(zs, w):
        zs = [z.clone().requires_grad_() for z in zs]
        return torch.autograd.grad(w * loss(*zs), zs)

    for found, expected in zip(rules(gradients, parts, weights), leaves, strict=True):
        torch.testing.assert_close(list(found), [z.grad for z in expected], rtol=1e-10, atol=1e-12)
    if loss is barlow_twins_loss:  # the whole loss on each rank: Σ_r w_r times its gradient
        whole = [z.clone().requires_grad_() for z in rows(6)]
        (sum(weights) * barlow_paper(*whole)).backward()
        for i, z in enumerate(whole):
            torch.testing.assert_close(torch.cat([part[i].grad for part in leaves]), z.grad, rtol=1e-10, atol=1e-12)


def test_values_on_each_rank():
    z1, z2 = rows(8)
    parts = z1.split([5, 0, 3]), z2.split([5, 0, 3])
    whole = barlow_paper(z1, z2)
    for value in simulate(barlow_twins_loss, *parts):
        torch.testing.assert_close(value, whole)
    for value in simulate(partial(barlow_twins_loss, rank_reduction="sum"), *parts):
        torch.testing.assert_close(value, whole / 3)
    values = simulate(vicreg_loss, *parts)
    torch.testing.assert_close(sum(values) / 3, vicreg(z1, z2))
    assert values[0] > values[1]  # of no row: the variances and covariances alone


@pytest.mark.parametrize("loss", LOSSES)
def test_half_precision_is_computed_in_float32(loss):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        z1, z2 = rows(64, dtype=dtype)
        expected = PAPERS[loss](z1.double(), z2.double())
        for value in simulate(loss, z1.split([40, 24]), z2.split([40, 24])):
            assert value.dtype == torch.float32
        values = simulate(loss, z1.split([40, 24]), z2.split([40, 24]))
        torch.testing.assert_close(sum(values).double() / 2, expected, rtol=2e-5, atol=0)
    z1 = z1.to(torch.bfloat16).requires_grad_()
    loss(z1, z2).backward()  # two dtypes
    assert z1.grad.dtype == torch.bfloat16 and z1.grad.any()


@pytest.mark.parametrize("loss", LOSSES)
def test_autocast_changes_nothing(loss):
    def cast(z1, z2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(z1, z2)

    z1, z2 = rows(8, dtype=torch.float32)
    parts = z1.split([5, 3]), z2.split([5, 3])
    assert simulate(cast, *parts) == simulate(loss, *parts)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_large_mean_costs_no_precision(loss):
    """Mean/std about 10⁵ in float32, where the mean itself is rounded by a hundredth of the standard deviation."""
    z1, z2 = (z + 100_000 for z in rows(64, dtype=torch.float32))
    values = simulate(loss, z1.split([40, 24]), z2.split([40, 24]))
    torch.testing.assert_close(sum(values).double() / 2, PAPERS[loss](z1.double(), z2.double()), rtol=1e-5, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_one_feature_and_no_variance(loss):
    z1, z2 = rows(5, features=1)
    for a, b in ((z1, z2), (z1, torch.full_like(z2, 3.0))):
        values = simulate(loss, a.split([2, 3]), b.split([2, 3]))
        torch.testing.assert_close(sum(values) / 2, PAPERS[loss](a, b))


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_sent(loss):
    """Two messages forward, of 2 D + 3 and D² + 4 D numbers, and one backward, of one number."""
    d = 7

    def body(z1, z2):
        values = []
        forward = gloo_messages(lambda: values.append(loss(z1.requires_grad_(), z2.requires_grad_())))
        return forward, gloo_messages(values[0].backward)

    forward, backward = gloo(body, *(z.split([5, 3]) for z in rows(8, features=d)))[0]
    assert forward == [("all_reduce", 2 * d + 3), ("all_reduce", d * d + 4 * d)]
    assert backward == [("all_reduce", 1)]


@pytest.mark.parametrize("loss", LOSSES)
def test_torch_func(loss):
    z1, z2 = rows(8)
    whole = torch.func.grad(PAPERS[loss])(z1, z2)
    parts = z1.split([5, 3]), z2.split([5, 3])
    found = rules(lambda a, b: torch.func.grad(loss)(a, b) / 2, *parts)
    torch.testing.assert_close(torch.cat(found), whole)
    stacked = torch.stack([z1, 2 * z1]), torch.stack([z2, z2])
    expected = torch.stack([PAPERS[loss](z1, z2), PAPERS[loss](2 * z1, z2)])
    for sizes in [(5, 3), (8, 0)]:
        both = rules(lambda a, b: torch.vmap(loss)(a, b), *(z.split(sizes, 1) for z in stacked))
        torch.testing.assert_close(sum(both) / 2, expected)
        each = torch.vmap(torch.func.grad(loss))
        found = rules(lambda a, b: each(a, b) / 2, *(z.split(sizes, 1) for z in stacked))  # noqa: B023
        torch.testing.assert_close(torch.cat(found, 1)[0], whole)


@compiles
def test_compiles_to_one_graph():
    def both(z1, z2):
        return barlow_twins_loss(z1, z2) + vicreg_loss(z1, z2)

    z1, z2 = rows(8)
    a, b = z1.clone().requires_grad_(), z1.clone().requires_grad_()
    one_graph(both)(a, z2).backward()
    both(b, z2).backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("sizes", [(0, 0), (0, 1)])
def test_too_few_rows_are_an_error_on_every_rank(loss, sizes):
    def body(z1, z2):
        return refusal(ValueError, loss, z1, z2)

    expected = (
        f"{loss.__name__}: batch: got {sum(sizes)} rows on all ranks together, expected at least 2; "
        "skip this step on all ranks"
    )
    assert simulate(body, *(z.split(sizes) for z in rows(sum(sizes)))) == [expected, expected]


X = torch.ones(4, 3)
BAD = [
    ((X[0], X[0]), {}, r"z1: got shape \(3,\), expected \(b, D\) with D > 0; z.flatten\(1\) makes"),
    ((X[:, :0], X[:, :0]), {}, r"z1: got shape \(4, 0\), expected \(b, D\) with D > 0"),
    (
        (X, X[:2]),
        {},
        r"z2: got shape \(2, 3\), expected \(4, 3\), the shape of z1; row i of both is of the same sample",
    ),
    ((X, [1.0]), {}, "z2: got list, expected a tensor"),
    ((X.long(), X), {}, r"z1: got torch.int64, expected a floating-point tensor; pass x.float\(\)"),
    ((X.cfloat(), X), {}, "z1: got torch.complex64, expected a floating-point tensor"),
    ((X, X), {"eps": -1.0}, "eps: got -1.0, expected a finite non-negative number"),
    ((X, X), {"eps": None}, "eps: got NoneType, expected a number"),
    ((X, X), {"rank_reduction": "none"}, 'rank_reduction: got \'none\', expected "mean" or "sum"'),
]


@pytest.mark.parametrize(("arguments", "options", "text"), BAD)
@pytest.mark.parametrize("loss", LOSSES)
def test_errors(loss, arguments, options, text):
    with pytest.raises((TypeError, ValueError), match=f"^{loss.__name__}: {text}"):
        loss(*arguments, **options)


def test_a_group_is_passed_on():
    with pytest.raises(TypeError, match="group"):
        BarlowTwinsLoss(group="no group")(*rows(4))
    assert dc.get_world_size() == 1
