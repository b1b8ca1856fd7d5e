"""Compares what the ranks have with the whole, position by position."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffcoll.testing.harness.batch import Batch
from diffcoll.testing.harness.fill import Held
from diffcoll.testing.harness.layout import Fit, Placement, Span, partial_axes, said_of
from diffcoll.testing.harness.mesh import Ranks
from diffcoll.testing.harness.precision import Verdict, judged
from diffcoll.testing.harness.rank import Measured, Task
from diffcoll.testing.harness.report import Row
from diffcoll.testing.numbers import differentiable, largest, relative_errors

#: A gradient smaller than this part of the largest one is compared with that part: what is zero by cancellation, such
#: as the gradient of a bias before a batch norm, has a relative error of 1.
SMALL = 1e-3
#: A row of a gradient that is smaller than this part of the largest one is compared with that part.
_SMALL_ROW = 1e-2


@dataclass(frozen=True)
class Piece:
    """What one rank has of a quantity."""

    #: Positions in the whole.
    index: Tensor
    got: Tensor


@dataclass(frozen=True)
class Compared:
    """What one rank has after the reduction, beside what it should have; flat."""

    rank: int
    index: Tensor
    got: Tensor
    wanted: Tensor
    #: The relative error of each number.
    errors: Tensor


@dataclass(eq=False)
class Quantity:
    """One quantity, as the ranks have it, and as one process has it."""

    what: str
    #: "value", "output", "gradient", "second order", "state", or "move": how far the call moved a parameter.
    group: str
    wanted: Tensor
    #: For each rank its pieces; a rank may have several of a tensor that is tied, or none.
    pieces: list[list[Piece]]
    ranks: Ranks
    #: The largest |wanted|, to which errors are relative.
    unit: float
    #: The largest relative error that is right, of all numbers or of each; below zero: none is, at a kink.
    tolerance: float | Tensor
    #: The axes over which the check, or somebody later, sums it, and what it multiplies it by then.
    axes: tuple[str, ...] = ()
    factor: float = 1.0
    #: The number of the tensor of the whole that it is of, and whether that is an input; −1: it is of the result.
    leaf: int = -1
    of_input: bool = False
    #: What one process has with other last digits, in each sample.
    samples: tuple[Tensor, ...] = ()
    #: How the check combined what the ranks returned, in words.
    note: str = ""

    def combined(self, axes: Sequence[str] | None = None, factor: float | None = None) -> list[Compared]:
        """Return what each rank has after a sum over axes."""
        axes, factor = self.axes if axes is None else axes, self.factor if factor is None else factor
        pieces = [(r, p.index.flatten(), p.got.flatten()) for r, mine in enumerate(self.pieces) for p in mine]
        if not differentiable(self.wanted):
            return [self._compared(*piece) for piece in pieces]
        totals = [_wide(torch.zeros_like(self.wanted)).flatten() for _ in self.pieces] if axes else []
        pieces = [(r, index, _wide(x)) for r, index, x in pieces]
        for r, index, x in pieces if axes else ():
            totals[r].index_add_(0, index, x)
        found = []
        for r, index, x in pieces:
            others = [totals[s] for s in self.ranks.along(axes, r) if s != r]
            found.append(self._compared(r, index, factor * (x + sum(total[index] for total in others))))
        return found

    def _compared(self, rank: int, index: Tensor, got: Tensor) -> Compared:
        wanted = self.wanted.flatten()[index]
        if differentiable(wanted):
            return Compared(rank, index, got, wanted, relative_errors(got, wanted, self._units[index]))
        return Compared(rank, index, got, wanted, torch.where(got == wanted.to(got.dtype), 0.0, math.inf))

    @cached_property
    def compared(self) -> list[Compared]:
        """What is judged."""
        return self.combined()

    @cached_property
    def _units(self) -> Tensor:
        unit = self.unit or 1.0
        rows = torch.ones(self.wanted.shape, dtype=torch.double)
        if self.group in ("gradient", "second order") and self.wanted.dim() > 1 and self.wanted.numel() and self.unit:
            of_rows = self.wanted.detach().abs().double().flatten(1).amax(1) / unit
            rows = rows * of_rows.clamp(_SMALL_ROW, 1.0).view(-1, *[1] * (self.wanted.dim() - 1))
        return unit * rows.flatten()

    # ── the verdict ──

    def judged(self, each: Sequence[Compared]) -> dict[int, Verdict]:
        """Return the verdict on what each rank has."""
        held = dict.fromkeys(c.rank for c in each)
        return {r: self._judged([c for c in each if c.rank == r]) for r in held}

    def _judged(self, mine: Sequence[Compared]) -> Verdict:
        tolerance = torch.as_tensor(self.tolerance, dtype=torch.double).expand(self.wanted.numel())
        if all(bool((c.errors <= tolerance[c.index]).all()) for c in mine):
            return Verdict(ok=True, seen=self.most_allowed or 0.0)
        if not self.samples or not differentiable(self.wanted):
            return Verdict(ok=False)
        got, index = (torch.cat(x) for x in zip(*((c.got, c.index.flatten()) for c in mine), strict=True))
        wanted, shape = _wide(self.wanted).flatten(), self.wanted.shape
        changes = torch.stack([_wide(x).flatten() for x in self.samples]) - wanted
        blocks = [torch.arange(len(index))]
        if len(shape) > 1:
            blocks += [index // (self.wanted.numel() // shape[0]), index % shape[-1]]
        shared = float(changes.abs().square().mean().sqrt())
        return judged(got, wanted[index], changes[:, index], shared, blocks, self.most_allowed or 0.0)

    @cached_property
    def verdicts(self) -> dict[int, Verdict]:
        """The verdict on what each rank has."""
        return self.judged(self.compared)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(verdict.ok for verdict in self.verdicts.values())

    @property
    def decided(self) -> bool:
        """Whether rounding hides nothing on any rank."""
        return all(verdict.decided for verdict in self.verdicts.values())

    def right(self, each: Sequence[Compared]) -> bool:
        """Whether this would be right."""
        return all(verdict.ok and verdict.decided for verdict in self.judged(each).values())

    @property
    def error(self) -> float:
        """The largest relative error on any rank."""
        return _largest_error(self.compared)

    @property
    def most_allowed(self) -> float | None:
        """The largest error that is right for any number; None: the quantity cannot be compared."""
        allowed = torch.as_tensor(self.tolerance, dtype=torch.double)
        return None if (allowed < 0).any() else float(allowed.max()) if allowed.numel() else 0.0

    def ratio(self, each: Sequence[Compared]) -> float | None:
        """Return got / wanted, if all ranks have the same real multiple."""
        if not differentiable(self.wanted) or not each:
            return None
        got, wanted = torch.cat([c.got for c in each]), torch.cat([c.wanted for c in each])
        return multiple(got, wanted, self.most_allowed or 0.0)

    @property
    def rows(self) -> list[Row]:
        """The rows of the report; ranks with the same numbers share one."""
        found: dict[object, tuple[list[int], Row]] = {}
        for r, verdict in self.verdicts.items():
            mine = [c for c in self.compared if c.rank == r]
            row = Row(self.what, "", _largest_error(mine), self.ratio(mine), verdict.ok, self.most_allowed)
            row = row._replace(decided=verdict.decided, seen=verdict.seen, numbers=self._numbers(mine))
            key = (row.ok, row.decided) if row.ok else (f"{row.error:.2e}", row.numbers, f"{row.ratio or 0:.4g}")
            of_row, worst = found.get(key, ([], row))
            found[key] = [*of_row, r], max(worst, row, key=lambda row: (row.error, row.seen))
        every = len(self.verdicts)
        return [
            row._replace(rank="all" if len(of_row) == every > 1 else ", ".join(map(self.ranks.named, of_row)))
            for of_row, row in found.values()
        ]

    def _numbers(self, mine: Sequence[Compared]) -> str:
        """Return the first integers or flags that differ, in words."""
        each = [] if differentiable(self.wanted) else [(c.got.tolist(), c.wanted.tolist()) for c in mine]
        pairs = (pair for got, wanted in each for pair in zip(got, wanted, strict=True))
        return next((f"{got}, not {wanted}" for got, wanted in pairs if got != wanted), "")


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in float64 or complex128."""
    return x.to(torch.complex128 if x.is_complex() else torch.double)


