"""`benchmarks ranks`: what one rank's host does in a call of many ranks, with an engine that moves nothing.

Time of Python and of PyTorch's own bookkeeping, forward and backward: what grows with N there limits the number of
ranks, whatever the network is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
from rich.table import Table
from torch import Tensor
from typing_extensions import override

import diffcoll
from diffcoll.core import groups
from diffcoll.engines.engine import Blocks, Wait, done
from diffcoll.engines.solo import SoloEngine

SIZES = (8, 64, 1024, 65536)

#: Calls with x of 4 numbers and z of one number for each rank.
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "all_reduce, sum": lambda x, z: diffcoll.all_reduce(x),
    "all_reduce, max": lambda x, z: diffcoll.all_reduce(z, "max"),
    "all_gather": lambda x, z: diffcoll.all_gather(x),
    "reduce_scatter": lambda x, z: diffcoll.reduce_scatter(z),
    "all_to_all": lambda x, z: diffcoll.all_to_all(z, 0, 0),
    "broadcast": lambda x, z: diffcoll.broadcast(x),
    "gather": lambda x, z: diffcoll.gather(x),
    "shift": lambda x, z: diffcoll.shift(x),
    "scan": lambda x, z: diffcoll.scan(x),
    "split": lambda x, z: diffcoll.split(z),
}


class _Mute(SoloEngine):
    """Rank 0 of a group whose messages are not sent; what should be received is what the memory had."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    @override
    def exchange(self, sends: Blocks, recvs: Blocks) -> Wait:
        return done

    @override
    def all_gather(self, x: Tensor | None, row: Tensor, counts: list[int]) -> Wait:
        return done

    @override
    def reduce_scatter(self, row: Tensor, counts: list[int], out: Tensor) -> Wait:
        return done

    @override
    def all_reduce(self, x: Tensor, y: Tensor) -> Wait:
        return done

    @override
    def broadcast(self, y: Tensor, src: int) -> Wait:
        return done

    @override
    def reduce(self, y: Tensor, dst: int) -> Wait:
        return done


def table(rounds: int) -> Table:
    """Return the median milliseconds of each call, forward and backward, for each number of ranks."""
    grid = Table(title=f"one rank's host, no messages: median ms of {rounds} calls, forward and backward")
    for name in ("", *(f"{n:,} ranks" for n in SIZES)):
        grid.add_column(name, justify="right" if name else "left")
    measured = [_times(n, rounds) for n in SIZES]
    for name in CALLS:
        grid.add_row(name, *(f"{times[name]:.2f}" for times in measured))
    return grid


def _times(n: int, rounds: int) -> dict[str, float]:
    with mock.patch.object(groups, "_solo", _Mute(n)):
        return {name: 1e3 * statistics.median(_timed(call, n) for _ in range(rounds)) for name, call in CALLS.items()}


def _timed(call: Callable[[Tensor, Tensor], Tensor], n: int) -> float:
    x, z = torch.ones(4, requires_grad=True), torch.ones(n, requires_grad=True)
    start = time.perf_counter()
    call(x, z).sum().backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - start
