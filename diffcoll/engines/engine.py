"""What moves bytes: the seam between the collectives and the transports.

An engine stands for one group as seen by one rank. It knows `rank`, `size` and one mover, `exchange`; every
other primitive has a default written on `exchange`, which a transport replaces where its own is faster.

Engines work on plain, contiguous tensors and know nothing of autograd. Every primitive starts at once and
returns a `Wait`: a function that returns when the result is there. Until then its tensors must not change.
A `Wait` starts no messages of its own, so ranks may wait in any order.

Which messages a primitive sends depends on facts that are equal on all ranks: the group, shapes, dtypes and `later`.
It never depends on how a tensor lies in memory, which is this rank's own matter.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from diffcoll.core.errors import Origin, message
from diffcoll.engines.scratch import Scratch

__all__ = ["WIDER", "Doing", "Engine", "Turn", "Wait", "add_up", "done", "even_sizes"]

Wait = Callable[[], object]

#: In what the library adds up tensors of half precision.
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
Blocks = Sequence[Tensor | None]
#: The collective at work, the forward call whose backward it is, and the thread that is in it.
Doing = tuple[str, Origin | None, int]


class Engine(ABC):
    """One group, seen by one of its ranks."""

    #: Words for error messages: what this group is and what it runs on.
    description: str = "an engine"
    #: The name by which a compiled graph finds this group again in its process.
    key: str = ""
    #: Types of the devices whose tensors this engine moves; None: every device that has memory.
    devices: tuple[str, ...] | None = None
    #: The collective at work, for messages that arise below it.
    operation: str = "nothing"
    #: Whether it stands for another one while Dynamo traces.
    compiling: bool = False
    #: Whether the ranks share one autograd graph, so that collectives meet in their ground truth.
    joint: bool = False
    #: Whether the caller has something else to do before it waits.
    later: bool = False
    #: What this rank is in, until it is there; read by the thread that warns of long waits, see `engines.watch`.
    doing: Doing | None = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.scratch = Scratch()
        self.turn = threading.Lock()  # held by the thread that is in a collective
        self.aloft: dict[int, int] = {}  # what was started and not yet waited for → the thread that started it
        self.adrift: deque[Wait] = deque()  # what nobody will wait for, but the next call
        self.plans: dict[tuple[Any, ...], Any] = {}  # what calls mean, see `diffcoll.core.call.perform`

    @property
    def control_device(self) -> torch.device:
        """Where the few integers that ranks exchange among themselves (sizes, headers) live."""
        return torch.device("cpu")

    @property
    def ended(self) -> bool:
        """Whether the group is no more."""
        return False

    def meet_in_truth(self, name: str, x: Any, arguments: dict[str, Any], facts: tuple[object, object]) -> Any:
        """Return this rank's result of the collective `name` by its ground truth (joint worlds only).

        Facts are what the arguments mean and what kind of tensor x is; they are the same on all ranks.
        """
        raise NotImplementedError

    def small(self, device: str) -> int:
        """Up to how many bytes on such a device one gather to all is faster than messages for every part."""
        return 0

    def subgroup(self, ranks: Sequence[int]) -> Any:
        """Make a group of some of these ranks, in this order, as `group=` takes it; all ranks call it."""
        raise NotImplementedError(f"{self.description} has no sub-groups")

    def twin(self) -> Engine:
        """Make an engine of the same ranks whose messages never meet those of this one; all ranks call it."""
        raise NotImplementedError(f"{self.description} has no twin")

    def connect(self, device: torch.device) -> None:
        """Prepare to move memory of a device that is not the CPU; all ranks call it before they move any."""
        return

    def overlaps(self, x: Tensor) -> bool:
        """Whether `all_reduce` of x returns at once and goes on while nobody waits."""
        return False

    def close(self) -> None:
        """Give a twin back; all ranks call it."""
        return  # what holds nothing has nothing to give back

    def absent(self) -> list[int]:
        """Ask, when the group has failed, which of its ranks do not know of it; as far as this can be known."""
        return []

    @abstractmethod
    def exchange(self, sends: Blocks, recvs: Blocks) -> Wait:
        """Send `sends[s]` to rank s and fill `recvs[s]` with what rank s sends here.

        A block that is None or empty does not travel; both ends know that from the sizes. `recvs[rank]`,
        where given, is filled from `sends[rank]`.
        """

    # ── defaults, written on exchange ────────────────────────────────────────────────────────────────────

    def all_gather(self, x: Tensor, blocks: Sequence[Tensor]) -> Wait:
        """blocks[s] = x_s on every rank. x may be this rank's own block; then it is so on every rank."""
        return self.exchange([x] * self.size, blocks)

    def reduce_scatter(self, blocks: Sequence[Tensor], out: Tensor) -> Wait:
        """out = Σ_s (blocks of s)[rank], added in the order of the ranks."""
        if self.size == 1:
            out.copy_(blocks[0])
            return done
        memory = self.scratch.take((self.size - 1) * out.numel(), like=out)
        spare = iter(memory.view(self.size - 1, *out.shape))
        recvs = [None if s == self.rank else next(spare) for s in range(self.size)]
        wait = self.exchange([None if s == self.rank else b for s, b in enumerate(blocks)], recvs)

        def finish() -> None:
            wait()
            add_up([blocks[self.rank] if b is None else b for b in recvs], out)
            self.scratch.give(memory)

        return finish

    def all_reduce(self, x: Tensor, y: Tensor) -> Wait:
        """y ← Σ_s x_s, bitwise the same on every rank: each part is added up on one.

        x need not be contiguous. It may be y; then it is so on every rank. With `later` it is read before this returns.
        """
        y.copy_(x)
        parts = even_parts(y.view(-1), self.size)
        mine = torch.empty_like(parts[self.rank])
        self.reduce_scatter(parts, mine)()
        return self.all_gather(mine, parts)

    def broadcast(self, y: Tensor, src: int) -> Wait:
        """y ← y_src, in place."""
        peers = range(self.size)
        sends = [y if self.rank == src and s != src else None for s in peers]
        return self.exchange(sends, [y if self.rank != src and s == src else None for s in peers])

    def reduce(self, y: Tensor, dst: int) -> Wait:
        """y_dst ← Σ_s y_s, in place on dst; elsewhere y is left alone."""
        peers = range(self.size)
        if self.rank != dst:
            return self.exchange([y if s == dst else None for s in peers], [None] * self.size)
        memory = self.scratch.take((self.size - 1) * y.numel(), like=y)
        spare = iter(memory.view(self.size - 1, *y.shape))
        recvs = [None if s == dst else next(spare) for s in peers]
        wait = self.exchange([None] * self.size, recvs)

        def finish() -> None:
            wait()
            add_up([y if b is None else b for b in recvs], y)
            self.scratch.give(memory)

        return finish


