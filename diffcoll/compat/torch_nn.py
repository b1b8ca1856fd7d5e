"""Migration: the functions of `torch.distributed.nn.functional`, with the same signatures, on diffcoll's collectives.

    import diffcoll.compat.torch_nn as dist_nn      # was: import torch.distributed.nn.functional as dist_nn

As there, `src` and `dst` are *global* ranks, output arguments are filled, and blocks are lists of tensors. Gradients
flow through the returned tensor, not through the output argument. notes/migrating.md lists which gradients change, and
how each call is written with diffcoll's own functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import diffcoll

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

Op = Any
Group = Any


def broadcast(tensor: Tensor, src: int, group: Group = None) -> Tensor:
    """Rank src's tensor, on every rank; see `diffcoll.broadcast`.

    Args:
        tensor: any shape and dtype, the same on all ranks.
        src: a global rank.
        group: None is the default group.

    Source: notes/broadcast.md.
    """
    return diffcoll.broadcast(tensor, _within(src, group), group)


def gather(tensor: Tensor, dst: int = 0, group: Group = None) -> tuple[Tensor, ...]:
    """All ranks' tensors on rank dst, N tensors of zeros on the others; see `diffcoll.gather`.

    Args:
        tensor: any shape and dtype, the same on all ranks.
        dst: a global rank.
        group: None is the default group.

    Source: notes/gather.md.
    """
    y = diffcoll.gather(tensor.unsqueeze(0), _within(dst, group), group=group)
    if not len(y):  # not rank dst; the sum over the empty dimension is zeros that stay in the graph
        y = y.sum(0, dtype=y.dtype).expand(diffcoll.get_world_size(group), *tensor.shape)
    return y.unbind()


def scatter(tensors: Sequence[Tensor], src: int = 0, group: Group = None) -> Tensor:
    """Tensor r of rank src's list, on rank r; see `diffcoll.scatter`.

    Args:
        tensors: one for each rank, of equal shape and dtype. Only rank src's values are used; gradients of the other
            ranks' tensors are zero.
        src: a global rank.
        group: None is the default group.

    Source: notes/scatter.md.
    """
    return diffcoll.scatter(torch.stack(list(tensors)), _within(src, group), group=group).squeeze(0)


def reduce(tensor: Tensor, dst: int, op: Op = torch.distributed.ReduceOp.SUM, group: Group = None) -> Tensor:
    """The ranks' tensors reduced, on rank dst; zeros on the others; see `diffcoll.reduce`.

    Args:
        tensor: any shape, the same on all ranks.
        dst: a global rank.
        op: any `torch.distributed.ReduceOp` except the bitwise ones, or any `op` of `diffcoll.reduce`.
        group: None is the default group.

    Source: notes/reduce.md.
    """
    return diffcoll.reduce(tensor, _within(dst, group), op, group)


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Op = torch.distributed.ReduceOp.SUM, group: Group = None
) -> Tensor:
    """Tensor r of the ranks' lists, reduced, on rank r; see `diffcoll.reduce_scatter`.

    Args:
        output: filled with the result; gradients flow through the returned tensor.
        input_list: one tensor for each rank, of any shapes; shapes are the same on all ranks.
        op: any `torch.distributed.ReduceOp` except the bitwise ones, or any `op` of `diffcoll.reduce_scatter`.
        group: None is the default group.

    Source: notes/reduce_scatter.md.
    """
    row, sizes = _row(input_list)
    return _filled(output, diffcoll.reduce_scatter(row, op, 0, group, sizes=sizes))


def all_gather(tensor: Tensor, group: Group = None) -> tuple[Tensor, ...]:
    """All ranks' tensors, on every rank; see `diffcoll.all_gather`.

    The results are views of one tensor: clone a result before modifying it in place.

    Args:
        tensor: any shape and dtype, the same on all ranks.
        group: None is the default group.

    Source: notes/all_gather.md.
    """
    return diffcoll.all_gather(tensor, group=group, stack=True).unbind()


def _all_gather_base(output_tensor: Tensor, input_tensor: Tensor, group: Group = None) -> Tensor:
    """All ranks' tensors concatenated or stacked along dim 0, by the output's shape; see `diffcoll.all_gather`."""
    return _filled(output_tensor, diffcoll.all_gather(input_tensor, group=group))


def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: Group = None
) -> tuple[Tensor, ...]:
    """Tensor s of the result is tensor r of rank s's list, on rank r; see `diffcoll.all_to_all`.

    Args:
        output_tensor_list: filled with the result; tensor s has the shape of the one that rank s sends to this rank.
            Gradients flow through the returned tensors.
        input_tensor_list: one tensor for each rank, of any shape.
        group: None is the default group.

    Source: notes/all_to_all.md.
    """
    row, sizes = _row(input_tensor_list)
    expected = [output.numel() for output in output_tensor_list]
    blocks = torch.split(diffcoll.all_to_all(row, group=group, split_sizes=sizes, concat_sizes=expected), expected)
    return tuple(_filled(output, block) for output, block in zip(output_tensor_list, blocks, strict=True))


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
) -> Tensor:
    """Every rank sends a block of its tensor to every rank; see `diffcoll.all_to_all`.

    Args:
        output: filled with the result; gradients flow through the returned tensor.
        input: any dtype, at least one dimension.
        output_split_sizes: sizes along dim 0 of the blocks received from each rank; None or empty: equal.
        input_split_sizes: sizes along dim 0 of the blocks sent to each rank; None or empty: equal.
        group: None is the default group.

    Source: notes/all_to_all.md.
    """
    n = diffcoll.get_world_size(group)
    if not input_split_sizes and not output_split_sizes:
        return _filled(output, diffcoll.all_to_all(input, group=group))
    sent = list(input_split_sizes or [input.shape[0] // n] * n)
    received = list(output_split_sizes or [output.shape[0] // n] * n)
    return _filled(output, diffcoll.all_to_all(input, group=group, split_sizes=sent, concat_sizes=received))


def all_reduce(tensor: Tensor, op: Op = torch.distributed.ReduceOp.SUM, group: Group = None) -> Tensor:
    """The ranks' tensors reduced, on every rank; see `diffcoll.all_reduce`.

    Args:
        tensor: any shape, the same on all ranks.
        op: any `torch.distributed.ReduceOp` except the bitwise ones, or any `op` of `diffcoll.all_reduce`.
        group: None is the default group.

    Source: notes/all_reduce.md.
    """
    return diffcoll.all_reduce(tensor, op, group)


def _within(rank: int, group: Group) -> int:
    """Return the rank within the group of a global rank."""
    real = isinstance(group, torch.distributed.ProcessGroup) and group is not torch.distributed.group.WORLD
    return torch.distributed.get_group_rank(group, rank) if real else rank


def _row(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    return torch.cat([t.reshape(-1) for t in tensors]), [t.numel() for t in tensors]


def _filled(output: Tensor, y: Tensor) -> Tensor:
    """Return y in the shape of output, and copy it into output."""
    y = y.reshape(output.shape)
    with torch.no_grad():
        output.copy_(y)
    return y
