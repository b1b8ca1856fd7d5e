"""What the last rank to arrive does for all simulated ranks: one function for each primitive of `Engine`.

Each gets the arguments of every rank, in the order of ranks, checks that they fit together, and writes every rank's
outputs. A sum is computed once, in the order of ranks, and copied to the ranks that receive it. So the cost grows with
the data that the ranks send and receive. The defaults of `Engine` would send a message for each pair of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffcoll.core.errors import CollectiveMismatchError
from diffcoll.engines.engine import Blocks, add_up


def exchange(*ranks: tuple[Blocks, Blocks]) -> None:
    """Copy every block from its sender to its receiver."""
    for r, blocks in enumerate(zip(*[sends for sends, _ in ranks], strict=True)):
        for s, (block, into) in enumerate(zip(blocks, ranks[r][1], strict=True)):
            if block is into:  # None, or a rank's own block, in its place
                continue
            if block is not None and into is not None:
                _fits(r, into, s, block)
                into.copy_(block)
            elif any(b is not None and b.numel() for b in (block, into)):
                raise unlike(r, into, s, block)


def all_gather(*ranks: tuple[Tensor | None, Tensor, list[int]]) -> None:
    """row_r ← x_0, …, x_{N−1}."""
    blocks = [row.split_with_sizes(n)[s] if x is None else x.view(-1) for s, (x, row, n) in enumerate(ranks)]
    sizes, dtypes = [b.numel() for b in blocks], {b.dtype for b in blocks}
    for r, (_, row, counts) in enumerate(ranks):
        if counts != sizes or dtypes != {row.dtype}:
            for s, (into, block) in enumerate(zip(row.split_with_sizes(counts), blocks, strict=True)):
                _fits(r, into, s, block)
    whole = torch.cat(blocks, out=blocks[0].new_empty(sum(sizes)))  # `out`: which autocast of a rank does not see
    for _, row, _ in ranks:
        row.copy_(whole)


def reduce_scatter(*ranks: tuple[Tensor, list[int], Tensor]) -> None:
    """out_r ← Σ_s part r of row_s."""
    rows, (_, counts, _) = [row for row, _, _ in ranks], ranks[0]
    if any(n != counts or row.dtype != rows[0].dtype for row, n, _ in ranks):
        parts = [row.split_with_sizes(n) for row, n, _ in ranks]
        for r, of_rank in enumerate(parts):
            for s, of_other in enumerate(parts):
                _fits(r, of_rank[r], s, of_other[r])
    for part, (_, _, out) in zip(_sum(rows).split_with_sizes(counts), ranks, strict=True):
        out.view(-1).copy_(part)


def all_reduce(*ranks: tuple[Tensor, Tensor]) -> None:
    """y_r ← Σ_s x_s."""
    for s, (x, _) in enumerate(ranks):
        _fits(0, ranks[0][1], s, x)
    total = _sum([x for x, _ in ranks])
    for _, y in ranks:
        y.copy_(total)


def broadcast(*ranks: tuple[Tensor, int]) -> None:
    """y_r ← y_src."""
    src = _same("src", [src for _, src in ranks])
    for r, (y, _) in enumerate(ranks):
        _fits(r, y, src, ranks[src][0])
        if r != src:
            y.copy_(ranks[src][0])


def reduce(*ranks: tuple[Tensor, int]) -> None:
    """y_dst ← Σ_s y_s."""
    dst = _same("dst", [dst for _, dst in ranks])
    ys = [y for y, _ in ranks]
    for s, y in enumerate(ys):
        _fits(dst, ys[dst], s, y)
    ys[dst].copy_(_sum(ys))


def _sum(xs: Sequence[Tensor]) -> Tensor:
    total = xs[0].new_empty(xs[0].shape)
    add_up(xs, total)
    return total


def _fits(r: int, into: Tensor, s: int, block: Tensor) -> None:
    """Raise unless the block that rank s sends is like the one that rank r expects."""
    if into.shape != block.shape or into.dtype != block.dtype:
        raise unlike(r, into, s, block)


def unlike(r: int, into: Tensor | None, s: int, block: Tensor | None) -> CollectiveMismatchError:
    """Return the error if rank r expects another block from rank s than that one sends."""
    return CollectiveMismatchError(f"rank {r} expects {_of(into)} from rank {s}, which sends {_of(block)}")


def _of(block: Tensor | None) -> str:
    return "nothing" if block is None else f"{block.dtype} {tuple(block.shape)}"


def _same(argument: str, of_ranks: Sequence[int]) -> int:
    first = of_ranks[0]
    for r, other in enumerate(of_ranks):
        if other != first:
            raise CollectiveMismatchError(f"{argument}={first} on rank 0, {other} on rank {r}")
    return first
