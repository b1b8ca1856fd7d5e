"""Sums over a block of logits, on one rank.

    s_ij = q_i · k_j (+ bias)         i: this rank's rows; j: columns; q contains the scale; one bias, or one per column
    row_neg_i = log Σ_j exp s_ij      over the negatives: pairs that are neither positive nor excluded
    row_sum_i                         Σ_{j positive} s_ij, or Σ_j −log σ(±s_ij)
    row_pos_i = log Σ_j exp s_ij      over the positives, with labels; without, a row has one positive, row_sum
    col_neg_j, col_pos_j              the same over this rank's rows
    row_soft_i = Σ_j w_ij s_ij        over pairs that are not excluded; w_ij: weights of a row and of a column

Positives and negatives are apart, so that log(exp pos + exp neg) − pos and its derivatives are computed without
cancellation.

note  notes/training/contrastive.md
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from diffcoll.core.torch_private.transforms import carries_tangents, is_within_transform
from diffcoll.nn.marks import Marks, masks, same_id, soft_weights


class LossRule(NamedTuple):
    """What a loss needs to know of the logits."""

    #: The sum of −log σ(±s_ij) instead of softmax sums.
    sigmoid: bool = False
    #: Column sums too.
    columns: bool = False
    #: Rows and columns are the same samples, so s_ii is excluded and no positive.
    within: bool = False
    #: Whether received columns are to be normalized.
    normalize: bool = False
    #: Whether all columns are in one block, each row's positive among them.
    whole: bool = False

    def needs(self, rows: Marks) -> tuple[bool, ...]:
        """Return which of the `Sums` are computed."""
        softmax, labels = not self.sigmoid, rows.label is not None
        return softmax, True, softmax and labels, self.columns, self.columns and labels, rows.weight is not None


class Sums(NamedTuple):
    """Sums over a block of logits; None: the rule does not need it."""

    row_neg: Tensor | None = None
    row_sum: Tensor | None = None
    row_pos: Tensor | None = None
    col_neg: Tensor | None = None
    col_pos: Tensor | None = None
    row_soft: Tensor | None = None

    @staticmethod
    def of(needed: Iterable[bool], found: Iterable[Tensor]) -> Sums:
        """Return those that are needed, as they were found; see `LossRule.needs`."""
        each = iter(found)
        return Sums(*(next(each) if needs else None for needs in needed))

    def found(self) -> tuple[Tensor, ...]:
        """Return those that are needed."""
        return tuple(x for x in self if x is not None)

    def of_columns(self, first: int, count: int) -> Sums:
        """Return those of all rows and of `count` columns."""
        col_neg, col_pos = (None if y is None else y[first : first + count] for y in (self.col_neg, self.col_pos))
        return self._replace(col_neg=col_neg, col_pos=col_pos)


def of_columns(bias: Tensor | None, first: int, count: int) -> Tensor | None:
    """Return the bias of `count` columns."""
    return bias if bias is None or bias.ndim == 0 else bias[first : first + count]


def least(s: Tensor) -> float:
    """Return the logit of an excluded pair. Not −inf: the derivative of logsumexp is NaN where all terms are −inf."""
    return torch.finfo(s.dtype).min / 4


def normalized(x: Tensor) -> Tensor:
    """Return F.normalize(x, dim=-1), differentiable in any nest of transforms."""
    if torch.compiler.is_compiling() or not carries_tangents():
        return F.normalize(x, dim=-1)
    # PyTorch's tangent of a norm writes in place, which the reverse mode of an outer level refuses.
    limits = torch.finfo(x.dtype)
    largest = x.detach().abs().amax(-1, keepdim=True).clamp(limits.tiny, limits.max)
    squared = (x / largest).square().sum(-1, keepdim=True)
    return x / (torch.where(squared > 0, squared, 1.0).sqrt() * largest).clamp_min(1e-12)


def block(q: Tensor, k: Tensor, bias: Tensor | None, rule: LossRule, rows: Marks, cols: Marks, observed: bool) -> Sums:
    """Return the sums over the logits of some columns.

    `observed`: whether a mode was active at the first call; a checkpoint that repeats it, in another mode or in none,
    must save the same tensors.
    """
    k = k.to(q.dtype)
    k = normalized(k) if rule.normalize else k
    s = q @ k.T if bias is None else q @ k.T + bias
    traced = torch.compiler.is_compiling() or is_within_transform() or carries_tangents()
    # A selective checkpoint, which observes, may keep s, which _Softmax modifies.
    if not (rule.sigmoid or rows.label is not None or rows.weight is not None or traced or observed):
        sums = _Softmax.apply(s, rows, cols, same_id(rows, cols), rule)  # type: ignore[no-untyped-call]
        return Sums(row_neg=sums[0], row_sum=sums[1], col_neg=sums[2] if rule.columns else None)
    positive, excluded = masks(rows, cols, rule.within)
    if rule.sigmoid:
        terms = -F.logsigmoid(torch.where(positive, s, -s))
        return Sums(row_sum=(terms if excluded is None else terms.masked_fill(excluded, 0)).sum(1))
    neg = s.masked_fill(positive if excluded is None else positive | excluded, least(s))
    pos = None if rows.label is None else s.masked_fill(~positive, least(s))
    return Sums(
        row_neg=logsumexp(neg, 1),
        row_sum=_not_infinite(s.masked_fill(~positive, 0).sum(1)),
        row_pos=None if pos is None else logsumexp(pos, 1),
        col_neg=logsumexp(neg, 0) if rule.columns else None,
        col_pos=None if pos is None or not rule.columns else logsumexp(pos, 0),
        row_soft=None if rows.weight is None else (soft_weights(rows, cols, excluded) * s).sum(1),
    )


def _not_infinite(positives: Tensor) -> Tensor:
    """Return sums of positives, NaN where they have overflowed: PyTorch's cross-entropy is ∞ − ∞ there, and not 0."""
    return torch.where(positives == math.inf, math.nan, positives)


