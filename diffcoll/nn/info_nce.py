"""InfoNCE, NT-Xent and SupCon: the cross-entropy of each row's positives among the rows of all ranks.

    L = Σ_i (log Σ_j exp s_ij − mean of s_ip over i's positives p) / number of rows     s_ij = x_i · y_j / temperature

    InfoNCE    x: queries; y: all ranks' keys, and this rank's negatives; p: the query's own keys, or its label's
    NT-Xent    x = y: two views of each sample, without j = i; p: the other view
    SupCon     x = y: views, without j = i; p: the other rows of the label

note  notes/training/contrastive.md
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from diffcoll.core.arguments import Sizes
from diffcoll.core.blocks import concatenated
from diffcoll.core.errors import message
from diffcoll.engines.types import Group
from diffcoll.nn.arguments import Number, check_exclude, check_rows, scalar, without_autocast
from diffcoll.nn.contrastive import Batch, Logits, Marks, in_chunks, least, logsumexp, softplus, widened

#: Labels below this one are those of rows without a label, each another one.
_NO_LABEL = -(1 << 62)


def info_nce_loss(
    query: Tensor,
    positive: Tensor,
    negatives: Tensor | None = None,
    *,
    labels: Tensor | None = None,
    ids: Tensor | None = None,
    exclude: Tensor | None = None,
    exclude_positives: Tensor | None = None,
    exclude_negatives: Tensor | None = None,
    false_negative_margin: float | None = None,
    temperature: Tensor | float = 0.1,
    normalize: bool = True,
    decoupled: bool = False,
    chunk_size: int | None = None,
    sizes: Sizes = "auto",
    group: Group = None,
) -> Tensor:
    """Retrieval and representation learning: the cross-entropy of each query's own keys among all ranks' keys.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> query, key = torch.randn(2, 8, 16).double()
    >>> ranks = simulate(dc.nn.functional.info_nce_loss, query.split([5, 3]), key.split([5, 3]))
    >>> torch.testing.assert_close(ranks, [dc.nn.functional.info_nce_loss(query, key)] * 2)

    Args:
        query: this rank's features, (b, D), of float16, bfloat16, float32 or float64; b may differ between ranks, and
            be 0. Half precision is sent as it is; logits are computed in float32.
        positive: (b, D): row i is the positive of query i; all other rows of all ranks are its negatives. Or (b, P, D):
            query i has the P positives positive[i], and the loss is averaged over them; P is the same on all ranks.
        negatives: (b, K, D): negatives[i] are K further negatives of query i, and of no other query, as hard negatives
            are. Or (K, D): of each of this rank's queries, as `FeatureQueue.features()` or the gathered hard negatives
            of all ranks. They are not sent, and K may differ between ranks, and be 0.
        labels: (b,), integers: all keys of a query's label are its positives; the loss is averaged over them (UniCL).
            Of label −1, a query's own keys alone.
        ids: keys of other samples with the query's id are *left out*, as false negatives; (b,), integers.
        exclude: (b, B·P), bool: all ranks' keys, in the order of ranks, that are left out, such as false negatives that
            a guide model has found (GIST). Positives never are.
        exclude_positives: (b, P), bool: those of `positive` that are left out of all ranks' sums, such as padding where
            queries have fewer than P; on all ranks or on none. A query without a positive contributes 0 and counts in
            the mean.
        exclude_negatives: (b, K), bool: those of `negatives` that are left out, such as padding.
        false_negative_margin: leave out the negatives, of all kinds, whose product with a query, before the division by
            the temperature, is above that of its own key plus this number, which may be negative: they are probably
            positives. Of several own keys the product is the largest. None: leave out none.
        temperature: a number or a tensor with one element; divides the logits.
        normalize: normalize the features first.
        decoupled: leave a query's positives out of its denominator, which has its negatives alone (Yeh et al. 2022); a
            query without negatives contributes 0.
        chunk_size: keep the logits of this many of this rank's queries at a time, and compute them again in backward.
            None: keep all, b × B·P numbers. The b × K logits of queries' own negatives are kept in any case.
        sizes: the ranks' numbers of queries, as of `clip_loss`.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Result and errors are those of `clip_loss`.

    Source: notes/training/contrastive.md.
    """
    name = "info_nce_loss"
    check_rows(name, "query", query)
    check_rows(name, "positive", positive, query, (2, 3))
    if negatives is not None:
        check_rows(name, "negatives", negatives, query, (2, 3), shared=True)
    scale, each = _inverse(name, temperature, query), 1 if positive.ndim == 2 else positive.shape[1]
    margin = false_negative_margin
    if margin is not None:
        scalar(name, "false_negative_margin", margin, query)
    b, further = len(query), 0 if negatives is None else negatives.shape[-2]
    padding = check_exclude(name, "exclude_positives", exclude_positives, b, each)
    out = check_exclude(name, "exclude_negatives", exclude_negatives, b, further)
    options = normalize, sizes, group, chunk_size, exclude
    batch = Batch(name, positive, *options, of_each=each, out=padding, labels=labels, ids=ids)
    x, (key, keys) = widened(query, batch.normalize), batch.features(positive)
    rows, cols = Marks(exclude=batch.exclude, **batch.marks), _of_each(each, batch.all_marks)
    if labels is None:
        rows = rows._replace(own=(each * batch.mine).unsqueeze(1) + torch.arange(each, device=x.device))
    else:
        number = torch.arange(batch.total, device=x.device).repeat_interleave(each)
        rows = rows._replace(labels=_apart(rows.labels, batch.mine))
        cols = cols._replace(labels=_apart(cols.labels, number))
    logits = Logits(batch, x, rows, keys.flatten(0, -2), cols, scale)
    pos, more, shared, limit = None, None, None, None
    if labels is None or margin is not None:
        pos = logits.of_pairs(key.view(len(x), each, x.shape[1]))
    if pos is not None and margin is not None:
        own = pos.detach() if padding is None else pos.detach().masked_fill(padding, -torch.inf)
        limit = own.amax(1, keepdim=True) + margin * scale
        limit = limit.masked_fill(limit == -torch.inf, torch.inf)
        logits.rows = rows._replace(limit=limit)
    if negatives is not None and further:
        columns = widened(negatives, batch.normalize)
        if negatives.ndim == 2:
            shared = Logits(batch, x, Marks(exclude=out, limit=limit), columns, Marks(), scale)
        else:
            with without_autocast(x):
                q = logits.normalized(x) * scale
                more = torch.bmm(logits.normalized(columns), q.unsqueeze(2)).squeeze(2)
            more = more if out is None else more.masked_fill(out, least(more))
            more = more if limit is None else more.masked_fill(more > limit, least(more))
    return batch.mean(_terms(logits, pos if labels is None else None, decoupled, more, shared))


def nt_xent_loss(
    out0: Tensor,
    out1: Tensor,
    *,
    ids: Tensor | None = None,
    exclude: Tensor | None = None,
    temperature: Tensor | float = 0.5,
    normalize: bool = True,
    decoupled: bool = False,
    chunk_size: int | None = None,
    sizes: Sizes = "auto",
    group: Group = None,
) -> Tensor:
    """SimCLR: the cross-entropy of each view's other view among the 2B − 1 other views of all ranks.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> out0, out1 = torch.randn(2, 8, 16).double()
    >>> ranks = simulate(dc.nn.functional.nt_xent_loss, out0.split([5, 3]), out1.split([5, 3]))
    >>> torch.testing.assert_close(ranks, [dc.nn.functional.nt_xent_loss(out0, out1)] * 2)

    `out0` and `out1` are features of two views of this rank's samples, (b, D), row i of both of the same sample. Views
    of other samples are left out where `ids`, (b,), are equal, or where `exclude`, (b, B), bool, is True for this
    rank's and all ranks' samples. `decoupled` leaves a view's positive out of its denominator. The other arguments,
    result and errors are those of `info_nce_loss`; `chunk_size` counts views.

    Source: notes/training/contrastive.md.
    """
    name = "nt_xent_loss"
    check_rows(name, "out0", out0)
    check_rows(name, "out1", out1, out0)
    scale = _inverse(name, temperature, out0)
    views = concatenated([out0.unsqueeze(1), out1.unsqueeze(1)], 1)
    batch = Batch(name, views, normalize, sizes, group, chunk_size, exclude, ids=ids)
    return _of_views(batch, views, scale, decoupled)


def supcon_loss(
    features: Tensor,
    labels: Tensor,
    *,
    ids: Tensor | None = None,
    exclude: Tensor | None = None,
    temperature: Tensor | float = 0.1,
    normalize: bool = True,
    chunk_size: int | None = None,
    sizes: Sizes = "auto",
    group: Group = None,
) -> Tensor:
    """Supervised contrastive training: Khosla et al.'s L_out, with the rows of all ranks as contrast.

    A row without a positive contributes 0 and counts in the mean, as in the authors' code.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> features, labels = torch.randn(8, 2, 16).double(), torch.tensor([0, 1, 2, 0, 1, 2, 3, 0])  # two views
    >>> ranks = simulate(dc.nn.functional.supcon_loss, features.split([5, 3]), labels.split([5, 3]))
    >>> torch.testing.assert_close(ranks, [dc.nn.functional.supcon_loss(features, labels)] * 2)

    `features` are (b, D), or (b, views, D) as in the authors' code. All views of all samples of a class are positives;
    samples of class −1 are negatives of the others, and have no positives. Other views are left out where `ids`, (b,),
    are equal, or where `exclude`, (b, B), bool, is True for this rank's and all ranks' samples. The other arguments,
    result and errors are those of `info_nce_loss`; `chunk_size` counts views.

    Source: notes/training/contrastive.md.
    """
    name = "supcon_loss"
    check_rows(name, "features", features, dims=(2, 3))
    if labels is None:
        raise TypeError(message(name, "labels", labels, "a tensor of integers"))
    scale = _inverse(name, temperature, features)
    batch = Batch(name, features, normalize, sizes, group, chunk_size, exclude, labels=labels, ids=ids)
    return _of_views(batch, features if features.ndim == 3 else features.unsqueeze(1), scale)


def _of_views(batch: Batch, views: Tensor, scale: Number, decoupled: bool = False) -> Tensor:
    """Return the loss of (b, views, D); view v of sample i is row views · i + v. Without labels there are two views."""
    each, (own, every) = views.shape[1], batch.features(views)
    rows, cols = _of_each(each, batch.marks), _of_each(each, batch.all_marks)
    if batch.exclude is not None:
        rows = rows._replace(exclude=batch.exclude.repeat_interleave(each, 0).repeat_interleave(each, 1))
    numbers = (each * batch.mine).unsqueeze(1) + torch.arange(each, device=own.device)
    if rows.labels is None:
        rows = rows._replace(own=numbers.repeat_interleave(each, 0))
    else:
        of_all = torch.arange(batch.total * each, device=own.device)
        rows = rows._replace(own=numbers.view(-1, 1), labels=_apart(rows.labels, numbers.flatten()))
        cols = cols._replace(labels=_apart(cols.labels, of_all))
    logits = Logits(batch, own.flatten(0, 1), rows, every.flatten(0, 1), cols, scale)
    pos = logits.of_pairs(own.flip(1).flatten(0, 1).unsqueeze(1)) if rows.labels is None else None
    return batch.mean(_terms(logits, pos, decoupled), each)


# ── the terms of this rank's rows ────────────────────────────────────────────────────────────────────────


def _terms(
    logits: Logits, pos: Tensor | None, decoupled: bool, more: Tensor | None = None, shared: Logits | None = None
) -> Tensor:
    """Return −log softmax of each row, averaged over its positives; 0 for a row without one.

    `pos` are the logits of each row's positives, (b, k), and `rows.own` the columns that are no negatives; without it
    labels say which are positives, and `rows.own` is the row itself. `more` are logits of each row's own negatives,
    `shared` those of columns that are negatives of all rows.
    """
    sum_exp = partial(logsumexp, dim=1, in_place=logits.in_place)
    fields = len(Marks._fields)

    def joined(neg: Tensor, further: Tensor) -> Tensor:
        return torch.stack([neg, sum_exp(further)]).logsumexp(0)

    def block(q: Tensor, *marks: Tensor | None) -> tuple[Tensor, ...]:
        rows = Marks(*marks[:fields])
        neg, *sums = several(q, rows) if pos is None else (sum_exp(logits.of_negatives(q, rows)),)
        if shared is not None:
            neg = joined(neg, shared.of_negatives(q, Marks(*marks[fields:])))
        return neg, *sums

    def several(q: Tensor, rows: Marks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        s = logits(q)
        assert rows.labels is not None and logits.marks.labels is not None
        positive, out = rows.labels.unsqueeze(1) == logits.marks.labels, logits.left_out(s, rows)
        neg = sum_exp(s.masked_fill(positive if out is None else positive | out, least(s)))
        if rows.own is not None:  # a row has its own label, and is none of its positives
            positive = positive & (rows.own != torch.arange(s.shape[1], device=s.device))
        return neg, *of_positives(s, positive, logits.marks.out)

    def of_positives(s: Tensor, positive: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        positive = positive if out is None else positive & ~out
        return sum_exp(s.masked_fill(~positive, least(s))), s.masked_fill(~positive, 0).sum(1), positive.sum(1)

    of_rows = logits.rows if shared is None else logits.rows + shared.rows
    neg, *sums = in_chunks(block, logits.chunk_size, logits.q, *of_rows)
    if more is not None:
        neg = joined(neg, more)
    if pos is not None:
        if pos.shape[1] == 1 and logits.rows.out is None:
            pos = pos.squeeze(1)
            return _decoupled(neg, pos) if decoupled else softplus(neg - pos)
        sums = [*of_positives(pos, torch.ones_like(pos, dtype=torch.bool), logits.rows.out)]
    among, total, count = sums
    mean = total / count.clamp(min=1)
    if decoupled:
        terms = _decoupled(neg, mean)
    else:  # of one positive the first term is 0, and so are its gradients
        terms = torch.where(count > 1, among - mean, 0.0) + softplus(neg - (among + 0 * among))
    return torch.where(count > 0, terms, 0.0)


def _decoupled(neg: Tensor, pos: Tensor) -> Tensor:
    """Return log Σ exp of each row's negatives less its positive; 0 for a row without negatives, and not for NaN."""
    return torch.where(~(neg <= least(neg) / 2), neg - pos, 0.0)


def _apart(labels: Tensor | None, number: Tensor) -> Tensor:
    """Return labels, of which −1 becomes one that no other row has; without labels, each row has another one."""
    return number if labels is None else torch.where(labels == -1, _NO_LABEL + number, labels)


def _of_each(n: int, marks: dict[str, Tensor]) -> Marks:
    """Return the marks of samples for n rows of each; of (samples, n) they are of rows."""
    return Marks(
        **{key: mark.repeat_interleave(n) if mark.ndim == 1 else mark.flatten() for key, mark in marks.items()}
    )


def _inverse(name: str, temperature: Number, like: Tensor) -> Number:
    """Return 1 / temperature; raise unless it is above 0. A tensor is not read, which would wait for a device."""
    value = scalar(name, "temperature", temperature, like)
    if not isinstance(value, Tensor) and not value > 0:
        raise ValueError(message(name, "temperature", repr(value), "a number above 0", "logits are divided by it"))
    return 1 / value
