"""The report: which runs differ from one process, and what can be observed of the first that does.

An observation says what the numbers are, and each is tested on all ranks before it is printed. None guesses a cause.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diffcoll.testing.harness.compare import Quantity, near, quantities, scale_of
from diffcoll.testing.harness.cuts import Cuts
from diffcoll.testing.harness.layout import RANKS, Ranks
from diffcoll.testing.harness.matching import Matching, Run, Setting
from diffcoll.testing.harness.rank import Measured, Task, differentiable, measured
from diffcoll.testing.harness.report import Report
from diffcoll.testing.harness.submodules import first_differences
from diffcoll.testing.numbers import largest, numbers, real_inner

#: Wrong gradients of which finite differences are taken.
_MOST = 6


def concluded(matching: Matching, settings: Sequence[Ranks], on: Sequence[str]) -> Report:
    """Run everything, and return the report."""
    first, *others = on
    runs = [_attempt(matching, first, ranks, i > 0) for i, ranks in enumerate(settings)]
    wrong = [run for run in runs if not run.ok]
    observed: list[str] = []
    for kind in others:
        if not wrong:
            more = [_attempt(matching, kind, ranks, True) for ranks in settings]
            wrong = [run for run in more if not run.ok]
            runs += more
            if wrong:
                observed.append(f"right on {first} ranks, wrong on {kind}")
        elif first == "simulated" and wrong[0].on == first:
            again = _attempt(matching, kind, wrong[0].ranks, True)
            if again.ok:
                runs.append(again)
                words = "state that ranks of one process share, such as a cache"
                observed.append(f"wrong on simulated ranks, right on {kind}: {words}")
            break
    notes = dict.fromkeys(note for run in runs if run.setting is not None for note in run.setting.notes)
    notes |= dict.fromkeys(note for run in runs for note in _excused(run))
    report = Report(
        "assert_matches_single_process",
        tuple(run.table for run in runs),
        notes=tuple(notes),
        condition=_condition(runs),
    )
    if not wrong:
        return report
    observed += _of_runs(runs)
    judged = [run for run in wrong if run.quantities]
    chosen = min(judged, key=lambda run: len(set(run.ranks.rows)) > 1) if judged else wrong[0]
    observed += [chosen.shapes] * bool(chosen.shapes)
    cuts: tuple[str, ...] = ()
    if judged and chosen.setting is not None:
        view = _Wrong(matching, chosen, chosen.setting)
        observed += view.lines()
        cuts = view.cuts.lines
    return replace(report, observed=tuple(dict.fromkeys(observed)), cuts=cuts)


def _attempt(matching: Matching, on: str, ranks: Ranks, keep: bool) -> Run:
    """Run, and with `keep` keep the error if one is raised."""
    try:
        return matching.run(on, ranks)
    except Exception as error:
        if not keep:
            raise
        return Run(on, ranks, raised=f"{type(error).__name__}: {error}")


def _condition(runs: Sequence[Run]) -> str:
    """Say what the check has combined of the gradients of parameters."""
    found: dict[tuple[str, str], None] = {}
    for run in runs:
        reduction = run.setting.frame.reduction if run.setting is not None else {}
        for q in run.quantities:
            if q.group == "gradient" and not q.of_input:
                found |= {(reduction[a], a): None for a in q.axes if a in reduction and q.ranks.sizes[a] > 1}
    each = [
        f"{how} over {' and '.join(axes)}"
        for how, word in (("averaged", "mean"), ("summed", "sum"))
        if (axes := ["the ranks" if a == RANKS else a for w, a in found if w == word])
    ]
    return f"once gradients are {' and '.join(each)}, which nothing in this program does" if each else ""


def _excused(run: Run) -> Iterator[str]:
    for q in run.quantities:
        if q.excused:
            words = f"{q.what}: {scale_of(q, q.ratio(q.compared))} times that of one process; all gradients are right"
            yield f"{words} ({run.ranks})"


def _of_runs(runs: Sequence[Run]) -> Iterator[str]:
    """Say how right and wrong runs differ."""
    right, wrong = ([run.ranks for run in runs if run.ok == ok] for ok in (True, False))
    if not right or not wrong:
        return
    if all(len(set(r.rows)) > 1 for r in wrong) and all(len(set(r.rows)) <= 1 for r in right):
        yield "right if all ranks have equally many rows, wrong if not"
    elif max(r.size for r in right) < min(r.size for r in wrong):
        yield f"right on up to {max(r.size for r in right)} ranks, wrong on {min(r.size for r in wrong)}"


@dataclass(eq=False)
class _Wrong:
    """A run that is wrong."""

    matching: Matching
    run: Run
    setting: Setting

    def __post_init__(self) -> None:
        self.ranks, self.wrong = self.run.ranks, [q for q in self.run.quantities if not q.ok]
        self.index, self.batch = self.setting.index, self.setting.batch

    def lines(self) -> list[str]:
        """Return all observations; what several quantities have in common is said once."""
        found: dict[str, list[str]] = {}
        for q in self.wrong:
            for words in self._of_quantity(q):
                found.setdefault(words, []).append(_short(q.what))
        lines = [f"{_listed(names)}: {words}" for words, names in found.items()]
        if any("not finite" in words for words in found):
            return lines
        # An experiment may not bear what the program does, and then says nothing.
        for experiment in (
            self._own_rows,
            self._other_losses,
            self._undetached,
            self._of_submodules,
            self._of_forward,
            self._orders,
            self._of_one_process,
        ):
            with contextlib.suppress(Exception):
                lines += list(experiment())
        return lines or [f"{_listed([_short(q.what) for q in self.wrong])}: other numbers than on one process"]

    @property
    def _wrong_gradients(self) -> list[Quantity]:
        return [q for q in self.wrong if q.group == "gradient"]

    # ── numbers ──

    def _of_quantity(self, q: Quantity) -> Iterator[str]:
        bad = [c.rank for c in q.compared if differentiable(c.got) and not c.got.isfinite().all()]
        if bad and q.wanted.isfinite().all():
            empty = [r for r in bad if self.ranks.rows and not self.ranks.rows[r]]
            where = f"rank {', '.join(map(self.ranks.named, dict.fromkeys(bad)))}"
            yield f"not finite on {where}{', which has no rows' * bool(empty and empty == bad)}"
            return
        held = [c for c in q.compared if c.wanted.numel() and c.wanted.any()]
        zero = [c.rank for c in held if not c.got.any()]
        if zero:
            every = len(zero) == len(held)
            yield "zero on every rank" if every else f"zero on rank {', '.join(map(self.ranks.named, zero))}"
            if every:
                return
        if not q.is_real:
            return
        fit = self._fit(q)
        if fit:
            yield fit
        elif others := self._others(q):
            yield others
        elif rows := self._rows_left_out(q):
            yield rows
        if q.group == "value":
            yield from self._of_value(q)

    def _fit(self, q: Quantity) -> str | None:
        """Say which reduction over ranks and which factor make it right; all ranks have the same."""
        means = self.setting.frame.reduction
        # A single number is a multiple of anything.
        many = int((q.wanted.abs() > 1e-6 * (q.unit or 1)).sum()) > 1
        free = [axis for axis, n in self.ranks.sizes.items() if n > 1]
        subsets = [c for k in range(len(free) + 1) for c in itertools.combinations(free, k)]
        here = tuple(axis for axis in free if axis in q.axes)
        moved = q.what.startswith("parameter") and q.group == "state"
        for axes in sorted(subsets, key=lambda axes: axes != here):
            if q.group == "state" and axes:
                continue
            averaged = [a for a in axes if means.get(a) == "mean" and a in q.axes]
            factor = q.factor if axes == here or q.of_input else 1 / math.prod(self.ranks.sizes[a] for a in averaged)
            ratio = q.ratio(q.combined(axes, factor))
            scale = scale_of(q, ratio)
            if ratio is None or (axes == here and abs(ratio - 1) < 1e-7):
                continue
            if axes == here and (many or scale or (q.group == "value" and self._share(ratio))):
                size = f"{ratio:.4g}" if abs(ratio - 1) > 1e-3 else f"1 + {ratio - 1:.1e}"
                size += f" = {scale}" if scale else ""
                words = f"moved {size} times as far as on" if moved else f"{size} times that of"
                return f"{words} one process{self._exact(q, here, ratio)}"
            if axes == here or q.wanted.numel() < 2 or self._alike(q, axes):
                continue
            more = [a for a in axes if a not in averaged]
            n = math.prod(self.ranks.sizes[a] for a in more)
            if math.isclose(ratio, 1, rel_tol=1e-6) or (more and math.isclose(ratio, n, rel_tol=1e-6)):
                how = "a sum" if math.isclose(ratio, 1, rel_tol=1e-6) and more else "a mean"
                return (
                    f"right after {how} over {' and '.join(map(_axis, axes))}" if axes else "right as each rank has it"
                )
        for words, counts in self.batch.counts(self.index).items():
            mean = sum(counts) / len(counts)
            if mean and q.right(q.combined(weights=[k / mean for k in counts])):
                return f"right if ranks are weighted by their {words}"
        return None

    def _alike(self, q: Quantity, axes: Sequence[str]) -> bool:
        """Whether a sum over these axes is a multiple of what each rank has, so that it says nothing new."""
        own, summed = q.combined((), 1.0), q.combined(axes, 1.0)
        return bool(axes) and all(
            near(c.got, d.got * (d.got.norm() and c.got.norm() / d.got.norm()))
            for c, d in zip(summed, own, strict=True)
        )

    def _share(self, ratio: float) -> str | None:
        """Return in words the share that a ratio is."""
        return next((words for words, share in self._shares.items() if math.isclose(ratio, share, rel_tol=1e-6)), None)

    @cached_property
    def _shares(self) -> dict[str, float]:
        """The part of a mask that is one, in words."""
        found = {}
        for name, x in self.batch.tensors.items():
            share = float((x.detach() != 0).sum()) / x.numel() if x.numel() else 0.0
            if bool(((x == 0) | (x == 1)).all()) and 0 < share < 1:
                found[f"the part of {name} that is one"] = share
        return found

    def _exact(self, q: Quantity, axes: Sequence[str], ratio: float) -> str:
        """Say under which other combination of the ranks' losses, or which share of a mask, a factor is right."""
        for axis in self.setting.frame.reduction if q.group != "state" and (axes or q.of_input) else ():
            how, n = self.setting.frame.reduction.get(axis), self.ranks.sizes[axis]
            if how == "mean" and math.isclose(ratio, 1 / n, rel_tol=1e-6):
                alike = f", or if the ranks along {axis} have one loss, which is no rank_reduction there"
                return f', exact under "sum" over {_axis(axis)}' + alike * (q.of_input and self._one_loss(axis))
            if how == "sum" and math.isclose(ratio, n, rel_tol=1e-6):
                return f', exact under "mean" over {_axis(axis)}'
        share = self._share(ratio)
        return f", which is {share}" if share else ""

    def _one_loss(self, axis: str) -> bool:
        """Whether all ranks along an axis of a mesh return the same."""
        if axis == RANKS:
            return False
        each = [m.outputs for m in self.run.measured]
        pairs = [(each[r], each[s]) for r in range(self.ranks.size) for s in self.ranks.along([axis], r)]
        return all(near(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))

    def _others(self, q: Quantity) -> str | None:
        """Say which rank's piece each rank has, if that is another one's."""
        each = q.compared
        if len(each) != self.ranks.size or len(each) == 1 or q.wanted.numel() < 2:
            return None
        own = [[s for s, d in enumerate(each) if d.wanted.numel() and near(c.got, d.wanted)] for c in each]
        held = [s[0] for s in own if len(s) == 1]
        if len(held) < len(each) or len(set(held)) < len(each) or held == list(range(len(each))):
            return None
        name = self.ranks.named
        return ", ".join(f"rank {name(r)} has rank {name(s)}'s piece" for r, s in enumerate(held) if r != s)

    def _rows_left_out(self, q: Quantity) -> str | None:
        """Say which rows of an input have no gradient though they should."""
        if not q.of_input or q.wanted.dim() < 2:
            return None
        whole = torch.zeros_like(q.wanted).flatten()
        for mine, c in zip([p for each in q.pieces for p in each], q.compared, strict=True):
            whole.index_add_(0, mine.index.flatten(), c.got.abs().to(whole.dtype))
        lost = (whole.view(q.wanted.shape).flatten(1).abs().amax(1) == 0) & (q.wanted.flatten(1).abs().amax(1) > 0)
        rows = lost.nonzero().flatten().tolist()
        return f"zero in row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))} of the whole" if rows else None

    def _of_value(self, q: Quantity) -> Iterator[str]:
        for c in q.compared[:1]:
            difference = float((c.got - c.wanted).real.max())
            for axis, n in self.ranks.sizes.items():
                if n > 1 and math.isclose(abs(difference), math.log(n), rel_tol=1e-6):
                    size = f"the size of {axis}" if axis != RANKS else "N"
                    yield f"{'larger' if difference > 0 else 'smaller'} by log {n}, the logarithm of {size}"

    # ── experiments ──

    def _run(self, tasks: Sequence[Task]) -> list[Measured]:
        """Measure on the ranks."""
        packed = [self.matching.distributed] * self.ranks.size
        found: list[Measured] = self.matching.machines.run(self.run.on, measured, packed, tasks)
        return found

    def _again(self, **more: Any) -> list[Measured]:
        return self._run([replace(task, **more) for task in self.setting.tasks])

    def _alone(self, part: Any, seed: int = 0) -> list[Tensor]:
        """Return what one process returns for a part of the batch."""
        task = Task(Ranks({RANKS: 1}, (1,)), part, backward=False)
        found: Measured = self.matching.on_one(measured, self.matching.single, task, seed=seed)
        return found.outputs

    def _own_rows(self) -> Iterator[str]:
        """Whether each rank returns what one process returns for the rank's own part."""
        outputs = self.run.measured
        if not any(q.group in ("value", "output") for q in self.wrong) or self.matching.distributed.unpack().shard:
            return
        pairs = [(m.outputs, self._alone(task.part)) for m, task in zip(outputs, self.setting.tasks, strict=True)]
        if all(near(a, b) for mine, alone in pairs for a, b in zip(mine, alone, strict=True)):
            yield "each rank returns what one process returns for the rank's own part of the batch alone"

    def _other_losses(self) -> Iterator[str]:
        """Which ranks' losses reach a gradient: backward with the loss of one rank at a time."""
        if not self._wrong_gradients or not self._losses_differ or self.ranks.size == 1:
            return
        n = self.ranks.size
        reached: dict[str, list[list[bool]]] = {}  # by the rank whose loss counts, on each rank
        for q in range(n):
            each = self._run([replace(task, factor=float(r == q)) for r, task in enumerate(self.setting.tasks)])
            for found in quantities(self.setting.whole, each, self.setting.frame):
                some = [any(bool(p.got.any()) for p in mine) for mine in found.pieces]
                reached.setdefault(found.what, []).append(some)
        lines: dict[str, list[str]] = {}
        for what, by_loss in ((wrong.what, reached[wrong.what]) for wrong in self._wrong_gradients):
            lost = [q for q, some in enumerate(by_loss) if not any(some)]
            if len(lost) == n:
                continue
            if not any(by_loss[q][r] for q in range(n) for r in range(n) if q != r):
                lines.setdefault("no other rank's loss reaches it", []).append(_short(what))
            elif lost:
                words = f"the loss of rank {', '.join(map(self.ranks.named, lost))} reaches it on no rank"
                lines.setdefault(words, []).append(_short(what))
        yield from (f"{_listed(names)}: {words}" for words, names in lines.items())

    def _undetached(self) -> Iterator[str]:
        """What is right if the user's calls of detach() keep the graph."""
        if not self._wrong_gradients or not self.cuts.detached:
            return
        again = quantities(self.setting.whole, self._again(undetached=True), self.setting.frame)
        right = {q.what for q in again if q.ok}
        names = [_short(q.what) for q in self._wrong_gradients if q.what in right]
        if names:
            yield f"{_listed(names)}: right if the calls of detach() and .data below keep the graph"

    @cached_property
    def _watched(self) -> list[Measured]:
        return self._again(watched=True)

    @cached_property
    def cuts(self) -> Cuts:
        """Where tensors leave the graph of a forward."""
        with contextlib.suppress(Exception):
            return Cuts.of_all([m.cuts for m in self._watched])
        return Cuts()

    def _of_submodules(self) -> Iterator[str]:
        """The first submodules that differ."""
        if not self.matching.spans or all(q.group == "state" for q in self.wrong):
            return
        whole = self.matching.whole(self.batch, watched=True).traces
        means = [self.ranks.sizes[a] for a, how in self.setting.frame.reduction.items() if how == "mean"]
        factors = [1.0, *({float(math.prod(means))} - {1.0})]
        yield from first_differences(whole, [m.traces for m in self._watched], self.ranks, factors)

    def _of_forward(self) -> Iterator[str]:
        """Whether backward gives the derivative of what the ranks return, along a random direction of each tensor."""
        axes = {axis for axis, n in self.ranks.sizes.items() if n > 1}
        wrong = [q for q in self._wrong_gradients if q.of_input or axes <= set(q.axes)][:_MOST]
        if not self._losses_differ or not self._double:
            return
        yes: list[str] = []
        no: list[str] = []
        for q in wrong:
            direction = numbers(tuple(q.wanted.shape), q.wanted.dtype, len(q.what), 0, 5).flatten()
            h = 1e-4
            losses = {}
            for k in (1, -1, 2, -2):
                losses[k] = sum(m.loss for m in self._moved(q, direction, k * h))
            wanted = (8 * (losses[1] - losses[-1]) - (losses[2] - losses[-2])) / (12 * h)
            each = [p for mine in q.pieces for p in mine]
            got = sum(float(real_inner(direction[p.index.flatten()], p.got.flatten())) for p in each)
            scale = max(abs(wanted), abs(got), 1e-6 * largest(q.wanted))
            rounding = 1e-14 * sum(abs(m.loss) for m in self.run.measured) / h
            if rounding < 1e-6 * scale:
                (yes if abs(got - wanted) < 1e-6 * scale else no).append(_short(q.what))
        if yes:
            words = "backward gives the derivative of what the ranks return; it is the forward that differs"
            yield f"{_listed(yes)}: {words}"
        if no:
            yield f"{_listed(no)}: backward does not give the derivative of what the ranks return"

    @property
    def _losses_differ(self) -> bool:
        """Whether every rank has a loss of its own, and the check calls backward."""
        axes = {axis for axis, n in self.ranks.sizes.items() if n > 1}
        return axes <= set(self.setting.frame.reduction) and not any(m.own_backward for m in self.run.measured)

    @property
    def _double(self) -> bool:
        return all(q.wanted.dtype in (torch.double, torch.complex128) for q in self._wrong_gradients)

    def _moved(self, q: Quantity, direction: Tensor, h: float) -> list[Measured]:
        """Measure with a tensor moved on all ranks."""
        frame, tasks = self.setting.frame, []
        inputs = {name: torch.zeros_like(self.batch.tensors[name]).flatten() for name in frame.inputs}
        module = torch.zeros(max((s.end for s in frame.spans), default=0), dtype=direction.dtype)
        if q.of_input:
            inputs[_short(q.what)] = direction
        else:
            span = next(s for s in frame.spans if s.name == _short(q.what))
            module[span.start : span.end] = direction
        for r, task in enumerate(self.setting.tasks):
            of_rank = [inputs[name][index[r]] for name, index in frame.inputs.items()]
            along = of_rank, [h_.of(module) for h_ in frame.held[r]]
            tasks.append(replace(task, directions=along, move=h, order=1, backward=False))
        return self._run(tasks)

    def _orders(self) -> Iterator[str]:
        if self.wrong and all(q.group == "second order" for q in self.wrong):
            yield "first order is right: it is the derivative of the backward that differs"

    def _of_one_process(self) -> Iterator[str]:
        """Whether one process itself has other numbers with other seeds, or rounds them so."""
        a, b = (self._alone(self.batch.part(), seed) for seed in (0, 1))
        if not all(near(x, y) for x, y in zip(a, b, strict=True)):
            yield "one process itself returns other numbers with another seed: random numbers, such as dropout"
        else:
            noise = self.matching.noise(self.setting)
            names = [_short(q.what) for q in self.wrong if noise.get(q.what, 0.0) > 0.1 * q.error]
            if names:
                yield f"{_listed(names)}: one process has as large a difference with other last digits of its inputs"


def _axis(axis: str) -> str:
    return "the ranks" if axis == RANKS else axis


def _short(what: str) -> str:
    """Return the name of a gradient's tensor."""
    return what.removeprefix("gradient of ")


def _listed(names: Sequence[str]) -> str:
    *others, last = dict.fromkeys(names)
    return f"{', '.join(others)} and {last}" if others else last
