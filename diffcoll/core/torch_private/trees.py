"""torch's pytrees, which its transforms and torch.compile use: private in some supported releases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Apply fn to every leaf of a tree."""
    return _pytree.tree_map(fn, tree)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree of one rank alone: dicts may have any keys, in any order."""
    return _pytree.tree_leaves(tree)


def tree_flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of a tree in the order of their paths, and the function that rebuilds it from new leaves.

    The insertion order of dicts may differ between ranks, so keys are sorted by type and repr. Raises TypeError if
    that order is ambiguous or may differ between ranks.
    """
    pairs, spec = _leaves_with_paths(tree)
    places = [tuple(_place(entry) for entry in path) for path, _ in pairs]
    order = sorted(range(len(pairs)), key=places.__getitem__)
    if len(set(places)) < len(places):
        path = next(path for (path, _), place in zip(pairs, places, strict=True) if places.count(place) > 1)
        raise TypeError(f"{_pytree.keystr(path)} is the path of two leaves; use strings as keys")

    def rebuild(others: list[Any]) -> Any:
        placed = [None] * len(order)
        for i, other in zip(order, others, strict=True):
            placed[i] = other
        return _pytree.tree_unflatten(placed, spec)

    return [pairs[i][1] for i in order], rebuild


def tree_paths(tree: Any) -> list[str]:
    """Return the path of each leaf as Python code, e.g. ['a'][0], in the order of `tree_flatten`."""
    pairs, _ = _leaves_with_paths(tree)
    paths = sorted((path for path, _ in pairs), key=lambda path: tuple(_place(entry) for entry in path))
    return [_pytree.keystr(path) for path in paths]


def _leaves_with_paths(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Return (path, leaf) of each leaf, and the structure; children of nodes without keys are numbered."""
    try:
        return _pytree.tree_flatten_with_path(tree)
    except ValueError:  # a node is registered without keys
        leaves, spec = _pytree.tree_flatten(tree)
        return list(zip(_paths(tree), leaves, strict=True)), spec


def _paths(tree: Any) -> Iterator[tuple[Any, ...]]:
    if _pytree.tree_is_leaf(tree):
        yield ()
        return
    node = _pytree.SUPPORTED_NODES[_pytree._get_node_type(tree)]
    if node.flatten_with_keys_fn is not None:
        children = list(node.flatten_with_keys_fn(tree)[0])
    else:
        children = [(_pytree.SequenceKey(i), child) for i, child in enumerate(node.flatten_fn(tree)[0])]
    for key, child in children:
        for path in _paths(child):
            yield key, *path


def _place(entry: Any) -> tuple[Any, ...]:
    """Return the sort key of one entry of a path: an index, or the type and repr of a dict key."""
    if isinstance(entry, _pytree.SequenceKey):
        return 0, entry.idx
    key = entry.key if isinstance(entry, _pytree.MappingKey) else str(entry)
    text = repr(key)
    if isinstance(key, (Tensor, frozenset)) or " at 0x" in text:  # repr differs between processes
        kind = type(key).__name__
        raise TypeError(f"got a dict key of type {kind}, expected strings or numbers, which are the same on all ranks")
    return 1, type(key).__name__, text


def is_tree(x: Any) -> bool:
    """Whether x is a tree and not a leaf."""
    return not isinstance(x, Tensor) and not _pytree.tree_is_leaf(x)
