"""Compares what the ranks measured with what is right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from diffcoll.core.errors import message
from diffcoll.testing.harness.measure import Gradients, Measurement, differentiable
from diffcoll.testing.harness.report import Row
from diffcoll.testing.numbers import largest, relative_errors

#: A gradient smaller than this part of the largest one is compared with that part: what is zero by cancellation, such
#: as the gradient of a bias before a batch norm, has a relative error of 1.
SMALL = 1e-3
#: A row of a gradient that is smaller than this part of the largest one is compared with that part.
_SMALL_ROW = 1e-2
#: An error below so many times what is allowed may be rounding.
_DOUBT = 300.0


@dataclass(frozen=True)
class Names:
    """Names of a measurement's tensors, for the report."""

    inputs: list[str]
    parameters: list[str]
    #: `Subject.state` before the call.
    state: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Quantity:
    """One quantity, as the ranks have it, and as it should be."""

    what: str
    #: "value", "output", "gradient", "second order" or "state".
    group: str
    #: None: reduced over ranks.
    rank: int | None
    got: Tensor
    wanted: Tensor
    #: What an error is relative to: the largest |wanted|.
    unit: float
    #: The largest relative error that is right, of all elements or of each; below zero: none is, at a kink.
    allowed: float | Tensor
    #: The part of the unit that an error in each row is relative to.
    rows: float | Tensor = 1.0

    @property
    def mismatched(self) -> bool:
        """Whether the shapes differ."""
        return self.got.shape != self.wanted.shape

    @cached_property
    def errors(self) -> Tensor:
        """|got − wanted| / (unit · rows); inf if shapes differ or a value is not finite."""
        if self.mismatched or differentiable(self.wanted):
            return relative_errors(self.got, self.wanted, (self.unit or 1.0) * self.rows)
        return torch.where(self.got == self.wanted.to(self.got.dtype), 0.0, math.inf)

    @property
    def error(self) -> float:
        """The largest of the errors."""
        return float(self.errors.max()) if self.errors.numel() else 0.0

    @cached_property
    def ok(self) -> bool:
        """Whether every error is allowed."""
        return bool((self.errors <= self.allowed).all())

    @property
    def most_allowed(self) -> float | None:
        """The largest error that is right for any element; None: the quantity cannot be compared."""
        allowed = torch.as_tensor(self.allowed, dtype=torch.float64)
        return None if (allowed < 0).any() else float(allowed.max()) if allowed.numel() else 0.0

    @cached_property
    def ratio(self) -> float | None:
        """got / wanted, if one is a multiple of the other."""
        return multiple(self.got, self.wanted, self.most_allowed or 0.0)

    @property
    def row(self) -> Row:
        """The row of the report."""
        return Row(self.what, self.rank, self.error, self.ratio, self.ok, self.most_allowed, self.mismatched)

    def times(self, factor: float) -> Quantity:
        """Return the quantity with what the ranks have multiplied by a factor."""
        return self if factor == 1 else replace(self, got=self.got * factor)


def rows_of(measured: Sequence[Measurement]) -> tuple[tuple[int, ...], ...]:
    """Return the rows of each output on each rank; −1 for a 0-d one."""
    each = zip(*(m.outputs for m in measured), strict=True)
    return tuple(tuple(len(y) if y.dim() else -1 for y in ys) for ys in each)


def tolerance_of(tensors: Sequence[Tensor]) -> float:
    """Return the default tolerance, by the least precise dtype: float64 4e-10, float32 2e-4, bfloat16 6e-2."""
    eps = max((torch.finfo(t.dtype).eps for t in tensors if differentiable(t)), default=torch.finfo(torch.float64).eps)
    return float(8 * eps if eps > 1e-5 else 10 * eps ** (2 / 3))


def in_doubt(quantities: Sequence[Quantity]) -> set[str]:
    """Return the gradients that are wrong by little, of which rounding on one process is to be measured."""
    gradients = [q for q in quantities if q.group in ("gradient", "second order") and not q.ok]
    return {q.what for q in gradients if q.error < _DOUBT * (q.most_allowed or 0.0)}


def with_noise(q: Quantity, noise: float) -> Quantity:
    """Allow an error of ten times what rounding is on one process, as of a bias before a batch norm."""
    least = q.most_allowed or 0.0
    return replace(q, allowed=max(least, min(10 * noise, _DOUBT * least)))


def largest_errors(quantities: Sequence[Quantity]) -> dict[str, float]:
    """Return the largest error of each name."""
    errors: dict[str, float] = {}
    for q in quantities:
        errors[q.what] = max(q.error, errors.get(q.what, 0.0))
    return errors


