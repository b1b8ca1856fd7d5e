"""Identity forward, all-reduce backward: for a replicated tensor that is used in per-rank computation.

forward   y_r  = x_r               x replicated
adjoint   gx_r = Σ_s gy_s          all_reduce, replicated
note      notes/collectives/collectives.md#sum_gradients   truth  diffcoll.truth.sum_gradients
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from diffcoll.core.arguments import Call, Tree
from diffcoll.core.maps import SumGradients
from diffcoll.core.tree_calls import by_message
from diffcoll.engines.types import Group


def sum_gradients(x: Tree, *, group: Group = None) -> Tree:
    """Return a copy of x, which is equal on all ranks; the backward sums the gradient over ranks.

    For a weight or an activation that all ranks hold and each uses on its own data, or in its own part of a layer.
    Megatron's f and JAX's pvary. No communication in the forward.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import true_gradients
    >>> w = [torch.tensor(2.0, requires_grad=True) for _ in range(2)]  # one weight, a copy on each rank
    >>> true_gradients(lambda w, x: dc.sum_gradients(w) * x, w, [3.0, 4.0])
    [(tensor(7.),), (tensor(7.),)]

    Args:
        x: any shape and dtype, equal on all ranks.
            Or a tree: nested tuples, lists and dicts of such tensors; all leaves of one dtype are sent in one message.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        A copy of x.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/collectives.md#sum_gradients.
    """
    call = Call("sum_gradients", x, group, False, {})
    y: Tree = _of_tensor(call) if isinstance(x, Tensor) else by_message(call, _of_tensor)
    return y


def _of_tensor(call: Call) -> Any:
    return call.perform(SumGradients(call.engine), call.x)
