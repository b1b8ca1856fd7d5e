"""The report: which runs differ from one process, and what can be observed of the first that does.

An observation says what the numbers are, and each is tested on all ranks before it is printed. None guesses a cause.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from diffcoll.core.errors import message
from diffcoll.testing.harness.compare import Quantity
from diffcoll.testing.harness.cuts import Cuts, of_all_ranks
from diffcoll.testing.harness.differences import differences
from diffcoll.testing.harness.matching import TRAINED, Check, Matching, OtherShape, Run
from diffcoll.testing.harness.mesh import RANKS, Ranks
from diffcoll.testing.harness.precision import eps_of
from diffcoll.testing.harness.rank import Measured, Undetached, Watched, losses_along
from diffcoll.testing.harness.report import Report, together
from diffcoll.testing.harness.submodules import first_differences
from diffcoll.testing.harness.weights import weights_in_words
from diffcoll.testing.numbers import differentiable, largest, near, numbers, real_inner

#: Wrong gradients of which finite differences are taken.
_MOST = 6


def concluded(check: Check, settings: Sequence[Ranks], on: Sequence[str]) -> Report:
    """Run everything, and return the report."""
    first, *others = on
    runs = [_attempt(check, first, ranks, i > 0) for i, ranks in enumerate(settings)]
    wrong = [run for run in runs if not run.table.ok]
    observed: list[str] = []
    for kind in others:
        if wrong:
            again = _attempt(check, kind, wrong[0].ranks, True) if first == "simulated" else wrong[0]
            if again.table.ok:
                runs.append(again)
                words = "state that ranks of one process share, such as a cache"
                observed.append(f"wrong on simulated ranks, right on {kind}: {words}")
            break
        more = [_attempt(check, kind, ranks, True) for ranks in settings]
        wrong = [run for run in more if not run.table.ok]
        runs += more
        if wrong:
            observed.append(f"right on {first} ranks, wrong on {kind}")
            break
    notes = dict.fromkeys(note for run in runs for note in _notes(run))
    left_out = tuple(dict.fromkeys(words for run in runs for words in _not_compared(run)))
    report = Report(check.name, tuple(run.table for run in runs), notes=tuple(notes), not_compared=left_out)
    if not wrong:
        return replace(report, condition=_condition(runs))
    observed += _of_runs(runs)
    chosen = min(wrong, key=lambda run: (not run.quantities, len(set(run.ranks.rows)) > 1))
    observed += [str(chosen.error)] * isinstance(chosen.error, OtherShape)
    if chosen.quantities:
        view = _BesideOne(check, chosen, runs) if isinstance(check, Matching) else _Wrong(check, chosen, runs)
        observed += view.lines()
        report = replace(report, cuts=tuple(view.cuts), notes=(*notes, *check.notes_on_cuts * bool(view.cuts)))
    by_shape = any(run.quantities and run.setting is not None and run.setting.notes for run in wrong)
    condition = "if what `shard` makes anew is divided as its shapes say, see the notes" if by_shape else ""
    return replace(report, observed=tuple(dict.fromkeys(observed)), condition=condition)


def _refuse_shared_state(name: str) -> None:
    """Raise if the simulated ranks had one state of accelerate, which then has the rank of the first."""
    accelerate = sys.modules.get("accelerate.state")
    state = {} if accelerate is None else vars(accelerate.PartialState).get("_shared_state")
    if state and isinstance(state, dict):
        got, remedy = "simulated ranks, which shared the state of accelerate", 'on=["gloo"], or a state for each thread'
        raise ValueError(
            message(name, "on", got, "ranks with states of their own", f"{remedy}: notes/with/accelerate.md")
        )


def _attempt(check: Check, on: str, ranks: Ranks, keep: bool) -> Run:
    """Run, and with `keep` keep the error if one is raised."""
    try:
        run = check.run(on, ranks)
    except Exception as error:
        run = Run(on, ranks, error=error)
    if on == "simulated" and not run.table.ok:
        _refuse_shared_state(check.name)
    if run.error is not None and not (keep or isinstance(run.error, OtherShape)):
        raise run.error
    return run


def _condition(runs: Sequence[Run]) -> str:
    """Say what the check has combined of the gradients of parameters, where they were not right before."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    every = {q.what for run in runs for q in run.quantities if q.group == "gradient" and not q.of_input}
    for run in runs:
        reduction = run.setting.reduction if run.setting is not None else {}
        for q in run.quantities:
            axes = [a for a in q.axes if a in reduction and q.ranks.sizes[a] > 1]
            if q.what in every and axes and not q.right(q.combined((), 1.0)):
                for a in axes:
                    found.setdefault((reduction[a], a), {})[q.what.removeprefix("gradient of ")] = None
    some = {name for names in found.values() for name in names}
    of = f" of {', '.join(some)}" if len(some) < len(every) else ""
    each = [
        f"{how} gradients{of} over {' and '.join(axes)}"
        for how, word in (("average", "mean"), ("sum", "sum"))
        if (axes := ["the ranks" if a == RANKS else a for w, a in found if w == word])
    ]
    return f"if you {' and '.join(each)} (wrap the model in DDP, or pass already_reduced)" if each else ""


