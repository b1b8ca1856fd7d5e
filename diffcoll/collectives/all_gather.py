"""All ranks' tensors joined along a dimension, on every rank.

forward   y_r  = [x_0 … x_{N-1}]          joined along dim
adjoint   gx_r = (Σ_s gy_s)[block r]      reduce_scatter
          gx_r = gy_r[block r]            replicated: split
note      notes/collectives/all_gather.md             truth  diffcoll.truth.all_gather
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.collectives import reduce_scatter, split
from diffcoll.core import trees
from diffcoll.core.arguments import Call, Sizes, Tree
from diffcoll.core.blocks import join
from diffcoll.core.bound import Bound, BoundTree
from diffcoll.core.call import perform
from diffcoll.core.linear import Linear, linear_map, then
from diffcoll.core.pending import Pending
from diffcoll.engines.types import GradPlacement, Group


@linear_map
class AllGather(Linear):
    """y_r = [x_0 … x_{N-1}], with sizes[s] the size of x_s along dim."""

    name: ClassVar[str] = "all_gather"
    reads_at_once: ClassVar[bool] = True
    dim: int
    sizes: tuple[int, ...]
    replicated: bool = False
    deterministic: bool = False
    #: Dtype in which x is sent, exact for every x; the adjoint sends gradients in theirs. None: x's own.
    sent: torch.dtype | None = None

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        if self.sent is None:
            return self._start(x)
        dtype, wait = x.dtype, self._start(x.to(self.sent))
        return lambda: wait().to(dtype)

    def _start(self, x: Tensor) -> Callable[[], Tensor]:
        engine = self.engine
        row, counts, joined = join(x, x.shape, self.dim, self.sizes, engine)
        if not engine.now.later:
            return then(engine.all_gather(x.contiguous(), row, counts), joined)
        row.split_with_sizes(counts)[engine.rank].view(x.shape).copy_(x)  # x may change
        return then(engine.all_gather(None, row, counts), joined)

    @override
    def shape(self, x: Sequence[int]) -> list[int]:
        return [*x[: self.dim], sum(self.sizes), *x[self.dim + 1 :]]

    @override
    def bytes(self, x: Tensor) -> int:
        return x.nbytes if self.sent is None else x.numel() * self.sent.itemsize

    @cached_property
    def adjoint(self) -> Linear:
        """gx_r = (Σ_s gy_s)[block r]; replicated: gx_r = gy_r[block r]."""
        if self.replicated:
            return split.Split(self.engine, self.dim, self.sizes, self.deterministic)
        return reduce_scatter.ReduceScatter(self.engine, self.dim, self.sizes, self.deterministic)

    @property
    @override
    def shared(self) -> tuple[bool, bool]:
        return False, self.replicated


@overload
def all_gather(
    x: Tree,
    dim: int = ...,
    *,
    group: Group = ...,
    sizes: Sizes = ...,
    stack: bool = ...,
    grad_placement: GradPlacement = ...,
    async_op: Literal[False] = ...,
) -> Tree: ...


@overload
def all_gather(
    x: Tree,
    dim: int = ...,
    *,
    group: Group = ...,
    sizes: Sizes = ...,
    stack: bool = ...,
    grad_placement: GradPlacement = ...,
    async_op: Literal[True],
) -> Pending[Tree]: ...


@overload
def all_gather(
    x: Tree,
    dim: int = ...,
    *,
    group: Group = ...,
    sizes: Sizes = ...,
    stack: bool = ...,
    grad_placement: GradPlacement = ...,
    async_op: bool,
) -> Tree | Pending[Tree]: ...


def all_gather(
    x: Tree,
    dim: int = 0,
    *,
    group: Group = None,
    sizes: Sizes = None,
    stack: bool = False,
    grad_placement: GradPlacement = "partial",
    async_op: bool = False,
) -> Tree | Pending[Tree]:
    """Concatenate all ranks' x along a dimension, in the order of ranks, on every rank.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(lambda x: dc.all_gather(x, sizes=[1, 2]), [torch.tensor([1]), torch.tensor([2, 3])])
    [tensor([1, 2, 3]), tensor([1, 2, 3])]

    Args:
        x: any dtype; any shape, the same on all ranks except, with `sizes`, for its size along `dim`.
            From 0-d tensors the result has shape (N,).
            Or a tree: nested tuples, lists and dicts of such tensors; all leaves of one dtype are sent in one message.
        dim: the dimension to concatenate along; with `stack`, the index of the new one.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        sizes: None: x has the same size along `dim` on all ranks. A list: each rank's size, zeros allowed.
            `"auto"`: the ranks exchange their sizes first, in an additional small message.
        stack: stack along a new dimension, of size N, as `torch.stack` does.
        grad_placement: of the gradient of y, in DTensor's words. `"partial"` or `Partial()`: each rank has its own loss
            and the objective is their sum; the backward sums all ranks' gradients of this rank's block. `"replicate"`
            or `Replicate()`: every rank computes the same loss from y (tensor parallelism), which counts once; the
            backward takes this rank's block of the gradient, without communication.
        async_op: do not block: return a `Pending`, whose `wait()` gives the result. Communication overlaps with
            computation in the backward too.

    Returns:
        A new contiguous tensor of x's dtype, the same on every rank.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/all_gather.md.
    """
    return perform(
        _all_gather, "all_gather", x, group, async_op, dim=dim, sizes=sizes, stack=stack, grad_placement=grad_placement
    )


def _all_gather(call: Call, x: Any) -> Bound | BoundTree:
    replicated = call.replicated()
    if call.flag("stack") and call.arguments["sizes"] is not None:
        raise call.error("sizes", "None with stack=True, where every rank has one slice")
    if not isinstance(x, Tensor):
        ranks = list(range(call.engine.size))
        rows = trees.Rows(_block, lambda call, sizes: AllGather(call.engine, 0, sizes, replicated), ranks)
        return trees.by_blocks(call, _all_gather, rows)
    block, d = _block(call, x)
    f = AllGather(call.engine, d, call.sizes_of_all(block, d), replicated)
    return Bound(call, f, x, (lambda x: x.unsqueeze(d)) if block is not x else None)


def _block(call: Call, x: Tensor) -> tuple[Tensor, int]:
    """Return x as a block, and the dimension to concatenate along."""
    new = call.arguments["stack"] or x.dim() == 0
    d = call.dim("dim", x, new=new)
    return (x.unsqueeze(d) if new else x), d


def gathered_as(dtype: torch.dtype, x: Tensor, sizes: list[int], group: Group) -> Tensor:
    """Return `all_gather(x, sizes=sizes)`, where x is sent in a narrower dtype that is exact for it.

    The ranks' gradients are sent and added in the dtype of x.
    """

    def bind(call: Call, x: Tensor) -> Bound:
        return Bound(call, AllGather(call.engine, 0, call.sizes_of_all(x, 0), sent=dtype), x)

    y: Tensor = perform(bind, "all_gather", x, group, False, dim=0, sizes=sizes, stack=False, grad_placement="partial")
    return y
