"""Point-to-point messages by a fixed offset, in a ring or a line of ranks.

forward   y_r  = x_{r − offset}; without wrap 0 where there is no such rank     shape unchanged
adjoint   gx_r = gy_{r + offset}                                                permute, pairs reversed
note      notes/collectives/collectives.md#shift   truth  diffcoll.truth.shift
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from diffcoll.core.arguments import Call
from diffcoll.core.maps import Permute, part_of
from diffcoll.core.pending import Pending
from diffcoll.engines.types import Group


@overload
def shift(
    x: Tensor, offset: int = ..., *, group: Group = ..., wrap: bool = ..., async_op: Literal[False] = ...
) -> Tensor: ...


@overload
def shift(
    x: Tensor, offset: int = ..., *, group: Group = ..., wrap: bool = ..., async_op: Literal[True]
) -> Pending[Tensor]: ...


def shift(
    x: Tensor, offset: int = 1, *, group: Group = None, wrap: bool = True, async_op: bool = False
) -> Tensor | Pending[Tensor]:
    """Send x from each rank r to rank r + offset.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> xs = [torch.tensor(float(r)) for r in (5, 6, 7)]
    >>> simulate(dc.shift, xs)
    [tensor(7.), tensor(5.), tensor(6.)]
    >>> simulate(lambda x: dc.shift(x, -1, wrap=False), xs)
    [tensor(6.), tensor(7.), tensor(0.)]

    Args:
        x: any shape and dtype, the same on all ranks.
        offset: an integer, the same on all ranks; may be negative.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        wrap: whether the ranks form a ring, modulo N. If not, ranks without a sender receive zeros.
        async_op: return a `Pending` at once, whose `wait()` gives the result; the adjoint overlaps in backward too.

    Returns:
        A new tensor, shape and dtype of x: that of rank r − offset, or zeros. The loss must use it on every rank.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/collectives.md#shift.
    """
    call = Call("shift", x, group, async_op, {"offset": offset, "wrap": wrap})
    n, by, wraps = call.engine.size, call.integer("offset"), call.flag("wrap")
    pairs = tuple((r, (r + by) % n) for r in range(n) if wraps or 0 <= r + by < n)
    return call.perform(part_of(Permute(call.engine, pairs), "shift"), x)
