"""all_reduce and sum_gradients, each other's adjoint where the result is replicated."""

from functools import reduce

import pytest
import torch
import worked
from runs import runs_on, truth
from worked import Example

import diffcoll as dc

XS = [[1.0, -2.0], [3.0, 0.5], [-7.0, 4.0]]
WS = [[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]]  # their sum is (111, 222)
ZEROS = [[2.0, 0.0], [3.0, 5.0], [0.0, 7.0]]
TIES = [[3.0, -2.0], [3.0, 4.0], [-7.0, 4.0]]
SAME = [[2.0, 5.0]] * 3
INF = float("inf")

EXAMPLES = {
    "sum": Example(dc.all_reduce, XS, [[-3, 2.5]] * 3, WS, [[111, 222]] * 3),
    "mean": Example(lambda x: dc.all_reduce(x, "mean"), XS, [[-1, 2.5 / 3]] * 3, WS, [[37, 74]] * 3),
    "product": Example(
        lambda x: dc.all_reduce(x, "product"), ZEROS, [[0, 0]] * 3, WS, [[0, 35 * 222], [0, 0], [6 * 111, 0]]
    ),
    "max": Example(
        lambda x: dc.all_reduce(x, "max"), TIES, [[3, 4]] * 3, WS, [[111 / 2, 0], [111 / 2, 111], [0, 111]]
    ),
    "min": Example(lambda x: dc.all_reduce(x, "min"), TIES, [[-7, -2]] * 3, WS, [[0, 222], [0, 0], [111, 0]]),
    "logsumexp": Example(
        lambda x: dc.all_reduce(x.log(), "logsumexp"), [[1.0], [3.0], [4.0]], [[2.0794415416798357]] * 3,
        [1.0, 10.0, 100.0], [[111 / 8]] * 3,
    ),
    "replicated": Example(
        lambda x: dc.all_reduce(x, grad_placement="replicate"), XS, [[-3, 2.5]] * 3, SAME, [[2, 5]] * 3
    ),
    "replicated mean": Example(
        lambda x: dc.all_reduce(x, "mean", grad_placement="replicate"), XS, [[-1, 2.5 / 3]] * 3, SAME,
        [[2 / 3, 5 / 3]] * 3,
    ),
    "replicated max": Example(
        lambda x: dc.all_reduce(x, "max", grad_placement="replicate"), TIES, [[3, 4]] * 3, SAME,
        [[1, 0], [1, 2.5], [0, 2.5]],
    ),
    "0-d": Example(dc.all_reduce, [1.0, 2.0, 4.0], [7.0] * 3, [1.0, 10.0, 100.0], [111] * 3),
    "empty": Example(dc.all_reduce, [[]] * 3, [[]] * 3, [1.0, 10.0, 100.0], [[]] * 3),
    "a rank that multiplies the result by zero": Example(
        dc.all_reduce, XS, [[-3, 2.5]] * 3, [0.0, 10.0, 100.0], [[110, 110]] * 3
    ),
    "sum_gradients": Example(dc.sum_gradients, SAME, SAME, WS, [[111, 222]] * 3),
    # Megatron's pair: f before a row-parallel layer, g after it; the loss 5 Σ_r (r + 1) x is the same on all ranks.
    "a parallel layer": Example(
        lambda x: dc.all_reduce((dc.get_rank() + 1) * dc.sum_gradients(x), grad_placement="replicate"),
        [[1.0]] * 3, [[6]] * 3, [5.0] * 3, [[30]] * 3,
    ),
}  # fmt: skip


@worked.each(EXAMPLES)
def test_values_and_gradients(example, run, gradients):
    worked.check(example, run, gradients)


@runs_on("rules", "gloo", "mpi")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_mean_of_large_numbers_does_not_overflow(run, dtype):
    """The terms are divided before they are added."""

    def body(r):
        x = torch.tensor([0.9 * torch.finfo(dtype).max, 1.0 + r], dtype=dtype).repeat(3, 1)
        ways = dc.all_reduce(x, "mean"), dc.reduce(x, 2, "mean"), dc.reduce_scatter(x, "mean")
        return [(bool(y[0, 0].isfinite()), y[0, 1].item()) for y in ways]

    two = pytest.approx(2, rel=1e-2)
    for r, found in enumerate(run(body, range(3))):
        assert found == [(True, two), (True, two if r == 2 else 0), (True, two)]


def ordered_sum(x):
    """Return Σ_s x_s, added in the order of ranks: the recipe for a sum that is deterministic on every backend."""
    rows = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % dc.get_world_size()))
    block = reduce(torch.add, dc.all_to_all(rows).chunk(dc.get_world_size()))
    return dc.all_gather(block)[: x.numel()].view(x.shape)


@runs_on("truth", "rules", "gloo", "mpi")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_deterministic_sum(run, n):
    """Bit for bit the sum in the order of ranks, of numbers whose sum depends on the order."""

    def x(r):
        generator = torch.Generator().manual_seed(r)
        return torch.randn(5, 7, generator=generator) * 10.0 ** torch.randint(-6, 6, (5, 7), generator=generator)

    expected = reduce(torch.add, [x(r) for r in range(n)])
    assert all(torch.equal(y, expected) for y in run(lambda r: ordered_sum(x(r)), range(n)))


def test_what_is_declared_replicated_and_differs_is_found_in_truth():
    xs = [torch.tensor(float(r), requires_grad=True) for r in range(3)]
    losses = truth(lambda x, w: w * dc.all_reduce(x, grad_placement="replicate"), xs, [1.0, 10.0, 100.0])
    with pytest.raises(ValueError, match="replicated"):
        torch.autograd.backward(losses)
    with pytest.raises(dc.CollectiveMismatchError, match="replicated"):
        truth(dc.sum_gradients, xs)