def logsumexp(s: Tensor, dim: int) -> Tensor:
    """Return log Σ exp s; that of no terms is `least(s)`: its tangent is 0, which PyTorch's of −inf is not."""
    if not torch.compiler.is_compiling() and s.shape[dim] == 0:  # while compiling a size may have no value
        return s.sum(dim) + least(s)
    return s.logsumexp(dim)


class Place:
    """One column of each row, if it is among these columns; if they are the `whole`, it is."""

    def __init__(self, number: Tensor, cols: Marks, whole: bool = False) -> None:
        self._whole, self._none = whole, False
        if whole:
            self._at = number.unsqueeze(1)
            return
        at = number - cols.number[:1] if len(cols.number) else number.new_full(number.shape, -1)
        self._none = not len(cols.number)
        self._here = ((at >= 0) & (at < len(cols.number))).unsqueeze(1)
        self._at = at.clamp(0, max(len(cols.number) - 1, 0)).unsqueeze(1)

    def take(self, s: Tensor) -> Tensor:
        """Return the logit in each row's column, 0 if it is not here."""
        if self._none:
            return s.new_zeros(len(s))
        found = s.gather(1, self._at)
        return (found if self._whole else torch.where(self._here, found, 0)).squeeze(1)

    def put_(self, s: Tensor, value: Tensor | float) -> None:
        """Set the logit in each row's column."""
        if not self._none:
            s.scatter_(1, self._at, self._where_here(s, value))

    def put(self, s: Tensor, value: Tensor) -> Tensor:
        """Return s with another logit in each row's column; differentiable."""
        return s if self._none else s.scatter(1, self._at, self._where_here(s, value))

    def _where_here(self, s: Tensor, value: Any) -> Any:
        return value if self._whole else torch.where(self._here, value, s.gather(1, self._at))


class _Softmax(Function):
    """s ↦ row_neg, row_sum and, if the rule has it, col_neg, for one positive in each row.

    Keeps one matrix, s, and computes its gradient in one more and a temporary one. s is no longer used by the caller.
    """

    @staticmethod
    def forward(
        ctx: Any, s: Tensor, rows: Marks, cols: Marks, same_id: Tensor | None, rule: LossRule
    ) -> tuple[Any, ...]:
        ctx.positive = Place(rows.partner, cols, rule.whole)
        memory = s.detach()
        row_sum = _not_infinite(ctx.positive.take(memory))
        keep_negatives_(memory, ctx.positive, rows, cols, same_id, rule)
        lses = (memory.logsumexp(1), memory.logsumexp(0)) if rule.columns else (memory.logsumexp(1),)
        ctx.save_for_backward(s, *lses)
        return lses[0], row_sum, *lses[1:]

    @staticmethod
    def backward(ctx: Any, g_row: Tensor, g_sum: Tensor, *g_col: Tensor) -> tuple[Tensor, None, None, None, None]:
        s, row_neg, *col_neg = ctx.saved_tensors
        of_cols, in_place = zip(col_neg, g_col, strict=True), not (torch.is_grad_enabled() or is_within_transform())
        g = gradient_of_logits(s, (row_neg, g_row), of_cols, ctx.positive, g_sum, in_place)
        return g, None, None, None, None


def keep_negatives_(
    s: Tensor, positive: Place, rows: Marks, cols: Marks, same_id: Tensor | None, rule: LossRule
) -> None:
    """Set the logits of positives and of excluded pairs to `least(s)`, for one positive in each row."""
    positive.put_(s, least(s))
    if rule.within:
        Place(rows.number, cols, rule.whole).put_(s, least(s))
    if same_id is not None:
        s.masked_fill_(same_id, least(s))


def gradient_of_logits(
    s: Tensor,
    of_rows: tuple[Tensor, Tensor],
    of_cols: Iterable[tuple[Tensor, Tensor]],
    positive: Place,
    g_sum: Tensor,
    in_place: bool,
    overwritten: bool = False,
) -> Tensor:
    """Return the gradient of the logits, from row_neg and, if the rule has it, col_neg, each with its gradient.

    s contains the logits of negatives, `least(s)` elsewhere. In place, without a derivative: in one matrix, which is s
    if that may be overwritten, and for columns one more.
    """
    row_neg, g_row = (x.unsqueeze(1) for x in of_rows)
    if not in_place:
        g = g_row * (s - row_neg).exp()
        for col_neg, g_col in of_cols:
            g = g + g_col * (s - col_neg).exp()
        return positive.put(g, g_sum.unsqueeze(1))
    parts = [((s - col_neg).exp_(), g_col) for col_neg, g_col in of_cols]
    g = torch.sub(s, row_neg, out=s if overwritten else None).exp_().mul_(g_row)
    for part, g_col in parts:
        g.addcmul_(part, g_col)
    positive.put_(g, g_sum.unsqueeze(1))
    return g


def merged(parts: list[Sums]) -> Sums:
    """Return the sums over all columns from those over parts of them."""
    if len(parts) == 1:
        return parts[0]
    row_neg, row_sum, row_pos, col_neg, col_pos, row_soft = (
        [x for x in each if x is not None] for each in zip(*parts, strict=True)
    )
    return Sums(
        torch.stack(row_neg).logsumexp(0) if row_neg else None,
        torch.stack(row_sum).sum(0) if row_sum else None,
        torch.stack(row_pos).logsumexp(0) if row_pos else None,
        torch.cat(col_neg) if col_neg else None,
        torch.cat(col_pos) if col_pos else None,
        torch.stack(row_soft).sum(0) if row_soft else None,
    )
