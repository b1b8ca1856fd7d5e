"""Trees of tensors, nested mappings, lists and tuples: the leaves of one dtype and device are sent in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from copy import copy
from math import prod
from typing import Any

import torch
from torch import Tensor

from diffcoll.core.blocks import as_row, pieces
from diffcoll.core.errors import message


def is_tree(x: object) -> bool:
    """Whether x is a tree and not a leaf: a mapping of any class, a list or a tuple."""
    return isinstance(x, (Mapping, list, tuple))


def tree_flatten(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of a tree in the order of their paths, and the function that rebuilds it from new leaves.

    The keys of a dict are sorted, since their order of insertion may differ between ranks. None is a tree without
    leaves.

    Raises:
        TypeError: the keys of a dict are not all strings or all numbers, which are the same on all ranks.
    """
    walked = _walk(tree, "")

    def rebuild(others: Sequence[Any]) -> Any:
        at = {path: other for (path, _), other in zip(walked, others, strict=True)}
        return _mapped(lambda path, _: at[path], tree, "")

    return [leaf for _, leaf in walked], rebuild


def tensors_of(name: str, argument: str, tree: Any) -> tuple[dict[str, Tensor], Callable[[Sequence[Any]], Any]]:
    """Return what `tree_flatten` does, with the leaves by their paths in an operation's argument.

    Raises:
        TypeError: a leaf is not a tensor, or the keys of a dict are not the same on all ranks.
    """
    try:
        leaves, rebuild = tree_flatten(tree)
    except TypeError as error:
        raise TypeError(f"{name}: {argument}: {error}") from None
    found = dict(zip([argument + path for path in tree_paths(tree)], leaves, strict=True))
    for path, leaf in found.items():
        if not isinstance(leaf, Tensor):
            raise TypeError(message(name, path, type(leaf).__name__, "a tensor", "torch.as_tensor(x) makes one"))
    return found, rebuild


def tree_paths(tree: Any) -> list[str]:
    """Return the path of each leaf as Python code, e.g. ['a'][0], in the order of `tree_flatten`."""
    return [path for path, _ in _walk(tree, "")]


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Apply fn to every leaf of a tree of one rank alone: dicts may have any keys, in any order."""
    return _mapped(lambda _, leaf: fn(leaf), tree, "")


def _keys(tree: Mapping[Any, Any]) -> list[Any]:
    kinds = {str if isinstance(key, str) else type(key) for key in tree}
    if len(kinds) > 1 or not kinds <= {str, int, float, bool}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(f"got dict keys of type {names}, expected strings or numbers, which are the same on all ranks")
    return sorted(tree)


def _walk(tree: Any, path: str) -> list[tuple[str, Any]]:
    """Return the path and the value of each leaf."""
    if isinstance(tree, Mapping):
        children = [(f"[{key!r}]", tree[key]) for key in _keys(tree)]
    elif isinstance(tree, (list, tuple)):
        children = [(f"[{i}]", each) for i, each in enumerate(tree)]
    else:
        return [] if tree is None else [(path, tree)]
    return [leaf for entry, child in children for leaf in _walk(child, path + entry)]


def _mapped(fn: Callable[[str, Any], Any], tree: Any, path: str) -> Any:
    """Return the tree with fn(path, leaf) in the place of each leaf."""
    if isinstance(tree, Mapping):
        found = {key: _mapped(fn, each, f"{path}[{key!r}]") for key, each in tree.items()}
        if type(tree) is dict or not isinstance(tree, MutableMapping):
            return found
        of_class: Any = copy(tree)
        for key, each in found.items():  # not update(), which classes such as Transformers' ModelOutput refuse
            of_class[key] = each
        return of_class
    if isinstance(tree, (list, tuple)):
        items = [_mapped(fn, each, f"{path}[{i}]") for i, each in enumerate(tree)]
        if isinstance(tree, list):
            return items
        return tree._make(items) if hasattr(tree, "_make") else tuple(items)  # a NamedTuple has fields
    return None if tree is None else fn(path, tree)


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────


def by_dtype(leaves: Iterable[Tensor]) -> list[list[int]]:
    """Return the indices of the leaves of each dtype and device, which are sent in one row."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault((leaf.dtype, leaf.device), []).append(i)
    return list(groups.values())


def flattened(leaves: list[Tensor]) -> Tensor:
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
