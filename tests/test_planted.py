"""The property tests detect wrong rules: each planted mistake makes a property fail."""

from copy import copy
from dataclasses import replace
from functools import partial

import properties
import pytest
import torch
from runs import rules

import diffcoll as dc
from diffcoll.collectives import COLLECTIVES
from diffcoll.core import maps
from diffcoll.testing import cases

N = 3


def rule_of(name):
    others = {"gather": "AllToAll", "scatter": "AllToAll", "shift": "Permute"}
    return getattr(maps, others.get(name, "".join(word.title() for word in name.split("_"))))


def held(name):
    """Whether all properties hold in all cases of a collective; stops at the first that does not."""
    try:
        for case in cases.table(N):
            if case.name == name:
                properties.hold([(holds, case) for holds in properties.ALL], N, rules)
    except AssertionError:
        return False
    return True


def local(x, y, rank, n):
    """On all ranks but one, of the rank's x alone."""
    return y if rank == 0 else y * 0 + (x if x.shape == y.shape else x.sum())


def swapped(x, y, rank, n):
    return y.flip(0) if y.dim() and y.shape[0] > 1 else y * (1 + rank)


#: What becomes of the result y of x.
MISTAKES = {
    "times N": lambda x, y, rank, n: y * n,
    "by N": lambda x, y, rank, n: y / n,
    "one rank missing": lambda x, y, rank, n: y * (rank != n - 1),
    "local": local,
    "ranks swapped": swapped,
}


def spoiled(f, start, mistake):
    """The `start` of the map f with a planted mistake."""

    def wrong(x, later=False):
        y = start(x, later)()
        return lambda: MISTAKES[mistake](x, y, f.engine.rank, f.engine.size)

    return wrong


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_wrong_adjoint_is_detected(monkeypatch, name, mistake):
    rule = rule_of(name)
    right = rule.adjoint

    def adjoint(f):
        wrong = copy(right.fget(f))
        wrong.start = spoiled(wrong, wrong.start, mistake)
        return wrong

    monkeypatch.setattr(rule, "adjoint", property(adjoint))
    assert not held(name)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_wrong_forward_is_detected(monkeypatch, name, mistake):
    if (name, mistake) == ("sum_gradients", "local"):
        pytest.skip("its forward is local")
    rule = rule_of(name)
    right = rule.start

    def start(f, x, later=False):
        of_integers = not (x.is_floating_point() or x.is_complex())  # sizes that the ranks exchange
        return (partial(right, f) if of_integers else spoiled(f, partial(right, f), mistake))(x, later)

    monkeypatch.setattr(rule, "start", start)
    assert not held(name)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "broadcast"])
def test_a_replicated_adjoint_of_a_partial_gradient_is_detected(monkeypatch, name):
    """As in a gather that detaches the other ranks' tensors: each rank gets the gradient of its own loss alone."""
    rule = rule_of(name)
    right = rule.adjoint
    monkeypatch.setattr(rule, "adjoint", property(lambda f: right.fget(replace(f, replicated=True))))
    assert not held(name)


class Sum(torch.autograd.Function):
    """The sum over ranks, with another backward."""

    @staticmethod
    def forward(ctx, x, rule):
        ctx.rule = rule
        return dc.all_reduce(x)

    @staticmethod
    def backward(ctx, g):
        return ctx.rule(g), None


#: A backward of the sum, and what of a rank's results is wrong then.
SEEN = {
    "right if all ranks have the same loss": (lambda g: N * g, {"gradient", "second"}),
    "right once": (lambda g: dc.all_reduce(g.detach()), {"second"}),
}


@pytest.mark.parametrize(("rule", "wrong"), SEEN.values(), ids=SEEN)
def test_the_program_of_verify_sees_what_is_wrong(rule, wrong):
    case = cases.table(N)[0]
    expected = cases.in_truth(case, 0)

    def body(r):
        (found,) = cases.derivatives([(case, r)], lambda xs: [Sum.apply(x, rule) for x in xs], 0)
        return cases.errors(found, expected, r)

    for errors in rules(body, range(N)):
        assert {name for name, error in errors.items() if error > 1e-6} == wrong
