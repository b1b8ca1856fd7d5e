"""This rank's block of a replicated tensor: identity on a slice forward, all-gather backward.

forward   y_r  = x_r[block r]            x replicated
adjoint   gx_r = [gy_0 … gy_{N-1}]       all_gather, replicated
note      notes/collectives/collectives.md#split   truth  diffcoll.truth.split
"""

from __future__ import annotations

from torch import Tensor

from diffcoll.core.arguments import Call, Parts
from diffcoll.core.maps import Split
from diffcoll.engines.types import Group


def split(x: Tensor, dim: int = 0, *, group: Group = None, sizes: Parts = None) -> Tensor:
    """Return this rank's block of x, which is equal on all ranks; the backward all-gathers the gradient.

    No communication in the forward.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> simulate(lambda x: dc.split(x, sizes=[1, 2]), [x, x.clone()])
    [tensor([1.]), tensor([2., 3.])]

    Args:
        x: at least one dimension; any dtype; equal on all ranks.
        dim: the dimension to cut along.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        sizes: None: N equal blocks. A list, the same on all ranks: each rank's size, zeros allowed.

    Returns:
        A new tensor (not a view) with the dtype of x, and its shape except for this rank's size along `dim`.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/collectives.md#split.
    """
    call = Call("split", x, group, False, {"dim": dim, "sizes": sizes})
    d = call.dim("dim", x)
    y: Tensor = call.perform(Split(call.engine, d, call.sizes_of_parts(x, d)), x)
    return y
