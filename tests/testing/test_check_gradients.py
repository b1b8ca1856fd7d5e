"""`check_gradients`: right gradients agree with finite differences, wrong ones do not, and what they are is said."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from planted import CubedSum
from sharded_programs import called
from torch import nn
from torch.distributed.tensor import Partial, Replicate
from verdicts import SIMULATED, is_right, is_wrong, numbers, observed, per_rank, ruled

import diffcoll as dc
from diffcoll.testing import cases, check_gradients, simulate

N = 3
X = numbers(8, 2)
CALLS = {
    case.name: case for case in cases.table(N) if not (any(case.shared) or case.few or "async_op" in case.arguments)
}


@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)
def test_the_gradients_of_every_collective(case):
    def fn(x, r):
        return (case.call(x, r).sin() * (r + 1)).sum().abs()

    is_right(fn, [case.x(r, 5) for r in range(N)], range(N))


#: A backward of the sum, and what `verify` measures wrong then.
SEEN = {
    "right if all ranks have the same loss": (lambda g: N * g, {"gradient", "second"}),
    "right once": (lambda g: dc.all_reduce(g.detach()), {"second"}),
}


@pytest.mark.parametrize(("rule", "wrong"), SEEN.values(), ids=SEEN)
def test_the_program_of_verify_sees_what_is_wrong(rule, wrong):
    case = cases.table(N)[0]
    expected = cases.in_truth(case, 0)

    def body(r):
        (found,) = cases.derivatives([(case, r)], lambda xs: [ruled(dc.all_reduce, rule)(x) for x in xs], 0)
        return cases.errors(found, expected, r)

    for errors in simulate(body, range(N)):
        assert {name for name, error in errors.items() if error > 1e-6} == wrong


# ── functions ────────────────────────────────────────────────────────────────────────────────────────────


def wrong_sum(x, rule=lambda g: g):
    """A sum whose backward is another one."""
    return ruled(dc.all_reduce, rule)(x)


def with_rule(rule):
    return lambda x, w: (w * wrong_sum(x, rule)).sin().sum()


def little(g):
    return (1 + 3e-6) * dc.all_reduce(g)


def in_turn(x, r):
    """Every rank has the gradient of the next one."""
    return ((r + 1) * ruled(lambda x: x**3, lambda g: dc.shift(g * 3 * x.detach() ** 2))(x)).sum()


def fast(speed):
    return lambda x: (speed * dc.all_reduce(x)).sin().sum() / speed


def bent(offset):
    return lambda x: (dc.all_reduce(x).relu() * torch.tensor([1.0, 2.0])).sum() + offset


def absolute(x):
    return dc.all_reduce(x).abs().sum()


def beside(at):
    """Points that are so far from a kink of `bent`."""
    return [torch.tensor([at if r == 1 else 0.0, r + 1.0], dtype=torch.double) for r in range(N)]


class Counting:
    """Keeps a number and a tensor between calls."""

    def __init__(self):
        self.calls, self.seen = 0, torch.zeros(0, 3)

    def __call__(self, x):
        self.calls, self.seen = self.calls + 1, torch.cat([self.seen, torch.ones(1, 3)])
        return (x * self.calls * self.seen.sum(0)).sin().sum()


def product(x):
    return dc.all_reduce(x, "product").sin().sum()


def cubed(x):
    return CubedSum.apply(x).sum()


def scaled(size):
    return lambda x: (wrong_sum(x, little) / size).sin().sum()


def of_sizes(x, y, reduce_x=dc.all_reduce, reduce_y=dc.all_reduce):
    return (reduce_x(x) * 1e-4).sin().sum() + (1e4 * reduce_y(y)).sin().sum()


def conjugated(z, rule=dc.all_reduce):
    """The real part is right without the conjugate, too."""
    return ((1 + dc.get_rank()) * wrong_sum(z, rule) ** 2).sum().real


def masked(x, mask):
    return (dc.all_reduce(x * mask).sin() * mask.detach()).sum()


# Tensors that are one variable on all ranks, and a loss that all ranks return.


def mlp(x, w, v, f=dc.sum_gradients, g="replicate"):
    """Column-parallel and row-parallel layers: f is the identity with a sum in backward, g a sum."""
    y = torch.tanh(f(x) @ w) @ v
    return dc.all_reduce(y, grad_placement=g).sin().sum()


def same(x):
    return x


no_f, partial_g = partial(mlp, f=same), partial(mlp, g="partial")


class Norm(nn.LayerNorm):
    """Of this rank's part of a sequence; the gradients of weights that all ranks have are reduced."""

    def __init__(self, reduce):
        super().__init__(4)
        self.reduce = reduce

    def forward(self, x):
        weight, bias = (self.reduce(p) for p in self.parameters())
        return F.layer_norm(x, (4,), weight, bias).pow(3).sum()


