"""A reduction that has begun, and the errors of gradients that were not collected as they must be.

note  notes/averaging.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diffcoll.averaging.buckets import Bucket
from diffcoll.averaging.gradient import Parameter
from diffcoll.averaging.ownership import find_ddp
from diffcoll.averaging.policy import NAME
from diffcoll.core.torch_private.tensors import versions
from diffcoll.engines.engine import Wait

_DDP = (
    "DistributedDataParallel averages this parameter, too; remove one of the two: call detach(), or use the module "
    "without DistributedDataParallel"
)


@dataclass(eq=False)
class Collecting:
    """A reduction that has begun: of a backward pass with the passes nested in it, or of `synchronize`."""

    #: Autograd's graph task ids of the pass and of those nested in it; none in `synchronize`.
    tasks: set[int]
    #: Whether check mode was on when it began.
    is_checked: bool
    #: The graph task id of the outermost pass, at whose end gradients are reduced; -1: not known yet.
    ends_with: int = -1
    #: Whether a nested pass has accumulated a gradient: then nothing is sent before the end.
    is_nested: bool = False
    #: Whether the buckets are prepared; if not, an error has prevented it.
    is_prepared: bool = False
    #: The version of each trainable parameter when the pass began.
    value_versions: list[int] = field(default_factory=list)
    #: Parameters in the order in which their gradients were accumulated.
    collected: dict[Parameter, None] = field(default_factory=dict)
    #: The number of gradients that each bucket waits for.
    pending: dict[Bucket, int] = field(default_factory=dict)
    #: For each parameter whether it counts as used; known when the last bucket is sent.
    used: list[bool] = field(default_factory=list)
    #: One for each bucket that was sent.
    waits: list[Wait] = field(default_factory=list)


def is_used(p: Parameter) -> bool:
    """Whether autograd has accumulated a gradient since the last reduction, or the user has assigned one."""
    grad = p.tensor.grad
    return p.is_accumulated or (grad is not None and grad is not p.reduced and grad is not p.place.view)


def refuse_changes(trainable: Sequence[Parameter], now: Collecting) -> None:
    """Raise if a gradient or its parameter was modified in this pass after the gradient was accumulated."""
    values = versions([p.tensor for p in trainable])
    for p, before, value in zip(trainable, now.value_versions, values, strict=True):
        if p not in now.collected:
            continue
        if p.tensor.grad is None:
            why = "its gradient was set to None"
        elif p.place.is_filled and p.place.has_changed():
            why = "its gradient was changed"
        elif value != (before if p.pre_hook is None else p.value_version):
            why = "its value was changed"
        else:
            continue
        _refuse_ddp(p, trainable)
        raise RuntimeError(
            f"{NAME}: {p.name}: {why} in backward, before it was averaged, as by an optimizer that steps within "
            "backward: its step would differ between ranks; step after backward, or change gradients in hooks of "
            "the tensor, p.register_hook(…)"
        )


def refuse_second_average(trainable: Sequence[Parameter]) -> None:
    """Raise if DistributedDataParallel has averaged the gradients again; its callback may run after the averager's."""
    changed = next((p for p in trainable if p.reduced is not None and p.place.has_changed()), None)
    if changed is not None:
        _refuse_ddp(changed, trainable)


def _refuse_ddp(p: Parameter, trainable: Sequence[Parameter]) -> None:
    if find_ddp(q.tensor for q in trainable):
        raise RuntimeError(f"{NAME}: {p.name}: {_DDP}")


def refuse_unused(trainable: Sequence[Parameter], flags: Sequence[float]) -> None:
    """Raise the names of the parameters that no rank has used; the same on all ranks."""
    names = [p.name for p, flag in zip(trainable, flags, strict=False) if not flag]
    if names:
        raise RuntimeError(
            f"{NAME}: unused: got {len(names)} of {len(trainable)} parameters that no rank's loss has used "
            f'since the last reduction, expected none with unused="error": {", ".join(names)}; use them, freeze '
            "them by requires_grad_(False), or leave them out by ignore=[…]"
        )
