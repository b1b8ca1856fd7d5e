"""The sums of a block of logits in chunks of columns, whose logits are not kept.

forward   the sums of `diffcoll.nn.logits`, chunk by chunk
backward  gs_ij from logits that are computed again, and from the sums; gq = gs k, gk = gsᵀ q, gbias = Σ gs

    first order      an autograd Function; in torch.compile an op of torch.library, since a loop over chunks has as
                     many steps as the ranks' sizes require, which have no value while compiling
    higher orders    and transforms: a loop of checkpoints; all derivatives come from theirs

note  notes/training/contrastive.md
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

from diffcoll.core.torch_private.tracing import is_observed
from diffcoll.core.torch_private.transforms import carries_tangents, is_within_transform
from diffcoll.nn.inputs import without_autocast
from diffcoll.nn.logits import (
    LossRule,
    Place,
    Sums,
    block,
    gradient_of_logits,
    keep_negatives_,
    least,
    merged,
    normalized,
    of_columns,
)
from diffcoll.nn.marks import Marks, masks, same_id, soft_weights
from diffcoll.nn.recomputed import gradients


class Work(NamedTuple):
    """What is computed of the logits of all these rows and columns."""

    rule: LossRule
    rows: Marks
    cols: Marks
    #: Number of columns at a time; None: all at once.
    chunk: int | None

    @property
    def needed(self) -> tuple[bool, ...]:
        """Which of the sums are computed."""
        return self.rule.needs(self.rows)

    def of_columns(self, first: int, count: int) -> Work:
        """Return the work of all rows and of `count` columns."""
        return self._replace(cols=self.cols.part(first, count))

    def parts(self, k: Tensor) -> Iterator[tuple[int, Tensor, Work]]:
        """Yield the first column of each chunk, its part of k and the work of it. An empty k has one part, itself."""
        first = 0
        for part in (k,) if self.chunk is None else torch.split(k, self.chunk):
            yield first, part, self if self.chunk is None else self.of_columns(first, len(part))
            first += len(part)

    def sums(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Sums:
        """Return the sums over all these columns."""
        if torch.compiler.is_compiling() and self.chunk is not None:
            k = k.to(q.dtype)
            k = F.normalize(k, dim=-1) if self.rule.normalize else k
            flags = self.rule.sigmoid, self.rule.columns, self.rule.within, self.chunk
            of_op = torch.ops.diffcoll.logits(q, k, bias, *self.rows, *self.cols, *flags)
            return Sums(*(y if needs else None for y, needs in zip(of_op, self.needed, strict=True)))
        # A Function of first order has no rules for transforms and tangents.
        if self.chunk is None or not torch.is_grad_enabled() or is_within_transform() or carries_tangents():
            return self.again(q, k, bias)
        return recomputed(q, k, bias, self)

    def again(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Sums:
        """Return the sums, differentiable to any order; backward computes the logits of chunks again.

        torch.func refuses the hooks of checkpoints; within its transforms the logits of all chunks are kept.
        """
        checkpointed = self.chunk is not None and torch.is_grad_enabled() and not is_within_transform()
        observed = not torch.compiler.is_compiling() and is_observed()  # Dynamo does not trace it
        found = []
        for first, x, (rule, rows, cols, _) in self.parts(k):
            one = partial(block, rule=rule, rows=rows, cols=cols, observed=observed)
            added = of_columns(bias, first, len(x))
            if checkpointed:
                found.append(checkpoint(one, q, x, added, use_reentrant=False, preserve_rng_state=False))
            else:
                found.append(one(q, x, added))
        return merged(found)

    def once(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Sums:
        """Return the sums, which are not differentiated."""
        return self.again(q, k, bias)

    def backward(
        self, q: Tensor, k: Tensor, bias: Tensor | None, whole: Sums, g: Sums, of_k: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the gradients of q, k, unless nobody wants it, and bias, in the dtype of q, from those of the sums.

        `whole` contains the sums of rows over all columns, of which k may be a part, and those of these columns. Their
        gradients are not written in place.
        """
        in_place = not is_within_transform()
        gq, gbias, parts = torch.zeros_like(q), [], []
        gk = q.new_empty(k.shape) if of_k and in_place else None
        for first, of_chunk, of_part in self.parts(k.detach()):
            x, part = of_chunk.to(q.dtype), (first, len(of_chunk))
            with torch.enable_grad():
                y = normalized(x.requires_grad_()) if self.rule.normalize else x
            of_sums = whole.of_columns(*part), g.of_columns(*part)
            gs = _gradient(q, y.detach(), of_columns(bias, *part), of_part, *of_sums, in_place)
            gq = gq.addmm_(gs, y.detach()) if in_place else gq + gs @ y.detach()
            gbias.append(gs.sum(0) if bias is not None else gs.new_zeros(len(x)))
            if of_k:
                gy = gs.T @ q
                gy = torch.autograd.grad(y, x, gy)[0] if self.rule.normalize else gy
                parts.append(gy if gk is None else gk[first : first + len(x)].copy_(gy))
        of_each = torch.cat(gbias)
        of_bias = of_each if bias is not None and bias.ndim else of_each.sum()
        return gq, torch.cat(parts) if of_k and gk is None else gk, of_bias


