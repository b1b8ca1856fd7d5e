"""Sums over a block of logits, on one rank.

    s_ij = q_i · k_j (+ bias)     i: this rank's rows; j: columns; q contains the scale
    row_lse_i = log Σ_j exp s_ij  over the pairs that are not excluded
    row_sum_i                     Σ_{j positive} s_ij, or Σ_j −log σ(±s_ij)
    col_lse_j = log Σ_i exp s_ij  over this rank's rows

note  notes/contrastive.md
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from diffcoll.core._torch import RELEASE, carries_tangents, is_batched_by_autograd, is_observed, is_within_transform

__all__ = ["Marks", "Rule", "Sums", "block", "blocks", "merged"]

#: Torch 2.8 and before: a checkpoint keeps what a Function within it has saved until all of backward has ended.
_KEEPS_SAVED = RELEASE < (2, 9)


class Rule(NamedTuple):
    """What a loss needs to know of the logits."""

    #: The sum of −log σ(±s_ij) instead of softmax sums.
    sigmoid: bool = False
    #: col_lse too.
    columns: bool = False
    #: Rows and columns are the same samples, so s_ii is excluded and no positive.
    within: bool = False
    #: Whether received columns are to be normalized.
    normalize: bool = False


class Marks(NamedTuple):
    """Identifies the sample of each row or column."""

    #: Number of the row among all ranks' rows.
    number: Tensor
    #: A number that rows of one sample have in common.
    sample: Tensor
    label: Tensor | None
    id: Tensor | None

    def part(self, first: int, count: int) -> Marks:
        """Return those of `count` rows."""
        return Marks(*(None if x is None else x[first : first + count] for x in self))  # type: ignore[arg-type]


class Sums(NamedTuple):
    """Sums over a block of logits; None: the rule does not need it."""

    row_lse: Tensor | None
    row_sum: Tensor | None
    col_lse: Tensor | None


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(1) == b.unsqueeze(0)


def _masks(rows: Marks, cols: Marks, rule: Rule) -> tuple[Tensor | None, Tensor | None]:
    """Return which pairs are positive and which are excluded; None: not needed, and none."""
    itself = _equal(rows.number, cols.number) if rule.within else None
    if not rule.sigmoid and rows.label is None and rows.id is None:
        return None, itself
    if rows.label is not None and cols.label is not None:
        positive = _equal(rows.label, cols.label)
    else:
        positive = _equal(rows.sample, cols.sample)
    if itself is not None:
        positive = positive & ~itself
    if rows.id is not None and cols.id is not None:
        return positive, _equal(rows.id, cols.id) & ~positive  # the pair of a row with itself is one of them
    return positive, itself


def block(q: Tensor, k: Tensor, bias: Tensor | None, rule: Rule, rows: Marks, cols: Marks) -> Sums:
    """Return the sums over the logits of some columns."""
    k = k.to(q.dtype)
    k = F.normalize(k, dim=-1) if rule.normalize else k
    s = q @ k.T
    positive, excluded = _masks(rows, cols, rule)
    if rule.sigmoid:
        assert positive is not None
        s = s if bias is None else s + bias
        terms = -F.logsigmoid(torch.where(positive, s, -s))
        return Sums(None, (terms if excluded is None else terms.masked_fill(excluded, 0)).sum(1), None)
    row_sum = None
    if rows.label is not None and positive is not None:
        row_sum = s.masked_fill(~positive, 0).sum(1)
    if excluded is not None:
        # Not −inf: the derivative of logsumexp is NaN where all terms are −inf.
        # vmap may have batched the mask only, and a selective checkpoint may keep s as it was before.
        fill = s.masked_fill if is_within_transform() or is_observed() else s.masked_fill_
        s = fill(excluded, torch.finfo(s.dtype).min / 4)
    if not rule.columns:
        return Sums(s.logsumexp(1), row_sum, None)
    if _KEEPS_SAVED or torch.compiler.is_compiling() or is_within_transform() or carries_tangents():
        return Sums(s.logsumexp(1), row_sum, s.logsumexp(0))
    row_lse, col_lse = _LogSumExps.apply(s)  # type: ignore[no-untyped-call]
    return Sums(row_lse, row_sum, col_lse)


class _LogSumExps(Function):
    """s ↦ (s.logsumexp(1), s.logsumexp(0)), with 2 temporary matrices in backward instead of 4."""

    @staticmethod
    def forward(ctx: Any, s: Tensor) -> tuple[Tensor, Tensor]:
        row_lse, col_lse = s.logsumexp(1), s.logsumexp(0)
        ctx.save_for_backward(s, row_lse, col_lse)
        return row_lse, col_lse

    @staticmethod
    def backward(ctx: Any, g_row: Tensor, g_col: Tensor) -> Tensor:
        saved: tuple[Tensor, Tensor, Tensor] = ctx.saved_tensors
        s, row_lse, col_lse = saved
        row_lse, g_row = row_lse.unsqueeze(1), g_row.unsqueeze(1)
        if torch.is_grad_enabled() or is_batched_by_autograd(g_row) or is_batched_by_autograd(g_col):
            return g_row * (s - row_lse).exp() + g_col * (s - col_lse).exp()
        return (s - row_lse).exp_().mul_(g_row).addcmul_((s - col_lse).exp_(), g_col)


def blocks(
    q: Tensor, k: Tensor, bias: Tensor | None, rule: Rule, rows: Marks, cols: Marks, chunk: int | None
) -> Iterator[Sums]:
    """Yield the sums over `chunk` columns at a time, whose logits backward computes again.

    torch.func refuses the hooks of checkpoints; within its transforms the logits of all chunks are kept.
    """
    again = chunk is not None and torch.is_grad_enabled() and not is_within_transform()
    first = 0
    for part in (k,) if chunk is None else torch.split(k, chunk):  # an empty k has one part, so it stays in the graph
        one = partial(block, rule=rule, rows=rows, cols=cols.part(first, len(part)))
        first += len(part)
        if again:
            yield checkpoint(one, q, part, bias, use_reentrant=False, preserve_rng_state=False)
        else:
            yield one(q, part, bias)


def merged(parts: list[Sums]) -> Sums:
    """Return the sums over all columns from those over parts of them."""
    if len(parts) == 1:
        return parts[0]
    row_lse, row_sum, col_lse = ([x for x in each if x is not None] for each in zip(*parts, strict=True))
    return Sums(
        torch.stack(row_lse).logsumexp(0) if row_lse else None,
        torch.stack(row_sum).sum(0) if row_sum else None,
        torch.cat(col_lse) if col_lse else None,
    )
