"""The engine of simulated ranks: each exchange is a meeting, whose last rank delivers all blocks.

In a joint graph a meeting is a whole collective, combined by a function that `diffcoll.testing` passes to the world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.core.errors import CollectiveMismatchError
from diffcoll.core.torch_private.tracing import is_traced
from diffcoll.engines.engine import Blocks, Engine, Wait, add_up
from diffcoll.engines.rank_state import NO_GRAPHS, THREAD
from diffcoll.engines.simulated.world import Combine, Entry, Rank, World

#: The reductions of torch.distributed besides sums and means.
_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class LocalEngine(Engine):
    """A group of simulated ranks, seen by the one whose thread makes this.

    Args:
        ranks: of the group, in order.
        names: what tells groups of the same ranks apart: the name of torch.distributed, and the numbers of twins.
    """

    def __init__(self, ranks: tuple[int, ...], *names: str) -> None:
        self.me: Rank = THREAD.rank
        super().__init__(rank=ranks.index(self.me.number), size=len(ranks))
        self.world: World = self.me.world
        self.ranks, self.names = ranks, names
        self.description = f"a simulated group of {self.size} ranks"
        self.in_one_graph = self.world.truth is not None
        self._meetings = 0  # how many this rank has joined
        self._twins = 0

    @property
    @override
    def global_ranks(self) -> tuple[int, ...]:
        return self.ranks

    @override
    def twin(self) -> LocalEngine:
        self._twins += 1
        return LocalEngine(self.ranks, *self.names, str(self._twins))

    @override
    def all_reduce(self, x: Tensor, y: Tensor, later: bool = False) -> Wait:
        if x is not y:
            y.copy_(x)
        ys = [y] * self.size
        return self._exchange("a sum", (ys, ys), "SUM")  # computed once, for all ranks

    @override
    def exchange(self, sends: Blocks, recvs: Blocks, later: bool = False) -> Wait:
        return self._exchange("blocks", (sends, recvs))

    def _exchange(self, primitive: str, blocks: tuple[Blocks, Blocks], op: str = "") -> Wait:
        return self.meet(self.now.name, self.now.detail or primitive, [blocks], partial(deliver, op))

    @override
    def run_truth(self, name: str, x: Any, arguments: dict[str, Any], facts: str) -> Any:
        if isinstance(x, Tensor) and is_traced(x):
            raise RuntimeError(f"{name}: {NO_GRAPHS}")
        return self.meet(name, facts, (x, arguments), partial(self.world.truth, name))()

    def meet(self, what: str, how: object, payload: Any, combine: Combine) -> Wait:
        """Join the group's next meeting; return what waits for this rank's result."""
        self._meetings += 1
        entry = Entry(what, how, payload, self.now.origin)
        return self.world.meet(self.me, self.ranks, (*self.names, self._meetings), entry, combine)


def deliver(op: str, ranks: Sequence[Sequence[tuple[Blocks, Blocks]]]) -> list[None]:
    """Write what every rank sends to where its receiver expects it, in one exchange after the other.

    With `op` all that a rank receives is reduced, in the order of ranks, to one output.
    """
    with torch.inference_mode():  # tensors of a rank in inference mode can be written in that mode only
        for exchanges in zip(*ranks, strict=True):
            reduced: dict[tuple[int, ...], Tensor] = {}  # by what is sent: once for all ranks that receive the same
            received = zip(*(sends for sends, _ in exchanges), strict=True)
            for r, ((_, recvs), blocks) in enumerate(zip(exchanges, received, strict=True)):
                if op and recvs[0] is not None:
                    sent = tuple(map(id, blocks))
                    if sent not in reduced:
                        reduced[sent] = _reduced(op, [expect_like(r, recvs[0], s, x) for s, x in enumerate(blocks)])
                    recvs, blocks = recvs[:1], (reduced[sent],)
                for s, (into, block) in enumerate(zip(recvs, blocks, strict=True)):
                    expect_like(r, into, s, block)
                    if into is not None and block is not None:
                        into.copy_(block.view(into.shape))
    return [None] * len(ranks)


def expect_like(r: int, into: Tensor | None, s: int, block: Tensor | None) -> Any:
    """Return the block that rank r gets from rank s; raise if it expects another one.

    An empty block need not be sent, and one in 1-d stands for any shape.
    """
    if into is None or block is None:
        fits = not any(b is not None and b.numel() for b in (into, block))
    else:
        fits = into.dtype == block.dtype and block.shape in (into.shape, (into.numel(),))
    if not fits:
        expected, sent = ("nothing" if b is None else f"{b.dtype} {tuple(b.shape)}" for b in (into, block))
        raise CollectiveMismatchError(f"rank {r} expects {expected} from rank {s}, which sends {sent}")
    return block


def _reduced(op: str, blocks: Sequence[Tensor]) -> Tensor:
    """Return the reduction of blocks; means of whole numbers are truncated, as on NCCL."""
    if op not in ("SUM", "AVG"):
        return reduce(_FOLDS[op], blocks)
    add_up(blocks, total := torch.empty_like(blocks[0]))
    if op == "SUM":
        return total
    fractional = total.is_floating_point() or total.is_complex()
    return total.div(len(blocks), rounding_mode=None if fractional else "trunc")
