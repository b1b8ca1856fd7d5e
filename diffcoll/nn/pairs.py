"""What contrastive losses have in common: sums over the logits of this rank's rows and all ranks' columns.

    row_neg_i, row_sum_i, row_pos_i   sums over all B columns of this rank's b rows, see `diffcoll.nn.logits`
    col_neg_j = log Σ_i exp s_ij      over all ranks' rows, for this rank's columns; col_pos_j with labels

A rank computes b × B logits, in chunks if asked for. Its part of the column sums is combined with those of the other
ranks by a reduce-scatter of B numbers, so no second matrix is needed.

note  notes/contrastive.md
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcoll.collectives.all_gather import all_gather, gathered_as
from diffcoll.collectives.reduce_scatter import reduce_scatter
from diffcoll.composed.leaves import batch_leaves, lengths_and_bits, lengths_of_ranks
from diffcoll.core.errors import CollectiveMismatchError, message
from diffcoll.core.groups import collectives_only, resolve
from diffcoll.core.joint import is_joint
from diffcoll.core.torch_private.tracing import assert_in_graph, assume, untraced
from diffcoll.core.torch_private.transforms import is_vmapped, is_within_transform
from diffcoll.engines.engine import Engine
from diffcoll.engines.types import Group
from diffcoll.nn.chunks import sums_of
from diffcoll.nn.features import Columns, Options, columns_of, per_row, scalar, wide
from diffcoll.nn.followers import ABSENT, DIFFER, leaf, needs_gradient, refuse_absent_of
from diffcoll.nn.inputs import without_autocast
from diffcoll.nn.logits import LossRule, Marks, Sums, least, logsumexp, merged
from diffcoll.nn.ring import Ring

#: A parameter without elements.
_LEAF = torch.zeros(0, 1, device="cpu", requires_grad=True)


def loss_of_pairs(
    options: Options,
    rule: LossRule,
    views: Sequence[Tensor],
    columns: Tensor | None = None,
    *,
    negatives: Tensor | None = None,
    labels: Tensor | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """Return a contrastive loss as one rank returns it.

    Args:
        options: of the loss.
        rule: what is summed.
        views: features of this rank's samples, (b, D) each, which are the rows, one view after the other.
        columns: (b, D) or (b, P, D), features of the same samples in the columns. None: the rows are the columns too,
            and a pair of a row with itself is excluded.
        negatives: more columns: (b, K, D), each of one row; (m, D), of all ranks' rows.
        labels: (b,); pairs of equal labels are positives. None: pairs of the same sample are.
        ids: (b,); pairs of equal ids that are not positives are excluded.
    """
    x = views[0]
    labels, ids = (
        None if marks is None else per_row(options.name, argument, marks, x).repeat(len(views))
        for argument, marks in (("labels", labels), ("ids", ids))
    )
    with without_autocast(x):
        each = 1 if columns is None or columns.ndim == 2 else columns.shape[1]
        k = columns_of(torch.cat([*views]) if columns is None else columns.flatten(0, -2), options.normalize)
        q = k.here if columns is None else wide(x, options.normalize)
        scale, *biases = (
            scalar(options.name, argument, number, q, positive=argument == "temperature")
            for argument, number in options.numbers.items()
        )
        q = q / scale if "temperature" in options.numbers else q * scale
        rule = rule._replace(within=columns is None, normalize=k.later)
        # autograd.grad of some features alone runs the backward of all collectives, as on the other ranks.
        own, more = None, None
        if negatives is not None and negatives.ndim == 3:
            own = torch.bmm(wide(negatives, options.normalize), q.unsqueeze(2)).squeeze(2)
            q = torch.cat([q, own.sum().expand(0, q.shape[1])])
        elif negatives is not None:
            more = columns_of(negatives, options.normalize)
            q = torch.cat([q, more.k[:0], k.k[:0]])
        bias = biases[0] if biases else None
        returned = _returned_untraced if options.exchange == "ring" else _returned
        return returned(q, k, more, bias, own, options, rule, len(views), each, labels, ids)


_NOT_COMPILED = (
    "messages of a ring depend on the sizes of all ranks; compile without fullgraph, or use exchange='gather'"
)


@partial(untraced, reason=_NOT_COMPILED)
def _returned_untraced(*arguments: Any) -> Tensor:
    """Compiled ranks send the messages of eager ones."""
    return _returned(*arguments)


def _returned(
    q: Tensor,
    k: Columns,
    more: Columns | None,
    bias: Tensor | None,
    own: Tensor | None,
    options: Options,
    rule: LossRule,
    views: int,
    each: int,
    labels: Tensor | None,
    ids: Tensor | None,
) -> Tensor:
    group, engine = options.group, resolve(options.group, options.name)
    alone = engine.size == 1
    marks = {name: x for name, x in (("labels", labels), ("ids", ids)) if x is not None}
    compared = dict(marks)
    if own is not None:
        compared["negatives of each query"] = own.detach()[:, :0]
    if more is not None:
        compared["negatives of all queries"] = more.k.detach()[:0].to(more.sent)
    if each > 1:
        compared["positives of a query"] = k.k.detach()[:0].to(k.sent).view(0, each, q.shape[1])
    sizes, wants = _agree(q, [k] if more is None else [k, more], bias, compared, options, engine)
    total, offset = sum(sizes), sum(sizes[: engine.rank])
    if not torch.compiler.is_compiling() and total == 0:  # a size from another rank has no value while compiling
        remedy = "one rank at least must have rows"
        raise ValueError(message(options.name, options.rows, "an empty batch on every rank", "a row", remedy))
    q = tracked(q, wants.any)
    everyone = all_gather(marks, 0, group=group, sizes=sizes) if marks else marks
    samples = _marks(sizes, views, each, everyone.get("labels"), everyone.get("ids"), q.device)
    rows = samples if alone else samples.part(offset, len(q))
    cols = samples if each == 1 else samples.repeated(each)
    whole = rule._replace(whole=options.chunk_size is None and options.exchange == "gather")
    sums = _sums_over(q, k, bias, options, whole, rows, cols, [each * size for size in sizes], wants, alone)
    if own is not None:
        sums = merged([sums, Sums(row_neg=logsumexp(own, 1))])
    if more is not None:
        counts = [len(more.k)] if alone else _lengths_of_negatives(more, options, engine)
        none, negatives = rows.of_no_columns(), Marks.of_negatives(sum(counts), q.device)
        of_all = rule._replace(normalize=more.later)
        sums = merged([sums, _sums_over(q, more, bias, options, of_all, none, negatives, counts, wants, alone)])
    assert sums.row_sum is not None
    if rule.sigmoid:
        share = sums.row_sum.sum() / total
    else:
        count = None
        if samples.label is not None:
            count = each * _counts(samples.label)[offset : offset + len(q)] - int(rule.within)
        neg, pos = sums.row_neg, sums.row_pos
        assert neg is not None
        if rule.columns:  # (2, b); single values are permuted, their sum is right
            col_neg, col_pos = (sums.col_neg, sums.col_pos) if alone else _over_ranks(sums, sizes, group)
            assert col_neg is not None
            neg = torch.stack([neg, col_neg])
            pos = None if pos is None or col_pos is None else torch.stack([pos, col_pos])
        terms = (_decoupled if options.decoupled else _cross_entropy)(neg, pos, sums.row_sum, count)
        share = terms.sum() / (2 * total if rule.columns else total)
    return share * engine.size if options.rank_reduction == "mean" and not alone else share


def _sums_over(
    q: Tensor,
    k: Columns,
    bias: Tensor | None,
    options: Options,
    rule: LossRule,
    rows: Marks,
    cols: Marks,
    sizes: list[int],
    wants: _Wants,
    alone: bool,
) -> Sums:
    """Return the sums over the columns of all ranks, of which each has `sizes`."""
    x, group = k.k, options.group
    if wants.k and not alone:  # autograd.grad of other tensors alone would not send the gradient of the columns
        x = torch.cat([x, q[:0], *([] if bias is None else [bias.expand(0, x.shape[1])])])
    if options.exchange == "ring":
        return Ring(rule, rows, cols, sizes, options.chunk_size, group, k.sent, wants.k, wants.loop).sums(q, x, bias)
    x = x if alone else gathered_as(k.sent, x, sizes, group)
    return sums_of(q, x, bias, rule, rows, cols, options.chunk_size)


def _over_ranks(sums: Sums, sizes: list[int], group: Group) -> tuple[Tensor, Tensor | None]:
    """Return the sums of this rank's columns over all ranks' rows."""
    assert sums.col_neg is not None
    both = sums.col_neg.unsqueeze(1) if sums.col_pos is None else torch.stack([sums.col_neg, sums.col_pos], 1)
    both = reduce_scatter(both, "logsumexp", 0, group=group, sizes=sizes)
    return both[:, 0], None if sums.col_pos is None else both[:, 1]


def _cross_entropy(neg: Tensor, pos: Tensor | None, total: Tensor, count: Tensor | None) -> Tensor:
    """Return −log softmax of each row, averaged over its positives; 0 for a row without positives.

    Args:
        neg: log-sum-exp of the negatives, (b,), or (2, b) of the rows and the columns.
        pos: of the positives; None: there are no labels, and each row has one positive.
        total: sum of the positives.
        count: number of the positives.
    """
    if pos is None or count is None:
        return -F.logsigmoid(total - neg)
    several = count > 1
    among = torch.where(several, pos - total / count.clamp(min=1), 0.0)
    pos = torch.where(several, pos, total)  # not `among` of one positive, whose gradients would cancel
    return torch.where(count > 0, among - F.logsigmoid(pos - neg), 0.0)


def _decoupled(neg: Tensor, pos: Tensor | None, total: Tensor, count: Tensor | None) -> Tensor:
    """Return log Σ exp of each row's negatives less the mean of its positives; 0 for a row without one or the other."""
    terms = neg - (total if count is None else total / count.clamp(min=1))
    none = neg <= least(neg) / 2  # and NaN is not
    return torch.where(none if count is None else none | (count == 0), 0.0, terms)


