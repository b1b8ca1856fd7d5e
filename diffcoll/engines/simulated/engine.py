"""The engine of simulated ranks: each exchange is a meeting, whose last rank delivers all blocks.

In a joint graph a meeting is a whole collective, combined by a function that `diffcoll.testing` passes to the world.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from typing_extensions import override

from diffcoll.core.errors import within_backward
from diffcoll.core.torch_private.tracing import is_traced
from diffcoll.engines.engine import Blocks, Engine, Wait
from diffcoll.engines.rank_state import NO_GRAPHS, THREAD
from diffcoll.engines.simulated.blocks import Row, cut, deliver, write
from diffcoll.engines.simulated.meetings import Combine, Entry
from diffcoll.engines.simulated.world import Rank, World
from diffcoll.engines.turn import IDLE


class LocalEngine(Engine):
    """A group of simulated ranks, seen by the one whose thread makes this.

    Args:
        ranks: of the group, in order.
        names: what tells groups of the same ranks apart: the name of torch.distributed, and the numbers of twins.
    """

    #: The dimension of a mesh whose group this is.
    mesh_dim = ""

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
        return self._meet(y, y, "SUM")  # computed once, for all ranks

    @override
    def exchange(self, sends: Blocks, recvs: Blocks, later: bool = False) -> Wait:
        return self._meet(sends, recvs)

    @override
    def all_gather(self, x: Tensor | None, row: Tensor, counts: list[int], later: bool = False) -> Wait:
        parts = cut(row, counts)
        return self._meet(parts[self.rank] if x is None else x.view(-1), parts)

    @override
    def reduce_scatter(self, row: Tensor, counts: list[int], out: Tensor, later: bool = False) -> Wait:
        return self._meet(cut(row, counts), out.view(-1), "SUM")

    def _meet(self, sends: Any, recvs: Any, op: str = "") -> Wait:
        rows = Row.of(self.size, sends), Row.of(self.size, recvs)
        how = self.now.detail or op or "blocks"
        # Written for all ranks at once: a rank that has received its blocks may overwrite what it sends.
        return self.meet(self.now.name, how, [rows], lambda ranks: [*map(write, deliver(op, ranks))])

    @override
    def run_truth(self, name: str, x: Any, arguments: dict[str, Any], facts: str) -> Any:
        if isinstance(x, Tensor) and is_traced(x):
            raise RuntimeError(f"{name}: {NO_GRAPHS}")
        return self.meet(name, facts, (x, arguments), partial(self.world.truth, name))()

    def meet(self, what: str, how: object, payload: Any, combine: Combine) -> Callable[[], Any]:
        """Join the group's next meeting; return what waits for this rank's result."""
        self._meetings += 1
        origin = self.now.origin
        within = "" if self.now is IDLE or origin else within_backward()
        entry = Entry(what, how, payload, origin, within, self.mesh_dim)
        return self.world.meet(self.me, self.ranks, (self.ranks, self.names, self._meetings), entry, combine)
