"""Trees of tensors: the leaves of one dtype and device are sent in one message; results have the same structure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.core.arguments import Call
from diffcoll.core.blocks import as_row, concatenated, pieces
from diffcoll.core.bound import Bound, BoundTree
from diffcoll.core.linear import Linear
from diffcoll.core.reductions import elementwise
from diffcoll.core.torch_private.trees import tree_flatten, tree_paths

#: Reads the arguments of a call.
Bind = Callable[[Call, Any], Bound | BoundTree]


def by_message(call: Call, bind: Bind) -> BoundTree:
    """Bind an elementwise collective: one map for all leaves of a dtype and device, flattened and concatenated."""
    if call.engine.in_one_graph:
        return by_leaf(call, bind)
    leaves, rebuild = checked(call)
    call.agree_on_leaves([tuple(leaf.shape) for leaf in leaves], leaves)
    groups = by_dtype(leaves)

    def unpack(ys: list[Tensor]) -> Any:
        found: list[Tensor] = [*leaves]
        for indices, y in zip(groups, ys, strict=True):
            sizes = [leaves[i].numel() for i in indices]
            parts: tuple[Tensor, ...] = torch.split_with_sizes_copy(y, sizes)  # type: ignore[assignment, func-returns-value]
            for i, piece in zip(indices, parts, strict=True):
                found[i] = piece if leaves[i].ndim == 1 else piece.view(leaves[i].shape)
        return rebuild(found)

    return BoundTree(call, (bind(call.of(row), row) for _, row in rows(leaves)), unpack)


def for_op(call: Call) -> Callable[[Call, Bind], BoundTree]:
    """Return `by_message`, or `by_leaf` if `op` is a function that may use whole tensors."""
    op = call.arguments["op"]
    return by_leaf if callable(op) and not isinstance(op, elementwise) else by_message


def by_leaf(call: Call, bind: Bind) -> BoundTree:
    """Bind a collective to one leaf after the other."""
    leaves, rebuild = checked(call)
    call.agree_on_leaves([tuple(leaf.shape) for leaf in leaves], leaves)
    return BoundTree(call, (bind(call.of(leaf), leaf) for leaf in leaves), rebuild)


class Rows(NamedTuple):
    """A collective of whole blocks, whose sizes may differ, as a collective of rows."""

    #: A leaf as a block, and the dimension along which the ranks' blocks may differ in size.
    block_of: Callable[[Call, Tensor], tuple[Tensor, int]]
    #: The map for rows, 1-d tensors of these sizes on the ranks.
    map_of: Callable[[Call, tuple[int, ...]], Linear]
    #: The ranks whose rows are the result on this rank, in order. Each leaf's blocks are joined.
    received: list[int]


def by_blocks(call: Call, bind: Bind, how: Rows) -> BoundTree:
    """Bind a collective that moves whole blocks: one map for all leaves of a dtype; `sizes` as in `all_gather`."""
    if call.engine.in_one_graph:
        return by_leaf(call, bind)
    leaves, rebuild = checked(call)
    blocks = [how.block_of(call.of(leaf), leaf) for leaf in leaves]
    shapes = _shapes(call, leaves, blocks)
    tensors, ranks = [block for block, _ in blocks], range(call.engine.size)
    groups = by_dtype(tensors)

    def bound() -> Iterator[Bound]:
        for indices, row in rows(tensors):
            of_row = call.of(row)
            sizes = tuple(sum(shapes[i][s].numel() for i in indices) for s in ranks)
            yield Bound(of_row, how.map_of(of_row, sizes), row)

    def unpack(ys: list[Tensor]) -> Any:
        found: list[Tensor] = [*leaves]
        for indices, y in zip(groups, ys, strict=True):
            of_ranks = pieces(y, [shapes[i][s].numel() for s in how.received for i in indices])
            for k, i in enumerate(indices):
                of_leaf = zip(how.received, of_ranks[k :: len(indices)], strict=True)
                found[i] = _joined([part.view(shapes[i][s]) for s, part in of_leaf], y, shapes[i][0], blocks[i][1])
        return rebuild(found)

    return BoundTree(call, bound(), unpack)


def _shapes(call: Call, leaves: list[Tensor], blocks: list[tuple[Tensor, int]]) -> list[list[torch.Size]]:
    """Return for each leaf the shapes of all ranks' blocks; in check mode the ranks compare them."""
    asks = isinstance(sizes := call.arguments["sizes"], str) and sizes == "auto"
    lengths = [() if asks else call.of(leaf).sizes_of_all(*block) for leaf, block in zip(leaves, blocks, strict=True)]
    if call.compares():
        call.agree_on_leaves([_shape(b, d, of_ranks) for (b, d), of_ranks in zip(blocks, lengths, strict=True)], leaves)
    if asks:  # one message for all leaves
        lengths = list(zip(*call.gather_numbers([b.shape[d] for b, d in blocks]), strict=True))
    return [
        [torch.Size([*b.shape[:d], length, *b.shape[d + 1 :]]) for length in of_ranks]
        for (b, d), of_ranks in zip(blocks, lengths, strict=True)
    ]


