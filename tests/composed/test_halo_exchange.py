"""halo_exchange: this rank's rows with those next to them, as torch.nn.functional.pad has them of the whole tensor."""

from itertools import pairwise, product

import nests
import pytest
import torch
import torch.nn.functional as F
from runs import gloo, profiled, runs_on

import diffcoll as dc

MODES = {"zeros": "constant", "circular": "circular", None: None}


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.double)


def expected(whole, sizes, left, right, mode):
    """What each rank receives, along the last dimension, from the whole tensor."""
    ends = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    if mode is None:
        return [whole[..., max(a - left, 0) : b + right] for a, b in pairwise(ends)]
    row = whole.view(-1, whole.shape[-1])  # which circular padding needs
    padded = F.pad(row, (left, right), mode=MODES[mode]).view(*whole.shape[:-1], -1) if left or right else whole
    return [padded[..., a : left + b + right] for a, b in pairwise(ends)]


@runs_on("rules", "gloo", "mpi")
@pytest.mark.parametrize("sizes", [[4], [3, 2], [2, 3, 4]], ids=str)
def test_it_is_padding_of_the_whole(run, sizes):
    """Also its derivatives: rows of several ranks have the sum of their gradients. Blocks are 1-d or not contiguous."""
    whole = numbers(2, sum(sizes))
    sides = [(0, 0), (1, 0), (0, 2), (1, 2), (2, 2)]
    for mode, (halo, x) in product(MODES, [*((halo, whole) for halo in sides), ((1, 2), whole[0])]):
        nests.check(
            run,
            nests.SOME,
            lambda r: lambda x: dc.halo_exchange(x, -1, *halo, padding_mode=mode),  # noqa: B023
            lambda xs: expected(torch.cat(xs, -1), sizes, *halo, mode),  # noqa: B023
            x.split(sizes, -1),
        )


def test_messages():
    """One per side, of its rows alone. The result is a tensor of its own."""

    def body(r):
        x = torch.ones(5, 2)
        dc.halo_exchange(x, 0, 0, 0).fill_(7)
        sent = [profiled(dc.halo_exchange, x, 0, *halo) for halo in ((0, 0), (3, 0), (1, 2))]
        return [[nbytes for _, nbytes in of_halo] for of_halo in sent], x.unique().tolist()

    assert gloo(body, range(2)) == [([[], [24], [8, 16]], [1.0])] * 2
