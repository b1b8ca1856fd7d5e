"""Runs a program on ranks and on one process, and compares what they have."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from diffcoll.core.errors import message
from diffcoll.testing.harness.batch import Batch, refuse_unmoved
from diffcoll.testing.harness.compare import Asked, Quantity, Setting, quantities, with_losses_noted
from diffcoll.testing.harness.fill import Held, settled
from diffcoll.testing.harness.layout import Fit, Span, refuse_unknown, said_of, settled_output, spans
from diffcoll.testing.harness.mesh import NAME, RANKS, Ranks
from diffcoll.testing.harness.packing import Packed, Subject
from diffcoll.testing.harness.precision import SAMPLES, eps_of, least_precise, tolerance_of
from diffcoll.testing.harness.rank import (
    DIRECTIONS,
    Machines,
    Measured,
    Perturbed,
    Precision,
    Task,
    layout_on_rank,
    losses_along,
    measured,
    weight_of,
)
from diffcoll.testing.harness.report import Row, Table
from diffcoll.testing.numbers import differentiable, largest, near, numbers

#: Gradients and moves: what training depends on.
TRAINED = ("gradient", "move")


class OtherShape(Exception):
    """The outputs of the ranks are pieces of no tensor of the shape that one process returns."""

    def __init__(self, what: str, whole: Tensor, each: Sequence[Tensor]) -> None:
        self.what = what
        shapes = ", ".join(str(tuple(y.shape)) for y in each)
        super().__init__(f"{what}: shapes {shapes} on the ranks, {tuple(whole.shape)} on one process")


@dataclass(eq=False)
class Run:
    """The results of one run, or the error that was raised instead."""

    on: str
    ranks: Ranks
    tasks: Sequence[Task] = ()
    measured: Sequence[Measured] = ()
    quantities: list[Quantity] = field(default_factory=list)
    #: What compares other results of the ranks.
    compared: Callable[[Sequence[Measured]], list[Quantity]] = lambda each: []
    #: Whether every rank has a loss of its own, and the check calls backward.
    own_losses: bool = False
    setting: Setting | None = None
    error: Exception | None = None

    @cached_property
    def table(self) -> Table:
        """The table of the report."""
        rows, raised = [row for q in self.quantities for row in q.rows], ""
        if isinstance(self.error, OtherShape):
            rows = [Row(self.error.what, "all", math.inf, None, False, 0.0, mismatched=True)]
        elif self.error is not None:
            raised = f"{type(self.error).__name__}: {self.error}"
        n = self.ranks.size
        title = ", ".join(filter(None, (self.on, f"{n} rank{'s' * (n != 1)}", str(self.ranks))))
        precision = "" if self.setting is None else self.setting.precision
        return Table(title, n, tuple(rows), precision, raised)


@dataclass(eq=False)
class Check(ABC):
    """A program on ranks, and what its gradients are compared with."""

    machines: Machines
    distributed: Packed
    #: What reports begin with, and notes of a report that has graph cuts.
    name: ClassVar[str]
    notes_on_cuts: ClassVar[tuple[str, ...]] = ()

    @cached_property
    def subject(self) -> Subject:
        """A copy of the user's function and module, to look at."""
        return self.distributed.unpack()

    @cached_property
    def of_module(self) -> list[Span]:
        """The tensors of the whole module."""
        return [] if self.subject.module is None else spans(self.subject.module)

    def spans(self, batch: Batch) -> list[Span]:
        """Return the variables of a batch, followed by the tensors of the whole module."""
        return [*batch.spans(max((span.end for span in self.of_module), default=0)), *self.of_module]

    @abstractmethod
    def run(self, on: str, ranks: Ranks) -> Run:
        """Measure on the ranks, and compare."""

    @abstractmethod
    def depends(self, run: Run, q: Quantity) -> bool:
        """Whether a rank's loss depends on another rank's tensor, of whose gradient this is."""

    def on_ranks(self, on: str, tasks: Sequence[Task], fn: Callable[..., Any] = measured, *more: Sequence[Any]) -> Any:
        """Measure on the ranks."""
        return self.machines.run(on, fn, [self.distributed] * len(tasks), tasks, *more)


