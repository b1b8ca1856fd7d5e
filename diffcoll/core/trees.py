"""Trees of tensors: the leaves of one dtype and device are sent in one message; results have the same structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diffcoll.core._torch import tree_flatten, tree_paths
from diffcoll.core.call import Call
from diffcoll.core.pending import Pending

__all__ = ["by_leaf", "by_message", "checked", "rows"]


def by_message(call: Call, understand: Callable[[Call, Tensor], Any]) -> Any:
    """Apply an elementwise collective: one call for all leaves of a dtype and device, flattened and concatenated."""
    if call.engine.joint:
        return by_leaf(call, understand)
    leaves, rebuild = checked(call)
    call.agree_on_leaves([tuple(leaf.shape) for leaf in leaves], leaves)
    started = [(indices, understand(call.of(row), row)) for indices, row in rows(leaves)]

    def unpack() -> Any:
        found: list[Tensor] = [*leaves]
        for indices, y in started:
            y = y.wait() if call.async_op else y
            sizes = [leaves[i].numel() for i in indices]
            pieces: tuple[Tensor, ...] = torch.split_with_sizes_copy(y, sizes)  # type: ignore[assignment, func-returns-value]
            for i, piece in zip(indices, pieces, strict=True):
                found[i] = piece if leaves[i].ndim == 1 else piece.view(leaves[i].shape)
        return rebuild(found)

    return Pending(call.name, unpack) if call.async_op else unpack()


def by_leaf(call: Call, understand: Callable[[Call, Tensor], Any]) -> Any:
    """Apply a collective to one leaf after the other."""
    leaves, rebuild = checked(call)
    call.agree_on_leaves([tuple(leaf.shape) for leaf in leaves], leaves)
    found = [understand(call.of(leaf), leaf) for leaf in leaves]
    return Pending(call.name, lambda: rebuild([p.wait() for p in found])) if call.async_op else rebuild(found)


def checked(call: Call) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """Return the leaves of x in the order of their paths, and the function that rebuilds the tree from new leaves."""
    try:
        leaves, rebuild = tree_flatten(call.x)
    except TypeError as error:
        raise TypeError(f"{call.name}: x: {error}") from None
    for i, leaf in enumerate(leaves):
        try:
            call.tensor(leaf)
        except (TypeError, ValueError) as error:
            raise type(error)(str(error).replace(": x:", f": x{tree_paths(call.x)[i]}:", 1)) from None
    return leaves, rebuild


def rows(leaves: list[Tensor]) -> list[tuple[list[int], Tensor]]:
    """Return one row of numbers for each dtype and device, with the indices of its leaves."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault((leaf.dtype, leaf.device), []).append(i)
    return [(indices, torch.cat([_row(leaves[i]) for i in indices])) for indices in groups.values()]


def _row(leaf: Tensor) -> Tensor:
    return leaf if leaf.ndim == 1 else leaf.reshape(-1)  # a needless reshape adds a node to the graph
