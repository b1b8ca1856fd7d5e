"""Every rank sends a block of its tensor to every rank.

forward   y_r  = [x_s block r]_s        cut along split_dim, joined along concat_dim
adjoint   gx_r = [gy_s block r]_s       all_to_all, dimensions and sizes swapped
note      notes/collectives/all_to_all.md           truth  diffcoll.truth.all_to_all
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import ClassVar, Literal, overload

from torch import Tensor
from typing_extensions import override

from diffcoll.core import checks
from diffcoll.core.arguments import Call, Parts, Sizes
from diffcoll.core.blocks import blocks_of, cut, join
from diffcoll.core.bound import Bound
from diffcoll.core.call import perform
from diffcoll.core.linear import Linear, linear_map, then
from diffcoll.core.pending import Pending
from diffcoll.engines.types import Group


@linear_map
class AllToAll(Linear):
    """y_r = [x_s block r]_s.

    `split_sizes[s]` is the size along split_dim of the block for rank s, `concat_sizes[s]` the size along concat_dim of
    the block from rank s.
    """

    name: ClassVar[str] = "all_to_all"
    split_dim: int
    concat_dim: int
    split_sizes: tuple[int, ...]
    concat_sizes: tuple[int, ...]

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        shape = list(x.shape)
        shape[self.split_dim] = self.split_sizes[self.engine.rank]
        row, counts, joined = join(x, shape, self.concat_dim, self.concat_sizes, self.engine)
        recvs = blocks_of(row, counts, shape, self.concat_dim, self.concat_sizes)
        return then(self.engine.exchange(cut(x, self.split_dim, self.split_sizes), recvs), joined)

    @override
    def shape(self, x: Sequence[int]) -> list[int]:
        y = list(x)
        y[self.split_dim] = self.split_sizes[self.engine.rank]
        y[self.concat_dim] = sum(self.concat_sizes)
        return y

    @cached_property
    def adjoint(self) -> Linear:
        """gx_r = [gy_s block r]_s: every block is sent back to its source."""
        return AllToAll(self.engine, self.concat_dim, self.split_dim, self.concat_sizes, self.split_sizes)


@overload
def all_to_all(
    x: Tensor,
    split_dim: int = ...,
    concat_dim: int = ...,
    *,
    group: Group = ...,
    split_sizes: Parts = ...,
    concat_sizes: Sizes = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...


@overload
def all_to_all(
    x: Tensor,
    split_dim: int = ...,
    concat_dim: int = ...,
    *,
    group: Group = ...,
    split_sizes: Parts = ...,
    concat_sizes: Sizes = ...,
    async_op: Literal[True],
) -> Pending[Tensor]: ...


@overload
def all_to_all(
    x: Tensor,
    split_dim: int = ...,
    concat_dim: int = ...,
    *,
    group: Group = ...,
    split_sizes: Parts = ...,
    concat_sizes: Sizes = ...,
    async_op: bool,
) -> Tensor | Pending[Tensor]: ...


def all_to_all(
    x: Tensor,
    split_dim: int = 0,
    concat_dim: int = 0,
    *,
    group: Group = None,
    split_sizes: Parts = None,
    concat_sizes: Sizes = None,
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    """Cut x into one block per rank, send each rank its block, and concatenate the blocks received.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(dc.all_to_all, [torch.tensor([1, 2]), torch.tensor([10, 20])])
    [tensor([ 1, 10]), tensor([ 2, 20])]

    Args:
        x: at least one dimension; any dtype; the same shape on all ranks except along the dimensions for which
            sizes are given.
        split_dim: the dimension to cut along.
        concat_dim: the dimension to concatenate along.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        split_sizes: None: N equal blocks. A list: the size along `split_dim` of the block for each rank,
            zeros allowed. If `split_dim` and `concat_dim` differ, all ranks pass the same list.
        concat_sizes: the size along `concat_dim` of the block from each rank. None: equal blocks; if `split_dim` and
            `concat_dim` are equal, `split_sizes` must be None too. `"auto"`: the ranks exchange their sizes first.
        async_op: do not block: return a `Pending`, whose `wait()` gives the result. Communication overlaps with
            computation in the backward too.

    Returns:
        A new contiguous tensor of x's dtype.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/all_to_all.md.
    """
    return perform(
        _all_to_all,
        "all_to_all",
        x,
        group,
        async_op,
        split_dim=split_dim,
        concat_dim=concat_dim,
        split_sizes=split_sizes,
        concat_sizes=concat_sizes,
    )


def _all_to_all(call: Call, x: Tensor) -> Bound:
    split_sizes, concat_sizes = call.arguments["split_sizes"], call.arguments["concat_sizes"]
    d, c = call.dim("split_dim", x), call.dim("concat_dim", x)
    parts = call.sizes_of_parts(x, d, "split_sizes")
    if d != c:
        received = call.sizes_of_all(x, c, "concat_sizes")
    elif split_sizes is None and concat_sizes is None:
        received = parts
    elif concat_sizes is None:
        raise call.error("concat_sizes", 'a list or "auto" where split_sizes is a list')
    else:
        received = call.sizes_of_blocks(parts, "concat_sizes")
    if checks.is_on():
        call.agree_on_blocks(
            [_block(x, {d: part}) for part in parts], [_block(x, {d: parts[call.engine.rank], c: k}) for k in received]
        )
    return Bound(call, AllToAll(call.engine, d, c, parts, received), x)


def _block(x: Tensor, sizes: dict[int, int]) -> list[int]:
    """Return the shape of x with these sizes along some dims."""
    return [sizes.get(dim, size) for dim, size in enumerate(x.shape)]
