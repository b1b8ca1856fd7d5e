"""Runs a program on ranks and on one process, and compares what they have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diffcoll.core import expect
from diffcoll.core.errors import message
from diffcoll.engines.devices import device_of_backend
from diffcoll.testing.harness.batch import Batch
from diffcoll.testing.harness.compare import DOUBT, Frame, Quantity, quantities, tolerance_of
from diffcoll.testing.harness.layout import (
    NAME,
    RANKS,
    Fact,
    Fit,
    Held,
    Placement,
    Ranks,
    Span,
    code_of,
    said_of,
    settled,
    settled_output,
    spans,
    split_axes,
)
from diffcoll.testing.harness.packing import Packed
from diffcoll.testing.harness.rank import (
    DIRECTIONS,
    Machines,
    Measured,
    Task,
    differentiable,
    layout_on_rank,
    measured,
    weight_of,
)
from diffcoll.testing.harness.report import Row, Table, title_of
from diffcoll.testing.numbers import numbers


@dataclass(frozen=True)
class Asked:
    """What the user has asked for."""

    batch: Any
    rank_reduction: str | Mapping[str, str]
    reduced: tuple[str, ...]
    placements: Mapping[str, Placement]
    order: int
    dtype: torch.dtype | None
    tolerance: float | None


@dataclass(frozen=True)
class Setting:
    """One run, before it starts: what each rank gets, and what one process has."""

    ranks: Ranks
    batch: Batch
    index: dict[str, list[Tensor]]
    whole: Measured
    frame: Frame
    tasks: list[Task]
    notes: list[str]


@dataclass(eq=False)
class Run:
    """The results of one run."""

    on: str
    ranks: Ranks
    setting: Setting | None = None
    measured: Sequence[Measured] = ()
    quantities: Sequence[Quantity] = ()
    #: Rows of the report beside those of the quantities.
    more: Sequence[Row] = ()
    #: In words, of outputs that are pieces of no tensor of the shape that one process returns.
    shapes: str = ""
    raised: str = ""

    @cached_property
    def table(self) -> Table:
        """The table of the report."""
        rows = (*self.more, *(row for q in self.quantities for row in q.rows))
        return Table(title_of(self.on, self.ranks.size, str(self.ranks)), self.ranks.size, rows, self.raised)

    @property
    def ok(self) -> bool:
        """Whether nothing was raised, and every quantity is right."""
        return self.table.ok


class _OtherShape(Exception):
    """The outputs of the ranks are pieces of no tensor of the shape that one process returns."""


@dataclass(eq=False)
class Matching:
    """A distributed program, the same on one process, and how they are compared."""

    machines: Machines
    distributed: Packed
    single: Packed
    asked: Asked
    _settings: dict[str, Setting] = field(default_factory=dict)

    @cached_property
    def spans(self) -> list[Span]:
        """The tensors of the whole module."""
        module = self.single.unpack().module
        return [] if module is None else spans(module)

    # ── one process ──

    def on_one(self, fn: Callable[..., Any], *arguments: Any, seed: int = 0) -> Any:
        """Run fn on one process."""
        return self.machines.run("simulated", fn, *([each] for each in arguments), seed=seed)[0]

    def batch(self, ranks: Ranks) -> Batch:
        """Return the whole batch."""
        tree, subject = self.asked.batch, self.single.unpack()
        if callable(tree) and not isinstance(tree, Tensor):
            if not ranks.rows:
                raise TypeError(message(NAME, "batch", "a function with a mesh", "the batch itself", "call it"))
            tree = tree(sum(ranks.rows))
        skip = int(subject.module is not None)
        batch = Batch(self.distributed.unpack().fn, tree, skip, self.asked.dtype)
        if not batch.variables and not self.spans:
            got = f"{len(batch.tensors)} tensors, none with floating-point numbers"
            raise ValueError(message(NAME, "batch", got, "a tensor that can have a gradient, or a module"))
        return batch

    def whole(self, batch: Batch, **more: Any) -> Measured:
        """Measure on one process."""
        directions = self._directions(batch) if self.asked.order > 1 else None
        task = Task(Ranks({RANKS: 1}, (1,)), batch.part(), order=self.asked.order, directions=directions, **more)
        found: Measured = self.on_one(measured, self.single, task)
        return found

    def _directions(self, batch: Batch) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the directions of second order of one process."""
        of_inputs = [batch.tensors[name] for name in batch.variables]
        each = [*of_inputs, *(span.tensor for span in self.spans)]
        names = [*range(len(of_inputs)), *(len(of_inputs) + span.start for span in self.spans)]
        found = [
            numbers(tuple(x.shape), x.dtype, k, 0, DIRECTIONS) if differentiable(x) else None
            for x, k in zip(each, names, strict=True)
        ]
        return [v for v in found[: len(of_inputs)] if v is not None], found[len(of_inputs) :]

    def _refuse_nothing(self, batch: Batch, whole: Measured) -> None:
        """Raise if one process has nothing to compare with."""
        values = [(f"value[{i}]", y) for i, y in enumerate(whole.outputs) if y.dim() == 0]
        grads = [(f"gradient of {name}", g) for name, g in zip(batch.variables, whole.inputs, strict=True)]
        of_module = list(zip(self.spans, whole.module, strict=True))
        grads += [(f"gradient of {span.name}", g) for span, g in of_module]
        if bad := [name for name, x in [*values, *grads] if differentiable(x) and not x.isfinite().all()]:
            got = f"NaN or infinity in {', '.join(bad)}"
            raise ValueError(message(NAME, "single", got, "finite numbers to compare with", "choose other data"))
        changed = any(not torch.equal(x, s.tensor.detach()) for s, x in zip(self.spans, whole.state, strict=True))
        if whole.own_backward or changed:
            return
        if any(whole.has_graph) and not any(g.any() for _, g in grads):
            got, remedy = "gradients that are all zero", "remove detach() and no_grad, or choose other data"
            raise ValueError(message(NAME, "single", got, "a result with a gradient to compare with", remedy))
        trained = [g for span, g in of_module if span.tensor.requires_grad]
        if any(whole.has_graph) and trained and not any(g.any() for g in trained):
            got, expected = "parameters of which none has a gradient", "the module that single uses"
            raise ValueError(message(NAME, "module", got, expected, "use the argument, and not another copy"))
        if not whole.outputs:
            got, expected = "a function that returns and changes nothing", "a loss, outputs, or a changed module"
            raise ValueError(message(NAME, "single", got, expected))

    # ── ranks ──

    def setting(self, on: str, ranks: Ranks) -> Setting:
        """Return what each rank gets, found on this kind of ranks the first time."""
        if str(ranks) not in self._settings:
            self._settings[str(ranks)] = self._found(on, ranks)
        return self._settings[str(ranks)]

    def _found(self, on: str, ranks: Ranks) -> Setting:
        batch = self.batch(ranks)
        placements = self.asked.placements
        index = batch.positions(ranks, placements)
        reduction = self._reduction(ranks, index)
        whole = self.whole(batch)
        self._refuse_nothing(batch, whole)
        self._refuse_unused(batch, whole)
        held, notes = self._held(on, ranks)
        tasks = [self._task(on, ranks, batch, index, held, r) for r in range(ranks.size)]
        losses = [i for i, y in enumerate(whole.outputs) if y.dim() == 0]
        tasks = [replace(task, losses=losses) for task in tasks]
        outputs = self._outputs(on, ranks, whole, tasks)
        tolerance = self.asked.tolerance or tolerance_of(
            [*batch.tensors.values(), *(s.tensor for s in self.spans), *whole.outputs]
        )
        inputs = {name: index[name] for name in batch.variables}
        of_user = tuple(axis for axis in self.asked.reduced if axis in ranks.sizes)
        frame = Frame(ranks, reduction, of_user, placements, inputs, batch.asked, outputs, self.spans, held, tolerance)
        tasks = [self._weighted(task, whole, frame, batch, r) for r, task in enumerate(tasks)]
        return Setting(ranks, batch, index, whole, frame, tasks, notes)

    def _reduction(self, ranks: Ranks, index: Mapping[str, list[Tensor]]) -> dict[str, str]:
        """Return how the losses of the ranks combine, by axis."""
        said = self.asked.rank_reduction
        if isinstance(said, Mapping):
            for axis, how in said.items():
                expect.choice(NAME, "rank_reduction", axis, tuple(ranks.sizes))
                expect.choice(NAME, f"rank_reduction[{axis!r}]", how, ("mean", "sum"))
            found = dict(said)
        else:
            expect.choice(NAME, "rank_reduction", said, ("mean", "sum"))
            split = {axis for each in index.values() for axis in split_axes([[i] for i in each], ranks)}
            found = {axis: said for axis in ranks.sizes if axis in split or ranks.rows}
        for axis in self.asked.reduced:
            expect.choice(NAME, "reduced", axis, tuple(ranks.sizes))
        others = [axis for axis, n in ranks.sizes.items() if n > 1 and axis not in found]
        if self.asked.order > 1 and others:
            got, expected = f"2 with ranks along {others[0]} that have the same loss", "1"
            raise ValueError(message(NAME, "order", got, expected))
        return found

    def _refuse_unused(self, batch: Batch, whole: Measured) -> None:
        """Raise if a placement is of nothing."""
        count = len(whole.outputs)
        outputs = ["output"] if count == 1 else [f"output[{i}]" for i in range(count)]
        known = [*batch.tensors, *(span.name for span in self.spans), *outputs]
        for key in self.asked.placements:
            if not any(said_of({key: key}, name) for name in known):
                raise ValueError(message(NAME, "placements", repr(key), f"one of {', '.join(known)}"))

    def _held(self, on: str, ranks: Ranks) -> tuple[list[list[Held]], list[str]]:
        """Return what each rank holds of the module."""
        subject, n = self.distributed.unpack(), ranks.size
        if subject.module is None:
            return [[] for _ in range(n)], []
        if subject.shard is None:
            tied = {id(s.tensor): k for k, s in reversed(list(enumerate(self.spans)))}
            whole = [
                Held(s.name, torch.arange(s.start, s.end).view(s.tensor.shape), (), False, tied[id(s.tensor)])
                for s in self.spans
            ]
            return [whole] * n, []
        code = code_of(subject.module)
        each = [self.distributed] * n, [ranks] * n, [_device(on)] * n
        try:
            facts: list[list[Fact]] = self.machines.run(on, layout_on_rank, *each, [code] * n)
        except Exception:  # it may not bear numbers like these, and then names and shapes have to say what it does
            facts = self.machines.run(on, layout_on_rank, *each, [None] * n)
        return settled(self.spans, facts, self.asked.placements, ranks)

    def _task(
        self, on: str, ranks: Ranks, batch: Batch, index: Mapping[str, list[Tensor]], held: list[list[Held]], r: int
    ) -> Task:
        part = batch.part({name: each[r] for name, each in index.items()})
        write = {}
        for h in held[r]:
            if h.write:
                span = next(s for s in self.spans if s.start <= int(h.index.min()) < s.end)
                write[h.name] = span.tensor.detach().flatten()[h.index - span.start]
        return Task(ranks, part, _device(on), write)

    def _outputs(self, on: str, ranks: Ranks, whole: Measured, tasks: Sequence[Task]) -> list[Fit]:
        """Return the positions of each output; a forward on the ranks shows the shapes of all but numbers."""
        n, zero = ranks.size, Fit("", [torch.tensor(0)] * ranks.size)
        if all(y.dim() == 0 for y in whole.outputs):
            return [zero] * len(whole.outputs)
        unweighted = [replace(task, weights=[None] * len(whole.outputs), backward=False) for task in tasks]
        each: list[Measured] = self.machines.run(on, measured, [self.distributed] * n, unweighted)
        found = []
        for i, y in enumerate(whole.outputs):
            name, got = f"output[{i}]" if len(whole.outputs) > 1 else "output", [m.outputs[i] for m in each]
            fit = settled_output(name, y, got, said_of(self.asked.placements, name), ranks)
            if fit is None:
                shapes = ", ".join(str(tuple(x.shape)) for x in got)
                raise _OtherShape(f"{name}: shapes {shapes} on the ranks, {tuple(y.shape)} on one process")
            found.append(fit)
        return found

    def _weighted(self, task: Task, whole: Measured, frame: Frame, batch: Batch, r: int) -> Task:
        """Return the task with this rank's weights of the outputs, and directions of second order."""
        weights: list[Tensor | None] = []
        for i, fit in enumerate(frame.outputs):
            weight, index = weight_of(i, whole.outputs), fit.index[r]
            split = split_axes([[j] if j is not None else [] for j in fit.index], frame.ranks)
            means = [frame.ranks.sizes[axis] for axis in split if frame.reduction.get(axis) == "mean"]
            weights.append(None if weight is None or index is None else math.prod(means) * weight.flatten()[index])
        if self.asked.order == 1:
            return replace(task, weights=weights)
        of_inputs, of_module = self._directions(batch)
        inputs = [v.flatten()[i[r]] for v, i in zip(of_inputs, frame.inputs.values(), strict=True)]
        every = torch.zeros(max((s.end for s in self.spans), default=0), dtype=torch.double)
        for span, v in zip(self.spans, of_module, strict=True):
            if v is not None:
                every[span.start : span.end] = v.flatten().to(torch.double)
        return replace(task, weights=weights, order=2, directions=(inputs, [h.of(every) for h in frame.held[r]]))

    def measure(self, on: str, ranks: Ranks, **more: Any) -> list[Measured]:
        """Measure on the ranks; `more` replaces fields of each task."""
        setting = self.setting(on, ranks)
        tasks = [replace(task, device=_device(on), **more) for task in setting.tasks]
        found: list[Measured] = self.machines.run(on, measured, [self.distributed] * ranks.size, tasks)
        return found

    def run(self, on: str, ranks: Ranks) -> Run:
        """Measure on the ranks and on one process, and compare."""
        try:
            setting = self.setting(on, ranks)
        except _OtherShape as error:
            what = str(error).partition(":")[0]
            row = Row(what, "all", math.inf, None, False, 0.0, mismatched=True)
            return Run(on, ranks, more=[row], shapes=str(error))
        each = self.measure(on, ranks)
        if not setting.whole.own_backward and any(any(m.has_graph) for m in each) > any(setting.whole.has_graph):
            got, remedy = "a result without a gradient, where the ranks' has one", "remove detach() and no_grad"
            raise ValueError(message(NAME, "single", got, "a result with a gradient to compare with", remedy))
        found = quantities(setting.whole, each, setting.frame)
        doubtful = [q for q in found if q.group in ("gradient", "second order") and _in_doubt(q)]
        if doubtful:
            noise = self.noise(setting)
            for q in doubtful:
                least = q.most_allowed or 0.0
                q.tolerance = max(least, min(10 * noise.get(q.what, 0.0), DOUBT * least))
                for name in ("ok", "rows"):
                    q.__dict__.pop(name, None)
        return Run(on, ranks, setting, each, found)

    def noise(self, setting: Setting) -> dict[str, float]:
        """Return by how much each quantity changes on one process with the last digits of inputs and parameters."""
        one = Ranks({RANKS: 1}, (1,))
        every = {
            name: [torch.arange(x.numel()).view(x.shape)]
            for name, x in setting.batch.tensors.items()
            if name in setting.batch.variables
        }
        held = [
            [Held(s.name, torch.arange(s.start, s.end).view(s.tensor.shape), (), False, s.start) for s in self.spans]
        ]
        outputs = [Fit("", [torch.arange(y.numel()).view(y.shape)]) for y in setting.whole.outputs]
        frame = replace(setting.frame, ranks=one, reduction={}, placements={}, inputs=every, held=held, outputs=outputs)
        return {q.what: q.error for q in quantities(setting.whole, [self.whole(setting.batch, jitter=True)], frame)}


def _in_doubt(q: Quantity) -> bool:
    return not q.ok and q.error < DOUBT * (q.most_allowed or 0.0)


def _device(on: str) -> str:
    return "cpu" if on == "simulated" else device_of_backend(on)
