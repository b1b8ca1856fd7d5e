"""What contrastive losses have in common: sums over the logits of this rank's rows and all ranks' columns.

    row_neg_i, row_sum_i, row_pos_i   sums over all B columns of this rank's b rows, see `diffcoll.nn.logits`
    col_neg_j = log Σ_i exp s_ij      over all ranks' rows, for this rank's columns; col_pos_j with labels

A rank computes b × B logits, in chunks if asked for. Its part of the column sums is combined with those of the other
ranks by a reduce-scatter of B numbers, so no second matrix is needed.

note  notes/contrastive.md
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcoll.collectives.all_gather import all_gather, gathered_as
from diffcoll.collectives.reduce_scatter import reduce_scatter
from diffcoll.composed.leaves import batch_leaves, lengths_and_bits
from diffcoll.core.errors import CollectiveMismatchError, message
from diffcoll.core.groups import collectives_only, get_rank
from diffcoll.core.joint import is_joint
from diffcoll.core.torch_private.tracing import assert_in_graph, assume, untraced
from diffcoll.core.torch_private.transforms import is_vmapped, is_within_transform
from diffcoll.nn.chunks import sums_of
from diffcoll.nn.features import Columns, Options
from diffcoll.nn.followers import ABSENT, DIFFER, leaf, refuse_absent_of
from diffcoll.nn.logits import LossRule, Marks
from diffcoll.nn.ring import Ring

#: A parameter without elements.
_LEAF = torch.zeros(0, 1, device="cpu", requires_grad=True)


class Compared(NamedTuple):
    """The sums of this rank's rows over all columns, and of this rank's columns over all rows."""

    row_neg: Tensor | None
    row_sum: Tensor
    row_pos: Tensor | None
    col_neg: Tensor | None
    col_pos: Tensor | None
    #: Number of positives of each row; None: there are no labels, and each row has one.
    row_count: Tensor | None
    #: Number of all ranks' rows.
    total: int

    def of_rows(self) -> Tensor:
        """Return −log softmax over each row, averaged over its positives; 0 for a row without positives."""
        return self._cross_entropy(self.row_neg, self.row_pos)

    def of_columns(self) -> Tensor:
        """Return the same over each column; single values are permuted, their sum is right."""
        return self._cross_entropy(self.col_neg, self.col_pos)

    def _cross_entropy(self, neg: Tensor | None, pos: Tensor | None) -> Tensor:
        assert neg is not None
        if pos is None or self.row_count is None:
            return -F.logsigmoid(self.row_sum - neg)
        several = self.row_count > 1
        among = torch.where(several, pos - self.row_sum / self.row_count.clamp(min=1), 0.0)
        pos = torch.where(several, pos, self.row_sum)  # not `among` of one positive, whose gradients would cancel
        return torch.where(self.row_count > 0, among - F.logsigmoid(pos - neg), 0.0)


def compare(
    q: Tensor,
    k: Columns,
    options: Options,
    rule: LossRule,
    *,
    bias: Tensor | None = None,
    views: int = 1,
    labels: Tensor | None = None,
    ids: Tensor | None = None,
) -> Compared:
    """Return the sums of this rank's rows q over all ranks' k, and of its k over all ranks' q.

    Args:
        q: (n, D), in the dtype of the logits, with the scale.
        k: n columns.
        options: of the loss.
        rule: what is summed.
        bias: of the logits, for the sigmoid.
        views: the rows are this many views of the samples, one view after the other.
        labels: (n,); pairs of equal labels are positives. None: pairs of the same sample are.
        ids: (n,); pairs of equal ids that are not positives are excluded.
    """
    how = _compare_untraced if options.exchange == "ring" else _compare
    return how(q, k, options, rule, bias, views, labels, ids)


_NOT_COMPILED = (
    "messages of a ring depend on the sizes of all ranks; compile without fullgraph, or use exchange='gather'"
)


@partial(untraced, reason=_NOT_COMPILED)
def _compare_untraced(*arguments: Any) -> Compared:
    """Compiled ranks send the messages of eager ones."""
    return _compare(*arguments)


def _compare(
    q: Tensor,
    k: Columns,
    options: Options,
    rule: LossRule,
    bias: Tensor | None,
    views: int,
    labels: Tensor | None,
    ids: Tensor | None,
) -> Compared:
    marks = {name: x for name, x in (("labels", labels), ("ids", ids)) if x is not None}
    sizes, wants = _agree(q, k, bias, marks, options)
    rank, total = get_rank(options.group), sum(sizes)
    offset = sum(sizes[:rank])
    if not torch.compiler.is_compiling() and total == 0:  # a size from another rank has no value while compiling
        remedy = "one rank at least must have rows"
        raise ValueError(message(options.name, "features", "an empty batch on every rank", "a row", remedy))
    q, x = _tracked(q, wants.any), k.k
    if not torch.compiler.is_compiling() and wants.any and x.is_inference():
        x = x.clone()  # autograd does not save tensors that were made in inference mode
    if wants.k:  # makes their gradient a part of any other: autograd.grad of other tensors alone would not send it
        x = torch.cat([x, q[:0], *([] if bias is None else [bias.expand(0, x.shape[1])])])
    everyone = all_gather(marks, 0, group=options.group, sizes=sizes) if marks else marks
    cols = _marks(sizes, views, everyone.get("labels"), everyone.get("ids"), q.device)
    rows = cols.part(offset, len(q))
    if options.exchange == "ring":
        ring = Ring(rule, rows, cols, sizes, options.chunk_size, options.group, k.sent, wants.k, wants.loop)
        sums = ring.sums(q, x, bias)
    else:
        x = gathered_as(k.sent, x, sizes, options.group)
        sums = sums_of(q, x, bias, rule, rows, cols, options.chunk_size)
    col_neg, col_pos = sums.col_neg, sums.col_pos
    if col_neg is not None:
        both = col_neg.unsqueeze(1) if col_pos is None else torch.stack([col_neg, col_pos], 1)
        both = reduce_scatter(both, "logsumexp", 0, group=options.group, sizes=sizes)
        col_neg, col_pos = both[:, 0], None if col_pos is None else both[:, 1]
    count = None if cols.label is None else _counts(cols.label)[offset : offset + len(q)] - int(rule.within)
    assert sums.row_sum is not None
    return Compared(sums.row_neg, sums.row_sum, sums.row_pos, col_neg, col_pos, count, total)


class _Wants(NamedTuple):
    """What the ranks have agreed on for backward, in which they send the same messages."""

    #: Whether a rank needs the gradient of its columns.
    k: bool
    #: Whether a rank needs any gradient.
    any: bool
    #: Whether a ring is differentiated as a loop of shifts.
    loop: bool


def _agree(
    q: Tensor, k: Columns, bias: Tensor | None, marks: dict[str, Tensor], options: Options
) -> tuple[list[int], _Wants]:
    """Return the ranks' numbers of rows, after a check that they pass the same things, and what backward has to do."""
    loop = options.exchange == "ring" and collectives_only(options.group)
    tree = {f"{options.exchange}{' in a transform' if loop else ''}": k.k.detach().to(k.sent), **marks}
    leaves, _ = batch_leaves(options.name, tree)
    grad = torch.is_grad_enabled()
    needs_k = grad and k.k.requires_grad
    needs = needs_k or (grad and (q.requires_grad or (bias is not None and bias.requires_grad)))
    compiling, absent = torch.compiler.is_compiling(), not grad and not is_joint()
    mine = 3 if compiling and grad else needs_k + 2 * needs + 4 * absent  # a graph always computes all gradients
    try:
        lengths, bits = lengths_and_bits(options.name, tree, leaves, [len(q)], options.group, mine)
    except CollectiveMismatchError as error:
        facts = "labels or ids (given on all ranks, of one dtype), exchange, or dtype or size of the features"
        raise CollectiveMismatchError(f"{options.name}: the ranks differ in {facts}; {error}") from None
    sizes = [length for (length,) in lengths]
    if compiling:
        for size in sizes:
            assume(size >= 0)
        assume(sizes[get_rank(options.group)] == len(q))
        for b in bits:
            if is_within_transform():  # no assertion with a text can be traced there
                assume(b < 4 if grad else b % 4 == 0)
            else:
                of_rank = torch.full((), b)
                assert_in_graph(of_rank < 4 if grad else of_rank % 4 == 0, f"{options.name}: {DIFFER}")
        return sizes, _Wants(grad, grad, loop)
    numbers = [float(ABSENT if b & 4 else b & 2) for b in bits]
    refuse_absent_of(options.name, numbers, options.group)
    return sizes, _Wants(any(b & 1 for b in bits), any(b & 2 for b in bits), loop)