@dataclass(eq=False)
class Matching(Check):
    """A distributed program, the same on one process, and how they are compared."""

    name = NAME
    single: Packed
    asked: Asked
    _settings: dict[str, Setting] = field(default_factory=dict)

    # ── one process ──

    def on_one(self, part: Any, seed: int = 0, **more: Any) -> Measured:
        """Measure on one process; `more` are fields of the task."""
        found: list[Measured] = self.machines.run(
            "simulated", measured, [self.single], [Task(Ranks({RANKS: 1}), part, **more)], seed=seed
        )
        return found[0]

    def whole(self, batch: Batch, **more: Any) -> Measured:
        """Measure the whole batch on one process."""
        return self.on_one(batch.part(None), directions=self._directions(self.spans(batch)), **more)

    def _directions(self, each: Sequence[Span]) -> dict[int, Tensor]:
        """Return random directions of tensors of the whole, for second order."""
        tensors = {i: s.tensor for i, s in enumerate(each if self.asked.order > 1 else ()) if s.trained}
        return {i: numbers(tuple(x.shape), x.dtype, i, 0, DIRECTIONS) for i, x in tensors.items()}

    def batch(self, ranks: Ranks) -> Batch:
        """Return the whole batch."""
        tree = self.asked.batch
        if callable(tree) and not isinstance(tree, Tensor):
            if not ranks.rows:
                raise TypeError(message(NAME, "batch", "a function with a mesh", "the batch itself", "call it"))
            tree = tree(sum(ranks.rows))
        batch = Batch(self.subject, tree, self.asked.dtype, in_parts=bool(ranks.micro))
        if not batch.variables and not self.of_module:
            got = f"{len(batch.tensors)} tensors, none with floating-point numbers"
            raise ValueError(message(NAME, "batch", got, "a tensor that can have a gradient, or a module"))
        return batch

    def _refuse_nothing(self, spans: Sequence[Span], whole: Measured) -> None:
        """Raise if one process has nothing to compare with."""
        found = [(f"value{path}", y) for path, y in zip(whole.paths, whole.outputs, strict=True) if y.dim() == 0]
        found += [(f"gradient of {span.name}", g) for span, g in zip(spans, whole.gradients, strict=True)]
        if bad := [what for what, x in found if differentiable(x) and not x.isfinite().all()]:
            got = f"NaN or infinity in {', '.join(bad)}"
            raise ValueError(message(NAME, "single", got, "finite numbers to compare with", "choose other data"))
        changed = any(not torch.equal(a, b) for a, b in zip(whole.before, whole.state, strict=True))
        if not (whole.own_backward or changed or (whole.outputs and not any(whole.has_graph))):
            refuse_unmoved(NAME, "single", spans, [bool(g.any()) for g in whole.gradients])

    # ── ranks ──

    def setting(self, on: str, ranks: Ranks) -> Setting:
        """Return what each rank gets, found on this kind of ranks the first time."""
        if str(ranks) in self._settings:
            return self._settings[str(ranks)]
        asked, batch = self.asked, self.batch(ranks)
        index = batch.positions(ranks, asked.placements)
        reduction = self._reduction(ranks, index)
        whole, spans = self.whole(batch), self.spans(batch)
        self._refuse_nothing(spans, whole)
        outputs = ["output", *(f"output{path}" for path in whole.paths)]
        refuse_unknown(NAME, asked.placements, [*batch.tensors, *(span.name for span in self.of_module), *outputs])
        held, notes = self._held(on, ranks)
        written = [{h.name: h.write for h in mine if h.write is not None} for mine in held]
        parts = [batch.micro_batches(ranks, index, r) for r in range(ranks.size)]
        pairs = zip(parts, written, strict=True)
        tasks = [Task(ranks, batch.part(*each), write, whole.paths) for each, write in pairs]
        fits = self._outputs(on, ranks, whole, tasks)
        tolerance = asked.tolerance or tolerance_of(self.tensors(batch))
        inputs = [span for span in spans if span.kind == "input"]
        of_inputs = [[Held(s.name, s.start + part[s.name], True) for part in each for s in inputs] for each in parts]
        held = [[*given, *mine] for given, mine in zip(of_inputs, held, strict=True)]
        dtype = str(least_precise(self.tensors(batch))).removeprefix("torch.")
        words = f"{dtype}, tolerance {tolerance:.1g}"
        found = Setting(ranks, batch, index, whole, reduction, asked, fits, spans, held, notes, tolerance, words)
        tasks = [self._weighted(task, found, r) for r, task in enumerate(tasks)]
        return self._settings.setdefault(str(ranks), replace(found, tasks=tasks))

    def _reduction(self, ranks: Ranks, index: Mapping[str, list[Tensor]]) -> dict[str, str]:
        """Return how the losses of the ranks combine, by axis."""
        said = self.asked.losses
        found = {a: how for a, how in said.items() if a in ranks.sizes} if isinstance(said, Mapping) else {}
        if not isinstance(said, Mapping):
            split = {axis for each in index.values() for axis in ranks.split(each)}
            found = {axis: said for axis in ranks.sizes if ranks.rows or axis in split}
        others = [axis for axis in ranks.axes if axis not in found]
        if self.asked.order > 1 and others:
            got, expected = f"2 with ranks along {others[0]} that have the same loss", "1"
            raise ValueError(message(NAME, "order", got, expected))
        return found

    def _held(self, on: str, ranks: Ranks) -> tuple[list[list[Held]], list[str]]:
        """Return what each rank holds of the module."""
        n = ranks.size
        if self.subject.module is None or self.subject.shard is None:
            every = [(torch.arange(s.start, s.end).view(s.tensor.shape), s) for s in self.of_module]
            return [[Held(s.name, index, s.tensor.requires_grad, first=s.first) for index, s in every]] * n, []
        each, notes = ([self.distributed] * n, [ranks] * n), []
        try:
            held = self.machines.run(on, layout_on_rank, *each, [True] * n)
        except Exception as error:  # it may not bear such numbers, and then names and shapes have to say it
            held = self.machines.run(on, layout_on_rank, *each, [False] * n)
            notes = [f"shard raised {type(error).__name__} on other numbers: names and shapes say what it does"]
        found, more = settled(self.of_module, held, self.asked.placements, ranks)
        return found, notes + more

    def _outputs(self, on: str, ranks: Ranks, whole: Measured, tasks: Sequence[Task]) -> list[Fit]:
        """Return the positions of each output; a forward on the ranks shows the shapes of all but numbers."""
        number = Fit("", [torch.tensor(0)] * ranks.size)
        if all(y.dim() == 0 for y in whole.outputs):
            return [number] * len(whole.outputs)
        each = self.on_ranks(on, [replace(task, weights=[None] * len(whole.outputs), backward=False) for task in tasks])
        found = []
        for i, y in enumerate(whole.outputs):
            name, got = f"output{whole.paths[i]}", [m.outputs[i] for m in each]
            fit = settled_output(name, y, got, said_of(self.asked.placements, name), ranks) if y.dim() else number
            if fit is None:
                raise OtherShape(name, y, got)
            found.append(fit)
        return found

    def _weighted(self, task: Task, setting: Setting, r: int) -> Task:
        """Return the task with this rank's weights of the outputs, and directions of second order."""
        weights: list[Tensor | None] = []
        for i, fit in enumerate(setting.outputs):
            weight, index = weight_of(i, setting.whole.outputs), fit.index[r]
            split = setting.ranks.split([torch.arange(0) if j is None else j for j in fit.index])
            means = [setting.ranks.sizes[axis] for axis in split if setting.reduction.get(axis) == "mean"]
            weights.append(None if weight is None or index is None else math.prod(means) * weight.flatten()[index])
        return replace(task, weights=weights, directions=setting.along(self._directions(setting.spans), r))

    def run(self, on: str, ranks: Ranks) -> Run:
        """Measure on the ranks and on one process, and compare."""
        setting = self.setting(on, ranks)
        each = self.on_ranks(on, setting.tasks)
        for i, y in enumerate(setting.whole.outputs):
            of_ranks = [m.outputs[i] for m in each]
            if y.dim() == 0 and any(x.numel() != 1 for x in of_ranks):
                raise OtherShape(f"output{setting.whole.paths[i]}", y, of_ranks)
        if not setting.whole.own_backward and any(any(m.has_graph) for m in each) > any(setting.whole.has_graph):
            got, remedy = "a result without a gradient, where the ranks' has one", "remove detach() and no_grad"
            raise ValueError(message(NAME, "single", got, "a result with a gradient to compare with", remedy))
        self._refuse_undivided(setting, each)
        own_losses = not any(m.own_backward for m in each)
        compared = partial(quantities, setting)
        found = Run(on, ranks, setting.tasks, each, compared(each), compared, own_losses, setting)
        for count in SAMPLES:
            if not any(not q.ok and differentiable(q.wanted) and q.error < math.inf for q in found.quantities):
                break
            eps = eps_of(self.precision(setting.batch))
            compared = partial(_with_samples, self.samples(found, count, eps), setting)
            found = replace(found, compared=compared, quantities=compared(each))
            if eps == eps_of(torch.float64):
                break
        found.quantities = with_losses_noted(found.quantities, ranks)
        trained = [q for q in found.quantities if q.group in TRAINED]
        if trained and all(q.ok for q in found.quantities) and not any(q.decided for q in trained):
            got = f"{least_precise(self.tensors(setting.batch))}, whose rounding hides every gradient"
            raise ValueError(message(NAME, "dtype", got, "one in which something is decided", "pass torch.float64"))
        return found

    def depends(self, run: Run, q: Quantity) -> bool:
        """By moving the first or last rank's tensor alone."""
        n, setting = run.ranks.size, run.setting
        assert setting is not None
        x = setting.spans[q.leaf].tensor
        eps = eps_of(least_precise(self.tensors(setting.batch)))
        v = eps ** (1 / 3) * (largest(x) or 1.0) * numbers(tuple(x.shape), x.dtype, q.leaf, 0, 6)
        each = [[setting.along({q.leaf: v}, r) if r == s else {} for s in (0, n - 1)] for r in range(n)]
        losses = self.on_ranks(run.on, run.tasks, losses_along, each, range(n), [(1, -1)] * n)
        moved = torch.tensor(losses).view(n, 2, 2)  # of each rank, by the rank whose tensor is moved
        change = (moved[..., 0] - moved[..., 1]).abs() > 10 * eps * moved.abs().amax(-1)
        return bool(change[1:, 0].any() or change[:-1, 1].any())

    def tensors(self, batch: Batch) -> list[Tensor]:
        """Return the tensors whose dtypes say how precise the program is."""
        return [*batch.tensors.values(), *(span.tensor for span in self.of_module)]

    def _refuse_undivided(self, setting: Setting, each: Sequence[Measured]) -> None:
        """Raise if nothing is divided along an axis, and the ranks along it return the same."""
        ranks, held = (
            setting.ranks,
            [torch.cat([torch.arange(0), *(h.index.flatten() for h in mine)]) for mine in setting.held],
        )
        indices = [*setting.index.values(), held]
        indices += [[torch.arange(0) if i is None else i for i in fit.index] for fit in setting.outputs]
        divided = {axis for index in indices for axis in ranks.split(index)}
        for axis in (axis for axis in ranks.axes if axis not in divided):
            peers = [(each[r], each[ranks.along([axis], r)[0]]) for r in range(ranks.size)]
            if all(near(x, y) for a, b in peers for x, y in zip(a.outputs, b.outputs, strict=True)):
                got, remedy = f"an axis {axis} along which nothing is divided", "see what is divided in placements="
                expected = f'ranks along {axis} with other rows or parameters, such as {{"x": {{"{axis}": Shard(0)}}}}'
                raise ValueError(message(NAME, "ranks", got, expected, remedy))

    def precision(self, batch: Batch) -> torch.dtype:
        """Return the least precise dtype in which one process is seen to compute."""
        seen = self.whole(batch, experiment=Precision()).dtype
        dtypes = {least_precise(self.tensors(batch)), seen or torch.float64}
        return max(dtypes, key=eps_of)

    def samples(self, run: Run, count: int, eps: float) -> dict[str, tuple[Tensor, ...]]:
        """Return what one process has of each quantity with other last digits of inputs, parameters and buffers."""
        assert run.setting is not None
        batch, found = run.setting.batch, dict[str, tuple[Tensor, ...]]()
        for k in range(count):
            jittered = replace(run.setting, whole=self.whole(batch, experiment=Perturbed(k, eps)))
            for q in quantities(jittered, run.measured):
                found[q.what] = (*found.get(q.what, ()), q.wanted)
        return {what: each for what, each in found.items() if len(each) == count}


def _with_samples(
    samples: Mapping[str, tuple[Tensor, ...]], setting: Setting, each: Sequence[Measured]
) -> list[Quantity]:
    """Return what is compared, judged by the rounding of one process."""
    return [replace(q, samples=samples.get(q.what, ())) for q in quantities(setting, each)]
