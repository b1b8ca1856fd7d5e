"""Calls of collectives to be checked: a fixed table of them, and the program that is run on each.

`table(n)` lists the calls that `diffcoll verify` prints and the tests run on gloo. One program is run on every call,
once by the ranks and once with all ranks in one graph (`in_truth`):

    y_r = F(x)_r       ℓ_r = ⟨w_r, sin y_r⟩      g_r = ∂(Σ_s ℓ_s)/∂x_r
                       h_r = ⟨v_r, g_r⟩          c_r = ∂(Σ_s h_s)/∂x_r

x, w and v differ between ranks, except for replicated inputs and outputs, which are equal on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import diffcoll
from diffcoll import truth
from diffcoll.core.reductions import REDUCTIONS
from diffcoll.testing.numbers import largest, numbers, real_inner, relative_errors

Shape = tuple[int, ...]

#: Collectives whose input is replicated.
_REPLICATED_INPUT = ("sum_gradients", "split")


@dataclass(frozen=True)
class Case:
    """One call of a collective on N ranks."""

    name: str
    #: The input's shape on each rank.
    shapes: tuple[Shape, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    #: Arguments that may differ between ranks, see `truth.PER_RANK`.
    per_rank: dict[str, list[Any]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    #: Whether the inputs are rounded to integers, so that there are ties and zeros.
    few: bool = False

    @property
    def size(self) -> int:
        """N."""
        return len(self.shapes)

    @property
    def shared(self) -> tuple[bool, bool]:
        """Whether the input, and whether the output, is replicated."""
        return self.name in _REPLICATED_INPUT, self.arguments.get("grad_placement") == "replicate"

    @property
    def label(self) -> str:
        """The call, as a user writes it."""
        shown = {name: getattr(value, "__name__", repr(value)) for name, value in self.arguments.items()}
        shown |= {name: repr(of[0]) if of[0] == "auto" else "[…]" for name, of in self.per_rank.items()}
        words = ["x: 0-d"] * (() in self.shapes) + ["x: ties and zeros"] * self.few
        return ", ".join([*words, *(f"{name}={value}" for name, value in shown.items())])

    def call(self, x: Any, rank: int) -> Tensor:
        """Make the call on one rank."""
        own = {key: value[rank] for key, value in self.per_rank.items()}
        y: Any = getattr(diffcoll, self.name)(x, **self.arguments, **own)
        result: Tensor = y.wait() if isinstance(y, diffcoll.Pending) else y
        return result

    def truth(self, xs: list[Any]) -> list[Tensor]:
        """Return all ranks' results by the collective's definition in `diffcoll.truth`."""
        arguments = {key: value for key, value in self.arguments.items() if key != "async_op"}
        ys: list[Tensor] = getattr(truth, self.name)(xs, **arguments, **self.per_rank)
        return ys

    # ── data, generated from (seed, rank): on a rank its own, in `in_truth` all ranks' ─────────────────────

    def x(self, rank: int, seed: int) -> Tensor:
        """Return the input of one rank."""
        x = numbers(self.shapes[rank], self.dtype, seed, 0 if self.shared[0] else rank, stream=0)
        if self.few:
            x = torch.view_as_complex(torch.view_as_real(x).round()) if x.is_complex() else x.round()
        return x

    def w(self, y: Tensor, rank: int, seed: int) -> Tensor:
        """Return the weights of one rank's loss."""
        return numbers(tuple(y.shape), y.dtype, seed, 0 if self.shared[1] else rank, stream=1)

    def v(self, g: Tensor, rank: int, seed: int) -> Tensor:
        """Return the weights v_r of h_r, one rank's function of its gradient."""
        return numbers(tuple(g.shape), g.dtype, seed, 0 if self.shared[0] else rank, stream=2)


#: One rank's results by name: the output, and gradients of orders 1 to 3 or a tangent.
Measured = dict[str, Tensor]
#: Makes calls, of one rank or of all ranks: xs → ys.
Program = Callable[[list[Tensor]], list[Tensor]]
#: Measures (calls with their ranks, what makes these calls in one graph, the seed): `derivatives` or `tangents`.
Measure = Callable[[Sequence[tuple[Case, int]], Program, int], list[Measured]]


