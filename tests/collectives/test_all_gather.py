"""all_gather and its adjoints: reduce_scatter, and split where the result is replicated."""

import pytest
import torch
import torch.nn.functional as F
import worked
from runs import runs_on
from worked import Example

import diffcoll as dc

XS = [[1.0], [2.0, 3.0], []]
WS = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0]]  # their sum is (111, 222, 333)
ROWS = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0]]
SAME = [[1.0, 2.0, 3.0]] * 3

EXAMPLES = {
    "all_gather, sizes": Example(
        lambda x: dc.all_gather(x, sizes=[1, 2, 0]), XS, [[1, 2, 3]] * 3, WS, [[111], [222, 333], []]
    ),
    "all_gather, auto": Example(
        lambda x: dc.all_gather(x, sizes="auto"), XS, [[1, 2, 3]] * 3, WS, [[111], [222, 333], []]
    ),
    "all_gather, 0-d": Example(dc.all_gather, [5.0, 6.0, 7.0], [[5, 6, 7]] * 3, WS, [111, 222, 333]),
    "all_gather, stack": Example(
        lambda x: dc.all_gather(x, dim=-1, stack=True),
        [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [[[1, 3, 5], [2, 4, 6]]] * 3, WS, [[111, 111], [222, 222], [333, 333]],
    ),
    "all_gather, replicated": Example(
        lambda x: dc.all_gather(x, sizes=[1, 2, 0], grad_placement="replicate"),
        XS, [[1, 2, 3]] * 3, [WS[1]] * 3, [[10], [20, 30], []],
    ),
    # pytorch#120386: gradients that are transposed, sliced and expanded; y has 3 columns, 4 of weight 1 in the first
    "all_gather, gradients that are views": Example(
        lambda x: (y := dc.all_gather(x, dim=1)).t()[1:].sum() + y.sum().expand(2, 2).sum(),
        [[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]], [84 + 18] * 3, [1.0, 10.0, 100.0],
        [[[444], [444]], [[555], [555]], [[555], [555]]],
    ),
    "all_gather, a gradient that is sparse on rank 1": Example(
        lambda x: F.embedding(torch.tensor([1, 0, 0]), dc.all_gather(x), sparse=dc.get_rank() == 1),
        [[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]], [[[3, 4], [1, 2], [1, 2]]] * 3, [1.0, 10.0, 100.0],
        [[[222, 222]], [[111, 111]], [[0, 0]]],
    ),
    "reduce_scatter": Example(
        dc.reduce_scatter, ROWS, [[111], [222], [333]], [5.0, 7.0, 11.0], [[5, 7, 11]] * 3
    ),
    "reduce_scatter, mean, sizes": Example(
        lambda x: dc.reduce_scatter(x, "mean", sizes=[2, 0, 1]),
        ROWS, [[37, 74], [], [111]], [6.0, 9.0, 12.0], [[2, 2, 4]] * 3,
    ),
    "reduce_scatter, max": Example(
        lambda x: dc.reduce_scatter(x, "max"),
        [[7.0, 1.0, 4.0], [7.0, 2.0, 3.0], [0.0, 2.0, 1.0]], [[7], [2], [4]], [5.0, 7.0, 11.0],
        [[2.5, 0, 11], [2.5, 3.5, 0], [0, 3.5, 0]],
    ),
    "reduce_scatter, last dim of a transposed tensor": Example(
        lambda x: dc.reduce_scatter(x.t(), dim=-1),
        [[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]] * 3, [[[0], [3]], [[6], [9]], [[12], [15]]], [1.0, 10.0, 100.0],
        [[[1, 1], [10, 10], [100, 100]]] * 3,
    ),
    # every copy of the replicated x gets the whole gradient
    "split": Example(
        lambda x: dc.split(x, sizes=[1, 0, 2]), SAME, [[1], [], [2, 3]], [5.0, 7.0, 11.0], [[5, 11, 11]] * 3
    ),
    "split and back": Example(
        lambda x: dc.all_gather(dc.split(x).square(), grad_placement="replicate"),
        SAME, [[1, 4, 9]] * 3, [[1.0, 1.0, 10.0]] * 3, [[2, 4, 60]] * 3,
    ),
}  # fmt: skip


@worked.each(EXAMPLES)
def test_values_and_gradients(example, run, gradients):
    worked.check(example, run, gradients)


@runs_on("truth", "rules")
def test_other_sizes_without_sizes(run):
    xs = [torch.ones(2), torch.ones(3)]
    with pytest.raises(dc.CollectiveMismatchError, match='sizes="auto"'):
        run(dc.all_gather, xs)
    with pytest.raises(ValueError, match="rank 1"):
        dc.truth.all_gather(xs)
