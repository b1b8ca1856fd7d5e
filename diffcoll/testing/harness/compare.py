"""Compares what the ranks have with the whole, position by position."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from diffcoll.testing.harness.layout import (
    Fit,
    Held,
    Placement,
    Ranks,
    Span,
    partial_axes,
    said_of,
    split_axes,
)
from diffcoll.testing.harness.rank import Measured, differentiable
from diffcoll.testing.harness.report import Row
from diffcoll.testing.numbers import largest, relative_errors

#: A gradient smaller than this part of the largest one is compared with that part: what is zero by cancellation, such
#: as the gradient of a bias before a batch norm, has a relative error of 1.
SMALL = 1e-3
#: A row of a gradient that is smaller than this part of the largest one is compared with that part.
_SMALL_ROW = 1e-2
#: An error below so many times what is allowed may be rounding.
DOUBT = 300.0


@dataclass(frozen=True)
class Piece:
    """What one rank has of a quantity."""

    #: Positions in the whole.
    index: Tensor
    got: Tensor


class Compared(NamedTuple):
    """What one rank has after the reduction, beside what it should have."""

    rank: int
    got: Tensor
    wanted: Tensor
    #: What an error of each number is relative to.
    unit: Tensor


@dataclass(eq=False)
class Quantity:
    """One quantity, as the ranks have it, and as one process has it."""

    what: str
    #: "value", "output", "gradient", "second order" or "state".
    group: str
    wanted: Tensor
    #: For each rank its pieces; a rank may have several of a tensor that is tied, or none.
    pieces: list[list[Piece]]
    ranks: Ranks
    #: The axes over which the check, or somebody later, sums it, and what it multiplies it by then.
    axes: tuple[str, ...]
    factor: float
    #: The largest |wanted|, to which errors are relative.
    unit: float
    #: The largest relative error that is right, of all numbers or of each; below zero: none is, at a kink.
    tolerance: float | Tensor
    #: Whether it is the gradient of an input.
    of_input: bool = False
    #: Whether it is printed and not failed.
    excused: bool = False

    @property
    def is_real(self) -> bool:
        """Whether it has a distance, and is no integer or flag."""
        return differentiable(self.wanted)

    def combined(
        self, axes: Sequence[str] | None = None, factor: float | None = None, weights: Sequence[float] | None = None
    ) -> list[Compared]:
        """Return what each rank has after a sum over axes, in which the ranks may have weights."""
        axes, factor = self.axes if axes is None else axes, self.factor if factor is None else factor
        w = [1.0] * self.ranks.size if weights is None else weights
        wanted, units = self.wanted.flatten(), self._units
        dense: list[Tensor] = []
        for mine in self.pieces if axes else []:
            total = torch.zeros_like(wanted)
            for piece in mine:
                total.index_add_(0, piece.index.flatten(), piece.got.flatten().to(wanted.dtype))
            dense.append(total)
        found = []
        for r, mine in enumerate(self.pieces):
            others = [s for s in self.ranks.along(axes, r) if s != r] if axes else []
            for piece in mine:
                got = piece.got.flatten()
                if self.is_real:
                    got = got.to(wanted.dtype)
                    got = got * w[r] if w[r] != 1 else got
                    for s in others:
                        got = got + w[s] * dense[s][piece.index.flatten()]
                    got = got * factor if factor != 1 else got
                i = piece.index.flatten()
                found.append(Compared(r, got, wanted[i], units[i]))
        return found

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

    def errors(self, each: Sequence[Compared]) -> list[Tensor]:
        """Return the relative errors of each number."""
        if self.is_real:
            return [relative_errors(c.got, c.wanted, c.unit) for c in each]
        return [torch.where(c.got == c.wanted.to(c.got.dtype), 0.0, math.inf) for c in each]

    @property
    def error(self) -> float:
        """The largest relative error on any rank."""
        return max((float(e.max()) for e in self.errors(self.compared) if e.numel()), default=0.0)

    @cached_property
    def ok(self) -> bool:
        """Whether every error is allowed."""
        return self.excused or self.right(self.compared)

    def right(self, each: Sequence[Compared]) -> bool:
        """Whether this would be right."""
        tolerance = torch.as_tensor(self.tolerance, dtype=torch.double)
        index = [p.index.flatten() for mine in self.pieces for p in mine] if tolerance.dim() else [...] * len(each)
        of_each = [tolerance.expand(self.wanted.numel())[i] if tolerance.dim() else tolerance for i in index]
        return all(bool((e <= t).all()) for e, t in zip(self.errors(each), of_each, strict=True))

    @property
    def most_allowed(self) -> float | None:
        """The largest error that is right for any number; None: the quantity cannot be compared."""
        allowed = torch.as_tensor(self.tolerance, dtype=torch.double)
        return None if (allowed < 0).any() else float(allowed.max()) if allowed.numel() else 0.0

    def ratio(self, each: Sequence[Compared]) -> float | None:
        """Return got / wanted, if all ranks have the same real multiple."""
        if not self.is_real or not each:
            return None
        got, wanted = torch.cat([c.got for c in each]), torch.cat([c.wanted for c in each])
        return multiple(got, wanted, self.most_allowed or 0.0)

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of the report; ranks with the same numbers share one."""
        found: dict[object, tuple[list[int], Row]] = {}
        by_rank: dict[int, list[Compared]] = {}
        for c in self.compared:
            by_rank.setdefault(c.rank, []).append(c)
        for r, mine in by_rank.items():
            errors = [e for e in self.errors(mine) if e.numel()]
            error, ratio = max((float(e.max()) for e in errors), default=0.0), self.ratio(mine)
            part = replace(self, pieces=[p if s == r else [] for s, p in enumerate(self.pieces)])
            ok = self.excused or part.right(mine)
            row = Row(self.what, "", error, ratio, ok, self.most_allowed)
            key = (f"{error:.2e}", None if ratio is None else f"{ratio:.4g}", ok) if not ok else ok
            found.setdefault(key, ([], row))[0].append(r)
            found[key] = (found[key][0], max(found[key][1], row, key=lambda row: row.error))
        return [
            row._replace(rank="all" if len(held) == len(by_rank) > 1 else ", ".join(map(self.ranks.named, held)))
            for held, row in found.values()
        ]


