"""Supervised contrastive loss (Khosla et al. 2020), L_out: all rows of the same label are positives.

    L = Σ_i (log Σ_{j≠i} exp s_ij − Σ_{p∈P(i)} s_ip / |P(i)|) / B,   s_ij = z_i · z_j / temperature

note  notes/training/contrastive.md
"""

from __future__ import annotations

from torch import Tensor

from diffcoll.core.errors import message
from diffcoll.engines.types import Group
from diffcoll.nn.convention import RankReduction
from diffcoll.nn.features import Options, check_features
from diffcoll.nn.logits import LossRule
from diffcoll.nn.loss_module import Exchange, LossModule
from diffcoll.nn.pairs import loss_of_pairs


def supcon_loss(
    features: Tensor,
    labels: Tensor,
    *,
    ids: Tensor | None = None,
    temperature: Tensor | float = 0.1,
    normalize: bool = True,
    only_rows_with_positives: bool = False,
    group: Group = None,
    rank_reduction: RankReduction = "mean",
    chunk_size: int | None = None,
    exchange: Exchange = "gather",
) -> Tensor:
    """Supervised contrastive training: Khosla et al.'s L_out, with the rows of all ranks as contrast.

    A row without a positive contributes 0. It counts in the mean, as in the authors' code, or is left out.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> g = torch.Generator().manual_seed(0)
    >>> features = torch.randn(8, 2, 16, generator=g).double()  # two views
    >>> labels = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0])
    >>> losses = simulate(dc.nn.functional.supcon_loss, features.split([5, 3]), labels.split([5, 3]))
    >>> torch.testing.assert_close(sum(losses) / 2, dc.nn.functional.supcon_loss(features, labels))

    Args:
        features: this rank's features, (b, D), or (b, views, D) as in the authors' code, of float16, bfloat16, float32
            or float64; b may differ between ranks, and be 0. Half precision is sent as it is; logits are computed in
            float32.
        labels: (b,), integers: the class of each sample. All views of all samples of a class are positives. Samples of
            class −1 are negatives of the others, and have no positives.
        ids: rows of an equal id and another label are *left out*; (b,), integers. Those of equal id and label stay
            positives.
        temperature: a number or a tensor with one element; divides the logits.
        normalize: normalize the features first.
        only_rows_with_positives: the mean is over the rows that have a positive, on any rank, instead of over all; 0 if
            none has.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        rank_reduction: what is done with the ranks' gradients afterwards. "mean" (DDP, `GradientAverager`): the mean
            over ranks of the returned values is the loss of the whole batch. "sum": their sum is.
        chunk_size: keep the logits of this many columns at a time and compute them again in backward. None: keep all,
            a matrix of b × B numbers.
        exchange: "gather": every rank gets all features. "ring": one rank's features after the other's.

    Returns:
        A 0-d tensor of float32, or float64 if the features are: N times this rank's share of the loss, or the share.

    Raises:
        TypeError, ValueError: an argument is invalid, or the batch is empty on all ranks.
        CollectiveMismatchError: on all ranks, if they differ in the tensors that are given, in options that are no
            numbers, in dtypes or in D.

    Source: notes/training/contrastive.md.
    """
    name = "supcon_loss"
    check_features(name, (2, 3), features=features)
    if labels is None:
        remedy = "pass the classes; nt_xent_loss is the loss of two views without labels"
        raise TypeError(message(name, "labels", "None", f"a tensor of shape ({len(features)},)", remedy))
    number, only = {"temperature": temperature}, only_rows_with_positives
    common = group, rank_reduction, chunk_size, exchange
    options = Options(name, "features", number, normalize, *common, only_rows_with_positives=only)
    views = features.unbind(1) if features.ndim == 3 else [features]
    return loss_of_pairs(options, LossRule(), views, labels=labels, ids=ids)


class SupConLoss(LossModule, of=supcon_loss):
    """`supcon_loss` as a module; its arguments are the options, `forward` takes the tensors.

    A temperature that is an `nn.Parameter` becomes a parameter of the module. With `learnable=True` the temperature is
    a number to start with, and the module's parameter its logarithm, `log_temperature`.

    >>> from diffcoll.nn import SupConLoss
    >>> SupConLoss(only_rows_with_positives=True).temperature
    0.1
    """

    def forward(self, features: Tensor, labels: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the loss, as `supcon_loss` does."""
        return supcon_loss(features, labels, ids=ids, **self.options)
