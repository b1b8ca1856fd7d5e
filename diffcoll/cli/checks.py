"""The checks of `diffcoll verify`: what a rank measures for each row of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from diffcoll.cli.competitors import Adapter, CompetitorCall
from diffcoll.core.torch_private.release import COMPILES
from diffcoll.testing import cases
from diffcoll.testing.cases import Case, Measured, errors

#: Timeouts in seconds: for the checks of one collective, and for compiling all.
TIMEOUT, TIMEOUT_COMPILED = 60.0, 300.0
NOT_OFFERED = "not offered"
#: The result of one system on one call: errors by name, or the reason why there are none.
Errors = dict[str, float] | str


@dataclass(frozen=True)
class Check:
    """One row of the table: calls of one collective, and how a rank measures them."""

    collective: str
    call: str
    world_size: int
    #: The calls' numbers in the table of cases.
    numbers: tuple[int, ...]
    #: (check, rank, adapter, whether it is diffcoll's, seed) → errors
    measure: Callable[[Check, int, Adapter, bool, int], Errors]

    def offered(self, adapter: Adapter, rank: int) -> list[tuple[int, Case, CompetitorCall]]:
        """Return the calls that a system offers, with their numbers."""
        table = _table(self.world_size)
        calls = [(number, table[number], adapter(table[number], rank)) for number in self.numbers]
        return [(number, case, call) for number, case, call in calls if call is not None]


def jobs(sizes: Sequence[int], names: Sequence[str]) -> Iterator[tuple[list[Check], float]]:
    """Yield the checks that ranks make in one go, with their timeout; compiled calls on the largest number of ranks.

    Every rank compiles for itself, which takes most of the time of a run.
    """
    for n in sizes:
        for name in names:
            own = {number: case for number, case in enumerate(_table(n)) if case.name == name}
            checks = [Check(name, case.label, n, (number,), _by_order) for number, case in own.items()]
            yield [*checks, Check(name, "jvp, all calls", n, _whole(n, name), _forward)], TIMEOUT
    if COMPILES:
        n = max(sizes)
        yield [Check(name, "compiled, all calls", n, _whole(n, name), _compiled) for name in names], TIMEOUT_COMPILED


def _whole(n: int, name: str) -> tuple[int, ...]:
    """Return the numbers of the calls with an x on every rank; others cannot be transformed."""
    return tuple(i for i, case in enumerate(_table(n)) if case.name == name and None not in case.shapes)


def _by_order(check: Check, rank: int, adapter: Adapter, ours: bool, seed: int) -> Errors:
    """Measure a call in reverse mode."""
    return worst(
        [
            errors(cases.on_rank(case, rank, seed, call), _reference(check.world_size, number, seed), rank)
            for number, case, call in check.offered(adapter, rank)
        ]
    )


def _forward(check: Check, rank: int, adapter: Adapter, ours: bool, seed: int) -> Errors:
    """Measure calls in forward mode."""
    return worst(
        [
            errors(cases.tangent_on_rank(case, rank, seed, call), cases.tangents_in_truth(case, seed), rank)
            for _, case, call in check.offered(adapter, rank)
        ]
    )


def _compiled(check: Check, rank: int, adapter: Adapter, ours: bool, seed: int) -> Errors:
    """Measure calls that are compiled in one graph; of PyTorch's own only the sums."""
    offered = [entry for entry in check.offered(adapter, rank) if ours or "op" not in entry[1].arguments]
    found: list[Errors] = []
    for numbers_alone in (False, True):  # torch.compile traces a graph twice that has a 0-d float64 input
        graph = [entry for entry in offered if (() in entry[1].shapes) == numbers_alone]
        if graph:
            torch.compiler.reset()

            def program(xs: list[torch.Tensor], graph: Any = graph) -> list[torch.Tensor]:
                return [call(x) for (_, _, call), x in zip(graph, xs, strict=True)]

            # Loops instead of vectors: the C++ compiler takes a fifth of the time.
            function: Any = torch.compile(program, fullgraph=True, options={"cpp.simdlen": 1})
            measured = cases.together_on_rank([case for _, case, _ in graph], rank, seed, function)
            for (number, _, _), m in zip(graph, measured, strict=True):
                found.append(errors(m, _reference(check.world_size, number, seed), rank))
    return worst(found)


@cache
def _table(n: int) -> list[Case]:
    return cases.table(n)


@cache
def _reference(n: int, number: int, seed: int) -> list[Measured]:
    """Return what all ranks should measure, computed once in each process."""
    return cases.in_truth(_table(n)[number], seed)


def worst(outcomes: Sequence[Errors]) -> Errors:
    """Return one outcome for several: the largest errors, or a reason if one failed."""
    offered = [o for o in outcomes if o != NOT_OFFERED] or [NOT_OFFERED]
    words = [o for o in offered if isinstance(o, str)]
    numbers = [o for o in offered if isinstance(o, dict)]
    return words[0] if words else {key: max(o[key] for o in numbers) for key in numbers[0]}
