"""Trees of tensors, nested dicts, lists and tuples: the leaves of one dtype and device are sent in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from math import prod
from typing import Any

import torch
from torch import Tensor

from diffcoll.core.blocks import as_row, concatenated, pieces


def is_tree(x: object) -> bool:
    """Whether x is a tree and not a leaf."""
    return isinstance(x, (dict, list, tuple))


def tree_flatten(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of a tree in the order of their paths, and the function that rebuilds it from new leaves.

    The keys of a dict are sorted, since their order of insertion may differ between ranks. None is a tree without
    leaves.

    Raises:
        TypeError: the keys of a dict are not all strings or all numbers, which are the same on all ranks.
    """
    leaves = [leaf for _, leaf in _walk(tree, "")]

    def rebuild(others: Sequence[Any]) -> Any:
        return _rebuilt(tree, iter(others))

    return leaves, rebuild


def tree_paths(tree: Any) -> list[str]:
    """Return the path of each leaf as Python code, e.g. ['a'][0], in the order of `tree_flatten`."""
    return [path for path, _ in _walk(tree, "")]


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Apply fn to every leaf of a tree of one rank alone: dicts may have any keys, in any order."""
    if isinstance(tree, dict):
        return {key: tree_map(fn, each) for key, each in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [tree_map(fn, each) for each in tree]
        return tree._make(items) if hasattr(tree, "_make") else type(tree)(items)
    return fn(tree)


def _keys(tree: dict[Any, Any]) -> list[Any]:
    kinds = {str if isinstance(key, str) else type(key) for key in tree}
    if len(kinds) > 1 or not kinds <= {str, int, float, bool}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(f"got dict keys of type {names}, expected strings or numbers, which are the same on all ranks")
    return sorted(tree)


def _walk(tree: Any, path: str) -> list[tuple[str, Any]]:
    """Return the path and the value of each leaf."""
    if isinstance(tree, dict):
        children = [(f"[{key!r}]", tree[key]) for key in _keys(tree)]
    elif isinstance(tree, (list, tuple)):
        children = [(f"[{i}]", each) for i, each in enumerate(tree)]
    else:
        return [] if tree is None else [(path, tree)]
    return [leaf for entry, child in children for leaf in _walk(child, path + entry)]


def _rebuilt(tree: Any, leaves: Iterator[Any]) -> Any:
    """Return the tree with these leaves."""
    if isinstance(tree, dict):
        sorted_ = {key: _rebuilt(tree[key], leaves) for key in _keys(tree)}
        found = {key: sorted_[key] for key in tree}  # in the user's order
        if type(tree) is dict:
            return found
        of_class = copy(tree)
        of_class.update(found)
        return of_class
    if isinstance(tree, (list, tuple)):
        items = [_rebuilt(each, leaves) for each in tree]
        if isinstance(tree, list):
            return items
        return tree._make(items) if hasattr(tree, "_make") else tuple(items)  # a NamedTuple has fields
    return None if tree is None else next(leaves)


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────


def by_dtype(leaves: Iterable[Tensor]) -> list[list[int]]:
    """Return the indices of the leaves of each dtype and device, which are sent in one row."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault((leaf.dtype, leaf.device), []).append(i)
    return list(groups.values())


def row_of(leaves: list[Tensor]) -> Tensor:
    """Return the numbers of all leaves, of one dtype, in one row."""
    if len(leaves) == 1:
        return leaves[0] if leaves[0].ndim == 1 else leaves[0].reshape(-1)  # a reshape is a node of the graph
    return as_row(leaves)


def unpacked(rows: Iterable[tuple[list[int], Tensor]], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the leaves of these shapes from rows with the indices of their leaves; they share no memory."""
    found: dict[int, Tensor] = {}
    for indices, row in rows:
        if len(indices) == 1:
            found[indices[0]] = row.view(shapes[indices[0]])
            continue
        parts = pieces(row, [prod(shapes[i]) for i in indices])
        found |= {i: part.view(shapes[i]).clone() for i, part in zip(indices, parts, strict=True)}
    return [found[i] for i in range(len(shapes))]


def joined(row: Tensor, shapes: Sequence[Sequence[Sequence[int]]], dims: Sequence[int]) -> list[Tensor]:
    """Return the leaves whose blocks stand in a row: for rank 0 those of all leaves, then for rank 1, and so on.

    Args:
        row: the gathered row.
        shapes: of each leaf the shapes of its ranks' blocks.
        dims: of each leaf the dimension along which its blocks are joined.
    """
    n, count = len(shapes[0]), len(shapes)
    parts = pieces(row, [prod(of_leaf[s]) for s in range(n) for of_leaf in shapes])
    found = []
    for k, (of_leaf, dim) in enumerate(zip(shapes, dims, strict=True)):
        blocks = [part.view(list(shape)) for part, shape in zip(parts[k::count], of_leaf, strict=True)]
        found.append(concatenated(blocks, dim) if n > 1 else blocks[0].clone())
    return found
