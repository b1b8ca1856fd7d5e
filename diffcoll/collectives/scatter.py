"""One rank's tensor; every rank receives its block.

forward   y_r    = x_src[block r]                      all_to_all: sizes are zero from all ranks but src
adjoint   gx_src = [gy_0 … gy_{N-1}]; empty elsewhere  gather
note      notes/collectives/collectives.md#scatter   truth  diffcoll.truth.scatter
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from diffcoll.core.arguments import Call, Parts
from diffcoll.core.maps import AllToAll, part_of
from diffcoll.core.pending import Pending
from diffcoll.engines.types import Group


@overload
def scatter(
    x: Tensor, src: int = ..., dim: int = ..., *, group: Group = ..., sizes: Parts = ..., async_op: Literal[False] = ...
) -> Tensor: ...


@overload
def scatter(
    x: Tensor, src: int = ..., dim: int = ..., *, group: Group = ..., sizes: Parts = ..., async_op: Literal[True]
) -> Pending[Tensor]: ...


def scatter(
    x: Tensor, src: int = 0, dim: int = 0, *, group: Group = None, sizes: Parts = None, async_op: bool = False
) -> Tensor | Pending[Tensor]:
    """Send block r of rank src's x, along a dimension, to each rank r.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(dc.scatter, [torch.tensor([1.0, 2.0]), torch.zeros(2)])
    [tensor([1.]), tensor([2.])]

    Args:
        x: at least one dimension; any dtype; the same shape on all ranks. The values on ranks other than src are
            ignored: `torch.empty(shape)` serves. If x requires a gradient on src, it must on all ranks, because all
            take part in the backward; on the others its gradient is zero.
        src: the rank within the group that sends.
        dim: the dimension to cut along.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        sizes: None: N equal blocks. A list, the same on all ranks: each rank's size, zeros allowed.
        async_op: return a `Pending` at once, whose `wait()` gives the result; the adjoint overlaps in backward too.

    Returns:
        A new tensor with the dtype of x, and its shape except for this rank's size along `dim`.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/collectives.md#scatter.
    """
    call = Call("scatter", x, group, async_op, {"src": src, "dim": dim, "sizes": sizes})
    root, d, n = call.root("src"), call.dim("dim", x), call.engine.size
    parts = call.sizes_of_parts(x, d) or (x.shape[d] // n,) * n
    detail = "" if call.engine.compiling else f"src={root}, sizes={parts}"
    f = part_of(AllToAll.to_root(call.engine, root, d, parts).adjoint, "scatter", detail)
    return call.perform(f, x if call.engine.rank == root else x.narrow(d, 0, 0))
