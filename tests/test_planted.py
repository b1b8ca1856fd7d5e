"""The property tests detect wrong rules: each planted mistake makes a property fail."""

from copy import copy
from dataclasses import replace
from functools import partial

import properties
import pytest
from runs import rules

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
