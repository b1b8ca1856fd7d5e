"""Random training loops with GradientAverager, see `loops`."""

from itertools import product

import pytest
import torch
from loops import OnRank, drawn
from runs import gloo, rules
from training import equal_on_all_ranks

from diffcoll.engines.simulated.engine import LocalEngine


def run(seed, where, monkeypatch):
    loop = drawn(seed)
    monkeypatch.setattr(LocalEngine, "overlaps", lambda self, x: loop.overlaps)  # else all is sent at the end
    equal_on_all_ranks(where(lambda r: OnRank(seed, loop, r).run(), range(loop.n)))


@pytest.mark.parametrize("where, seed", [*product([rules], range(12)), *product([gloo], range(100, 104))])
def test_random_loops(seed, where, monkeypatch):
    run(seed, where, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_loops(monkeypatch):
    torch.set_num_threads(1)
    for seed in range(1000, 3000):
        run(seed, rules, monkeypatch)
