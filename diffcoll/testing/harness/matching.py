"""Runs distributed code and its counterpart on one process, and finds out why they differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diffcoll.core.errors import message
from diffcoll.core.torch_private.trees import tree_flatten
from diffcoll.testing.harness.case import Case, Witness
from diffcoll.testing.harness.comparison import (
    Names,
    Run,
    compare,
    in_doubt,
    largest_errors,
    nothing_compared,
    rows_of,
    unused,
    with_noise,
)
from diffcoll.testing.harness.cuts import Cuts, GraphCuts, Undetached
from diffcoll.testing.harness.differences import directions, losses_along, partials, size
from diffcoll.testing.harness.evidence import Evidence
from diffcoll.testing.harness.measure import (
    Measurement,
    MeasurementPlan,
    differentiable,
    input_names,
    leaves_of,
    on_rank,
    run_on,
    with_leaves,
)
from diffcoll.testing.harness.packing import Packed
from diffcoll.testing.harness.parts import hides_tensors, joined, marked, refuse_equal_ranks, rolled, split
from diffcoll.testing.processes import in_words

#: Random directions of each tensor along which finite differences are taken for the diagnosis.
_DIRECTIONS = 4


@dataclass(frozen=True)
class Matching:
    """Distributed code, the same on one process, and how they are compared."""

    name: str
    distributed: Packed
    single: Packed
    batch: Any
    rank_reduction: str
    plan: MeasurementPlan
    timeout: float
    #: Names of arguments without gradients.
    constant: Sequence[str] = ()
    groups: Sequence[str] = Run.groups
    #: The largest relative error that is right.
    tolerance: float = 0.0
    #: The batch by its number of rows: a function is called once for each.
    _wholes: dict[int, Any] = field(default_factory=dict)

    def run(self, on: str, sizes: tuple[int, ...]) -> Run:
        """Measure on ranks with these numbers of rows, and on one process."""
        n, whole = len(sizes), self.whole(sizes)
        parts = split(whole, sizes)
        refuse_equal_ranks(self.name, "batch", parts)
        measured: list[Measurement] = self.on(
            on, on_rank, [self.distributed] * n, [self.plan_of(n)] * n, range(n), parts
        )
        count = len(measured[0].outputs)
        if any(len(m.outputs) != count for m in measured):
            counts = [len(m.outputs) for m in measured]
            raise ValueError(f"{self.name}: distributed: returned {counts} outputs on the ranks, expected equally many")
        of_one = replace(self.plan, outputs=rows_of(measured), inputs=sizes)
        reference: Measurement
        (reference,) = self.on("simulated", on_rank, [self.single], [of_one], [0], [whole])
        if reference.first.parameters and not any(g.any() for g in reference.first.parameters):
            raise unused(self.name, "single")
        self._refuse_nothing_to_compare(reference, sizes)
        kinds = {y.dim() == 0 for y in reference.outputs if differentiable(y)}
        if self.rank_reduction == "any" and len(kinds) > 1:
            got = '"any" for a loss and outputs with rows together'
            raise ValueError(message(self.name, "rank_reduction", got, '"mean" or "sum"'))
        quantities = compare(measured, reference, sizes, self.names(sizes), self.tolerance)
        if not any(q.group in self.groups for q in quantities):
            raise nothing_compared(self.name, self.groups)
        run = Run(on, sizes, quantities, measured, reference, self.groups, any_value=self.rank_reduction == "any")
        if self.rank_reduction != "any" and (doubtful := in_doubt(run.under(self.rank_reduction))):
            run = replace(run, quantities=with_noise(quantities, doubtful, self.noise(run, reference)))
        return run

    def noise(self, run: Run, reference: Measurement) -> dict[str, float]:
        """Return by how much each quantity changes on one process with the last digits of inputs and parameters."""
        plan = replace(self.plan, outputs=rows_of(run.measured), inputs=run.sizes, jitter=True)
        (found,) = self.on("simulated", on_rank, [self.single], [plan], [0], [self.whole(run.sizes)])
        return largest_errors(compare([found], reference, (sum(run.sizes),), self.names(run.sizes), self.tolerance))

    def _refuse_nothing_to_compare(self, reference: Measurement, sizes: tuple[int, ...]) -> None:
        """Raise if there is no number to compare with. Outputs with rows may have infinities, such as masked logits."""
        names = self.names(sizes)
        named = [(f"value[{i}]", y) for i, y in enumerate(reference.outputs) if y.dim() == 0]
        for what, found in (("gradient of", reference.first), ("second order of", reference.second)):
            if found is not None:
                each = zip(names.inputs + names.parameters, found.inputs + found.parameters, strict=True)
                named += [(f"{what} {name}", g) for name, g in each]
        if not any(g.any() for g in reference.first.inputs + reference.first.parameters):
            got, remedy = "gradients that are all zero", "remove detach() and no_grad, or choose other data"
            raise ValueError(message(self.name, "single", got, "a result with a gradient to compare with", remedy))
        bad = [what for what, x in named if not x.isfinite().all()]
        if bad:
            got = f"NaN or infinity in {', '.join(bad)}"
            raise ValueError(message(self.name, "single", got, "finite numbers to compare with", "choose other data"))

    def attempt(self, on: str, sizes: tuple[int, ...]) -> Run:
        """Do the same, and keep the error if one is raised."""
        try:
            return self.run(on, sizes)
        except Exception as error:
            return Run(on, sizes, [], [], None, raised=in_words(error))

    def whole(self, sizes: Sequence[int]) -> Any:
        """Return the batch with the rows of all ranks."""
        total = sum(sizes)
        if total in self._wholes:
            return self._wholes[total]
        whole = self.batch(total) if callable(self.batch) else self.batch
        tensors = [leaf for leaf in tree_flatten(whole)[0] if isinstance(leaf, Tensor)]
        expected = f"tensors with {total} rows, the sum of sizes={tuple(sizes)}"
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
                remedy = "pass other sizes, or the batch as a function of its number of rows"
                raise ValueError(message(self.name, "batch", f"a tensor with {len(t)} rows", expected, remedy))
        self._wholes[total] = marked(self.name, self.distributed.unpack().fn, whole, self.constant)
        return self._wholes[total]

    def names(self, sizes: Sequence[int]) -> Names:
        """Return the names of the tensors that are compared."""
        subject = self.distributed.unpack()
        names = input_names(subject.fn, self.whole(sizes))
        return Names(names, list(subject.parameters), subject.state)

    def with_losses(self, sizes: Sequence[int]) -> Matching:
        """Take results of shape (1,) as losses, where one process has more rows than one."""
        (found,) = self.on("simulated", _outputs, [self.single], [self.whole(sizes)])
        losses = tuple(i for i, y in enumerate(found) if y.shape == (1,) and sum(sizes) > 1)
        distributed, single = (replace(packed, losses=losses) for packed in (self.distributed, self.single))
        return replace(self, distributed=distributed, single=single)

    def plan_of(self, n: int) -> MeasurementPlan:
        """Return what n ranks measure."""
        return replace(self.plan, scale=float(n) if self.rank_reduction == "mean" else 1.0)

    def case(self, run: Run, rank_reduction: str) -> Case:
        """Return a wrong run for the diagnosis, with the graph cuts of its forward, which runs again."""
        witness = _OneProcess(self, run, rank_reduction)
        cuts = Cuts.of_all(self.on(run.on, cuts_on_rank, [self.distributed] * len(run.sizes), witness.parts))
        witness.seen = cuts.seen
        bad = [r for r, m in enumerate(run.measured) if not all(y.isfinite().all() for y in m.outputs)]
        values = replace(run, groups=("value", "output")).under(rank_reduction)
        other = any(not q.ok for q in values)
        return Case(run.under(rank_reduction), run.sizes, rank_reduction, self.tolerance, bad, other, cuts, witness)

    def on(self, kind: str, fn: Callable[..., Any], *per_rank: Sequence[Any]) -> list[Any]:
        """Run fn once per rank on one kind of ranks."""
        return run_on(kind, fn, *per_rank, seed=self.plan.seed, timeout=self.timeout)


class _OneProcess(Witness):
    """Measures more of a run that differs from one process."""

    def __init__(self, matching: Matching, run: Run, rank_reduction: str) -> None:
        assert run.reference is not None
        self._matching, self._run, self._rank_reduction, self._reference = matching, run, rank_reduction, run.reference
        self._size, self._whole = len(run.sizes), matching.whole(run.sizes)
        self._names = matching.names(run.sizes)
        self.parts = split(self._whole, run.sizes)
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
            (one,) = matching.on("simulated", undetached, [matching.single], [plan], [0], [self._whole])
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
            run_on("simulated", _outputs, [matching.single], [self._whole], seed=s, timeout=matching.timeout)[0]
            for s in (seed, seed + 1)
        )
        return not _close([a], [b])

    @cached_property
    def local_statistics(self) -> str | None:
        """Whether the distributed code takes statistics of each rank's rows alone, in words; None: it does not.

        Either each rank returns what one process returns for the rank's rows alone, or what is wrong with equally many
        rows on all ranks is right as soon as all ranks have the same rows, each in another order.
        """
        run, matching, n = self._run, self._matching, self._size
        wrong = {
            q.what for q in run.under(self._rank_reduction) if not q.ok and q.group in ("value", "output", "state")
        }
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
            first = self.parts[0]
            parts = [rolled(first, r) for r in range(n)]
            together = matching.on("simulated", on_rank, [matching.distributed] * n, [plan] * n, range(n), parts)
            of_one = replace(of_one, outputs=rows_of(together), inputs=run.sizes)
            (one,) = matching.on("simulated", on_rank, [matching.single], [of_one], [0], [joined(parts)])
            again = replace(run, quantities=compare(together, one, run.sizes, self._names, matching.tolerance))
        except Exception:
            return None
        if any(all(q.ok for q in again.under(kind) if q.what in wrong) for kind in ("mean", "sum")):
            return "right if all ranks have the same rows, wrong if they differ"
        return None

    def _on_ranks(self, fn: Callable[..., Any], *per_rank: Sequence[Any]) -> list[Any]:
        return self._matching.on(self._run.on, fn, [self._matching.distributed] * self._size, *per_rank)


def cuts_on_rank(packed: Packed, part: Any) -> Cuts:
    """Run the forward on this rank, and return its graph cuts."""
    subject = packed.unpack()
    with torch.inference_mode(False), torch.enable_grad(), GraphCuts() as cuts:
        subject.call(with_leaves(part, leaves_of(part)))
    return cuts.found


def undetached(packed: Packed, plan: MeasurementPlan, rank: int, part: Any) -> Measurement:
    """Measure on this rank, where the user's calls of `detach()` keep the graph."""
    with Undetached():
        return on_rank(packed, plan, rank, part)


def _outputs(packed: Packed, part: Any) -> list[Tensor]:
    """Run the forward on this rank."""
    with torch.inference_mode(False), torch.enable_grad():
        return [y.detach() for y in packed.unpack().call(with_leaves(part, leaves_of(part)))]


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