def _largest_error(each: Sequence[Compared]) -> float:
    return max((float(c.errors.max()) for c in each if c.errors.numel()), default=0.0)


def multiple(got: Tensor, wanted: Tensor, tolerance: float) -> float | None:
    """Return got / wanted if got is a real multiple of wanted."""
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (got, wanted))
    a, b = a.double().flatten(), b.double().flatten()
    if not b.numel() or not (a.isfinite().all() and b.isfinite().all()) or not b.abs().max():
        return None
    ratio = float(a @ b / (b @ b))
    close = max(tolerance, 1e-9) * 10 * float(b.abs().max()) * max(abs(ratio), 1e-3)
    return ratio if float((a - ratio * b).abs().max()) <= close else None


# ── the quantities of a run ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Asked:
    """What the user has asked for."""

    batch: Any
    losses: str | Mapping[str, str]
    #: Axes over which the program itself has reduced its gradients.
    already_reduced: tuple[str, ...]
    placements: Mapping[str, Placement]
    order: int
    dtype: torch.dtype | None
    tolerance: float | None


class Part(NamedTuple):
    """The numbers of a tensor of the whole that a rank holds in one of its tensors."""

    leaf: int
    #: Which of the rank's numbers they are, and which of the whole's.
    inside: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Setting:
    """One run, before it starts: what each rank gets, how what it has makes up the whole, and what one process has."""

    ranks: Ranks
    batch: Batch
    #: The positions of each tensor of the batch on each rank.
    index: Mapping[str, list[Tensor]]
    whole: Measured
    #: "mean" or "sum" by axis: how the ranks' losses combine.
    reduction: Mapping[str, str]
    asked: Asked
    outputs: Sequence[Fit]
    #: The variables of the batch, followed by the tensors of the whole module, and the tensors of each rank.
    spans: Sequence[Span]
    held: Sequence[Sequence[Held]]
    notes: Sequence[str]
    tolerance: float
    #: The dtype and the tolerance, in words.
    precision: str
    tasks: Sequence[Task] = ()

    @cached_property
    def parts(self) -> list[list[list[Part]]]:
        """For each tensor of the whole, what each rank holds of it; tied tensors of the rank count once."""
        return [[list(self._parts(i, mine)) for mine in self.held] for i in range(len(self.spans))]

    def _parts(self, i: int, held: Sequence[Held]) -> Iterator[Part]:
        span = self.spans[i]
        for k, h in enumerate(held):
            inside = span.holds(h.index)
            if h.first and (inside.any() or (span.kind == "input" and h.name == span.name)):  # of an input also no rows
                yield Part(k, inside, h.index[inside] - span.start)

    def pieces(self, i: int, each: Sequence[Sequence[Tensor]]) -> list[list[Piece]]:
        """Return the pieces of a tensor of the whole, given what each rank has for its tensors."""
        ranks = zip(self.parts[i], each, strict=True)
        return [[Piece(p.positions, mine[p.leaf][p.inside]) for p in parts] for parts, mine in ranks]

    def along(self, directions: Mapping[int, Tensor], r: int) -> dict[int, Tensor]:
        """Return the directions of a rank's tensors, given those of tensors of the whole."""
        found: dict[int, Tensor] = {}
        for i, v in directions.items():
            for p in self.parts[i][r]:
                of_tensor = found.setdefault(p.leaf, torch.zeros(p.inside.shape, dtype=v.dtype))
                of_tensor[p.inside] = v.flatten()[p.positions]
        return found

    def quantity(
        self,
        what: str,
        group: str,
        wanted: Tensor,
        pieces: list[list[Piece]],
        said: Placement | None = None,
        least: float = 0.0,
        reduced: Collection[str] = (),
        leaf: int = -1,
    ) -> Quantity:
        """Return a quantity, to be summed over axes unless it is `reduced`; `least` is the least unit of errors."""
        axes, factor = list(partial_axes(said, self.ranks)), 1.0
        of_input = leaf >= 0 and self.spans[leaf].kind == "input"
        if group in ("value", "gradient", "second order"):
            held = [torch.cat([torch.arange(0), *(p.index.flatten() for p in mine)]) for mine in pieces]
            split = self.ranks.split(held)
            summed = [axis for axis in self.reduction if axis not in split and axis not in reduced]
            means = [a for a, how in self.reduction.items() if how == "mean" and (of_input or a in summed)]
            axes, factor = list(dict.fromkeys(summed + axes)), 1 / math.prod(self.ranks.sizes[a] for a in means)
        unit, t = max(largest(wanted), least), self.tolerance
        return Quantity(what, group, wanted, pieces, self.ranks, unit, t, tuple(axes), factor, leaf, of_input)


