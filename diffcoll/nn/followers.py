"""Ranks that need no gradient, where other ranks need one.

All ranks send the same messages in backward only if all record the same collectives. Which of its tensors require a
gradient is local to a rank, so each rank sends one number with a message of the forward: 1 if it needs a gradient. A
rank that needs none, a follower, records its collectives before it has the numbers of the others, and drops its graph
if these are all 0. Only a follower reads them, which on a GPU makes the host wait.

Where code is traced or compiled, a number has no value, and a rank cannot follow. In joint_backward it need not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from diffcoll.core._torch import is_traced
from diffcoll.core.arguments import Group
from diffcoll.core.groups import collectives_only

__all__ = ["bit", "follows", "needs_gradient", "sent"]


def needs_gradient(*xs: Tensor | None) -> bool:
    """Whether this rank needs the gradient of one of xs."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in xs)


def bit(needs: bool, like: Tensor) -> Tensor:
    """Return the number that a rank sends, of shape (1,)."""
    return torch.full((1,), float(needs), dtype=like.dtype, device=like.device)


def follows(group: Group, *xs: Tensor) -> bool:
    """Whether this rank needs no gradient of xs, but runs backward if another rank needs one."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or needs_gradient(*xs):
        return False
    return not collectives_only(group) and not any(map(is_traced, xs))


def sent(collective: Callable[[Tensor], Tensor], row: Tensor, needs: bool, group: Group) -> Tensor:
    """Return collective(row), recorded on every rank if a rank needs a gradient.

    Args:
        collective: sums rows, or stacks them in dim 0.
        row: 1-d.
        needs: whether this rank needs a gradient, of the row or of what is computed from the result.
        group: of the collective.
    """
    follower = follows(group, row) or (needs and not row.requires_grad and not collectives_only(group))
    y = collective(torch.cat([row.detach().requires_grad_() if follower else row, bit(needs, row)]))
    found: Tensor = y[..., :-1]
    return found.detach() if follower and not needs and not y.detach()[..., -1].any() else found
