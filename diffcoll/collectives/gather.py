"""All ranks' tensors joined along a dimension, on one rank.

forward   y_dst = [x_0 … x_{N-1}]; empty elsewhere     joined along dim
adjoint   gx_r  = gy_dst[block r]                      scatter
note      notes/collectives/gather.md                              truth  diffcoll.truth.gather
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, overload

from torch import Tensor
from typing_extensions import override

from diffcoll.collectives import scatter
from diffcoll.core import trees
from diffcoll.core.arguments import Call, Sizes, Tree
from diffcoll.core.blocks import blocks_of, join
from diffcoll.core.bound import Bound, BoundTree
from diffcoll.core.call import perform
from diffcoll.core.linear import Linear, linear_map, then
from diffcoll.core.pending import Pending
from diffcoll.engines.types import Group


@linear_map
class Gather(Linear):
    """y_dst = [x_0 … x_{N-1}], with sizes[s] the size of x_s along dim; elsewhere of size 0 along dim."""

    name: ClassVar[str] = "gather"
    dst: int
    dim: int
    sizes: tuple[int, ...]

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        n = self.engine.size
        sends = [x.contiguous() if s == self.dst else None for s in range(n)]
        if self.engine.rank != self.dst:
            return then(self.engine.exchange(sends, [None] * n), x.new_empty(self.shape(x.shape)))
        row, counts, joined = join(x, x.shape, self.dim, self.sizes, self.engine)
        return then(self.engine.exchange(sends, blocks_of(row, counts, x.shape, self.dim, self.sizes)), joined)

    @override
    def shape(self, x: Sequence[int]) -> list[int]:
        length = sum(self.sizes) if self.engine.rank == self.dst else 0
        return [*x[: self.dim], length, *x[self.dim + 1 :]]

    @cached_property
    def adjoint(self) -> Linear:
        """gx_r = gy_dst[block r]."""
        return scatter.Scatter(self.engine, self.dst, self.dim, self.sizes)


@overload
def gather(
    x: Tree,
    dst: int = ...,
    dim: int = ...,
    *,
    group: Group = ...,
    sizes: Sizes = ...,
    async_op: Literal[False] = ...,
) -> Tree: ...


@overload
def gather(
    x: Tree,
    dst: int = ...,
    dim: int = ...,
    *,
    group: Group = ...,
    sizes: Sizes = ...,
    async_op: Literal[True],
) -> Pending[Tree]: ...


@overload
def gather(
    x: Tree,
    dst: int = ...,
    dim: int = ...,
    *,
    group: Group = ...,
    sizes: Sizes = ...,
    async_op: bool,
) -> Tree | Pending[Tree]: ...


def gather(
    x: Tree,
    dst: int = 0,
    dim: int = 0,
    *,
    group: Group = None,
    sizes: Sizes = None,
    async_op: bool = False,
) -> Tree | Pending[Tree]:
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
            Or a tree: nested tuples, lists and dicts of such tensors; all leaves of one dtype are sent in one message.
        dst: the rank within the group that receives.
        dim: the dimension to concatenate along.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        sizes: None: x has the same size along `dim` on all ranks. A list: each rank's size, zeros allowed.
            `"auto"`: the ranks exchange their sizes first, in an additional small message.
        async_op: do not block: return a `Pending`, whose `wait()` gives the result. Communication overlaps with
            computation in the backward too.

    Returns:
        A new contiguous tensor of x's dtype; on ranks other than dst its size along `dim` is 0.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/gather.md.
    """
    return perform(_gather, "gather", x, group, async_op, dst=dst, dim=dim, sizes=sizes)


def _gather(call: Call, x: Any) -> Bound | BoundTree:
    root = call.root("dst")
    if not isinstance(x, Tensor):
        received = list(range(call.engine.size)) if call.engine.rank == root else []
        rows = trees.Rows(_block, lambda call, sizes: Gather(call.engine, root, 0, sizes), received)
        return trees.by_blocks(call, _gather, rows)
    block, d = _block(call, x)
    f = Gather(call.engine, root, d, call.sizes_of_all(block, d))
    return Bound(call, f, x, (lambda x: x.unsqueeze(d)) if block is not x else None)


def _block(call: Call, x: Tensor) -> tuple[Tensor, int]:
    """Return x as a block, and the dimension to concatenate along."""
    new = x.dim() == 0
    d = call.dim("dim", x, new=new)
    return (x.unsqueeze(d) if new else x), d