def quantities(setting: Setting, each: Sequence[Measured]) -> list[Quantity]:
    """Return everything that is compared."""
    return [*_outputs(setting, each), *_gradients(setting, each), *_state(setting, each), *_of_shard(setting, each)]


def with_losses_noted(found: Sequence[Quantity], ranks: Ranks) -> list[Quantity]:
    """Let a loss be off by exactly the size of an axis, with a note, if all gradients are right."""
    gradients = [q for q in found if q.group in ("gradient", "second order", "move")]
    if not gradients or not all(q.ok for q in gradients):
        return list(found)
    return [_noted(q, ranks) if q.group == "value" and not q.ok else q for q in found]


def _noted(q: Quantity, ranks: Ranks) -> Quantity:
    for words, n in ranks.in_words.items():
        for scale, times in ((1 / n, words), (float(n), f"1/{words}")):
            other = replace(q, factor=q.factor * scale)
            if other.ok:
                note = f"{times} times that of one process; all gradients are right"
                return replace(other, note=note)
    return q


def _outputs(setting: Setting, each: Sequence[Measured]) -> Iterator[Quantity]:
    whole, reduction = setting.whole, setting.reduction
    for i, (wanted, fit) in enumerate(zip(whole.outputs, setting.outputs, strict=True)):
        path, ys = whole.paths[i], [m.outputs[i] for m in each]
        pieces = [[] if j is None else [Piece(j, y)] for j, y in zip(fit.index, ys, strict=True)]
        said = said_of(setting.asked.placements, f"output{path}")
        if wanted.dim() or not differentiable(wanted):
            q = setting.quantity(f"output{path}", "output", wanted, pieces, said)
            if not wanted.dim() and not differentiable(wanted) and not q.ok:
                together, words = _together(ys, wanted)
                q = replace(q, pieces=[[Piece(torch.tensor(0), together)] for _ in ys], note=words)
            yield q
            continue
        q = setting.quantity(f"value{path}", "value", wanted, pieces, said, SMALL * whole.scale)
        if not whole.has_graph[i]:  # a metric: every rank has it, or a part of a mean or of a sum
            mean = 1 / math.prod(setting.ranks.sizes[axis] for axis in reduction)
            ways = [((), 1.0, ""), (tuple(reduction), mean, "the mean"), (tuple(reduction), 1.0, "the sum")]
            found = [replace(q, group="metric", axes=axes, factor=f, note=words) for axes, f, words in ways]
            q = next((other for other in found if other.ok), found[1])
            q = replace(q, note=q.note and f"{q.note} of what the ranks return is compared")
        yield q


