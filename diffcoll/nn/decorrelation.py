"""Barlow Twins, VICReg, KoLeo and SIGReg: features that spread and do not correlate, over the rows of all ranks.

    Barlow Twins, VICReg    S = Σ_r (z_r − k)ᵀ (z'_r − k') − a a'ᵀ / B   with a = Σ_r Σ_b (z_r − k);   L = f(such sums)
    KoLeo     L = −Σ_i log(‖x_i − x_n(i) + eps‖ + eps) / B,   n(i) = the nearest of all other rows, a constant
    SIGReg    S_mk = Σ_r Σ_b exp(i t_k a_m · z_b);   L = B · mean over m of Σ_k w_k |S_mk / B − exp(−t_k²/2)|²

k and k', the rounded means of all ranks' rows, are constants: S does not depend on them, and loses no digits to large
means. The ranks send 2 D + 1 numbers for them, D × D numbers for the sums, and one number in backward. KoLeo gathers
features; both rows of a distance get its gradient, on whichever ranks they are.

note  notes/training/decorrelation.md
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.core import check_mode, expect
from diffcoll.core.arguments import Sizes
from diffcoll.core.dtypes import wider
from diffcoll.core.errors import message
from diffcoll.core.groups import get_world_size, resolve
from diffcoll.core.torch_private.tracing import is_known
from diffcoll.core.torch_private.transforms import without_transforms
from diffcoll.engines.types import Group
from diffcoll.nn.arguments import check_rows, in_full_precision, without_autocast
from diffcoll.nn.contrastive import Batch, Logits, Marks, least
from diffcoll.nn.whole import of_sums


def barlow_twins_loss(
    z_a: Tensor, z_b: Tensor, *, lambda_param: float = 5e-3, eps: float = 1e-5, group: Group = None
) -> Tensor:
    """Barlow Twins' loss of the whole batch, Σ_i (C_ii − 1)² + λ Σ_{i≠j} C_ij².

    C is the D × D correlation of the two views' features over the rows of all ranks: the features are normalized over
    these rows as by a batch norm without affine parameters, and C = z_aᵀ z_b / B. No features are gathered.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> z_a, z_b = torch.randn(2, 8, 4).double()
    >>> ranks = simulate(dc.nn.functional.barlow_twins_loss, z_a.split([5, 3]), z_b.split([5, 3]))
    >>> torch.testing.assert_close(ranks, [dc.nn.functional.barlow_twins_loss(z_a, z_b)] * 2)

    Args:
        z_a: features of the first view of this rank's samples, (b, D); b may differ between ranks and may be 0, D is
            the same on all ranks. Half precisions are computed in float32, also under autocast.
        z_b: features of the second view, row i of the same sample as row i of z_a.
        lambda_param: weight λ of the terms off the diagonal.
        eps: is added to the biased variance before the square root.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        The loss of the whole batch, as `loss_of_sums` returns it, of float32, or float64 if the features are; NaN if no
        rank has a row.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/training/decorrelation.md.
    """
    name = "barlow_twins_loss"
    expect.not_negative(name, lambda_param=lambda_param, eps=eps)
    _, c, count = _views(name, z_a, z_b, group)
    with without_autocast(c):
        c1, c2 = c.unbind()

        def loss_of(products: Tensor, squares: Tensor, rests: Tensor) -> Tensor:
            rest1, rest2 = rests
            scale1, scale2 = ((squares - rests.square() / count) / count + eps).rsqrt()
            correlation = (products - rest1[:, None] * rest2 / count) / count * scale1[:, None] * scale2
            diagonal = correlation.diagonal()
            off = correlation.square().sum() - diagonal.square().sum()
            return torch.add((diagonal - 1).square().sum(), off, alpha=lambda_param)

        return of_sums(loss_of, c1.t() @ c2, c.square().sum(1), c.sum(1), group=group)


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
    >>> z_a, z_b = torch.randn(2, 8, 4).double()
    >>> ranks = simulate(dc.nn.functional.vicreg_loss, z_a.split([5, 3]), z_b.split([5, 3]))
    >>> torch.testing.assert_close(ranks, [dc.nn.functional.vicreg_loss(z_a, z_b)] * 2)

    `lambda_param`, `mu_param` and `nu_param` are λ, μ and ν, which the paper's code calls sim_coeff, std_coeff and
    cov_coeff; `eps` is added to the variance. The other arguments, result and errors are those of `barlow_twins_loss`;
    the loss of fewer than two rows on all ranks together is NaN.

    Source: notes/training/decorrelation.md.
    """
    name = "vicreg_loss"
    expect.not_negative(name, lambda_param=lambda_param, mu_param=mu_param, nu_param=nu_param, eps=eps)
    x, c, count = _views(name, z_a, z_b, group)
    with without_autocast(c):
        (x1, x2), (c1, c2), size = x.unbind(), c.unbind(), c.shape[-1]

        def loss_of(products: Tensor, squares: Tensor, rests: Tensor, difference: Tensor) -> Tensor:
            rest1, rest2 = rests
            shifts = torch.outer(rest1, rest1).triu(1) + torch.outer(rest2, rest2).tril(-1)
            covariances = 2 * ((products - shifts / count) / (count - 1)).square().sum() / size
            variances = (squares - rests.square() / count) / (count - 1)
            hinges = F.relu(1 - (variances + eps).sqrt()).sum() / (2 * size)
            return lambda_param * difference / (count * size) + mu_param * hinges + nu_param * covariances

        # Both matrices are symmetric: one above the diagonal and the other below fit into one message of D × D.
        packed = (c1.t() @ c1).triu(1) + (c2.t() @ c2).tril(-1)
        return of_sums(loss_of, packed, c.square().sum(1), c.sum(1), (x1 - x2).square().sum(), group=group)


