"""all_to_all, its own adjoint, and gather and scatter, each other's."""

import pytest
import torch
import worked
from runs import runs_on
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


@runs_on("truth", "rules", "gloo", "mpi")
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.complex64, torch.float8_e5m2])
def test_what_only_moves_may_be_anything(run, dtype):
    """Without values of x off src: its memory is read on src alone."""

    def body(r):
        x = torch.arange(6).reshape(2, 3).to(torch.float32).to(dtype) if r == 1 else torch.empty(2, 3, dtype=dtype)
        parts = dc.scatter(x, src=1, dim=1, sizes=[0, 2, 1])
        return parts, dc.gather(parts, dst=2, dim=1, sizes="auto")

    whole = torch.arange(6).reshape(2, 3).to(torch.float32).to(dtype)
    for r, (part, gathered) in enumerate(run(body, range(3))):
        first, last = [(0, 0), (0, 2), (2, 3)][r]
        assert part.dtype == gathered.dtype == dtype
        assert torch.equal(part.to(torch.complex64), whole[:, first:last].to(torch.complex64))
        assert torch.equal(gathered.to(torch.complex64), whole[:, : 3 * (r == 2)].to(torch.complex64))


UNEXPECTED = {
    "equal blocks": lambda odd: dc.all_to_all(torch.ones(6 if odd else 3)),
    "equal blocks, to another dim": lambda odd: dc.all_to_all(torch.ones(3, 1 + odd), 0, 1),
    "sizes": lambda odd: dc.all_to_all(
        torch.ones(4 if odd else 3), split_sizes=[2, 1, 1] if odd else [1, 1, 1], concat_sizes=[1, 1, 1]
    ),
}


@runs_on("truth", "rules")
@pytest.mark.parametrize("name", UNEXPECTED)
def test_blocks_of_other_sizes_than_a_rank_expects(run, name):
    """Simulated ranks raise; real ones do in check mode."""
    with pytest.raises(dc.CollectiveMismatchError):
        run(lambda r: UNEXPECTED[name](r == 1), range(3))
