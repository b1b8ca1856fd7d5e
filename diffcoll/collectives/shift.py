"""Tensors sent on by a number of ranks: the ring, and the line.

forward   y_r  = x_{r − offset}; without wrap 0 where there is no such rank     shape unchanged
adjoint   gx_r = gy_{r + offset}                                                permute, pairs reversed
note      notes/shift.md                                                        truth  diffcoll.truth.shift
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from diffcoll.collectives.permute import Permute
from diffcoll.core.arguments import Group
from diffcoll.core.call import Call, perform

__all__ = ["Shift", "shift"]


@dataclass(frozen=True)
class Shift(Permute):
    """y_r = x_{r − offset}: a permute with pairs (r, r + offset)."""

    name: ClassVar[str] = "shift"


def shift(x: Tensor, offset: int = 1, group: Group = None, *, wrap: bool = True) -> Tensor:
    """Send x to the rank that comes `offset` later.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> xs = [torch.tensor(float(r)) for r in (5, 6, 7)]
    >>> simulate(dc.shift, xs)
    [tensor(7.), tensor(5.), tensor(6.)]
    >>> simulate(lambda x: dc.shift(x, -1, wrap=False), xs)
    [tensor(6.), tensor(7.), tensor(0.)]

    Args:
        x: any shape and dtype, the same on all ranks.
        offset: how many ranks further, the same on all ranks; negative: back.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        wrap: whether the ranks form a ring; on a line, what leaves it is lost and zeros come in.

    Returns:
        A new tensor, shape and dtype of x. The loss must use it on every rank, zeros too: the gradient of
            what this rank sent comes back with its backward.

    Raises:
        TypeError, ValueError: an argument is wrong on its own.

    Source: notes/shift.md.
    """
    y: Tensor = perform(_shift, "shift", x, group, offset=offset, wrap=wrap)
    return y


def _shift(call: Call, x: Tensor) -> Any:
    k, n, ring = call.integer("offset"), call.engine.size, call.flag("wrap")
    pairs = tuple((r, (r + k) % n) for r in range(n) if ring or 0 <= r + k < n)
    return call.submit(Shift(call.engine, pairs), x)
