"""Transforms of torch.func within one another, to depth 3: the rules give what the definition gives.

PyTorch does not differentiate the operations of a Function's `jvp` in an outer level of forward mode, and says nothing.
"""

import math
import random
from dataclasses import replace
from functools import partial

import nests
import pytest
import torch
from properties import is_linear
from runs import gloo, rules
from torch.autograd import forward_ad

import diffcoll as dc
from diffcoll.core.reductions import REDUCTIONS
from diffcoll.testing import cases

SEED = 2
OPS = [name for name, reduction in REDUCTIONS.items() if reduction.over is not None]
#: Nests with one level of forward mode within another.
FORWARD = [nest for nest in nests.NESTS if sum(name in ("jvp", "jacfwd") for name in nest) > 1]


def table(n):
    """The calls of `cases.table` on smaller tensors, of which Jacobians of Jacobians take less time."""
    return [small(case) for case in cases.table(n)]


def small(case):
    if "sizes" in case.arguments or () in case.shapes or case.arguments.get("dim", 0) != 0:
        return case
    shape = {"all_reduce": (2,), "reduce": (2,), "reduce_scatter": (case.size,)}.get(case.name)
    return replace(case, shapes=(shape,) * case.size) if shape else case


def nests_of(case):
    """The nests that suit a call: a Jacobian has as many rows, or columns, on every rank."""
    shapes = [{y.shape for y in case.truth(xs_of(case))}, set(case.shapes)]
    equal = all(len(of) == 1 for of in shapes)
    numel = max(math.prod(shape) for of in shapes for shape in of)
    most = {0: 0, 1: 3, 2: 3, 3: 2}.get(numel, 1) if equal and numel < 7 else 0
    drawn = nests.NESTS if is_linear(case) else FORWARD
    return [nest for nest in drawn if sum(name in ("jacfwd", "jacrev") for name in nest) <= most]


def xs_of(case):
    return [case.x(r, SEED) for r in range(case.size)]


def check(pairs, run):
    """Compare calls, each in its nest, with truth."""
    for case, nest in pairs:

        def of_rank(r, case=case):
            return lambda x: case.call(x.sin(), r)

        def of_all(xs, case=case):
            return case.truth([x.sin() for x in xs])

        nests.check(run, [nest], of_rank, of_all, xs_of(case), case.shared, case)


def drawn(calls, seed):
    rng = random.Random(seed)
    return [(case, rng.choice(nests_of(case))) for case in calls]


def reductions(n, name=None):
    return [case for case in table(n) if not is_linear(case) and name in (None, case.name)]


def linear(n):
    return [case for case in table(n) if is_linear(case)]


def run_alone(body, ranks, xs):
    """On one rank, without a group."""
    return [body(0, *xs)]


@pytest.mark.parametrize(
    ("calls", "every", "run"),
    [
        (reductions(3), 2, rules),
        (linear(3), 4, rules),
        (reductions(3), 4, gloo),
        (reductions(1, "all_reduce"), 1, run_alone),
    ],
    ids=["reductions", "linear", "processes", "alone"],
)
def test_the_table(calls, every, run):
    check(drawn(calls, every)[::every], run)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@pytest.mark.parametrize("seed", range(5))
def test_the_table_at_length(backend, seed):
    pairs = drawn(table(3), seed)
    check(pairs, rules)
    check(pairs, partial(gloo, backend=backend, timeout=600))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("outermost", nests.NAMES)
def test_every_nest_of_every_reduction(n, outermost):
    drawn = [nest for nest in nests.NESTS if nest[0] == outermost]
    pairs = [(case, nest) for case in reductions(n, "all_reduce") for nest in drawn]
    check(pairs, rules)


@pytest.mark.parametrize("op", OPS)
def test_forward_ad_around_transforms_and_backward(op):
    """The tangent of a gradient, by torch.func within a level, and by a graph from before the level."""

    def loss(x):
        return (dc.all_reduce(x.sin(), op) ** 3).sum()

    def body(r):
        x, t = (torch.linspace(0.3 + r, 1.2 - r, 4, dtype=torch.float64).cos() + k for k in (0, r))
        expected = torch.func.jvp(torch.func.grad(loss), (x,), (t,))[1]
        found = []
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, t)
            found.append(forward_ad.unpack_dual(torch.func.grad(loss)(dual)).tangent)
        leaf = x.clone().requires_grad_()
        y = dc.all_reduce(leaf, op)
        with forward_ad.dual_level():
            gy = forward_ad.make_dual(torch.ones_like(y), t)
            (g,) = torch.autograd.grad(y, leaf, gy)
            found.append(forward_ad.unpack_dual(g).tangent)
        y = dc.all_reduce(leaf, op)
        return found, [expected, torch.autograd.grad(y, leaf, t)[0]]

    for found, expected in rules(body, range(3)):
        torch.testing.assert_close(found, expected)