class _Wants(NamedTuple):
    """What the ranks have agreed on for backward, in which they send the same messages."""

    #: Whether a rank needs the gradient of its columns.
    k: bool
    #: Whether a rank needs any gradient.
    any: bool
    #: Whether a ring is differentiated as a loop of shifts.
    loop: bool


def _agree(
    q: Tensor,
    columns: list[Columns],
    bias: Tensor | None,
    compared: dict[str, Tensor],
    options: Options,
    engine: Engine,
) -> tuple[list[int], _Wants]:
    """Return the ranks' numbers of rows, after a check that they pass the same things, and what backward has to do."""
    loop = options.exchange == "ring" and collectives_only(options.group)
    k, xs = columns[0], [x.k for x in columns]
    facts = f"{options.exchange}{' in a transform' if loop else ''}, normalize={bool(options.normalize)}"
    facts = f"{facts}, decoupled={options.decoupled}, rank_reduction={options.rank_reduction}"
    tree = {facts: k.k.detach().to(k.sent), **compared}
    what = "labels, ids, negatives or numbers of positives (given on all ranks, of one dtype)"
    what = f"{what}, exchange, normalize, decoupled, rank_reduction, dtype or size of the features"
    needs = needs_gradient(*xs), needs_gradient(*xs, q, bias)
    sizes, (needs_k, needs_any) = agreed(options.name, tree, what, len(q), needs, engine, options.group)
    return sizes, _Wants(needs_k, needs_any, loop)


