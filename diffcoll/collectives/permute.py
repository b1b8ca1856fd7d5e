"""Point-to-point messages along given pairs of ranks.

forward   y_dst  = x_src for each pair (src, dst); 0 where none is received     shape unchanged
adjoint   gx_src = gy_dst; 0 where none was sent                                permute, pairs reversed
note      notes/collectives/collectives.md#permute   truth  diffcoll.truth.permute
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from diffcoll.core.arguments import Call
from diffcoll.core.maps import Permute
from diffcoll.core.pending import Pending
from diffcoll.engines.types import Group


@overload
def permute(
    x: Tensor, pairs: Sequence[tuple[int, int]], *, group: Group = ..., async_op: Literal[False] = ...
) -> Tensor: ...


@overload
def permute(
    x: Tensor, pairs: Sequence[tuple[int, int]], *, group: Group = ..., async_op: Literal[True]
) -> Pending[Tensor]: ...


def permute(
    x: Tensor, pairs: Sequence[tuple[int, int]], *, group: Group = None, async_op: bool = False
) -> Tensor | Pending[Tensor]:
    """Send x from src to dst for each pair (src, dst) of ranks.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(lambda x: dc.permute(x, [(0, 1), (1, 2)]), [torch.tensor(float(r)) for r in (5, 6, 7)])
    [tensor(0.), tensor(5.), tensor(6.)]

    Args:
        x: any shape and dtype, the same on all ranks.
        pairs: ranks within the group, the same list on all ranks; each rank at most once as src and at most
            once as dst.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        async_op: return a `Pending` at once, whose `wait()` gives the result; the adjoint overlaps in backward too.

    Returns:
        A new tensor, shape and dtype of x: what was sent to this rank, or zeros. The loss must use it on every rank,
        also where it is zero: this rank receives the gradient of what it sent in the backward of its result.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/collectives.md#permute.
    """
    call = Call("permute", x, group, async_op, {"pairs": pairs})
    return call.perform(Permute(call.engine, call.pairs("pairs")), x)
