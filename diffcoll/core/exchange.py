"""Numbers that the ranks tell each other, such as sizes; a graph that is compiled contains the message."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from diffcoll.core.control import digest
from diffcoll.core.errors import CollectiveMismatchError
from diffcoll.core.maps import AllGather
from diffcoll.core.rules import apply
from diffcoll.engines.engine import Engine
from diffcoll.engines.turn import Turn


def exchanged(engine: Engine, numbers: Sequence[int]) -> list[list[int]]:
    """Return each rank's integers, equally many on all; sent between CPUs where the group can, but for graphs."""
    if not engine.compiling:
        with Turn(engine, AllGather.name):
            engine = engine.control()
    mine = torch.tensor(numbers, dtype=torch.int64, device=engine.control_device)
    n, flat = len(numbers), apply(AllGather(engine, 0), mine).tolist()
    return [flat[i : i + n] for i in range(0, len(flat), n)]


def exchanged_alike(what: str, engine: Engine, facts: Callable[[], str], numbers: Sequence[int]) -> list[list[int]]:
    """Return each rank's integers; in the same message the ranks compare facts, which are a property of `what`.

    Raises:
        CollectiveMismatchError: on all ranks, if the facts differ. A compiled function cannot compare numbers that it
            receives, and sends 0.
    """
    mine = 0 if torch.compiler.is_compiling() else digest(facts())
    rows = exchanged(engine, [mine, *numbers])
    if mine:
        for r, (other, *_) in enumerate(rows):
            if 0 != other != rows[0][0] != 0:
                raise CollectiveMismatchError(
                    f"{what}: rank {r} differs from rank 0, expected the same paths, dtypes and dimensions other than "
                    f"that of sizes (here −1) on all ranks; rank {engine.rank} has {facts()}"
                )
    return [row[1:] for row in rows]


def sizes_of_ranks(name: str, engine: Engine, blocks: Sequence[tuple[Tensor, int]]) -> list[tuple[int, ...]]:
    """Return the sizes of all ranks' blocks, for each block of this rank along its dimension; in one message."""

    def facts() -> str:
        return "; ".join(f"{x.dtype} {[*x.shape[:dim], -1, *x.shape[dim + 1 :]]}" for x, dim in blocks)

    rows = exchanged_alike(f"{name}: x", engine, facts, [x.shape[dim] for x, dim in blocks])
    return [*zip(*rows, strict=True)]
