"""The leaves of the trees that composed functions take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diffcoll.core.control import digest
from diffcoll.core.errors import CollectiveMismatchError, message
from diffcoll.core.exchange import exchanged
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.tracing import assume
from diffcoll.core.trees import tree_flatten, tree_paths
from diffcoll.engines.types import Group


def batch_leaves(name: str, tree: object, argument: str = "tree") -> tuple[list[Tensor], Callable[[list[Any]], Any]]:
    """Return the leaves of a tree in the order of their paths, and the function that rebuilds it from new leaves.

    Raises:
        TypeError, ValueError: a leaf is not a tensor with a dim 0, or there is none; `name` is the function's.
    """
    try:
        leaves, rebuild = tree_flatten(tree)
    except TypeError as error:
        raise TypeError(f"{name}: {argument}: {error}") from None
    for path, leaf in zip(tree_paths(tree), leaves, strict=True):
        at = f"{argument}{path}"
        if not isinstance(leaf, Tensor):
            raise TypeError(message(name, at, type(leaf).__name__, "a tensor", "torch.as_tensor(x) makes one"))
        if leaf.ndim == 0:
            remedy = "dim 0 is the batch: pass x.expand(len(features))"
            raise ValueError(message(name, at, "a 0-d tensor", "at least one dimension", remedy))
    if not leaves:
        raise ValueError(message(name, argument, "a tree without tensors", "at least one tensor"))
    return leaves, rebuild


def number_of_rows(name: str, tree: object, leaves: list[Tensor], argument: str = "tree") -> int:
    """Return the number of rows of all leaves of a tree; raise if they differ."""
    for i, leaf in enumerate(leaves):
        if len(leaf) != len(leaves[0]):
            paths = tree_paths(tree)
            expected = f"{len(leaves[0])} rows, as {argument}{paths[0]} has"
            at, remedy = f"{argument}{paths[i]}", "pass one row for each sample"
            raise ValueError(message(name, at, f"{len(leaf)} rows", expected, remedy))
    return len(leaves[0])


def rows_of_ranks(
    name: str, tree: object, leaves: list[Tensor], rows: int, group: Group, bits: int = 0, what: str = ""
) -> tuple[list[int], list[int]]:
    """Return each rank's number of rows, this rank's being `rows`, and `bits`, as `lengths_of_ranks` does.

    One rank sends nothing. An error says in words, `what`, in what the ranks differ.
    """
    engine = resolve(group, name)
    if engine.size == 1:
        return [rows], [bits]
    try:
        lengths, all_bits = lengths_of_ranks(name, tree, leaves, [rows], group, bits)
    except CollectiveMismatchError as error:
        if not what:
            raise
        raise CollectiveMismatchError(f"{name}: the ranks differ in {what}; {error}") from None
    sizes = [length for (length,) in lengths]
    if torch.compiler.is_compiling():  # which does not know it of numbers that ranks have sent
        for size in sizes:
            assume(size >= 0)
        assume(sizes[engine.rank] == rows)
    return sizes, all_bits


def lengths_of_ranks(
    name: str, tree: object, leaves: list[Tensor], mine: list[int], group: Group, bits: int = 0
) -> tuple[list[list[int]], list[int]]:
    """Return each rank's list of lengths, this rank's being `mine`, and each rank's three `bits`, which may differ.

    A rank has one length for each leaf, or one for all. One small message of two numbers, so that ranks with different
    trees can compare them. A second one if the lengths of a rank differ from one another.

    Raises:
        CollectiveMismatchError: on all ranks, if their trees differ in paths, dtypes or dimensions other than 0. A
            compiled function cannot compare numbers that it receives, and sends 0.
    """
    compiling = torch.compiler.is_compiling()
    engine = resolve(group, name)
    facts = "" if compiling else _facts(tree, leaves)
    even = all(length == mine[0] for length in mine)
    summary = [bits if compiling else digest(facts) << 3 | bits, mine[0] if even else -1]
    rows = exchanged(engine, summary)
    differing = [] if compiling else [r for r, row in enumerate(rows) if 0 != row[0] >> 3 != rows[0][0] >> 3 != 0]
    if differing:
        raise CollectiveMismatchError(
            f"{name}: tree: rank {differing[0]} differs from rank 0 in paths, dtypes or dimensions other than 0, "
            f"expected the same on all ranks; rank {engine.rank} has {facts}"
        )
    all_bits = [row[0] % 8 for row in rows]
    if len(mine) == 1 or all(length >= 0 for _, length in rows):
        return [[length] * len(mine) for _, length in rows], all_bits
    return exchanged(engine, mine), all_bits


def _facts(tree: object, leaves: list[Tensor]) -> str:
    """Return what is the same on all ranks."""
    return "; ".join(
        f"tree{path}: {leaf.dtype} (*, {', '.join(map(str, leaf.shape[1:]))})"
        for path, leaf in zip(tree_paths(tree), leaves, strict=True)
    )
