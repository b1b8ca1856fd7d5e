"""Barlow Twins, VICReg, KoLeo and SIGReg on ranks against one process, written from the papers' formulas."""

from functools import partial

import pytest
import torch
from references import barlow_twins, data, directions, holds, koleo, sigreg, vicreg
from runs import rules

import diffcoll as dc
from diffcoll.nn.functional import barlow_twins_loss, koleo_loss, sigreg_loss, vicreg_loss

SIZES = ((6,), (4, 4), (5, 3), (1, 6), (5, 0, 3), (0, 2, 1), (2, 3, 1, 2))


def views(n, dtype=torch.double, features=4):
    """Features of two views whose means and scales differ, some with a standard deviation above 1, some below."""
    g = torch.Generator().manual_seed(n)
    scale, offset = torch.linspace(0.3, 2.0, features), torch.linspace(-3, 5, features)
    first = torch.randn(n, features, generator=g)
    second = first + 0.5 * torch.randn(n, features, generator=g)
    return (first * scale + offset).to(dtype), (second * scale.flip(0) - offset).to(dtype)


def neighbours(n):
    """Rows of different norms, in pairs i, i + n // 2, which most splits separate."""
    half = data(n - n // 2, 4, seed=n) * torch.linspace(0.5, 4, n - n // 2)[:, None]
    return (torch.cat([half, half[: n // 2] + 0.2 * data(n // 2, 4, seed=1)]),)


def skewed(n):
    """Not normal, with different scales and means."""
    return (data(n, 3, seed=n).square() * torch.tensor([0.5, 1.0, 2.0]) - 0.7,)


def row(ours, whole, batch, **options):
    return partial(ours, **options), partial(whole, **options), batch


#: name → ours, of one process, batch
LOSSES = {
    "barlow twins": row(barlow_twins_loss, barlow_twins, views),
    "barlow twins, options": row(barlow_twins_loss, barlow_twins, views, lambda_param=0.02, eps=0.1),
    "vicreg": row(vicreg_loss, vicreg, views),
    "vicreg, options": row(vicreg_loss, vicreg, views, lambda_param=2.0, mu_param=3.0, nu_param=5.0),
    "koleo": row(koleo_loss, koleo, neighbours),
    "koleo, options": row(koleo_loss, koleo, neighbours, normalize=False, eps=0.1),
    "sigreg": row(sigreg_loss, sigreg, skewed, directions=directions(3), num_points=4),
    "sigreg, options": row(sigreg_loss, sigreg, skewed, directions=directions(3).half(), num_points=4, t_max=5.0),
}
each = pytest.mark.parametrize("name", LOSSES)


def on_ranks(loss, *xs, sizes):
    return [y.item() for y in rules(lambda *x: loss(*x).detach(), *(x.split(list(sizes)) for x in xs))]


def test_sigreg_as_published():
    """rbalestr-lab/lejepa: EppsPulley, SlicingUnivariateTest; MINIMAL.md has 256 directions."""
    x = skewed(9)[0].float()
    a = torch.randn(3, 256, generator=torch.Generator().manual_seed(4))
    t = torch.linspace(0, 3, 17)
    weights = torch.full((17,), 2 * 3 / 16)
    weights[0] = weights[-1] = 3 / 16
    angles = (x @ (a / a.norm(p=2, dim=0))).unsqueeze(-1) * t
    error = (angles.cos().mean(0) - (-t.square() / 2).exp()).square() + angles.sin().mean(0).square()
    published = (error @ (weights * (-t.square() / 2).exp()) * len(x)).mean()
    for value in on_ranks(partial(sigreg_loss, directions=a), x, sizes=(5, 0, 4)):
        assert value == pytest.approx(published.item(), rel=1e-5)
    torch.testing.assert_close(sigreg(x.double(), a), published.double(), rtol=1e-5, atol=0)


# ── laws ─────────────────────────────────────────────────────────────────────────────────────────────────


@each
def test_matches_one_process(name):
    sizes = SIZES if name[:6] in ("barlow", "vicreg") else [(1,) * 3, *SIZES[:-2]]
    holds(*LOSSES[name], sizes=sizes)


@each
def test_half_precision_and_autocast(name):
    """Computed in float32, of the numbers as they are; the same on every rank."""
    ours, one, make = LOSSES[name]
    for dtype in (torch.bfloat16, torch.float16):
        xs = [x.to(dtype) for x in make(64)]
        values = on_ranks(torch.autocast("cpu", dtype=torch.bfloat16)(ours), *xs, sizes=(40, 24))
        assert values == on_ranks(ours, *xs, sizes=(40, 24)) == [values[0]] * 2
        assert values[0] == pytest.approx(one(*(x.double() for x in xs)).item(), rel=5e-5)


@pytest.mark.parametrize("name", ["barlow twins", "vicreg"])
def test_a_large_mean_costs_no_precision(name):
    """Mean/std about 10⁵ in float32, where the mean itself is rounded by a hundredth of the standard deviation."""
    ours, one, make = LOSSES[name]
    xs = [z + 100_000 for z in make(64, torch.float32)]
    right = one(*(x.double() for x in xs)).item()
    assert on_ranks(ours, *xs, sizes=(40, 24)) == [pytest.approx(right, rel=1e-5)] * 2


def test_one_feature_and_no_variance():
    x = views(6, features=1)[0]
    assert on_ranks(vicreg_loss, x, x, sizes=(4, 2)) == [pytest.approx(vicreg(x, x).item())] * 2
    same = torch.ones(6, 3).double().requires_grad_()
    (g,) = torch.autograd.grad(vicreg_loss(same, same), same)
    assert g.isfinite().all()
    assert vicreg_loss(same, same).item() == pytest.approx(25 * (1 - 0.01))


def test_equal_rows_have_finite_gradients():
    assert all(g.isfinite().all() for g in rules(torch.func.grad(koleo_loss), torch.ones(4, 3).split([3, 1])))


@pytest.mark.parametrize(("seeds", "features"), [((0, 8), (4, 4)), ((0, 0), (3, 4))])
def test_ranks_with_different_directions_in_check_mode(seeds, features):
    """Also within vmap; equal ones pass."""

    def body(seed, size):
        with dc.check_mode():
            if features[0] == features[1]:
                sigreg_loss(data(4, size), data(size, 5))
            with pytest.raises(dc.CollectiveMismatchError, match="sigreg_loss"):
                torch.vmap(partial(sigreg_loss, directions=data(size, 5, seed=seed)))(data(2, 4, size))

    rules(body, seeds, features)
