"""The two laws: a loss of the whole batch, the same number on every rank.

forward   L = f(Σ_r s_r)                        the same on every rank
adjoint   gs_r = Σ_r ∂f/∂s · gL_r               every rank backpropagates its own L, and the sums' gradients are added
          gs_r = ∂f/∂s · Σ_r gL_r               if f captures no tensor that is trained: one number is sent

The mean over ranks of the gradients (DDP, `GradientAverager`) is then that of L. A parameter that f captures has the
whole gradient on each rank by the first adjoint, and N times as much by the second. A loss that is a mean over all
ranks' rows is the same with f(t, n) = t / n; its rows may use what was gathered from all ranks.

note  notes/training/losses.md
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.collectives.sum_gradients import sum_gradients
from diffcoll.core.errors import message
from diffcoll.core.groups import get_world_size
from diffcoll.core.torch_private.tracing import constant_in_graphs, unobserved
from diffcoll.engines.types import Group

#: Make a tensor require a gradient; Dynamo and torch.func refuse a new leaf.
_LEAVES: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def loss_of_sums(f: Callable[..., Tensor], *sums: Tensor, group: Group = None) -> Tensor:
    """Losses that are no mean over rows (Dice, a correlation, a metric): f of sums over the rows of all ranks.

    What torchmetrics computes from states with `dist_reduce_fx="sum"`, as a loss. One all_reduce of the sums in
    forward, one of their gradients in backward.

    >>> import torch, diffcoll as dc
    >>> def recall(hits, positives):
    ...     return 1 - hits / positives
    >>> def loss(p, t):
    ...     return dc.nn.functional.loss_of_sums(recall, (p * t).sum(), t.sum())
    >>> p, t = torch.tensor([0.9, 0.8, 0.6, 0.3]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    >>> loss(p, t)
    tensor(0.3333)
    >>> from diffcoll.testing import simulate
    >>> [round(value.item(), 4) for value in simulate(loss, p.split([3, 1]), t.split([3, 1]))]
    [0.3333, 0.3333]

    Args:
        f: from the sums over ranks to the loss, 0-d; without collectives. Every rank computes it. It may use
            parameters, such as a learned variance, if their gradients are averaged as the model's.
        sums: this rank's, floating-point, of any shapes and of one dtype; each has one shape on all ranks.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        f of the sums over ranks: the loss of the whole batch, the same number on every rank. Its gradient is that of
        the whole batch after a *mean* over ranks (DDP, `GradientAverager`). If gradients are summed, divide it by N.
        Of several ranks it requires a gradient, also where no sum does, as other ranks' may; not under `no_grad`.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/training/losses.md.
    """
    if not callable(f):
        got, expected = type(f).__name__, "a function of the sums"
        raise TypeError(message("loss_of_sums", "f", got, expected, "it comes first: loss_of_sums(f, *sums)"))
    if get_world_size(group) == 1:
        return f(*sums)
    if not any(s.requires_grad for s in sums):
        sums = (trained(sums[0]), *sums[1:])
    return f(*all_reduce(sums, group=group))


def of_sums(f: Callable[..., Tensor], *sums: Tensor, group: Group = None) -> Tensor:
    """Return `loss_of_sums` of an f that captures no tensor that is trained; its backward sends one number."""
    if get_world_size(group) == 1:
        return f(*sums)
    loss = f(*all_reduce(sums, group=group, grad_placement="replicate"))
    return sum_gradients(loss if loss.requires_grad else trained(loss), group=group)


def trained(x: Tensor) -> Tensor:
    """Return x as a tensor that requires a gradient, where one is recorded: every rank runs the same backward."""
    return x + _leaf(x.device, x.dtype).sum() if torch.is_grad_enabled() else x


@constant_in_graphs
def _leaf(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return an empty leaf, made once."""
    if (device, dtype) not in _LEAVES:
        with unobserved():
            _LEAVES[device, dtype] = torch.nn.Parameter(torch.empty(0, device=device, dtype=dtype))
    return _LEAVES[device, dtype]
