"""Every rank sends a block of its tensor to every rank.

forward   y_r  = [x_s block r]_s        cut along split_dim, joined along concat_dim
adjoint   gx_r = [gy_s block r]_s       all_to_all, dimensions and sizes swapped
note      notes/collectives/collectives.md#all_to_all   truth  diffcoll.truth.all_to_all
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from diffcoll.core.arguments import Call, Parts, Sizes
from diffcoll.core.maps import AllToAll
from diffcoll.core.pending import Pending
from diffcoll.engines.types import Group


@overload
def all_to_all(
    x: Tensor,
    split_dim: int = ...,
    concat_dim: int = ...,
    *,
    group: Group = ...,
    split_sizes: Parts = ...,
    concat_sizes: Sizes = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def all_to_all(
    x: Tensor,
    split_dim: int = ...,
    concat_dim: int = ...,
    *,
    group: Group = ...,
    split_sizes: Parts = ...,
    concat_sizes: Sizes = ...,
    async_op: Literal[True],
) -> Pending[Tensor]: ...


def all_to_all(
    x: Tensor,
    split_dim: int = 0,
    concat_dim: int = 0,
    *,
    group: Group = None,
    split_sizes: Parts = None,
    concat_sizes: Sizes = None,
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    """Cut x into one block per rank, send each rank its block, and concatenate the blocks received.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(dc.all_to_all, [torch.tensor([1, 2]), torch.tensor([10, 20])])
    [tensor([ 1, 10]), tensor([ 2, 20])]

    Args:
        x: at least one dimension; any dtype; the same shape on all ranks except along the dimensions for which
            sizes are given.
        split_dim: the dimension to cut along.
        concat_dim: the dimension to concatenate along.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        split_sizes: None: N equal blocks. A list: the size along `split_dim` of the block for each rank,
            zeros allowed. If `split_dim` and `concat_dim` differ, all ranks pass the same list.
        concat_sizes: the size along `concat_dim` of the block from each rank. None: equal blocks; if `split_dim` and
            `concat_dim` are equal, `split_sizes` must be None too. `"auto"`: the ranks exchange their sizes first.
        async_op: return a `Pending` at once, whose `wait()` gives the result; the adjoint overlaps in backward too.

    Returns:
        A new contiguous tensor of x's dtype.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/collectives.md#all_to_all.
    """
    arguments = {
        "split_dim": split_dim, "concat_dim": concat_dim, "split_sizes": split_sizes, "concat_sizes": concat_sizes
    }  # fmt: skip
    call = Call("all_to_all", x, group, async_op, arguments)
    d, c, n = call.dim("split_dim", x), call.dim("concat_dim", x), call.engine.size
    parts = call.sizes_of_parts(x, d, "split_sizes") or (x.shape[d] // n,) * n
    if d != c:
        received = call.sizes_of_all(x, c, "concat_sizes") or (x.shape[c],) * n
    elif split_sizes is None and concat_sizes is None:
        received = parts
    elif concat_sizes is None:
        raise call.error("concat_sizes", 'a list or "auto" where split_sizes is a list')
    else:
        received = call.sizes_of_blocks(parts, "concat_sizes")
    return call.perform(AllToAll(call.engine, d, c, parts, received), x)
