"""CLIP and SigLIP: losses of image–text pairs.

    CLIP      L = Σ_i (log Σ_j exp s_ij − s_ii) / 2B + Σ_j (log Σ_i exp s_ij − s_jj) / 2B     s_ij = scale · x_i · y_j
    SigLIP    L = −Σ_ij log σ(z_ij · s_ij) / B       z_ij = 1 if i = j, else −1        s_ij = scale · x_i · y_j + bias

Only the texts are gathered, and each rank computes one matrix, of its b images and all B texts. For CLIP it has the
log-sum-exp of each column over its own rows; a reduce-scatter of B numbers gives every rank those of its own columns.

note  notes/training/contrastive.md
"""

from __future__ import annotations

from torch import Tensor

from diffcoll.collectives.reduce_scatter import reduce_scatter
from diffcoll.core.arguments import Sizes
from diffcoll.engines.types import Group
from diffcoll.nn.arguments import Number, check_rows, scalar
from diffcoll.nn.contrastive import Batch, Logits, Marks, in_chunks, logsumexp, softplus, widened


def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    ids: Tensor | None = None,
    exclude: Tensor | None = None,
    normalize: bool = False,
    chunk_size: int | None = None,
    sizes: Sizes = "auto",
    group: Group = None,
) -> Tensor:
    """Image–text training: CLIP's loss of all ranks' pairs, as open_clip's on one process with the whole batch.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def loss(image, text):
    ...     return dc.nn.functional.clip_loss(image, text, 100.0, normalize=True)
    >>> image, text = torch.randn(2, 8, 16).double()
    >>> ranks = simulate(loss, image.split([5, 3]), text.split([5, 3]))
    >>> torch.testing.assert_close(ranks, [loss(image, text)] * 2)

    Args:
        image_features: this rank's features, (b, D), of float16, bfloat16, float32 or float64; b may differ between
            ranks, and be 0. Half precision is sent as it is; logits are computed in float32, also under autocast.
        text_features: the features of the same samples, of the same shape and dtype.
        logit_scale: a number or a tensor with one element; multiplies the logits. open_clip's models return
            `logit_scale.exp()` by this name, so `clip_loss(**model(image, text))` is their loss.
        ids: (b,), integers: pairs of *different* samples with equal ids are left out, for example of equal captions.
        exclude: (b, B), bool: further pairs of this rank's images and all ranks' texts, in the order of ranks, that are
            left out. A sample's own pair never is.
        normalize: normalize the features first; open_clip's model has done so.
        chunk_size: keep the logits of this many of this rank's rows at a time, and compute them again in backward.
            None: keep all, b × B numbers.
        sizes: the ranks' numbers of rows. "auto": they are exchanged. A list, or None where every rank has as many (the
            last batch is dropped): nothing is exchanged.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        The loss of the whole batch, 0-d, the same number on every rank, of float32, or float64 if the features are; NaN
        if no rank has a row. Its gradient is that of the whole batch after a *mean* over ranks (DDP,
        `GradientAverager`).

    Raises:
        TypeError, ValueError: an argument is invalid.
        CollectiveMismatchError: on all ranks, with sizes="auto", if they differ in D, or features need a gradient on
            some ranks alone: those of an empty rank need it, too (`requires_grad_()`), or use `joint_backward`.

    Source: notes/training/contrastive.md.
    """
    name = "clip_loss"
    check_rows(name, "image_features", image_features)
    check_rows(name, "text_features", text_features, image_features)
    scale = scalar(name, "logit_scale", logit_scale, image_features)
    reduced = [image_features, scale]
    batch = Batch(name, text_features, normalize, sizes, group, chunk_size, exclude, reduced=reduced, ids=ids)
    logits, pos = _pairs(batch, image_features, text_features, scale)

    def block(q: Tensor, *marks: Tensor | None) -> tuple[Tensor, Tensor]:
        s = logits.of_negatives(q, Marks(*marks))
        return logsumexp(s, 1, logits.in_place), logsumexp(s, 0, logits.in_place).unsqueeze(0)

    of_row, of_columns = in_chunks(block, chunk_size, logits.q, *logits.rows)  # of_columns: a row of each chunk
    of_column = of_columns[0] if len(of_columns) == 1 else of_columns.logsumexp(0)
    if len(batch.sizes) > 1:
        of_column = reduce_scatter(of_column, "logsumexp", sizes=batch.sizes, group=group)
    return batch.mean(softplus(of_row - pos) + softplus(of_column - pos), 2)


def siglip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    *,
    ids: Tensor | None = None,
    exclude: Tensor | None = None,
    normalize: bool = False,
    chunk_size: int | None = None,
    sizes: Sizes = "auto",
    group: Group = None,
) -> Tensor:
    """Image–text training without softmax: SigLIP's loss of all ranks' pairs, as of one process with the whole batch.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def loss(image, text):
    ...     return dc.nn.functional.siglip_loss(image, text, 10.0, -10.0, normalize=True)
    >>> image, text = torch.randn(2, 8, 16).double()
    >>> ranks = simulate(loss, image.split([5, 3]), text.split([5, 3]))
    >>> torch.testing.assert_close(ranks, [loss(image, text)] * 2)

    Arguments, result and errors are those of `clip_loss`; `logit_bias`, a number or a tensor with one element, is added
    to the logits. open_clip's models with a bias return all four by these names, so `siglip_loss(**model(image, text))`
    is their loss.

    Source: notes/training/contrastive.md.
    """
    name = "siglip_loss"
    check_rows(name, "image_features", image_features)
    check_rows(name, "text_features", text_features, image_features)
    scale = scalar(name, "logit_scale", logit_scale, image_features)
    bias = scalar(name, "logit_bias", logit_bias, image_features)
    batch = Batch(name, text_features, normalize, sizes, group, chunk_size, exclude, ids=ids)
    logits, pos = _pairs(batch, image_features, text_features, scale, bias)

    def block(q: Tensor, *marks: Tensor | None) -> tuple[Tensor]:
        return (softplus(logits.of_negatives(q, Marks(*marks))).sum(1),)

    (of_negatives,) = in_chunks(block, chunk_size, logits.q, *logits.rows)
    return batch.mean(of_negatives + softplus(-pos))


def _pairs(
    batch: Batch, images: Tensor, texts: Tensor, scale: Number, bias: Number | None = None
) -> tuple[Logits, Tensor]:
    """Return the logits of this rank's images and all ranks' texts, and those of its own pairs."""
    x, (own, every) = widened(images, batch.normalize), batch.features(texts)
    rows = Marks(batch.mine.unsqueeze(1), exclude=batch.exclude, **batch.marks)
    logits = Logits(batch, x, rows, every, Marks(**batch.all_marks), scale, bias)
    return logits, logits.of_pairs(own.unsqueeze(1)).squeeze(1)
