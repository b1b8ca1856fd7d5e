"""Every property of every collective: random cases on simulated ranks; the fixed table there, on gloo and on MPI."""

from functools import partial

import calls
import properties
import pytest
import torch
from runs import gloo, rules

from diffcoll.collectives import COLLECTIVES
from diffcoll.testing import cases
from diffcoll.testing.cases import Case

TRANSFORMS = properties.every_transform_gives_the_gradients_of_truth


@pytest.mark.parametrize("holds", properties.ALL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_in_simulated_worlds(name, holds):
    def check(case):
        properties.hold([(holds, case)], case.size, rules)

    calls.each(calls.cases(name), 3 if holds is TRANSFORMS else 8, check, derandomize=True)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_table_in_simulated_worlds(name, n):
    """Every property of every call on few ranks; on five without transforms, whose rules are those of fewer ranks."""
    table = [case for case in cases.table(n) if case.name == name]
    every = [(holds, case) for case in table for holds in properties.ALL if n < 3 or holds is not TRANSFORMS]
    held = properties.hold(properties.pairs(table) if n == 3 else every, n, rules)
    if n == 2:  # where calls are small enough for all of them
        assert held == set(properties.ALL)


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_the_table_on_processes(backend):
    """Values and derivatives of every call, every property of some; the next test has every property of every call."""
    table = cases.table(3)
    of_all, some = properties.value_and_gradients_to_third_order_are_those_of_truth, properties.once(table)
    every = properties.pairs(some) + [(of_all, case) for case in table if case not in some]
    properties.hold(every, 3, partial(gloo, backend=backend, timeout=240))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@pytest.mark.parametrize("n", [2, 3])
def test_every_property_of_the_table_on_processes(n, backend):
    pairs = [(holds, case) for case in cases.table(n) for holds in properties.ALL]
    properties.hold(pairs, n, partial(gloo, backend=backend, timeout=600))


@pytest.mark.parametrize("few", [False, True], ids=["any", "zeros"])
@pytest.mark.parametrize("op", ["sum", "mean", "product", "logsumexp"])
def test_reductions_of_complex_numbers(op, few):
    case = Case("all_reduce", ((3, 2),) * 3, {"op": op}, dtype=torch.complex128, few=few)
    properties.hold([(holds, case) for holds in properties.ALL], 3, rules)


@pytest.mark.slow
@pytest.mark.parametrize("name", COLLECTIVES)
def test_at_length(name):
    def check(case):
        properties.hold([(holds, case) for holds in properties.ALL], case.size, rules)

    calls.each(calls.cases(name, most=9), 1000, check)
