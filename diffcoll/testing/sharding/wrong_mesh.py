"""What can be measured of a wrong run of a sharded program: experiments on the program, and on its submodules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.testing.harness.comparison import Quantity
from diffcoll.testing.harness.cuts import Cuts, GraphCuts
from diffcoll.testing.harness.measure import differentiable, undetached
from diffcoll.testing.harness.packing import Packed
from diffcoll.testing.harness.parts import named_tensors
from diffcoll.testing.harness.report import First
from diffcoll.testing.harness.runs import ComparedRun, WrongMatch
from diffcoll.testing.sharding.placements import SHARD
from diffcoll.testing.sharding.program import Sharding, reduced
from diffcoll.testing.sharding.rank import (
    MeshPlan,
    OfRank,
    Piece,
    modules_by_name,
    on_mesh,
    outputs_on_mesh,
    trace_of_one,
)
from diffcoll.testing.sharding.trace import Change, Trace, first_difference, suspects


class WrongMesh(WrongMatch):
    """A wrong run of a sharded program."""

    reference = "that of one process"
    check: Sharding

    def __init__(self, sharding: Sharding, run: ComparedRun) -> None:
        (self.mesh,), self.reduction = run.setting, sharding.rank_reduction
        distributed, parts = [sharding.distributed] * self.mesh.size, sharding.parts(self.mesh)
        super().__init__(sharding, run, "", (distributed, sharding.single, parts, sharding.whole_batch))
        got = [[piece.got for piece in rank.pieces if differentiable(piece.got)] for rank in run.measured]
        self.not_finite = [r for r, each in enumerate(got) if not all(x.isfinite().all() for x in each)]
        self._plan = sharding.plan_of(run.on, self.mesh)
        #: What each rank has, before anything is reduced: by name and rank.
        self.pieces: dict[str, dict[int, Piece]] = {}
        for r, rank in enumerate(run.measured):
            for piece in rank.pieces:
                self.pieces.setdefault(piece.what, {})[r] = piece
        of_ranks = [_counts(named_tensors(sharding.fn, part)) for part in self.parts]
        whole = _counts(sharding.inputs)
        #: Numbers of each rank that a loss may divide by: rows of an input, ones of a mask, labels of a batch.
        self.counts = {name: [each[name] for each in of_ranks] for name in whole}
        elements = {name: x.numel() for name, x in sharding.inputs.items()}
        ones = {name: k / elements[name.split(" of ", 1)[1]] for name, k in whole.items() if "rows" not in name}
        #: The part of the whole's elements that these counts are.
        self.shares = {name: share for name, share in ones.items() if 0 < share < 1}

    @cached_property
    def cuts(self) -> Cuts:
        """Where tensors leave the graph of a forward."""
        return Cuts.of_all(self.on_ranks(_cuts, self._plan))

    @override
    def undetached(self) -> list[Quantity]:
        ranks = self.on_ranks(partial(undetached, on_mesh), self._plan)
        return reduced([rank.pieces for rank in ranks], self._plan, self.tolerance)

    def inputs_along(self, axes: Sequence[str]) -> set[str]:
        """Return the gradients of the inputs that are spread over one of these axes."""
        each = ((name, next(iter(pieces.values()))) for name, pieces in self.pieces.items())
        return {name for name, piece in each if piece.of_input and any(piece.kinds[axis] == SHARD for axis in axes)}

    # ── submodules ──

    @cached_property
    def _traces(self) -> tuple[Trace, list[Trace]]:
        whole = self.check.on_one(trace_of_one, self.single, self.check.plan, self.whole)
        ranks: list[OfRank] = self.on_ranks(on_mesh, replace(self._plan, traced=True))
        return whole, [rank.trace for rank in ranks]

    @cached_property
    def _functions(self) -> list[Callable[..., Any]]:
        """The functions among the placements."""
        each = [
            p
            for said in self.check.placements.values()
            for p in (said.values() if isinstance(said, Mapping) else [said])
        ]
        return [p for p in each if callable(p)]

    @cached_property
    def first(self) -> First:
        """The first submodules whose output and whose gradient differ."""
        with contextlib.suppress(Exception):  # a program that does not bear being watched has no such line
            whole, ranks = self._traces
            means = [self.mesh.sizes[axis] for axis, how in self.reduction.items() if how == "mean"]
            factors = (1.0, float(torch.tensor(means).prod())) if means else (1.0,)
            outputs, gradients = [trace.outputs for trace in ranks], [trace.gradients for trace in ranks]
            return First(
                first_difference(whole.outputs, outputs, self.mesh, self._functions),
                first_difference(whole.gradients, gradients, self.mesh, self._functions, factors),
            )
        return First()

    @cached_property
    def change(self) -> Change | None:
        """The experiment after which all outputs are right."""
        if self.first.output is None:
            return None
        whole, ranks = self._traces
        names = suspects(self.first.output, whole.outputs, [t.outputs for t in ranks], self.mesh, self._functions)
        names = [name for name in names if all(name in t.outputs for t in ranks)]  # else a sum over an axis would wait
        modules = modules_by_name(self.single.unpack())
        for name in names[-_MOST:]:
            for change in _changes(name, modules.get(name), whole.outputs[name], self.mesh.sizes):
                if self._is_right(change):
                    return change
        return None

    def _is_right(self, change: Change) -> bool:
        with contextlib.suppress(Exception):
            ranks = self.on_ranks(outputs_on_mesh, self._plan, change)
            return all(q.ok for q in reduced(ranks, self._plan, self.tolerance))
        return False


#: How many submodules experiments are made on.
_MOST = 4


def _changes(name: str, module: Any, y: Tensor, sizes: Mapping[str, int]) -> Iterator[Change]:
    own = {} if module is None else dict(module.named_parameters(recurse=False))
    added = [each for each, p in own.items() if p.dim() == 1 and y.dim() and len(p) == y.shape[-1]]
    for axis in [axis for axis, n in sizes.items() if n > 1]:
        yield Change(name, axis, summed=True)
        for each in added:
            yield Change(name, axis, summed=True, added=each)
            yield Change(name, axis, added=each)
        yield Change(name, axis, divided=True)


def _counts(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the numbers of a rank's part that a loss may divide by."""
    found = {}
    for name, x in tensors.items():
        if x.dim():
            found[f"the rows of {name}"] = len(x)
        if bool(((x == 0) | (x == 1)).all()):  # a mask
            found[f"the ones of {name}"] = int((x != 0).sum())
        if not differentiable(x) and x.dtype != torch.bool:
            found[f"the labels of {name}"] = int((x >= 0).sum())
    return found


def _cuts(packed: Packed, plan: MeshPlan, rank: int, part: Any) -> Cuts:
    """Run this rank, and return its graph cuts."""
    with GraphCuts() as cuts:
        on_mesh(packed, plan, rank, part)
    return cuts.found
