"""Rows of this rank against the columns of all ranks: masks, and log-sum-exps of the logits, in chunks of rows.

    s_ij = scale · x_i · y_j            i: this rank's b rows; j: all ranks' B columns
    neg_i = log Σ_j exp s_ij            over the negatives: neither positive nor left out
    term_i = softplus(neg_i − pos_i)    of a row with one positive; −log of its softmax

Positives stay apart from negatives: log(exp pos + exp neg) − pos, and its gradient, would be differences of nearly
equal numbers where the loss is small. With chunks, a checkpoint computes the logits of some rows again in backward;
collectives are outside of it.

note  notes/training/contrastive.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from diffcoll.core.errors import message
from diffcoll.core.expect import integer
from diffcoll.core.torch_private.tracing import assume, is_known, is_observed
from diffcoll.core.torch_private.transforms import carries_tangents, is_eager, is_within_transform


class Marks(NamedTuple):
    """Identifies the sample of each row or column; None: no row has one."""

    #: Of rows, (b, k): the columns of a row that are no negatives; of columns, None.
    own: Tensor | None = None
    #: Pairs of equal labels are positives.
    label: Tensor | None = None
    #: Pairs of equal ids that are not positives are left out.
    id: Tensor | None = None
    #: Of rows, (b, columns): pairs that are left out unless they are positives.
    exclude: Tensor | None = None


def equal(a: Tensor, b: Tensor) -> Tensor:
    """Return for each pair of values whether they are equal."""
    return a.unsqueeze(1) == b.unsqueeze(0)


def masks(rows: Marks, cols: Marks, itself: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return which pairs are positive, and which others are left out, if any; itself: pairs of a row with itself.

    The second mask may have positives, which stay positives.
    """
    assert rows.label is not None and cols.label is not None
    positive = equal(rows.label, cols.label)
    out = rows.exclude
    if rows.id is not None and cols.id is not None:
        same = equal(rows.id, cols.id)
        out = same if out is None else out | same
    if itself is not None:
        positive = positive & ~itself
        out = itself if out is None else out | itself
    return positive, out


def least(s: Tensor) -> float:
    """Return the logit of a pair that is left out. Not −inf: the derivative of logsumexp is NaN if all terms are."""
    return torch.finfo(s.dtype).min / 4


