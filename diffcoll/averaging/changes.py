"""Detects gradients and parameters that are modified within a backward pass, before the gradients are averaged.

note  notes/averaging.md
"""

from __future__ import annotations

from collections.abc import Sequence

from diffcoll.averaging.buckets import Parameter
from diffcoll.averaging.parameters import find_ddp
from diffcoll.averaging.state import NAME, Backward
from diffcoll.core.torch_private.tensors import versions

_DDP = (
    "DistributedDataParallel averages this parameter, too; remove one of the two: call detach(), or use the module "
    "without DistributedDataParallel"
)


def refuse_changes(trainable: Sequence[Parameter], backward: Backward) -> None:
    """Raise if a gradient or its parameter was modified in this pass after the gradient was accumulated."""
    values = versions([p.tensor for p in trainable])
    for p, before, now in zip(trainable, backward.value_versions, values, strict=True):
        if p.pass_number != backward.number:
            continue
        if p.tensor.grad is None:
            why = "its gradient was set to None"
        elif p.is_in_bucket and p.has_changed():
            why = "its gradient was changed"
        elif now != (p.value_version if p.has_pre_hook else before):
            why = "its value was changed"
        else:
            continue
        if find_ddp(q.tensor for q in trainable):
            raise RuntimeError(f"{NAME}: {p.name}: {_DDP}")
        raise RuntimeError(
            f"{NAME}: {p.name}: {why} in backward, before it was averaged, as by an optimizer that steps within "
            "backward: its step would differ between ranks; step after backward, or change gradients in hooks of "
            "the tensor, p.register_hook(…)"
        )


def refuse_second_average(trainable: Sequence[Parameter]) -> None:
    """Raise if DistributedDataParallel has averaged the gradients again; its callback may run after the averager's."""
    changed = next((p for p in trainable if p.reduced is not None and p.has_changed()), None)
    if changed and find_ddp(q.tensor for q in trainable):
        raise RuntimeError(f"{NAME}: {changed.name}: {_DDP}")
