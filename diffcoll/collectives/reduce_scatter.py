"""Reduction over ranks; every rank receives its block of the result.

forward   y_r  = (Σ_s x_s)[block r]      blocks along dim
adjoint   gx_r = [gy_0 … gy_{N-1}]       all_gather
note      notes/collectives/collectives.md#reduce_scatter   truth  diffcoll.truth.reduce_scatter
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from diffcoll.core.arguments import Call, Parts
from diffcoll.core.maps import ReduceScatter
from diffcoll.core.pending import Pending
from diffcoll.core.reduce_calls import reduced
from diffcoll.core.reductions import Op
from diffcoll.engines.types import Group


@overload
def reduce_scatter(
    x: Tensor, op: Op = ..., dim: int = ..., *, group: Group = ..., sizes: Parts = ..., async_op: Literal[False] = ...
) -> Tensor: ...


@overload
def reduce_scatter(
    x: Tensor, op: Op = ..., dim: int = ..., *, group: Group = ..., sizes: Parts = ..., async_op: Literal[True]
) -> Pending[Tensor]: ...


def reduce_scatter(
    x: Tensor, op: Op = "sum", dim: int = 0, *, group: Group = None, sizes: Parts = None, async_op: bool = False
) -> Tensor | Pending[Tensor]:
    """Reduce all ranks' x to their sum, mean, product, maximum, …; rank r receives block r along a dimension.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(dc.reduce_scatter, [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])])
    [tensor([11.]), tensor([22.])]

    Args:
        x: at least one dimension, the same shape on all ranks; any dtype that `op` supports.
        op: as in `all_reduce`.
        dim: the dimension to cut along.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        sizes: None: N equal blocks. A list, the same on all ranks: each rank's size, zeros allowed.
        async_op: return a `Pending` at once, whose `wait()` gives the result; the adjoint overlaps in backward too.

    Returns:
        A new tensor with the dtype of x, and its shape except for this rank's size along `dim`.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/collectives.md#reduce_scatter.
    """
    call = Call("reduce_scatter", x, group, async_op, {"op": op, "dim": dim, "sizes": sizes})
    d = call.dim("dim", x)
    return reduced(call, x, ReduceScatter(call.engine, d, call.sizes_of_parts(x, d)))