def _together(ys: Sequence[Tensor], wanted: Tensor) -> tuple[Tensor, str]:
    """Return the integer or flag of all ranks, in words too: a count is summed, a flag may be of any rank or of all."""
    every = torch.stack(list(ys))
    if wanted.dtype != torch.bool:
        return every.sum(0), "the sum of what the ranks return is compared"
    return (every.any(0), "true if any rank's is") if wanted.any() else (every.all(0), "true if all ranks' are")


def _gradients(setting: Setting, each: Sequence[Measured]) -> Iterator[Quantity]:
    own, whole = any(m.own_backward for m in each), setting.whole
    if not own and not any(whole.has_graph):
        return
    orders = [("gradient", [m.gradients for m in (whole, *each)])]
    if all(m.second for m in (whole, *each)):
        orders.append(("second order", [m.second for m in (whole, *each)]))
    for group, (of_whole, *of_ranks) in orders:
        if own and not any(g.any() for gradients in (of_whole, *of_ranks) for g in gradients):
            continue  # as after zero_grad: only the moves can be compared
        least = SMALL * largest(*of_whole)
        for i, span in enumerate(setting.spans):
            if span.trained and (span.kind == "parameter" or setting.batch.asked or not own):
                pieces, said = setting.pieces(i, of_ranks), said_of(setting.asked.placements, span.name)
                held = [setting.held[r][p.leaf] for r, parts in enumerate(setting.parts[i]) for p in parts]
                reduced = {axis for h in held for group in h.groups for axis in setting.ranks.axes_of(group) or ()}
                reduced |= {*(setting.reduction if own else setting.asked.already_reduced)}
                done = reduced if span.kind == "parameter" else ()
                yield setting.quantity(f"{group} of {span.name}", group, of_whole[i], pieces, said, least, done, i)