def recomputed(q: Tensor, k: Tensor, bias: Tensor | None, work: Any) -> Sums:
    """Return the sums, whose logits are not kept.

    `work` computes the sums `once`, their gradients by `backward`, and for higher orders the sums `again`.
    """
    return Sums.of(work.needed, _Recomputed.apply(q, k, bias, work))  # type: ignore[no-untyped-call]


class _Recomputed(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, bias: Tensor | None, work: Any) -> tuple[Tensor, ...]:
        sums: Sums = work.once(q, k, bias)
        ctx.work = work
        ctx.save_for_backward(q, k, bias, *sums)
        return sums.found()

    @staticmethod
    def backward(ctx: Any, *gys: Tensor) -> tuple[Tensor | None, ...]:
        q, k, bias, *sums = ctx.saved_tensors
        work = ctx.work
        with without_autocast(q):
            if torch.is_grad_enabled():
                return *gradients(lambda *xs: work.again(*xs).found(), (q, k, bias), gys), None
            g = Sums.of(work.needed, gys)
            gq, gk, gbias = work.backward(q, k, bias, Sums(*sums), g, ctx.needs_input_grad[1])
        return gq, gk, None if bias is None else gbias, None


_OF_MARKS = ("Tensor {}_number", "Tensor {}_partner", "Tensor? {}_label", "Tensor? {}_id", "Tensor? {}_weight")
_MARKS = ", ".join(each.format(x) for x in ("row", "col") for each in _OF_MARKS)
_FLAGS = "bool sigmoid, bool columns, bool within, int chunk"
_INPUTS = f"Tensor q, Tensor k, Tensor? bias, {_MARKS}, {_FLAGS}"
_SUMS = ", ".join(f"Tensor {name}" for name in Sums._fields)
_GRADIENTS = ", ".join(f"Tensor? g_{name}" for name in Sums._fields)
#: Number of the tensors, with those that may be None, before the flags.
_TENSORS = 3 + 2 * len(Marks._fields)
#: Number of the sums.
_N = len(Sums._fields)


def _read(inputs: tuple[Any, ...]) -> Work:
    *flags, chunk = inputs[_TENSORS:]
    of_rows = 3 + len(Marks._fields)
    return Work(LossRule(*flags), Marks(*inputs[3:of_rows]), Marks(*inputs[of_rows:_TENSORS]), chunk)


def _sums(*inputs: Any) -> tuple[Tensor, ...]:
    q, k, bias = inputs[:3]
    with torch.no_grad():
        found = _read(inputs).again(q, k, bias)
    return tuple(q.new_empty(0) if y is None else y for y in found)


def _shapes(*inputs: Any) -> tuple[Tensor, ...]:
    q, k = inputs[:2]
    work = _read(inputs)
    b, m = q.shape[0], k.shape[0]  # len() of a symbolic size is an error
    lengths = b, b, b, m, m, b
    return tuple(q.new_empty(n if needs else 0) for n, needs in zip(lengths, work.needed, strict=True))