def right(quantities: Sequence[Quantity]) -> set[str]:
    """Return the names of what is right on all ranks."""
    return {q.what for q in quantities} - {q.what for q in quantities if not q.ok}


def near(a: Tensor, b: Tensor, unit: float | None = None) -> bool:
    """Whether two tensors have the same shape and the same numbers, up to rounding; the unit is the largest of b."""
    if a.shape != b.shape:
        return False
    if not differentiable(b):
        return torch.equal(a, b.to(a.dtype))
    eps = torch.finfo(b.dtype).eps ** (2 / 3)
    return torch.allclose(a, b.to(a.dtype), rtol=10 * eps, atol=eps * (largest(b) if unit is None else unit))


def all_near(got: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether tensors are near each other, as numbers near 1 are."""
    return all(near(a, b, 1.0) for a, b in zip(got, expected, strict=True))


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
    close = max(tolerance, 1e-9) * 10 * float(b.abs().max()) * max(abs(ratio), 1e-3)
    return ratio if float((a - ratio * b).abs().max()) <= close else None


def compare(
    measured: Sequence[Measurement], whole: Measurement, sizes: Sequence[int], names: Names, tolerance: float
) -> list[Quantity]:
    """Return every quantity of a run under a sum over ranks, beside that of one process on the whole batch."""

    def quantities() -> Iterator[Quantity]:
        for i, wanted in enumerate(whole.outputs):
            ys = [m.outputs[i] for m in measured]
            number = f"[{i}]" if len(whole.outputs) > 1 else ""
            if any(y.dim() for y in ys):
                yield Quantity(f"output{number}", "output", None, torch.cat(ys), wanted, largest(wanted), tolerance)
            elif not differentiable(wanted):
                yield Quantity(f"output{number}", "output", None, together(ys, wanted), wanted, 1.0, tolerance)
            else:
                unit = max(largest(wanted), SMALL * whole.scale)
                yield Quantity(f"value{number}", "value", None, torch.stack(ys).sum(), wanted, unit, tolerance)
        yield from gradients([m.first for m in measured], whole.first, "gradient", tolerance)
        if whole.second is not None:  # rounding errors are amplified
            yield from gradients([m.second for m in measured if m.second], whole.second, "second order", 30 * tolerance)
        for name, before in names.state.items():
            if any(name in m.state for m in (whole, *measured)):
                wanted = whole.state.get(name, before)
                for r, m in enumerate(measured):
                    yield Quantity(name, "state", r, m.state.get(name, before), wanted, largest(wanted), tolerance)

    def gradients(ranks: Sequence[Gradients], wanted: Gradients, group: str, allowed: float) -> Iterator[Quantity]:
        most = largest(*wanted.inputs, *wanted.parameters)
        for i, name in enumerate(names.inputs):
            unit = max(largest(wanted.inputs[i]), SMALL * most)
            for r, piece in enumerate(torch.split_with_sizes(wanted.inputs[i], list(sizes))):
                mine = ranks[r].inputs[i]
                yield Quantity(f"{group} of {name}", group, r, mine, piece, unit, allowed, rows(piece, unit))
        for i, name in enumerate(names.parameters):
            got, total = torch.stack([g.parameters[i] for g in ranks]).sum(0), wanted.parameters[i]
            unit = max(largest(total), SMALL * most)
            yield Quantity(f"{group} of {name}", group, None, got, total, unit, allowed, rows(total, unit))

    return list(quantities())


def rows(wanted: Tensor, unit: float) -> float | Tensor:
    """Return what part of the unit each row's largest element is: rare rows are small beside the others."""
    if wanted.dim() < 2 or not wanted.numel() or not unit:
        return 1.0
    of_rows = wanted.detach().abs().double().flatten(1).amax(1) / unit
    return of_rows.clamp(_SMALL_ROW, 1.0).view(-1, *[1] * (wanted.dim() - 1))


def busy(gradient: Tensor) -> Tensor:
    """Return which rows are not zero."""
    return gradient.flatten(1).any(1) if gradient.dim() > 1 else gradient != 0


def together(ys: Sequence[Tensor], wanted: Tensor) -> Tensor:
    """Return the integer or flag of all ranks that is compared with that of one process."""
    every = torch.stack(list(ys))
    if wanted.dtype == torch.bool:  # of any rank, or of all
        return every.any(0) if wanted.any() else every.all(0)
    return wanted if bool((every == wanted).all()) else every.sum(0)  # the same on all, or a count


def unused(name: str, functions: str) -> ValueError:
    """Return the error for a module that the functions do not use."""
    expected = f"the module, or the parameters, that {functions} uses"
    remedy = (
        "a model that is a global of another module than the function is copied apart from it: pass it in a closure"
    )
    return ValueError(message(name, "module", "parameters of which none has a gradient", expected, remedy))
