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
from diffcoll.composed.leaves import batch_leaves
from diffcoll.core import expect
from diffcoll.core.arguments import Sizes, Tree
from diffcoll.core.errors import message
from diffcoll.core.exchange import exchanged, exchanged_alike, lengths_of
from diffcoll.core.groups import resolve
from diffcoll.engines.engine import Engine
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
            dimensions other than 0 (with `pad`: in paths, dtypes or numbers of dimensions), or if tensors of a dtype
            need a gradient on some ranks alone: on an empty rank, too, call `requires_grad_()`, or use
            `joint_backward`.

    Source: notes/collectives/gather_batch.md.
    """
    paths, rebuild = batch_leaves(_NAME, tree)
    rows, leaves = _number_of_rows(paths), [*paths.values()]
    engine, mask = resolve(group, _NAME), None
    if pad is None:
        lengths = _lengths(paths, rows, sizes, engine)
    else:
        if not expect.is_number(pad):
            raise TypeError(message(_NAME, "pad", type(pad).__name__, "a number"))
        shapes = _shapes_of_ranks(paths, engine)
        lengths = [shape[0] for shape in shapes[0]]
        most = [[max(of_dim) for of_dim in zip(*of_leaf, strict=True)] for of_leaf in shapes]
        mask = rebuild([_mask(*of_leaf) for of_leaf in zip(leaves, shapes, most, strict=True)])
        leaves = [_padded(leaf, shape, pad) for leaf, shape in zip(leaves, most, strict=True)]
    gathered = all_gather(rebuild(leaves), 0, group=group, sizes=lengths)
    return GatheredBatch(gathered, lengths, sum(lengths[: engine.rank]), sum(lengths), mask)


def _number_of_rows(leaves: dict[str, Tensor]) -> int:
    """Return the number of rows of all leaves; raise if they differ."""
    rows = len(next(iter(leaves.values())))
    for path, leaf in leaves.items():
        if len(leaf) != rows:
            expected = f"{rows} rows, as the first tensor has, one for each sample"
            raise ValueError(message(_NAME, path, f"{len(leaf)} rows", expected))
    return rows


def _lengths(leaves: dict[str, Tensor], rows: int, sizes: Sizes, engine: Engine) -> list[int]:
    """Return each rank's number of rows."""
    if sizes is None:
        return [rows] * engine.size
    if isinstance(sizes, str):
        expect.choice(_NAME, "sizes", sizes, ("auto",))
        blocks = {path: (leaf, 0) for path, leaf in leaves.items()}
        return lengths_of(engine, exchanged_alike(f"{_NAME}: tree", engine, blocks, [rows]), rows)
    return list(expect.sizes(_NAME, "sizes", sizes, engine.size, (engine.rank, rows)))


def _shapes_of_ranks(leaves: dict[str, Tensor], engine: Engine) -> list[list[list[int]]]:
    """Return for each leaf the shapes that the ranks have."""
    exchanged_alike(f"{_NAME}: tree", engine, {path: (leaf, None) for path, leaf in leaves.items()}, [])
    rows = exchanged(engine, [size for leaf in leaves.values() for size in leaf.shape])
    found, first = [], 0
    for leaf in leaves.values():
        found.append([row[first : first + leaf.dim()] for row in rows])
        first += leaf.dim()
    return found


def _padded(x: Tensor, shape: Sequence[int], value: float) -> Tensor:
    """Return x, padded at the end of each dimension but 0 to this shape."""
    ends = [end for d in range(x.dim() - 1, 0, -1) for end in (0, shape[d] - x.shape[d])]
    return torch.nn.functional.pad(x, ends, value=value) if any(ends) else x


def _mask(leaf: Tensor, shapes: list[list[int]], most: list[int]) -> Tensor:
    """Return which numbers of the gathered leaf were not padded; `shapes` are the ranks' own."""
    ones = [torch.ones(shape, dtype=torch.bool, device=leaf.device) for shape in shapes]
    return torch.cat([_padded(x, most, False) for x in ones])
