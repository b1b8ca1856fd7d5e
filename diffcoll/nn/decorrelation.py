"""Barlow Twins and VICReg: losses of D × D matrices that are sums over the rows of all ranks.

forward   S = Σ_r (z_r − k)ᵀ (z'_r − k') − a a'ᵀ / B with a = Σ_r Σ_b (z_r − k), and the loss is a function of S
          k and k', the rounded means of all ranks' rows, are constants: S does not depend on them
backward  every rank computes ∂L/∂S from S; one number is sent
note      notes/training/decorrelation.md
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.core.errors import CollectiveMismatchError, message
from diffcoll.core.expect import not_negative
from diffcoll.core.groups import get_world_size
from diffcoll.core.torch_private.tracing import assert_in_graph, is_traced
from diffcoll.core.torch_private.transforms import is_within_transform, without_transforms
from diffcoll.engines.types import Group
from diffcoll.nn.convention import RankReduction, check_options, returned, share_of_replicated
from diffcoll.nn.followers import bit, follows, leaf, needs_gradient, refuse_absent
from diffcoll.nn.inputs import check_rows, dtype_of_messages, in_full_precision, without_autocast
from diffcoll.nn.loss_module import LossModule


def barlow_twins_loss(
    z1: Tensor,
    z2: Tensor,
    *,
    lambd: float = 5e-3,
    eps: float = 1e-5,
    group: Group = None,
    rank_reduction: RankReduction = "mean",
) -> Tensor:
    """Barlow Twins' loss of the whole batch, Σ_i (C_ii − 1)² + λ Σ_{i≠j} C_ij².

    C is the D × D correlation of the two views' features over the rows of all ranks: the features are normalized over
    these rows as by a batch norm without affine parameters, and C = z1ᵀ z2 / B. The ranks send D × D numbers in the
    forward and one number in the backward. No features are gathered.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> z1, z2 = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))
    >>> whole = dc.nn.functional.barlow_twins_loss(z1, z2)
    >>> ranks = simulate(dc.nn.functional.barlow_twins_loss, z1.split([5, 3]), z2.split([5, 3]))
    >>> torch.allclose(sum(ranks) / 2, whole)
    True

    Args:
        z1: features of the first view of this rank's samples, (b, D); b may differ between ranks and may be 0, D is the
            same on all ranks. Half precisions are computed in float32, also under autocast.
        z2: features of the second view, row i of the same sample as row i of z1.
        lambd: weight λ of the terms off the diagonal.
        eps: is added to the biased variance before the square root.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        rank_reduction: "mean" if gradients are averaged over the ranks afterwards (DDP, `GradientAverager`), "sum" if
            they are summed.

    Returns:
        A 0-d tensor. "mean": the loss of the whole batch. "sum": 1/N of it. Gradients are exact after the named
        reduction over the ranks.

    Raises:
        TypeError, ValueError: an argument is invalid, or all ranks together have fewer than two rows.
        CollectiveMismatchError: on all ranks, if some have float64 and others another dtype (a RuntimeError in compiled
            functions).

    Source: notes/training/decorrelation.md.
    """
    name = "barlow_twins_loss"
    check_options(name, group, rank_reduction, lambd=lambd, eps=eps)
    not_negative(name, lambd=lambd, eps=eps)
    x1, x2 = _views(name, z1, z2)
    with without_autocast(x1):
        c1, c2, count = _centered(name, x1, x2, group)
        mine = (c1.T @ c2, c1.square().sum(0), c2.square().sum(0), c1.sum(0), c2.sum(0))
        products, square1, square2, rest1, rest2 = all_reduce(mine, group=group, grad_placement="replicate")
        products = products - rest1[:, None] * rest2 / count
        scale1 = ((square1 - rest1.square() / count) / count + eps).rsqrt()
        scale2 = ((square2 - rest2.square() / count) / count + eps).rsqrt()
        correlation = products / count * scale1[:, None] * scale2
        loss = (correlation.diagonal() - 1).square().sum() + lambd * _off_diagonal(correlation).square().sum()
        return returned(share_of_replicated(loss, group), rank_reduction, group)


def vicreg_loss(
    z1: Tensor,
    z2: Tensor,
    *,
    sim_coeff: float = 25.0,
    std_coeff: float = 25.0,
    cov_coeff: float = 1.0,
    eps: float = 1e-4,
    group: Group = None,
    rank_reduction: RankReduction = "mean",
) -> Tensor:
    """VICReg's loss of the whole batch, as the paper's code computes it.

    The sum, with these coefficients, of the mean squared difference of the views; of mean_i max(0, 1 − std_i) / 2 of
    each view, where std_i = √(variance + eps); and of Σ_{i≠j} cov_ij² / D of each view. Variance and covariance are
    those of the rows of all ranks, divided by B − 1. The ranks send D × D numbers in the forward, for both views
    together, and one number in the backward. No features are gathered.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> z1, z2 = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))
    >>> whole = dc.nn.functional.vicreg_loss(z1, z2)
    >>> ranks = simulate(dc.nn.functional.vicreg_loss, z1.split([5, 3]), z2.split([5, 3]))
    >>> torch.allclose(sum(ranks) / 2, whole)
    True

    Args:
        z1: features of the first view of this rank's samples, (b, D); b may differ between ranks and may be 0, D is the
            same on all ranks. Half precisions are computed in float32, also under autocast.
        z2: features of the second view, row i of the same sample as row i of z1.
        sim_coeff: weight of the squared difference.
        std_coeff: weight of the standard deviations.
        cov_coeff: weight of the covariances.
        eps: is added to the variance before the square root.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        rank_reduction: "mean" if gradients are averaged over the ranks afterwards (DDP, `GradientAverager`), "sum" if
            they are summed.

    Returns:
        A 0-d tensor, whose mean or sum over the ranks, as `rank_reduction` says, is the loss of the whole batch;
        gradients are exact after the same reduction. The ranks' values differ: the squared difference is of this rank's
        rows.

    Raises:
        TypeError, ValueError: an argument is invalid, or all ranks together have fewer than two rows.
        CollectiveMismatchError: on all ranks, if some have float64 and others another dtype (a RuntimeError in compiled
            functions).

    Source: notes/training/decorrelation.md.
    """
    name = "vicreg_loss"
    coefficients = {"sim_coeff": sim_coeff, "std_coeff": std_coeff, "cov_coeff": cov_coeff}
    check_options(name, group, rank_reduction, eps=eps, **coefficients)
    not_negative(name, sim_coeff=sim_coeff, std_coeff=std_coeff, cov_coeff=cov_coeff, eps=eps)
    x1, x2 = _views(name, z1, z2)
    with without_autocast(x1):
        features = x1.shape[1]
        c1, c2, count = _centered(name, x1, x2, group)
        # Both matrices are symmetric: one above the diagonal and the other below fit into one message of D × D.
        packed = (c1.T @ c1).triu(1) + (c2.T @ c2).tril(-1)
        mine = (packed, c1.square().sum(0), c2.square().sum(0), c1.sum(0), c2.sum(0))
        products, square1, square2, rest1, rest2 = all_reduce(mine, group=group, grad_placement="replicate")
        products = products - (torch.outer(rest1, rest1).triu(1) + torch.outer(rest2, rest2).tril(-1)) / count
        covariances = 2 * (products / (count - 1)).square().sum() / features
        variance1 = (square1 - rest1.square() / count) / (count - 1)
        variance2 = (square2 - rest2.square() / count) / (count - 1)
        hinges = sum(F.relu(1 - (variance + eps).sqrt()).mean() / 2 for variance in (variance1, variance2))
        shared = std_coeff * hinges + cov_coeff * covariances
        invariance = (x1 - x2).square().sum() / (count * features)
        return returned(sim_coeff * invariance + share_of_replicated(shared, group), rank_reduction, group)


class BarlowTwinsLoss(LossModule, of=barlow_twins_loss):
    """`barlow_twins_loss` as a module; its arguments are the options, `forward` takes the tensors.

    >>> import diffcoll as dc
    >>> dc.nn.BarlowTwinsLoss(lambd=0.01)
    BarlowTwinsLoss(lambd=0.01, eps=1e-05, rank_reduction='mean')
    """

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        """Return the loss, as `barlow_twins_loss` does."""
        return barlow_twins_loss(z1, z2, **self.options)


class VICRegLoss(LossModule, of=vicreg_loss):
    """`vicreg_loss` as a module; its arguments are the options, `forward` takes the tensors.

    >>> import diffcoll as dc
    >>> dc.nn.VICRegLoss(cov_coeff=2.0)
    VICRegLoss(sim_coeff=25.0, std_coeff=25.0, cov_coeff=2.0, eps=0.0001, rank_reduction='mean')
    """

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        """Return the loss, as `vicreg_loss` does."""
        return vicreg_loss(z1, z2, **self.options)


def _views(name: str, z1: Tensor, z2: Tensor) -> tuple[Tensor, Tensor]:
    """Return both views in one dtype, float32 or float64."""
    x1, x2 = in_full_precision(name, z1=z1, z2=z2)
    remedy = "z.flatten(1) makes features of images"
    if x1.ndim != 2 or not x1.shape[1]:
        raise ValueError(message(name, "z1", f"shape {tuple(x1.shape)}", "(b, D) with D > 0", remedy))
    if x2.shape != x1.shape:
        expected = f"{tuple(x1.shape)}, the shape of z1"
        remedy = "row i of both is of the same sample"
        raise ValueError(message(name, "z2", f"shape {tuple(x2.shape)}", expected, remedy))
    return x1, x2


def _centered(name: str, x1: Tensor, x2: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return both views minus their rounded means k over all ranks' rows, and the number of these rows."""
    rows = len(x1)
    count = torch.full((), rows, dtype=x1.dtype, device=x1.device)
    double = torch.full((), float(x1.dtype == torch.float64), dtype=x1.dtype, device=x1.device)
    mine = (x1.detach().sum(0), x2.detach().sum(0), count, bit(needs_gradient(x1, x2), x1), double)
    wide = dtype_of_messages(x1, group)
    *sums, double = all_reduce(tuple(x.to(wide) for x in mine), group=group)
    _refuse_two_dtypes(name, double, group)
    sum1, sum2, count, needs = (x.to(x1.dtype) for x in sums)
    needs = refuse_absent(name, needs, group)
    check_rows(name, rows, count, 2)
    if follows(group, x1, x2) and needs.any():
        x1 = leaf(x1)
    return x1 - sum1 / count, x2 - sum2 / count, count


def _refuse_two_dtypes(name: str, double: Tensor, group: Group) -> None:
    """Raise on all ranks unless none of them or all have float64: the next message is of D × D numbers of x's dtype."""
    n, compiling = get_world_size(group), torch.compiler.is_compiling()
    same, expected, remedy = double % n == 0, "one dtype on all ranks", "pass z.float() or z.double() on all of them"
    if compiling or is_traced(double) or not double.is_cpu:
        if not is_within_transform():  # no assertion can be traced there
            assert_in_graph(same, message(name, "z1, z2", "dtypes that differ between ranks", expected, remedy))
        return
    count = int(without_transforms(double).max())
    if count % n:
        got = f"float64 on {count} of {n} ranks, and float32 or half precision on the others"
        raise CollectiveMismatchError(message(name, "z1, z2", got, expected, remedy))


def _off_diagonal(square: Tensor) -> Tensor:
    """Return a view of the elements off the diagonal of a square matrix."""
    n = len(square)
    return square.flatten()[:-1].view(n - 1, n + 1)[:, 1:]
