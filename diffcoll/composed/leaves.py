"""The leaves of the trees that composed functions take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from diffcoll.core.errors import message
from diffcoll.core.trees import tensors_of


def batch_leaves(name: str, tree: object) -> tuple[dict[str, Tensor], Callable[[list[Any]], Any]]:
    """Return the leaves of a tree by their paths, and the function that rebuilds it from new leaves.

    Raises:
        TypeError, ValueError: a leaf is not a tensor with a dim 0, or there is none; `name` is the function's.
    """
    leaves, rebuild = tensors_of(name, "tree", tree)
    for path, leaf in leaves.items():
        if leaf.ndim == 0:
            remedy = "dim 0 is the batch: pass x.expand(len(features))"
            raise ValueError(message(name, path, "a 0-d tensor", "at least one dimension", remedy))
    if not leaves:
        raise ValueError(message(name, "tree", "a tree without tensors", "at least one tensor"))
    return leaves, rebuild
