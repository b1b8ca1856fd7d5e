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
from diffcoll.testing.harness.batch import Batch
from diffcoll.testing.harness.compare import Asked, Quantity, Setting, quantities, tolerance_of
from diffcoll.testing.harness.layout import (
    NAME,
    RANKS,
    Code,
    Fit,
    Held,
    Ranks,
    Span,
    code_of,
    held_whole,
    said_of,
    settled,
    settled_output,
    spans,
    split_axes,
)
from diffcoll.testing.harness.packing import Packed
from diffcoll.testing.harness.rank import DIRECTIONS, Machines, Measured, Task, layout_on_rank, measured, weight_of
from diffcoll.testing.harness.report import Row, Table, title_of
from diffcoll.testing.numbers import differentiable, numbers

#: An error below so many times what is allowed may be rounding.
_DOUBT = 300.0


class OtherShape(Exception):
    """The outputs of the ranks are pieces of no tensor of the shape that one process returns."""

    def __init__(self, i: int, whole: Measured, each: Sequence[Measured]) -> None:
        #: The output.
        self.what = _output(i, whole)
        shapes = ", ".join(str(tuple(m.outputs[i].shape)) for m in each)
        super().__init__(f"{self.what}: shapes {shapes} on the ranks, {tuple(whole.outputs[i].shape)} on one process")


def _output(i: int, whole: Measured) -> str:
    return f"output[{i}]" if len(whole.outputs) > 1 else "output"