def _notes(run: Run) -> Iterator[str]:
    """Yield what was taken for granted, and how what the ranks return was combined."""
    if run.setting is None:
        return
    yield from run.setting.notes
    for q in run.quantities:
        if q.note and q.ok:
            yield f"{q.what}: {q.note}" + f" ({run.ranks})" * (q.group == "value")


def _not_compared(run: Run) -> Iterator[str]:
    """Yield what the verdict says nothing of."""
    if run.setting is None:
        return
    frozen = [s.name for s in run.setting.spans if s.kind == "parameter" and s.first and not s.tensor.requires_grad]
    held = [h for mine in run.setting.held for h in mine]
    padded = [h.name for h in held if not h.is_new and bool((h.index < 0).any())]
    anew = [h.name for h in held if h.write is not None]
    hidden = [q.what for q in run.quantities if q.ok and not q.decided]
    for names, words in (
        (frozen, "frozen: they have no gradient"),
        (padded, "the numbers that pad it"),
        (anew, "its first numbers: shard makes it anew, and the check writes those of one process"),
        (hidden, "not decided: rounding hides it"),
    ):
        yield from together((name, words) for name in dict.fromkeys(names))
    trained = [(v.seen, q.what) for q in run.quantities if q.group in TRAINED for v in q.verdicts.values()]
    seen, what = max(trained, default=(0.0, ""))
    if seen > 1e-3:  # what rounding hides
        yield f"factors within {run.setting.tolerance:.1g} of 1, and of the {what} within {seen:.1g}"


def _of_runs(runs: Sequence[Run]) -> Iterator[str]:
    """Say how right and wrong runs differ."""
    right, wrong = ([run.ranks for run in runs if run.table.ok == ok] for ok in (True, False))
    if not right or not wrong:
        return
    if all(len(set(r.rows)) > 1 for r in wrong) and all(len(set(r.rows)) <= 1 for r in right):
        yield "right if all ranks have equally many rows, wrong if not"
    elif max(r.size for r in right) < min(r.size for r in wrong):
        yield f"right on up to {max(r.size for r in right)} ranks, wrong on {min(r.size for r in wrong)}"


