"""Runs distributed code and its counterpart on one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.core.errors import message
from diffcoll.core.trees import tree_flatten
from diffcoll.testing.harness.comparison import Names, compare, largest_errors, rows_of, unused
from diffcoll.testing.harness.measure import Measurement, MeasurementPlan, differentiable, on_rank
from diffcoll.testing.harness.packing import Packed
from diffcoll.testing.harness.parts import hides_tensors, input_names, marked, refuse_equal_ranks, split
from diffcoll.testing.harness.runs import Against, ComparedRun


@dataclass(frozen=True)
class Matching(Against):
    """Distributed code whose ranks have rows of the batch, and the same on one process."""

    #: How many steps the batch holds the rows of.
    steps: int = 1
    #: The batch by its number of rows: a function is called once for each.
    _wholes: dict[int, Any] = field(default_factory=dict)

    def run(self, on: str, sizes: tuple[int, ...], step: int = 0) -> ComparedRun:
        """Measure on ranks with these numbers of rows, and on one process, after so many steps before."""
        distributed, single, parts, whole = self.at(sizes, step)
        refuse_equal_ranks(self.name, "batch", parts, in_any_order=True)
        measured: list[Measurement] = self.on_parts(on, on_rank, distributed, parts, self.plan_of(len(sizes)))
        count = len(measured[0].outputs)
        if any(len(m.outputs) != count for m in measured):
            counts = [len(m.outputs) for m in measured]
            raise ValueError(f"{self.name}: distributed: returned {counts} outputs on the ranks, expected equally many")
        of_one = replace(self.plan, outputs=rows_of(measured), inputs=sizes)
        reference: Measurement = self.on_one(on_rank, single, of_one, 0, whole)
        is_last = step + 1 == self.steps  # what the first calls do not use, the following may
        if is_last and reference.first.parameters and not any(g.any() for g in reference.first.parameters):
            raise unused(self.name, "single")
        self._refuse_nothing_to_compare(reference, sizes, is_last)
        kinds = {y.dim() == 0 for y in reference.outputs if differentiable(y)}
        if self.rank_reduction == "any" and len(kinds) > 1:
            got = '"any" for a loss and outputs with rows together'
            raise ValueError(message(self.name, "rank_reduction", got, '"mean" or "sum"'))
        quantities = compare(measured, reference, sizes, self.names(sizes), self.tolerance)
        results = {"quantities": quantities, "measured": measured, "reference": reference}
        return self.judged(self.of_results(on, sizes, step, **results))

    def of_results(self, on: str, sizes: tuple[int, ...], step: int = 0, **results: Any) -> ComparedRun:
        """Return a run with these results."""
        what = f"rows {', '.join(map(str, sizes))}" + (f", step {step + 1}" if step else "")
        any_value = self.rank_reduction == "any"
        return ComparedRun(on, (sizes, step), len(sizes), what, groups=self.groups, any_value=any_value, **results)

    @override
    def is_right(self, run: ComparedRun) -> bool:
        asked = ("mean", "sum") if self.rank_reduction == "any" else (self.rank_reduction,)
        return any(run.ok(each) for each in asked)

    @override
    def noise(self, run: ComparedRun) -> dict[str, float]:
        plan = replace(self.plan, outputs=rows_of(run.measured), inputs=run.sizes, jitter=True)
        _, single, _, whole = self.at(run.sizes, run.step)
        found = self.on_one(on_rank, single, plan, 0, whole)
        assert run.reference is not None
        return largest_errors(compare([found], run.reference, (sum(run.sizes),), self.names(run.sizes), self.tolerance))

    def _refuse_nothing_to_compare(self, reference: Measurement, sizes: tuple[int, ...], is_last: bool) -> None:
        """Raise if there is no number to compare with. Outputs with rows may have infinities, such as masked logits."""
        names = self.names(sizes)
        named = [(f"value[{i}]", y) for i, y in enumerate(reference.outputs) if y.dim() == 0]
        for what, found in (("gradient of", reference.first), ("second order of", reference.second)):
            if found is not None:
                each = zip(names.inputs + names.parameters, found.every, strict=True)
                named += [(f"{what} {name}", g) for name, g in each]
        self.refuse_nothing(reference.first.every if is_last else [torch.ones(())], named)

    def at(self, sizes: tuple[int, ...], step: int) -> tuple[list[Packed], Packed, list[Any], Any]:
        """Return the function of each rank and that of one process after so many steps, and their rows of the next."""
        wholes = split(self.whole(sizes), [sum(sizes)] * self.steps)[: step + 1]
        *before, parts = (split(whole, sizes) for whole in wholes)
        each = zip(*before, strict=True) if before else [()] * len(sizes)
        distributed = [replace(self.distributed, before=tuple(earlier)) for earlier in each]
        return distributed, replace(self.single, before=tuple(wholes[:-1])), parts, wholes[-1]

    def whole(self, sizes: Sequence[int]) -> Any:
        """Return the batch with the rows of all ranks, in all steps."""
        total = self.steps * sum(sizes)
        if total in self._wholes:
            return self._wholes[total]
        whole = self.batch(total) if callable(self.batch) else self.batch
        tensors = [leaf for leaf in tree_flatten(whole)[0] if isinstance(leaf, Tensor)]
        expected = f"tensors with {total} rows, the sum of sizes={tuple(sizes)}"
        expected += f" for each of {self.steps} steps" * (self.steps > 1)
        for kind in {type(leaf) for leaf in tree_flatten(whole)[0] if hides_tensors(leaf)}:
            got, remedy = f"a {kind.__name__} with tensors inside", "use dict(…) or torch.utils._pytree's registration"
            raise ValueError(message(self.name, "batch", got, "a tree of tuples, lists, dicts and namedtuples", remedy))
        if not any(differentiable(t) for t in tensors) and not self.single.unpack().parameters:
            got = f"{len(tensors)} tensors, none with floating-point numbers"
            raise ValueError(message(self.name, "batch", got, "a tensor that can have a gradient, or a module"))
        for t in tensors:
            if t.dim() == 0:
                remedy = "pass parameters by module=, and other numbers as Python numbers"
                raise ValueError(message(self.name, "batch", "a 0-d tensor", expected, remedy))
            if len(t) != total:
                remedy = (
                    "pass other sizes, or the batch as a function of its number of rows; what has no row for each row "
                    "of the batch belongs in a closure, in module=, or, with mesh=, in placements="
                )
                raise ValueError(message(self.name, "batch", f"a tensor with {len(t)} rows", expected, remedy))
        steps = split(whole, [sum(sizes)] * self.steps)
        refuse_equal_ranks(self.name, "batch", steps, of="steps", first=1)
        self._wholes[total] = marked(self.name, self.distributed.unpack().fn, whole, self.constant)
        return self._wholes[total]

    def names(self, sizes: Sequence[int]) -> Names:
        """Return the names of the tensors that are compared."""
        subject = self.distributed.unpack()
        names = input_names(subject.fn, self.whole(sizes))
        return Names(names, list(subject.parameters), subject.state)

    def plan_of(self, n: int) -> MeasurementPlan:
        """Return what n ranks measure."""
        return replace(self.plan, scale=float(n) if self.rank_reduction == "mean" else 1.0)