def derivatives(each: Sequence[tuple[Case, int]], program: Program, seed: int, orders: int = 2) -> list[Measured]:
    """Run the program up to this order of derivatives."""
    xs = [case.x(r, seed).requires_grad_() for case, r in each]
    ys = program(xs)
    # The total depends on every x, and so does its gradient: torch.autograd.grad raises for an unused input.
    zero = torch.stack([0 * real_inner(x, x) for x in xs]).sum()
    losses = [real_inner(case.w(y, r, seed), y.sin()) for (case, r), y in zip(each, ys, strict=True)]
    found = [ys]
    for order in range(orders):
        total = torch.stack(losses).sum() + zero
        create_graph = order + 1 < orders
        # In this thread then, also on an accelerator: all ranks run the next backward in one order.
        with torch.autograd.set_multithreading_enabled(False) if create_graph else nullcontext():
            gs = torch.autograd.grad(total, xs, create_graph=create_graph)
        losses = [real_inner(case.v(g, r, seed + order), g) for (case, r), g in zip(each, gs, strict=True)]
        found.append([*gs])
    names = ("output", "gradient", "second", "third")[: 1 + orders]
    return [{name: t.detach() for name, t in zip(names, of_call, strict=True)} for of_call in zip(*found, strict=True)]


def tangents(each: Sequence[tuple[Case, int]], program: Program, seed: int) -> list[Measured]:
    """Make the calls in forward mode; x has a different tangent on each rank."""
    with forward_ad.dual_level():
        duals: list[Any] = [(case.x(r, seed), case.x(r, seed + 1)) for case, r in each]
        ys = program([forward_ad.make_dual(*dual) for dual in duals])  # type: ignore[no-untyped-call]
        unpacked: list[Any] = [forward_ad.unpack_dual(y) for y in ys]  # type: ignore[no-untyped-call]
    return [{"output": y, "tangent": torch.zeros_like(y) if ty is None else ty} for y, ty in unpacked]


def in_truth(case: Case, seed: int, measure: Measure = derivatives) -> list[Measured]:
    """Measure the call with all ranks in one graph."""
    return measure([(case, r) for r in range(case.size)], case.truth, seed)


def error(got: Tensor, expected: Tensor, scale: Sequence[Tensor]) -> float:
    """Return max |got − expected| / max |scale|; inf if shape or dtype differ or a value is not finite."""
    if got.dtype != expected.dtype or not got.isfinite().all():
        return math.inf
    found = relative_errors(got, expected, largest(*scale) or 1.0)
    return float(found.max()) if found.numel() else 0.0


def errors(got: Measured, expected: Sequence[Measured], rank: int) -> dict[str, float]:
    """Return one rank's error of each result, relative to the largest value on any rank."""
    return {name: error(x, expected[rank][name], [of[name] for of in expected]) for name, x in got.items()}


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────


_OPS = [name for name, reduction in REDUCTIONS.items() if reduction.over is not None]
_TIED = ("product", "max", "min")


def two_steps(before: Tensor, own: Tensor) -> Tensor:
    """Return the step h ↦ a h + b that is first one such step and then another; a step is the stack of a and b."""
    return torch.stack([before[0] * own[0], own[0] * before[1] + own[1]])


