"""CLIP: the softmax loss of image–text pairs in both directions.

    L = Σ_i (log Σ_j exp s_ij − s_ii) / 2B + Σ_j (log Σ_i exp s_ij − s_jj) / 2B,   s_ij = scale · x_i · y_j

note  notes/training/contrastive.md
"""

from __future__ import annotations

from torch import Tensor

from diffcoll.engines.types import Group
from diffcoll.nn.convention import RankReduction
from diffcoll.nn.features import Options, check_features
from diffcoll.nn.logits import LossRule
from diffcoll.nn.loss_module import Exchange, LossModule
from diffcoll.nn.pairs import loss_of_pairs


def clip_loss(
    image: Tensor,
    text: Tensor,
    logit_scale: Tensor | float,
    *,
    labels: Tensor | None = None,
    ids: Tensor | None = None,
    normalize: bool = False,
    label_smoothing: float = 0.0,
    group: Group = None,
    rank_reduction: RankReduction = "mean",
    chunk_size: int | None = None,
    exchange: Exchange = "gather",
) -> Tensor:
    """Image–text training: CLIP's loss of all ranks' pairs, as open_clip's on one process with the whole batch.

    >>> import torch, diffcoll as dc
    >>> from torch.nn import functional as F
    >>> from diffcoll.testing import simulate
    >>> def loss(image, text):
    ...     return dc.nn.functional.clip_loss(F.normalize(image), F.normalize(text), 100.0)
    >>> g = torch.Generator().manual_seed(0)
    >>> image, text = (torch.randn(8, 16, generator=g).double() for _ in range(2))
    >>> losses = simulate(loss, image.split([5, 3]), text.split([5, 3]))
    >>> torch.testing.assert_close(sum(losses) / 2, loss(image, text))

    Args:
        image: this rank's features, (b, D), of float16, bfloat16, float32 or float64; b may differ between ranks, and
            be 0. Half precision is sent as it is; logits are computed in float32.
        text: the features of the same samples, of the same shape and dtype.
        logit_scale: a number or a tensor with one element; multiplies the logits. open_clip passes `logit_scale.exp()`.
        labels: (b,), integers: the pairs of all samples of a label are positives, and the loss is averaged over the
            positives of each row and column (UniCL). None, or a label of −1: a sample's own pair is its only positive.
        ids: pairs of different samples with equal ids are *left out*, e.g. of equal captions; (b,), integers.
        normalize: normalize the features first; open_clip's model has done so.
        label_smoothing: from 0 to 1, the part of a target that all columns, or rows, share equally, as in
            `torch.nn.functional.cross_entropy`; pairs left out by `ids` have none.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        rank_reduction: what is done with the ranks' gradients afterwards. "mean" (DDP, `GradientAverager`): the mean
            over ranks of the returned values is the loss of the whole batch. "sum": their sum is.
        chunk_size: keep the logits of this many columns at a time and compute them again in backward. None: keep all,
            a matrix of b × B numbers.
        exchange: "gather": every rank gets all texts. "ring": one rank's texts after the other's, for features too
            many to be gathered.

    Returns:
        A 0-d tensor of float32, or float64 if the features are: N times this rank's share of the loss, or the share.

    Raises:
        TypeError, ValueError: an argument is invalid, or the batch is empty on all ranks.
        CollectiveMismatchError: on all ranks, if they differ in the tensors that are given, in options that are no
            numbers, in dtypes or in D.

    Source: notes/training/contrastive.md.
    """
    check_features("clip_loss", image=image, text=text)
    scale = {"logit_scale": logit_scale}
    common = group, rank_reduction, chunk_size, exchange
    options = Options("clip_loss", "image", scale, normalize, *common, label_smoothing=label_smoothing, symmetric=True)
    return loss_of_pairs(options, LossRule(), [image], text, labels=labels, ids=ids)


class CLIPLoss(LossModule, of=clip_loss, starts={"logit_scale": 1 / 0.07}):
    """`clip_loss` as a module; its arguments are the options, `forward` takes the tensors.

    The scale is passed to `forward`, or here: a number, a parameter of yours, or with `learnable=True` a number to
    start with, 1/0.07 by default. The module's parameter is then its logarithm, `log_scale`.

    >>> from diffcoll.nn import CLIPLoss
    >>> CLIPLoss(chunk_size=512)
    CLIPLoss(normalize=False, label_smoothing=0.0, rank_reduction='mean', chunk_size=512, exchange='gather')
    >>> [name for name, _ in CLIPLoss(learnable=True).named_parameters()]
    ['log_scale']
    """

    def forward(
        self,
        image: Tensor,
        text: Tensor,
        logit_scale: Tensor | float | None = None,
        labels: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, as `clip_loss` does."""
        return clip_loss(image, text, labels=labels, ids=ids, **self._called_with(logit_scale=logit_scale))
