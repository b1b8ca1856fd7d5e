"""InfoNCE, NT-Xent and SupCon: the cross-entropy of each row's positives among the rows of all ranks.

    L = Σ_i (log Σ_j exp s_ij − mean of s_ip over i's positives p) / number of rows     s_ij = x_i · y_j / temperature

    InfoNCE    x: queries; y: all ranks' keys, and the query's own negatives; p: the query's own keys, or its label's
    NT-Xent    x = y: two views of each sample, without j = i; p: the other view
    SupCon     x = y: views, without j = i; p: the other rows of the label

note  notes/training/contrastive.md
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffcoll.core import expect
from diffcoll.core.arguments import Sizes
from diffcoll.core.errors import message
from diffcoll.engines.types import Group
from diffcoll.nn.arguments import check_alike, check_features, check_floats, check_marks, scalar, without_autocast
from diffcoll.nn.contrastive import (
    Logits,
    Marks,
    check_chunk_size,
    check_exclude,
    cross_entropy,
    in_chunks,
    joined,
    least,
    logsumexp,
    masks,
)
from diffcoll.nn.gathered import Batch, widened
from diffcoll.nn.whole import mean_of_rows

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
    >>> g = torch.Generator().manual_seed(0)
    >>> query, key = (torch.randn(8, 16, generator=g).double() for _ in range(2))
    >>> for value in simulate(dc.nn.functional.info_nce_loss, query.split([5, 3]), key.split([5, 3])):
    ...     torch.testing.assert_close(value, dc.nn.functional.info_nce_loss(query, key))

    Args:
        query: this rank's features, (b, D), of float16, bfloat16, float32 or float64; b may differ between ranks, and
            be 0. Half precision is sent as it is; logits are computed in float32.
        positive: (b, D): row i is the positive of query i; all other rows of all ranks are its negatives. Or (b, P, D):
            query i has the P positives positive[i], and the loss is averaged over them; P is the same on all ranks.
        negatives: (b, K, D): negatives[i] are K further negatives of query i, and of no other query, as hard negatives
            are; they are not sent, and K may differ between ranks, and be 0.
        labels: (b,), integers: all keys of a query's label are its positives; the loss is averaged over them (UniCL).
            Of label −1, a query's own keys alone.
        ids: keys of other samples with the query's id are *left out*, as false negatives; (b,), integers.
        exclude: bool, keys that are left out, such as false negatives that a guide model has found (GIST), or padded
            negatives: (b, K), of `negatives`; or (b, B·P), of all ranks' keys in the order of ranks; or with
            `negatives` of both, (b, B·P + K). Positives never are.
        temperature: a number or a tensor with one element; divides the logits.
        normalize: normalize the features first.
        decoupled: leave a query's positives out of its denominator, which has its negatives alone (Yeh et al. 2022); a
            query without negatives contributes 0.
        chunk_size: keep the logits of this many of this rank's queries at a time, and compute them again in backward.
            None: keep all, b × B·P numbers. The b × K logits of queries' own negatives are kept.
        sizes: the ranks' numbers of rows. "auto": they are exchanged. A list, or None where every rank has as many (the
            last batch is dropped): nothing is exchanged.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        The loss of the whole batch, 0-d, the same number on every rank, of float32, or float64 if the features are; NaN
        if no rank has a row. Its gradient is that of the whole batch after a *mean* over ranks (DDP,
        `GradientAverager`).

    Raises:
        TypeError, ValueError: an argument is invalid.
        CollectiveMismatchError: on all ranks, with sizes="auto", if they differ in D.

    Source: notes/training/contrastive.md.
    """
    name = "info_nce_loss"
    check_features(name, query=query)
    each = _check_keys(name, "positive", positive, query, (2, 3), "(b, D) or (b, P, D)")
    own = 0 if negatives is None else _check_keys(name, "negatives", negatives, query, (3,), "(b, K, D)")
    check_chunk_size(name, chunk_size)
    expect.flag(name, "decoupled", decoupled)
    with without_autocast(query):
        batch = Batch(name, query, sizes, group, **_marks(name, query, labels, ids))
        x, (key, keys) = widened(query, normalize), batch.features(positive, normalize)
        scale = _inverse(name, temperature, x.dtype)
        out, out_of_own = _split(name, exclude, query.shape[0], batch.total * each, own)
        rows, cols = Marks(exclude=out, **batch.marks), Marks(**batch.all_marks)
        logits = Logits.of(keys.flatten(0, -2), scale, query, normalize)
        q, pos, more = logits.rows(x), None, None
        if each == 1 and labels is None:
            pos, rows = logits.of_pairs(q, key.view(x.shape)), rows._replace(own=batch.mine.unsqueeze(1))
        else:
            rows, cols = _labelled(rows, cols, batch, each)
        if negatives is not None and own:
            more = torch.bmm(widened(negatives, normalize), (x * scale).unsqueeze(2)).squeeze(2)
            more = more if out_of_own is None else more.masked_fill(out_of_own, least(more))
        terms = _terms(q, logits, rows, cols, chunk_size, pos, more, decoupled)
        return mean_of_rows(terms, batch.total, group)


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
    >>> g = torch.Generator().manual_seed(0)
    >>> out0, out1 = (torch.randn(8, 16, generator=g).double() for _ in range(2))
    >>> for value in simulate(dc.nn.functional.nt_xent_loss, out0.split([5, 3]), out1.split([5, 3])):
    ...     torch.testing.assert_close(value, dc.nn.functional.nt_xent_loss(out0, out1))

    Args:
        out0: features of the first view of this rank's samples, (b, D), of float16, bfloat16, float32 or float64; b may
            differ between ranks, and be 0. Half precision is sent as it is; logits are computed in float32.
        out1: features of the second view of the same samples.
        ids: views of other samples with an equal id are *left out*, as false negatives; (b,), integers.
        exclude: (b, B), bool: further pairs of this rank's and all ranks' samples, whose views are left out.
        temperature: a number or a tensor with one element; divides the logits.
        normalize: normalize the features first.
        decoupled: leave a view's positive out of its denominator, which has its negatives alone (Yeh et al. 2022); a
            view without negatives contributes 0.
        chunk_size: keep the logits of this many of this rank's views at a time, and compute them again in backward.
            None: keep all, 2b × 2B numbers.
        sizes: the ranks' numbers of samples; see `info_nce_loss`.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        As `info_nce_loss`.

    Raises:
        TypeError, ValueError, CollectiveMismatchError: as `info_nce_loss`.

    Source: notes/training/contrastive.md.
    """
    name = "nt_xent_loss"
    check_features(name, out0=out0, out1=out1)
    check_chunk_size(name, chunk_size)
    expect.flag(name, "decoupled", decoupled)
    with without_autocast(out0):
        batch = Batch(name, out0, sizes, group, **_marks(name, out0, None, ids))
        own, every = batch.features(torch.stack([out0, out1], 1), normalize)
        x, scale = own.flatten(0, 1), _inverse(name, temperature, own.dtype)
        rows, cols = _views(name, batch, 2, exclude)
        pairs = torch.stack([2 * batch.mine, 2 * batch.mine + 1], 1).repeat_interleave(2, 0)
        logits = Logits.of(every.flatten(0, 1), scale, out0, normalize)
        q = logits.rows(x)
        pos = logits.of_pairs(q, own.flip(1).flatten(0, 1))
        terms = _terms(q, logits, rows._replace(own=pairs), cols, chunk_size, pos, None, decoupled)
        return mean_of_rows(terms, 2 * batch.total, group)


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
    >>> g = torch.Generator().manual_seed(0)
    >>> features = torch.randn(8, 2, 16, generator=g).double()  # two views
    >>> labels = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0])
    >>> for value in simulate(dc.nn.functional.supcon_loss, features.split([5, 3]), labels.split([5, 3])):
    ...     torch.testing.assert_close(value, dc.nn.functional.supcon_loss(features, labels))

    Args:
        features: this rank's features, (b, D), or (b, views, D) as in the authors' code, of float16, bfloat16, float32
            or float64; b may differ between ranks, and be 0. Half precision is sent as it is; logits are computed in
            float32.
        labels: (b,), integers: the class of each sample. All views of all samples of a class are positives. Samples of
            class −1 are negatives of the others, and have no positives.
        ids: rows of an equal id and another label are *left out*; (b,), integers. Those of equal id and label stay
            positives.
        exclude: (b, B), bool: further pairs of this rank's and all ranks' samples, whose views are left out unless
            they are positives.
        temperature: a number or a tensor with one element; divides the logits.
        normalize: normalize the features first.
        chunk_size: keep the logits of this many of this rank's views at a time, and compute them again in backward.
            None: keep all, a row of all ranks' views for each.
        sizes: the ranks' numbers of samples; see `info_nce_loss`.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        As `info_nce_loss`.

    Raises:
        TypeError, ValueError, CollectiveMismatchError: as `info_nce_loss`.

    Source: notes/training/contrastive.md.
    """
    name = "supcon_loss"
    check_features(name, (2, 3), features=features)
    check_chunk_size(name, chunk_size)
    marks = {"label": check_marks(name, "labels", labels, features), **_marks(name, features, None, ids)}
    with without_autocast(features):
        stacked = features if features.ndim == 3 else features.unsqueeze(1)
        views = stacked.shape[1]
        batch = Batch(name, stacked, sizes, group, **marks)
        own, every = batch.features(stacked, normalize)
        x, scale = own.flatten(0, 1), _inverse(name, temperature, own.dtype)
        rows, cols = _views(name, batch, views, exclude)
        number = ((views * batch.mine).unsqueeze(1) + torch.arange(views, device=x.device)).view(-1)
        every_number = torch.arange(batch.total * views, device=x.device)
        assert rows.label is not None and cols.label is not None
        rows = rows._replace(own=number.unsqueeze(1), label=_apart(rows.label, number))
        cols = cols._replace(label=_apart(cols.label, every_number))
        logits = Logits.of(every.flatten(0, 1), scale, features, normalize)
        terms = _terms(logits.rows(x), logits, rows, cols, chunk_size, None, None, False)
        return mean_of_rows(terms, views * batch.total, group)


