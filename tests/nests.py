"""Nests of torch.func's transforms on N ranks, and what they are by definition.

Each transform is a function from f, x ↦ y, to a function of x alone; what else it needs is drawn from (level, rank):

    grad      ∂/∂x Σ_r ⟨w_r, sin y_r⟩        jvp      Σ_s ∂y_r/∂x_s t_s          vmap    Σ_b k_b f(c_b x)
    vjp       ∂/∂x Σ_r ⟨u_r, y_r⟩            jacfwd   Σ_j k_j (jvp for t_s = e_j on every rank)
                                              jacrev   Σ_i k_i (vjp for u_r = e_i on every rank)

`by_transforms` runs them on one rank. `by_definition` computes the same for all ranks in one graph, by reverse mode
alone: a tangent is the derivative of a gradient ⟨u, J t⟩ with respect to u. `check` compares the two.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

Of = Callable[[Tensor], Tensor]
OfAll = Callable[[list[Tensor]], list[Tensor]]

#: Every nest of depth 3, the outermost transform first.
NAMES = ("grad", "jvp", "vjp", "jacfwd", "jacrev", "vmap")
NESTS = list(product(NAMES, repeat=3))
#: Values, gradients to second order, forward mode over vmap, and vmap over a gradient.
SOME = [(), ("grad", "grad"), ("jvp", "vmap"), ("vmap", "grad")]
SCALES = (0.7, -1.1)


class Drawn:
    """Numbers for one level; shared: whether the input, and whether the output of f, is equal on all ranks."""

    def __init__(self, level: int, shared: tuple[bool, bool]) -> None:
        self.level, self.shared = level, shared

    def like_x(self, x: Tensor, r: int) -> Tensor:
        return self._numbers(x, 0.4, 0 if self.shared[0] else r)

    def like_y(self, y: Tensor, r: int) -> Tensor:
        return self._numbers(y, 0.6, 0 if self.shared[1] else r)

    def of_columns(self, x: Tensor, r: int) -> Tensor:
        """For each column of a Jacobian; equal on all ranks if y is, so that the result is too."""
        return self._numbers(x, 0.4, 0 if any(self.shared) else r)

    def _numbers(self, like: Tensor, start: float, r: int) -> Tensor:
        """Not random: vmap refuses random numbers."""
        index = torch.arange(like.numel(), dtype=torch.float64).view(like.shape)
        return (1.7 * index + start + 0.9 * r + 2.3 * self.level).cos().to(like.dtype)


def levels(nest: Sequence[str], shared: tuple[bool, bool]) -> list[tuple[str, Drawn]]:
    """Return the transforms of a nest, the innermost first."""
    found = []
    for level, name in enumerate(reversed(nest)):
        found.append((name, Drawn(level, shared)))
        if name in ("grad", "vjp", "jacrev"):  # the result is like x
            shared = (shared[0], shared[0])
    return found


def check(
    run: Callable[..., list[list[Tensor]]],
    nests: Sequence[Sequence[str]],
    of_rank: Callable[[int], Of],
    of_all: OfAll,
    xs: Sequence[Tensor],
    shared: tuple[bool, bool] = (False, False),
    what: object = "",
) -> None:
    """Compare what each rank computes from its x with the function of all ranks' xs, in these nests."""

    def body(r: int, x: Tensor) -> list[Tensor]:
        f = of_rank(r)
        return [by_transforms(nest, f, r, shared)(x) for nest in nests]

    found = run(body, range(len(xs)), xs)
    for i, nest in enumerate(nests):
        defined = by_definition(nest, of_all, shared)([*xs])
        for r, (of_one, right) in enumerate(zip(found, defined, strict=True)):
            text = f"rank {r}, {' of '.join(nest)}: {of_one[i]} for {right}\n{what}"
            torch.testing.assert_close(of_one[i], right.detach(), rtol=1e-7, atol=1e-8, equal_nan=True, msg=text)


# ── on one rank ──────────────────────────────────────────────────────────────────────────────────────────


def by_transforms(nest: Sequence[str], f: Of, r: int, shared: tuple[bool, bool] = (False, False)) -> Of:
    for name, drawn in levels(nest, shared):
        f = _TRANSFORMED[name](f, drawn, r)
    return f


def _grad(f: Of, drawn: Drawn, r: int) -> Of:
    def loss(x: Tensor) -> Tensor:
        y = f(x)
        return (drawn.like_y(y, r) * y.sin()).sum()

    return torch.func.grad(loss)


def _vjp(f: Of, drawn: Drawn, r: int) -> Of:
    def transformed(x: Tensor) -> Tensor:
        y, back = torch.func.vjp(f, x)
        return back(drawn.like_y(y, r))[0]

    return transformed


def _jacfwd(f: Of, drawn: Drawn, r: int) -> Of:
    return lambda x: (
        (torch.func.jacfwd(f)(x) * drawn.of_columns(x, r)).flatten(-x.dim()).sum(-1) if x.dim() else _0d(f, x)
    )


def _0d(f: Of, x: Tensor) -> Tensor:
    return torch.func.jacfwd(f)(x)


