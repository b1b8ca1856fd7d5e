"""Random right programs pass the check against one process; one wrong backward rule anywhere in one is found."""

import os
import random

import pytest
import torch
from programs import WIDTH, Program

from diffcoll.testing import GradientMismatchError, assert_matches_single_process, simulate

#: Programs of each kind in the long run.
COUNT = int(os.environ.get("DIFFCOLL_FUZZ", "2000"))
SIZES = ((4, 4), (5, 3), (8, 0), (3, 3, 2), (5, 0, 3), (0, 2, 6), (1, 2, 4, 1))


def batch(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, WIDTH, dtype=torch.double, generator=generator), torch.arange(n) % 3


def passes(distributed, single, sizes):
    """Whether the check passes; it observes something of what is wrong."""
    whole = batch(sum(sizes), single.seed)
    more = {"module": single.weights(), "ranks": sizes, "rank_reduction": "sum", "on": ["simulated"]}
    try:
        return assert_matches_single_process(distributed, single, whole, **more).ok
    except GradientMismatchError as error:
        assert error.report.observed, f"{distributed}, {sizes}\n{error}"
        return False


def gradients(program, sizes):
    """The gradients of every rank, without the check's code."""

    def on_rank(x, labels):
        x = x.clone().requires_grad_()
        weights = program.weights()
        of_rank = Program(program.seed, program.wrong)
        loss = of_rank(weights, x, labels)
        return torch.autograd.grad(loss, [x, *weights], allow_unused=True, materialize_grads=True)

    x, labels = batch(sum(sizes), program.seed)
    found = simulate(on_rank, x.split(sizes), labels.split(sizes))
    return [of_rank[0] for of_rank in found] + [torch.stack(gs).sum(0) for gs in list(zip(*found, strict=True))[1:]]


def differ(a, b):
    """Whether gradients differ by more than rounding, each relative to the largest."""
    largest = max(float(x.abs().max()) for x in b if x.numel())
    return any(x.numel() and float((x - y).abs().max()) > 1e-9 * largest for x, y in zip(a, b, strict=True))


def run(seeds):
    """Check a right and a wrong program for each seed, and return how many of the wrong ones had a wrong gradient."""
    found = 0
    for seed in seeds:
        rng = random.Random(seed)
        sizes = SIZES[seed % len(SIZES)]
        right = Program(seed)
        assert passes(right, right, sizes), f"is flagged: {right}, {sizes}"
        wrong = Program(seed, (rng.randrange(right.count_places(batch(8, seed))), rng.randrange(60)))
        if passes(wrong, right, sizes):
            assert not differ(gradients(wrong, sizes), gradients(right, sizes)), f"passes: {wrong}, {sizes}"
        else:
            found += 1
    return found


def test_some_programs():
    assert run(range(20)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_programs(part):
    each = COUNT // 10
    assert run(range(part * each, (part + 1) * each)) > 0.7 * each
