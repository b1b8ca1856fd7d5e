"""Numbers that the ranks tell each other, such as sizes; a graph that is compiled contains the message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffcoll.core.control import digest
from diffcoll.core.errors import CollectiveMismatchError
from diffcoll.core.maps import AllGather
from diffcoll.core.rules import apply
from diffcoll.core.torch_private.tracing import integers
from diffcoll.engines.engine import Engine


def exchanged(engine: Engine, numbers: Sequence[int]) -> list[list[int]]:
    """Return each rank's integers, equally many on all; sent between CPUs where the group can, but for graphs."""
    if not engine.compiling:
        engine = engine.control()
    mine = torch.tensor(numbers, dtype=torch.int64, device=engine.control_device)
    n, flat = len(numbers), integers(apply(AllGather(engine, 0), mine))
    return [flat[i : i + n] for i in range(0, len(flat), n)]


def sizes_of_ranks(name: str, engine: Engine, blocks: Sequence[tuple[Tensor, int]]) -> list[tuple[int, ...]]:
    """Return the sizes of all ranks' blocks, for each block of this rank along its dimension; in one message.

    Raises:
        CollectiveMismatchError: on all ranks, if their blocks differ in dtype or in another dimension. A compiled
            function cannot compare numbers that it receives, and sends 0.
    """
    mine = 0 if torch.compiler.is_compiling() else digest(_facts(blocks))
    rows = exchanged(engine, [mine, *(x.shape[dim] for x, dim in blocks)])
    if mine:
        for r, (other, *_) in enumerate(rows):
            if other not in (0, rows[0][0]) and rows[0][0]:
                raise CollectiveMismatchError(
                    f"{name}: x: rank {r} differs from rank 0 in dtype or in a dimension other than that of sizes, "
                    f'expected the same on all ranks; sizes="auto" serves one dimension (here −1); rank {engine.rank} '
                    f"has {_facts(blocks)}"
                )
    return [*zip(*(row[1:] for row in rows), strict=True)]


def _facts(blocks: Sequence[tuple[Tensor, int]]) -> str:
    """Return what must be equal on all ranks: of each block its dtype, and its shape but for the dimension of sizes."""
    return "; ".join(f"{x.dtype} {[*x.shape[:dim], -1, *x.shape[dim + 1 :]]}" for x, dim in blocks)
