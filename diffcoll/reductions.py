"""What the ranks' tensors are reduced by: the table of ops, and what each does to a stack of tensors.

A reduction is a function over dim 0 of a stack (N, …). The sum needs none of the functions here, it runs on the
linear core; every other op is brought there by `collectives/reducing.py`, which stacks what the ranks send.
All but the product are PyTorch's own functions with PyTorch's own derivatives, so ties, NaN and −inf are
treated as there.

note      notes/reductions.md       truth  diffcoll.truth.all_reduce
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from diffcoll.engines.engine import WIDER

__all__ = [
    "REDUCTIONS",
    "SPELLINGS",
    "Op",
    "Product",
    "Reduction",
    "Ties",
    "acts_position_by_position",
    "spelled",
    "users",
]

#: What `op` may be: a name, a `torch.distributed.ReduceOp`, or a function that reduces dim 0 of a stack.
Op = Any
Ties = Literal["even", "first"]
Over = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Reduction:
    """One op."""

    name: str
    #: Over dim 0 of a stack; None: the sum, which is linear and needs no stack.
    over: Over | None
    #: What x must be: "numbers" (not bool), "fractions" (floating-point or complex), "ordered" (not complex).
    needs: Literal["numbers", "fractions", "ordered", "anything"]
    #: Whether half precisions are reduced in the wider type.
    widened: bool = False
    #: Whether a function of the user's, which may do with the stack what it likes.
    users: bool = False

    def __call__(self, stack: Tensor) -> Tensor:
        """Reduce dim 0."""
        assert self.over is not None
        if not self.widened:
            return self.over(stack)
        return self.over(stack.to(WIDER.get(stack.dtype, stack.dtype))).to(stack.dtype)


# ── the product ──────────────────────────────────────────────────────────────────────────────────────────


def product(s: Tensor) -> Tensor:
    """y = Π_k s_k over dim 0, and a gradient without division: gs_k = gy · conj(Π_{j≠k} s_j)."""
    if not (s.is_floating_point() or s.is_complex()):
        return s.prod(0, dtype=s.dtype)
    if torch.compiler.is_compiling():
        from diffcoll import compiled  # it is made of what is here

        return compiled.product(s)
    y: Tensor = Product.apply(s)  # type: ignore[no-untyped-call]
    return y


class Product(Function):
    """y = Π_k s_k;  gs_k = gy · conj(L_k), L_k = Π_{j≠k} s_j;  ty = Σ_k L_k ts_k."""

    @staticmethod
    def forward(s: Tensor) -> Tensor:
        """y."""
        return torch.cat([_Scaled.of(piece).product() for (piece,) in _pieces(s)]).view(s.shape[1:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep s."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Tensor:
        """gs."""
        (s,) = ctx.saved_tensors
        gs = [gy * _Scaled.of(piece).leave_one_out().conj() for piece, gy in _pieces(s, gy.unsqueeze(0))]
        return torch.cat(gs, 1).reshape(s.shape)

    @staticmethod
    def jvp(ctx: Any, ts: Tensor) -> Tensor:
        """ty."""
        (s,) = ctx.saved_tensors
        return (ts * leave_one_out(s)).sum(0)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], s: Tensor) -> tuple[Tensor, int]:
        """Further dimensions are carried along."""
        return product(s.movedim(in_dims[0], -1)), -1


def leave_one_out(s: Tensor) -> Tensor:
    """L_k = Π_{j≠k} s_j over dim 0: what comes before k times what comes after.

    Differentiable to any order, as the multiplications that it is made of.
    """
    return torch.cat([_Scaled.of(piece).leave_one_out() for (piece,) in _pieces(s)], 1).reshape(s.shape)


#: So many numbers of a stack are worked on at a time: they and what is made of them stay in cache.
_PIECE = 1 << 16


def _pieces(s: Tensor, *more: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors in pieces of a few columns, all further dimensions taken as one."""
    columns = s[0].numel() if torch.compiler.is_compiling() else max(1, _PIECE // len(s))  # compiled: fused anyway
    return zip(*(torch.split(t.reshape(len(t), -1), columns, 1) for t in (s, *more)), strict=True)


#: Factors between 1 and 2 that may be multiplied before the result is scaled anew (float32 reaches 2^127).
_RUN = 32


@dataclass(frozen=True)
class _Scaled:
    """Factors s_k = m_k · 2^e_k, 1 ≤ |m_k| < 2 and e_k whole: no product of them leaves the range on its way.

    The exponents are constants to autograd, and a power of two multiplies without rounding, so a product of the
    m_k is rounded as the product of the s_k would be.
    """

    m: Tensor
    e: Tensor

    @classmethod
    def of(cls, s: Tensor) -> _Scaled:
        with torch.no_grad():
            e = s.detach().abs().log2().floor()
            e = torch.where(e.isfinite(), e, 0.0)  # zeros, infinities and NaN as they are
        return cls(_times_power_of_two(s, -e), e)

    def product(self) -> Tensor:
        running = self._nothing()
        for k in range(self.m.shape[0]):
            running = self._times(running, k)
        return running.value()

    def leave_one_out(self) -> Tensor:
        n = self.m.shape[0]
        before = [self._nothing()]
        for k in range(n - 1):
            before.append(self._times(before[-1], k))
        after, rows = self._nothing(), []
        for k in range(n - 1, -1, -1):
            b = before.pop()
            rows.append(_Scaled(b.m * after.m, b.e + after.e).value())
            after = self._times(after, k)
        return torch.stack(rows[::-1])

    def value(self) -> Tensor:
        return _times_power_of_two(self.m, self.e)

    def _nothing(self) -> _Scaled:
        return _Scaled(torch.ones_like(self.m[0]), torch.zeros_like(self.e[0]))

    def _times(self, running: _Scaled, k: int) -> _Scaled:
        m, e = running.m * self.m[k], running.e + self.e[k]
        if (k + 1) % _RUN:
            return _Scaled(m, e)
        again = _Scaled.of(m)
        return _Scaled(again.m, e + again.e)


def _times_power_of_two(x: Tensor, e: Tensor) -> Tensor:
    """x · 2^e in two steps, neither of which leaves the range of the type unless the result does."""
    most = -2 * torch.tensor(torch.finfo(e.dtype).tiny, dtype=torch.float64).log2().item()
    e = e.clamp(-most, most)
    half = (e / 2).floor()
    return x * half.exp2() * (e - half).exp2()


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────


def _first_max(s: Tensor) -> Tensor:
    return s.max(0).values  # its index, and so its gradient, is that of the first of equals


def _first_min(s: Tensor) -> Tensor:
    return s.min(0).values


def _table(largest: Over, smallest: Over) -> dict[str, Reduction]:
    reductions = (
        Reduction("sum", None, "numbers"),
        Reduction("mean", None, "fractions"),
        Reduction("product", product, "numbers", widened=True),
        Reduction("max", largest, "ordered"),
        Reduction("min", smallest, "ordered"),
        Reduction("logsumexp", partial(torch.logsumexp, dim=0), "fractions", widened=True),
    )
    return {reduction.name: reduction for reduction in reductions}


#: ties → op → what it does.
REDUCTIONS: dict[Ties, dict[str, Reduction]] = {
    "even": _table(partial(torch.amax, dim=0), partial(torch.amin, dim=0)),
    "first": _table(_first_max, _first_min),
}

#: What people write → name.
SPELLINGS = {name: name for name in REDUCTIONS["even"]} | {
    "avg": "mean",
    "average": "mean",
    "prod": "product",
    "maximum": "max",
    "amax": "max",
    "minimum": "min",
    "amin": "min",
}


def spelled(op: Op) -> tuple[str, Any] | None:
    """Return the name that a string or a `torch.distributed.ReduceOp` spells, and its factor.

    None: it is neither. A ReduceOp is known by its parts, so that nothing of torch.distributed need be there.
    """
    if type(op) is str and op in SPELLINGS:
        return SPELLINGS[op], None
    kind = op if isinstance(op, str) else getattr(op, "op", op)
    name: Any = getattr(kind, "name", None) if type(kind).__name__ == "RedOpType" else kind
    if not isinstance(name, str):
        return None
    if name == "PREMUL_SUM":
        return "sum", op.factor
    return SPELLINGS.get(name.lower(), name.lower()), None


# ── the user's own ───────────────────────────────────────────────────────────────────────────────────────


def users(f: Over) -> Reduction:
    """Make a reduction of a function of the user's."""
    return Reduction("the function", f, "anything", users=True)


def acts_position_by_position(f: Over, x: Tensor, n: int) -> bool:
    """Whether f makes each position of its result of the same position in the stack alone.

    Then parts of the stack can be reduced on different ranks. f is asked, on made-up numbers of n ranks: is what it
    makes of a few positions together what it makes of each alone? In every position another rank is the largest,
    so that a choice of one whole tensor shows too. In doubt the answer is no.
    """
    if torch.compiler.is_compiling():  # a question with a yes or no answer would break the graph
        return False
    width = 5 if x.shape[-1:] == (4,) else 4  # not what a constant within f would fit by chance
    numbers = torch.arange(1.0, n * width + 1, dtype=torch.float64).square().sin().view(n, width)
    for position in range(width):
        numbers[position % n, position] *= 8
    asked = (numbers > 0 if x.dtype == torch.bool else (4 * numbers).to(x.dtype)).to(x.device)
    with torch.no_grad():
        try:
            together = f(asked)
            alone = torch.stack([f(column.unsqueeze(1))[0] for column in asked.unbind(1)])
        except Exception:  # it wants another shape
            return False
    return together.shape == (width,) and _close(together, alone)


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether a and b differ by rounding alone.

    assert_close would say it too, but the error that it raises is a cycle that keeps tensors alive.
    """
    if a.dtype != b.dtype or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    eps = torch.finfo(a.dtype).eps
    tolerance = 2 * eps if eps > 1e-4 else eps**0.5
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
