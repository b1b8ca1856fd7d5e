"""Finds out why distributed code and its counterpart on one process differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diffcoll.testing.harness.case import Case, Witness
from diffcoll.testing.harness.comparison import Run, compare, largest_errors, rows_of
from diffcoll.testing.harness.cuts import Cuts
from diffcoll.testing.harness.differences import directions, losses_along, partials, size
from diffcoll.testing.harness.evidence import Evidence
from diffcoll.testing.harness.matching import Matching
from diffcoll.testing.harness.measure import (
    Measurement,
    cuts_on_rank,
    differentiable,
    leaves_of,
    on_rank,
    outputs_on_rank,
    run_on,
    undetached,
)
from diffcoll.testing.harness.parts import joined, rolled

#: Random directions of each tensor along which finite differences are taken for the diagnosis.
_DIRECTIONS = 4


def case_of(matching: Matching, run: Run, rank_reduction: str) -> Case:
    """Return a wrong run for the diagnosis, with the graph cuts of its forward, which runs again."""
    witness = _OneProcess(matching, run, rank_reduction)
    cuts = Cuts.of_all(matching.on(run.on, cuts_on_rank, witness.distributed, witness.parts))
    witness.seen = cuts.seen
    bad = [r for r, m in enumerate(run.measured) if not all(y.isfinite().all() for y in m.outputs)]
    values = replace(run, groups=("value", "output")).under(rank_reduction)
    other = any(not q.ok for q in values)
    return Case(run.under(rank_reduction), run.sizes, rank_reduction, matching.tolerance, bad, other, cuts, witness)


class _OneProcess(Witness):
    """Measures more of a run that differs from one process."""

    def __init__(self, matching: Matching, run: Run, rank_reduction: str) -> None:
        assert run.reference is not None
        self._matching, self._run, self._rank_reduction, self._reference = matching, run, rank_reduction, run.reference
        self._size = len(run.sizes)
        self.distributed, self._single, self.parts, self._whole = matching.at(run.sizes, run.step)
        self._names = matching.names(run.sizes)
        #: Names of the collectives that ran in the forward.
        self.seen: Sequence[str] = ()

    @cached_property
    def evidence(self) -> Evidence:
        """Finite differences of each rank's loss by each rank's tensors."""
        run, n = self._run, self._size
        parameters = list(self._matching.distributed.unpack().parameters.values())
        leaves = [leaves_of(part) + parameters for part in self.parts]
        each = directions(leaves, few=0, random=_DIRECTIONS if len(leaves[0]) < 20 else 1)
        losses = self._on_ranks(losses_along, [self._matching.plan_of(n)] * n, [each] * n, range(n), self.parts)
        found = partials(each, losses, [size(leaves[d.rank][d.leaf]) for d in each])
        gradients = [m.first.inputs + m.first.parameters for m in run.measured]
        return Evidence(run.sizes, self._names.inputs + self._names.parameters, gradients, found, self.seen)

    @cached_property
    def restored(self) -> set[str]:
        """The names of the gradients that are right if the user's calls of detach() keep the graph."""
        plan = replace(self._matching.plan_of(self._size), order=1)
        with contextlib.suppress(Exception):
            measured = self._on_ranks(undetached, [plan] * self._size, range(self._size), self.parts)
            return self._agree(measured, replace(self._reference, second=None))
        return set()

    @cached_property
    def unstopped(self) -> set[str]:
        """The names of the gradients that one process has too, if its calls of detach() keep the graph."""
        run, matching = self._run, self._matching
        plan = replace(matching.plan, order=1, outputs=rows_of(run.measured), inputs=run.sizes)
        with contextlib.suppress(Exception):
            (one,) = matching.on("simulated", undetached, [self._single], [plan], [0], [self._whole])
            return self._agree(run.measured, one)
        return set()

    def _agree(self, measured: Sequence[Measurement], reference: Measurement) -> set[str]:
        """Return the names of what agrees on all ranks."""
        run = self._run
        quantities = compare(measured, reference, run.sizes, self._names, self._matching.tolerance)
        each = replace(run, quantities=quantities).under(self._rank_reduction)
        return {q.what for q in each} - {q.what for q in each if not q.ok}

    @cached_property
    def rounding(self) -> set[str]:
        """The names of what changes as much on one process with the last digits of inputs and parameters."""
        run = self._run
        least, errors = self._matching.noise(run, self._reference), largest_errors(run.under(self._rank_reduction))
        return {name for name, k in least.items() if k > max(self._matching.tolerance, 0.1 * errors.get(name, 0.0))}

    @cached_property
    def is_random(self) -> bool:
        """Whether one process gets other results with another seed."""
        matching, seed = self._matching, self._matching.plan.seed
        a, b = (
            run_on("simulated", outputs_on_rank, [self._single], [self._whole], seed=s, timeout=matching.timeout)[0]
            for s in (seed, seed + 1)
        )
        return not _close([a], [b])

    @cached_property
    def local_statistics(self) -> str | None:
        """Whether the distributed code takes statistics of each rank's rows alone, in words; None: it does not.

        Either each rank returns what one process returns for the rank's rows alone, or what is wrong with equally many
        rows on all ranks is right as soon as all ranks have the same rows, each in another order, and each rank's
        result is that of its own rows, wherever they are: with the ranks in reverse order it is the same.
        """
        run, matching, n = self._run, self._matching, self._size
        if run.step:
            return None
        quantities = run.under(self._rank_reduction)
        wrong = {q.what for q in quantities if not q.ok and q.group in ("value", "output", "state")}
        of_rows = [q for q in quantities if q.group == "gradient" and q.rank is not None]
        if (
            of_rows
            and all(q.ok for q in of_rows)
            and any(not q.ok for q in quantities if q.group in ("value", "output"))
        ):
            return None  # what is wrong does not depend on the rows, such as a penalty that every rank adds
        plan = replace(matching.plan_of(n), order=1)
        of_one = replace(matching.plan, order=1)
        try:
            alone = [
                matching.on("simulated", on_rank, [matching.single], [of_one], [0], [part])[0]
                for part, k in zip(self.parts, run.sizes, strict=True)
                if k
            ]
            busy = [m for m, k in zip(run.measured, run.sizes, strict=True) if k]
            if all(_same(mine, other, wrong) for mine, other in zip(busy, alone, strict=True)):
                return "each rank returns what one process returns for the rank's own rows"
            if not run.even:
                return None
            swapped = self._on_ranks(on_rank, [plan] * n, range(n), self.parts[::-1])
            if not all(_same(mine, other, wrong) for mine, other in zip(swapped[::-1], run.measured, strict=True)):
                return None
            first = self.parts[0]
            parts = [rolled(first, r) for r in range(n)]
            together = matching.on("simulated", on_rank, self.distributed, [plan] * n, range(n), parts)
            of_one = replace(of_one, outputs=rows_of(together), inputs=run.sizes)
            (one,) = matching.on("simulated", on_rank, [matching.single], [of_one], [0], [joined(parts)])
            again = replace(run, quantities=compare(together, one, run.sizes, self._names, matching.tolerance))
        except Exception:
            return None
        if any(all(q.ok for q in again.under(kind) if q.what in wrong) for kind in ("mean", "sum")):
            return "right if all ranks have the same rows, wrong if they differ"
        return None

    def _on_ranks(self, fn: Callable[..., Any], *per_rank: Sequence[Any]) -> list[Any]:
        return self._matching.on(self._run.on, fn, self.distributed, *per_rank)


def _same(mine: Measurement, other: Measurement, wrong: set[str]) -> bool:
    """Whether two measurements agree in these values, outputs and pieces of state."""
    named = [name for name in wrong if name in mine.state or name in other.state]
    if any(name not in each.state for name in named for each in (mine, other)):
        return False
    states = [[each.state[name] for name in named] for each in (mine, other)]
    return _close(states[:1], states[1:]) and (len(named) == len(wrong) or _close([mine.outputs], [other.outputs]))


def _close(got: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> bool:
    for mine, other in zip(got, expected, strict=True):
        for a, b in zip(mine, other, strict=True):
            eps = torch.finfo(b.dtype).eps if differentiable(b) else 0
            if a.shape != b.shape or not torch.allclose(a, b, rtol=eps ** (2 / 3) * 10, atol=eps ** (2 / 3)):
                return False
    return True
