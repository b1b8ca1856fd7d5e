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
    padded = F.pad(whole, (left, right), mode=MODES[mode]) if left or right else whole
    return [padded[..., a : left + b + right] for a, b in pairwise(ends)]


@runs_on("rules", "gloo", "mpi")
@pytest.mark.parametrize("sizes", [[4], [3, 2], [2, 3, 4]], ids=str)
def test_it_is_padding_of_the_whole(run, sizes):
    """Also its derivatives: a row of several ranks has the sum of their gradients. Blocks are not contiguous."""
    blocks = numbers(2, sum(sizes)).split(sizes, 1)
    for mode, halo in product(MODES, [(0, 0), (1, 0), (0, 2), (1, 2), (2, 2)]):
        nests.check(
            run,
            nests.SOME,
            lambda r: lambda x: dc.halo_exchange(x, -1, *halo, padding_mode=mode),  # noqa: B023
            lambda xs: expected(torch.cat(xs, 1), sizes, *halo, mode),  # noqa: B023
            blocks,
        )


def test_messages():
    """One per side, of its rows alone. The result is a tensor of its own."""

    def body(r):
        x = torch.ones(5, 2)
        dc.halo_exchange(x, 0, 0, 0).fill_(7)
        sent = [profiled(dc.halo_exchange, x, 0, *halo) for halo in ((0, 0), (3, 0), (1, 2))]
        return [[nbytes for _, nbytes in of_halo] for of_halo in sent], x.unique().tolist()

    assert gloo(body, range(2)) == [([[], [24], [8, 16]], [1.0])] * 2
