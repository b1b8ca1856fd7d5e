"""SIGReg on ranks against one process with the whole batch, from the paper's formula, and the published code."""

import math
from functools import partial

import pytest
import torch
from references import data, holds, sigreg
from releases import compiles, one_graph
from runs import gloo, gloo_messages, refusal, rules, runs_on
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from diffcoll.nn.functional import sigreg_loss
from diffcoll.testing import new_group, simulate

SIZES = ((6,), (4, 4), (5, 0, 3), (0, 1, 0))
FEW = {"num_slices": 5, "num_points": 4}


def rows(n):
    """Not normal, with different scales and means."""
    return (data(n, 3, seed=n).square() * torch.tensor([0.5, 1.0, 2.0]) - 0.7,)


def on_ranks(x, sizes, **options):
    return simulate(partial(sigreg_loss, **options), x.split(list(sizes)))


@pytest.mark.parametrize("rank_reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", [{"seed": 0}, {"seed": 7, "t_max": 5.0}], ids=str)
def test_matches_one_process(options, rank_reduction):
    ours = partial(sigreg_loss, rank_reduction=rank_reduction, **FEW, **options)
    on = ["simulated", "gloo"] if rank_reduction == "mean" else ["simulated"]
    holds(ours, partial(sigreg, **FEW, **options), rows, sizes=SIZES, rank_reduction=rank_reduction, on=on)


def test_defaults_are_those_of_the_published_code():
    """rbalestr-lab/lejepa: EppsPulley, SlicingUnivariateTest; MINIMAL.md has 256 directions."""
    x = rows(9)[0].float()
    a = torch.randn(3, 256, generator=torch.Generator().manual_seed(4))
    t = torch.linspace(0, 3, 17)
    weights = torch.full((17,), 2 * 3 / 16)
    weights[0] = weights[-1] = 3 / 16
    angles = (x @ (a / a.norm(p=2, dim=0))).unsqueeze(-1) * t
    error = (angles.cos().mean(0) - (-t.square() / 2).exp()).square() + angles.sin().mean(0).square()
    published = (error @ (weights * (-t.square() / 2).exp()) * len(x)).mean()
    for value in on_ranks(x, (5, 0, 4), seed=4):
        torch.testing.assert_close(value, published)
    torch.testing.assert_close(sigreg(x.double(), 4), published.double(), rtol=1e-5, atol=0)


def test_the_integral_in_closed_form():
    """One dimension has one direction, up to its sign, on which the statistic does not depend."""
    (x,) = (rows(8)[0][:, :1],)
    value = on_ranks(x, (5, 3), seed=1, num_slices=2, num_points=300, t_max=12.0)[0]
    pairs = (-(x - x.T).square() / 2).exp().mean() - math.sqrt(2) * (-x.square() / 4).exp().mean() + 1 / math.sqrt(3)
    torch.testing.assert_close(value, math.sqrt(2 * math.pi) * 8 * pairs, rtol=1e-12, atol=0)


def test_the_number_of_rows_multiplies():
    (x,) = rows(6)
    once, twice = on_ranks(x, (4, 2), seed=0)[0], on_ranks(torch.cat([x, x]), (4, 8), seed=0)[0]
    torch.testing.assert_close(twice, 2 * once)


def test_values_on_each_rank():
    (x,) = rows(8)
    whole = sigreg(x, 3)
    for value in on_ranks(x, (5, 0, 3), seed=3):
        torch.testing.assert_close(value, whole)
    for value in on_ranks(x, (5, 0, 3), seed=3, rank_reduction="sum"):
        torch.testing.assert_close(value, whole / 3)


def test_ranks_that_weight_the_loss_differently():
    (x,) = rows(6)
    weights = [1.0, 10.0, -3.0]

    def gradient(x, w):
        return torch.func.grad(lambda x: w * sigreg_loss(x, seed=2, **FEW))(x)

    found = torch.cat(rules(gradient, x.split([3, 1, 2]), weights))
    torch.testing.assert_close(found, sum(weights) * torch.func.grad(lambda x: sigreg(x, 2, **FEW))(x))


def test_seeds():
    """Another seed, other directions; the random numbers of PyTorch stay as they are."""
    (x,) = rows(8)
    before = torch.get_rng_state()
    values = [on_ranks(x, (5, 3), seed=seed)[0] for seed in (0, 1, 0, 2**63 - 1)]
    assert values[0] == values[2]
    assert len(set(map(float, values))) == 3
    assert torch.get_rng_state().equal(before)
    torch.set_default_dtype(torch.double)
    try:
        assert sigreg_loss(x, seed=0).equal(on_ranks(x, (8,), seed=0)[0])
    finally:
        torch.set_default_dtype(torch.float)


