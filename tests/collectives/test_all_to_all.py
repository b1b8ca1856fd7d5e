"""all_to_all, its own adjoint, and gather and scatter, each other's."""

import torch
import worked
from worked import Example

import diffcoll as dc

ROWS = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0]]
WS = [[5.0, 10.0, 15.0], [7.0, 14.0, 21.0], [11.0, 22.0, 33.0]]
SENDS = [[0, 2, 1], [1, 0, 0], [0, 3, 0]]  # row r: the sizes that rank r sends to each rank
RECEIVES = [[row[r] for row in SENDS] for r in range(3)]
UNEVEN = [[1.0, 2.0, 3.0], [4.0], [5.0, 6.0, 7.0]]
PARTS = [[1.0], [2.0, 3.0], []]


def uneven(x, auto):
    r = dc.get_rank()
    return dc.all_to_all(x, split_sizes=SENDS[r], concat_sizes="auto" if auto else RECEIVES[r])


EXAMPLES = {
    # block s of x_r is at position r of y_s
    "all_to_all": Example(
        dc.all_to_all, ROWS, [[1, 10, 100], [2, 20, 200], [3, 30, 300]], WS, [[5, 7, 11], [10, 14, 22], [15, 21, 33]]
    ),
    **{
        f"all_to_all, {auto=}": Example(
            lambda x, auto=auto: uneven(x, auto), UNEVEN, [[4], [1, 2, 5, 6, 7], [3]],
            [1.0, [10.0, 20.0, 30.0, 40.0, 50.0], 100.0], [[10, 20, 100], [1], [30, 40, 50]],
        )
        for auto in (False, True)
    },
    **{
        f"gather, {sizes}": Example(
            lambda x, sizes=sizes: dc.gather(x, dst=2, sizes=sizes), PARTS, [[], [], [1, 2, 3]],
            [[], [], [1.0, 10.0, 100.0]], [[1], [10, 100], []],
        )
        for sizes in ("auto", (1, 2, 0))
    },
    "gather, 0-d": Example(
        lambda x: dc.gather(x, dst=1), [5.0, 6.0, 7.0], [[], [5, 6, 7], []], [[], [1.0, 10.0, 100.0], []], [1, 10, 100]
    ),
    "gather, last dim": Example(
        lambda x: dc.gather(x, dim=-1), [[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]],
        [[[1, 3, 5], [2, 4, 6]], [[], []], [[], []]], [[1.0, 10.0, 100.0], [], []],
        [[[1], [1]], [[10], [10]], [[100], [100]]],
    ),
    "scatter": Example(
        lambda x: dc.scatter(x, src=1), ROWS, [[10], [20], [30]], [1.0, 10.0, 100.0], [[0] * 3, [1, 10, 100], [0] * 3]
    ),
    "scatter, sizes": Example(
        lambda x: dc.scatter(x, src=2, sizes=[2, 0, 1]), ROWS, [[100, 200], [], [300]], [1.0, 10.0, 100.0],
        [[0] * 3, [0] * 3, [1, 1, 100]],
    ),
    "scatter, last dim": Example(
        lambda x: dc.scatter(x[None], dim=-1), ROWS, [[[1]], [[2]], [[3]]], [1.0, 10.0, 100.0],
        [[1, 10, 100], [0] * 3, [0] * 3],
    ),
}  # fmt: skip


@worked.each(EXAMPLES)
def test_values_and_gradients(example, run, gradients):
    worked.check(example, run, gradients)


def test_from_one_dim_to_another(run):
    """Rows of all columns to columns of all rows: from one sharding of a matrix to the other."""
    whole = torch.arange(36).reshape(6, 6)
    got = run(lambda r: dc.all_to_all(whole[2 * r : 2 * r + 2], split_dim=1, concat_dim=0), range(3))
    for r, y in enumerate(got):
        assert torch.equal(y, whole[:, 2 * r : 2 * r + 2])
