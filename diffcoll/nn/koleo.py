"""KoLeo, DINOv2's regularizer: the distance of each row to its nearest neighbour among the rows of all ranks.

forward   L = −Σ_i log(‖x_i − x_n(i) + eps‖ + eps) / B,   n(i) = argmax_{j≠i} x_i · x_j of the normalized rows
backward  n(i) is a constant; both rows of a distance get its gradient, on whichever ranks they are
note      notes/training/decorrelation.md#koleo
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffcoll.collectives.all_gather import gathered_as
from diffcoll.core.expect import flag, not_negative
from diffcoll.core.groups import resolve
from diffcoll.engines.types import Group
from diffcoll.nn.convention import RankReduction, check_options, returned
from diffcoll.nn.features import check_features, columns_of
from diffcoll.nn.followers import agreed, needs_gradient, tracked
from diffcoll.nn.inputs import check_rows, without_autocast
from diffcoll.nn.logits import normalized
from diffcoll.nn.loss_module import LossModule


def koleo_loss(
    features: Tensor,
    *,
    eps: float = 1e-8,
    normalize: bool = True,
    group: Group = None,
    rank_reduction: RankReduction = "mean",
) -> Tensor:
    """KoLeo of the whole batch: −log of each row's distance to its nearest neighbour, averaged over all ranks' rows.

    It spreads features. The neighbour is searched among the rows of all ranks except the row itself; published code
    searches a rank's own rows, which is another loss. The choice of the neighbour has no gradient, the distance has one
    with respect to both rows. The features of all ranks are gathered; no matrix of products is kept for backward.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double()
    >>> losses = simulate(dc.nn.functional.koleo_loss, x.split([5, 3]))
    >>> torch.testing.assert_close(sum(losses) / 2, dc.nn.functional.koleo_loss(x))

    Args:
        features: of this rank's samples, (b, D), of float16, bfloat16, float32 or float64; b may differ between ranks,
            and be 0. Half precision is sent as it is and computed in float32, also under autocast.
        eps: is added to each difference of two features and to each distance. With 0, equal rows have an infinite loss.
        normalize: normalize the features first.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        rank_reduction: "mean" if gradients are averaged over the ranks afterwards (DDP, `GradientAverager`), "sum" if
            they are summed.

    Returns:
        A 0-d tensor of float32, or float64 if the features are, whose mean or sum over the ranks, as `rank_reduction`
        says, is the loss of the whole batch; gradients are exact after the same reduction.

    Raises:
        TypeError, ValueError: an argument is invalid, or all ranks together have fewer than two rows.
        CollectiveMismatchError: on all ranks, if they differ in options, in dtypes or in D.

    Source: notes/training/decorrelation.md#koleo.
    """
    name = "koleo_loss"
    check_features(name, features=features)
    check_options(name, group, rank_reduction, eps=eps, normalize=flag(name, "normalize", normalize))
    not_negative(name, eps=eps)
    # A number that a graph formats becomes its constant.
    number = "" if torch.compiler.is_compiling() else f"eps={float(eps)}, "
    facts = {f"{number}normalize={normalize}, rank_reduction={rank_reduction}": features.detach()}
    what = "eps, normalize, rank_reduction, dtype or size of the features"
    with without_autocast(features):
        columns, engine = columns_of(features, False), resolve(group, name)
        needs = needs_gradient(columns.k)
        sizes, (_, needs) = agreed(name, facts, what, len(features), (needs, needs), group)
        total = sum(sizes)
        if not torch.compiler.is_compiling():
            check_rows(name, len(features), torch.tensor(total), 2)
        everyone = gathered_as(columns.sent, tracked(columns.k, needs), sizes, group)
        everyone = normalized(everyone) if normalize else everyone
        mine = sum(sizes[: engine.rank]) + torch.arange(len(features), device=features.device)
        distances = (everyone[mine] - everyone[_nearest(everyone.detach(), mine)] + eps).square().sum(1).sqrt()
        return returned(-(distances + eps).log().sum() / total, rank_reduction, group)


class KoLeoLoss(LossModule, of=koleo_loss):
    """`koleo_loss` as a module; its arguments are the options, `forward` takes the features.

    >>> import diffcoll as dc
    >>> dc.nn.KoLeoLoss(normalize=False)
    KoLeoLoss(eps=1e-08, normalize=False, rank_reduction='mean')
    """

    def forward(self, features: Tensor) -> Tensor:
        """Return the loss, as `koleo_loss` does."""
        return koleo_loss(features, **self.options)


def _nearest(everyone: Tensor, mine: Tensor) -> Tensor:
    """Return the number of the nearest other row for each of the rows `mine`."""
    # |x − y|² = |x|² + 2 (|y|²/2 − x·y): the first term is the same for all y.
    closeness = everyone[mine] @ everyone.T - everyone.square().sum(1) / 2
    itself = mine.unsqueeze(1) == torch.arange(everyone.shape[0], device=mine.device)
    return closeness.masked_fill(itself, -torch.inf).argmax(1)