# ── the terms of this rank's rows ────────────────────────────────────────────────────────────────────────


def _terms(
    q: Tensor,
    logits: Logits,
    rows: Marks,
    cols: Marks,
    chunk_size: int | None,
    pos: Tensor | None,
    more: Tensor | None,
    decoupled: bool,
) -> Tensor:
    """Return −log softmax of each row, averaged over its positives; 0 for a row without one.

    Args:
        q: `logits.rows` of the features.
        logits: makes those of rows and columns.
        rows: marks of the rows; `own` are the columns that are no negatives, or, with labels, the row itself.
        cols: marks of the columns.
        chunk_size: number of rows at a time.
        pos: the logit of each row's only positive; None: labels say which are positives.
        more: logits of each row's own negatives.
        decoupled: without the positives in the denominator.
    """

    def one(q: Tensor, rows: Marks) -> tuple[Tensor]:
        return (logsumexp(logits.of_negatives(q, rows, cols), 1),)

    def several(q: Tensor, rows: Marks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        s = logits(q)
        itself = None if rows.own is None else rows.own == torch.arange(s.shape[1], device=s.device)
        positive, out = masks(rows, cols, itself)
        neg = logsumexp(s.masked_fill(positive if out is None else positive | out, least(s)), 1)
        among = logsumexp(s.masked_fill(~positive, least(s)), 1)
        return neg, among, s.masked_fill(~positive, 0).sum(1), positive.sum(1)

    neg, *of_positives = map(joined, zip(*in_chunks(several if pos is None else one, chunk_size, q, rows), strict=True))
    if more is not None:
        neg = logsumexp(torch.stack([neg, logsumexp(more, 1)]), 0)
    if pos is not None:
        return _decoupled(neg, pos) if decoupled else cross_entropy(neg, pos)
    among, total, count = of_positives
    mean = total / count.clamp(min=1)
    if decoupled:
        terms = _decoupled(neg, mean)
    else:  # of one positive the first term is 0, and so are its gradients
        terms = torch.where(count > 1, among - mean, 0.0) + cross_entropy(neg, among + 0 * among)
    return torch.where(count > 0, terms, 0.0)


def _decoupled(neg: Tensor, pos: Tensor) -> Tensor:
    """Return log Σ exp of each row's negatives less its positive; 0 for a row without negatives, and not for NaN."""
    return torch.where(~(neg <= least(neg) / 2), neg - pos, 0.0)


def _apart(label: Tensor, number: Tensor) -> Tensor:
    """Return labels, of which −1 becomes one that no other row has."""
    return torch.where(label == -1, _NO_LABEL + number, label)


def _labelled(rows: Marks, cols: Marks, batch: Batch, each: int) -> tuple[Marks, Marks]:
    """Return the marks of queries and of `each` keys for each of all queries; without labels, of the same sample."""
    mine, every = batch.mine, torch.arange(batch.total, device=batch.mine.device)
    label = mine if rows.label is None else _apart(rows.label, mine)
    labels = every if cols.label is None else _apart(cols.label, every)
    of_keys = [None if mark is None else mark.repeat_interleave(each) for mark in (labels, cols.id)]
    return rows._replace(label=label), Marks(None, *of_keys)


def _views(name: str, batch: Batch, views: int, exclude: Tensor | None) -> tuple[Marks, Marks]:
    """Return the marks of this rank's and of all ranks' views; view v of sample i is row views · i + v."""
    exclude = check_exclude(name, exclude, len(batch.mine), batch.total, "(b, B)")
    exclude = None if exclude is None else exclude.repeat_interleave(views, 0).repeat_interleave(views, 1)
    of_rows, of_cols = (
        {key: mark.repeat_interleave(views) for key, mark in marks.items()} for marks in (batch.marks, batch.all_marks)
    )
    return Marks(exclude=exclude, **of_rows), Marks(**of_cols)


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────


def _marks(name: str, x: Tensor, labels: Tensor | None, ids: Tensor | None) -> dict[str, Tensor]:
    """Return labels and ids, as they are given, as the marks that the ranks gather."""
    given = {"labels": labels, "ids": ids}
    return {key[:-1]: check_marks(name, key, mark, x) for key, mark in given.items() if mark is not None}


def _inverse(name: str, temperature: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    """Return 1 / temperature; raise unless it is above 0. A tensor is not read, which would wait for a device."""
    value = scalar(name, "temperature", temperature, dtype)
    if not isinstance(value, Tensor) and not value > 0:
        raise ValueError(message(name, "temperature", repr(value), "a number above 0", "logits are divided by it"))
    return 1 / value


def _check_keys(name: str, argument: str, x: Tensor, query: Tensor, dims: tuple[int, ...], shape: str) -> int:
    """Return the number of keys of each query; raise unless they fit the queries."""
    check_floats(name, argument, x, shape)
    b, size = query.shape
    if x.ndim not in dims or x.shape[0] != b or x.shape[-1] != size:
        got, expected = f"shape {tuple(x.shape)}", f"{shape} with b = {b}, D = {size} of query"
        raise ValueError(message(name, argument, got, expected))
    check_alike(name, argument, x, "query", query)
    return 1 if x.ndim == 2 else x.shape[1]


def _split(name: str, exclude: Tensor | None, rows: int, columns: int, own: int) -> list[Tensor | None]:
    """Return the parts of `exclude` of all ranks' keys and of a query's own negatives."""
    if exclude is None:
        return [None, None]
    if own and isinstance(exclude, Tensor) and exclude.shape[1:] == (own,):
        return [None, check_exclude(name, exclude, rows, own, "(b, K)")]
    exclude = check_exclude(name, exclude, rows, columns + own, "(b, B·P + K)" if own else "(b, B·P)")
    assert exclude is not None
    return [*exclude.split_with_sizes([columns, own], 1)]
