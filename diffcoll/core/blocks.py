"""Splits a tensor into contiguous blocks along a dimension, and joins blocks; without a copy if possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from diffcoll.engines.engine import Engine

__all__ = ["cut", "join"]


def cut(x: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """Return contiguous blocks of x; views if the blocks are contiguous in x."""
    if len(sizes) == 1:
        return [x.contiguous()]
    if dim > 0 and prod(x.shape[:dim]) == 1:
        x = x.contiguous()  # every block is contiguous then
    return [block.contiguous() for block in x.split_with_sizes(list(sizes), dim)]


def join(
    like: Tensor, shape: Sequence[int], dim: int, sizes: Sequence[int], engine: Engine
) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """Return contiguous blocks to be filled, and the function that returns their concatenation once they are.

    Block s has this shape, with `sizes[s]` along dim, and dtype and device of `like`. Blocks that are contiguous in the
    result are views of it.
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
