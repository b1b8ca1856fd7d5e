"""What ranks of one process exchange: compared with what each rank expects, and copied to where it expects it.

All of it takes a time that grows with the number of ranks, not with its square, unless ranks send each other different
tensors. Tensors without memory (meta, fake) are compared alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeAlias

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


#: What is compared of a tensor: its dtype, its shape, and whether it has memory.
Kind: TypeAlias = tuple[torch.dtype, tuple[int, ...], bool]
#: None: nothing is sent, or expected.
Part: TypeAlias = Tensor | None
#: What is sent to each rank, or expected from it: the same for all, for some of them, or one for each.
Blocks: TypeAlias = Part | Mapping[int, Part] | Sequence[Part]
#: What a rank receives: where it expects it, and what to write there.
Received: TypeAlias = list[tuple[Tensor, Tensor]]


class Misfit(Exception):
    """Rank `receiver` of a group expects another block than rank `sender` sends."""

    def __init__(self, receiver: int, sender: int, *kinds: Kind | None) -> None:
        self.receiver, self.sender = receiver, sender
        self.expects, self.sends = (
            f"{k[0]} {k[1]}{'' if k[2] else ' without memory'}" if k else "nothing" for k in kinds
        )


def kind(x: Part) -> Kind | None:
    """Return what is compared of x."""
    return None if x is None else (x.dtype, tuple(x.shape), has_memory(x))


def cut(x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Cut dimension 0 into parts of these sizes; without memory, those of one size are one tensor."""
    if has_memory(x):
        return x.split_with_sizes(list(sizes))
    if sum(sizes) != x.shape[0]:
        raise ValueError(f"got parts of {sizes} rows, expected a sum of {x.shape[0]}")
    parts = {size: x.narrow(0, 0, size) for size in {*sizes}}
    return [parts[size] for size in sizes]


@dataclass(frozen=True)
class Row:
    """What one rank sends to, or expects from, each rank of a group: `block`, but for the ranks in `others`."""

    block: Part
    others: Mapping[int, Part] = field(default_factory=dict)

    @classmethod
    def of(cls, n: int, blocks: Blocks, each: Callable[[Tensor], Tensor] = lambda x: x) -> Row:
        """Return the row of `each` block, for n ranks; it is called once for each tensor."""
        if isinstance(blocks, Tensor) or blocks is None:
            return cls(None if blocks is None else each(blocks))
        if not isinstance(blocks, Mapping):
            if len(blocks) != n:
                raise ValueError(f"torch.distributed: got {len(blocks)} tensors, expected {n}, one for each rank")
            if len({*map(id, blocks)}) == 1:
                return cls.of(n, blocks[0], each)
            blocks = dict(enumerate(blocks))
        parts = {i: each(x) for i, x in {id(x): x for x in blocks.values() if x is not None}.items()}
        return cls(None, {r: parts.get(id(x)) for r, x in blocks.items()})

    def __getitem__(self, rank: int) -> Part:
        return self.others.get(rank, self.block)

    def kinds(self) -> object:
        """Return what is compared of this row."""
        return kind(self.block), tuple((r, kind(x)) for r, x in self.others.items())


def deliver(op: str, ranks: Sequence[Sequence[tuple[Row, Row]]]) -> list[Received]:
    """Return what each rank receives of what all send, in one exchange after the other.

    With `op` all that a rank receives is reduced, in the order of ranks, to one output.
    """
    received: list[Received] = [[] for _ in ranks]
    with unobserved(), torch.inference_mode():  # the modes are those of one rank
        for exchanges in zip(*ranks, strict=True):
            sends, recvs = zip(*exchanges, strict=True)
            expect_fit(sends, recvs)
            (_reduce if op else _move)(op, sends, recvs, received)
    return received


def write(received: Received) -> None:
    """Write what a rank has received; tensors of inference mode can be written in that mode only."""
    if received:
        with unobserved(), torch.inference_mode():
            for y, block in received:
                y.copy_(block.view(y.shape))


def expect_fit(sends: Sequence[Row], recvs: Sequence[Row]) -> None:
    """Raise unless each rank expects from each rank what that one sends."""
    for senders in sorted(_alike(sends), key=len):  # an error names the rank that differs from most
        for receivers in _alike(recvs):
            row, into = sends[senders[0]], recvs[receivers[0]]
            sent, expected = {kind(row[r]) for r in receivers}, {kind(into[s]) for s in senders}
            if not all(fits(y, x) for y in expected for x in sent):
                pairs = ((r, s, kind(recvs[r][s]), kind(sends[s][r])) for r in receivers for s in senders)
                raise Misfit(*next(pair for pair in pairs if not fits(*pair[2:])))


def _alike(rows: Sequence[Row]) -> list[list[int]]:
    """Return the ranks, in groups of those whose rows do not differ in what is compared."""
    groups: dict[object, list[int]] = {}
    for rank, row in enumerate(rows):
        groups.setdefault(row.kinds(), []).append(rank)
    return list(groups.values())


def fits(into: Kind | None, block: Kind | None) -> bool:
    """Whether a rank that expects `into` can receive `block`.

    An empty block need not be sent, and one in 1-d stands for any shape.
    """
    if into is None or block is None:
        one = into or block
        return one is None or 0 in one[1]
    return block in (into, (into[0], (torch.Size(into[1]).numel(),), into[2]))


def _move(_: str, sends: Sequence[Row], recvs: Sequence[Row], received: list[Received]) -> None:
    for r, row in enumerate(recvs):
        for s in range(len(sends)) if row.block is not None and has_memory(row.block) else row.others:
            into, block = row[s], sends[s][r]
            if into is not None and block is not None and has_memory(into):
                received[r].append((into, block))


def _reduce(op: str, sends: Sequence[Row], recvs: Sequence[Row], received: list[Received]) -> None:
    alike = not any(row.others for row in sends)  # all ranks receive the same: computed once
    total: Tensor | None = None
    for r, row in enumerate(recvs):
        if row.block is not None and has_memory(row.block):
            if total is None or not alike:
                blocks: list[Any] = [row[r] for row in sends]
                total = _reduced(op, blocks)
            received[r].append((row.block, total))


def _reduced(op: str, blocks: Sequence[Tensor]) -> Tensor:
    """Return the reduction of blocks; means of whole numbers are truncated, as on NCCL."""
    if op not in ("SUM", "AVG"):
        return reduce(_FOLDS[op], blocks)
    add_up(blocks, total := torch.empty_like(blocks[0]))
    if op == "SUM":
        return total
    fractional = total.is_floating_point() or total.is_complex()
    return total.div(len(blocks), rounding_mode=None if fractional else "trunc")
