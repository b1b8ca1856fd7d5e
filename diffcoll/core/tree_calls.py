"""Calls whose x is a tree: one map for all leaves of a dtype and device, flattened and concatenated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from torch import Tensor

from diffcoll.core import check_mode
from diffcoll.core.arguments import Call
from diffcoll.core.blocks import concatenated, pieces
from diffcoll.core.exchange import exchanged_alike
from diffcoll.core.maps import AllGather
from diffcoll.core.pending import Pending
from diffcoll.core.trees import by_dtype, flattened, tensors_of, unpacked


def by_message(call: Call, one: Callable[[Call], Any]) -> Any:
    """Return the result of an elementwise collective; `one` performs the call of one tensor."""
    paths, rebuild = tensors_of(call.name, "x", call.x)
    leaves = [call.tensor(leaf) for leaf in paths.values()]
    _compare(call, {path: (leaf, None) for path, leaf in paths.items()})
    if call.engine.in_one_graph:
        return _together(call, [one(call.of(leaf)) for leaf in leaves], rebuild)
    groups, shapes = by_dtype(leaves), [leaf.shape for leaf in leaves]
    ys = [one(call.of(flattened([leaves[i] for i in indices]))) for indices in groups]
    return _together(call, ys, lambda rows: rebuild(unpacked(zip(groups, rows, strict=True), shapes)))


def by_blocks(call: Call, one: Callable[[Call], Any], block_of: Callable[[Call], tuple[Tensor, int]]) -> Any:
    """Return the result of all_gather; `block_of` returns a leaf as a block, and its dimension to join along."""
    leaves, rebuild = tensors_of(call.name, "x", call.x)
    calls = [call.of(leaf) for leaf in leaves.values()]
    blocks = [block_of(each) for each in calls]
    paths = dict(zip(leaves, blocks, strict=True))
    n, replicated = call.engine.size, call.replicated()
    _compare(call, paths)
    if call.engine.in_one_graph:
        return _together(call, [one(each) for each in calls], rebuild)
    if call.arguments["sizes"] == "auto":  # one message for all leaves
        mine = [b.shape[d] for b, d in blocks]
        lengths = [*zip(*exchanged_alike(f"{call.name}: x", call.engine, paths, mine, replicated), strict=True)]
    else:
        lengths = [of.sizes_of_all(b, d) or (b.shape[d],) * n for of, (b, d) in zip(calls, blocks, strict=True)]
    #: Of each leaf the shapes of the ranks' blocks.
    shapes = [
        [[*b.shape[:d], length, *b.shape[d + 1 :]] for length in of_ranks]
        for (b, d), of_ranks in zip(blocks, lengths, strict=True)
    ]
    groups, ys = by_dtype([block for block, _ in blocks]), []
    for indices in groups:
        if len(indices) == 1:
            x, d = blocks[indices[0]]
            ys.append(call.perform(AllGather(call.engine, d, tuple(lengths[indices[0]]), replicated), x))
            continue
        row = flattened([blocks[i][0] for i in indices])
        sizes = tuple(sum(prod(shapes[i][s]) for i in indices) for s in range(n))
        ys.append(call.perform(AllGather(call.engine, 0, sizes, replicated), row))

    def unpack(rows: list[Tensor]) -> Any:
        found: dict[int, Tensor] = {}
        for indices, row in zip(groups, rows, strict=True):  # for rank 0 the blocks of all leaves, then for rank 1
            if len(indices) == 1:
                found[indices[0]] = row
                continue
            parts = pieces(row, [prod(shapes[i][s]) for s in range(n) for i in indices])
            for k, i in enumerate(indices):
                of_ranks = zip(parts[k :: len(indices)], shapes[i], strict=True)
                views = [part.view(shape) for part, shape in of_ranks]
                found[i] = concatenated(views, blocks[i][1])
        return rebuild([found[i] for i in range(len(leaves))])

    return _together(call, ys, unpack)


def _together(call: Call, ys: list[Any], join: Callable[[list[Tensor]], Any]) -> Any:
    if call.async_op:
        for y in ys:
            y._drop()  # a tree that nobody waits for is one warning
        return Pending(call.name, lambda: join([y.wait() for y in ys]), call.origin)
    return join(ys)


def _compare(call: Call, blocks: Mapping[str, tuple[Tensor, int | None]]) -> None:
    """In check mode, raise on all ranks unless they have the same leaves, joined along the same dimension.

    Later comparisons are of all leaves of a dtype in one row, which does not show this.
    """
    if not check_mode.compares(call.engine):
        return
    shown = []
    for path, (block, dim) in blocks.items():
        shape = list(block.shape)
        if dim is not None and call.arguments["sizes"] is not None:
            shape[dim] = -1  # may differ between ranks
        shown.append(f"{path}: {block.dtype} {tuple(shape)}" + ("" if dim is None else f" along dim {dim}"))
    text = f"{call.name}({', '.join(shown)})"
    check_mode.compare_calls(call.engine, text)
