"""`benchmarks simulate`: seconds that `diffcoll.testing.simulate` takes for many ranks, in both modes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor

import diffcoll
from diffcoll.testing.simulate import simulate


class Program(NamedTuple):
    """A loss of one rank, and for how many ranks it is measured."""

    name: str
    loss: Callable[[Tensor], Tensor]
    #: Shape of a rank's tensor.
    shape: tuple[int, ...]
    sizes: tuple[int, ...]


def _reduced(x: Tensor) -> Tensor:
    n = diffcoll.get_world_size()
    for _ in range(10):
        x = diffcoll.all_reduce(x) / n
    return x.sum()


def _info_nce(features: Tensor) -> Tensor:
    """Each row's positive is the same row of the second view; the sum over ranks is the mean over all rows."""
    query, key = features
    keys = diffcoll.all_gather(key)
    labels = torch.arange(len(query)) + len(query) * diffcoll.get_rank()
    return torch.nn.functional.cross_entropy(query @ keys.T, labels) / diffcoll.get_world_size()


PROGRAMS = [
    Program("10 all_reduces of 128 numbers", _reduced, (128,), (64, 128, 256)),
    Program("InfoNCE of 4 rows of 16", _info_nce, (2, 4, 16), (128, 256, 512)),
]


def table(rounds: int) -> Table:
    """Return a row for each program, number of ranks and mode."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have; the backward of a joint graph would use all cores for tiny operations
    try:
        return _filled(rounds)
    finally:
        torch.set_num_threads(threads)


def _filled(rounds: int) -> Table:
    grid = Table(title=f"simulate: median seconds of {rounds} runs, one thread for each operation")
    for column in ("program", "ranks", "mode", "forward", "forward + backward"):
        grid.add_column(column)
    for program in PROGRAMS:
        for n in program.sizes:
            for rules in (False, True):
                found = [seconds(program, n, rules, backward) for backward in (False, True) for _ in range(rounds)]
                times = [f"{statistics.median(part):.2f}" for part in (found[:rounds], found[rounds:])]
                grid.add_row(program.name, str(n), "rules" if rules else "truth", *times)
    return grid


def seconds(program: Program, n: int, rules: bool, backward: bool) -> float:
    """Return how long one simulation of a program takes on n ranks."""

    def body(x: Tensor) -> Tensor:
        loss = program.loss(x)
        if rules and backward:
            loss.backward()  # type: ignore[no-untyped-call]
        return loss

    xs = [torch.randn(program.shape, requires_grad=True) for _ in range(n)]
    start = time.perf_counter()
    losses = simulate(body, xs, rules=rules)
    if backward and not rules:
        torch.autograd.backward(losses)
    return time.perf_counter() - start
