"""KoLeo, DINOv2's regularizer: the distance of each row to its nearest neighbour among the rows of all ranks.

    L = −Σ_i log(‖x_i − x_n(i) + eps‖ + eps) / B,   n(i) = the nearest of all other rows, a constant

Both rows of a distance get its gradient, on whichever ranks they are.

note  notes/training/decorrelation.md#koleo
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffcoll.core.arguments import Sizes
from diffcoll.core.expect import not_negative
from diffcoll.core.torch_private.tracing import is_known
from diffcoll.engines.types import Group
from diffcoll.nn.arguments import check_rows, without_autocast
from diffcoll.nn.contrastive import least
from diffcoll.nn.gathered import Batch


def koleo_loss(
    x: Tensor, *, eps: float = 1e-8, normalize: bool = True, sizes: Sizes = "auto", group: Group = None
) -> Tensor:
    """KoLeo of the whole batch: −log of each row's distance to its nearest neighbour, averaged over all ranks' rows.

    It spreads features. The neighbour is searched among the rows of all ranks except the row itself; published code
    searches a rank's own rows, which is another loss. The features of all ranks are gathered; no matrix of products is
    kept for backward.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double()
    >>> for value in simulate(dc.nn.functional.koleo_loss, x.split([5, 3])):
    ...     torch.testing.assert_close(value, dc.nn.functional.koleo_loss(x))

    Args:
        x: features of this rank's samples, (b, D), of float16, bfloat16, float32 or float64; b may differ between
            ranks, and be 0. Half precision is sent as it is and computed in float32, also under autocast.
        eps: is added to each difference of two features and to each distance. With 0, equal rows have an infinite loss.
        normalize: normalize the features first.
        sizes: the ranks' numbers of rows. "auto": they are exchanged. A list, or None where every rank has as many (the
            last batch is dropped): nothing is exchanged.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        The loss of the whole batch, 0-d, the same number on every rank, of float32, or float64 if the features are; NaN
        if no rank has a row. Its gradient is that of the whole batch after a *mean* over ranks (DDP,
        `GradientAverager`). A row without another one is at distance 0.

    Raises:
        TypeError, ValueError: an argument is invalid.
        CollectiveMismatchError: on all ranks, with sizes="auto", if they differ in D.

    Source: notes/training/decorrelation.md#koleo.
    """
    name = "koleo_loss"
    check_rows(name, "x", x)
    not_negative(name, eps=eps)
    batch = Batch(name, x, sizes, group, {})
    own, every = batch.features(x, normalize)
    if is_known(every.shape[0] == 0):
        return batch.mean(own)
    with torch.no_grad(), without_autocast(x):
        # |x − y|² = |x|² + 2 (|y|²/2 − x·y): the first term is the same for all y.
        closeness = own @ every.t() - every.square().sum(1) / 2
        nearest = closeness.scatter(1, batch.mine.unsqueeze(1), least(closeness)).argmax(1)
    distances = (own - every[nearest] + eps).square().sum(1).sqrt()
    return batch.mean(-(distances + eps).log())
