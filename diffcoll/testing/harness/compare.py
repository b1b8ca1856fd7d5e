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
from diffcoll.testing.harness.layout import RANKS, Fit, Held, Placement, Ranks, Span, partial_axes, said_of, split_axes
from diffcoll.testing.harness.rank import Measured, Task
from diffcoll.testing.harness.report import Row, scale_in_words
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
    #: Whether it is printed and not failed.
    excused: bool = False

    def combined(
        self, axes: Sequence[str] | None = None, factor: float | None = None, weights: Sequence[float] | None = None
    ) -> list[Compared]:
        """Return what each rank has after a sum over axes, in which the ranks may have weights."""
        axes, factor = self.axes if axes is None else axes, self.factor if factor is None else factor
        weights = [1.0] * self.ranks.size if weights is None else weights
        pieces = [(r, p.index.flatten(), p.got.flatten()) for r, mine in enumerate(self.pieces) for p in mine]
        if not differentiable(self.wanted):
            return [self._compared(*piece) for piece in pieces]
        totals = [torch.zeros_like(self.wanted).flatten() for _ in self.pieces] if axes else []
        pieces = [(r, index, weights[r] * x.to(self.wanted.dtype)) for r, index, x in pieces]
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

    @property
    def error(self) -> float:
        """The largest relative error on any rank."""
        return _largest_error(self.compared)

    def distance(self, other: Tensor) -> float:
        """Return the largest relative error of other numbers of one process."""
        return _largest_error([self._compared(0, torch.arange(self.wanted.numel()), other.flatten())])

    @cached_property
    def ok(self) -> bool:
        """Whether every error is allowed."""
        return self.right(self.compared)

    def right(self, each: Sequence[Compared]) -> bool:
        """Whether this would be right."""
        tolerance = torch.as_tensor(self.tolerance, dtype=torch.double).expand(self.wanted.numel())
        return self.excused or all(bool((c.errors <= tolerance[c.index]).all()) for c in each)

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
        held = list(dict.fromkeys(c.rank for c in self.compared))
        for r in held:
            mine = [c for c in self.compared if c.rank == r]
            row = Row(self.what, "", _largest_error(mine), self.ratio(mine), self.right(mine), self.most_allowed)
            key = row.ok or (f"{row.error:.2e}", None if row.ratio is None else f"{row.ratio:.4g}")
            of_row, worst = found.get(key, ([], row))
            found[key] = [*of_row, r], max(worst, row, key=lambda row: row.error)
        return [
            row._replace(rank="all" if len(of_row) == len(held) > 1 else ", ".join(map(self.ranks.named, of_row)))
            for of_row, row in found.values()
        ]


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


def tolerance_of(tensors: Sequence[Tensor]) -> float:
    """Return the default tolerance, by the least precise dtype: float64 4e-10, float32 2e-4, bfloat16 6e-2."""
    eps = max((torch.finfo(t.dtype).eps for t in tensors if differentiable(t)), default=torch.finfo(torch.float64).eps)
    return float(8 * eps if eps > 1e-5 else 10 * eps ** (2 / 3))


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
    tasks: Sequence[Task] = ()

    @cached_property
    def parts(self) -> list[list[list[Part]]]:
        """For each tensor of the whole, what each rank holds of it; tied tensors of the rank count once."""
        return [[list(self._parts(i, mine)) for mine in self.held] for i in range(len(self.spans))]

    def _parts(self, i: int, held: Sequence[Held]) -> Iterator[Part]:
        span = self.spans[i]
        for k, h in enumerate(held):
            inside = span.holds(h.index)
            if h.first and (inside.any() or (span.kind == "input" and k == i)):  # of an input also no rows
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
        axes, factor = list(partial_axes(said)), 1.0
        of_input = leaf >= 0 and self.spans[leaf].kind == "input"
        if group in ("value", "gradient", "second order"):
            held = [torch.cat([torch.arange(0), *(p.index.flatten() for p in mine)]) for mine in pieces]
            split = split_axes(held, self.ranks)
            summed = [axis for axis in self.reduction if axis not in split and axis not in reduced]
            means = [a for a, how in self.reduction.items() if how == "mean" and (of_input or a in summed)]
            axes, factor = list(dict.fromkeys(summed + axes)), 1 / math.prod(self.ranks.sizes[a] for a in means)
        tolerance = self.tolerance * (30 if group == "second order" else 1)  # rounding errors are amplified
        unit = max(largest(wanted), least)
        return Quantity(what, group, wanted, pieces, self.ranks, unit, tolerance, tuple(axes), factor, leaf, of_input)


