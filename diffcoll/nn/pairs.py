"""What contrastive losses have in common: sums over the logits of this rank's rows and all ranks' columns.

    row_neg_i, row_sum_i, row_pos_i   sums over all B columns of this rank's b rows, see `diffcoll.nn.logits`
    col_neg_j = log Σ_i exp s_ij      over all ranks' rows, for this rank's columns; col_pos_j with labels

A rank computes b × B logits, in chunks if asked for. Its part of the column sums is combined with those of the other
ranks by a reduce-scatter of B numbers, so no second matrix is needed.

note  notes/training/contrastive.md
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcoll.collectives.all_gather import all_gather, gathered_as
from diffcoll.collectives.reduce_scatter import reduce_scatter
from diffcoll.composed.leaves import rows_of_ranks
from diffcoll.core.errors import message
from diffcoll.core.groups import collectives_only, resolve
from diffcoll.core.torch_private.tracing import untraced
from diffcoll.engines.types import Group
from diffcoll.nn.chunks import Work
from diffcoll.nn.convention import returned
from diffcoll.nn.features import Columns, Options, check_targets, columns_of, per_row, scalar, wide
from diffcoll.nn.followers import agreed, needs_gradient, tracked
from diffcoll.nn.inputs import without_autocast
from diffcoll.nn.logits import LossRule, Sums, least, logsumexp, merged
from diffcoll.nn.marks import Marks, counts
from diffcoll.nn.ring import Ring


def loss_of_pairs(
    options: Options,
    rule: LossRule,
    views: Sequence[Tensor],
    columns: Tensor | None = None,
    *,
    negatives: Tensor | None = None,
    labels: Tensor | None = None,
    ids: Tensor | None = None,
    targets: Tensor | None = None,
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
        targets: (b, number of all ranks' columns); no pair is a positive then.
    """
    x = views[0]
    given = {"labels": labels, "ids": ids}
    marks = {key: per_row(options.name, key, y, x).repeat(len(views)) for key, y in given.items() if y is not None}
    with without_autocast(x):
        each = 1 if columns is None or columns.ndim == 2 else columns.shape[1]
        k = columns_of(torch.cat([*views]) if columns is None else columns.flatten(0, -2), options.normalize)
        q = k.here if columns is None else wide(x, options.normalize)
        scale, *biases = (
            scalar(options.name, argument, number, q, positive=argument == "temperature")
            for argument, number in options.numbers.items()
        )
        q = q / scale if "temperature" in options.numbers else q * scale
        rule = rule._replace(within=columns is None, columns=options.symmetric, normalize=k.later)
        # autograd.grad of some features alone runs the backward of all collectives, as on the other ranks.
        own, more = None, None
        if negatives is not None and negatives.ndim == 3:
            own = torch.bmm(wide(negatives, options.normalize), q.unsqueeze(2)).squeeze(2)
            q = torch.cat([q, own.sum().expand(0, q.shape[1])])
        elif negatives is not None:
            more = columns_of(negatives, options.normalize)
            q = torch.cat([q, more.k[:0], k.k[:0]])
        bias = biases[0] if biases else None
        loss = _loss_untraced if options.exchange == "ring" else _loss
        return loss(q, k, more, bias, own, options, rule, len(views), each, marks, targets)


_NOT_COMPILED = (
    "messages of a ring depend on the sizes of all ranks; compile without fullgraph, or use exchange='gather'"
)


@partial(untraced, reason=_NOT_COMPILED)
def _loss_untraced(*arguments: Any) -> Tensor:
    """Compiled ranks send the messages of eager ones."""
    return _loss(*arguments)


def _loss(
    q: Tensor,
    k: Columns,
    more: Columns | None,
    bias: Tensor | None,
    own: Tensor | None,
    options: Options,
    rule: LossRule,
    views: int,
    each: int,
    marks: dict[str, Tensor],
    targets: Tensor | None,
) -> Tensor:
    group, engine = options.group, resolve(options.group, options.name)
    compared = dict(marks)
    if own is not None:
        compared["negatives of each query"] = own.detach()[:, :0]
    if more is not None:
        compared["negatives of all queries"] = more.k.detach()[:0].to(more.sent)
    if each > 1:
        compared["positives of a query"] = k.k.detach()[:0].to(k.sent).view(0, each, q.shape[1])
    if targets is not None:
        compared["targets"] = targets
    sizes, (trained, any_trained) = _agreed_on(q, [k] if more is None else [k, more], bias, compared, options)
    total, offset = sum(sizes), sum(sizes[: engine.rank])
    if not torch.compiler.is_compiling() and total == 0:  # a size from another rank has no value while compiling
        remedy = "one rank at least must have rows"
        raise ValueError(message(options.name, options.rows, "an empty batch on every rank", "a row", remedy))
    if targets is not None:
        check_targets(options.name, targets, each * total)
    q = tracked(q, any_trained)
    everyone = all_gather(marks, 0, group=group, sizes=sizes) if marks else marks
    samples = Marks.of_samples(sizes, views, each, everyone.get("labels"), everyone.get("ids"), q.device)
    lengths = [] if more is None else rows_of_ranks(options.name, [more.k], [more.k], len(more.k), group)[0]
    rows = samples if engine.size == 1 else samples.part(offset, len(q))
    cols = samples if each == 1 else samples.repeated(each)
    if targets is not None:
        rows, cols = rows.of_no_columns().weighted(q.new_zeros(len(q))), cols.weighted(targets.T)
    elif options.label_smoothing:
        others = sum(lengths) + (0 if own is None else own.shape[1])
        shares = _shares(samples, each, others, rule, q.dtype)
        rows, cols = rows.weighted(shares[0][offset : offset + len(q)]), cols.weighted(shares[1])
    whole = rule._replace(whole=options.chunk_size is None and options.exchange == "gather")
    work = Work(whole, rows, cols, options.chunk_size)
    sums = _sums_over(q, k, bias, work, options, [each * size for size in sizes], trained)
    if own is not None:
        soft = None if rows.weight is None else rows.weight.squeeze(1) * own.sum(1)
        sums = merged([sums, Sums(row_neg=logsumexp(own, 1), row_soft=soft)])
    if more is not None:
        index = torch.arange(sum(lengths), device=q.device)
        none, negatives = rows.of_no_columns(), Marks(index, index)
        if rows.weight is not None:
            negatives = negatives.weighted(q.new_zeros(sum(lengths)))
        work = Work(rule._replace(normalize=more.later, columns=False), none, negatives, options.chunk_size)
        sums = merged([sums, _sums_over(q, more, bias, work, options, lengths, trained)])
    assert sums.row_sum is not None
    if rule.sigmoid:
        share = sums.row_sum.sum() / total
    elif targets is not None:
        assert sums.row_neg is not None and sums.row_soft is not None
        share = (targets.sum(1) * sums.row_neg - sums.row_soft).sum() / total
    else:
        share = _share_of_softmax(sums, samples, offset, each, rule, options, sizes)
    return returned(share, options.rank_reduction, group)


