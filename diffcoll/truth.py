"""Reference implementation of each collective: from the list of all ranks' tensors to the list of all ranks' results.

The functions are plain differentiable PyTorch on tensors in one autograd graph, so PyTorch derives the gradient. The
library's own rules are checked against that reference gradient. This module imports nothing of the library. Arguments
are those of the public functions, without `group`. An argument that may differ from rank to rank is the list of all
ranks' values.

A replicated tensor is one variable of which every rank holds a copy, and it is counted once. Two functions convert:
`copies` from the variable to the N copies, and `one` from the copies to the variable. Each is the derivative of the
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce as fold
from itertools import accumulate
from operator import add, mul
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

# Shorthand for the annotations below.
Tensors = list[Tensor]


def all_reduce(xs: Tensors, op: str = "sum", *, grad_placement: str = "partial") -> Tensors:
    """y_r = Σ_s x_s, or another reduction of all x."""
    return _everywhere(_reduced(xs, op), len(xs), grad_placement)


def all_gather(
    xs: Tensors, dim: int = 0, *, sizes: Any = None, stack: bool = False, grad_placement: str = "partial"
) -> Tensors:
    """y_r = [x_0 … x_{N-1}]."""
    y = torch.stack(xs, dim) if stack or xs[0].dim() == 0 else torch.cat(_fitting(xs, dim, sizes), dim)
    return _everywhere(y, len(xs), grad_placement)


def reduce_scatter(xs: Tensors, op: str = "sum", dim: int = 0, *, sizes: Any = None) -> Tensors:
    """y_r = (Σ_s x_s)[block r]."""
    return _blocks(_reduced(xs, op), len(xs), dim, sizes)


def all_to_all(
    xs: Tensors,
    split_dim: int = 0,
    concat_dim: int = 0,
    *,
    split_sizes: Sequence[Any] | None = None,
    concat_sizes: Sequence[Any] | None = None,
) -> Tensors:
    """y_r = [x_s block r]_s."""
    n = len(xs)
    blocks = [_blocks(x, n, split_dim, split_sizes and split_sizes[s]) for s, x in enumerate(xs)]
    received = [[blocks[s][r] for s in range(n)] for r in range(n)]
    declared = [concat_sizes and concat_sizes[r] for r in range(n)]
    return [torch.cat(_fitting(x, concat_dim, sizes), concat_dim) for x, sizes in zip(received, declared, strict=True)]


def broadcast(xs: Tensors, src: int = 0, *, grad_placement: str = "partial") -> Tensors:
    """y_r = x_src."""
    return [_instead(y, x) for y, x in zip(_everywhere(xs[src], len(xs), grad_placement), xs, strict=True)]


def reduce(xs: Tensors, dst: int = 0, op: str = "sum") -> Tensors:
    """y_dst = Σ_s x_s; 0 elsewhere."""
    y = _reduced(xs, op)
    return [y.clone() if r == dst else _zero(y) for r in range(len(xs))]


def gather(xs: Tensors, dst: int = 0, dim: int = 0, *, sizes: Any = None) -> Tensors:
    """y_dst = [x_0 … x_{N-1}]; empty elsewhere."""
    y = torch.stack(xs) if xs[0].dim() == 0 else torch.cat(_fitting(xs, dim, sizes), dim)
    return [y if r == dst else y.narrow(dim, 0, 0).clone() for r in range(len(xs))]


def scatter(xs: Tensors, src: int = 0, dim: int = 0, *, sizes: Any = None) -> Tensors:
    """y_r = x_src[block r]."""
    return [_instead(y, x) for y, x in zip(_blocks(xs[src], len(xs), dim, sizes), xs, strict=True)]


def permute(xs: Tensors, pairs: Sequence[tuple[int, int]]) -> Tensors:
    """y_dst = x_src for each pair; 0 where none is received."""
    ys = [_zero(x) for x in xs]
    for src, dst in pairs:
        ys[dst] = _instead(xs[src], xs[dst])
    return ys


def shift(xs: Tensors, offset: int = 1, *, wrap: bool = True) -> Tensors:
    """y_r = x_{r − offset}; without wrap 0 where there is no such rank."""
    n = len(xs)
    return permute(xs, [(r, (r + offset) % n) for r in range(n) if wrap or 0 <= r + offset < n])


def scan(xs: list[Any], op: Any = "sum", *, reverse: bool = False, exclusive: bool = False, empty: Any = None) -> Any:
    """y_r = Σ_{s≤r} x_s; exclusive: s<r; reverse: s≥r or s>r. With a function op: op(… op(x_0, x_1) …, x_r)."""
    if callable(op):
        ys = [*accumulate(reversed(xs) if reverse else xs, op)]
        ys = [empty, *ys[:-1]] if exclusive else ys
        return ys[::-1] if reverse else ys

    def counts(s: int, r: int) -> bool:
        return (not exclusive) if s == r else (s > r) == reverse

    terms = [[_wide(x) for s, x in enumerate(xs) if counts(s, r)] for r in range(len(xs))]
    return [sum(terms[r], start=_wide(_zero(x))).to(x.dtype) for r, x in enumerate(xs)]


def sum_gradients(xs: Tensors) -> Tensors:
    """y_r = x, where xs are copies of one variable x."""
    return [one(xs).clone() for _ in xs]


def split(xs: Tensors, dim: int = 0, *, sizes: Any = None) -> Tensors:
    """y_r = x[block r], where xs are copies of one variable x."""
    return _blocks(one(xs), len(xs), dim, sizes)


# ── replicated tensors ───────────────────────────────────────────────────────────────────────────────────


def copies(y: Tensor, n: int) -> Tensors:
    """Return a copy of one variable for each of n ranks.

    The gradient that arrives at each copy is that of the variable, equal on all ranks; they are not summed.
    """
    return list(_Copies.apply(y, n))  # type: ignore[no-untyped-call]


def one(xs: Tensors) -> Tensor:
    """Return the variable of which xs, equal on all ranks, are copies; each copy gets the whole gradient."""
    x: Tensor = _One.apply(*xs)  # type: ignore[no-untyped-call]
    return x


class _Copies(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, n: int) -> Any:
        ctx.n = n
        return tuple(y.clone() for _ in range(n))

    @staticmethod
    def backward(ctx: Any, *gys: Tensor) -> Any:
        return one(list(gys)), None

    @staticmethod
    def jvp(ctx: Any, ty: Tensor, _: None) -> Any:
        return tuple(copies(ty, ctx.n))


class _One(Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Any:
        ctx.n = len(xs)
        for r, x in enumerate(xs):
            near, a, b = _tolerance(x), _precise(x), _precise(xs[0])
            same = torch.allclose(a, b, rtol=near, atol=near, equal_nan=True) if near else torch.equal(x, xs[0])
            if not same:
                raise ValueError(
                    f"a tensor declared replicated, or its gradient, differs between rank 0 and rank {r}; "
                    "it must be equal on all ranks (every rank computes the same loss from it, and backward is "
                    'called on the sum of all ranks\' losses); if it is not, use grad_placement="partial"'
                )
        return xs[0].clone()

    @staticmethod
    def backward(ctx: Any, gx: Tensor) -> Any:
        return tuple(copies(gx, ctx.n))

    @staticmethod
    def jvp(ctx: Any, *txs: Tensor) -> Any:
        return one(list(txs))


def _precise(x: Tensor) -> Tensor:
    """Return x in a dtype that PyTorch compares: not all that it moves can be, such as float8."""
    return x.cpu().to(torch.complex128 if x.is_complex() else torch.float64)


def _tolerance(x: Tensor) -> float:
    """A tolerance for rounding errors of a long computation in x's precision; 0 for integers and bool."""
    if not (x.is_floating_point() or x.is_complex()):
        return 0.0
    return min(math.sqrt(torch.finfo(x.dtype).eps), 0.5)  # float8_e8m0fnu has an eps of 1


