"""The leaves of the trees that composed functions take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from diffcoll.core.errors import message
from diffcoll.core.exchange import exchanged, exchanged_alike
from diffcoll.core.trees import by_dtype, tensors_of, tree_paths
from diffcoll.engines.engine import Engine


def batch_leaves(name: str, tree: object) -> tuple[list[Tensor], Callable[[list[Any]], Any]]:
    """Return the leaves of a tree in the order of their paths, and the function that rebuilds it from new leaves.

    Raises:
        TypeError, ValueError: a leaf is not a tensor with a dim 0, or there is none; `name` is the function's.
    """
    leaves, rebuild = tensors_of(name, "tree", tree)
    for path, leaf in zip(tree_paths(tree), leaves, strict=True):
        if leaf.ndim == 0:
            remedy = "dim 0 is the batch: pass x.expand(len(features))"
            raise ValueError(message(name, f"tree{path}", "a 0-d tensor", "at least one dimension", remedy))
    if not leaves:
        raise ValueError(message(name, "tree", "a tree without tensors", "at least one tensor"))
    return leaves, rebuild


def lengths_of_ranks(
    name: str, tree: object, leaves: list[Tensor], mine: list[int], engine: Engine, any_shape: bool = False
) -> list[list[int]]:
    """Return each rank's list of lengths, this rank's being `mine`; a rank has one for each leaf, or one for all.

    One rank sends nothing. Several send one small message of three numbers, so that ranks with different trees can
    compare them, and a second one if the lengths of a rank differ from one another.

    Raises:
        CollectiveMismatchError: on all ranks, if their trees differ in paths, dtypes or, unless any shape will do,
            dimensions other than 0; or if leaves of a dtype need a gradient on some ranks alone.
    """
    if engine.size == 1:
        return [mine]

    def facts() -> str:
        shown = zip(tree_paths(tree), leaves, strict=True)
        shapes = ((path, leaf, [0] * leaf.ndim if any_shape else [-1, *leaf.shape[1:]]) for path, leaf in shown)
        return "; ".join(f"tree{path}: {leaf.dtype} {shape}" for path, leaf, shape in shapes)

    even = all(length == mine[0] for length in mine)
    sent = ([leaves[i] for i in indices] for indices in by_dtype(leaves))
    rows = exchanged_alike(f"{name}: tree", engine, facts, [mine[0] if even else -1], sent)
    if len(mine) == 1 or all(length >= 0 for (length,) in rows):
        return [row * len(mine) for row in rows]
    return exchanged(engine, mine)