class Turn:
    """One thread's turn in a group: while it starts messages or waits for them.

    Raises:
        ValueError: on entry, if another thread has its turn, or has started something that is not yet waited for. Who
            only waits sends nothing, and may wait for what another thread has started.
    """

    __slots__ = ("_doing", "_engine", "_waits")

    def __init__(self, engine: Engine, name: str, origin: Origin | None = None, *, waits: bool = False) -> None:
        self._engine = engine
        self._doing: Doing = (name, origin, threading.get_ident())
        self._waits = waits

    def __enter__(self) -> None:
        """Take the turn."""
        engine = self._engine
        if engine.size == 1:
            return
        if not engine.turn.acquire(False):
            raise self._refused(f"is in {engine.operation}")
        if engine.aloft and not self._waits and self._is_anothers():
            engine.turn.release()
            raise self._refused("has started a collective that is not yet waited for")
        engine.doing = self._doing

    def __exit__(self, *_: object) -> None:
        """Pass it on."""
        engine = self._engine
        if engine.size > 1:
            engine.doing = None
            engine.turn.release()

    def _is_anothers(self) -> bool:
        """Whether a thread of the user's has started something, and this is another one.

        Autograd's own threads work for one of the user's, which waits for them meanwhile.
        """
        me, starters = self._doing[2], set(self._engine.aloft.values())
        if starters == {me}:
            return False
        users = {t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
        return me in users and not (starters & users) <= {me}

    def _refused(self, does: str) -> ValueError:
        remedy = "give each thread a group of its own, or let one thread make all calls"
        got = f"{self._engine.description}, in which another thread {does}"
        return ValueError(message(self._doing[0], "group", got, "one that is used by one thread at a time", remedy))


def add_up(terms: Sequence[Tensor], out: Tensor) -> None:
    """out ← Σ terms, in their order; half precisions in the wider type.

    `out` may be one of the terms.
    """
    wide = WIDER.get(out.dtype, out.dtype)
    if wide != out.dtype or len(terms) == 1 or any(t is out for t in terms[2:]):
        total = terms[0].to(wide, copy=True)
        for t in terms[1:]:
            total += t
        out.copy_(total)
    else:
        torch.add(terms[0], terms[1], out=out)
        for t in terms[2:]:
            out += t


def even_sizes(numel: int, n: int) -> tuple[int, ...]:
    """Cut numel into n sizes as equal as they can be."""
    return tuple((numel + n - 1 - r) // n for r in range(n))  # without a branch: numel may be a symbol


def even_parts(row: Tensor, n: int) -> list[Tensor]:
    """Cut a row of numbers into n parts as equal as they can be."""
    return list(row.split_with_sizes(list(even_sizes(row.numel(), n))))


def done() -> None:
    """Wait for what is there."""
