"""SIGReg, LeJEPA's regularizer: the rows of all ranks are compared with a Gaussian, along random directions.

    S_mk = Σ_r Σ_b exp(i t_k a_m · z_b);   L = B · mean over m of Σ_k w_k |S_mk / B − exp(−t_k²/2)|²

note  notes/training/decorrelation.md#sigreg
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffcoll.core import check_mode, expect
from diffcoll.core.errors import message, user_line
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.tracing import is_traced, unobserved
from diffcoll.engines.devices import can_pin
from diffcoll.engines.types import Group
from diffcoll.nn.arguments import check_rows, in_full_precision, without_autocast
from diffcoll.nn.whole import loss_of_sums


def sigreg_loss(
    features: Tensor,
    *,
    seed: int,
    num_slices: int = 256,
    num_points: int = 17,
    t_max: float = 3.0,
    group: Group = None,
) -> Tensor:
    """SIGReg of the whole batch: B ∫ |φ(t) − exp(−t²/2)|² exp(−t²/2) dt, averaged over random directions.

    φ is the empirical characteristic function of a·z over the B rows z of all ranks, φ(t) = Σ exp(i t a·z) / B, for a
    random unit vector a; the loss is the Epps–Pulley statistic of normality. The integral is over [−t_max, t_max], by
    the trapezoidal rule with `num_points` points on [0, t_max], doubled since the integrand is even. As published, the
    number of rows multiplies: twice as many rows of the same distribution give about twice the loss. The ranks send
    2 · num_slices · (num_points − 1) + 1 numbers in the forward and one number in the backward.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> z = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double()
    >>> for value in simulate(lambda z: dc.nn.functional.sigreg_loss(z, seed=0), z.split([5, 3])):
    ...     torch.testing.assert_close(value, dc.nn.functional.sigreg_loss(z, seed=0))

    Args:
        features: of this rank's samples, (b, D), of float16, bfloat16, float32 or float64; b may differ between ranks,
            and be 0, D is the same. Half precision is computed in float32, also under autocast. Not normalized.
        seed: of the random directions, an integer from 0 to 2⁶³ − 1, the same on all ranks, which check mode compares;
            for new directions in each step, the number of the step. PyTorch's random numbers are not changed.
        num_slices: number of directions.
        num_points: number of points, 0 and t_max included, at least 2.
        t_max: the largest t, above 0.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        The loss of the whole batch, 0-d, the same number on every rank, of float32, or float64 if the features are; NaN
        if no rank has a row. Its gradient is that of the whole batch after a *mean* over ranks (DDP,
        `GradientAverager`).

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/training/decorrelation.md#sigreg.
    """
    name = "sigreg_loss"
    check_rows(name, "features", features)
    if expect.integer(name, "seed", seed, 0) >= 1 << 63:
        raise ValueError(message(name, "seed", seed, "an integer below 2⁶³", "the number of the step is one"))
    expect.integer(name, "num_slices", num_slices, 1)
    expect.integer(name, "num_points", num_points, 2)
    if not expect.is_number(t_max) or not 0 < t_max < torch.inf:
        raise ValueError(message(name, "t_max", repr(t_max), "a number above 0", "the published code has 3"))
    _compare(name, group, seed=seed, D=features.shape[1], num_slices=num_slices, num_points=num_points)
    (x,) = in_full_precision(name, features=features)
    with without_autocast(x):
        t = torch.linspace(0, t_max, num_points, dtype=x.dtype, device=x.device)[1:]  # at 0 both functions are 1
        gaussian = (-t.square() / 2).exp()
        weights = gaussian * (2 * t_max / (num_points - 1))
        weights = torch.cat([weights[:-1], weights[-1:] / 2])

        def of_sums(cosines: Tensor, sines: Tensor, count: Tensor) -> Tensor:
            distances = (cosines / count - gaussian).square() + (sines / count).square()
            return (distances @ weights).mean() * count

        angles = (x @ _directions(seed, num_slices, x)).unsqueeze(2) * t
        count = torch.full((), x.shape[0], dtype=x.dtype, device=x.device)
        return loss_of_sums(of_sums, angles.cos().sum(0), angles.sin().sum(0), count, group=group)


def _compare(name: str, group: Group, **facts: int) -> None:
    """In check mode, raise on all ranks unless these are equal: ranks with other directions send the same messages."""
    if not torch.compiler.is_compiling() and check_mode.is_on():
        text = f"{name}({', '.join(f'{key}={value}' for key, value in facts.items())}) at {user_line()}"
        check_mode.compare(resolve(group, name), (name, facts), text)


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
    """Return normal numbers, (size, slices), drawn on the CPU: PyTorch does not promise equal ones elsewhere."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(size, slices, generator=generator, dtype=torch.float32, device="cpu")


# Dynamo cannot make a generator.
_op = torch.library.custom_op(
    "diffcoll::directions", _drawn, mutates_args=(), schema="(SymInt seed, SymInt size, SymInt slices) -> Tensor"
)
_op.register_fake(lambda seed, size, slices: torch.empty(size, slices, dtype=torch.float32, device="cpu"))