def _tracked(x: Tensor, wanted: bool) -> Tensor:
    """Return x such that backward computes its gradient on this rank too, if a rank wants one."""
    if not wanted or x.requires_grad or not torch.is_grad_enabled() or is_within_transform():
        return x
    if torch.compiler.is_compiling():  # refuses requires_grad_
        return torch.cat([x, _LEAF.to(x).expand(0, x.shape[1])])
    return leaf(x)


def _marks(sizes: list[int], views: int, labels: Tensor | None, ids: Tensor | None, device: torch.device) -> Marks:
    """Return the marks of all ranks' rows."""
    index = torch.arange(sum(sizes), device=device)
    if views == 1:
        return Marks(index, index, labels, ids)
    partners = []
    for r, size in enumerate(sizes):
        first, half = sum(sizes[:r]), size // views
        part = index[first : first + size]
        partners.append(torch.where(part < first + half, part + (size - half), part - half))
    return Marks(index, torch.cat(partners), labels, ids)


def _counts(labels: Tensor) -> Tensor:
    """Return the number of rows with the label of each row."""
    if not torch.compiler.is_compiling() and is_vmapped(labels):  # vmap refuses unique
        return (labels.unsqueeze(1) == labels).sum(1)
    inverse, counts = torch.unique(labels, return_inverse=True, return_counts=True)[1:]
    found: Tensor = counts[inverse]
    return found
