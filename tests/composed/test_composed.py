"""What composed functions share: groups of some ranks, and trees that differ between ranks."""

from functools import partial

import pytest
import torch
from runs import new_group, runs_on

import diffcoll as dc

ONE, TWO = torch.tensor([1]), torch.tensor([2, 2])
BOTH = torch.cat([ONE, TWO])
#: What ranks 1 and 2 of three receive in a group of these two.
IN_A_PAIR = [
    (dc.gather_batch, [(BOTH, [1, 2], 0, 3, None), (BOTH, [1, 2], 1, 3, None)]),
    (lambda x, group: list(dc.ring(x, group=group)), [[(0, ONE), (1, TWO)], [(1, TWO), (0, ONE)]]),
    (lambda x, group: dc.halo_exchange(x, 0, 1, 1, group=group), [torch.tensor([0, 1, 2]), torch.tensor([1, 2, 2, 0])]),
]


@runs_on("truth", "rules", "gloo")
def test_on_a_subgroup(run):
    def body(r):
        pair = new_group([1, 2])
        return [call(torch.full((r,), r), group=pair) for call, _ in IN_A_PAIR] if r else []

    for found, of_rank in zip(run(body, range(3))[1:], zip(*(both for _, both in IN_A_PAIR), strict=True), strict=True):
        torch.testing.assert_close([*map(plain, found)], [*map(plain, of_rank)])


def plain(x):
    """Without NamedTuples and numbers, which torch.testing does not compare."""
    return [plain(y) for y in x] if isinstance(x, (list, tuple)) else torch.as_tensor(-1 if x is None else x)


X = torch.ones(2, 3, dtype=torch.float16)
#: Trees that are not like {"x": X}; float16 and bfloat16 have the same number of bytes. The last one's rows are longer.
ODD = [{"x": X.bfloat16()}, X, [X, X], {"y": X}, {"x": X, "y": X[:, 0]}, {"x": X[None]}, {"x": X[:, :2]}]


@runs_on("truth", "rules", "gloo")
@pytest.mark.parametrize("name", ["gather_batch", "padded", "ring"])
def test_trees_that_differ_are_an_error_on_all_ranks(run, name):
    """Without check mode."""
    call = {"gather_batch": dc.gather_batch, "padded": partial(dc.gather_batch, pad=0.0), "ring": dc.ring}[name]

    def body(r):
        for odd in ODD[:-1] if name == "padded" else ODD:
            with pytest.raises(dc.CollectiveMismatchError):
                call(odd if r == 1 else {"x": X[:1]})
        return dc.all_reduce(torch.tensor(r)).item()  # the group works

    assert run(body, range(2)) == [1, 1]
