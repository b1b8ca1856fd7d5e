"""SigLIP: the sigmoid loss of all image–text pairs.

    L = −Σ_ij log σ(z_ij · s_ij) / B,   s_ij = scale · x_i · y_j + bias,   z_ij = 1 for positives, −1 for the others

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


def siglip_loss(
    image: Tensor,
    text: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    *,
    labels: Tensor | None = None,
    ids: Tensor | None = None,
    normalize: bool = False,
    group: Group = None,
    rank_reduction: RankReduction = "mean",
    chunk_size: int | None = None,
    exchange: Exchange = "gather",
) -> Tensor:
    """Image–text training without softmax: SigLIP's loss of all ranks' pairs, as of one process with the whole batch.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> def loss(image, text):
    ...     return dc.nn.functional.siglip_loss(image, text, 10.0, -10.0, normalize=True)
    >>> g = torch.Generator().manual_seed(0)
    >>> image, text = (torch.randn(8, 16, generator=g).double() for _ in range(2))
    >>> losses = simulate(loss, image.split([5, 3]), text.split([5, 3]))
    >>> torch.testing.assert_close(sum(losses) / 2, loss(image, text))

    Args:
        image: this rank's features, (b, D), of float16, bfloat16, float32 or float64; b may differ between ranks, and
            be 0. Half precision is sent as it is; logits are computed in float32.
        text: the features of the same samples, of the same shape and dtype.
        logit_scale: a number or a tensor with one element; multiplies the logits. open_clip passes `logit_scale.exp()`.
        logit_bias: a number or a tensor with one element; is added to the logits.
        labels: (b,), integers: all pairs of equal labels are positives; of label −1, a sample's own pair alone.
        ids: pairs of equal ids that are not positives are *left out*, e.g. of equal captions; (b,), integers.
        normalize: normalize the features first; open_clip's model has done so.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        rank_reduction: what is done with the ranks' gradients afterwards. "mean" (DDP, `GradientAverager`): the mean
            over ranks of the returned values is the loss of the whole batch. "sum": their sum is.
        chunk_size: keep the logits of this many columns at a time and compute them again in backward. None: keep all,
            a matrix of b × B numbers.
        exchange: "gather": every rank gets all texts. "ring": one rank's texts after the other's.

    Returns:
        A 0-d tensor of float32, or float64 if the features are: N times this rank's share of the loss, or the share.

    Raises:
        TypeError, ValueError: an argument is invalid, or the batch is empty on all ranks.
        CollectiveMismatchError: on all ranks, if they differ in the tensors that are given, in options that are no
            numbers, in dtypes or in D.

    Source: notes/training/contrastive.md.
    """
    check_features("siglip_loss", image=image, text=text)
    numbers = {"logit_scale": logit_scale, "logit_bias": logit_bias}
    options = Options("siglip_loss", "image", numbers, normalize, group, rank_reduction, chunk_size, exchange)
    return loss_of_pairs(options, LossRule(sigmoid=True), [image], text, labels=labels, ids=ids)


class SigLIPLoss(LossModule, of=siglip_loss, starts={"logit_scale": 10.0, "logit_bias": -10.0}):
    """`siglip_loss` as a module; its arguments are the options, `forward` takes the tensors.

    Scale and bias are passed to `forward`, or here: numbers, parameters of yours, or with `learnable=True` numbers to
    start with, 10 and −10 by default. The module's parameters are then `log_scale`, the logarithm, and `logit_bias`.

    >>> from diffcoll.nn import SigLIPLoss
    >>> SigLIPLoss(exchange="ring")
    SigLIPLoss(normalize=False, rank_reduction='mean', chunk_size=None, exchange='ring')
    """

    def forward(
        self,
        image: Tensor,
        text: Tensor,
        logit_scale: Tensor | float | None = None,
        logit_bias: Tensor | float | None = None,
        labels: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, as `siglip_loss` does."""
        options = self._called_with(logit_scale=logit_scale, logit_bias=logit_bias)
        return siglip_loss(image, text, labels=labels, ids=ids, **options)
