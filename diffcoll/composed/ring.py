"""The blocks of all ranks one after the other, passed around a ring.

forward   block i on rank r is x_{r − i}, i = 0 … N−1: N − 1 shifts
adjoint   gx_r = gblock_0 + shift back of (gblock_1 + shift back of (…)): N − 1 shifts back
note      notes/collectives/ring.md
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from torch import Tensor

from diffcoll.collectives.shift import shift
from diffcoll.composed.leaves import batch_leaves, lengths_of_ranks
from diffcoll.core import trees
from diffcoll.core.arguments import Call, Tree
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.trees import tree_paths
from diffcoll.engines.engine import Engine
from diffcoll.engines.types import Group

_NAME = "ring"


def ring(tree: Tree, *, group: Group = None) -> Iterator[tuple[int, Tree]]:
    """Contrastive losses, attention, k-means: iterate over all ranks' blocks without gathering them.

    The next block is in flight while the caller works on the current one. The gradient is passed back around the ring
    in the same way. Blocks are freed unless autograd saves them for backward.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(lambda x: [(r, block.tolist()) for r, block in dc.ring(x)], [torch.tensor([5]), torch.tensor([6, 7])])
    [[(0, [5]), (1, [6, 7])], [(1, [6, 7]), (0, [5])]]

    All ranks call it, and then run through equally many blocks. The call itself checks the tree and exchanges the
    ranks' sizes in one small message, in two if a rank's tensors differ in length; the first block is sent at the first
    `next()`. A loop may be left early, on all ranks after the same block: the next collective in the group then waits
    for the block in flight.

    The backward of the loop is a chain of shifts that all ranks run. If a rank's loss does not use a block, enter
    `dc.joint_backward()` on all ranks, or the other ranks wait.

    Args:
        tree: a tensor, or nested tuples, lists and dicts of tensors of any dtype, with the same structure on all ranks.
            Dim 0 of each tensor may differ from rank to rank, and may be 0; the other dimensions are the same.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        An iterator over N pairs (rank, block). First this rank and its own `tree`, the same object; then the blocks of
        rank − 1, rank − 2, …, modulo N, as new tensors in the same structure. With one rank nothing is sent.

    Raises:
        TypeError, ValueError: an argument is invalid. Raised by the call, not by the first `next()`.
        CollectiveMismatchError: on all ranks, if the ranks' trees differ in paths, dtypes, or dimensions other than 0.

    Source: notes/collectives/ring.md.
    """
    engine = resolve(group, _NAME)
    leaves, rebuild = batch_leaves(_NAME, tree)
    for path, leaf in zip(tree_paths(tree), leaves, strict=True):
        Call(_NAME, leaf, engine, False, {}).tensor(leaf, f"tree{path}")
    mine = [len(leaf) for leaf in leaves]
    alone = engine.size == 1
    sizes = [mine] if alone else lengths_of_ranks(_NAME, tree, leaves, mine, group)[0]
    return _blocks(tree, leaves, rebuild, sizes, engine, group)


def _blocks(
    tree: Any, leaves: list[Tensor], rebuild: Any, sizes: list[list[int]], engine: Engine, group: Group
) -> Iterator[tuple[int, Any]]:
    """Yield this rank's block and those received; the next one is in flight while the caller works on one."""
    n, rank = engine.size, engine.rank
    if n == 1:
        yield rank, tree
        return
    units = [prod(leaf.shape[1:]) for leaf in leaves]
    rows = list(trees.rows(leaves))
    pending: list[Any] = []
    try:
        for i in range(n):
            if pending:
                rows = [(indices, p.wait()) for (indices, _), p in zip(rows, pending, strict=True)]
            source = (rank - i) % n
            pending = []
            if i + 1 < n:
                for indices, row in rows:
                    held = [sum(sizes[(r - i) % n][j] * units[j] for j in indices) for r in range(n)]
                    even = held.count(held[0]) == n
                    pending.append(shift(row, 1, group=group, sizes=None if even else held, async_op=True))
            shapes = [[size, *leaf.shape[1:]] for size, leaf in zip(sizes[source], leaves, strict=True)]
            yield source, rebuild(trees.unpacked(rows, shapes)) if i else tree
    finally:
        for p in pending:
            p.abandon()