def test_large_and_tiny_features():
    """Nothing overflows. Of collapsed features the loss has a limit, B ∫ (1 − exp(−t²/2))² exp(−t²/2) dt."""
    (x,) = rows(8)
    for scale in (0.0, 1e-30, 1e-3, 1e3, 1e30):
        values = on_ranks((x * scale).float(), (5, 3), seed=0)
        assert values[0].isfinite()
        if scale < 1e4:
            torch.testing.assert_close(values[0].double(), sigreg((x * scale).float().double(), 0), rtol=1e-3, atol=0)
        found = rules(torch.func.grad(partial(sigreg_loss, seed=0)), (x * scale).float().split([5, 3]))
        assert all(g.isfinite().all() for g in found)


def test_half_precision_is_computed_in_float32():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = rows(64)[0].to(dtype)
        values = on_ranks(x, (40, 24), seed=0)
        assert values[0].dtype == torch.float32
        torch.testing.assert_close(values[0].double(), sigreg(x.double(), 0), rtol=2e-5, atol=0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert sigreg_loss(x, seed=0) == sigreg_loss(x.float(), seed=0)


def test_what_is_sent():
    """One message forward, of the cosines, the sines, what tells seeds apart, the number of rows and a bit."""

    def body(x):
        values = []
        forward = gloo_messages(lambda: values.append(sigreg_loss(x.requires_grad_(), seed=0, **FEW)))
        return forward, gloo_messages(values[0].backward)

    for forward, backward in gloo(body, rows(8)[0].split([5, 3])):
        assert forward == [("all_reduce", 2 * 5 * 3 + 8)]
        assert backward == [("all_reduce", 1)]


def test_torch_func():
    """Several views: vmap over them, in one message."""
    (x,) = rows(8)
    views, loss = torch.stack([x, 2 * x]), partial(sigreg_loss, seed=5, **FEW)
    expected = torch.stack([sigreg(view, 5, **FEW) for view in views])
    for sizes in [(5, 3), (8, 0)]:
        for values in rules(torch.vmap(loss), views.split(sizes, 1)):
            torch.testing.assert_close(values, expected)
        found = rules(torch.vmap(torch.func.grad(loss)), views.split(sizes, 1))
        want = torch.stack([torch.func.grad(lambda z: sigreg(z, 5, **FEW))(view) for view in views])
        torch.testing.assert_close(torch.cat(found, 1), 2 * want)
    tangents = data(8, 3, seed=1)
    found = rules(lambda x, v: torch.func.jvp(loss, (x,), (v,))[1], x.split([5, 3]), tangents.split([5, 3]))
    want = torch.func.jvp(partial(sigreg, seed=5, **FEW), (x,), (tangents,))[1]
    torch.testing.assert_close(torch.stack(found), want.expand(2))


def test_a_part_of_the_ranks():
    """Rank 1 takes no part, and its own group is another one, with another seed."""

    def body(x, seed):
        pair, other = new_group([0, 2]), new_group([1])
        group = other if dc.get_rank() == 1 else pair
        return torch.func.grad(lambda x: sigreg_loss(x, seed=seed, group=group, **FEW))(x)

    (x,) = rows(9)
    for run in (rules, gloo):
        first, alone, last = run(body, x.split([4, 2, 3]), [0, 1, 0])
        torch.testing.assert_close(alone, torch.func.grad(lambda z: sigreg(z, 1, **FEW))(x[4:6]))
        want = torch.func.grad(lambda z: sigreg(z, 0, **FEW))(torch.cat([x[:4], x[6:]]))
        torch.testing.assert_close(torch.cat([first, last]), 2 * want)


def test_a_recomputed_loss_has_the_same_directions():
    (x,) = rows(6)
    z = x.clone().requires_grad_()
    checkpoint(lambda z: sigreg_loss(z, seed=4, **FEW), z, use_reentrant=False).backward()
    torch.testing.assert_close(z.grad, torch.func.grad(lambda z: sigreg(z, 4, **FEW))(x))


@compiles
def test_compiles_to_one_graph():
    """One graph for the first seed, one for all others; directions are those of eager code."""
    compiled = one_graph(sigreg_loss)
    for seed, n in ((0, 8), (1, 5), (2, 6)):
        (x,) = rows(n)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        with torch._dynamo.config.patch(error_on_recompile=seed == 2):
            value = compiled(a, seed=seed, **FEW)
        value.backward()
        want = sigreg(b, seed, **FEW)
        want.backward()
        torch.testing.assert_close(value, want)
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("ranks", [1, 3])
def test_no_row_on_any_rank_is_an_error_on_every_rank(ranks):
    expected = "sigreg_loss: batch: got 0 rows on all ranks together, expected at least 1; skip this step on all ranks"
    found = simulate(lambda x: refusal(ValueError, sigreg_loss, x, seed=0), [torch.empty(0, 3)] * ranks)
    assert found == [expected] * ranks


@pytest.mark.parametrize(
    ("option", "values"), [("seed", [0, 1]), ("num_points", [17, 18]), ("num_slices", [4, 5]), ("t_max", [3.0, 4.0])]
)
def test_check_mode_compares_options(option, values):
    def body(x, value):
        with dc.check_mode():
            return refusal(dc.CollectiveMismatchError, sigreg_loss, x, **{"seed": 0, option: value})

    for text in rules(body, rows(8)[0].split([5, 3]), values):
        assert all(f"{option}={value}" in text for value in values)


@runs_on("rules", "gloo")
def test_ranks_with_different_seeds(run):
    """Also if one of many ranks has another one, and within a transform."""
    x = rows(8)[0]

    def body(r):
        loss = partial(sigreg_loss, seed=4 + (r == 2) * 2**40, **FEW)
        return [refusal(dc.CollectiveMismatchError, call, x) for call in (loss, torch.func.grad(loss))]

    for r, texts in enumerate(run(body, range(3))):
        got = 4 + (r == 2) * 2**40
        assert all(
            text.startswith(f"sigreg_loss: seed: got {got}, with D = 3, expected the same on all ranks")
            for text in texts
        )


@runs_on("rules", "gloo")
def test_ranks_with_different_numbers_of_features(run):
    """Their messages have the same size."""

    def body(r):
        x = torch.ones(4, 3 + (r == 1), dtype=torch.double)
        return refusal(dc.CollectiveMismatchError, sigreg_loss, x, seed=4, **FEW)

    for r, text in enumerate(run(body, range(2))):
        assert text.startswith(f"sigreg_loss: seed: got 4, with D = {3 + r}, expected the same on all ranks")


def test_the_seed_is_told_apart_on_many_ranks_in_float32():
    x = rows(8)[0].float()
    assert torch.stack(rules(lambda x: sigreg_loss(x, seed=60, num_slices=1, num_points=2), [x] * 300)).isfinite().all()
    with pytest.raises(dc.CollectiveMismatchError, match="seed"):
        rules(lambda x, seed: sigreg_loss(x, seed=seed, num_slices=1, num_points=2), [x] * 300, [60] * 299 + [61])


def test_check_mode_compares_the_size_of_the_features():
    def body(x):
        with dc.check_mode():
            return refusal(dc.CollectiveMismatchError, sigreg_loss, x, seed=0)

    for text in gloo(body, [torch.ones(2, 3), torch.ones(2, 4)]):
        assert "D=3" in text and "D=4" in text


X = torch.ones(4, 3)
BAD = [
    (X[0], {}, r"features: got shape \(3,\), expected shape \(b, D\); flatten the features"),
    (X[:, :0], {}, r"features: got shape \(4, 0\), expected shape \(b, D\)"),
    (X.long(), {}, "features: got torch.int64, expected float16, bfloat16, float32 or float64"),
    ([1.0], {}, r"features: got list, expected a tensor of shape \(b, D\)"),
    (X, {"seed": -1}, "seed: got -1, expected an integer of at least 0"),
    (X, {"seed": 0.5}, "seed: got 0.5, expected an integer of at least 0"),
    (X, {"seed": True}, "seed: got True, expected an integer of at least 0"),
    (X, {"seed": None}, "seed: got None, expected an integer of at least 0"),
    (X, {"seed": 2**63}, "seed: got 9223372036854775808, expected an integer below 2⁶³; the number of the step is one"),
    (X, {"num_slices": 0}, "num_slices: got 0, expected an integer of at least 1"),
    (X, {"num_points": 1}, "num_points: got 1, expected an integer of at least 2"),
    (X, {"t_max": 0}, "t_max: got 0, expected a number above 0; the published code has 3"),
    (X, {"t_max": -3.0}, "t_max: got -3.0, expected a finite non-negative number"),
    (X, {"t_max": "3"}, "t_max: got str, expected a number"),
    (X, {"rank_reduction": "none"}, 'rank_reduction: got \'none\', expected "mean" or "sum"'),
]


@pytest.mark.parametrize(("features", "options", "text"), BAD)
def test_errors(features, options, text):
    with pytest.raises((TypeError, ValueError), match=f"^sigreg_loss: {text}"):
        sigreg_loss(features, **{"seed": 0, **options})


def test_the_module():
    module = dc.nn.SIGRegLoss(num_slices=7, rank_reduction="sum")
    (x,) = rows(5)
    assert module(x, seed=3) == sigreg_loss(x, seed=3, num_slices=7)
    with pytest.raises(TypeError, match="seed"):
        module(x)
