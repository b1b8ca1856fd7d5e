"""NT-Xent, SimCLR's loss: two views of each sample, each the positive of the other among all views of all ranks.

    L = Σ_i (log Σ_{j≠i} exp s_ij − s_{i,p(i)}) / 2B,   s_ij = z_i · z_j / temperature,   z = [z1; z2]

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


def nt_xent_loss(
    z1: Tensor,
    z2: Tensor,
    *,
    ids: Tensor | None = None,
    temperature: Tensor | float = 0.5,
    normalize: bool = True,
    decoupled: bool = False,
    group: Group = None,
    rank_reduction: RankReduction = "mean",
    chunk_size: int | None = None,
    exchange: Exchange = "gather",
) -> Tensor:
    """SimCLR: the cross-entropy of each view's other view among the 2B − 1 other views of all ranks.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> g = torch.Generator().manual_seed(0)
    >>> z1, z2 = (torch.randn(8, 16, generator=g).double() for _ in range(2))
    >>> losses = simulate(dc.nn.functional.nt_xent_loss, z1.split([5, 3]), z2.split([5, 3]))
    >>> torch.testing.assert_close(sum(losses) / 2, dc.nn.functional.nt_xent_loss(z1, z2))

    Args:
        z1: features of the first view of this rank's samples, (b, D), of float16, bfloat16, float32 or float64; b may
            differ between ranks, and be 0. Half precision is sent as it is; logits are computed in float32.
        z2: features of the second view of the same samples.
        ids: views of other samples with an equal id are *left out*, as false negatives; (b,), integers.
        temperature: a number or a tensor with one element; divides the logits.
        normalize: normalize the features first.
        decoupled: leave a view's positives out of its denominator, which has its negatives alone (Yeh et al. 2022); a
            view without negatives contributes 0.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        rank_reduction: what is done with the ranks' gradients afterwards. "mean" (DDP, `GradientAverager`): the mean
            over ranks of the returned values is the loss of the whole batch. "sum": their sum is.
        chunk_size: keep the logits of this many columns at a time and compute them again in backward. None: keep all,
            a matrix of 2b × 2B numbers.
        exchange: "gather": every rank gets all views. "ring": one rank's views after the other's.

    Returns:
        A 0-d tensor of float32, or float64 if the features are: N times this rank's share of the loss, or the share.

    Raises:
        TypeError, ValueError: an argument is invalid, or the batch is empty on all ranks.
        CollectiveMismatchError: on all ranks, if they differ in the tensors that are given, in options that are no
            numbers, in dtypes or in D.

    Source: notes/training/contrastive.md.
    """
    check_features("nt_xent_loss", z1=z1, z2=z2)
    name, number = "nt_xent_loss", {"temperature": temperature}
    options = Options(name, "z1", number, normalize, group, rank_reduction, chunk_size, exchange, decoupled)
    return loss_of_pairs(options, LossRule(), [z1, z2], ids=ids)


class NTXentLoss(LossModule, of=nt_xent_loss):
    """`nt_xent_loss` as a module; its arguments are the options, `forward` takes the tensors.

    A temperature that is an `nn.Parameter` becomes a parameter of the module. With `learnable=True` the temperature is
    a number to start with, and the module's parameter its logarithm, `log_temperature`.

    >>> from diffcoll.nn import NTXentLoss
    >>> NTXentLoss(decoupled=True).decoupled
    True
    """

    def forward(self, z1: Tensor, z2: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the loss, as `nt_xent_loss` does."""
        return nt_xent_loss(z1, z2, ids=ids, **self.options)