def _jacrev(f: Of, drawn: Drawn, r: int) -> Of:
    def transformed(x: Tensor) -> Tensor:
        jacobian = torch.func.jacrev(f)(x)
        of_y = jacobian.shape[: jacobian.dim() - x.dim()]
        k = drawn.like_y(jacobian.new_empty(of_y), r)
        return torch.tensordot(k, jacobian, k.dim()) if k.dim() else k * jacobian

    return transformed


_TRANSFORMED: dict[str, Callable[[Of, Drawn, int], Of]] = {
    "grad": _grad,
    "jvp": lambda f, drawn, r: lambda x: torch.func.jvp(f, (x,), (drawn.like_x(x, r),))[1],
    "vjp": _vjp,
    "jacfwd": _jacfwd,
    "jacrev": _jacrev,
    "vmap": lambda f, drawn, r: (
        lambda x: torch.func.vmap(lambda c, k: k * f(c * x))(*torch.tensor([SCALES, (1.0, 2.0)], dtype=x.dtype)).sum(0)
    ),
}


# ── on all ranks in one graph ────────────────────────────────────────────────────────────────────────────


def by_definition(nest: Sequence[str], f: OfAll, shared: tuple[bool, bool] = (False, False)) -> OfAll:
    for name, drawn in levels(nest, shared):
        f = _DEFINED[name](f, drawn)
    return f


def _views(xs: list[Tensor]) -> list[Tensor]:
    return [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in xs]


def _tied(ys: Sequence[Tensor], xs: Sequence[Tensor]) -> list[Tensor]:
    """Return ys as functions of all xs."""
    zero = 0 * torch.stack([x.sum() for x in xs]).sum()
    return [y + zero for y in ys]


def _pulled(f: OfAll, xs: list[Tensor], cotangents: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
    """∂/∂x_r Σ_s ⟨cotangents(ys)_s, y_s⟩."""
    zs = _views(xs)
    ys = _tied(f(zs), zs)
    gs = torch.autograd.grad(ys, zs, cotangents(ys), create_graph=True, materialize_grads=True)
    return [*gs]


def _pushed(f: OfAll, xs: list[Tensor], ts: list[Tensor]) -> list[Tensor]:
    us: list[Tensor] = []

    def zeros(ys: list[Tensor]) -> list[Tensor]:
        us.extend(torch.zeros_like(y).requires_grad_() for y in ys)
        return us

    gs = _tied(_pulled(f, xs, zeros), us)
    return [*torch.autograd.grad(gs, us, ts, create_graph=True, materialize_grads=True)]


def _basis(x: Tensor) -> list[Tensor]:
    return [*torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)]


def _of_grad(f: OfAll, drawn: Drawn) -> OfAll:
    return lambda xs: _pulled(f, xs, lambda ys: [drawn.like_y(y, r) * y.cos() for r, y in enumerate(ys)])


def _of_jvp(f: OfAll, drawn: Drawn) -> OfAll:
    return lambda xs: _pushed(f, xs, [drawn.like_x(x, r) for r, x in enumerate(xs)])


def _of_vjp(f: OfAll, drawn: Drawn) -> OfAll:
    return lambda xs: _pulled(f, xs, lambda ys: [drawn.like_y(y, r) for r, y in enumerate(ys)])


def _of_jacfwd(f: OfAll, drawn: Drawn) -> OfAll:
    def defined(xs: list[Tensor]) -> list[Tensor]:
        n = len(xs)
        columns = [_pushed(f, xs, [e] * n) for e in _basis(xs[0])]
        ks = [drawn.of_columns(x, r).flatten() if x.dim() else x.new_ones(1) for r, x in enumerate(xs)]
        return [torch.tensordot(k, torch.stack(of), 1) for k, of in zip(ks, zip(*columns, strict=True), strict=True)]

    return defined


def _of_jacrev(f: OfAll, drawn: Drawn) -> OfAll:
    def defined(xs: list[Tensor]) -> list[Tensor]:
        (y, *_) = f(xs)
        n = len(xs)
        rows = [_pulled(f, xs, lambda ys, e=e: [e] * n) for e in _basis(y)]
        ks = [drawn.like_y(y, r).flatten() for r in range(n)]
        return [torch.tensordot(k, torch.stack(of), 1) for k, of in zip(ks, zip(*rows, strict=True), strict=True)]

    return defined


def _of_vmap(f: OfAll, drawn: Drawn) -> OfAll:
    def defined(xs: list[Tensor]) -> list[Tensor]:
        terms = [[k * y for y in f([c * x for x in xs])] for c, k in zip(SCALES, (1.0, 2.0), strict=True)]
        return [sum(of[1:], of[0]) for of in zip(*terms, strict=True)]

    return defined


_DEFINED: dict[str, Any] = {
    "grad": _of_grad,
    "jvp": _of_jvp,
    "vjp": _of_vjp,
    "jacfwd": _of_jacfwd,
    "jacrev": _of_jacrev,
    "vmap": _of_vmap,
}