def multiple(got: Tensor, wanted: Tensor, tolerance: float) -> float | None:
    """Return got / wanted if got is a real multiple of wanted."""
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (got, wanted))
    a, b = a.double().flatten(), b.double().flatten()
    if not b.numel() or not (a.isfinite().all() and b.isfinite().all()) or not b.abs().max():
        return None
    ratio = float(a @ b / (b @ b))
    close = max(tolerance, 1e-9) * 10 * float(b.abs().max()) * max(abs(ratio), 1e-3)
    return ratio if float((a - ratio * b).abs().max()) <= close else None


def near(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape and the same numbers, up to rounding."""
    if a.shape != b.shape or not differentiable(b):
        return torch.equal(a, b.to(a.dtype))
    eps = torch.finfo(b.dtype).eps ** (2 / 3)
    return torch.allclose(a, b.to(a.dtype), rtol=10 * eps, atol=eps * largest(b))


def tolerance_of(tensors: Sequence[Tensor]) -> float:
    """Return the default tolerance, by the least precise dtype: float64 4e-10, float32 2e-4, bfloat16 6e-2."""
    eps = max((torch.finfo(t.dtype).eps for t in tensors if differentiable(t)), default=torch.finfo(torch.float64).eps)
    return float(8 * eps if eps > 1e-5 else 10 * eps ** (2 / 3))


# ── the quantities of a run ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Frame:
    """How what the ranks have makes up the whole."""

    ranks: Ranks
    #: "mean" or "sum" by axis: how the ranks' losses combine.
    reduction: Mapping[str, str]
    #: Axes over which the user says that the program has reduced its gradients.
    reduced: tuple[str, ...]
    placements: Mapping[str, Placement]
    #: Names of the inputs that have gradients, and their positions on each rank.
    inputs: Mapping[str, list[Tensor]]
    #: Whether the user has chosen these: a step that calls backward itself trains no inputs.
    asked: bool
    outputs: Sequence[Fit]
    #: The tensors of the whole module, and what each rank holds of them.
    spans: Sequence[Span]
    held: Sequence[Sequence[Held]]
    tolerance: float

    def reduction_of(self, said: Placement | None, held: Sequence[Sequence[Tensor]], input_: bool) -> _Reduction:
        """Return over which axes something is summed, given the positions of each rank, and the factor then."""
        split = split_axes(held, self.ranks)
        axes = [axis for axis in self.reduction if axis not in split]
        means = [a for a, how in self.reduction.items() if how == "mean" and (input_ or a in axes)]
        axes += [axis for axis in partial_axes(said) if axis not in axes]
        return _Reduction(tuple(axes), 1 / math.prod(self.ranks.sizes[axis] for axis in means))


class _Reduction(NamedTuple):
    axes: tuple[str, ...]
    factor: float


def quantities(whole: Measured, each: Sequence[Measured], frame: Frame) -> list[Quantity]:
    """Return everything that is compared."""
    found = [*_outputs(whole, each, frame), *_gradients(whole, each, frame)]
    gradients = [q for q in found if q.group in ("gradient", "second order")]
    if gradients and all(q.ok for q in gradients):
        for q in found:
            q.excused = q.group == "value" and not q.ok and scale_of(q, q.ratio(q.compared)) is not None
            q.__dict__.pop("ok", None)
    return [*found, *_state(whole, each, frame)]


def scale_of(q: Quantity, ratio: float | None) -> str | None:
    """Return in words what a ratio is in terms of the sizes of axes; None: nothing of them."""
    if ratio is None:
        return None
    near = max(1e-4, 2 * (q.most_allowed or 0.0))
    for axis, n in q.ranks.sizes.items():
        for power, words in ((1, ""), (-1, "1/"), (2, ""), (-2, "1/")) if n > 1 else ():
            if math.isclose(ratio, float(n) ** power, rel_tol=near):
                size = f"the size of {axis}" if len(q.ranks.sizes) > 1 or not q.ranks.rows else "N"
                return f"{words}{size}{'²' * (abs(power) == 2)}"
    n = q.ranks.size
    if len(q.ranks.sizes) > 1 and any(math.isclose(ratio, float(n) ** p, rel_tol=near) for p in (1, -1)):
        return "the number of ranks" if ratio > 1 else "1/the number of ranks"
    return None


def _outputs(whole: Measured, each: Sequence[Measured], frame: Frame) -> Iterator[Quantity]:
    for i, (wanted, fit) in enumerate(zip(whole.outputs, frame.outputs, strict=True)):
        number, ys = f"[{i}]" if len(whole.outputs) > 1 else "", [m.outputs[i] for m in each]
        pieces = [[Piece(j, y)] if j is not None else [] for j, y in zip(fit.index, ys, strict=True)]
        said = said_of(frame.placements, f"output{number}")
        is_value = wanted.dim() == 0 and differentiable(wanted)
        held = [[p.index for p in mine] for mine in pieces]
        axes, factor = frame.reduction_of(said, held, False) if is_value else (partial_axes(said), 1.0)
        what, group = (f"value{number}", "value") if is_value else (f"output{number}", "output")
        unit = max(largest(wanted), SMALL * whole.scale) if is_value else largest(wanted)
        q = Quantity(what, group, wanted, pieces, frame.ranks, axes, factor, unit, frame.tolerance)
        if is_value and not whole.has_graph[i] and not q.ok:  # a metric: every rank has it, or parts of a sum
            every = replace(q, axes=tuple(frame.reduction), factor=1.0)
            q = next((other for other in (replace(q, axes=(), factor=1.0), every) if other.ok), q)
        if not differentiable(wanted) and wanted.dim() == 0 and not q.ok:
            q = replace(q, pieces=[[Piece(torch.tensor(0), _together(ys, wanted))] for _ in ys])
        yield q


def _together(ys: Sequence[Tensor], wanted: Tensor) -> Tensor:
    """Return the integer or flag of all ranks: a count is summed, a flag may be of any rank or of all."""
    every = torch.stack(list(ys))
    if wanted.dtype == torch.bool:
        return every.any(0) if wanted.any() else every.all(0)
    return every.sum(0)


def _gradients(whole: Measured, each: Sequence[Measured], frame: Frame) -> Iterator[Quantity]:
    own = any(m.own_backward for m in each)
    if not own and not any(whole.has_graph):
        return
    orders = [("gradient", [(m.inputs, m.module) for m in [whole, *each]], frame.tolerance)]
    second = [m.second for m in [whole, *each] if m.second is not None]
    if len(second) == 1 + len(each):  # rounding errors are amplified
        orders.append(("second order", second, 30 * frame.tolerance))
    for group, measured, tolerance in orders:
        (of_inputs, of_module), *of_ranks = measured
        most = largest(*of_inputs, *of_module)
        for i, (name, index) in enumerate(frame.inputs.items() if frame.asked or not own else ()):
            pieces = [[Piece(index[r], mine[0][i])] for r, mine in enumerate(of_ranks)]
            said = said_of(frame.placements, name)
            axes, factor = frame.reduction_of(said, [[j] for j in index], True)
            unit = max(largest(of_inputs[i]), SMALL * most)
            what = f"{group} of {name}"
            yield Quantity(what, group, of_inputs[i], pieces, frame.ranks, axes, factor, unit, tolerance, True)
        for i, span in enumerate(frame.spans):
            if span.kind != "parameter" or not span.tensor.requires_grad or i != _first(frame.spans, span):
                continue
            grads = [_of_span(span, frame.held[r], mine[1]) for r, mine in enumerate(of_ranks)]
            held = [[p.index for p in mine] for mine in grads]
            said = said_of(frame.placements, span.name)
            known = set(frame.reduced)
            known |= {a for mine in frame.held for h in mine if _overlaps(span, h) for a in h.reduced}
            axes, _ = frame.reduction_of(said, held, False)
            axes = tuple(a for a in axes if a in partial_axes(said) or not (own or a in known))
            means = [a for a in axes if frame.reduction.get(a) == "mean"]
            factor = 1 / math.prod(frame.ranks.sizes[a] for a in means)
            wanted = of_module[i]
            unit = max(largest(wanted), SMALL * most)
            yield Quantity(f"{group} of {span.name}", group, wanted, grads, frame.ranks, axes, factor, unit, tolerance)


def _first(each: Sequence[Span], span: Span) -> int:
    """Return the index of the first name of a tied tensor."""
    return next(i for i, other in enumerate(each) if other.tensor is span.tensor)


def _overlaps(span: Span, held: Held) -> bool:
    return bool(((held.index >= span.start) & (held.index < span.end)).any())


def _of_span(span: Span, held: Sequence[Held], tensors: Sequence[Tensor]) -> list[Piece]:
    """Return the pieces of a tensor of the whole in what a rank holds; tied tensors of the rank count once."""
    found: list[Piece] = []
    seen: set[int] = set()
    for h, x in zip(held, tensors, strict=True):
        inside = (h.index >= span.start) & (h.index < span.end)
        if inside.any() and h.tied not in seen:
            seen.add(h.tied)
            found.append(Piece(h.index[inside] - span.start, x[inside]))
    return found


def _state(whole: Measured, each: Sequence[Measured], frame: Frame) -> Iterator[Quantity]:
    """Yield the buffers, and the parameters that the call changed, here or on one process."""
    for i, span in enumerate(frame.spans):
        if i != _first(frame.spans, span):
            continue
        wanted, before = whole.state[i], span.tensor.detach().cpu()
        pieces = [[p for p in _of_span(span, frame.held[r], m.state) if p.got.numel()] for r, m in enumerate(each)]
        unit, changed = largest(wanted), differentiable(wanted) and not torch.equal(wanted, before)
        if changed and span.kind == "parameter":  # how far it moved, which a small learning rate would hide
            pieces = [[Piece(p.index, p.got - before.flatten()[p.index].to(p.got.dtype)) for p in m] for m in pieces]
            wanted = wanted - before
            unit = max(largest(wanted), 8 * torch.finfo(before.dtype).eps / frame.tolerance * unit)
        q = Quantity(f"{span.kind} {span.name}", "state", wanted, pieces, frame.ranks, (), 1.0, unit, frame.tolerance)
        if span.kind == "buffer" or changed or not q.ok:
            yield q
