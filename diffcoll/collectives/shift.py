"""Point-to-point messages by a fixed offset, in a ring or a line of ranks.

forward   y_r  = x_{r − offset}; without wrap 0 where there is no such rank     the shape of x_{r − offset}
adjoint   gx_r = gy_{r + offset}                                                permute, pairs reversed
note      notes/collectives/permute.md#shift                                                truth  diffcoll.truth.shift
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, overload

from diffcoll.collectives import permute
from diffcoll.core.arguments import Call, Sizes, Tree
from diffcoll.core.bound import Bound, BoundTree
from diffcoll.core.call import perform
from diffcoll.core.linear import linear_map
from diffcoll.core.pending import Pending
from diffcoll.engines.types import Group


@linear_map
class Shift(permute.Permute):
    """y_r = x_{r − offset}: a permute with pairs (r, r + offset)."""

    name: ClassVar[str] = "shift"


@overload
def shift(
    x: Tree,
    offset: int = ...,
    *,
    group: Group = ...,
    wrap: bool = ...,
    dim: int = ...,
    sizes: Sizes = ...,
    async_op: Literal[False] = ...,
) -> Tree: ...


@overload
def shift(
    x: Tree,
    offset: int = ...,
    *,
    group: Group = ...,
    wrap: bool = ...,
    dim: int = ...,
    sizes: Sizes = ...,
    async_op: Literal[True],
) -> Pending[Tree]: ...


@overload
def shift(
    x: Tree,
    offset: int = ...,
    *,
    group: Group = ...,
    wrap: bool = ...,
    dim: int = ...,
    sizes: Sizes = ...,
    async_op: bool,
) -> Tree | Pending[Tree]: ...


def shift(
    x: Tree,
    offset: int = 1,
    *,
    group: Group = None,
    wrap: bool = True,
    dim: int = 0,
    sizes: Sizes = None,
    async_op: bool = False,
) -> Tree | Pending[Tree]:
    """Send x from each rank r to rank r + offset.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> xs = [torch.tensor(float(r)) for r in (5, 6, 7)]
    >>> simulate(dc.shift, xs)
    [tensor(7.), tensor(5.), tensor(6.)]
    >>> simulate(lambda x: dc.shift(x, -1, wrap=False), xs)
    [tensor(6.), tensor(7.), tensor(0.)]
    >>> simulate(lambda x: dc.shift(x, sizes="auto"), [torch.tensor([5]), torch.tensor([6, 7])])
    [tensor([6, 7]), tensor([5])]

    Args:
        x: any dtype; any shape, the same on all ranks except, with `sizes`, for its size along `dim`.
            Or a tree: nested tuples, lists and dicts of such tensors; all leaves of one dtype are sent in one message.
        offset: an integer, the same on all ranks; may be negative.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        wrap: whether the ranks form a ring, modulo N. If not, ranks without a sender receive zeros.
        dim: the dimension along which the ranks' x have these `sizes`.
        sizes: None: x has the same shape on all ranks. A list: each rank's size of x along `dim`, zeros allowed.
            `"auto"`: the ranks exchange their sizes first, in an additional small message.
        async_op: do not block: return a `Pending`, whose `wait()` gives the result. Communication overlaps with
            computation in the backward too.

    Returns:
        A new tensor of x's dtype: what was sent to this rank, of size `sizes[r − offset]` along `dim`, or zeros of the
            shape of its own x. The loss must use it on every rank, also where it is zero: this rank receives the
            gradient of what it sent in the backward of its result.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/permute.md#shift.
    """
    return perform(_shift, "shift", x, group, async_op, offset=offset, wrap=wrap, dim=dim, sizes=sizes)


def _shift(call: Call, x: Any) -> Bound | BoundTree:
    k, n, ring = call.integer("offset"), call.engine.size, call.flag("wrap")
    pairs = tuple((r, (r + k) % n) for r in range(n) if ring or 0 <= r + k < n)
    return permute.bind(call, x, Shift, pairs)
