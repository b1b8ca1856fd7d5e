"""What ranks of one process exchange: compared with what each rank expects, and copied to where it expects it.

All of it takes a time that grows with the number of ranks, not with its square, unless ranks send each other different
tensors. Tensors without memory (meta, fake) are compared alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffcoll.core.torch_private.tracing import unobserved
from diffcoll.core.torch_private.without_memory import has_memory
from diffcoll.engines.engine import add_up

#: The reductions of torch.distributed besides sums and means.
_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class Block(NamedTuple):
    """What is compared of a tensor; of a tensor without memory there is nothing else."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    memory: bool = False

    def rows(self, rows: int | None = None) -> Block:
        """Return so many of the rows along dimension 0, in 1-d; None: all."""
        numel = torch.Size(self.shape).numel()
        return self._replace(shape=(numel if rows is None else rows * (numel // self.shape[0]),))

    def cut(self, n: int) -> Block:
        """Return one of n equal parts, in 1-d."""
        numel = torch.Size(self.shape).numel()
        if numel % n:
            raise ValueError(f"torch.distributed: got {numel} numbers, expected a multiple of N = {n}")
        return self._replace(shape=(numel // n,))

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}{'' if self.memory else ' without memory'}"


class Misfit(Exception):
    """Rank `receiver` of a group expects another block than rank `sender` sends."""

    def __init__(self, receiver: int, sender: int, into: Block | None, block: Block | None) -> None:
        self.receiver, self.sender = receiver, sender
        self.expects, self.sends = (str(b or "nothing") for b in (into, block))


#: None: nothing is sent, or expected.
Part = Tensor | Block | None


class Row:
    """What one rank sends to, or expects from, each rank of a group: `block`, but for the ranks in `others`."""

    __slots__ = ("block", "others")

    def __init__(self, block: Part, others: Mapping[int, Part] | None = None) -> None:
        self.block, self.others = _part(block), {r: _part(x) for r, x in (others or {}).items()}

    @classmethod
    def of(cls, blocks: Sequence[Part]) -> Row:
        """Return the row of one block for each rank."""
        if len({*map(id, blocks)}) == 1:
            return cls(blocks[0])
        row = cls(None, dict(enumerate(blocks)))
        kinds = {*row.others.values()} if all(isinstance(x, Block) for x in row.others.values()) else {None}
        return row if len(kinds) > 1 or None in kinds else cls(kinds.pop())

    def __getitem__(self, rank: int) -> Part:
        return self.others.get(rank, self.block)

    def kinds(self) -> tuple[Block | None, tuple[tuple[int, Block | None], ...]]:
        """Return what is compared of this row."""
        return kind(self.block), tuple((r, kind(x)) for r, x in self.others.items())


def _part(x: Part) -> Part:
    return x if not isinstance(x, Tensor) or has_memory(x) else kind(x)


def kind(x: Part) -> Block | None:
    """Return what is compared of x."""
    return Block(x.dtype, tuple(x.shape), has_memory(x)) if isinstance(x, Tensor) else x


def deliver(op: str, ranks: Sequence[Sequence[tuple[Row, Row]]]) -> list[None]:
    """Write what every rank sends to where its receiver expects it, in one exchange after the other.

    With `op` all that a rank receives is reduced, in the order of ranks, to one output.
    """
    # The modes are those of one rank; tensors of a rank in inference mode can be written in that mode only.
    with unobserved(), torch.inference_mode():
        for exchanges in zip(*ranks, strict=True):
            sends, recvs = zip(*exchanges, strict=True)
            expect_fit(sends, recvs)
            (_reduce if op else _copy)(op, sends, recvs)
    return [None] * len(ranks)


def expect_fit(sends: Sequence[Row], recvs: Sequence[Row]) -> None:
    """Raise unless each rank expects from each rank what that one sends."""
    receivers = _alike(recvs)
    for senders in sorted(_alike(sends), key=len):  # an error names the rank that differs from most
        for group in receivers:
            row, into = sends[senders[0]], recvs[group[0]]
            sent = {kind(row[r]) for r in group} if row.others else {kind(row.block)}
            expected = {kind(into[s]) for s in senders} if into.others else {kind(into.block)}
            if not all(fits(y, x) for y in expected for x in sent):
                pairs = ((r, s, kind(recvs[r][s]), kind(sends[s][r])) for r in group for s in senders)
                raise Misfit(*next(pair for pair in pairs if not fits(*pair[2:])))


def _alike(rows: Sequence[Row]) -> list[list[int]]:
    """Return the ranks, in groups of those whose rows do not differ in what is compared."""
    groups: dict[object, list[int]] = {}
    for rank, row in enumerate(rows):
        groups.setdefault(row.kinds(), []).append(rank)
    return list(groups.values())


def fits(into: Block | None, block: Block | None) -> bool:
    """Whether a rank that expects `into` can receive `block`.

    An empty block need not be sent, and one in 1-d stands for any shape.
    """
    if into is None or block is None:
        return all(b is None or 0 in b.shape for b in (into, block))
    same = into.dtype == block.dtype and into.memory == block.memory
    return same and (block.shape == into.shape or block.shape == (torch.Size(into.shape).numel(),))


def _copy(_: str, sends: Sequence[Row], recvs: Sequence[Row]) -> None:
    for r, row in enumerate(recvs):
        expected = row.others.items() if row.block is None else ((s, row[s]) for s in range(len(sends)))
        if isinstance(row.block, Block):
            continue
        for s, into in expected:
            block = sends[s][r]
            if isinstance(into, Tensor) and isinstance(block, Tensor):
                into.copy_(block.view(into.shape))


def _reduce(op: str, sends: Sequence[Row], recvs: Sequence[Row]) -> None:
    alike = not any(row.others for row in sends)  # all ranks receive the same: computed once
    total: Tensor | None = None
    for r, row in enumerate(recvs):
        if isinstance(row.block, Tensor):
            if total is None or not alike:
                blocks: list[Any] = [row[r] for row in sends]
                total = _reduced(op, blocks)
            row.block.copy_(total.view(row.block.shape))


def _reduced(op: str, blocks: Sequence[Tensor]) -> Tensor:
    """Return the reduction of blocks; means of whole numbers are truncated, as on NCCL."""
    if op not in ("SUM", "AVG"):
        return reduce(_FOLDS[op], blocks)
    add_up(blocks, total := torch.empty_like(blocks[0]))
    if op == "SUM":
        return total
    fractional = total.is_floating_point() or total.is_complex()
    return total.div(len(blocks), rounding_mode=None if fractional else "trunc")