def _state(setting: Setting, each: Sequence[Measured]) -> Iterator[Quantity]:
    """Yield the buffers, and the parameters that the call changed, here or on one process."""
    for i, span in enumerate(setting.spans):
        if span.kind == "input" or not span.first:
            continue
        wanted, before, group = setting.whole.state[i], setting.whole.before[i], "state"
        pieces = setting.pieces(i, [m.state for m in each])
        changed = differentiable(wanted) and not torch.equal(wanted, before)
        if changed and span.kind == "parameter":  # which a small learning rate would hide
            group, wanted = "move", _wide(wanted) - before
            of_ranks = [[_wide(a) - b for a, b in zip(m.state, m.before, strict=True)] for m in each]
            pieces = setting.pieces(i, of_ranks)
        q = setting.quantity(f"{span.kind} {span.name}", group, wanted, pieces, leaf=i)
        if span.kind == "buffer" or changed or not q.ok:
            yield q


def _of_shard(setting: Setting, each: Sequence[Measured]) -> Iterator[Quantity]:
    """Yield what differs before the call: whether a tensor is trained, and the first numbers of one made anew."""
    for i, span in enumerate(setting.spans):
        held = [[(p, setting.held[r][p.leaf]) for p in parts] for r, parts in enumerate(setting.parts[i])]
        trained = [[Piece(torch.tensor(0), torch.tensor(h.requires_grad)) for _, h in mine] for mine in held]
        q = setting.quantity(f"requires_grad of {span.name}", "state", torch.tensor(span.tensor.requires_grad), trained)
        if span.kind == "parameter" and span.first and not q.ok:
            yield q
        first = [
            [Piece(p.positions, m.first[h.name][p.inside]) for p, h in mine if h.name in m.first]
            for m, mine in zip(each, held, strict=True)
        ]
        wanted = torch.zeros(span.tensor.numel(), dtype=span.tensor.dtype)
        for p in (p for mine in reversed(first) for p in mine):  # of the lowest rank that has a number
            wanted[p.index] = p.got.to(wanted.dtype)
        q = setting.quantity(f"first numbers of {span.name}", "start", wanted.view(span.tensor.shape), first)
        if any(first) and not q.ok:
            yield q
