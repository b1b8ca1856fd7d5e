"""The reductions that `op` may name, and the function of each on a stack of tensors.

A reduction is a function over dim 0 of a stack (N, …). The sum and the mean need no stack, they are linear. For every
other op `core/reducing.py` stacks the ranks' tensors. All functions except the product are PyTorch's, with PyTorch's
derivatives, so ties, NaN and −inf are treated as in PyTorch.

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

from diffcoll.core._torch import batch_last
from diffcoll.core.errors import message
from diffcoll.engines.engine import WIDER

__all__ = [
    "REDUCTIONS",
    "SPELLINGS",
    "Op",
    "Product",
    "Reduction",
    "Ties",
    "elementwise",
    "spelled",
    "users",
]

#: What `op` may be: a name, a `torch.distributed.ReduceOp`, or a function that reduces dim 0 of a stack.
Op = Any
Ties = Literal["even", "first"]
Over = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Reduction:
    """One reduction."""

    name: str
    #: The function over dim 0 of a stack; None: the sum or the mean, which are linear and need no stack.
    over: Over | None
    #: What x must be: "numbers" (not bool), "fractions" (floating-point or complex), "ordered" (not complex).
    needs: Literal["numbers", "fractions", "ordered", "anything"]
    #: Whether half precisions are reduced in the wider type.
    widened: bool = False
    #: Whether it is a user's function.
    users: bool = False
    #: Whether it needs the stack of whole tensors instead of a stack of parts of them.
    whole: bool = False

    def of(self, stack: Tensor) -> Tensor:
        """Reduce dim 0.

        Not `__call__`: until torch 2.12, Dynamo cannot call an object that is created in the traced code.
        """
        assert self.over is not None
        if not self.widened:
            return self.over(stack)
        return self.over(stack.to(WIDER.get(stack.dtype, stack.dtype))).to(stack.dtype)


# ── the product ──────────────────────────────────────────────────────────────────────────────────────────


def product(s: Tensor) -> Tensor:
    """y = Π_k s_k over dim 0, with a gradient that does not divide: gs_k = gy · conj(Π_{j≠k} s_j)."""
    if not (s.is_floating_point() or s.is_complex()):
        return s.prod(0, dtype=s.dtype)
    if torch.compiler.is_compiling():
        from diffcoll.core import compiled  # imports this module

        return compiled.product(s)
    y: Tensor = Product.apply(s)  # type: ignore[no-untyped-call]
    return y


class Product(Function):
    """y = Π_k s_k;  gs_k = gy · conj(L_k), L_k = Π_{j≠k} s_j;  ty = Σ_k L_k ts_k."""

    @staticmethod
    def forward(s: Tensor) -> Tensor:
        """y."""
        y = s.new_empty(s.shape[1:])  # not a view, which could not be modified in place
        for piece, part in _pieces(s, y.view(1, -1)):
            part.copy_(_Scaled.of(piece).product())
        return y

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
        """The product over dim 0 acts on each number of the other dimensions separately."""
        return batch_last(product(s.movedim(in_dims[0], -1)))


def leave_one_out(s: Tensor) -> Tensor:
    """L_k = Π_{j≠k} s_j over dim 0: the product of the factors before k times that of the factors after k.

    Consists of multiplications, so it is differentiable to any order.
    """
    return torch.cat([_Scaled.of(piece).leave_one_out() for (piece,) in _pieces(s)], 1).reshape(s.shape)


#: Elements of a stack that are processed at a time, few enough for them and the intermediate results to stay in cache.
_PIECE = 1 << 16


def _pieces(s: Tensor, *more: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors in pieces of a few columns, after flattening all dimensions but the first."""
    rows = [t.reshape(len(t), -1) for t in (s, *more)]
    # The compiler fuses the operations, so it needs no pieces. Until torch 2.12 it cannot trace a split of no elements.
    if torch.compiler.is_compiling() or s.numel() == 0:
        return iter([tuple(rows)])
    return zip(*(torch.split(row, max(1, _PIECE // len(s)), 1) for row in rows), strict=True)


#: Number of factors, of modulus below 2√2, that are multiplied before the product is scaled again (float32: < 2^128).
_RESCALE_EVERY = 32


@dataclass(frozen=True)
class _Scaled:
    """Factors s_k = m_k · 2^e_k with 1 ≤ |m_k| < 2 and integer e_k, so that no partial product overflows or underflows.

    If m_k is complex, the larger of |Re m_k| and |Im m_k| is between 1 and 2.

    Autograd treats the exponents as constants. Multiplication by a power of two does not round, so a product of the m_k
    is rounded as the product of the s_k would be.
    """

    m: Tensor
    e: Tensor

    @classmethod
    def of(cls, s: Tensor) -> _Scaled:
        with torch.no_grad():
            x = s.detach()
            # Not the modulus of a complex number, which may overflow although neither part does.
            size = torch.maximum(x.real.abs(), x.imag.abs()) if x.is_complex() else x.abs()
            e = size.log2().floor()
            e = torch.where(e.isfinite(), e, 0.0)  # leaves zeros, infinities and NaN unscaled
        return cls(_times_power_of_two(s, -e), e)

    def product(self) -> Tensor:
        running = _Scaled(self.m[0], self.e[0])  # not 1 · m_0, which is NaN for a complex infinity
        for k in range(1, self.m.shape[0]):
            running = self._times(running, k)
        return running.value()

    def leave_one_out(self) -> Tensor:
        n = self.m.shape[0]
        before = [self._one()]
        for k in range(n - 1):
            before.append(self._times(before[-1], k))
        after, rows = self._one(), []
        for k in range(n - 1, -1, -1):
            b = before.pop()
            rows.append(_Scaled(b.m * after.m, b.e + after.e).value())
            after = self._times(after, k)
        return torch.stack(rows[::-1])

    def value(self) -> Tensor:
        return _times_power_of_two(self.m, self.e)

    def _one(self) -> _Scaled:
        return _Scaled(torch.ones_like(self.m[0]), torch.zeros_like(self.e[0]))

    def _times(self, running: _Scaled, k: int) -> _Scaled:
        m, e = running.m * self.m[k], running.e + self.e[k]
        if (k + 1) % _RESCALE_EVERY:
            return _Scaled(m, e)
        rescaled = _Scaled.of(m)
        return _Scaled(rescaled.m, e + rescaled.e)


def _times_power_of_two(x: Tensor, e: Tensor) -> Tensor:
    """x · 2^e in two multiplications, neither of which overflows or underflows unless the result does."""
    if x.is_complex():  # each part alone: in a complex multiplication an infinite part makes the other NaN
        x = x.resolve_conj()
        return torch.complex(_times_power_of_two(x.real, e), _times_power_of_two(x.imag, e))
    most = -2 * torch.tensor(torch.finfo(e.dtype).tiny, dtype=torch.float64, device="cpu").log2().item()
    e = e.clamp(-most, most)
    half = (e / 2).floor()
    return x * half.exp2() * (e - half).exp2()


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────


def _first_max(s: Tensor) -> Tensor:
    return s.max(0).values  # its index, and so its gradient, is that of the first of equal elements


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


#: ties → name → reduction.
REDUCTIONS: dict[Ties, dict[str, Reduction]] = {
    "even": _table(partial(torch.amax, dim=0), partial(torch.amin, dim=0)),
    "first": _table(_first_max, _first_min),
}

#: Accepted spelling → name.
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
    """Return the name that a string or a `torch.distributed.ReduceOp` stands for, and its factor; None: op is neither.

    A ReduceOp is recognised by its attributes, because torch.distributed may not be available.
    """
    if type(op) is str and op in SPELLINGS:
        return SPELLINGS[op], None
    kind = getattr(op, "op", None) if type(op).__name__ == "ReduceOp" else op
    name: Any = getattr(kind, "name", None) if type(kind).__name__ == "RedOpType" else op
    if not isinstance(name, str):
        return None
    if name == "PREMUL_SUM":
        return "sum", op.__getstate__()[1]  # it has an attribute only since torch 2.13
    return SPELLINGS.get(name.lower(), name.lower()), None


# ── users' functions ─────────────────────────────────────────────────────────────────────────────────────


class elementwise:
    """A function as `op` that reduces each position independently; the ranks then share the work and the memory.

    A plain function as `op` is called on every rank with the whole stack, N times the size of x. Many reductions do
    not need it: each element of their result depends only on the elements at the same position of the ranks' tensors
    (a median, a trimmed mean, a norm over ranks, a weighting by rank). Pass these as `op=dc.elementwise(f)`: each rank
    then reduces a part, and memory and bytes are those of `"max"`.
    If the result at one position depends on any other position (a norm of the whole tensor, a softmax or a sort along a
    dimension of x, weights per row), pass f itself.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> median = dc.elementwise(lambda s: s.median(0).values)
    >>> xs = [torch.tensor([1.0, 9.0]), torch.tensor([2.0, 8.0]), torch.tensor([3.0, 1.0])]
    >>> simulate(lambda x: dc.all_reduce(x, median), xs)[0]
    tensor([2., 8.])

    Args:
        f: gets a stack of some positions of all ranks' x, dim 0 of which is the rank: (N, k) with any k from 1, or
            (N, …) with the shape of x or of a block of it; returns it with dim 0 reduced. It must be the same function
            on all ranks. That f is elementwise is verified in check mode only: it compares the result of f for the
            whole stack with its results for parts, and raises the same ValueError on all ranks if they differ.

    Raises:
        TypeError: f is not callable.

    Source: notes/reductions.md.
    """

    def __init__(self, f: Over) -> None:
        if not callable(f):
            remedy = f"pass op={f!r} itself" if isinstance(f, str) else ""
            raise TypeError(message("elementwise", "f", repr(f), "a function that reduces dim 0 of a stack", remedy))
        self.f: Over = f.f if isinstance(f, elementwise) else f

    def __call__(self, stack: Tensor) -> Tensor:
        """Reduce dim 0."""
        return self.f(stack)

    def __eq__(self, other: object) -> bool:
        """Whether both wrap the same function."""
        return isinstance(other, elementwise) and self.f == other.f

    def __hash__(self) -> int:
        """Return a hash that is consistent with `==`."""
        return hash((elementwise, self.f))

    def __repr__(self) -> str:
        """Show the name of the function."""
        return f"elementwise({getattr(self.f, '__name__', repr(self.f))})"


def users(f: Over) -> Reduction:
    """Return the reduction that a user's function is."""
    return Reduction("the function", f, "anything", users=True, whole=not isinstance(f, elementwise))
