"""Reduction over ranks; every rank receives its block of the result.

forward   y_r  = (Σ_s x_s)[block r]      blocks along dim
adjoint   gx_r = [gy_0 … gy_{N-1}]       all_gather
note      notes/collectives/all_gather.md#reduce_scatter        truth  diffcoll.truth.reduce_scatter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import ClassVar, Literal, overload

from torch import Tensor
from typing_extensions import override

from diffcoll.collectives import all_gather
from diffcoll.core.arguments import Call, Parts
from diffcoll.core.blocks import row_of
from diffcoll.core.bound import Bound, bind_reduction
from diffcoll.core.call import perform
from diffcoll.core.linear import Linear, linear_map, then
from diffcoll.core.pending import Pending
from diffcoll.core.reductions import Op, Ties
from diffcoll.engines.types import Group


@linear_map
class ReduceScatter(Linear):
    """y_r = (Σ_s x_s)[block r], with sizes[r] the size of block r along dim."""

    name: ClassVar[str] = "reduce_scatter"
    dim: int
    sizes: tuple[int, ...]
    deterministic: bool = False

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        row, counts = row_of(x, self.dim, self.sizes)
        y = x.new_empty(self.shape(x.shape))
        if self.deterministic:
            return then(self.engine.reduce_scatter_in_order(row, counts, y), y)
        return then(self.engine.reduce_scatter(row, counts, y), y)

    @override
    def shape(self, x: Sequence[int]) -> list[int]:
        return [*x[: self.dim], self.sizes[self.engine.rank], *x[self.dim + 1 :]]

    @cached_property
    def adjoint(self) -> Linear:
        """gx_r = [gy_0 … gy_{N-1}]."""
        return all_gather.AllGather(self.engine, self.dim, self.sizes, deterministic=self.deterministic)


@overload
def reduce_scatter(
    x: Tensor,
    op: Op = ...,
    dim: int = ...,
    *,
    group: Group = ...,
    sizes: Parts = ...,
    ties: Ties = ...,
    deterministic: bool = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def reduce_scatter(
    x: Tensor,
    op: Op = ...,
    dim: int = ...,
    *,
    group: Group = ...,
    sizes: Parts = ...,
    ties: Ties = ...,
    deterministic: bool = ...,
    async_op: Literal[True],
) -> Pending[Tensor]: ...


@overload
def reduce_scatter(
    x: Tensor,
    op: Op = ...,
    dim: int = ...,
    *,
    group: Group = ...,
    sizes: Parts = ...,
    ties: Ties = ...,
    deterministic: bool = ...,
    async_op: bool,
) -> Tensor | Pending[Tensor]: ...


def reduce_scatter(
    x: Tensor,
    op: Op = "sum",
    dim: int = 0,
    *,
    group: Group = None,
    sizes: Parts = None,
    ties: Ties = "even",
    deterministic: bool = False,
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    """Reduce all ranks' x to their sum, mean, product, maximum, …; rank r receives block r along a dimension.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(dc.reduce_scatter, [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])])
    [tensor([11.]), tensor([22.])]

    Args:
        x: at least one dimension, the same shape on all ranks; any dtype that `op` supports. float16 and bfloat16 are
            accumulated in float32 where the library sums (gloo, MPI), else as the backend does it.
        op: as in `all_reduce`. A function is called on every rank with the whole stack (N, *x.shape),
            `dc.elementwise(f)` with a part of it. A mean overflows where the sum does.
        dim: the dimension to cut along.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        sizes: None: N equal blocks. A list, the same on all ranks: each rank's size, zeros allowed.
        ties: where several ranks hold the maximum or minimum, which of them receive the gradient of `"max"` and
            `"min"`: `"even"`, all of them in equal parts, as `torch.amax`; `"first"`, the lowest of these ranks.
        deterministic: add in the order of ranks, ((x_0 + x_1) + x_2) + …, and the gradients in the backward too. Each
            element of a sum or mean then has the same bits on every engine, whatever the size of x and the position of
            the element in it. Slower than a backend's own sum where it has one; see notes/collectives/deterministic.md.
        async_op: do not block: return a `Pending`, whose `wait()` gives the result. Communication overlaps with
            computation in the backward too.

    Returns:
        A new tensor with the dtype of x, and its shape except for this rank's size along `dim`.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/all_gather.md#reduce_scatter.
    """
    name = "reduce_scatter"
    return perform(
        _reduce_scatter, name, x, group, async_op, op=op, dim=dim, sizes=sizes, ties=ties, deterministic=deterministic
    )


def _reduce_scatter(call: Call, x: Tensor) -> Bound:
    d = call.dim("dim", x)
    how = d, call.sizes_of_parts(x, d), call.flag("deterministic")
    return bind_reduction(call, ReduceScatter(call.engine, *how), x, lambda reducing: reducing.blocks(*how))
