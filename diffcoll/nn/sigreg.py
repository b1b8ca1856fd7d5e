"""SIGReg, LeJEPA's regularizer: the rows of all ranks are compared with a Gaussian, along random directions.

forward   S_mk = Σ_b exp(i t_k a_m · z_b), one all-reduce of cosines and sines, and the loss is a function of S
backward  every rank computes ∂L/∂S from S; one number is sent
note      notes/training/decorrelation.md#sigreg
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.core import expect
from diffcoll.core.errors import CollectiveMismatchError, message
from diffcoll.core.groups import get_world_size
from diffcoll.core.torch_private.tracing import is_traced, unobserved
from diffcoll.core.torch_private.transforms import without_transforms
from diffcoll.engines.devices import can_pin
from diffcoll.engines.types import Group
from diffcoll.nn.convention import RankReduction, check_options, returned, share_of_replicated
from diffcoll.nn.features import check_features
from diffcoll.nn.followers import sent
from diffcoll.nn.inputs import asserted, check_rows, dtype_of_messages, in_full_precision, without_autocast
from diffcoll.nn.loss_module import LossModule

#: Seeds, and numbers D of features, with equal residues are taken for one: one pair in 190,747.
_PRIMES = (61, 59, 53)


def sigreg_loss(
    features: Tensor,
    *,
    seed: int,
    num_slices: int = 256,
    num_points: int = 17,
    t_max: float = 3.0,
    group: Group = None,
    rank_reduction: RankReduction = "mean",
) -> Tensor:
    """SIGReg of the whole batch: B ∫ |φ(t) − exp(−t²/2)|² exp(−t²/2) dt, averaged over random directions.

    φ is the empirical characteristic function of a·z over the B rows z of all ranks, φ(t) = Σ exp(i t a·z) / B, for a
    random unit vector a; the loss is the Epps–Pulley statistic of normality. The integral is over [−t_max, t_max], by
    the trapezoidal rule with `num_points` points on [0, t_max], doubled since the integrand is even. As published, the
    number of rows multiplies: twice as many rows of the same distribution give about twice the loss. The ranks send
    2 · num_slices · (num_points − 1) + 8 numbers in the forward and one number in the backward, in
    float64.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> z = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double()
    >>> ranks = simulate(lambda z: dc.nn.functional.sigreg_loss(z, seed=0), z.split([5, 3]))
    >>> torch.testing.assert_close(sum(ranks) / 2, dc.nn.functional.sigreg_loss(z, seed=0))

    Args:
        features: of this rank's samples, (b, D), of float16, bfloat16, float32 or float64; b may differ between ranks,
            and be 0, D is the same. Half precision is computed in float32, also under autocast; the dtype may differ
            between ranks. Not normalized.
        seed: of the random directions, an integer from 0 to 2⁶³ − 1, the same on all ranks; for new directions in each
            step, the number of the step. PyTorch's random numbers are not changed.
        num_slices: number of directions.
        num_points: number of points, 0 and t_max included, at least 2.
        t_max: the largest t, above 0.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        rank_reduction: "mean" if gradients are averaged over the ranks afterwards (DDP, `GradientAverager`), "sum" if
            they are summed.

    Returns:
        A 0-d tensor of float32, or float64 if the features are. "mean": the loss of the whole batch. "sum": 1/N of it.
        Gradients are exact after the named reduction over the ranks.

    Raises:
        TypeError, ValueError: an argument is invalid, or no rank has a row.
        CollectiveMismatchError: on all ranks, if they differ in the seed or in D (a RuntimeError in compiled
            functions); in check mode also if they differ in another option.

    Source: notes/training/decorrelation.md#sigreg.
    """
    name = "sigreg_loss"
    check_features(name, features=features)
    seed = _checked_seed(name, seed)
    num_slices = expect.integer(name, "num_slices", num_slices, 1)
    num_points = expect.integer(name, "num_points", num_points, 2)
    expect.not_negative(name, t_max=t_max)
    if t_max == 0:
        raise ValueError(message(name, "t_max", t_max, "a number above 0", "the published code has 3"))
    options = {"seed": seed, "num_slices": num_slices, "num_points": num_points, "t_max": t_max}
    check_options(name, group, rank_reduction, **options, D=features.shape[1])
    (x,) = in_full_precision(name, features=features)
    with without_autocast(x):
        t = torch.linspace(0, t_max, num_points, dtype=x.dtype, device=x.device)[1:]  # at 0 both functions are 1
        gaussian = (-t.square() / 2).exp()
        weights = gaussian * (2 * t_max / (num_points - 1))
        weights = torch.cat([weights[:-1], weights[-1:] / 2])
        angles = (x @ _directions(seed, num_slices, x)).unsqueeze(2) * t
        count = torch.full((1,), len(x), dtype=x.dtype, device=x.device)
        row = torch.cat([angles.cos().sum(0).flatten(), angles.sin().sum(0).flatten(), _residues(seed, x), count])
        row = row.to(dtype_of_messages(x, group))
        total = sent(name, partial(all_reduce, group=group, grad_placement="replicate"), row, row.requires_grad, group)
        count = total[-1].detach()
        check_rows(name, len(x), count, 1)
        sums, residues = total[: -2 * len(_PRIMES) - 1], total[-2 * len(_PRIMES) - 1 : -1].detach()
        cosine, sine = (sums / count).view(2, num_slices, num_points - 1)
        statistics = ((cosine - gaussian).square() + sine.square()) @ weights.to(count) * count
        loss = _of_one_seed(statistics.mean(), residues, name, seed, x.shape[1], get_world_size(group))
        return returned(share_of_replicated(loss, group), rank_reduction, group).to(x.dtype)


class SIGRegLoss(LossModule, of=sigreg_loss):
    """`sigreg_loss` as a module; its arguments are the options, `forward` takes the features and the seed.

    >>> import diffcoll as dc
    >>> dc.nn.SIGRegLoss(num_slices=1024)
    SIGRegLoss(num_slices=1024, num_points=17, t_max=3.0, rank_reduction='mean')
    """

    def forward(self, features: Tensor, *, seed: int) -> Tensor:
        """Return the loss, as `sigreg_loss` does."""
        return sigreg_loss(features, seed=seed, **self.options)


def _checked_seed(name: str, seed: object) -> int:
    """Return the seed."""
    number = expect.integer(name, "seed", seed, 0)
    if number >= 1 << 63:
        raise ValueError(message(name, "seed", number, "an integer below 2⁶³", "the number of the step is one"))
    return number


def _residues(seed: int, x: Tensor) -> Tensor:
    """Return residues of the seed and of D, and their squares, small integers: sums over many ranks are exact."""
    sums = [seed % prime + 8 * x.shape[1] % prime for prime in _PRIMES]
    residues = [torch.full((1,), residue, dtype=x.dtype, device=x.device) for residue in sums]
    return torch.cat([*residues, *(residue.square() for residue in residues)])


def _of_one_seed(loss: Tensor, summed: Tensor, name: str, seed: int, d: int, n: int) -> Tensor:
    """Return the loss; raise, on all ranks, unless N Σ r² = (Σ r)² for all residues, which are equal then."""
    once, squared = summed.round().long().view(2, len(_PRIMES))
    same = (n * squared == once.square()).all()
    if torch.compiler.is_compiling() or is_traced(same):
        return asserted(
            loss, same, f"{name}: seed: the ranks have different seeds or D, expected the same on all ranks"
        )
    if not bool(without_transforms(same).all()):
        remedy = "pass the number of the step, or a number that rank 0 has sent to all; D is the features' shape[1]"
        raise CollectiveMismatchError(message(name, "seed", f"{seed}, with D = {d}", "the same on all ranks", remedy))
    return loss


def _directions(seed: int, slices: int, x: Tensor) -> Tensor:
    """Return random unit vectors as columns, (D, slices), of the dtype and on the device of x."""
    if torch.compiler.is_compiling() or is_traced(x):
        drawn: Tensor = torch.ops.diffcoll.directions(seed, x.shape[1], slices)
    else:
        with unobserved():  # vmap refuses random numbers
            drawn = _drawn(seed, x.shape[1], slices)
            if not x.is_cpu and can_pin(x.device.type):  # from other memory the copy would block the host
                drawn = drawn.pin_memory().to(x.device, non_blocking=True)
    drawn = drawn.to(x.device, x.dtype)
    return drawn / drawn.square().sum(0).sqrt()


def _drawn(seed: int, size: int, slices: int) -> Tensor:
    """Return normal numbers, (size, slices).

    On the CPU: PyTorch does not promise equal numbers on different devices.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(size, slices, generator=generator, dtype=torch.float32, device="cpu")


def _shape(seed: int, size: int, slices: int) -> Tensor:
    return torch.empty(size, slices, dtype=torch.float32, device="cpu")


# Dynamo cannot make a generator.
_op = torch.library.custom_op(
    "diffcoll::directions", _drawn, mutates_args=(), schema="(SymInt seed, SymInt size, SymInt slices) -> Tensor"
)
_op.register_fake(_shape)
