"""What the last rank to arrive does for all simulated ranks: one method for each primitive of `Engine`.

Each gets the arguments of every rank, in the order of ranks, checks that they fit together, and yields what is to be
written: the rank that receives, its output, and the block for it. A sum is computed once, in the order of ranks, and
written to the ranks that receive it. So the cost grows with the data that the ranks send and receive. The defaults of
`Engine` would send a message for each pair of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcoll.core.errors import CollectiveMismatchError
from diffcoll.engines.engine import Blocks

Writes = Iterator[tuple[int, Tensor, Tensor]]


@dataclass(frozen=True, eq=False, repr=False)
class Delivery:
    """Carries out primitives of `Engine`, or collectives of torch.distributed.

    Args:
        total: the sum, or another reduction, of one tensor for each rank, as a new tensor.
        reshapes: whether a block fits an output of another shape and the same size.
    """

    total: Callable[[Sequence[Tensor]], Tensor]
    reshapes: bool = False

    def exchange(self, *ranks: tuple[Blocks, Blocks]) -> Writes:
        """Every block from its sender to its receiver."""
        for r, blocks in enumerate(zip(*[sends for sends, _ in ranks], strict=True)):
            for s, (block, into) in enumerate(zip(blocks, ranks[r][1], strict=True)):
                if block is into:  # None, or a rank's own block, in its place
                    continue
                if block is not None and into is not None:
                    self._fits(r, into, s, block)
                    yield r, into, block
                elif any(b is not None and b.numel() for b in (block, into)):
                    raise unlike(r, into, s, block)

    def all_gather(self, *ranks: tuple[Tensor | None, Tensor, list[int]]) -> Writes:
        """row_r ← x_0, …, x_{N−1}."""
        blocks = [row.split_with_sizes(n)[s] if x is None else x.view(-1) for s, (x, row, n) in enumerate(ranks)]
        sizes, dtypes = [b.numel() for b in blocks], {b.dtype for b in blocks}
        for r, (_, row, counts) in enumerate(ranks):
            if counts != sizes or dtypes != {row.dtype}:
                for s, (into, block) in enumerate(zip(row.split_with_sizes(counts), blocks, strict=True)):
                    self._fits(r, into, s, block)
        gathered = joined(blocks)
        for r, (_, row, _) in enumerate(ranks):
            yield r, row, gathered

    def reduce_scatter(self, *ranks: tuple[Tensor, list[int], Tensor]) -> Writes:
        """out_r ← Σ_s part r of row_s."""
        rows, (_, counts, _) = [row for row, _, _ in ranks], ranks[0]
        if any(n != counts or row.dtype != rows[0].dtype for row, n, _ in ranks):
            parts = [row.split_with_sizes(n) for row, n, _ in ranks]
            for r, of_rank in enumerate(parts):
                for s, of_other in enumerate(parts):
                    self._fits(r, of_rank[r], s, of_other[r])
        sums = self.total(rows).split_with_sizes(counts)
        for r, (part, (_, _, out)) in enumerate(zip(sums, ranks, strict=True)):
            yield r, out, part.view_as(out)

    def all_reduce(self, *ranks: tuple[Tensor, Tensor]) -> Writes:
        """y_r ← Σ_s x_s."""
        for s, (x, _) in enumerate(ranks):
            self._fits(0, ranks[0][1], s, x)
        total = self.total([x for x, _ in ranks])
        for r, (_, y) in enumerate(ranks):
            yield r, y, total

    def broadcast(self, *ranks: tuple[Tensor, int]) -> Writes:
        """y_r ← y_src."""
        src = _same("src", [src for _, src in ranks])
        for r, (y, _) in enumerate(ranks):
            self._fits(r, y, src, ranks[src][0])
            if r != src:
                yield r, y, ranks[src][0]

    def reduce(self, *ranks: tuple[Tensor, Tensor, int]) -> Writes:
        """y_dst ← Σ_s x_s."""
        dst = _same("dst", [dst for _, _, dst in ranks])
        y = ranks[dst][1]
        for s, (x, _, _) in enumerate(ranks):
            self._fits(dst, y, s, x)
        yield dst, y, self.total([x for x, _, _ in ranks])

    def _fits(self, r: int, into: Tensor, s: int, block: Tensor) -> None:
        """Raise unless the block that rank s sends is like the one that rank r expects."""
        fits = into.shape == block.shape or (self.reshapes and into.numel() == block.numel())
        if not fits or into.dtype != block.dtype:
            raise unlike(r, into, s, block)


def joined(blocks: list[Tensor]) -> Tensor:
    """Return 1-d blocks of one dtype, one behind the other."""
    return torch.cat(blocks, out=blocks[0].new_empty(0))  # `out`: which autocast of a rank does not see


def unlike(r: int, into: Tensor | None, s: int, block: Tensor | None) -> CollectiveMismatchError:
    """Return the error if rank r expects another block from rank s than that one sends."""
    expected, sent = ("nothing" if b is None else f"{b.dtype} {tuple(b.shape)}" for b in (into, block))
    return CollectiveMismatchError(f"rank {r} expects {expected} from rank {s}, which sends {sent}")


def _same(argument: str, of_ranks: Sequence[int]) -> int:
    for r, other in enumerate(of_ranks):
        if other != of_ranks[0]:
            raise CollectiveMismatchError(f"{argument}={of_ranks[0]} on rank 0, {other} on rank {r}")
    return of_ranks[0]