def alike(*shape, n=N):
    return per_rank(*shape, n=1, seed=7) * n


def of_mlp(n=N):
    return alike(5, 3, n=n), per_rank(3, 2, n=n, seed=20), per_rank(2, 4, n=n, seed=30)


# ── verdicts ─────────────────────────────────────────────────────────────────────────────────────────────

PAIR, MANY = (per_rank(4), per_rank(4, seed=9)), (per_rank(40, 3), per_rank(40, 3, seed=9))
SIZES = [1e4 * x for x in per_rank(3)], [1e-4 * y for y in per_rank(3, seed=9)]
COMPLEX = per_rank(3, dtype=torch.complex128)
MASKS = [torch.tensor([1.0, r, 0.5, 1.0]) for r in range(N)]
ONE, PART, BOTH = {"x": Replicate()}, {"x": Partial()}, {"x": Replicate(), "output": Replicate()}
EACH = dict.fromkeys(("weight", "bias"), Replicate())


def shared(n):
    """What is right with variables and losses that n ranks share."""
    given, rows = of_mlp(n), per_rank(2, 4, n=n)
    return {
        "f and g": partial(is_right, mlp, *given, placements=BOTH),
        "said to be partial": partial(is_right, no_f, *given, placements={**BOTH, **PART}),
        "the sum of N losses": partial(is_right, partial_g, *given, placements=ONE),
        "weights": partial(is_right, called, rows, module=Norm(same), placements=dict.fromkeys(EACH, Partial())),
        "summed weights": partial(is_right, called, rows, module=Norm(dc.sum_gradients), placements=EACH),
        "a number": partial(
            is_right, lambda x: dc.all_reduce(x.sin()).sum() * x.sum(), alike((), n=n), placements=PART
        ),
    }


