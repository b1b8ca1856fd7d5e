"""Reduction over ranks, on one rank.

forward   y_dst = Σ_s x_s; 0 elsewhere     shape unchanged
adjoint   gx_r  = gy_dst                   broadcast
note      notes/collectives/broadcast.md#reduce                  truth  diffcoll.truth.reduce
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.collectives import broadcast
from diffcoll.core import trees
from diffcoll.core.arguments import Call, Tree
from diffcoll.core.bound import Bound, BoundTree, bind_reduction
from diffcoll.core.call import perform
from diffcoll.core.linear import Linear, linear_map, then
from diffcoll.core.pending import Pending
from diffcoll.core.reductions import Op
from diffcoll.engines.types import Group


@linear_map
class Reduce(Linear):
    """y_dst = Σ_s x_s; 0 elsewhere."""

    name: ClassVar[str] = "reduce"
    dst: int

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        is_dst = self.engine.rank == self.dst
        y = x.clone(memory_format=torch.contiguous_format) if is_dst else x.contiguous()
        wait = self.engine.reduce(y, self.dst)
        return then(wait, y if is_dst else torch.zeros_like(x, memory_format=torch.contiguous_format))

    @cached_property
    def adjoint(self) -> Linear:
        """gx_r = gy_dst."""
        return broadcast.Broadcast(self.engine, self.dst)


@overload
def reduce(
    x: Tree,
    dst: int = ...,
    op: Op = ...,
    *,
    group: Group = ...,
    async_op: Literal[False] = ...,
) -> Tree: ...


@overload
def reduce(
    x: Tree,
    dst: int = ...,
    op: Op = ...,
    *,
    group: Group = ...,
    async_op: Literal[True],
) -> Pending[Tree]: ...


@overload
def reduce(
    x: Tree,
    dst: int = ...,
    op: Op = ...,
    *,
    group: Group = ...,
    async_op: bool,
) -> Tree | Pending[Tree]: ...


def reduce(
    x: Tree,
    dst: int = 0,
    op: Op = "sum",
    *,
    group: Group = None,
    async_op: bool = False,
) -> Tree | Pending[Tree]:
    """Reduce all ranks' x to their sum, mean, product, maximum, …, on rank dst; the result is zero on the others.

    The backward is a broadcast from dst. A rank takes part in it if its x requires a gradient and its loss uses y. So
    on the other ranks, too, x must require a gradient, and `y.sum()`, which is zero, must be added to the loss.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(lambda x: dc.reduce(x, dst=1), [torch.tensor(1.0), torch.tensor(2.0)])
    [tensor(0.), tensor(3.)]

    Args:
        x: any shape, the same on all ranks; any dtype that `op` supports. float16 and bfloat16 are accumulated in
            float32 where the library sums (gloo, MPI), else as the backend does it.
            Or a tree: nested tuples, lists and dicts of such tensors; all leaves of one dtype are sent in one message.
        dst: the rank within the group that receives.
        op: as in `all_reduce`. A function is called on every rank with the whole stack (N, *x.shape),
            `dc.elementwise(f)` with a part of it. A mean overflows where the sum does.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        async_op: do not block: return a `Pending`, whose `wait()` gives the result. Communication overlaps with
            computation in the backward too.

    Returns:
        A new tensor, shape and dtype of x.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/broadcast.md#reduce.
    """
    return perform(_reduce, "reduce", x, group, async_op, dst=dst, op=op)


def _reduce(call: Call, x: Any) -> Bound | BoundTree:
    root = call.root("dst")
    if not isinstance(x, Tensor):
        return trees.for_op(call)(call, _reduce)
    return bind_reduction(call, Reduce(call.engine, root), x, lambda reducing: reducing.on_rank(root))
