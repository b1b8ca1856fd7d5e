"""Calls whose x is a tree: one map for all leaves of a dtype and device, flattened and concatenated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor

from diffcoll.core import check_mode
from diffcoll.core.arguments import Call
from diffcoll.core.errors import message, user_line
from diffcoll.core.exchange import sizes_of_ranks
from diffcoll.core.maps import AllGather
from diffcoll.core.pending import Pending
from diffcoll.core.trees import by_dtype, joined, row_of, tree_flatten, tree_paths, unpacked


def by_message(call: Call, one: Callable[[Call], Any]) -> Any:
    """Return the result of an elementwise collective; `one` performs the call of one tensor."""
    leaves, rebuild = _leaves(call)
    _compare(call, leaves)
    if call.engine.in_one_graph:
        return _joint(call, [one(call.of(leaf)) for leaf in leaves], rebuild)
    groups = by_dtype(leaves)
    ys = [one(call.of(row_of([leaves[i] for i in indices]))) for indices in groups]
    shapes = [leaf.shape for leaf in leaves]
    return _joint(call, ys, lambda rows: rebuild(unpacked(zip(groups, rows, strict=True), shapes)))


def by_blocks(call: Call, one: Callable[[Call], Any], block_of: Callable[[Call], tuple[Tensor, int]]) -> Any:
    """Return the result of all_gather; `block_of` returns a leaf as a block, and its dimension to join along."""
    leaves, rebuild = _leaves(call)
    calls = [call.of(leaf) for leaf in leaves]
    blocks = [block_of(each) for each in calls]
    n, replicated = call.engine.size, call.replicated()
    _compare(call, leaves, [d for _, d in blocks])
    if call.engine.in_one_graph:
        return _joint(call, [one(each) for each in calls], rebuild)
    if call.arguments["sizes"] == "auto":  # one message for all leaves
        lengths = sizes_of_ranks(call.name, call.engine, blocks)
    else:
        lengths = [of.sizes_of_all(b, d) or (b.shape[d],) * n for of, (b, d) in zip(calls, blocks, strict=True)]
    shapes = [
        [[*b.shape[:d], length, *b.shape[d + 1 :]] for length in of_ranks]
        for (b, d), of_ranks in zip(blocks, lengths, strict=True)
    ]
    groups, ys = by_dtype([block for block, _ in blocks]), []
    for indices in groups:
        row = row_of([blocks[i][0] for i in indices])
        sizes = tuple(sum(prod(shapes[i][s]) for i in indices) for s in range(n))
        ys.append(call.of(row).perform(AllGather(call.engine, 0, sizes, replicated), row))

    def unpack(rows: list[Tensor]) -> Any:
        found: list[Any] = [None] * len(leaves)
        for indices, row in zip(groups, rows, strict=True):
            of_group = joined(row, [shapes[i] for i in indices], [blocks[i][1] for i in indices])
            for i, y in zip(indices, of_group, strict=True):
                found[i] = y
        return rebuild(found)

    return _joint(call, ys, unpack)


def _joint(call: Call, ys: list[Any], join: Callable[[list[Tensor]], Any]) -> Any:
    if call.async_op:
        return Pending(call.name, lambda: join([y.wait() for y in ys]))
    return join(ys)


def _leaves(call: Call) -> tuple[list[Tensor], Callable[[list[Any]], Any]]:
    """Return the leaves of x in the order of their paths, and the function that rebuilds the tree from new leaves."""
    try:
        leaves, rebuild = tree_flatten(call.x)
    except TypeError as error:
        raise TypeError(f"{call.name}: x: {error}") from None
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            at = f"x{tree_paths(call.x)[i]}"
            raise TypeError(message(call.name, at, type(leaf).__name__, "a tensor", "torch.as_tensor(x) makes one"))
        call.tensor(leaf, "x")
    return leaves, rebuild


def _compare(call: Call, leaves: Sequence[Tensor], dims: Sequence[int] = ()) -> None:
    """In check mode, raise on all ranks unless they have the same leaves, and gather each along the same dimension.

    Later comparisons are of all leaves of a dtype in one row, which does not show this.
    """
    if not check_mode.compares(call.engine):
        return
    shown = []
    for i, (path, leaf) in enumerate(zip(tree_paths(call.x), leaves, strict=True)):
        shape, how = list(leaf.shape), ""
        if dims:
            how = f" {'stacked' if call.arguments['stack'] else 'joined'} along dim {dims[i]}"
            if shape and call.arguments["sizes"] is not None:
                shape[dims[i]] = -1  # may differ between ranks
        shown.append(f"x{path}: {leaf.dtype} {tuple(shape)}{how}")
    text = f"{call.name}({', '.join(shown)})"
    check_mode.compare(call.engine, text, lambda: f"{text} at {user_line()}")