class _Product(Function):
    """x yᵀ of float32 tensors whose values a half dtype holds, on tensor cores, which add up in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, half: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.half = half
        return half_product(x.to(half), y.to(half).t())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        if torch.is_grad_enabled():
            return g @ y, g.t() @ x, None
        largest = g.abs().amax() if g.numel() else g.new_ones(())  # float16 has no small numbers
        g = (g / largest.clamp(min=torch.finfo(g.dtype).tiny)).to(ctx.half)
        gx, gy = half_product(g, y.to(ctx.half)), half_product(g.t(), x.to(ctx.half))
        return gx * largest, gy * largest, None


def half_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product of half-precision tensors in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


class Logits(NamedTuple):
    """Makes logits of some rows and all columns."""

    columns: Tensor
    scale: Tensor | float
    bias: Tensor | float | None = None
    #: The dtype whose products run on tensor cores; None: those of the features' own.
    half: torch.dtype | None = None
    #: Whether logits are overwritten in place, see `may_overwrite`; decided before a checkpoint repeats it.
    in_place: bool = True

    @staticmethod
    def of(
        columns: Tensor,
        scale: Tensor | float,
        features: Tensor,
        normalize: bool,
        bias: Tensor | float | None = None,
    ) -> Logits:
        """Return those of columns that were gathered from such features."""
        cores = features.is_cuda and torch.version.hip is None and columns.dtype != features.dtype and not normalize
        return Logits(columns, scale, bias, features.dtype if cores else None, may_overwrite())

    def rows(self, x: Tensor) -> Tensor:
        """Return what `__call__` and `of_pairs` take of features: scaled, but for tensor cores, which need x itself."""
        return x if self.half is not None else x * self.scale

    def __call__(self, q: Tensor) -> Tensor:
        """Return a new matrix, (rows, columns), that may be overwritten."""
        if self.half is None:
            s = q @ self.columns.t()
        elif is_eager(q, self.columns):
            s = _Product.apply(q, self.columns, self.half) * self.scale  # type: ignore[no-untyped-call]
        else:
            s = q @ self.columns.t() * self.scale
        return s if self.bias is None else s + self.bias

    def of_pairs(self, q: Tensor, keys: Tensor) -> Tensor:
        """Return the logit of each row with its own key. One that overflows is NaN, for a GradScaler to see it."""
        s = (q * keys).sum(1) if self.half is None else (q * keys).sum(1) * self.scale
        s = s if self.bias is None else s + self.bias
        return s + 0 * s

    def of_negatives(self, q: Tensor, rows: Marks, cols: Marks) -> Tensor:
        """Return logits, `least` for what is no negative; its gradient is 0 without a rule, since its softmax is."""
        s = self(q)
        s = s if rows.own is None else overwritten(s, rows.own, least(s), self.in_place)
        out = [] if rows.exclude is None else [rows.exclude]
        if rows.id is not None and cols.id is not None:
            out.append(equal(rows.id, cols.id))
        for mask in out:
            if self.in_place:
                with torch.no_grad():
                    s.masked_fill_(mask, least(s))
            else:
                s = s.masked_fill(mask, least(s))
        return s


def may_overwrite() -> bool:
    """Whether an operation may write into a result: vmap lacks rules, and a selective checkpoint keeps results."""
    return torch.compiler.is_compiling() or not (is_within_transform() or is_observed())


def overwritten(s: Tensor, columns: Tensor, value: Any, in_place: bool) -> Tensor:
    """Return s with another value in these columns of each row, (rows, k)."""
    if not in_place:
        return s.scatter(1, columns, value)
    with torch.no_grad():
        return s.scatter_(1, columns, value)


def logsumexp(s: Tensor, dim: int) -> Tensor:
    """Return log Σ exp s; `least` without any term. torch.logsumexp computes the exponentials again in backward."""
    if is_known(s.shape[dim] == 0):
        return s.sum(dim) + least(s)
    top = s.detach().amax(dim, keepdim=True)
    s = s - top
    s = s.exp_() if may_overwrite() else s.exp()
    return s.sum(dim).log() + top.squeeze(dim)


def cross_entropy(neg: Tensor, pos: Tensor) -> Tensor:
    """Return −log softmax of one positive among negatives, from their log-sum-exp."""
    return softplus(neg - pos)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp x), exact in float64 too."""
    return F.softplus(x, 1.0, 40.0)


#: From features of some rows, and their marks as `rows`.
Block = Callable[..., tuple[Tensor, ...]]


def in_chunks(block: Block, chunk_size: int | None, x: Tensor, rows: Marks) -> list[tuple[Tensor, ...]]:
    """Return block(x, rows) of all rows, or of each chunk of rows, whose logits backward computes again."""
    if chunk_size is None or is_within_transform() or carries_tangents():  # torch.func refuses checkpoints
        return [block(x, rows=rows)]
    found = []
    for i in range(max(-(-x.shape[0] // chunk_size), 1)):  # a graph is of this number, not of the number of rows
        part = slice(i * chunk_size, (i + 1) * chunk_size)
        of_part = partial(block, rows=Marks(*(None if mark is None else mark[part] for mark in rows)))
        found.append(checkpoint(of_part, x[part], use_reentrant=False, preserve_rng_state=False))
    return found


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the chunks' rows. One chunk stays: torch.cat of empty rows has a gradient without a graph."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def check_chunk_size(name: str, chunk_size: int | None) -> None:
    """Raise unless `chunk_size`, an argument of the loss `name`, is None or a positive integer."""
    if chunk_size is not None:
        integer(name, "chunk_size", chunk_size, least=1)


def check_exclude(name: str, exclude: Tensor | None, rows: int, columns: int, what: str) -> Tensor | None:
    """Return the mask; raise unless it is a bool tensor of shape (rows, columns), which is `what` in words."""
    if exclude is None:
        return None
    if not isinstance(exclude, Tensor) or exclude.dtype != torch.bool:
        got = str(exclude.dtype) if isinstance(exclude, Tensor) else type(exclude).__name__
        raise TypeError(message(name, "exclude", got, f"a bool tensor of shape {what}"))
    if exclude.ndim != 2 or exclude.shape[0] != rows or not _fits(exclude.shape[1], columns):
        shape = f"shape {tuple(exclude.shape)}"
        raise ValueError(message(name, "exclude", shape, f"shape {what}, here ({rows}, {columns})"))
    return exclude.detach()


def _fits(size: int, columns: int) -> bool:
    if torch.compiler.is_compiling():  # the number of all ranks' columns has no value there
        assume(size == columns)
        return True
    return size == columns