def _shape(x: Tensor, dim: int, of_ranks: tuple[int, ...]) -> tuple[object, ...]:
    """The shape that check mode compares: along dim one size, or the list of all ranks' sizes, or () if unknown."""
    sizes = of_ranks[0] if len({*of_ranks}) == 1 else of_ranks
    return *x.shape[:dim], sizes, *x.shape[dim + 1 :]


def _joined(parts: list[Tensor], y: Tensor, like: torch.Size, dim: int) -> Tensor:
    """Return the parts of y joined along dim, in new memory; without parts, a tensor of size 0 there."""
    if len(parts) > 1:
        return concatenated(parts, dim)
    return (parts[0] if parts else y.view(*like[:dim], 0, *like[dim + 1 :])).clone()


def checked(call: Call) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """Return the leaves of x in the order of their paths, and the function that rebuilds the tree from new leaves."""
    leaves, rebuild = flattened(call.name, "x", call.x)
    for i, leaf in enumerate(leaves):
        call.tensor(leaf, _Leaf(call.x, i))
    return leaves, rebuild


def flattened(name: str, argument: str, tree: object) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Do what `tree_flatten` does; the error is that of an argument of the operation `name`."""
    try:
        return tree_flatten(tree)
    except TypeError as error:
        raise TypeError(f"{name}: {argument}: {error}") from None


class _Leaf(NamedTuple):
    """A leaf of x in an error, by its path, which is computed only then."""

    tree: Any
    number: int

    @override
    def __str__(self) -> str:
        return f"x{tree_paths(self.tree)[self.number]}"


def by_dtype(leaves: Iterable[Tensor]) -> list[list[int]]:
    """Return the indices of the leaves of each dtype and device, which are sent in one row."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault((leaf.dtype, leaf.device), []).append(i)
    return list(groups.values())


def rows(leaves: list[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """Yield one row of numbers for each dtype and device, with the indices of its leaves."""
    return ((indices, _row([leaves[i] for i in indices])) for indices in by_dtype(leaves))


def unpacked(rows: Iterable[tuple[list[int], Tensor]], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the leaves of these shapes from such rows; they share no memory with one another."""
    found: dict[int, Tensor] = {}
    for indices, row in rows:
        if len(indices) == 1:
            found[indices[0]] = row.view(shapes[indices[0]])
            continue
        parts = pieces(row, [prod(shapes[i]) for i in indices])
        found |= {i: part.view(shapes[i]).clone() for i, part in zip(indices, parts, strict=True)}
    return [found[i] for i in range(len(shapes))]


def _row(leaves: list[Tensor]) -> Tensor:
    if len(leaves) == 1:
        return leaves[0] if leaves[0].ndim == 1 else leaves[0].reshape(-1)  # a reshape is a node of the graph
    return as_row(leaves)