def table(n: int) -> list[Case]:
    """Every collective × its arguments, for n ranks."""
    last = n - 1
    uneven = [(2 * r + 2) % 5 for r in range(n)]  # 2, 4, 1, 3, 0, …
    cycle = [(r, (r + 1) % n) for r in range(n)]
    some = [0, *uneven[1:]]  # an empty block first
    matrix = [[(3 * r + 2 * s + 1) % 4 for s in range(n)] for r in range(n)]  # size of block r → s in all_to_all
    received = [list(sizes) for sizes in zip(*matrix, strict=True)]

    def same(shape: Shape) -> tuple[Shape, ...]:
        return (shape,) * n

    def along(dim: int, sizes: list[int]) -> tuple[Shape, ...]:
        return tuple((size, 3) if dim == 0 else (3, size) for size in sizes)

    def case(name: str, shapes: tuple[Shape, ...], few: bool = False, **arguments: Any) -> Case:
        return Case(name, shapes, arguments, few=few)

    def exchange(shapes: tuple[Shape, ...], split_sizes: list[Any], concat_sizes: list[Any], **arguments: Any) -> Case:
        return Case("all_to_all", shapes, arguments, {"split_sizes": split_sizes, "concat_sizes": concat_sizes})

    return [
        case("all_reduce", same((3, 4))),
        case("all_reduce", same((3, 4)), op="mean"),
        case("all_reduce", same(())),
        case("all_reduce", same((3, 4)), grad_placement="replicate"),
        *(case("all_reduce", same((3, 4)), op=op, async_op=True) for op in ("mean", "product")),
        *(case("all_reduce", same((3, 4)), op=op) for op in _OPS),
        *(case("all_reduce", same((3, 4)), few=True, op=op) for op in _TIED),
        case("all_reduce", same((3, 4)), op="product", grad_placement="replicate"),
        case("all_gather", same((2, 3))),
        case("all_gather", same((2, 3)), dim=-1),
        case("all_gather", along(0, some), sizes=some),
        case("all_gather", along(1, uneven), dim=1, sizes="auto"),
        case("all_gather", same((2, 3)), dim=1, stack=True),
        case("all_gather", along(1, uneven), dim=1, sizes=uneven, async_op=True),
        case("all_gather", same(())),
        case("all_gather", same((2, 3)), dim=1, grad_placement="replicate"),
        case("reduce_scatter", same((2 * n, 3))),
        case("reduce_scatter", same((2 * n, 3)), op="mean"),
        *(case("reduce_scatter", same((2 * n, 3)), op=op, async_op=True) for op in ("sum", "max")),
        case("reduce_scatter", same((3, 2 * n)), dim=-1),
        case("reduce_scatter", same((sum(some), 2)), sizes=some),
        case("reduce_scatter", same((3, sum(some))), dim=1, sizes=some),
        *(case("reduce_scatter", same((2 * n, 3)), op=op) for op in _OPS),
        case("reduce_scatter", same((3, sum(some))), few=True, op="product", dim=1, sizes=some),
        case("reduce_scatter", same((3, sum(some))), few=True, op="max", dim=1, sizes=some),
        case("all_to_all", same((2 * n, 3))),
        case("all_to_all", same((3, 2 * n)), split_dim=1, concat_dim=0),
        case("all_to_all", same((3, 2 * n)), split_dim=1, concat_dim=0, async_op=True),
        exchange(along(0, [sum(row) for row in matrix]), matrix, received),
        exchange(along(0, [sum(row) for row in matrix]), matrix, ["auto"] * n),
        exchange(tuple((size, sum(uneven)) for size in some), [uneven] * n, [some] * n, split_dim=1),
        case("broadcast", same((2, 3))),
        case("broadcast", same((2, 3)), src=last),
        case("broadcast", same((2, 3)), src=last, async_op=True),
        case("broadcast", same((2, 3)), src=last, grad_placement="replicate"),
        case("reduce", same((2, 3))),
        case("reduce", same((2, 3)), dst=last, op="mean"),
        *(case("reduce", same((2, 3)), dst=last, op=op, async_op=True) for op in ("sum", "product")),
        *(case("reduce", same((2, 3)), few=True, op=op) for op in _OPS),
        case("gather", same((2, 3))),
        case("gather", along(1, some), dst=last, dim=1, sizes=some),
        case("gather", same(())),
        case("gather", along(0, uneven), sizes="auto", async_op=True),
        case("scatter", same((2 * n, 3))),
        case("scatter", same((2, sum(some))), src=last, dim=1, sizes=some),
        case("scatter", same((2, sum(uneven))), dim=1, sizes=uneven, async_op=True),
        case("permute", same((2, 3)), pairs=cycle),
        case("permute", same((2, 3)), pairs=[(last, 0)]),
        case("permute", same(()), pairs=cycle, async_op=True),
        case("shift", same((2, 3))),
        case("shift", same((2, 3)), async_op=True),
        case("shift", same((2, 3)), offset=-1, wrap=False),
        case("scan", same((2, 3))),
        case("scan", same((2, 3)), exclusive=True),
        case("scan", same((2, 3)), reverse=True),
        case("scan", same((2, 3)), reverse=True, exclusive=True),
        *(case("scan", same((2, 3)), op=two_steps, reverse=reverse) for reverse in (False, True)),
        case("sum_gradients", same((2, 3))),
        case("split", same((2 * n, 3))),
        case("split", same((2, sum(uneven))), dim=1, sizes=uneven),
    ]
