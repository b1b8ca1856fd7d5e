"""Migration: the functions of `torch.distributed.nn.functional`, with the same signatures, on diffcoll's collectives.

    import diffcoll.compat.torch_nn as dist_nn      # was: import torch.distributed.nn.functional as dist_nn

As there, `src` and `dst` are *global* ranks, for every group and mesh, output arguments are filled, and blocks are
lists of tensors. Gradients flow through the returned tensor, not through the output argument.
notes/how-to/migrating.md lists which gradients change, and each call in diffcoll's own functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

import diffcoll
from diffcoll.core.blocks import as_row, pieces
from diffcoll.core.errors import message
from diffcoll.core.groups import rank_within

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

    Source: notes/collectives/broadcast.md.
    """
    return diffcoll.broadcast(tensor, rank_within(src, group, "broadcast", "src"), group=group)


def gather(tensor: Tensor, dst: int = 0, group: Group = None) -> tuple[Tensor, ...]:
    """All ranks' tensors on rank dst, N tensors of zeros on the others; see `diffcoll.gather`.

    Args:
        tensor: any shape and dtype, the same on all ranks.
        dst: a global rank.
        group: None is the default group.

    Source: notes/collectives/gather.md.
    """
    y = diffcoll.gather(tensor.unsqueeze(0), rank_within(dst, group, "gather", "dst"), group=group)
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

    Source: notes/collectives/gather.md#scatter.
    """
    root = rank_within(src, group, "scatter", "src")
    for i, t in enumerate(tensors):
        _check("scatter", f"tensors[{i}]", t, tensors[0], "tensors[0]")
    return diffcoll.scatter(torch.stack(list(tensors)), root, group=group).squeeze(0)


def reduce(tensor: Tensor, dst: int, op: Op = torch.distributed.ReduceOp.SUM, group: Group = None) -> Tensor:
    """The ranks' tensors reduced, on rank dst; zeros on the others; see `diffcoll.reduce`.

    Args:
        tensor: any shape, the same on all ranks.
        dst: a global rank.
        op: any `torch.distributed.ReduceOp` except the bitwise ones, or any `op` of `diffcoll.reduce`.
        group: None is the default group.

    Source: notes/collectives/broadcast.md#reduce.
    """
    return diffcoll.reduce(tensor, rank_within(dst, group, "reduce", "dst"), op, group=group)


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Op = torch.distributed.ReduceOp.SUM, group: Group = None
) -> Tensor:
    """Tensor r of the ranks' lists, reduced, on rank r; see `diffcoll.reduce_scatter`.

    Args:
        output: filled with the result; gradients flow through the returned tensor.
        input_list: one tensor for each rank, of any shapes; shapes are the same on all ranks.
        op: any `torch.distributed.ReduceOp` except the bitwise ones, or any `op` of `diffcoll.reduce_scatter`.
        group: None is the default group.

    Source: notes/collectives/all_gather.md#reduce_scatter.
    """
    row, sizes = _row("reduce_scatter", "input_list", input_list)
    mine = diffcoll.get_rank(group)
    if mine < len(sizes):  # if not, the list is too short, which is an error below
        _check("reduce_scatter", "output", output, row, "input_list", sizes[mine])
    return _filled(output, diffcoll.reduce_scatter(row, op, 0, group=group, sizes=sizes))


def all_gather(tensor: Tensor, group: Group = None) -> tuple[Tensor, ...]:
    """All ranks' tensors, on every rank; see `diffcoll.all_gather`.

    The results are views of one tensor: clone a result before modifying it in place.

    Args:
        tensor: any shape and dtype, the same on all ranks.
        group: None is the default group.

    Source: notes/collectives/all_gather.md.
    """
    return diffcoll.all_gather(tensor, group=group, stack=True).unbind()


def _all_gather_base(output_tensor: Tensor, input_tensor: Tensor, group: Group = None) -> Tensor:
    """All ranks' tensors concatenated or stacked along dim 0, by the output's shape; see `diffcoll.all_gather`."""
    size = input_tensor.numel() * diffcoll.get_world_size(group)
    _check("_all_gather_base", "output_tensor", output_tensor, input_tensor, "input_tensor", size)
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

    Source: notes/collectives/all_to_all.md.
    """
    row, sizes = _row("all_to_all", "input_tensor_list", input_tensor_list)
    for i, output in enumerate(output_tensor_list):
        _check("all_to_all", f"output_tensor_list[{i}]", output, row, "input_tensor_list")
    expected = [output.numel() for output in output_tensor_list]
    y = diffcoll.all_to_all(row, group=group, split_sizes=sizes, concat_sizes=expected)
    return tuple(_filled(output, block) for output, block in zip(output_tensor_list, pieces(y, expected), strict=True))


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

    Source: notes/collectives/all_to_all.md.
    """
    n = diffcoll.get_world_size(group)
    if not input_split_sizes and not output_split_sizes:
        _check("all_to_all_single", "output", output, input, "input", input.numel())
        return _filled(output, diffcoll.all_to_all(input, group=group))
    sent = list(input_split_sizes or [input.shape[0] // n] * n)
    received = list(output_split_sizes or [output.shape[0] // n] * n)
    _check("all_to_all_single", "output", output, input, "input", sum(received) * prod(input.shape[1:]))
    return _filled(output, diffcoll.all_to_all(input, group=group, split_sizes=sent, concat_sizes=received))


def all_reduce(tensor: Tensor, op: Op = torch.distributed.ReduceOp.SUM, group: Group = None) -> Tensor:
    """The ranks' tensors reduced, on every rank; see `diffcoll.all_reduce`.

    Args:
        tensor: any shape, the same on all ranks.
        op: any `torch.distributed.ReduceOp` except the bitwise ones, or any `op` of `diffcoll.all_reduce`.
        group: None is the default group.

    Source: notes/collectives/all_reduce.md.
    """
    return diffcoll.all_reduce(tensor, op, group=group)


def _row(name: str, argument: str, tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Return the numbers of a list of tensors in one row, and how many each has."""
    for i, t in enumerate(tensors):
        _check(name, f"{argument}[{i}]", t, tensors[0], f"{argument}[0]")
    return as_row(tensors), [t.numel() for t in tensors]


def _check(name: str, argument: str, given: Tensor, x: Tensor, like: str, size: int | None = None) -> None:
    """Raise unless a tensor has the dtype and device of x, which is the argument `like`, and this many numbers."""
    if given.dtype != x.dtype or given.device != x.device:
        got, expected = f"a {given.dtype} tensor on {given.device}", f"{x.dtype} on {x.device}, as {like} is"
        raise TypeError(message(name, argument, got, expected, f"convert it, or {like}"))
    if size is not None and given.numel() != size:
        raise ValueError(message(name, argument, f"shape {tuple(given.shape)}", f"{size} numbers", "allocate as many"))


def _filled(output: Tensor, y: Tensor) -> Tensor:
    """Return y in the shape of output, and copy it into output."""
    y = y.reshape(output.shape)
    with torch.no_grad():
        output.copy_(y)
    return y
