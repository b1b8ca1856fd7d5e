"""The engine of simulated ranks: each exchange is a meeting, whose last rank delivers all blocks.

In a joint graph a meeting is a whole collective, combined by a function that `diffcoll.testing` passes to the world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.core.errors import CollectiveMismatchError
from diffcoll.core.torch_private.tracing import is_traced
from diffcoll.engines.engine import Blocks, Engine, Wait, add_up
from diffcoll.engines.rank_state import THREAD
from diffcoll.engines.simulated.world import Entry, LocalGroup, World

#: A graph is compiled or traced for one rank, but simulated ranks share one cache of graphs.
NO_GRAPHS = (
    "torch.compile, export, make_fx and linearize do not work on simulated ranks, which share compiled and traced "
    "graphs; call the function without them, or compile on processes (diffcoll.testing.spawn)"
)


class LocalEngine(Engine):
    """A group of simulated ranks."""

    def __init__(self, world: World, group: LocalGroup, rank: int) -> None:
        super().__init__(rank=group.ranks.index(rank), size=len(group.ranks))
        self.world = world
        self.group = group
        self.description = f"a simulated group of {self.size} ranks"
        self.in_one_graph = world.truth is not None
        self._meetings = 0  # how many this rank has joined
        self._twins = 0

    @property
    @override
    def global_ranks(self) -> tuple[int, ...]:
        return self.group.ranks

    @override
    def twin(self) -> LocalEngine:
        self._twins += 1
        twin = LocalGroup(self.group.ranks, (*self.group.key, self._twins))
        return LocalEngine(self.world, twin, self.group.ranks[self.rank])

    @override
    def all_reduce(self, x: Tensor, y: Tensor, later: bool = False) -> Wait:
        if x is not y:
            y.copy_(x)
        return self.meet(self.now.name, self.now.detail or "a sum", y, _sum)

    @override
    def exchange(self, sends: Blocks, recvs: Blocks, later: bool = False) -> Wait:
        return self.meet(self.now.name, self.now.detail or "blocks", (sends, recvs), deliver)

    @override
    def run_truth(self, name: str, x: Any, arguments: dict[str, Any], facts: tuple[object, object]) -> Any:
        truth = self.world.truth
        assert truth is not None
        if isinstance(x, torch.Tensor) and is_traced(x):
            raise RuntimeError(f"{name}: {NO_GRAPHS}")

        def combine(payloads: list[Any]) -> list[Any]:
            return truth(name, *map(list, zip(*payloads, strict=True)))

        return self.meet(name, None, (x, arguments, facts), combine)()

    def meet(self, what: str, how: object, payload: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Wait:
        """Join the group's next meeting; return what waits for this rank's result."""
        self._meetings += 1
        entry = Entry(what, how, payload, self.now.origin)
        return self.world.meet(self.group, self._meetings, entry, combine)


def _sum(ys: Sequence[Tensor]) -> list[None]:
    """Replace each tensor by the sum of all, computed once, in the order of ranks."""
    for s, y in enumerate(ys):
        _expect_like(0, ys[0], s, y)
    with torch.inference_mode():  # tensors of a rank in inference mode can be written in that mode only
        add_up(ys, total := torch.empty_like(ys[0]))
        for y in ys:
            y.copy_(total)
    return [None] * len(ys)


def deliver(ranks: Sequence[tuple[Blocks, Blocks]]) -> list[None]:
    """Write every block that a rank sends to where its receiver expects it; raise if one is not like the other."""
    with torch.inference_mode():
        for r, (_, recvs) in enumerate(ranks):
            for s, into in enumerate(recvs):
                block = ranks[s][0][r]
                if block is into:  # None, or a rank's own block, in its place
                    continue
                _expect_like(r, into, s, block)
                if into is not None and block is not None:
                    into.copy_(block)
    return [None] * len(ranks)


def _expect_like(r: int, into: Tensor | None, s: int, block: Tensor | None) -> None:
    """Raise if rank r expects another block from rank s than that one sends; an empty one need not be sent."""
    if into is None or block is None:
        fits = not any(b is not None and b.numel() for b in (into, block))
    else:
        fits = (into.shape, into.dtype) == (block.shape, block.dtype)
    if not fits:
        raise unlike(r, into, s, block)


def unlike(r: int, into: Tensor | None, s: int, block: Tensor | None) -> CollectiveMismatchError:
    """Return the error if rank r expects another block from rank s than that one sends."""
    expected, sent = ("nothing" if b is None else f"{b.dtype} {tuple(b.shape)}" for b in (into, block))
    return CollectiveMismatchError(f"rank {r} expects {expected} from rank {s}, which sends {sent}")


def engine_of(group: object) -> LocalEngine | None:
    """Return this rank's engine for a `LocalGroup`; for None, that of its whole world."""
    me = THREAD.rank
    handle = me.world.group if group is None else group
    if not isinstance(handle, LocalGroup):
        return None
    engine: LocalEngine | None = me.engines.get(handle)
    if engine is None:
        engine = me.engines[handle] = LocalEngine(me.world, handle, me.number)
    return engine
