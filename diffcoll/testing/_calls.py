"""What `simulate` and `spawn` share: they are called like `map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["per_rank_arguments"]


def per_rank_arguments(name: str, per_rank: tuple[Sequence[Any], ...]) -> list[tuple[Any, ...]]:
    """Return the arguments of each rank's call."""
    if not per_rank:
        raise TypeError(f"{name}: got no per-rank arguments, expected at least one sequence; pass e.g. range(3)")
    columns = [list(column) for column in per_rank]
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise ValueError(f"{name}: got sequences of lengths {lengths}, expected N elements in each, one for each rank")
    return list(zip(*columns, strict=True))