def _agreed_on(
    q: Tensor, columns: list[Columns], bias: Tensor | None, compared: dict[str, Tensor], options: Options
) -> tuple[list[int], tuple[bool, bool]]:
    """Return the ranks' numbers of rows, and whether a rank needs the gradient of its columns, and any.

    Raise, on all ranks, if they do not pass the same things.
    """
    loop = options.exchange == "ring" and collectives_only(options.group)
    k, xs = columns[0], [x.k for x in columns]
    # Not is_compiling(): after a graph break the rest of a compiled rank's call is eager.
    facts = ", ".join(f"{key}={value}" for key, value in options.same.items())
    tree = {f"{facts}{', in a transform' if loop else ''}": k.k.detach().to(k.sent), **compared}
    what = "labels, ids, negatives or numbers of positives (given on all ranks, of one dtype)"
    what = f"{what}, targets, options, dtype or size of the features"
    needs = needs_gradient(*xs), needs_gradient(*xs, q, bias)
    return agreed(options.name, tree, what, len(q), needs, options.group)


def _shares(samples: Marks, each: int, others: int, rule: LossRule, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return 1 / the number of columns that each row is compared with, and of rows that each column is, or 0."""
    ones, excluded = torch.ones_like(samples.number, dtype=dtype), samples.excluded()
    n = ones.shape[0]
    of_rows = ones / (each * (n - excluded) + others)
    return of_rows, ones / (n - excluded) if rule.columns else torch.zeros_like(ones).repeat(each)


def _share_of_softmax(
    sums: Sums, samples: Marks, offset: int, each: int, rule: LossRule, options: Options, sizes: list[int]
) -> Tensor:
    """Return this rank's part of the mean over all ranks' rows, and over the columns if the rule has them."""
    total, count, neg, pos = sum(sizes), None, sums.row_neg, sums.row_pos
    assert neg is not None and sums.row_sum is not None
    divisor: Tensor | int = total
    if samples.label is not None:
        of_all = each * counts(samples.label) - int(rule.within)
        count = of_all[offset : offset + neg.shape[0]]
        if options.only_rows_with_positives:
            divisor = (of_all > 0).sum().clamp(min=1)
    if rule.columns:  # (2, b); single values are permuted, their sum is right
        col_neg, col_pos = (sums.col_neg, sums.col_pos) if len(sizes) == 1 else _over_ranks(sums, sizes, options.group)
        assert col_neg is not None
        neg = torch.stack([neg, col_neg])
        pos = None if pos is None or col_pos is None else torch.stack([pos, col_pos])
    terms = (_decoupled if options.decoupled else _cross_entropy)(neg, pos, sums.row_sum, count)
    if sums.row_soft is not None:
        mean = sums.row_sum if count is None else sums.row_sum / count.clamp(min=1)
        terms = terms + options.label_smoothing * (mean - sums.row_soft / (2 if rule.columns else 1))
    return terms.sum() / (2 * divisor if rule.columns else divisor)


def _sums_over(
    q: Tensor, k: Columns, bias: Tensor | None, work: Work, options: Options, sizes: list[int], trained: bool
) -> Sums:
    """Return the sums over all ranks' columns, of which each has `sizes`; `trained`: a rank needs their gradient."""
    x, group, alone = k.k, options.group, len(sizes) == 1
    if trained and not alone:  # autograd.grad of other tensors alone would not send the gradient of the columns
        x = torch.cat([x, q[:0], *([] if bias is None else [bias.expand(0, x.shape[1])])])
    if options.exchange == "ring":
        return Ring(work, sizes, group, k.sent, trained, collectives_only(group)).sums(q, x, bias)
    return work.sums(q, x if alone else gathered_as(k.sent, x, sizes, group), bias)


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
