"""Barlow Twins and VICReg: losses of D × D matrices that are sums over the rows of all ranks.

    S = Σ_r (z_r − k)ᵀ (z'_r − k') − a a'ᵀ / B   with a = Σ_r Σ_b (z_r − k);   the loss is a function of such sums

k and k', the rounded means of all ranks' rows, are constants: S does not depend on them, and loses no digits to large
means. The ranks send 2 D + 1 numbers for them, D × D numbers for the sums, and one number in backward.

note  notes/training/decorrelation.md
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.core.expect import not_negative
from diffcoll.core.groups import get_world_size
from diffcoll.engines.types import Group
from diffcoll.nn.arguments import check_rows, in_full_precision, without_autocast
from diffcoll.nn.whole import loss_of_sums


def barlow_twins_loss(
    z_a: Tensor, z_b: Tensor, *, lambda_param: float = 5e-3, eps: float = 1e-5, group: Group = None
) -> Tensor:
    """Barlow Twins' loss of the whole batch, Σ_i (C_ii − 1)² + λ Σ_{i≠j} C_ij².

    C is the D × D correlation of the two views' features over the rows of all ranks: the features are normalized over
    these rows as by a batch norm without affine parameters, and C = z_aᵀ z_b / B. No features are gathered.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> z_a, z_b = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0)).double()
    >>> for value in simulate(dc.nn.functional.barlow_twins_loss, z_a.split([5, 3]), z_b.split([5, 3])):
    ...     torch.testing.assert_close(value, dc.nn.functional.barlow_twins_loss(z_a, z_b))

    Args:
        z_a: features of the first view of this rank's samples, (b, D); b may differ between ranks and may be 0, D is
            the same on all ranks. Half precisions are computed in float32, also under autocast.
        z_b: features of the second view, row i of the same sample as row i of z_a.
        lambda_param: weight λ of the terms off the diagonal.
        eps: is added to the biased variance before the square root.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        The loss of the whole batch, 0-d, the same number on every rank, of float32, or float64 if the features are; NaN
        if no rank has a row. Its gradient is that of the whole batch after a *mean* over ranks (DDP,
        `GradientAverager`).

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/training/decorrelation.md.
    """
    name = "barlow_twins_loss"
    not_negative(name, lambda_param=lambda_param, eps=eps)
    x1, x2 = _views(name, z_a, z_b)
    with without_autocast(x1):
        c1, c2, count = _centered(x1, x2, group)

        def of_sums(products: Tensor, squares: Tensor, rests: Tensor) -> Tensor:
            rest1, rest2 = rests
            scale1, scale2 = ((squares - rests.square() / count) / count + eps).rsqrt()
            correlation = (products - rest1[:, None] * rest2 / count) / count * scale1[:, None] * scale2
            diagonal = correlation.diagonal()
            off = correlation.square().sum() - diagonal.square().sum()
            return torch.add((diagonal - 1).square().sum(), off, alpha=lambda_param)

        squares, rests = torch.stack([c1, c2]).square().sum(1), torch.stack([c1, c2]).sum(1)
        return loss_of_sums(of_sums, c1.t() @ c2, squares, rests, group=group)


def vicreg_loss(
    z_a: Tensor,
    z_b: Tensor,
    *,
    lambda_param: float = 25.0,
    mu_param: float = 25.0,
    nu_param: float = 1.0,
    eps: float = 1e-4,
    group: Group = None,
) -> Tensor:
    """VICReg's loss of the whole batch, as the paper's code computes it.

    The sum of λ times the mean squared difference of the views; of μ times mean_i max(0, 1 − std_i) / 2 of each view,
    where std_i = √(variance + eps); and of ν times Σ_{i≠j} cov_ij² / D of each view. Variance and covariance are those
    of the rows of all ranks, divided by B − 1. No features are gathered, and both matrices are one message of D × D.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> z_a, z_b = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0)).double()
    >>> for value in simulate(dc.nn.functional.vicreg_loss, z_a.split([5, 3]), z_b.split([5, 3])):
    ...     torch.testing.assert_close(value, dc.nn.functional.vicreg_loss(z_a, z_b))

    Args:
        z_a: as of `barlow_twins_loss`.
        z_b: as of `barlow_twins_loss`.
        lambda_param: weight of the squared difference; the paper's code calls it sim_coeff.
        mu_param: weight of the standard deviations, std_coeff.
        nu_param: weight of the covariances, cov_coeff.
        eps: is added to the variance before the square root.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        As `barlow_twins_loss`; NaN if all ranks together have fewer than two rows.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/training/decorrelation.md.
    """
    name = "vicreg_loss"
    not_negative(name, lambda_param=lambda_param, mu_param=mu_param, nu_param=nu_param, eps=eps)
    x1, x2 = _views(name, z_a, z_b)
    with without_autocast(x1):
        c1, c2, count = _centered(x1, x2, group)
        size = x1.shape[1]

        def of_sums(products: Tensor, squares: Tensor, rests: Tensor, difference: Tensor) -> Tensor:
            rest1, rest2 = rests
            shifts = torch.outer(rest1, rest1).triu(1) + torch.outer(rest2, rest2).tril(-1)
            covariances = 2 * ((products - shifts / count) / (count - 1)).square().sum() / size
            variances = (squares - rests.square() / count) / (count - 1)
            hinges = F.relu(1 - (variances + eps).sqrt()).sum() / (2 * size)
            return lambda_param * difference / (count * size) + mu_param * hinges + nu_param * covariances

        # Both matrices are symmetric: one above the diagonal and the other below fit into one message of D × D.
        packed = (c1.t() @ c1).triu(1) + (c2.t() @ c2).tril(-1)
        squares, rests = torch.stack([c1, c2]).square().sum(1), torch.stack([c1, c2]).sum(1)
        return loss_of_sums(of_sums, packed, squares, rests, (x1 - x2).square().sum(), group=group)


def _views(name: str, z_a: Tensor, z_b: Tensor) -> list[Tensor]:
    """Return both views in one dtype, float32 or float64."""
    check_rows(name, "z_a", z_a)
    check_rows(name, "z_b", z_b, z_a)
    return in_full_precision(name, z_a=z_a, z_b=z_b)


def _centered(x1: Tensor, x2: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return both views minus their rounded means k over all ranks' rows, and the number of these rows."""
    with torch.no_grad():
        row = torch.cat([x1.sum(0), x2.sum(0), x1.new_full((1,), x1.shape[0])])
        if get_world_size(group) > 1:
            row = all_reduce(row, group=group)
        count = row[-1]
        k1, k2 = (row[:-1] / count).chunk(2)
    return x1 - k1, x2 - k2, count