def quantities(setting: Setting, each: Sequence[Measured]) -> list[Quantity]:
    """Return everything that is compared."""
    found = [*_outputs(setting, each), *_gradients(setting, each)]
    gradients = [q for q in found if q.group in ("gradient", "second order")]
    if gradients and all(q.ok for q in gradients):
        off = [q for q in found if q.group == "value" and not q.ok and scale_of(q, q.ratio(q.compared))]
        found = [replace(q, excused=q in off) for q in found]
    return [*found, *_state(setting, each)]


def scale_of(q: Quantity, ratio: float | None) -> str:
    """Return in words what a ratio is in terms of the sizes of axes; "": nothing of them."""
    sizes = {"N" if axis == RANKS else f"the size of {axis}": n for axis, n in q.ranks.sizes.items()}
    if len(sizes) > 1:
        sizes["the number of ranks"] = q.ranks.size
    return "" if ratio is None else scale_in_words(ratio, sizes, max(1e-4, 2 * (q.most_allowed or 0.0)))


def _outputs(setting: Setting, each: Sequence[Measured]) -> Iterator[Quantity]:
    whole = setting.whole
    for i, (wanted, fit) in enumerate(zip(whole.outputs, setting.outputs, strict=True)):
        number, ys = whole.numbered(i), [m.outputs[i] for m in each]
        pieces = [[] if j is None else [Piece(j, y)] for j, y in zip(fit.index, ys, strict=True)]
        said = said_of(setting.asked.placements, f"output{number}")
        if wanted.dim() or not differentiable(wanted):
            q = setting.quantity(f"output{number}", "output", wanted, pieces, said)
            if not wanted.dim() and not differentiable(wanted) and not q.ok:
                q = replace(q, pieces=[[Piece(torch.tensor(0), _together(ys, wanted))] for _ in ys])
            yield q
            continue
        q = setting.quantity(f"value{number}", "value", wanted, pieces, said, SMALL * whole.scale)
        if not whole.has_graph[i] and not q.ok:  # a metric: every rank has it, or parts of a sum
            others = [replace(q, axes=axes, factor=1.0) for axes in ((), tuple(setting.reduction))]
            q = next((other for other in others if other.ok), q)
        yield q


def _together(ys: Sequence[Tensor], wanted: Tensor) -> Tensor:
    """Return the integer or flag of all ranks: a count is summed, a flag may be of any rank or of all."""
    every = torch.stack(list(ys))
    if wanted.dtype == torch.bool:
        return every.any(0) if wanted.any() else every.all(0)
    return every.sum(0)


def _gradients(setting: Setting, each: Sequence[Measured]) -> Iterator[Quantity]:
    own, whole = any(m.own_backward for m in each), setting.whole
    if not own and not any(whole.has_graph):
        return
    orders = [("gradient", [m.gradients for m in (whole, *each)])]
    if all(m.second for m in (whole, *each)):
        orders.append(("second order", [m.second for m in (whole, *each)]))
    for group, (of_whole, *of_ranks) in orders:
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
        wanted, before = setting.whole.state[i], span.tensor.detach().cpu()
        pieces = setting.pieces(i, [m.state for m in each])
        group, least, changed = "state", 0.0, differentiable(wanted) and not torch.equal(wanted, before)
        if changed and span.kind == "parameter":  # which a small learning rate would hide
            group = "move"
            pieces = [[Piece(p.index, p.got - before.flatten()[p.index].to(p.got.dtype)) for p in m] for m in pieces]
            least = 8 * torch.finfo(before.dtype).eps / setting.tolerance * largest(wanted)
            wanted = wanted - before
        q = setting.quantity(f"{span.kind} {span.name}", group, wanted, pieces, least=least, leaf=i)
        if span.kind == "buffer" or changed or not q.ok:
            yield q
