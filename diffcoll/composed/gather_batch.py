"""The batch of all ranks, gathered in one message per dtype.

forward   y_r = [x_0 … x_{N-1}] of each leaf, joined along dim 0, with the ranks' numbers of rows
note      notes/collectives/gather_batch.md
"""

from __future__ import annotations

from typing import Generic, NamedTuple

from diffcoll.collectives.all_gather import all_gather
from diffcoll.composed.leaves import batch_leaves, number_of_rows, rows_of_ranks
from diffcoll.core.arguments import Tree
from diffcoll.core.groups import get_rank
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


def gather_batch(tree: Tree, *, group: Group = None) -> GatheredBatch[Tree]:
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
            same length for all tensors of a rank. The other dimensions are the same on all ranks.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        `(tree, sizes, offset, total)`: the gathered tree, the number of rows of each rank, the index of this rank's
        first row among all, and the number of all rows. The gradient of the gathered rows is summed over the ranks, as
        by `all_gather`.

    Raises:
        TypeError, ValueError: an argument is invalid.
        CollectiveMismatchError: on all ranks, if the ranks' trees differ in paths, dtypes, or dimensions other than 0.

    Source: notes/collectives/gather_batch.md.
    """
    leaves, _ = batch_leaves(_NAME, tree)
    rows = number_of_rows(_NAME, tree, leaves)
    sizes, _ = rows_of_ranks(_NAME, tree, leaves, rows, group)
    gathered = all_gather(tree, 0, group=group, sizes=sizes)
    return GatheredBatch(gathered, sizes, sum(sizes[: get_rank(group)]), sum(sizes))
