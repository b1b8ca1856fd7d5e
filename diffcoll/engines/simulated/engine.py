"""The engine of simulated ranks: each exchange is a meeting, whose last rank delivers all blocks.

In a joint graph a meeting is a whole collective, combined by a function that `diffcoll.testing` passes to the world.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from typing_extensions import override

from diffcoll.core.torch_private.tracing import is_traced
from diffcoll.core.torch_private.without_memory import has_memory
from diffcoll.engines.engine import Blocks, Engine, Wait, is_even
from diffcoll.engines.rank_state import NO_GRAPHS, THREAD
from diffcoll.engines.simulated.blocks import Block, Row, deliver
from diffcoll.engines.simulated.meetings import Combine, Entry
from diffcoll.engines.simulated.world import Rank, World


class LocalEngine(Engine):
    """A group of simulated ranks, seen by the one whose thread makes this.

    Args:
        ranks: of the group, in order.
        names: what tells groups of the same ranks apart: the name of torch.distributed, and the numbers of twins.
    """

    moves_meta = True
    #: The dimension of a mesh whose group this is.
    mesh_dim = ""

    def __init__(self, ranks: tuple[int, ...], *names: str) -> None:
        self.me: Rank = THREAD.rank
        super().__init__(rank=ranks.index(self.me.number), size=len(ranks))
        self.world: World = self.me.world
        self.ranks, self.names = ranks, names
        self.description = f"a simulated group of {self.size} ranks"
        self.in_one_graph = self.world.truth is not None
        self.number = self.world.group(ranks, *names)
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
        row = Row(y)
        return self._meet("a sum", (row, row), "SUM")  # computed once, for all ranks

    @override
    def exchange(self, sends: Blocks, recvs: Blocks, later: bool = False) -> Wait:
        return self._meet("blocks", (Row.of(sends), Row.of(recvs)))

    @override
    def all_gather(self, x: Tensor | None, row: Tensor, counts: list[int], later: bool = False) -> Wait:
        if x is None or has_memory(x):
            return super().all_gather(x, row, counts, later)
        return self._meet("blocks", (Row(x.view(-1)), _parts(row, counts)))

    @override
    def reduce_scatter(self, row: Tensor, counts: list[int], out: Tensor, later: bool = False) -> Wait:
        if has_memory(row):
            return super().reduce_scatter(row, counts, out, later)
        return self._meet("blocks", (_parts(row, counts), Row(out.view(-1))))

    def _meet(self, primitive: str, rows: tuple[Row, Row], op: str = "") -> Wait:
        return self.meet(self.now.name, self.now.detail or primitive, [rows], partial(deliver, op))

    @override
    def run_truth(self, name: str, x: Any, arguments: dict[str, Any], facts: str) -> Any:
        if isinstance(x, Tensor) and is_traced(x):
            raise RuntimeError(f"{name}: {NO_GRAPHS}")
        return self.meet(name, facts, (x, arguments), partial(self.world.truth, name))()

    def meet(self, what: str, how: object, payload: Any, combine: Combine, of_torch: bool = False) -> Wait:
        """Join the group's next meeting; return what waits for this rank's result."""
        self._meetings += 1
        entry = Entry(what, how, payload, self.now.origin, group=self.mesh_dim, of_torch=of_torch)
        return self.world.meet(self.me, self.ranks, (self.number, self._meetings), entry, combine)


def _parts(row: Tensor, counts: list[int]) -> Row:
    """Return the parts of a tensor without memory, one after the other."""
    if is_even(counts):
        return Row(Block(row.dtype, (counts[0],)))
    return Row(None, {r: Block(row.dtype, (count,)) for r, count in enumerate(counts)})
