"""The rows next to this rank's block, of a tensor that is split along a dimension.

forward   y_r = X[o_r − left … o_r + n_r + right − 1]    X: all blocks, one after the other; rank r's n_r rows from o_r
adjoint   gx_r = Σ_s gy_s at rank r's rows               the messages reversed
note      notes/collectives/halo_exchange.md
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from diffcoll.collectives.all_to_all import all_to_all
from diffcoll.composed.leaves import rows_of_ranks
from diffcoll.core import expect
from diffcoll.core.errors import message
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.tracing import untraced
from diffcoll.engines.types import Group

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]

_NAME = "halo_exchange"
_MODES = ("zeros", "reflect", "replicate", "circular", None)


@partial(untraced, reason="which rows are sent depends on the sizes of all ranks; compile without fullgraph")
def halo_exchange(
    x: Tensor,
    dim: int,
    left: int,
    right: int,
    *,
    padding_mode: PaddingMode | None = "zeros",
    group: Group = None,
) -> Tensor:
    """Convolutions and stencils split in space: this rank's block with the rows next to it, from other ranks.

    The ranks exchange their sizes in one small message; then each row travels once to each rank that needs it. A block
    may be shorter than the halo, or empty: rows come from as many ranks as it takes.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> blocks = [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5])]
    >>> simulate(lambda x: dc.halo_exchange(x, 0, 2, 1).tolist(), blocks)
    [[0, 0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5, 0]]
    >>> simulate(lambda x: dc.halo_exchange(x, 0, 1, 0, padding_mode="circular").tolist(), blocks)
    [[5, 1, 2], [2, 3], [3, 4, 5]]

    Args:
        x: any dtype; this rank's block. Its size along `dim` may differ between ranks, and may be 0; the other
            dimensions are the same.
        dim: the dimension along which the blocks of the ranks follow one another.
        left: number of rows before the block; 0 or more, the same on all ranks.
        right: number of rows after it.
        padding_mode: what is beyond the first and the last row of all ranks, as in torch.nn.functional.pad and
            `nn.Conv2d`: "zeros", "reflect", "replicate", "circular". None: nothing, so the ranks at the ends get fewer
            rows.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        A new tensor of x's dtype, of `left + n + right` rows along `dim`. The gradient of a row that several ranks
        have received is the sum of theirs. As with any collective, every rank must run backward.

    Raises:
        TypeError, ValueError: an argument is invalid, or "reflect" or "circular" does not have rows enough.
        CollectiveMismatchError: on all ranks, if they differ in arguments, dtypes, or dimensions other than `dim`.

    Source: notes/collectives/halo_exchange.md.
    """
    if not isinstance(x, Tensor):
        raise TypeError(message(_NAME, "x", type(x).__name__, "a tensor", "torch.as_tensor(x) makes one"))
    dims = expect.dims(_NAME, "dim", dim, x, types="an integer")
    if len(dims) != 1:
        raise TypeError(message(_NAME, "dim", repr(dim), "an integer"))
    left, right = (expect.integer(_NAME, name, n, least=0) for name, n in (("left", left), ("right", right)))
    remedy = '"zeros" is what padding with zeros means; None pads nothing'
    expect.choice(_NAME, "padding_mode", padding_mode, _MODES, remedy)
    d, engine = dims[0], resolve(group, _NAME)
    rows = x.movedim(d, 0)
    tree = {f"dim {d}, left {left}, right {right}, padding_mode {padding_mode}": rows}
    what = "arguments, or in dtype or another dimension of x"
    sizes, _ = rows_of_ranks(_NAME, tree, [rows], x.shape[d], group, what=what)
    _check_total(sum(sizes), left, right, padding_mode)
    plan = _plan(tuple(sizes), engine.rank, left, right, padding_mode)
    found = all_to_all(
        _rows_of(x, d, plan.sent), d, d, group=group, split_sizes=plan.split_sizes, concat_sizes=plan.concat_sizes
    )
    if found.shape[d] in plan.places:
        found = torch.cat([found, found.new_zeros([1 if i == d else n for i, n in enumerate(found.shape)])], d)
    before, after = plan.places[: plan.before], plan.places[plan.before :]
    return torch.cat([_rows_of(found, d, before), x, _rows_of(found, d, after)], d)


def _rows_of(x: Tensor, dim: int, rows: list[int]) -> Tensor:
    index = torch.tensor(rows, dtype=torch.long, device=x.device)
    if x.dtype in (torch.uint16, torch.uint32, torch.uint64):  # PyTorch has no index_select of them
        return x.movedim(dim, 0)[index].movedim(0, dim)
    return x.index_select(dim, index)


def _check_total(total: int, left: int, right: int, mode: str | None) -> None:
    """Raise, on all ranks, if there are fewer rows than the padding refers to."""
    needed = {"zeros": 0, None: 0, "replicate": 1, "circular": 1, "reflect": max(left, right) + 1}[mode]
    if (left or right) and total < needed:
        got, expected = f"{mode!r} with {total} rows on all ranks together", f"at least {needed} rows"
        raise ValueError(message(_NAME, "padding_mode", got, expected, '"zeros" needs none'))


class _Plan(NamedTuple):
    """Which rows a rank sends and receives."""

    #: Its own rows to be sent, for one rank after the other.
    sent: list[int]
    #: Number of rows sent to each rank.
    split_sizes: list[int]
    #: Number of rows received from each rank.
    concat_sizes: list[int]
    #: For each row of the halo its place among those received; their number: it is zero.
    places: list[int]
    #: How many of them are before the block.
    before: int


@lru_cache(maxsize=256)
def _plan(sizes: tuple[int, ...], rank: int, left: int, right: int, mode: str | None) -> _Plan:
    ends = list(accumulate(sizes, initial=0))
    total = ends[-1]

    def halo(r: int) -> list[list[int | None]]:
        """Return the numbers of the rows before and after a rank's block; None: zeros."""
        parts = range(ends[r] - left, ends[r]), range(ends[r + 1], ends[r + 1] + right)
        return [[_row(i, total, mode) for i in part if mode or 0 <= i < total] for part in parts]

    def received(r: int) -> list[int]:
        """Return the numbers of the rows that a rank receives, each once; their order is that of ranks too."""
        return sorted({i for part in halo(r) for i in part if i is not None})

    to = [[i - ends[rank] for i in received(r) if ends[rank] <= i < ends[rank + 1]] for r in range(len(sizes))]
    mine = received(rank)
    firsts = [bisect_left(mine, end) for end in ends]
    before, after = halo(rank)
    places = [len(mine) if i is None else bisect_left(mine, i) for i in before + after]
    return _Plan(
        [i for rows in to for i in rows],
        [len(rows) for rows in to],
        [b - a for a, b in pairwise(firsts)],
        places,
        len(before),
    )


def _row(i: int, total: int, mode: str | None) -> int | None:
    """Return the row that stands for row i; None: zeros."""
    if 0 <= i < total:
        return i
    if mode == "replicate":
        return min(max(i, 0), total - 1)
    if mode == "circular":
        return i % total
    if mode == "reflect":
        return -i if i < 0 else 2 * (total - 1) - i
    return None
