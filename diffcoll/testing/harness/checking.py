"""Compares the gradients of every rank with finite differences of the sum of all ranks' losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from diffcoll.core.errors import message
from diffcoll.core.torch_private.autograd import nodes_of_graph
from diffcoll.testing.harness.causes import Kind, cause_of
from diffcoll.testing.harness.comparison import SMALL, multiple
from diffcoll.testing.harness.cuts import Cuts
from diffcoll.testing.harness.differences import (
    STEPS,
    Difference,
    along,
    central,
    directions,
    losses_along,
    partials,
    size,
    step,
)
from diffcoll.testing.harness.evidence import Evidence
from diffcoll.testing.harness.matching import cuts_on_rank, unused
from diffcoll.testing.harness.measure import (
    Gradients,
    Measurement,
    MeasurementPlan,
    leaves_of,
    objective,
    on_rank,
    run_on,
    with_leaves,
)
from diffcoll.testing.harness.packing import Packed
from diffcoll.testing.harness.report import Cause, Row, Table
from diffcoll.testing.simulate import simulate

#: All elements are moved one by one if the ranks have at most this many in all; else along random directions.
_FEW = 48
#: The relative error of a finite difference that is right.
_TOLERANCE = 1e-6
#: Gradients are not compared with finite differences whose relative error may be larger.
_PRECISE = 1e-2
#: A derivative smaller than this part of the largest one is compared with that part.
_SMALL = 1e-6


@dataclass
class Checking:
    """A function of each rank's tensors whose gradients are checked."""

    name: str
    packed: Packed
    parts: list[Any]
    #: Names of a rank's inputs, followed by those of its parameters.
    names: list[str]
    plan: MeasurementPlan
    timeout: float
    cuts: Cuts = field(default_factory=Cuts)
    tables: list[Table] = field(default_factory=list)
    #: The comparison with the joint graph of all ranks; None: it is no witness.
    joint: Table | None = None
    causes: list[Cause] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """N."""
        return len(self.parts)

    def look(self, on: str) -> None:
        """Run the forward and record the graph cuts."""
        self.cuts = Cuts.of_all(self._on(on, cuts_on_rank, self.parts))

    def check(self, on: str) -> None:
        """Check on one kind of ranks."""
        plan = replace(self.plan, lengths=self._lengths())
        measured: list[Measurement] = self._on(on, on_rank, range(self.size), self.parts, plan)
        parameters = list(self.packed.unpack().parameters.values())
        leaves = [leaves_of(part) + parameters for part in self.parts]
        each = directions(leaves, few=_FEW, random=2 if len(leaves[0]) < 20 else 1)
        losses = self._on(on, losses_along, [each] * self.size, range(self.size), self.parts, self.plan)
        found = partials(each, losses, lambda d: size(leaves[d.rank][d.leaf]))
        evidence = Evidence(
            (1,) * self.size, self.names, [m.first.inputs + m.first.parameters for m in measured], found, self.cuts.seen
        )
        self._refuse_unused(measured, found)
        if on == "simulated":
            self._joint_graph(measured)
        rows = list(self._rows(evidence))
        self._refuse_imprecise(rows)
        causes = list(self._causes(evidence, rows))
        if self.plan.order > 1:
            second = list(self._second(on, measured))
            if all(row.ok for row in rows) and not all(row.ok for row in second):
                wrong = ", ".join(dict.fromkeys(row.what for row in second if not row.ok))
                causes.append(cause_of(Kind.SECOND_ORDER, f"the first order is right, wrong is {wrong}"))
            rows += second
        self.tables.append(Table(f"{on}, {self.size} rank{'s' * (self.size != 1)}", self.size, tuple(rows)))
        if on == "simulated" and self.joint is not None:
            self.tables.append(self.joint)
            if not self.tables[0].ok and self.joint.ok and self.cuts.detached:
                words = "backward agrees with the joint graph of all ranks, and not with finite differences"
                causes = [cause_of(Kind.DETACHED, words)]
        self.causes += [cause for cause in causes if cause not in self.causes]

    def _refuse_unused(self, measured: Sequence[Measurement], found: Sequence[Difference]) -> None:
        """Raise if the losses depend on no tensor, or on no parameter of the module."""
        count = len(measured[0].first.inputs)
        every = [g for m in measured for g in m.first.inputs + m.first.parameters]
        if not any(g.any() for g in every) and not any(d.partials.any() for d in found):
            got, remedy = "results that depend on no tensor", "return the loss itself, not a number taken from it"
            raise ValueError(message(self.name, "fn", got, "a loss with a gradient to check", remedy))
        gradients = [g for m in measured for g in m.first.parameters]
        if gradients and not any(g.any() for g in gradients):
            if not any(d.partials.any() for d in found if d.direction.leaf >= count):
                raise unused(self.name, "fn")

    def _refuse_imprecise(self, rows: Sequence[Row]) -> None:
        """Raise if rounding hides derivatives, and no joint graph shows that the gradients are right."""
        hidden = [row.what for row in rows if row.allowed is not None and row.allowed > _PRECISE and row.ok]
        if hidden and (self.joint is None or not self.joint.ok):
            names = ", ".join(dict.fromkeys(hidden))
            got = f"a loss that is too large, or varies too fast, for finite differences of the {names}"
            remedy = "subtract constants, or use assert_matches_single_process"
            raise ValueError(message(self.name, "fn", got, "differences that rounding does not hide", remedy))

    # ── first order ──────────────────────────────────────────────────────────────────────────────────────

    def _rows(self, evidence: Evidence) -> Iterator[Row]:
        """Compare each tensor of each rank along its directions."""
        largest = max((abs(d.total) for d in evidence.differences), default=0.0)
        for leaf, name in enumerate(evidence.names):
            of_leaf = [d for d in evidence.differences if d.direction.leaf == leaf]
            unit = max([abs(d.total) for d in of_leaf] + [_SMALL * largest]) or 1.0
            for r in range(self.size):
                each = [d for d in of_leaf if d.direction.rank == r]
                got = [along(evidence.gradients[r][leaf], d.direction) for d in each]
                errors = [abs(g - d.total) / unit for g, d in zip(got, each, strict=True)]
                right = all(e <= _allowed(d, unit) for e, d in zip(errors, each, strict=True))
                allowed = None if any(d.kink for d in each) else max([_TOLERANCE, *(_allowed(d, unit) for d in each)])
                ratio = multiple(torch.tensor(got).double(), torch.tensor([d.total for d in each]).double(), 1e-7)
                yield Row(f"gradient of {name}", r, max(errors, default=0.0), ratio, right, allowed)

    def _causes(self, evidence: Evidence, rows: Sequence[Row]) -> Iterator[Cause]:
        found: dict[tuple[Kind, str], list[str]] = {}
        for name in dict.fromkeys(row.what for row in rows if not row.ok):
            short = name.removeprefix("gradient of ")
            found.setdefault(self._cause(evidence, short, [row for row in rows if row.what == name]), []).append(short)
        for (cause, seen), names in found.items():
            if cause in (Kind.WRONG_IN_DIRECTION, Kind.NO_CONTRIBUTION) and self.cuts.lines:
                cause = Kind.GRAPH_CUT
            yield cause_of(cause, f"{', '.join(names)}: {seen}")

    def _cause(self, evidence: Evidence, name: str, rows: Sequence[Row]) -> tuple[Kind, str]:
        leaf = evidence.names.index(name)
        each = [d for d in evidence.differences if d.direction.leaf == leaf]
        if any(d.kink for d in each):
            return Kind.KINK, "the sum of the losses is not differentiable here"
        none = [row.rank for row in rows if not row.ok and not evidence.gradients[row.rank or 0][leaf].any()]
        if none and all(row.ok or row.rank in none for row in rows):
            where = "every rank" if len(none) == self.size else f"rank {', '.join(map(str, none))}"
            return Kind.NO_CONTRIBUTION, f"the gradient is zero on {where}"
        found = evidence.cause(name)
        if found is None:
            ratios = {row.rank: row.ratio for row in rows if any(d.direction.rank == row.rank for d in each)}
            if all(ratio is not None for ratio in ratios.values()):
                words = ", ".join(f"{ratio:.4g} on rank {r}" for r, ratio in ratios.items())
                return Kind.SCALED_DIFFERENTLY, f"right in direction on each rank, off by {words}"
            return Kind.WRONG_IN_DIRECTION, "no multiple of the derivative of the sum of the losses"
        return (Kind.SCALED, found[1]) if found[0] == Kind.CONSISTENT else found

    def _lengths(self) -> tuple[float, ...]:
        """Return the size of each tensor, so that a step moves each by a small part of itself."""
        parameters = list(self.packed.unpack().parameters.values())
        leaves = [leaves_of(part) + parameters for part in self.parts]
        largest = [max(map(_largest, of_ranks)) for of_ranks in zip(*leaves, strict=True)]
        return tuple(max(x, 1e-5) if x else 1.0 for x in largest)

    # ── second order ─────────────────────────────────────────────────────────────────────────────────────

    def _second(self, on: str, measured: Sequence[Measurement]) -> Iterator[Row]:
        """Compare the Hessian-vector products with finite differences of the gradients."""
        h = step(torch.float64)
        plans = [replace(self.plan, order=1, move=k * h, lengths=self._lengths()) for k in STEPS]
        moved: list[list[Measurement]] = [self._on(on, on_rank, range(self.size), self.parts, plan) for plan in plans]
        count = len(measured[0].first.inputs)
        wanted = [
            Gradients(
                [central([m[r].first.inputs[i] for m in moved], h) for i in range(count)],
                [central([m[r].first.parameters[i] for m in moved], h) for i in range(len(self.names) - count)],
            )
            for r in range(self.size)
        ]
        got = [m.second for m in measured if m.second is not None]
        largest = max((_largest(x) for g in wanted for x in g.inputs + g.parameters), default=0.0)
        for i, name in enumerate(self.names):
            if i < count:
                pairs = [(r, got[r].inputs[i], wanted[r].inputs[i]) for r in range(self.size)]
            else:  # parameters are moved on all ranks together, so their derivatives are compared as sums
                sums = [torch.stack([g.parameters[i - count] for g in gs]).sum(0) for gs in (got, wanted)]
                pairs = [(-1, sums[0], sums[1])]
            unit = max([_largest(w) for _, _, w in pairs] + [SMALL * largest]) or 1.0
            for r, g, w in pairs:
                error = _largest(g - w) / unit
                yield Row(
                    f"second order of {name}", None if r < 0 else r, error, multiple(g, w, 1e-6), error <= 1e-5, 1e-5
                )

    # ── the joint graph ──────────────────────────────────────────────────────────────────────────────────

    def _joint_graph(self, measured: Sequence[Measurement]) -> None:
        """Compare with the gradients that PyTorch derives from the graph of all ranks, if the function allows it."""
        try:
            found = simulate(
                _in_truth, [self.packed] * self.size, [self.plan] * self.size, range(self.size), self.parts
            )
            total = torch.stack([loss for loss, _ in found]).sum()
            leaves = [leaf for _, leaves in found for leaf in leaves]
            own = [type(node).__name__ for node in nodes_of_graph(total) if isinstance(node, BackwardCFunction)]
            given = torch.autograd.grad(total, leaves, allow_unused=True)
        except Exception as error:
            first = str(error).strip().splitlines()
            self.notes.append(
                f"the joint graph of all ranks is no witness: {first[0] if first else type(error).__name__}"
            )
            return
        if own:
            self.notes.append(f"the joint graph of all ranks is no witness: it contains the backward of {own[0]}")
            return
        got = [objective(self.plan.weights(r, m.outputs), m.outputs) for r, m in enumerate(measured)]
        if not torch.allclose(torch.stack(got).sum(), total.detach(), rtol=1e-9, atol=1e-12):
            self.notes.append(
                "the joint graph of all ranks is no witness: it has another loss, so fn does not use diffcoll alone"
            )
            return
        rows, gradients = [], iter(given)
        wanted = [
            [g if g is not None else torch.zeros_like(x) for x, g in zip(xs, gradients, strict=False)]
            for _, xs in found
        ]
        largest = max((_largest(w) for ws in wanted for w in ws), default=0.0)
        for i, name in enumerate(self.names):
            unit = max([_largest(ws[i]) for ws in wanted] + [SMALL * largest]) or 1.0
            for r, m in enumerate(measured):
                mine = (m.first.inputs + m.first.parameters)[i]
                off = _largest(mine - wanted[r][i]) / unit
                rows.append(Row(f"gradient of {name}", r, off, multiple(mine, wanted[r][i], 1e-9), off <= 1e-9, 1e-9))
        self.joint = Table("the joint graph of all ranks", self.size, tuple(rows))

    def _on(self, on: str, fn: Callable[..., Any], *per_rank: Any) -> list[Any]:
        """Run fn on all ranks with the packed function and these arguments; a plan is passed to every rank."""
        *sequences, last = per_rank
        if isinstance(last, MeasurementPlan):
            sequences = [[last] * self.size, *sequences]
        else:
            sequences = [*sequences, last]
        return run_on(on, fn, [self.packed] * self.size, *sequences, seed=self.plan.seed, timeout=self.timeout)


def _in_truth(packed: Packed, plan: MeasurementPlan, rank: int, part: Any) -> tuple[Tensor, list[Tensor]]:
    """Return this rank's objective and the tensors it is differentiated by."""
    subject = packed.unpack()
    with torch.inference_mode(False), torch.enable_grad():
        inputs = leaves_of(part)
        outputs = subject.call(with_leaves(part, inputs))
        return objective(plan.weights(rank, outputs), outputs), inputs + list(subject.parameters.values())


def _allowed(difference: Difference, unit: float) -> float:
    """The error of a right gradient: rounding and the finite step. At a kink nothing is right."""
    return -1.0 if difference.kink else _TOLERANCE + (0.1 * difference.error + difference.rounding) / unit


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0
