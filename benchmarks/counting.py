"""Messages and bytes of a collective, counted on simulated ranks whose engine has the default primitives.

These are messages between two ranks. A backend's own collectives, such as gloo's all_reduce, are not counted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffcoll.core.groups import resolve
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


#: (messages, bytes) that one rank sends, and those that it receives, in one round.
_Round = tuple[tuple[int, int], tuple[int, int]]


class _Messages(LocalEngine):
    """A simulated group with the default primitives, which send messages between two ranks; counts them."""

    all_gather, broadcast, reduce = Engine.all_gather, Engine.broadcast, Engine.reduce
    reduce_scatter, all_reduce = Engine.reduce_scatter, Engine.all_reduce
    rounds: list[_Round]
    in_flight = 0
    at_most = 0  # `small`

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
        wait = super().exchange(sends, recvs, later)

        def finish() -> None:
            wait()
            self.in_flight -= 1

        return finish

    def _count(self, blocks: Blocks) -> tuple[int, int]:
        sizes = [block.nbytes for s, block in enumerate(blocks) if s != self.rank and block is not None]
        return sum(map(bool, sizes)), sum(sizes)


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
    return max(sum(sent[1] for rounds in directions for sent, _ in rounds) for directions in ranks)


def _counted(case: Case, small: int) -> list[tuple[list[_Round], list[_Round]]]:
    """Return the rounds of each rank, of forward and backward."""

    def body(r: int) -> tuple[list[_Round], list[_Round]]:
        engine = _Messages.here(small)
        x: Tensor = case.x(r, 0).requires_grad_()
        y = case.call(x, r)
        forward, engine.rounds = engine.rounds, []
        torch.autograd.grad(y, x, torch.ones_like(y))
        return forward, engine.rounds

    found: list[tuple[list[_Round], list[_Round]]] = simulate(body, range(case.size))
    return found


def _busiest(ranks: tuple[list[_Round], ...]) -> Traffic:
    """Every rank has the same rounds, since all make the same calls of the engine."""
    rounds = messages = nbytes = 0
    for of_ranks in zip(*ranks, strict=True):
        most, longest = (max(side[i] for of_rank in of_ranks for side in of_rank) for i in (0, 1))
        rounds, messages, nbytes = rounds + bool(most), messages + most, nbytes + longest
    return Traffic(rounds, messages, nbytes)
