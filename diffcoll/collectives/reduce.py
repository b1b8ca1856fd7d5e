"""Reduction over ranks; one rank receives it.

forward   y_dst = Σ_s x_s; 0 elsewhere     shape unchanged
adjoint   gx_r  = gy_dst                   broadcast
note      notes/collectives/collectives.md#reduce   truth  diffcoll.truth.reduce
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from diffcoll.core.arguments import Call
from diffcoll.core.maps import Reduce
from diffcoll.core.pending import Pending
from diffcoll.core.reduce_calls import reduced
from diffcoll.core.reductions import Op
from diffcoll.engines.types import Group


@overload
def reduce(
    x: Tensor, dst: int = ..., op: Op = ..., *, group: Group = ..., async_op: Literal[False] = ...
) -> Tensor: ...


@overload
def reduce(
    x: Tensor, dst: int = ..., op: Op = ..., *, group: Group = ..., async_op: Literal[True]
) -> Pending[Tensor]: ...


def reduce(
    x: Tensor, dst: int = 0, op: Op = "sum", *, group: Group = None, async_op: bool = False
) -> Tensor | Pending[Tensor]:
    """Reduce all ranks' x to their sum, mean, product, maximum, …, on rank dst; zeros elsewhere.

    The backward is a broadcast from dst. A rank takes part in it if its x requires a gradient and its loss uses y. So
    on the other ranks, too, x must require a gradient, and `y.sum()`, which is zero, must be added to the loss.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(lambda x: dc.reduce(x, dst=1), [torch.tensor(1.0), torch.tensor(2.0)])
    [tensor(0.), tensor(3.)]

    Args:
        x: any shape, the same on all ranks; any dtype that `op` supports.
        dst: the rank within the group that receives.
        op: as in `all_reduce`.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        async_op: return a `Pending` at once, whose `wait()` gives the result; the adjoint overlaps in backward too.

    Returns:
        A new tensor, shape and dtype of x.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/collectives.md#reduce.
    """
    call = Call("reduce", x, group, async_op, {"dst": dst, "op": op})
    return reduced(call, x, Reduce(call.engine, call.root("dst")))
