"""Messages and bytes of a collective, counted on simulated ranks whose engine has the default primitives.

These are messages between two ranks. A backend's own collectives, such as gloo's all_reduce, are not counted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from diffcoll.core.groups import resolve
from diffcoll.engines.engine import Blocks, Engine, Wait
from diffcoll.engines.simulated.engine import LocalEngine
from diffcoll.testing.cases import Case
from diffcoll.testing.simulate import simulate


class Traffic(NamedTuple):
    """What a collective sends in one direction, forward or backward."""

    #: Rounds of messages, each of which starts when the one before it has arrived.
    rounds: int
    #: Messages of the busiest rank of each round: sent or received, whichever are more; summed over the rounds.
    messages: int
    #: Bytes of the busiest rank of each round, likewise.
    nbytes: int


#: (messages, bytes) that one rank sends, and those that it receives, in one round.
Round = tuple[tuple[int, int], tuple[int, int]]


class Counting(LocalEngine):
    """A simulated group with the default primitives, which send messages between two ranks; counts them."""

    all_gather, broadcast, reduce = Engine.all_gather, Engine.broadcast, Engine.reduce
    reduce_scatter, all_reduce = Engine.reduce_scatter, Engine.all_reduce
    rounds: list[Round]
    at_most: int  # `small`

    def small(self, device: str) -> int:
        return self.at_most

    def exchange(self, sends: Blocks, recvs: Blocks, later: bool = False) -> Wait:
        self.rounds.append((self._count(sends), self._count(recvs)))
        return super().exchange(sends, recvs, later)

    def _count(self, blocks: Blocks) -> tuple[int, int]:
        sizes = [block.nbytes for s, block in enumerate(blocks) if s != self.rank and block is not None]
        return sum(map(bool, sizes)), sum(sizes)


def traffic(case: Case, small: int = 0) -> tuple[Traffic, Traffic]:
    """Return what a forward and a backward send where the library moves all data itself.

    Args:
        case: the call.
        small: the size in bytes up to which a reduction gathers x whole, see `Engine.small`.
    """

    def body(r: int) -> tuple[list[Round], list[Round]]:
        engine: Any = resolve(None, "benchmarks")
        engine.__class__, engine.at_most = Counting, small
        x = case.x(r, 0).requires_grad_()
        engine.rounds = []
        y = case.call(x, r)
        forward, engine.rounds = engine.rounds, []
        torch.autograd.grad(y, x, torch.ones_like(y))
        return forward, engine.rounds

    forward, backward = zip(*simulate(body, range(case.size)), strict=True)
    return _busiest(forward), _busiest(backward)


def bytes_sent(case: Case) -> int:
    """Return the bytes of the busiest rank of each round, in forward and backward."""
    return sum(direction.nbytes for direction in traffic(case))


def _busiest(ranks: tuple[list[Round], ...]) -> Traffic:
    """Every rank has the same rounds, since all make the same calls of the engine."""
    rounds = messages = nbytes = 0
    for of_ranks in zip(*ranks, strict=True):
        most, longest = (max(side[i] for of_rank in of_ranks for side in of_rank) for i in (0, 1))
        rounds, messages, nbytes = rounds + bool(most), messages + most, nbytes + longest
    return Traffic(rounds, messages, nbytes)
