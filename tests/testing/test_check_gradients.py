"""`check_gradients`: right gradients agree with finite differences, wrong ones do not, and what they are is said."""

import pytest
import torch
import torch.distributed as dist
from planted import CubedSum
from torch import nn
from torch.distributed.tensor import Partial, Replicate
from verdicts import SIMULATED, is_right, is_wrong, numbers, observed, per_rank, ruled

import diffcoll as dc
from diffcoll.testing import cases, check_gradients

N = 3
X = numbers(8, 2)
CALLS = [case for case in cases.table(N) if not any(case.shared) and "async_op" not in case.arguments and not case.few]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: f"{case.name}({case.label})")
def test_the_gradients_of_every_collective(case):
    def fn(x, r):
        return (case.call(x, r).sin() * (r + 1)).sum().abs()

    is_right(fn, [case.x(r, 5) for r in range(N)], range(N))


def wrong_sum(x, rule=lambda g: g):
    """A sum whose backward is another one."""
    return ruled(dc.all_reduce, rule)(x)


RULES = {
    "N times": (lambda g: 3 * dc.all_reduce(g), "x: the derivative of the losses, times 3 = N"),
    "1/N": (lambda g: dc.all_reduce(g, "mean"), "x: the derivative of the losses, times 0.3333 = 1/N"),
    "identity": (lambda g: g, "x: the derivative of the rank's own loss alone"),
    "own loss N times": (lambda g: 3 * g, "x: the derivative of the rank's own loss alone, times 3 = N"),
    "rank 1 missing": (lambda g: dc.all_reduce(g * (dc.get_rank() != 1)), "x: it lacks the loss of rank 1"),
    "maximum": (lambda g: dc.all_reduce(g, "max"), "x: not proportional"),
    "off by little": (lambda g: (1 + 3e-6) * dc.all_reduce(g), "x: the derivative of the losses"),
    "zero": (lambda g: 0 * g, "x: zero on every rank"),
    "zero on rank 2": (lambda g: dc.all_reduce(g) * (dc.get_rank() != 2), "x: zero on rank 2"),
    "by rank": (lambda g: dc.all_reduce(g) * (1 + dc.get_rank()), "x: not proportional"),
    "of the next rank": (lambda g: dc.shift(dc.all_reduce(g) * (1 + dc.get_rank())), "x: not proportional"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_wrong_rule_is_observed(name):
    rule, words = RULES[name]
    report = is_wrong(lambda x, w: (w * wrong_sum(x, rule)).sin().sum(), per_rank(4), per_rank(4, seed=9))
    assert words in observed(report), str(report)
    assert all(row.ok for row in report.tables[0].rows if row.what == "gradient of w")


def test_ranks_with_each_others_gradients():
    def fn(x, r):
        return ((r + 1) * ruled(lambda x: x**3, lambda g: dc.shift(g * 3 * x.detach() ** 2))(x)).sum()

    assert "rank 0 has that of rank 2" in observed(is_wrong(fn, per_rank(4), range(N)))


def test_many_elements_are_checked_along_random_directions():
    def fn(x, w):
        return (w * wrong_sum(x)).sin().sum()

    report = is_wrong(fn, per_rank(40, 3), per_rank(40, 3, seed=9))
    assert "x: the derivative of the rank's own loss alone" in observed(report)
    is_right(lambda x: dc.all_reduce(x, "product").sin().sum(), per_rank(40, 3), order=2)


def test_parameters_and_second_order():
    layer = nn.Linear(3, 2)

    def fn(layer, x, wrong=False):
        y = layer(x)
        y = dc.all_reduce(y.detach() + 0 * y if wrong and dc.get_rank() == 0 else y, "logsumexp")
        return (y**2).sum() * (1 + dc.get_rank())

    report = is_right(fn, per_rank(2, 3), module=layer, order=2)
    assert {"gradient of weight", "second order of bias"} <= {row.what for row in report.tables[0].rows}
    report = is_wrong(lambda layer, x: fn(layer, x, wrong=True), per_rank(2, 3), module=layer)
    assert "right if the calls of detach" in observed(report)
    assert "detach() at" in report.cuts[0] and report.notes
    report = is_wrong(lambda x: CubedSum.apply(x).sum(), per_rank(2), order=2)
    assert "first order is right" in observed(report)


@pytest.mark.parametrize("speed", [1e3, 1e4, 1e5])
def test_a_smooth_function_that_varies_fast_has_no_kink(speed):
    is_right(lambda x: (speed * dc.all_reduce(x)).sin().sum() / speed, per_rank(2))


@pytest.mark.parametrize(("at", "offset"), [(0.0, 0.0), (1e-3, 0.0), (-2e-5, 0.0), (0.0, 1e10), (1e-3, 1e8)])
def test_a_kink_and_a_point_beside_one(at, offset):
    xs = [torch.tensor([at if r == 1 else 0.0, r + 1.0], dtype=torch.double) for r in range(3)]

    def fn(x):
        return (dc.all_reduce(x).relu() * torch.tensor([1.0, 2.0])).sum() + offset

    if at:
        is_right(fn, xs)
    else:
        report = is_wrong(fn, xs)
        assert "not differentiable here" in observed(report)
        assert any(row.allowed is None for row in report.tables[0].rows)


class Counting:
    """Keeps a number and a tensor between calls."""

    def __init__(self):
        self.calls, self.seen = 0, torch.zeros(0, 3)

    def __call__(self, x):
        self.calls, self.seen = self.calls + 1, torch.cat([self.seen, torch.ones(1, 3)])
        return (x * self.calls * self.seen.sum(0)).sin().sum()


def test_state_and_random_numbers_are_the_same_in_every_evaluation():
    is_right(Counting(), per_rank(3), order=2)
    is_right(lambda x: (nn.functional.dropout(x, 0.5) * torch.rand(4)).sin().sum(), per_rank(4))


def test_tensors_of_different_sizes():
    def fn(x, y):
        return (dc.all_reduce(x) * 1e-4).sin().sum() + (1e4 * dc.all_reduce(y)).sin().sum()

    xs, ys = [1e4 * x for x in per_rank(3)], [1e-4 * y for y in per_rank(3, seed=9)]
    is_right(fn, xs, ys, order=2)
    for wrong in (lambda x, y: fn(wrong_sum(x) / 3, y), lambda x, y: fn(x, wrong_sum(y))):
        is_wrong(wrong, xs, ys)
    little = RULES["off by little"][0]
    for size in (1e-6, 1e6):
        is_wrong(lambda x, size=size: (wrong_sum(x, little) / size).sin().sum(), [size * x for x in per_rank(3)])


def test_a_complex_gradient_without_its_conjugate():
    """Its real part is right."""

    def fn(z, rule=dc.all_reduce):
        return ((1 + dc.get_rank()) * wrong_sum(z, rule) ** 2).sum().real

    zs = per_rank(3, dtype=torch.complex128)
    is_right(fn, zs)
    is_wrong(lambda z: fn(z, lambda g: dc.all_reduce(g).conj()), zs)


def test_large_losses():
    is_right(lambda x: 1e4 + dc.all_reduce(x, "product").sin().sum(), per_rank(3))
    with pytest.raises(ValueError, match="too large, or varies too fast"):
        is_right(lambda x: 1e12 + wrong_sum(x).sin().sum(), per_rank(3))


def test_constants():
    def fn(x, mask):
        return (dc.all_reduce(x * mask).sin() * mask.detach()).sum()

    xs, masks = [x.requires_grad_() for x in per_rank(4)], [torch.tensor([1.0, r, 0.5, 1.0]) for r in range(N)]
    report = is_right(fn, xs, masks)
    assert {row.what for row in report.tables[0].rows} == {"gradient of x"}
    is_wrong(fn, [x.detach() for x in xs], masks)


def test_other_peoples_collectives():
    def fn(x, w):
        y = x.clone()
        dist.all_reduce(y)
        return (w * y * x).sum()

    for on in (["simulated"], ["gloo"]):
        report = is_wrong(fn, per_rank(4, n=2), per_rank(4, n=2, seed=9), on=on)
        assert any("all_reduce at" in cut and "cuts the graph" in cut for cut in report.cuts)


# ── tensors that are one variable on all ranks, and a loss that all ranks return ─────────────────────────

ONE_LOSS = {"output": Replicate()}


def alike(*shape, n=3):
    return per_rank(*shape, n=1, seed=7) * n


def mlp(x, w, v, f=dc.sum_gradients, g="replicate"):
    """Column-parallel and row-parallel layers: f is the identity with a sum in backward, g a sum."""
    y = torch.tanh(f(x) @ w) @ v
    return dc.all_reduce(y, grad_placement=g).sin().sum()


def weights(n):
    return per_rank(3, 2, n=n, seed=20), per_rank(2, 4, n=n, seed=30)


def same(x):
    return x


def norm(x, w, reduce):
    """A norm of the rank's part of a sequence, with weights that all ranks have; the losses are summed."""
    return (reduce(w) * x / x.norm(dim=-1, keepdim=True)).pow(3).sum()


class Net(nn.Module):
    def __init__(self, reduce):
        super().__init__()
        self.reduce, self.norm = reduce, nn.LayerNorm(4)

    def forward(self, x):
        weight, bias = (self.reduce(p) for p in self.norm.parameters())
        return nn.functional.layer_norm(x, (4,), weight, bias).pow(3).sum()


def called(module, x):
    return module(x)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_right_shared_variables(n):
    w, v = weights(n)
    x, rows = alike(5, 3, n=n), per_rank(2, 4, n=n)
    both = {"x": Replicate(), **ONE_LOSS}

    is_right(mlp, x, w, v, placements=both)
    is_right(lambda x, w, v: mlp(x, w, v, f=same), x, w, v, placements={"x": Partial(), **ONE_LOSS})
    is_right(lambda x, w, v: mlp(x, w, v, g="partial"), x, w, v, placements={"x": Replicate()})  # the sum of N losses
    is_right(lambda x, w: norm(x, w, dc.sum_gradients), rows, alike(4, n=n), placements={"w": Replicate()})
    is_right(lambda x, w: norm(x, w, same), rows, alike(4, n=n), placements={"w": Partial()})
    is_right(called, rows, module=Net(same), placements={"norm.*": Partial()})
    more = {"*.weight": Replicate(), "norm.bias": Replicate()}
    is_right(called, rows, module=Net(dc.sum_gradients), placements=more)
    is_right(lambda x: dc.all_reduce(x.sin()).sum() * x.sum(), alike((), n=n), placements={"x": Partial()})


WRONG = {
    "no f": (lambda x, w, v: mlp(x, w, v, f=same), "x", {"x": Replicate(), **ONE_LOSS}),
    "g of a partial gradient": (
        lambda x, w, v: mlp(x, w, v, g="partial"),
        "x, w and v",
        {"x": Replicate(), **ONE_LOSS},
    ),
    "said to be partial": (mlp, "x", {"x": Partial(), **ONE_LOSS}),
    "no collective": (lambda x, w, v: (torch.tanh(x @ w) @ v).sin().sum(), "x", {"x": Replicate(), **ONE_LOSS}),
    "variables of their own": (lambda x, w, v: mlp(x.clone(), w, v, f=same), "x", {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shared_variables(name):
    fn, wrong, placements = WRONG[name]
    w, v = weights(N)
    report = is_wrong(fn, alike(5, 3) if placements else per_rank(5, 3), w, v, placements=placements)
    assert wrong in str(report)


def test_a_norm_whose_weights_nobody_sums():
    is_wrong(called, per_rank(2, 4), module=Net(same), placements={"norm.*": Replicate()})


def test_shared_variables_on_processes():
    w, v = weights(2)
    placements = {"x": Replicate(), **ONE_LOSS}
    is_right(mlp, alike(5, 3, n=2), w, v, placements=placements, on=["gloo"])
    is_wrong(lambda x, w, v: mlp(x, w, v, same), alike(5, 3, n=2), w, v, placements=placements, on=["gloo"])


# ── wrong arguments ──────────────────────────────────────────────────────────────────────────────────────

ONE = {"x": Replicate()}
BAD = {
    "equal": (([X, X],), {}, "per_rank"),
    "no tensors": (([1, 2],), {}, "per_rank"),
    "lengths": (([X, 2 * X], [1]), {}, "expected"),
    "structures": (([X, (X, 2 * X)],), {}, "per_rank"),
    "order": (([X, 2 * X],), {"order": 0}, "order"),
    "on": (([X, 2 * X],), {"on": "gloo"}, "on"),
    "unused module": (([X, 2 * X],), {"module": nn.Linear(2, 2)}, "module"),
    "not finite": (([X, 2 * X.log()],), {}, "fn"),
    "other numbers": (([X, 2 * X], [X[:1], X[1:2]]), {"placements": {"y": Replicate()}}, "placements"),
    "another name": (([X, 2 * X],), {"placements": {"v": Replicate()}}, "placements"),
    "placements": (([X, 2 * X],), {"placements": 3}, "placements"),
    "a partial output": (([X, 2 * X],), {"placements": {"output": Partial()}}, "placements"),
    "order of shared": (([X, X + 1],), {"placements": {"y": Replicate()}, "order": 2}, "placements"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_argument(name):
    given, more, words = BAD[name]

    def two(x, y=None):
        return x.sum() + (0 if y is None else y.sum())

    f = two if "module" not in more else lambda module, x: x.sum()
    with pytest.raises((TypeError, ValueError), match=words) as raised:
        check_gradients(f, *given, **{**SIMULATED, **more})
    assert str(raised.value).startswith("check_gradients: ")


def test_a_loss_without_a_gradient():
    with pytest.raises(ValueError, match="depend on no tensor"):
        is_right(lambda x: 3.0 + dc.get_rank(), per_rank(3))
    report = is_wrong(lambda x: dc.all_reduce(x).sum().item() * (1 + dc.get_rank()), per_rank(3))
    assert "zero on every rank" in observed(report)


def test_equal_ranks_are_one_variable_if_that_is_said():
    def fn(x, w):
        return (dc.sum_gradients(x) * w).sin().sum()

    is_right(fn, alike(4), per_rank(4), placements=ONE)
    with pytest.raises(ValueError, match="the same numbers"):
        is_right(fn, alike(4), alike(4), placements=ONE)
