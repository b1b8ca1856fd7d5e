"""Messages, bytes and copies of a collective, counted on simulated ranks whose engine has the default primitives.

These are messages between two ranks. A backend's own collectives, such as gloo's all_reduce, are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from diffcoll.core import moves
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.tracing import TorchDispatchMode
from diffcoll.engines.engine import Blocks, Engine, Wait
from diffcoll.engines.simulated.engine import LocalEngine
from diffcoll.testing.cases import Case
from diffcoll.testing.simulate import simulate


class Traffic(NamedTuple):
    """What a collective sends in one direction, forward or backward."""

    #: Rounds of messages, each of which starts when the one before it has arrived.
    rounds: float
    #: Messages of the busiest rank of each round: sent or received, whichever are more; summed over the rounds.
    messages: float
    #: Bytes of the busiest rank of each round, likewise.
    nbytes: float
    #: Bytes of local memory that the busiest rank reads and writes to copy and to add up; without those of `op`.
    local: float


#: (messages, bytes) that one rank sends, and those that it receives, in one round.
_Round = tuple[tuple[int, int], tuple[int, int]]


class _Messages(LocalEngine):
    """A simulated group with the default primitives, which send messages between two ranks; counts them."""

    all_gather, broadcast, reduce = Engine.all_gather, Engine.broadcast, Engine.reduce
    reduce_scatter, all_reduce = Engine.reduce_scatter, Engine.all_reduce
    rounds: list[_Round]
    in_flight = 0
    at_most = 0  # `small`
    dtype: torch.dtype  # of x
    copied = 0  # bytes of local memory, read and written
    delivers = False  # the copies that stand for messages are not local

    @classmethod
    def here(cls, small: int = 0) -> _Messages:
        """Replace this rank's engine."""
        engine: Any = resolve(None, "bench")
        engine.__class__ = cls
        engine.rounds, engine.at_most = [], small
        found: _Messages = engine
        return found

    def small(self, device: str) -> int:
        return self.at_most

    def exchange(self, sends: Blocks, recvs: Blocks, later: bool = False) -> Wait:
        sent, received = self._count(sends), self._count(recvs)
        if self.in_flight:  # in the same round as what this rank waits for
            before = self.rounds.pop()
            sent, received = _plus(before[0], sent), _plus(before[1], received)
        self.rounds.append((sent, received))
        self.in_flight += 1
        own, into = sends[self.rank], recvs[self.rank]
        if own is not None and into is not None and into is not own:
            self.copied += 2 * own.nbytes
        self.delivers = True
        wait = super().exchange(sends, recvs, later)
        self.delivers = False

        def finish() -> None:
            self.delivers = True
            wait()
            self.delivers = False
            self.in_flight -= 1

        return finish

    def _count(self, blocks: Blocks) -> tuple[int, int]:
        sizes = [block.nbytes for s, block in enumerate(blocks) if s != self.rank and block is not None]
        return sum(map(bool, sizes)), sum(sizes)


class _Copies(TorchDispatchMode):
    """Counts what is copied and added up on this rank, in the dtype of x: one read for each input, and the writes."""

    #: The functions that the library's own steps call.
    READING = ("clone", "_to_copy", "add", "add_")
    COUNTED = (*READING, "copy_", "zeros_like", "new_zeros")

    def __init__(self, engine: _Messages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.engine = engine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in self.COUNTED and y.dtype == self.engine.dtype and not self.engine.delivers:
            inputs = [t for t in args if isinstance(t, Tensor)]
            read = inputs if name in self.READING else inputs[1:] if name == "copy_" else []
            self.engine.copied += y.nbytes + sum(t.nbytes for t in read)
        return y


_begin = moves._begin


def _begin_counted(f: Any, x: Tensor, later: bool = False) -> Callable[[], Tensor]:
    """Replace `moves._begin`: modes see nothing inside a collective, so the copies there need one of their own."""
    with _Copies(f.engine):
        wait = _begin(f, x, later)

    def finish() -> Tensor:
        with _Copies(f.engine):
            return wait()

    return finish


def _plus(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] + b[0], a[1] + b[1]


def traffic(case: Case, small: int = 0) -> tuple[Traffic, Traffic]:
    """Return what a forward and a backward send where the library moves all data itself.

    Args:
        case: the call.
        small: the size in bytes up to which a reduction gathers x whole, see `Engine.small`.
    """
    forward, backward = zip(*_counted(case, small), strict=True)
    return _busiest(forward), _busiest(backward)


def bytes_sent(case: Case) -> int:
    """Return how many bytes the busiest rank sends in a forward and backward, where the library moves all itself."""
    ranks = _counted(case, 0)
    return max(sum(sent[1] for rounds, _ in directions for sent, _ in rounds) for directions in ranks)


#: The rounds of one rank in one direction, and the bytes that it copies.
_Counted = tuple[list[_Round], int]


def _counted(case: Case, small: int) -> list[tuple[_Counted, _Counted]]:
    """Return what each rank counts in forward and backward."""

    def body(r: int) -> tuple[_Counted, _Counted]:
        engine = _Messages.here(small)
        x: Tensor = case.x(r, 0).requires_grad_()
        engine.dtype = x.dtype
        with _Copies(engine):
            y = case.call(x, r)
        forward = engine.rounds, engine.copied
        engine.rounds, engine.copied = [], 0
        gy = torch.ones_like(y)
        with _Copies(engine):
            torch.autograd.grad(y, x, gy)
        return forward, (engine.rounds, engine.copied)

    with mock.patch.object(moves, "_begin", _begin_counted):
        found: list[tuple[_Counted, _Counted]] = simulate(body, range(case.size))
    return found


def _busiest(ranks: tuple[_Counted, ...]) -> Traffic:
    """Every rank has the same rounds, since all make the same calls of the engine."""
    rounds = messages = nbytes = 0
    for of_ranks in zip(*(rounds for rounds, _ in ranks), strict=True):
        most, longest = (max(side[i] for of_rank in of_ranks for side in of_rank) for i in (0, 1))
        rounds, messages, nbytes = rounds + bool(most), messages + most, nbytes + longest
    return Traffic(rounds, messages, nbytes, max(copied for _, copied in ranks))


def memory_of_process(key: str) -> float:
    """Return one of this process's memory counts, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(key))
