"""Compares what the ranks measured with what one process measured on the whole batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffcoll.testing.harness.measure import Gradients, Measurement, differentiable
from diffcoll.testing.harness.report import Row, Table

#: A gradient smaller than this part of the largest one is compared with that part: what is zero by cancellation, such
#: as the gradient of a bias before a batch norm, has a relative error of 1.
SMALL = 1e-3


@dataclass(frozen=True)
class Names:
    """Names of a measurement's tensors, for the report."""

    inputs: list[str]
    parameters: list[str]
    buffers: list[str]


@dataclass(frozen=True)
class Quantity:
    """One quantity, as the ranks have it under a sum over ranks, and as one process has it."""

    what: str
    #: "value", "output", "gradient", "second order" or "buffer".
    group: str
    #: None: reduced over ranks.
    rank: int | None
    got: Tensor
    wanted: Tensor
    #: The largest |wanted| that the error is relative to.
    unit: float

    @property
    def is_reduced(self) -> bool:
        """Whether the reduction over ranks applies to it: not to outputs with rows, and not to buffers."""
        return self.group not in ("output", "buffer")

    def error(self, factor: float = 1.0) -> float:
        """Return max |factor · got − wanted| / unit; inf if shapes differ or a value is not finite."""
        if self.got.shape != self.wanted.shape:
            return math.inf
        if not self.got.numel():
            return 0.0
        if not differentiable(self.wanted):
            return 0.0 if torch.equal(self.got, self.wanted.to(self.got.dtype)) else math.inf
        # Equal infinities are right, and so are NaNs in the same places.
        got = self.got * factor
        same = (got == self.wanted) | (got.isnan() & self.wanted.isnan())
        difference = float(torch.where(same, 0, got - self.wanted).abs().max())
        return math.inf if math.isnan(difference) else difference / (self.unit or 1.0) if difference else 0.0


