"""All ranks' tensors joined along a dimension, on one rank.

forward   y_dst = [x_0 … x_{N-1}]; empty elsewhere     all_to_all: sizes are zero towards all ranks but dst
adjoint   gx_r  = gy_dst[block r]                      scatter
note      notes/collectives/collectives.md#gather   truth  diffcoll.truth.gather
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from diffcoll.collectives.all_gather import block_of
from diffcoll.core.arguments import Call, Sizes
from diffcoll.core.maps import AllToAll, part_of
from diffcoll.core.pending import Pending
from diffcoll.engines.types import Group


@overload
def gather(
    x: Tensor, dst: int = ..., dim: int = ..., *, group: Group = ..., sizes: Sizes = ..., async_op: Literal[False] = ...
) -> Tensor: ...


@overload
def gather(
    x: Tensor, dst: int = ..., dim: int = ..., *, group: Group = ..., sizes: Sizes = ..., async_op: Literal[True]
) -> Pending[Tensor]: ...


def gather(
    x: Tensor, dst: int = 0, dim: int = 0, *, group: Group = None, sizes: Sizes = None, async_op: bool = False
) -> Tensor | Pending[Tensor]:
    """Concatenate all ranks' x along a dimension, in the order of ranks, on rank dst; empty elsewhere.

    The backward is a scatter from dst. A rank takes part in it if its x requires a gradient and its loss uses y. So on
    the other ranks, too, x must require a gradient, and `y.sum()`, which is zero, must be added to the loss.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(dc.gather, [torch.tensor([1]), torch.tensor([2])])
    [tensor([1, 2]), tensor([], dtype=torch.int64)]

    Args:
        x: any dtype; any shape, the same on all ranks except, with `sizes`, for its size along `dim`.
            From 0-d tensors the result has shape (N,).
        dst: the rank within the group that receives.
        dim: the dimension to concatenate along.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        sizes: None: x has the same size along `dim` on all ranks. A list: each rank's size, zeros allowed.
            `"auto"`: the ranks exchange their sizes first, in an additional small message.
        async_op: return a `Pending` at once, whose `wait()` gives the result; the adjoint overlaps in backward too.

    Returns:
        A new contiguous tensor of x's dtype; on ranks other than dst its size along `dim` is 0.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/collectives.md#gather.
    """
    call = Call("gather", x, group, async_op, {"dst": dst, "dim": dim, "sizes": sizes})
    root = call.root("dst")
    block, d = block_of(call)
    lengths = call.sizes_of_all(block, d) or (block.shape[d],) * call.engine.size
    detail = "" if call.engine.compiling else f"dst={root}, sizes={lengths}" + ", stacked" * (block is not x)
    return call.perform(part_of(AllToAll.to_root(call.engine, root, d, lengths), "gather", detail), block)