# ── pieces ───────────────────────────────────────────────────────────────────────────────────────────────


def _reduced(xs: Tensors, op: str) -> Tensor:
    return _OPS[op]([_wide(x) for x in xs]).to(xs[0].dtype)


_OPS: dict[str, Callable[[Tensors], Tensor]] = {
    "sum": lambda xs: fold(add, xs),
    "mean": lambda xs: fold(add, xs) / len(xs),
    "product": lambda xs: fold(mul, xs),
    "max": lambda xs: torch.stack(xs).amax(0),
    "min": lambda xs: torch.stack(xs).amin(0),
    "logsumexp": lambda xs: torch.logsumexp(torch.stack(xs), 0),
}


def _wide(x: Tensor) -> Tensor:
    """Return x in the dtype in which it is summed: float32 (or complex64) for half precisions."""
    wider = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
    return x.to(wider.get(x.dtype, x.dtype))


def _instead(y: Tensor, x: Tensor) -> Tensor:
    """Return y, with x in the graph too, with gradient zero, as on real processes."""
    none = x.reshape(-1, 1)[:0]  # not of shape (0,), which cat omits from the graph
    return torch.cat([y.reshape(-1, 1), none]).view(y.shape)


def _zero(x: Tensor) -> Tensor:
    """Return zeros, with x in the graph, with gradient zero."""
    return _instead(torch.zeros_like(x), x)


def _everywhere(y: Tensor, n: int, grad_placement: str) -> Tensors:
    return copies(y, n) if grad_placement == "replicate" else [y.clone() for _ in range(n)]


def _blocks(x: Tensor, n: int, dim: int, sizes: Sequence[int] | None) -> Tensors:
    sizes = [x.shape[dim] // n] * n if sizes is None else sizes
    return [block.clone() for block in x.split_with_sizes(list(sizes), dim)]


def _fitting(xs: Tensors, dim: int, sizes: Any) -> Tensors:
    """Check xs against the sizes that were declared for them."""
    declared = [xs[0].shape[dim]] * len(xs) if sizes is None else sizes
    for r, x in enumerate(xs):
        if declared != "auto" and x.shape[dim] != declared[r]:
            raise ValueError(f"rank {r} has size {x.shape[dim]} along dim {dim}, expected {declared[r]}")
    return xs


#: Arguments that may differ from rank to rank; the functions above take the list of all ranks' values.
PER_RANK = ("split_sizes", "concat_sizes")
