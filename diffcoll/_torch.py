"""Private torch API that the library needs outside of its engines, each with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

__all__ = ["is_transformed", "tree_map"]


def is_transformed(x: Tensor) -> bool:
    """Whether a torch.func transform has wrapped x.

    There is no public question for it; a joint graph must refuse such tensors, for the transform's levels
    belong to one thread.
    """
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Apply fn to every leaf of nested tuples, lists and dicts.

    torch's own notion of such trees, the one its transforms and `torch.compile` know, has no public module in
    every release that we run on.
    """
    return _pytree.tree_map(fn, tree)
