"""Blocks of a tensor along a dimension, one after the other in memory; without a copy where that can be.

`torch.cat` omits parts of shape (0,) from the graph, and so does the derivative of a split into them. Which parts are
empty differs between ranks: a rank whose parts all are would not run a collective's second-order backward, and the
others would wait for it. So everything that a collective sends is concatenated by `concatenated` and `as_row`, and cut
by `pieces`, which keep every part in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from diffcoll.engines.engine import Engine


def concatenated(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return torch.cat(parts, dim), which depends on every part, the empty ones too."""
    return as_row(parts) if parts[0].ndim == 1 else _cat(list(parts), dim)


def as_row(tensors: Sequence[Tensor]) -> Tensor:
    """Return the numbers of all tensors in one row, which depends on every tensor, the empty ones too."""
    return _cat([t.reshape(-1, 1) for t in tensors], 0).view(-1)


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    """Return torch.cat(parts, dim), which autocast to one half precision refuses for parts of the other."""
    kind = parts[0].device.type
    if parts[0].is_meta or not torch.is_autocast_enabled(kind):
        return torch.cat(parts, dim)
    with torch.autocast(kind, enabled=False):
        return torch.cat(parts, dim)


def pieces(row: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Cut a row into views of the shapes (size, 1), so that the row's gradient depends on those of all pieces."""
    return row.view(-1, 1).split_with_sizes(list(sizes))


def in_one_row(x: Tensor, dim: int, sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return the blocks of x as one row, and how many numbers each has; the memory of x where that is such a row."""
    unit = x.numel() // max(x.shape[dim], 1)
    counts = [unit * size for size in sizes]
    if len(sizes) == 1 or prod(x.shape[:dim]) == 1:
        return x.contiguous().view(-1), counts
    row = x.new_empty(x.numel())
    for part, block in zip(row.split_with_sizes(counts), x.split_with_sizes(list(sizes), dim), strict=True):
        part.view(block.shape).copy_(block)
    return row, counts


def cut(x: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """Return contiguous blocks of x; views of it where its memory allows."""
    if len(sizes) == 1:
        return [x.contiguous()]
    if dim > 0 and prod(x.shape[:dim]) == 1:
        x = x.contiguous()  # then so is every block
    return [block.contiguous() for block in x.split_with_sizes(list(sizes), dim)]


def join(
    like: Tensor, shape: Sequence[int], dim: int, sizes: Sequence[int], engine: Engine
) -> tuple[Tensor, list[int], Callable[[], Tensor]]:
    """Return a row for blocks to be received, how many numbers each has, and the function that then joins them.

    Block s has this shape, but `sizes[s]` along dim, and dtype and device of `like`. Where the blocks are contiguous in
    the joined tensor, the row is its memory.
    """
    shape = [*shape[:dim], sum(sizes), *shape[dim + 1 :]]
    y = like.new_empty(shape)
    unit = y.numel() // max(shape[dim], 1)
    counts = [unit * size for size in sizes]
    if len(sizes) == 1 or prod(shape[:dim]) == 1:
        return y.view(-1), counts, lambda: y
    row = engine.scratch.take(y.numel(), like=y)

    def finish() -> Tensor:
        torch.cat(blocks_of(row, counts, shape, dim, sizes), dim, out=y)
        return y

    return row, counts, finish


def blocks_of(row: Tensor, counts: list[int], shape: Sequence[int], dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """Return the blocks of a row that `join` made; in their shapes."""
    return [
        part.view(*shape[:dim], size, *shape[dim + 1 :])
        for part, size in zip(row.split_with_sizes(counts), sizes, strict=True)
    ]
