"""The names of tensors in a rank's part of the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from diffcoll.core.torch_private.trees import tree_flatten, tree_paths
from diffcoll.testing.harness.measure import Constant, differentiable


def input_names(fn: Callable[..., Any], part: Any) -> list[str]:
    """Return a name for each differentiable leaf: that of the function's argument, and the path within it."""
    return _names_of(fn, part, differentiable)


def tensor_names(fn: Callable[..., Any], part: Any) -> list[str]:
    """Return a name for each tensor, constants too, in the same way."""
    return _names_of(fn, part, lambda leaf: isinstance(leaf, (Tensor, Constant)))


def named_tensors(fn: Callable[..., Any], part: Any) -> dict[str, Tensor]:
    """Return the tensors by these names."""
    leaves = [leaf.tensor if isinstance(leaf, Constant) else leaf for leaf in tree_flatten(part)[0]]
    return dict(zip(tensor_names(fn, part), [leaf for leaf in leaves if isinstance(leaf, Tensor)], strict=True))


def _names_of(fn: Callable[..., Any], part: Any, which: Callable[[Any], bool]) -> list[str]:
    leaves = tree_flatten(part)[0]
    paths = [path for path, leaf in zip(tree_paths(part), leaves, strict=True) if which(leaf)]
    try:
        called = fn.forward if isinstance(fn, nn.Module) else fn
        arguments = [p.name for p in inspect.signature(called).parameters.values() if p.kind < p.VAR_POSITIONAL]
    except (TypeError, ValueError):
        arguments = []
    if isinstance(part, (tuple, list)):
        known = {f"[{i}]": name for i, name in enumerate(arguments)}
        return [_named(path, known) for path in paths]
    if isinstance(part, dict):
        return [_named(path, {f"[{key!r}]": str(key) for key in part}) for path in paths]
    return [f"{arguments[0] if arguments else 'x'}{path}" for path in paths]


def _named(path: str, known: dict[str, str]) -> str:
    """Replace the first index of a path by the name of an argument."""
    head, bracket, rest = path.partition("]")
    return known.get(head + bracket, f"argument{head + bracket}") + rest