def _gradients(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and bias from the inputs, the sums, and the gradients of the sums."""
    inputs, whole, g = arguments[: -2 * _N], Sums(*arguments[-2 * _N : -_N]), Sums(*arguments[-_N:])
    q, k, bias = inputs[:3]
    gq, gk, gbias = _read(inputs).backward(q, k, bias, whole, g)
    assert gk is not None
    return gq, gk, gbias


def _gradient(q: Tensor, k: Tensor, bias: Tensor | None, work: Work, whole: Sums, g: Sums, in_place: bool) -> Tensor:
    """Return the gradient of the logits of some columns; in place: in one matrix and one or two temporary ones."""
    rule, rows, cols, _ = work
    s = q @ k.T if bias is None else q @ k.T + bias
    if not (rule.sigmoid or rows.label is not None or rows.weight is not None):
        positive, zero = Place(rows.partner, cols), q.new_zeros(len(q))
        keep_negatives_(s, positive, rows, cols, same_id(rows, cols), rule)
        assert whole.row_neg is not None
        of_rows = whole.row_neg, zero if g.row_neg is None else g.row_neg
        of_cols = []
        if rule.columns and whole.col_neg is not None and g.col_neg is not None:
            of_cols = [(whole.col_neg, g.col_neg)]
        g_sum = zero if g.row_sum is None else g.row_sum
        return gradient_of_logits(s, of_rows, of_cols, positive, g_sum, in_place, overwritten=in_place)
    is_positive, excluded = masks(rows, cols, rule.within)
    g_sum = q.new_zeros(len(q), 1) if g.row_sum is None else g.row_sum.unsqueeze(1)
    if rule.sigmoid:
        gs = torch.where(is_positive, -torch.sigmoid(-s), torch.sigmoid(s)) * g_sum
        return gs if excluded is None else gs.masked_fill(excluded, 0)
    gs = torch.where(is_positive, g_sum, 0.0)
    add = Tensor.addcmul_ if in_place else torch.addcmul
    if g.row_soft is not None and rows.weight is not None:
        gs = add(gs, soft_weights(rows, cols, excluded), g.row_soft.unsqueeze(1))
    pos = s.masked_fill(~is_positive, least(s)) if rows.label is not None else s
    neg = s.masked_fill_(is_positive if excluded is None else is_positive | excluded, least(s))
    for masked, row, g_row, col, g_col in (
        (neg, whole.row_neg, g.row_neg, whole.col_neg, g.col_neg),
        (pos, whole.row_pos, g.row_pos, whole.col_pos, g.col_pos),
    ):
        if g_row is not None and row is not None and len(row) == len(q):
            gs = add(gs, (masked - row.unsqueeze(1)).exp_(), g_row.unsqueeze(1))
        if g_col is not None and col is not None and len(col) == len(k):
            gs = add(gs, (masked - col).exp_(), g_col)
    return gs


def _shapes_of_gradients(q: Tensor, k: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), q.new_empty(()) if bias is None else torch.empty_like(bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.flags = inputs[_TENSORS:]


def _backward(ctx: Any, *gs: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    inputs, found = saved[:_TENSORS], saved[_TENSORS:]
    gq, gk, gbias = torch.ops.diffcoll.logits_backward(*inputs, *ctx.flags, *found, *gs)
    return gq, gk, None if inputs[2] is None else gbias, *[None] * (_TENSORS - 3 + len(ctx.flags))


_op = torch.library.custom_op(
    "diffcoll::logits", _sums, mutates_args=(), schema=f"({_INPUTS}) -> ({', '.join(['Tensor'] * _N)})"
)
_op.register_fake(_shapes)
_op.register_autograd(_backward, setup_context=_save)
_op_backward = torch.library.custom_op(
    "diffcoll::logits_backward",
    _gradients,
    mutates_args=(),
    schema=f"({_INPUTS}, {_SUMS}, {_GRADIENTS}) -> (Tensor, Tensor, Tensor)",
)
_op_backward.register_fake(_shapes_of_gradients)
