"""The blocks of all ranks one after the other, passed around a ring.

forward   block i on rank r is x_{r − i}, i = 0 … N−1: N − 1 messages to the next rank
adjoint   gx_r = gblock_0 + passed back (gblock_1 + passed back (…)): N − 1 messages back
note      notes/collectives/ring.md
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from torch import Tensor

from diffcoll.collectives.all_to_all import all_to_all
from diffcoll.composed.leaves import batch_leaves
from diffcoll.core.arguments import Tree
from diffcoll.core.exchange import exchanged, exchanged_alike
from diffcoll.core.groups import resolve
from diffcoll.core.pending import Pending
from diffcoll.core.trees import by_dtype, flattened, unpacked
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

    The backward of the loop is a chain of messages that all ranks run. If a rank's loss does not use a block, enter
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
    blocks = {path: (leaf, 0) for path, leaf in leaves.items()}
    lengths = [len(leaf) for leaf in leaves.values()]
    # One number, since ranks with other trees have unequally many lengths.
    first = exchanged_alike(f"{_NAME}: tree", engine, blocks, [lengths[0] if len({*lengths}) == 1 else -1])
    is_even = all(length >= 0 for (length,) in first)
    sizes = [row * len(lengths) for row in first] if is_even else exchanged(engine, lengths)
    return _blocks(tree, [*leaves.values()], rebuild, sizes, engine, group)


def passed_on(row: Tensor, held: Sequence[int], engine: Engine, group: Group) -> Pending[Tensor]:
    """Start to send a row to the next rank, and to receive the previous one's; `held`: how long each rank's is."""
    n, rank = engine.size, engine.rank
    to, source = (rank + 1) % n, (rank - 1) % n
    sent = [held[rank] if s == to else 0 for s in range(n)]
    received = [held[source] if s == source else 0 for s in range(n)]
    return all_to_all(row, group=group, split_sizes=sent, concat_sizes=received, async_op=True)


def _blocks(
    tree: Any, leaves: list[Tensor], rebuild: Any, sizes: list[list[int]], engine: Engine, group: Group
) -> Iterator[tuple[int, Any]]:
    """Yield this rank's block and those received; the next one is in flight while the caller works on one."""
    n, rank = engine.size, engine.rank
    units = [prod(leaf.shape[1:]) for leaf in leaves]
    groups = by_dtype(leaves)
    rows = [flattened([leaves[i] for i in indices]) for indices in groups]
    pending: list[Pending[Tensor]] = []
    try:
        for i in range(n):
            if pending:
                rows = [p.wait() for p in pending]
            source, pending = (rank - i) % n, []
            if i + 1 < n:
                for indices, row in zip(groups, rows, strict=True):
                    held = [sum(sizes[(r - i) % n][j] * units[j] for j in indices) for r in range(n)]
                    pending.append(passed_on(row, held, engine, group))
            shapes = [[size, *leaf.shape[1:]] for size, leaf in zip(sizes[source], leaves, strict=True)]
            yield source, rebuild(unpacked(zip(groups, rows, strict=True), shapes)) if i else tree
    finally:
        for p in pending:  # left early
            p._drop()