def _views(name: str, z_a: Tensor, z_b: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return both views, (2, b, D), the same minus their rounded means k over all ranks' rows, and the number of these.

    They are in float32, or float64 if the features are.
    """
    check_rows(name, "z_a", z_a)
    check_rows(name, "z_b", z_b, z_a)
    x = torch.stack(in_full_precision(name, z_a=z_a, z_b=z_b))
    with torch.no_grad():
        row = torch.cat([x.sum(1).flatten(), x.new_full((1,), z_a.shape[0])])
        if get_world_size(group) > 1:
            row = all_reduce(row, group=group)
        k = (row[:-1] / row[-1]).view(2, 1, x.shape[2])
    return x, x - k, row[-1]


def koleo_loss(
    x: Tensor, *, eps: float = 1e-8, normalize: bool = True, sizes: Sizes = "auto", group: Group = None
) -> Tensor:
    """KoLeo of the whole batch: −log of each row's distance to its nearest neighbour, averaged over all ranks' rows.

    It spreads features. The neighbour is searched among the rows of all ranks except the row itself; published code
    searches a rank's own rows, which is another loss. The features of all ranks are gathered; no matrix of products is
    kept for backward.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> x = torch.randn(8, 4).double()
    >>> ranks = simulate(dc.nn.functional.koleo_loss, x.split([5, 3]))
    >>> torch.testing.assert_close(ranks, [dc.nn.functional.koleo_loss(x)] * 2)

    `x` are features of this rank's samples, (b, D), which are normalized unless `normalize` is False. `eps` is added to
    each difference of two features and to each distance: with 0, equal rows have an infinite loss. A row without
    another one is at distance 0. The other arguments, result and errors are those of `clip_loss`.

    Source: notes/training/decorrelation.md#koleo.
    """
    name = "koleo_loss"
    check_rows(name, "x", x)
    expect.not_negative(name, eps=eps)
    batch = Batch(name, x, normalize, sizes, group)
    own, every = batch.features(x)
    if is_known(every.shape[0] == 0):
        return batch.mean(own)
    products = Logits(batch, own, Marks(), every, Marks(), 1.0)
    own, every = products.normalized(own), products.columns
    with torch.no_grad(), without_autocast(x):
        # |x − y|² = |x|² + 2 (|y|²/2 − x·y): the first term is the same for all y.
        closeness = products(products.q) - every.square().sum(1) / 2
        nearest = closeness.scatter(1, batch.mine.unsqueeze(1), least(closeness)).argmax(1)
    distances = (own - every[nearest] + eps).square().sum(1).sqrt()
    return batch.mean(-(distances + eps).log())


def sigreg_loss(
    features: Tensor, directions: Tensor, *, num_points: int = 17, t_max: float = 3.0, group: Group = None
) -> Tensor:
    """SIGReg of the whole batch: B ∫ |φ(t) − exp(−t²/2)|² exp(−t²/2) dt, averaged over random directions.

    φ is the empirical characteristic function of a·z over the B rows z of all ranks, φ(t) = Σ exp(i t a·z) / B, for a
    random unit vector a. The integral is over [−t_max, t_max], by the trapezoidal rule with `num_points` points on
    [0, t_max], doubled since the integrand is even. As published, twice as many rows of the same distribution give
    about twice the loss. Forward sends 2 · M · (num_points − 1) + 1 numbers for M directions, backward one.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> z, directions = torch.randn(8, 4).double(), torch.randn(4, 256)
    >>> ranks = simulate(dc.nn.functional.sigreg_loss, z.split([5, 3]), [directions] * 2)
    >>> torch.testing.assert_close(ranks, [dc.nn.functional.sigreg_loss(z, directions)] * 2)

    Args:
        features: of this rank's samples, (b, D), as of `barlow_twins_loss`; not normalized.
        directions: (D, M), floating-point, the same on all ranks, which check mode compares; the columns are divided by
            their norms. For new ones in each step, `torch.randn(D, 256, generator=g)` with a generator of their own
            that all ranks have seeded alike, on features' device.
        num_points: number of points, 0 and t_max included, at least 2.
        t_max: the largest t, above 0.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Result and errors are those of `barlow_twins_loss`.

    Source: notes/training/decorrelation.md#sigreg.
    """
    name = "sigreg_loss"
    check_rows(name, "features", features)
    expect.floating(name, "directions", directions, "pass directions.float()")
    if directions.ndim != 2 or directions.shape[0] != features.shape[1]:
        got = f"shape {tuple(directions.shape)}"
        raise ValueError(message(name, "directions", got, f"({features.shape[1]}, M), a column for each direction"))
    expect.integer(name, "num_points", num_points, 2)
    if not expect.is_number(t_max) or not 0 < t_max < torch.inf:
        raise ValueError(message(name, "t_max", repr(t_max), "a number above 0", "the published code has 3"))
    engine = resolve(group, name)
    if check_mode.compares(engine):  # ranks with other directions send equal messages
        facts = f"{name}(directions={directions.dtype} {tuple(directions.shape)}, {num_points=}, {t_max=})"
        check_mode.compare_calls(engine, facts)
        remedy = "draw them from a generator that all ranks have seeded alike"
        check_mode.same_everywhere(engine, without_transforms(directions), lambda: f"{name}: directions", remedy)
    x = features.to(wider(features.dtype))
    with without_autocast(x):
        t = torch.linspace(0, t_max, num_points, dtype=x.dtype, device=x.device)[1:]  # at 0 both functions are 1
        gaussian = (-t.square() / 2).exp()
        weights = gaussian * (2 * t_max / (num_points - 1))
        weights = torch.cat([weights[:-1], weights[-1:] / 2])

        def loss_of(cosines: Tensor, sines: Tensor, count: Tensor) -> Tensor:
            distances = (cosines / count - gaussian).square() + (sines / count).square()
            return (distances @ weights).mean() * count

        directions = directions.to(x.dtype)
        angles = (x @ (directions / directions.square().sum(0).sqrt())).unsqueeze(2) * t
        count = torch.full((), x.shape[0], dtype=x.dtype, device=x.device)
        return of_sums(loss_of, angles.cos().sum(0), angles.sin().sum(0), count, group=group)