class _Wrong:
    """A run that is wrong, whatever it is compared with; `runs` are all."""

    reference, fallback = "the derivative of the losses", "not proportional to the derivative of the losses"

    def __init__(self, check: Check, run: Run, runs: Sequence[Run]) -> None:
        self.check, self.run, self.ranks = check, run, run.ranks
        self.others = [each for each in runs if each is not run]
        self.wrong = [q for q in run.quantities if not q.ok]
        self.gradients = [q for q in self.wrong if q.group == "gradient"]
        #: Those whose numbers are looked at.
        self.explained = self.gradients
        #: "mean" or "sum" by axis: how the ranks' losses combine.
        self.reduction: Mapping[str, str] = {}
        #: Parts of the whole that a loss may divide by, in words.
        self.shares: Mapping[str, float] = {}

    def experiments(self) -> list[Callable[[], Iterator[str]]]:
        """Return what runs the program again."""
        return [self._other_losses, self._undetached, self._orders]

    def lines(self) -> list[str]:
        """Return all observations; what several quantities have in common is said once."""
        lines = list(together((q.what, words) for q in self.explained for words in self._of_quantity(q)))
        if any(map(_not_finite, self.wrong)):
            return lines
        for experiment in self.experiments():
            with contextlib.suppress(Exception):  # it may not bear what the program does, and then says nothing
                lines += list(experiment())
        return lines or list(together((q.what, self.fallback) for q in self.explained))

    def _named(self, ranks: Iterable[int]) -> str:
        return ", ".join(map(self.ranks.named, dict.fromkeys(ranks)))

    # ── numbers ──

    def _of_quantity(self, q: Quantity) -> Iterator[str]:
        if bad := _not_finite(q):
            empty = all(self.ranks.rows and not self.ranks.rows[r] for r in bad)
            yield f"not finite on rank {self._named(bad)}{', which has no rows' * empty}"
            return
        if q.group == "start":
            yield "the ranks that have the same piece start with other numbers"
            return
        if q.most_allowed is None:
            yield "the loss is not differentiable here: its two sides have other slopes"
            return
        held = [c for c in q.compared if c.wanted.any()]
        zero = [c.rank for c in held if not c.got.any()]
        if zero and len(zero) == len(held):
            yield "zero on every rank"
            return
        if zero:
            yield f"zero on rank {self._named(zero)}"
        if differentiable(q.wanted):
            tests = self._times, self._reduced, self._of_other_ranks, self._rows_left_out
            yield from itertools.islice(filter(None, (test(q) for test in tests)), 1)
        if q.group == "value":
            yield from self._logarithm(q)
            yield from self._unequal(q)

    def _times(self, q: Quantity) -> str | None:
        """Say which multiple it is; all ranks have the same. A single number is a multiple of anything."""
        ratio = q.ratio(q.compared)
        if ratio is None or abs(ratio - 1) < 1e-7:
            return None
        scales = self._scales(q, ratio)
        share = next((words for words, part in self.shares.items() if math.isclose(ratio, part, rel_tol=1e-6)), None)
        many = int((q.wanted.abs() > 1e-6 * (q.unit or 1)).sum()) > 1
        if not (many or scales or (q.group in ("value", "metric") and share)):
            return None
        size = f"{ratio:.4g}" if abs(ratio - 1) > 1e-3 else f"1 + {ratio - 1:.1e}"
        size += f" = {' or '.join(scales)}" if scales else ""
        words = f"{size} times {self.reference}"
        if q.group == "move":
            words = f"moved {size} times as far as on one process"
        for axis, how in self.reduction.items() if q.axes or q.of_input else ():
            other, axis_words = "sum" if how == "mean" else "mean", "N" if axis == RANKS else f"the size of {axis}"
            if [*scales] == [axis_words if how == "sum" else f"1/{axis_words}"]:
                return f'{words}, exact under "{other}" over {_axis(axis)}'
        return f"{words}, which is {share}" if share else words

    def _scales(self, q: Quantity, ratio: float) -> dict[str, None]:
        """Return the powers of sizes of axes, in words, that fit this ratio, and those of all other runs."""
        each = [(self.ranks, ratio)]
        for run in self.others:
            for other in (p for p in run.quantities if p.what == q.what):
                of_other = 1.0 if other.ok else other.ratio(other.compared)
                each += [(run.ranks, of_other)] if of_other is not None else []
        close = max(1e-6, 2 * (q.most_allowed or 0.0))
        found = dict[str, None]()
        for words in self.ranks.in_words:
            for power, of_size in {1: words, -1: f"1/{words}", 2: f"{words}²", -2: f"1/{words}²"}.items():
                sizes = [float(ranks.in_words.get(words, 1)) ** power for ranks, _ in each]
                if all(math.isclose(r, size, rel_tol=close) for size, (_, r) in zip(sizes, each, strict=True)):
                    found[of_size] = None
        return found

    def _reduced(self, q: Quantity) -> str | None:
        """Say which other reduction over ranks makes it right; of one number, in all runs."""
        others = [p for run in self.others for p in run.quantities if p.what == q.what and not p.ok]
        found = self._reductions(q)
        for other in others if q.wanted.numel() < 2 else ():
            found &= self._reductions(other)
        return min(found, key=len, default=None)

    def _reductions(self, q: Quantity) -> set[str]:
        free, found = q.ranks.axes, set[str]()
        for axes in itertools.chain(*(itertools.combinations(free, k) for k in range(1, len(free) + 1))):
            if q.group in ("state", "move", "start") or set(axes) == set(q.axes).intersection(free):
                continue
            averaged = [a for a in axes if self.reduction.get(a) == "mean" and a in q.axes]
            factor = q.factor if q.of_input else 1 / math.prod(q.ranks.sizes[a] for a in averaged)
            mean = factor / math.prod(q.ranks.sizes[a] for a in axes if a not in averaged)
            for how, times in (("a sum", factor), ("a mean", mean)):
                if q.right(q.combined(axes, times)):
                    is_mean = how == "a mean" or len(averaged) == len(axes)
                    found.add(f"right after {'a mean' if is_mean else how} over {' and '.join(map(_axis, axes))}")
        return found

    def _of_other_ranks(self, q: Quantity) -> str | None:
        """Say which rank's piece each rank has, if that is another one's."""
        each = q.compared
        if len(each) != self.ranks.size or len(each) == 1 or q.wanted.numel() < 2:
            return None
        own = [[s for s, d in enumerate(each) if d.wanted.numel() and near(c.got, d.wanted)] for c in each]
        held = [s[0] for s in own if len(s) == 1]
        if sorted(held) != list(range(len(each))) or held == sorted(held):
            return None
        name = self.ranks.named
        return ", ".join(f"rank {name(r)} has rank {name(s)}'s piece" for r, s in enumerate(held) if r != s)

    def _rows_left_out(self, q: Quantity) -> str | None:
        """Say which rows of an input have no gradient though they should."""
        if not q.of_input or q.wanted.dim() < 2:
            return None
        whole = torch.zeros_like(q.wanted).flatten()
        for c in q.compared:
            whole.index_add_(0, c.index, c.got.abs().to(whole.dtype))
        got, wanted = (x.view(q.wanted.shape).flatten(1).abs().amax(1) for x in (whole, q.wanted))
        rows = ((got == 0) & (wanted > 0)).nonzero().flatten().tolist()
        return f"zero in row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))} of the whole" if rows else None

    def _logarithm(self, q: Quantity) -> Iterator[str]:
        """Whether a value is off by the logarithm of a size, as where the ranks of an axis count each row again."""
        difference = float((q.compared[0].got - q.compared[0].wanted).real)
        for axis in self.ranks.axes:
            n = self.ranks.sizes[axis]
            if math.isclose(abs(difference), math.log(n), rel_tol=1e-6):
                size = f"the size of {axis}" if axis != RANKS else "N"
                yield f"{'larger' if difference > 0 else 'smaller'} by log {n}, the logarithm of {size}"

    def _unequal(self, q: Quantity) -> Iterator[str]:
        """Whether a loss that counts once along an axis differs between its ranks; others are reduced already."""
        got = {c.rank: c.got for c in q.compared}
        for axis in self.ranks.axes:
            pairs = ((got[r], got.get(self.ranks.along([axis], r)[0])) for r in got)
            if any(b is not None and not near(a, b) for a, b in pairs):
                yield f"differs between the ranks of {_axis(axis)}, where it counts once"

    # ── experiments ──

    def _again(self, **more: Any) -> list[Measured]:
        found: list[Measured] = self.check.on_ranks(self.run.on, [replace(t, **more) for t in self.run.tasks])
        return found

    def _other_losses(self) -> Iterator[str]:
        """Which ranks' losses reach a gradient: backward with the loss of one rank at a time."""
        n = self.ranks.size
        if not self.gradients or not self.run.own_losses or n == 1:
            return
        #: By gradient: on which ranks it is not zero, for each rank whose loss counts.
        reached: dict[str, list[list[bool]]] = {}
        for q in range(n):
            tasks = [replace(task, factor=float(r == q)) for r, task in enumerate(self.run.tasks)]
            for found in self.run.compared(self.check.on_ranks(self.run.on, tasks)):
                some = [any(bool(p.got.any()) for p in mine) for mine in found.pieces]
                reached.setdefault(found.what, []).append(some)
        lines = []
        for gradient in self.gradients[:_MOST]:
            lost = [q for q, some in enumerate(reached[gradient.what]) if not any(some)]
            is_own = not any(some[r] for q, some in enumerate(reached[gradient.what]) for r in range(n) if q != r)
            if len(lost) == n or not (lost or is_own) or not self.check.depends(self.run, gradient):
                continue
            words = f"the loss of rank {self._named(lost)} reaches it on no rank"
            lines.append((gradient.what, "no other rank's loss reaches it" if is_own else words))
        yield from together(lines)

    def _undetached(self) -> Iterator[str]:
        """What is right if the user's calls of detach() keep the graph."""
        if self.gradients and any(self.cuts.values()):
            right = {q.what for q in self.run.compared(self._again(experiment=Undetached())) if q.ok}
            words = "right if the calls of detach() and .data below keep the graph"
            yield from together((q.what, words) for q in self.gradients if q.what in right)

    @cached_property
    def watched(self) -> list[Measured]:
        """The ranks' results with a record of graph cuts and submodules."""
        return self._again(experiment=Watched())

    @cached_property
    def cuts(self) -> Cuts:
        """Where tensors leave the graph of a forward; of calls of detach(), those that change a gradient."""
        with contextlib.suppress(Exception):
            found = of_all_ranks(m.cuts for m in self.watched)
            detached = [line for line, is_detached in found.items() if is_detached][:_MOST]
            idle = [line for line in detached if not self._matters(line)]
            return {line: is_detached for line, is_detached in found.items() if line not in idle}
        return {}

    def _matters(self, line: str) -> bool:
        """Whether a gradient changes if this call of detach() keeps the graph."""
        again = self._again(experiment=Undetached(frozenset([line])))
        pairs = zip(again, self.run.measured, strict=True)
        return any(not near(a, b) for m, n in pairs for a, b in zip(m.gradients, n.gradients, strict=True))

    def _orders(self) -> Iterator[str]:
        if self.wrong and all(q.group == "second order" for q in self.wrong):
            yield "first order is right: it is the derivative of the backward that differs"


