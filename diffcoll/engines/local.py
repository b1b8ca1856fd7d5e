"""The engine of simulated ranks.

With the library's rules a meeting of the ranks is one primitive of the engine, carried out by
`diffcoll.engines.delivery`. In a joint graph it is a whole collective, combined by a function that `diffcoll.testing`
passes to the world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.core.torch_private.tracing import is_traced
from diffcoll.engines.delivery import Delivery, Writes
from diffcoll.engines.engine import Blocks, Engine, Wait, add_up
from diffcoll.engines.guards import NO_GRAPHS, THREAD
from diffcoll.engines.meeting import Entry, LocalGroup
from diffcoll.engines.world import World


def _sum(xs: Sequence[Tensor]) -> Tensor:
    total = xs[0].new_empty(xs[0].shape)
    add_up(xs, total)
    return total


_DELIVERY = Delivery(_sum)


class LocalEngine(Engine):
    """A group of simulated ranks."""

    def __init__(self, world: World, group: LocalGroup, rank: int) -> None:
        super().__init__(rank=group.ranks.index(rank), size=len(group.ranks))
        self.world = world
        self.group = group
        self.description = f"a simulated group of {self.size} ranks"
        self.in_one_graph = world.truth is not None
        self._meetings = 0  # how many this rank has joined
        self._made: dict[tuple[int, ...], int] = {}  # how many twins and sub-groups, by their ranks

    @property
    @override
    def global_ranks(self) -> tuple[int, ...]:
        return self.group.ranks

    @override
    def twin(self) -> LocalEngine:
        return LocalEngine(self.world, self._another(self.group.ranks), self.group.ranks[self.rank])

    @override
    def subgroup(self, ranks: Sequence[int]) -> LocalGroup:
        return self._another(tuple(self.group.ranks[r] for r in ranks))

    def _another(self, ranks: tuple[int, ...]) -> LocalGroup:
        """Return a group with its own messages: the ranks that call this for the same ranks equally often share one."""
        self._made[ranks] = count = self._made.get(ranks, 0) + 1
        return LocalGroup(ranks, (*self.group.number, count))

    @override
    def exchange(self, sends: Blocks, recvs: Blocks, later: bool = False) -> Wait:
        return self._deliver(_DELIVERY.exchange, sends, recvs)

    @override
    def all_gather(self, x: Tensor | None, row: Tensor, counts: list[int], later: bool = False) -> Wait:
        return self._deliver(_DELIVERY.all_gather, x, row, counts)

    @override
    def reduce_scatter(self, row: Tensor, counts: list[int], out: Tensor, later: bool = False) -> Wait:
        return self._deliver(_DELIVERY.reduce_scatter, row, counts, out)

    @override
    def all_reduce(self, x: Tensor, y: Tensor, later: bool = False) -> Wait:
        if later and x is not y:  # x may be modified before the other ranks arrive
            x = y.copy_(x)
        return self._deliver(_DELIVERY.all_reduce, x, y)

    @override
    def broadcast(self, y: Tensor, src: int, later: bool = False) -> Wait:
        return self._deliver(_DELIVERY.broadcast, y, src)

    @override
    def reduce(self, y: Tensor, dst: int, later: bool = False) -> Wait:
        return self._deliver(_DELIVERY.reduce, y, y, dst)

    def _deliver(self, step: Callable[..., Writes], *arguments: Any) -> Wait:
        """Return the wait for a primitive, which the last rank to call it carries out for all."""

        def combine(ranks: list[Any]) -> list[None]:
            with torch.inference_mode():  # outputs of a rank in inference mode can be written in that mode only
                for _, out, block in step(*ranks):
                    out.copy_(block)
            return [None] * len(ranks)

        return self._meet(self.now.name, step.__name__, arguments, combine)

    @override
    def run_truth(self, name: str, x: Any, arguments: dict[str, Any], facts: tuple[object, object]) -> Any:
        truth = self.world.truth
        assert truth is not None
        if isinstance(x, torch.Tensor) and is_traced(x):
            raise RuntimeError(f"{name}: {NO_GRAPHS}")

        def combine(payloads: list[Any]) -> list[Any]:
            return truth(name, *map(list, zip(*payloads, strict=True)))

        return self._meet(name, "", (x, arguments, facts), combine)()

    def _meet(self, what: str, step: str, payload: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Wait:
        self._meetings += 1
        entry = Entry(what, step, payload, self.now.origin)
        return self.world.meet(self.group, self._meetings, entry, combine)


def engine_of(group: object) -> LocalEngine | None:
    """Return this thread's engine for a `LocalGroup`; for None, that of its whole world. None if it is no rank."""
    me = THREAD.rank
    if me is None:
        if isinstance(group, LocalGroup):
            raise ValueError("got a group of a simulated world, outside of that world; use it inside simulate()")
        return None
    if group is None and me.c10d_groups is not None and me.c10d_groups.default_pg is None:
        raise RuntimeError(
            "got no group on a simulated rank that has called destroy_process_group(); call init_process_group() again"
        )
    ranks = me.world.group.ranks if group is None else getattr(group, "ranks", None)
    if not isinstance(ranks, tuple):
        return None
    handle = me.world.group if group is None else group if isinstance(group, LocalGroup) else LocalGroup(ranks)
    engine: LocalEngine | None = me.engines.get(handle)
    if engine is None:
        if me.number not in ranks:
            raise ValueError("got a group that this rank is not in; call it on the group's ranks only")
        engine = me.engines[handle] = LocalEngine(me.world, handle, me.number)
    return engine
