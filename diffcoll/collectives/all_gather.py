"""All ranks' tensors joined along a dimension, on every rank.

forward   y_r  = [x_0 … x_{N-1}]          joined along dim
adjoint   gx_r = (Σ_s gy_s)[block r]      reduce_scatter
          gx_r = gy_r[block r]            replicated: split
note      notes/collectives/collectives.md#all_gather   truth  diffcoll.truth.all_gather
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from diffcoll.core.arguments import Call, Sizes, Tree
from diffcoll.core.maps import AllGather, part_of
from diffcoll.core.pending import Pending
from diffcoll.core.tree_calls import by_blocks
from diffcoll.engines.types import GradPlacement, Group


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
        grad_placement: as in `all_reduce`. `"partial"`: the backward sums all ranks' gradients of this rank's block.
            `"replicate"`: it takes this rank's block of the gradient, without communication.
        async_op: return a `Pending` at once, whose `wait()` gives the result; the adjoint overlaps in backward too.

    Returns:
        A new contiguous tensor of x's dtype, the same on every rank.

    Raises:
        TypeError, ValueError: an argument is invalid.
        CollectiveMismatchError: on all ranks, with `sizes="auto"`, if their x differ in dtype or another dimension.

    Source: notes/collectives/collectives.md#all_gather.
    """
    arguments = {"dim": dim, "sizes": sizes, "stack": stack, "grad_placement": grad_placement}
    call = Call("all_gather", x, group, async_op, arguments)
    if call.flag("stack") and sizes is not None:
        raise call.error("sizes", "None with stack=True, where every rank has one slice")
    return _of_tensor(call) if isinstance(x, Tensor) else by_blocks(call, _of_tensor, block_of)


def _of_tensor(call: Call) -> Any:
    replicated = call.replicated()
    block, d = block_of(call)
    f = AllGather(call.engine, d, call.sizes_of_all(block, d), replicated)
    if block is not call.x:
        part_of(f, "all_gather", "stacked")  # the shape of the block is not that of x
    return call.perform(f, block)


def block_of(call: Call) -> tuple[Tensor, int]:
    """Return x as a block, and the dimension to concatenate along."""
    x: Tensor = call.x
    new = call.arguments.get("stack", False) or x.dim() == 0
    d = call.dim("dim", x, new=new)
    return (x.unsqueeze(d) if new else x), d


def gathered_as(dtype: torch.dtype, x: Tensor, sizes: list[int], group: Group) -> Tensor:
    """Return `all_gather(x, sizes=sizes)`, where x is sent in a narrower dtype that is exact for it.

    The ranks' gradients are sent and added in the dtype of x.
    """
    arguments = {"dim": 0, "sizes": sizes, "stack": False, "grad_placement": "partial"}
    call = Call("all_gather", x, group, False, arguments)
    y: Tensor = call.perform(AllGather(call.engine, 0, call.sizes_of_all(x, 0), sent=dtype), x)
    return y