def agreed(
    name: str,
    tree: dict[str, Tensor],
    what: str,
    rows: int,
    needs: tuple[bool, bool],
    engine: Engine,
    group: Group,
) -> tuple[list[int], tuple[bool, bool]]:
    """Return the ranks' numbers of rows, and whether a rank needs the gradients of a part of the inputs, and any.

    Raise on all ranks if their trees differ in keys, dtypes or dimensions other than 0, in words `what`, or if one rank
    needs a gradient and another one is absent.
    """
    if engine.size == 1:
        return [rows], needs
    leaves, _ = batch_leaves(name, tree)
    grad, compiling = torch.is_grad_enabled(), torch.compiler.is_compiling()
    absent = not grad and not is_joint()
    mine = 3 if compiling and grad else needs[0] + 2 * needs[1] + 4 * absent  # a graph always computes all gradients
    try:
        lengths, bits = lengths_and_bits(name, tree, leaves, [rows], group, mine)
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(f"{name}: the ranks differ in {what}; {error}") from None
    sizes = [length for (length,) in lengths]
    if compiling:
        _assume(sizes, rows, engine)
        for b in bits:
            if is_within_transform():  # no assertion with a text can be traced there
                assume(b < 4 if grad else b % 4 == 0)
            else:
                of_rank = torch.full((), b)
                assert_in_graph(of_rank < 4 if grad else of_rank % 4 == 0, f"{name}: {DIFFER}")
        return sizes, (grad, grad)
    numbers = [float(ABSENT if b & 4 else b & 2) for b in bits]
    refuse_absent_of(name, numbers, group)
    return sizes, (any(b & 1 for b in bits), any(b & 2 for b in bits))


def _lengths_of_negatives(more: Columns, options: Options, engine: Engine) -> list[int]:
    """Return the ranks' numbers of negatives."""
    lengths = [n for (n,) in lengths_of_ranks(options.name, [more.k], [more.k], [len(more.k)], options.group)]
    if torch.compiler.is_compiling():
        _assume(lengths, len(more.k), engine)
    return lengths


def _assume(sizes: list[int], mine: int, engine: Engine) -> None:
    """Tell the compiler what it cannot know of sizes that ranks have sent."""
    for size in sizes:
        assume(size >= 0)
    assume(sizes[engine.rank] == mine)


def tracked(x: Tensor, wanted: bool) -> Tensor:
    """Return x such that backward computes its gradient on this rank too, if a rank wants one."""
    if not wanted or x.requires_grad or not torch.is_grad_enabled() or is_within_transform():
        return x
    if torch.compiler.is_compiling():  # refuses requires_grad_
        return torch.cat([x, _LEAF.to(x).expand(0, x.shape[1])])
    return leaf(x)


def _marks(
    sizes: list[int], views: int, each: int, labels: Tensor | None, ids: Tensor | None, device: torch.device
) -> Marks:
    """Return the marks of all ranks' rows; each of them has a label if it has several positives.

    A label of −1 becomes one that no other row has.
    """
    index = torch.arange(sum(sizes), device=device)
    if labels is not None:
        labels = labels.long()  # −1 as a uint8 is 255
        labels = torch.where(labels == -1, index + torch.iinfo(torch.long).min, labels)
    elif each > 1:
        labels = index
    if views == 1 or labels is not None:
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
