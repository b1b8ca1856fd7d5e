"""The sums of a block of logits as one op of torch.library, for torch.compile.

A loop over chunks has as many steps as the ranks' sizes require, which have no value while compiling. Within the op it
is eager code.

forward   the sums of `diffcoll.nn.logits`, in chunks; no logits are kept
backward  gs_ij from logits that are computed again; gq = gs k, gk = gsᵀ q, gbias = Σ gs

note  notes/contrastive.md
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffcoll.core.torch_private.transforms import is_batched_by_autograd
from diffcoll.nn.logits import LossRule, Sums, blocks, least, merged, of_columns
from diffcoll.nn.marks import Marks, masks, soft_weights


def sums_of(
    q: Tensor, k: Tensor, bias: Tensor | None, rule: LossRule, rows: Marks, cols: Marks, chunk: int | None
) -> Sums:
    """Return the sums over all these columns."""
    if chunk is None or not torch.compiler.is_compiling():
        return merged(list(blocks(q, k, bias, rule, rows, cols, chunk)))
    k = k.to(q.dtype)
    k = F.normalize(k, dim=-1) if rule.normalize else k
    flags = rule.sigmoid, rule.columns, rule.within, chunk
    found = torch.ops.diffcoll.logits(q, k, bias, *rows, *cols, *flags)
    needed = rule.needs(rows)
    return Sums(*(y if needs else None for y, needs in zip(found, needed, strict=True)))


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


def _read(inputs: tuple[Any, ...]) -> tuple[LossRule, Marks, Marks, int]:
    *flags, chunk = inputs[_TENSORS:]
    of_rows = 3 + len(Marks._fields)
    return LossRule(*flags), Marks(*inputs[3:of_rows]), Marks(*inputs[of_rows:_TENSORS]), chunk


def _sums(*inputs: Any) -> tuple[Tensor, ...]:
    q, k, bias = inputs[:3]
    rule, rows, cols, chunk = _read(inputs)
    with torch.no_grad():
        found = merged(list(blocks(q, k, bias, rule, rows, cols, chunk)))
    return tuple(q.new_empty(0) if y is None else y for y in found)


def _shapes(*inputs: Any) -> tuple[Tensor, ...]:
    q, k = inputs[:2]
    rule, rows, _, _ = _read(inputs)
    b, m = q.shape[0], k.shape[0]  # len() of a symbolic size is an error
    lengths = b, b, b, m, m, b
    needed = rule.needs(rows)
    return tuple(q.new_empty(n if needs else 0) for n, needs in zip(lengths, needed, strict=True))


def _gradients(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and bias from the inputs, the sums, and the gradients of the sums."""
    inputs, whole, g = arguments[: -2 * _N], Sums(*arguments[-2 * _N : -_N]), Sums(*arguments[-_N:])
    rule, rows, cols, chunk = _read(inputs)
    q, k, bias = inputs[:3]
    return gradients_of(q, k, bias, rule, rows, cols, chunk, whole, g)


def gradients_of(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    rule: LossRule,
    rows: Marks,
    cols: Marks,
    chunk: int | None,
    whole: Sums,
    g: Sums,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and bias from the sums and their gradients.

    `whole` contains the sums of rows over all columns, of which k may be a part, and those of these columns. Their
    gradients are not written in place.
    """
    gq, gbias, gk, first = torch.zeros_like(q), [], [], 0
    for x in torch.split(k, chunk or max(len(k), 1)):
        part = first, len(x)
        of_part = rows, cols.part(*part), whole.of_columns(*part), g.of_columns(*part)
        gs = _gradient(q, x, of_columns(bias, *part), rule, *of_part)
        gq, first = gq + gs @ x, first + len(x)
        gbias.append(gs.sum(0))
        gk.append(gs.T @ q)
    of_each = torch.cat(gbias)
    return gq, gk[0] if len(gk) == 1 else torch.cat(gk), of_each if bias is not None and bias.ndim else of_each.sum()


def _gradient(
    q: Tensor, k: Tensor, bias: Tensor | None, rule: LossRule, rows: Marks, cols: Marks, whole: Sums, g: Sums
) -> Tensor:
    """Return the gradient of the logits of some columns."""
    s = q @ k.T if bias is None else q @ k.T + bias
    positive, excluded = masks(rows, cols, rule.within)
    g_sum = q.new_zeros(len(q), 1) if g.row_sum is None else g.row_sum.unsqueeze(1)
    if rule.sigmoid:
        gs = torch.where(positive, -torch.sigmoid(-s), torch.sigmoid(s)) * g_sum
        return gs if excluded is None else gs.masked_fill(excluded, 0)
    gs = torch.where(positive, g_sum, 0.0)
    # In place, unless autograd batches the gradients of sums: that saves one matrix of logits.
    add = torch.addcmul if any(x is not None and is_batched_by_autograd(x) for x in g) else Tensor.addcmul_
    if g.row_soft is not None and rows.weight is not None:
        gs = add(gs, soft_weights(rows, cols, excluded), g.row_soft.unsqueeze(1))
    pos = s.masked_fill(~positive, least(s)) if rows.label is not None else s
    neg = s.masked_fill_(positive if excluded is None else positive | excluded, least(s))
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
