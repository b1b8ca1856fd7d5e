"""Blocks of a tensor along a dimension: cut for sending, joined on receipt, without a copy where that can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from diffcoll.engines.engine import Engine

__all__ = ["cut", "join"]


def cut(x: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """Return contiguous blocks of x; views of it where its memory allows."""
    if len(sizes) == 1:
        return [x.contiguous()]
    if dim > 0 and prod(x.shape[:dim]) == 1:
        x = x.contiguous()  # then so is every block
    return [block.contiguous() for block in x.split_with_sizes(list(sizes), dim)]


def join(
    like: Tensor, shape: Sequence[int], dim: int, sizes: Sequence[int], engine: Engine
) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """Return contiguous blocks to be filled, and the function that then returns them as one tensor.

    Block s has this shape, but `sizes[s]` along dim, and dtype and device of `like`. Where the blocks are
    contiguous in the joined tensor they are parts of it already.
    """
    shape = [*shape[:dim], sum(sizes), *shape[dim + 1 :]]
    y = like.new_empty(shape)
    if prod(shape[:dim]) == 1 or len(sizes) == 1:
        return list(y.split_with_sizes(list(sizes), dim)), lambda: y
    memory = engine.scratch.take(y.numel(), like=y)
    counts = [y.numel() // max(shape[dim], 1) * size for size in sizes]
    blocks = [
        part.view(*shape[:dim], size, *shape[dim + 1 :])
        for part, size in zip(memory.split_with_sizes(counts), sizes, strict=True)
    ]

    def finish() -> Tensor:
        torch.cat(blocks, dim, out=y)
        engine.scratch.give(memory)
        return y

    return blocks, finish