@dataclass(eq=False)
class Run:
    """The results of one run."""

    on: str
    ranks: Ranks
    setting: Setting | None = None
    measured: Sequence[Measured] = ()
    quantities: list[Quantity] = field(default_factory=list)
    other: OtherShape | None = None
    raised: str = ""

    @cached_property
    def table(self) -> Table:
        """The table of the report."""
        rows = [row for q in self.quantities for row in q.rows]
        if self.other is not None:
            rows = [Row(self.other.what, "all", math.inf, None, False, 0.0, mismatched=True)]
        return Table(title_of(self.on, self.ranks.size, str(self.ranks)), self.ranks.size, tuple(rows), self.raised)

    @property
    def ok(self) -> bool:
        """Whether nothing was raised, and every quantity is right."""
        return self.table.ok


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

    def on_one(self, part: Any, seed: int = 0, **more: Any) -> Measured:
        """Measure on one process; `more` are fields of the task."""
        found: list[Measured] = self.machines.run(
            "simulated", measured, [self.single], [Task(Ranks({RANKS: 1}), part, **more)], seed=seed
        )
        return found[0]

    def whole(self, batch: Batch, **more: Any) -> Measured:
        """Measure the whole batch on one process."""
        directions = self._directions(batch) if self.asked.order > 1 else {}
        return self.on_one(batch.part(), order=self.asked.order, directions=directions, **more)

    def _directions(self, batch: Batch) -> dict[int, Tensor]:
        """Return random directions of the tensors of one process."""
        tensors = [batch.tensors[name] for name in batch.variables]
        tensors += [span.tensor if span.first else torch.tensor(0) for span in self.spans]
        each = enumerate(tensors)
        return {k: numbers(tuple(x.shape), x.dtype, k, 0, DIRECTIONS) for k, x in each if differentiable(x)}

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

    def _refuse_nothing(self, batch: Batch, whole: Measured) -> None:
        """Raise if one process has nothing to compare with."""
        names = [*batch.variables, *(span.name for span in self.spans)]
        each = [(f"value[{i}]", y) for i, y in enumerate(whole.outputs) if y.dim() == 0]
        each += [(f"gradient of {name}", g) for name, g in zip(names, whole.gradients, strict=True)]
        if bad := [name for name, x in each if differentiable(x) and not x.isfinite().all()]:
            got = f"NaN or infinity in {', '.join(bad)}"
            raise ValueError(message(NAME, "single", got, "finite numbers to compare with", "choose other data"))
        count = len(batch.variables)
        changed = [not torch.equal(x, s.tensor.detach()) for s, x in zip(self.spans, whole.state[count:], strict=True)]
        if whole.own_backward or any(changed):
            return
        if any(whole.has_graph) and not any(g.any() for g in whole.gradients):
            got, remedy = "gradients that are all zero", "remove detach() and no_grad, or choose other data"
            raise ValueError(message(NAME, "single", got, "a result with a gradient to compare with", remedy))
        of_module = zip(self.spans, whole.gradients[count:], strict=True)
        trained = [bool(g.any()) for span, g in of_module if span.tensor.requires_grad]
        if any(whole.has_graph) and trained and not any(trained):
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
        asked, batch = self.asked, self.batch(ranks)
        index = batch.positions(ranks, asked.placements)
        reduction = self._reduction(ranks, index)
        whole = self.whole(batch)
        self._refuse_nothing(batch, whole)
        self._refuse_unused(batch, whole)
        held, notes = self._held(on, ranks)
        tasks = [
            Task(ranks, batch.part({name: i[r] for name, i in index.items()}), self._written(mine))
            for r, mine in enumerate(held)
        ]
        outputs = self._outputs(on, ranks, whole, tasks)
        tensors = [*batch.tensors.values(), *(span.tensor for span in self.spans), *whole.outputs]
        tolerance = asked.tolerance or tolerance_of(tensors)
        found = Setting(ranks, batch, index, whole, reduction, asked, outputs, self.spans, held, notes, tolerance)
        return replace(found, tasks=[self._weighted(task, found, r) for r, task in enumerate(tasks)])

    def _reduction(self, ranks: Ranks, index: Mapping[str, list[Tensor]]) -> dict[str, str]:
        """Return how the losses of the ranks combine, by axis."""
        said = self.asked.rank_reduction
        found = dict(said) if isinstance(said, Mapping) else dict.fromkeys(ranks.sizes, said)
        for axis, how in found.items():
            expect.choice(NAME, "rank_reduction", axis, tuple(ranks.sizes))
            expect.choice(NAME, "rank_reduction", how, ("mean", "sum"))
        for axis in self.asked.reduced:
            expect.choice(NAME, "reduced", axis, tuple(ranks.sizes))
        if not isinstance(said, Mapping) and not ranks.rows:
            split = {axis for each in index.values() for axis in split_axes([[i] for i in each], ranks)}
            found = {axis: said for axis in found if axis in split}
        others = [axis for axis, n in ranks.sizes.items() if n > 1 and axis not in found]
        if self.asked.order > 1 and others:
            got, expected = f"2 with ranks along {others[0]} that have the same loss", "1"
            raise ValueError(message(NAME, "order", got, expected))
        return found

    def _refuse_unused(self, batch: Batch, whole: Measured) -> None:
        """Raise if a placement is of nothing."""
        outputs = ["output", *(f"output[{i}]" for i in range(len(whole.outputs)))]
        known = [*batch.tensors, *(span.name for span in self.spans), *outputs]
        for key in self.asked.placements:
            if not any(said_of({key: key}, name) for name in known):
                raise ValueError(message(NAME, "placements", repr(key), f"one of {', '.join(known)}"))

    def _held(self, on: str, ranks: Ranks) -> tuple[list[list[Held]], list[str]]:
        """Return what each rank holds of the module."""
        subject, n = self.distributed.unpack(), ranks.size
        if subject.module is None or subject.shard is None:
            return [held_whole(self.spans)] * n, []
        each = [self.distributed] * n, [ranks] * n
        try:
            held = self.machines.run(on, layout_on_rank, *each, [code_of(subject.module)] * n)
        except Exception:  # it may not bear numbers like these, and then names and shapes have to say what it does
            held = self.machines.run(on, layout_on_rank, *each, [Code(0)] * n)
        return settled(self.spans, held, self.asked.placements, ranks)

    def _written(self, held: Sequence[Held]) -> dict[str, Tensor]:
        """Return the numbers of the whole to write into tensors that `shard` makes anew."""
        found = {}
        for h in held:
            if h.write:
                span = next(s for s in self.spans if s.holds(h.index).all())
                found[h.name] = span.tensor.detach().flatten()[h.index - span.start]
        return found

    def _outputs(self, on: str, ranks: Ranks, whole: Measured, tasks: Sequence[Task]) -> list[Fit]:
        """Return the positions of each output; a forward on the ranks shows the shapes of all but numbers."""
        number = Fit("", [torch.tensor(0)] * ranks.size)
        if all(y.dim() == 0 for y in whole.outputs):
            return [number] * len(whole.outputs)
        each = self.on_ranks(on, [replace(task, weights=[None] * len(whole.outputs), backward=False) for task in tasks])
        found = []
        for i, y in enumerate(whole.outputs):
            name, got = _output(i, whole), [m.outputs[i] for m in each]
            fit = settled_output(name, y, got, said_of(self.asked.placements, name), ranks) if y.dim() else number
            if fit is None:
                raise OtherShape(i, whole, each)
            found.append(fit)
        return found

    def _weighted(self, task: Task, setting: Setting, r: int) -> Task:
        """Return the task with this rank's weights of the outputs, and directions of second order."""
        weights: list[Tensor | None] = []
        for i, fit in enumerate(setting.outputs):
            weight, index = weight_of(i, setting.whole.outputs), fit.index[r]
            split = split_axes([[j] if j is not None else [] for j in fit.index], setting.ranks)
            means = [setting.ranks.sizes[axis] for axis in split if setting.reduction.get(axis) == "mean"]
            weights.append(None if weight is None or index is None else math.prod(means) * weight.flatten()[index])
        if self.asked.order == 1:
            return replace(task, weights=weights)
        return replace(task, weights=weights, order=2, directions=setting.part(self._directions(setting.batch), r))

    def on_ranks(self, on: str, tasks: Sequence[Task], fn: Callable[..., Any] = measured, *more: Sequence[Any]) -> Any:
        """Measure on the ranks."""
        return self.machines.run(on, fn, [self.distributed] * len(tasks), tasks, *more)

    def run(self, on: str, ranks: Ranks) -> Run:
        """Measure on the ranks and on one process, and compare."""
        try:
            setting = self.setting(on, ranks)
            each = self.on_ranks(on, setting.tasks)
            for i, y in enumerate(setting.whole.outputs):
                if y.dim() == 0 and any(m.outputs[i].numel() != 1 for m in each):
                    raise OtherShape(i, setting.whole, each)
        except OtherShape as error:
            return Run(on, ranks, other=error)
        if not setting.whole.own_backward and any(any(m.has_graph) for m in each) > any(setting.whole.has_graph):
            got, remedy = "a result without a gradient, where the ranks' has one", "remove detach() and no_grad"
            raise ValueError(message(NAME, "single", got, "a result with a gradient to compare with", remedy))
        found = Run(on, ranks, setting, each, quantities(setting, each))
        doubtful = [q for q in found.quantities if q.group in ("gradient", "second order") and not q.ok]
        if any(q.error < _DOUBT * setting.tolerance for q in doubtful):
            noise = self.noise(found)
            for q in doubtful:
                least = q.most_allowed or 0.0
                allowed = max(least, min(10 * noise.get(q.what, 0.0), _DOUBT * least))
                found.quantities[found.quantities.index(q)] = replace(q, tolerance=allowed)
        return found

    def noise(self, run: Run) -> dict[str, float]:
        """Return by how much each quantity changes on one process with the last digits of inputs and parameters."""
        assert run.setting is not None
        jittered = replace(run.setting, whole=self.whole(run.setting.batch, jitter=True))
        wanted = {q.what: q.wanted for q in quantities(jittered, run.measured)}
        return {q.what: q.distance(wanted[q.what]) for q in run.quantities if q.what in wanted}