RIGHT = {
    "many elements": partial(is_right, product, MANY[0], order=2),
    **{f"fast: {speed}": partial(is_right, fast(speed), per_rank(2)) for speed in (1e3, 1e4, 1e5)},
    **{f"beside a kink: {at}": partial(is_right, bent(0), beside(at)) for at in (1e-3, -2e-5)},
    "beside a kink, a large loss": partial(is_right, bent(1e8), beside(1e-3)),
    "a large loss": partial(is_right, lambda x: 1e4 + product(x), per_rank(3)),
    "state": partial(is_right, Counting(), per_rank(3), order=2),
    "random numbers": partial(is_right, lambda x: (F.dropout(x, 0.5) * torch.rand(4)).sin().sum(), per_rank(4)),
    "other sizes": partial(is_right, of_sizes, *SIZES, order=2),
    "complex": partial(is_right, conjugated, COMPLEX),
    "equal ranks": partial(
        is_right, lambda x, w: (dc.sum_gradients(x) * w).sin().sum(), alike(4), PAIR[0], placements=ONE
    ),
    **{f"{name}, {n} ranks": check for n in (1, 3) for name, check in shared(n).items()},
}
RULES = {
    "N times": (lambda g: 3 * dc.all_reduce(g), "3 = N times the derivative of the losses"),
    "1/N": (lambda g: dc.all_reduce(g, "mean"), "0.3333 = 1/N times the derivative of the losses"),
    "identity": (lambda g: g, "no other rank's loss reaches it"),
    "own loss N times": (lambda g: 3 * g, "no other rank's loss reaches it"),
    "rank 1 missing": (lambda g: dc.all_reduce(g * (dc.get_rank() != 1)), "the loss of rank 1 reaches it on no rank"),
    "maximum": (lambda g: dc.all_reduce(g, "max"), ""),
    "off by little": (little, "1 + 3.0e-06 times the derivative of the losses"),
    "zero": (lambda g: 0 * g, "zero on every rank"),
    "zero on rank 2": (lambda g: dc.all_reduce(g) * (dc.get_rank() != 2), "zero on rank 2"),
}
#: name: (the check, what is observed)
WRONG = {
    **{name: (partial(is_wrong, with_rule(rule), *PAIR), f"x: {words}") for name, (rule, words) in RULES.items()},
    "each other's": (partial(is_wrong, in_turn, per_rank(4), range(N)), "rank 0 has rank 2's piece"),
    "many elements": (partial(is_wrong, with_rule(same), *MANY), "x: no other rank's loss reaches it"),
    "second order": (partial(is_wrong, cubed, per_rank(2), order=2), "first order is right"),
    "a kink": (partial(is_wrong, bent(0), beside(0.0)), "not differentiable here"),
    "a kink between opposite slopes": (partial(is_wrong, absolute, beside(0.0)), "not differentiable here"),
    "a kink, a large loss": (partial(is_wrong, bent(1e10), beside(0.0)), "not differentiable here"),
    "of a large tensor": (partial(is_wrong, lambda x, y: of_sizes(x, y, lambda x: wrong_sum(x) / 3), *SIZES), "x: "),
    "of a small tensor": (partial(is_wrong, lambda x, y: of_sizes(x, y, reduce_y=wrong_sum), *SIZES), "y: "),
    "off by little, small": (partial(is_wrong, scaled(1e-6), [1e-6 * x for x in per_rank(3)]), "x: "),
    "off by little, large": (partial(is_wrong, scaled(1e6), [1e6 * x for x in per_rank(3)]), "x: "),
    "no conjugate": (partial(is_wrong, lambda z: conjugated(z, lambda g: dc.all_reduce(g).conj()), COMPLEX), "z: "),
    "no constant": (partial(is_wrong, masked, per_rank(4), MASKS), "mask: "),
    "no graph": (partial(is_wrong, lambda x: product(x).item() * (1 + dc.get_rank()), per_rank(3)), "zero on every"),
    "no f": (partial(is_wrong, no_f, *of_mlp(), placements=BOTH), "x: right after a sum over the ranks"),
    "g of a partial gradient": (partial(is_wrong, partial_g, *of_mlp(), placements=BOTH), "x, w and v: "),
    "said to be partial": (partial(is_wrong, mlp, *of_mlp(), placements={**BOTH, **PART}), "x: "),
    "variables of their own": (partial(is_wrong, no_f, per_rank(5, 3), *of_mlp()[1:]), "x, w and v: "),
    "nobody sums": (partial(is_wrong, called, per_rank(2, 4), module=Norm(same), placements=EACH), "weight and bias: "),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_function_is_right(name):
    RIGHT[name]()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_function_is_observed(name):
    check, words = WRONG[name]
    report = check()
    assert words in observed(report), str(report)
    assert name not in RULES or all(row.ok for row in report.tables[0].rows if row.what == "gradient of w")


def test_constants():
    report = is_right(masked, [x.requires_grad_() for x in per_rank(4)], MASKS)
    assert {row.what for row in report.tables[0].rows} == {"gradient of x"}


def test_parameters():
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


@pytest.mark.parametrize("on", ["simulated", "gloo"])
def test_other_peoples_collectives(on):
    def fn(x, w):
        y = x.clone()
        dist.all_reduce(y)
        return (w * y * x).sum()

    report = is_wrong(fn, per_rank(4, n=2), per_rank(4, n=2, seed=9), on=[on])
    assert any("all_reduce at" in cut and "cuts the graph" in cut for cut in report.cuts)


# ── wrong arguments ──────────────────────────────────────────────────────────────────────────────────────


def total(x, y=None):
    return x.sum() + (0 if y is None else y.sum())


def iterated(x):
    """Its derivative is the product of twenty factors of up to 3."""
    for _ in range(20):
        x = (3 * x).sin()
    return x.sum()


#: name: (arguments of each rank, more, the argument that the error names)
BAD = {
    "equal": (([X, X],), {}, "per_rank"),
    "others equal": ((alike(4), alike(4)), {"placements": ONE}, "per_rank"),
    "no tensors": (([1, 2],), {}, "per_rank"),
    "lengths": (([X, 2 * X], [1]), {}, "expected"),
    "structures": (([X, (X, 2 * X)],), {}, "per_rank"),
    "order": (([X, 2 * X],), {"order": 0}, "order"),
    "on": (([X, 2 * X],), {"on": "gloo"}, "on"),
    "unused module": (([X, 2 * X],), {"fn": lambda module, x: x.sum(), "module": nn.Linear(2, 2)}, "module"),
    "not finite": (([X, 2 * X.log()],), {}, "fn"),
    "no gradient": (([X, 2 * X],), {"fn": lambda x: 3.0 + dc.get_rank()}, "fn"),
    "too large": (([X, 2 * X],), {"fn": lambda x: 1e12 + wrong_sum(x).sin().sum()}, "too large"),
    "too fast": (([X, 2 * X],), {"fn": iterated}, "too fast"),
    "other numbers": (([X, 2 * X], [X[:1], X[1:2]]), {"placements": {"y": Replicate()}}, "placements"),
    "another name": (([X, 2 * X],), {"placements": {"v": Replicate()}}, "placements"),
    "placements": (([X, 2 * X],), {"placements": 3}, "placements"),
    "a partial output": (([X, 2 * X],), {"placements": {"output": Partial()}}, "placements"),
    "order of shared": (([X, X + 1],), {"placements": {"y": Replicate()}, "order": 2}, "placements"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_argument(name):
    given, more, words = BAD[name]
    arguments = {"fn": total, **SIMULATED, **more}
    with pytest.raises((TypeError, ValueError), match=rf"^check_gradients: .*{words}"):
        check_gradients(arguments.pop("fn"), *given, **arguments)
