"""The batch of all ranks, gathered in one message per dtype.

forward   y_r = [x_0 … x_{N-1}] of each leaf, joined along dim 0, with the ranks' numbers of rows
note      notes/collectives/gather_batch.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from diffcoll.collectives.all_gather import all_gather
from diffcoll.composed.leaves import batch_leaves, number_of_rows, rows_of_ranks
from diffcoll.core import expect
from diffcoll.core.arguments import Sizes, Tree
from diffcoll.core.errors import message
from diffcoll.core.exchange import exchanged
from diffcoll.core.groups import resolve
from diffcoll.engines.types import Group

_NAME = "gather_batch"


class GatheredBatch(NamedTuple, Generic[Tree]):
    """All ranks' rows, and where this rank's rows are among them."""

    #: The rows of all ranks, in the order of ranks; the structure of the tree that was passed.
    tree: Tree
    #: Number of rows of each rank.
    sizes: list[int]
    #: Index of this rank's first row.
    offset: int
    #: Number of rows of all ranks.
    total: int
    #: With `pad`: for each leaf a bool tensor of its shape, False where it was padded; else None.
    mask: Any = None


def gather_batch(
    tree: Tree, *, group: Group = None, sizes: Sizes = "auto", pad: float | None = None
) -> GatheredBatch[Tree]:
    """Contrastive losses: gather features with their labels, masks and ids from all ranks.

    The ranks may have different numbers of rows, and none. They exchange these numbers first, in one small message; all
    leaves of one dtype are then sent in one message.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def f(z, labels):
    ...     everyone = dc.gather_batch({"z": z, "labels": labels})
    ...     return everyone.tree["labels"].tolist(), everyone.sizes, everyone.offset, everyone.total
    >>> simulate(f, [torch.ones(2, 8), torch.ones(1, 8)], [torch.tensor([4, 5]), torch.tensor([6])])
    [([4, 5, 6], [2, 1], 0, 3), ([4, 5, 6], [2, 1], 2, 3)]

    Args:
        tree: a tensor, or nested tuples, lists and dicts of tensors of any dtype; dim 0 of each is the batch, of the
            same length for all tensors of a rank. The other dimensions are the same on all ranks, but with `pad`.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        sizes: `"auto"`: the ranks exchange their numbers of rows. A list of them, or None where every rank has as many
            (the last batch is dropped): nothing is exchanged, unless `pad` is given.
        pad: documents of other lengths: every leaf is padded at the end with this number to the largest size of any
            rank in each dimension but 0, and `mask` tells what was there.

    Returns:
        `(tree, sizes, offset, total, mask)`: the gathered tree, the number of rows of each rank, the index of this
        rank's first row among all, the number of all rows, and with `pad` the mask. The gradient of the gathered rows
        is summed over the ranks, as by `all_gather`.

    Raises:
        TypeError, ValueError: an argument is invalid.
        CollectiveMismatchError: on all ranks, where they exchange numbers, if their trees differ in paths, dtypes, or
            dimensions other than 0 (with `pad`: in paths, dtypes or numbers of dimensions).

    Source: notes/collectives/gather_batch.md.
    """
    leaves, rebuild = batch_leaves(_NAME, tree)
    rows = number_of_rows(_NAME, tree, leaves)
    engine = resolve(group, _NAME)
    shapes: list[list[list[int]]] = []
    if pad is not None:
        if not expect.is_number(pad):
            raise TypeError(message(_NAME, "pad", type(pad).__name__, "a number"))
        shapes = _shapes_of_ranks(tree, leaves, group)
        most = [[max(of_dim) for of_dim in zip(*of_leaf, strict=True)] for of_leaf in zip(*shapes, strict=True)]
        leaves = [_padded(leaf, shape[1:], pad) for leaf, shape in zip(leaves, most, strict=True)]
    lengths = _lengths(tree, leaves, rows, sizes, group, [of_rank[0][0] for of_rank in shapes])
    gathered = all_gather(rebuild(leaves), 0, group=group, sizes=lengths)
    mask = None
    if pad is not None:
        mask = rebuild([_mask(leaf, [of_rank[i] for of_rank in shapes]) for i, leaf in enumerate(leaves)])
    return GatheredBatch(gathered, lengths, sum(lengths[: engine.rank]), sum(lengths), mask)


def _lengths(tree: Any, leaves: list[Tensor], rows: int, sizes: Sizes, group: Group, known: list[int]) -> list[int]:
    """Return each rank's number of rows."""
    engine = resolve(group, _NAME)
    if known:
        return known
    if sizes is None:
        return [rows] * engine.size
    if isinstance(sizes, str):
        expect.choice(_NAME, "sizes", sizes, ("auto",))
        return rows_of_ranks(_NAME, tree, leaves, rows, group)[0]
    lengths = [expect.integer(_NAME, "sizes", size, least=0) for size in sizes]
    if len(lengths) != engine.size or lengths[engine.rank] != rows:
        expected = f"{engine.size} sizes, one per rank, {rows} at position {engine.rank}"
        raise ValueError(message(_NAME, "sizes", lengths, expected, 'sizes="auto" asks every rank'))
    return lengths


def _shapes_of_ranks(tree: Any, leaves: list[Tensor], group: Group) -> list[list[list[int]]]:
    """Return for each rank the shapes of its leaves."""
    dims = [leaf.dim() for leaf in leaves]
    whole = [leaf.new_empty([len(leaf), *[0] * (leaf.dim() - 1)]) for leaf in leaves]  # all that must be equal
    rows_of_ranks(_NAME, tree, whole, len(leaves[0]), group)
    found = []
    for numbers in exchanged(resolve(group, _NAME), [size for leaf in leaves for size in leaf.shape]):
        left = list(numbers)
        found.append([[left.pop(0) for _ in range(dim)] for dim in dims])
    return found


def _padded(x: Tensor, shape: Sequence[int], value: float) -> Tensor:
    """Return x, padded at the end of each dimension but 0."""
    if list(x.shape[1:]) == list(shape):
        return x
    y = x.new_full([len(x), *shape], value)
    y[tuple(slice(size) for size in x.shape)] = x
    return y


def _mask(leaf: Tensor, shapes: list[list[int]]) -> Tensor:
    """Return which numbers of the gathered leaf were not padded; `shapes` of the ranks' own."""
    mask = torch.zeros([sum(shape[0] for shape in shapes), *leaf.shape[1:]], dtype=torch.bool, device=leaf.device)
    first = 0
    for rows, *others in shapes:
        mask[first : first + rows][tuple(slice(size) for size in (rows, *others))].fill_(True)
        first += rows
    return mask