class _BesideOne(_Wrong):
    """A run that differs from one process."""

    reference, fallback = "that of one process", "other numbers than on one process"

    def __init__(self, matching: Matching, run: Run, runs: Sequence[Run]) -> None:
        super().__init__(matching, run, runs)
        assert run.setting is not None
        self.matching, self.setting, self.batch = matching, run.setting, run.setting.batch
        self.explained, self.reduction = self.wrong, run.setting.reduction
        self.shares = {**self.batch.shares(), **self._norms()}

    def experiments(self) -> list[Callable[[], Iterator[str]]]:
        of_one, of_weights = self._of_one_process, partial(weights_in_words, self.matching, self.run)
        return [self._own_rows, of_weights, *super().experiments(), self._of_submodules, self._of_forward, of_one]

    def _norms(self) -> dict[str, float]:
        """Return by how much a norm differs that counts each copy of a parameter, and what is clipped by it."""
        found = dict[str, float]()
        gradients = [q for q in self.run.quantities if q.group == "gradient" and not q.of_input]
        squares = {q.what.removeprefix("gradient of "): float(q.wanted.abs().square().sum()) for q in gradients}
        pieces = [[[p.index.flatten() for p in mine] for mine in q.pieces] for q in gradients]
        divided = [self.ranks.split([torch.cat([torch.arange(0), *mine]) for mine in each]) for each in pieces]
        for axis in self.ranks.axes:
            copies = [name for name, axes in zip(squares, divided, strict=True) if axis not in axes]
            if more := sum(squares[name] for name in copies) if len(copies) < len(squares) else 0.0:
                factor = math.sqrt(1 + (self.ranks.sizes[axis] - 1) * more / sum(squares.values()))
                words = f"a norm that counts {', '.join(copies)} once on each rank along {axis}"
                found |= {f"that of {words}": factor, f"what clipping gives by {words}": 1 / factor}
        return found

    def _own_rows(self) -> Iterator[str]:
        """Whether each rank returns what one process returns for the rank's own part."""
        if not any(q.group in ("value", "output") for q in self.wrong) or self.matching.subject.shard:
            return
        alone = [self.matching.on_one(task.part, backward=False).outputs for task in self.run.tasks]
        each = zip([m.outputs for m in self.run.measured], alone, strict=True)
        if all(near(a, b) for mine, of_one in each for a, b in zip(mine, of_one, strict=True)):
            yield "each rank returns what one process returns for the rank's own part of the batch alone"

    def _of_submodules(self) -> Iterator[str]:
        """The first submodules that differ; where the losses are right, no output does."""
        if (
            self.matching.of_module
            and not self.ranks.micro
            and any(q.group not in ("state", "move", "start") for q in self.wrong)
        ):
            whole = self.matching.whole(self.batch, experiment=Watched()).traces
            values = [q.ok for q in self.run.quantities if q.group in ("value", "output")]
            whole = replace(whole, outputs={}) if values and all(values) else whole
            means = [self.ranks.sizes[a] for a, how in self.reduction.items() if how == "mean"]
            factors = [1.0, float(math.prod(means))]
            tensors = {span.name: span.tensor.detach().cpu() for span in self.matching.of_module}
            yield from first_differences(whole, [m.traces for m in self.watched], self.ranks, factors, tensors)

    def _of_forward(self) -> Iterator[str]:
        """Whether backward gives the derivative of what the ranks return, along a random direction of each tensor."""
        h, sizes = 1e-4, self.ranks.sizes
        wrong = [q for q in self.gradients if q.group == "gradient"][:_MOST]
        if any(m.own_backward for m in self.run.measured) or eps_of(self.matching.precision(self.batch)) > 1e-12:
            return
        along = [numbers(tuple(q.wanted.shape), q.wanted.dtype, q.leaf, 0, 5) for q in wrong]
        each = [{q.leaf: h * v} for q, v in zip(wrong, along, strict=True)]
        per_rank = [[self.setting.along(direction, r) for direction in each] for r in range(self.ranks.size)]
        losses = self.matching.on_ranks(self.run.on, self.run.tasks, losses_along, per_rank, range(self.ranks.size))
        count = math.prod(n for axis, n in sizes.items() if axis not in self.reduction)  # a loss that all have
        mean = math.prod(sizes[axis] for axis, how in self.reduction.items() if how == "mean")
        found = differences(self.run.measured, losses, [h] * len(wrong), count)
        lines = []
        for q, v, difference in zip(wrong, along, found, strict=True):
            of_ranks, of_one = difference.total / mean, float(real_inner(v, q.wanted))
            copies = torch.bincount(torch.cat([c.index.flatten() for c in q.compared]), minlength=v.numel())
            total = sum(float(real_inner((v.flatten() / copies)[c.index], c.got.to(v.dtype))) for c in q.compared)
            scale = max(abs(of_ranks), abs(total), 1e-6 * largest(q.wanted))
            words = "backward does not give the derivative of what the ranks return"
            if abs(total - of_ranks) < 1e-6 * scale:
                if abs(of_ranks - of_one) < 1e-6 * scale:
                    continue
                words = "backward gives the derivative of what the ranks return; it is the forward that differs"
            lines += [(q.what, words)] * (difference.rounding < 1e-6 * scale * mean)
        yield from together(sorted(lines, key=lambda line: "does not" in line[1]))

    def _of_one_process(self) -> Iterator[str]:
        """Whether one process itself has other numbers with other seeds, or rounds them so."""
        a, b = (self.matching.on_one(self.batch.part(None), seed) for seed in (0, 1))
        each = (
            zip(x, y, strict=True) for x, y in ((a.outputs, b.outputs), (a.gradients, b.gradients), (a.state, b.state))
        )
        if not all(near(x, y) for x, y in itertools.chain(*each)):
            each_module = (self.matching.subject.module or nn.Identity()).named_modules()
            drops = [name for name, m in each_module if "Dropout" in type(m).__name__ and getattr(m, "p", 0) != 0]
            such = f"such as dropout in {drops[0]}" if drops else "such as dropout"
            yield f"one process itself has other numbers with another seed: random numbers, {such}"


def _not_finite(q: Quantity) -> list[int]:
    """Return the ranks that have numbers that are not finite, where one process has none."""
    bad = [c.rank for c in q.compared if differentiable(c.got) and not c.got.isfinite().all()]
    return bad if q.wanted.isfinite().all() else []


def _axis(axis: str) -> str:
    return "the ranks" if axis == RANKS else axis