@dataclass
class Run:
    """The results of one run."""

    on: str
    sizes: tuple[int, ...]
    quantities: list[Quantity]
    measured: list[Measurement]
    reference: Measurement | None
    raised: str = ""
    skipped: str = ""
    #: Whether the value may be right under another reduction than the gradients.
    any_value: bool = False

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The rows of each output on each rank; −1 for a 0-d one."""
        return rows_of(self.measured)

    @property
    def title(self) -> str:
        """The kind of ranks and their rows, in words."""
        n = len(self.sizes)
        return f"{self.on}, {n} rank{'s' * (n != 1)}, rows {', '.join(map(str, self.sizes))}"

    def factor(self, quantity: Quantity, rank_reduction: str) -> float:
        """Return the factor that this reduction applies to a sum over ranks."""
        return 1 / len(self.sizes) if rank_reduction == "mean" and quantity.is_reduced else 1.0

    def is_right(self, q: Quantity, rank_reduction: str, tolerance: float) -> bool:
        """Whether the error under this reduction is within the tolerance."""
        return self.error(q, rank_reduction) <= self.allowed(q, tolerance)

    def allowed(self, q: Quantity, tolerance: float) -> float:
        """Return the largest error that is right; second order amplifies rounding errors."""
        return 30 * tolerance if q.group == "second order" else tolerance

    def error(self, q: Quantity, rank_reduction: str) -> float:
        """Return the error under this reduction."""
        error = q.error(self.factor(q, rank_reduction))
        if self.any_value and q.group == "value":
            return min(error, q.error(), q.error(1 / len(self.sizes)))
        return error

    def table(self, rank_reduction: str, tolerance: float) -> Table:
        """Return the table of the report."""
        rows = []
        for q in self.quantities:
            ratio = multiple(q.got, q.wanted, tolerance)
            if ratio is not None:
                ratio *= self.factor(q, rank_reduction)
            error, allowed = self.error(q, rank_reduction), self.allowed(q, tolerance)
            rows.append(Row(q.what, q.rank, error, ratio, error <= allowed, allowed))
        return Table(self.title, len(self.sizes), tuple(rows), self.raised, self.skipped)


def rows_of(measured: Sequence[Measurement]) -> tuple[tuple[int, ...], ...]:
    """Return the rows of each output on each rank; −1 for a 0-d one."""
    each = zip(*(m.outputs for m in measured), strict=True)
    return tuple(tuple(len(y) if y.dim() else -1 for y in ys) for ys in each)


def tolerance_of(tensors: Sequence[Tensor]) -> float:
    """Return the default tolerance, by the least precise dtype: float64 4e-10, float32 2e-4, bfloat16 6e-2."""
    eps = max((torch.finfo(t.dtype).eps for t in tensors if differentiable(t)), default=torch.finfo(torch.float64).eps)
    return float(8 * eps if eps > 1e-5 else 10 * eps ** (2 / 3))


def unchecked(runs: Sequence[Run], tolerance: float) -> Iterator[str]:
    """Say which wrong gradients would pass, because of the precision or because there is nothing to compare."""
    if tolerance > 1e-3:
        yield f"errors below {tolerance:.1g} pass, because of the precision of the tensors: pass float64"
    each = [q for run in runs for q in run.quantities if q.group == "gradient" and q.wanted.numel()]
    for name in dict.fromkeys(q.what for q in each):
        largest = max(_largest([q.wanted]) / (q.unit or 1.0) for q in each if q.what == name)
        if largest == 0:
            yield f"{name}: zero in every run"
        elif largest < 10 * tolerance:
            yield f"{name}: too small beside the others to be checked in this precision: pass float64"


def is_near(a: float | None, b: float, tolerance: float = 0.0) -> bool:
    """Whether two ratios are equal, up to rounding."""
    return a is not None and math.isclose(a, b, rel_tol=max(1e-4, 2 * tolerance))


def multiple(got: Tensor, wanted: Tensor, tolerance: float) -> float | None:
    """Return got / wanted if got is a real multiple of wanted."""
    if got.shape != wanted.shape or not differentiable(wanted) or not got.numel():
        return None
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (got, wanted))
    a, b = a.double().flatten(), b.double().flatten()
    if not (a.isfinite().all() and b.isfinite().all()) or not b.abs().max():
        return None
    ratio = float(a @ b / (b @ b))
    close = float((a - ratio * b).abs().max()) <= max(tolerance, 1e-9) * 10 * float(b.abs().max()) * max(
        abs(ratio), 1e-3
    )
    return ratio if close else None


def compare(measured: list[Measurement], whole: Measurement, sizes: Sequence[int], names: Names) -> Iterator[Quantity]:
    """Return every quantity of a run beside that of one process on the whole batch."""
    yield from _outputs(measured, whole)
    yield from _gradients([m.first for m in measured], whole.first, sizes, names, "gradient")
    if whole.second is not None:
        second = [m.second for m in measured if m.second is not None]
        yield from _gradients(second, whole.second, sizes, names, "second order")
    for i, name in enumerate(names.buffers):
        for r, m in enumerate(measured):
            wanted = whole.buffers[i]
            yield Quantity(f"buffer {name}", "buffer", r, m.buffers[i], wanted, _largest([wanted]))


def _outputs(measured: list[Measurement], whole: Measurement) -> Iterator[Quantity]:
    many = len(whole.outputs) > 1
    for i, wanted in enumerate(whole.outputs):
        ys = [m.outputs[i] for m in measured]
        number = f"[{i}]" if many else ""
        if all(y.dim() == 0 for y in ys):
            if differentiable(wanted):
                unit = max(_largest([wanted]), SMALL * whole.scale)
                yield Quantity(f"value{number}", "value", None, torch.stack(ys).sum(), wanted, unit)
        else:
            yield Quantity(f"output{number}", "output", None, torch.cat(ys), wanted, _largest([wanted]))


def _gradients(
    ranks: Sequence[Gradients], whole: Gradients, sizes: Sequence[int], names: Names, group: str
) -> Iterator[Quantity]:
    largest = _largest([*whole.inputs, *whole.parameters])
    for i, name in enumerate(names.inputs):
        parts = torch.split_with_sizes(whole.inputs[i], list(sizes))
        unit = max(_largest([whole.inputs[i]]), SMALL * largest)
        for r, wanted in enumerate(parts):
            yield Quantity(f"{group} of {name}", group, r, ranks[r].inputs[i], wanted, unit)
    for i, name in enumerate(names.parameters):
        wanted = whole.parameters[i]
        got = torch.stack([g.parameters[i] for g in ranks]).sum(0)
        yield Quantity(f"{group} of {name}", group, None, got, wanted, max(_largest([wanted]), SMALL * largest))


def _largest(tensors: Sequence[Tensor]) -> float:
    finite = [t.abs()[t.isfinite()] for t in tensors if t.dtype != torch.bool]
    return max((float(x.max()) for x in finite if x.numel()), default=0.0)
