"""The rows next to this rank's block, of a tensor that is split along a dimension.

forward   y_r = [last `left` rows of x_{r−1}, x_r, first `right` rows of x_{r+1}]     two shifts
adjoint   gx_r = the shifts reversed, added to the gradient of the block
note      notes/collectives/halo_exchange.md
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from diffcoll.collectives.shift import shift
from diffcoll.core import expect
from diffcoll.core.arguments import Call
from diffcoll.core.blocks import concatenated
from diffcoll.core.errors import message
from diffcoll.engines.types import Group

PaddingMode = Literal["zeros", "circular"]

_NAME = "halo_exchange"


def halo_exchange(
    x: Tensor,
    dim: int,
    left: int,
    right: int,
    *,
    padding_mode: PaddingMode | None = "zeros",
    group: Group = None,
) -> Tensor:
    """Convolutions and stencils on a tensor that is split over ranks: add the neighbours' rows at both ends.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> xs = [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5])]
    >>> simulate(lambda x: dc.halo_exchange(x, 0, 1, 1), xs)
    [tensor([0, 1, 2, 3]), tensor([2, 3, 4]), tensor([3, 4, 5, 0])]

    Args:
        x: this rank's block, at least `left` and `right` rows along `dim`; any dtype. The number of rows may differ
            from rank to rank, the other dimensions are the same.
        dim: the dimension along which the tensor is split.
        left: how many rows to add before the block.
        right: how many rows to add after it. For a convolution with kernel size k: left + right = k − 1.
        padding_mode: what the first rank gets before its block, and the last one after it: "zeros", or "circular", rows
            of the other end. None: nothing, so these two get fewer rows.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        A new tensor of x's dtype, of `left + n + right` rows along `dim`. The gradient of a row that several ranks
        have received is the sum of theirs. As with any collective, every rank must run backward.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/halo_exchange.md.
    """
    call = Call(_NAME, x, group, False, {"dim": dim})
    d, engine = call.dim("dim", x), call.engine
    left, right = expect.integer(_NAME, "left", left, least=0), expect.integer(_NAME, "right", right, least=0)
    expect.choice(_NAME, "padding_mode", padding_mode, ("zeros", "circular", None))
    rows = x.shape[d]
    if rows < max(left, right):
        expected = f"at least {max(left, right)} rows along dim {d}, of which the neighbours get {left} and {right}"
        raise ValueError(message(_NAME, "x", f"{rows} rows", expected, "split the tensor over fewer ranks"))
    wrap, parts = padding_mode == "circular", [x]
    if left:
        before = shift(x.narrow(d, rows - left, left), 1, wrap=wrap, group=group)
        nothing = padding_mode is None and engine.rank == 0
        parts.insert(0, before.narrow(d, 0, 0) if nothing else before)  # which stays in the graph
    if right:
        after = shift(x.narrow(d, 0, right), -1, wrap=wrap, group=group)
        nothing = padding_mode is None and engine.rank == engine.size - 1
        parts.append(after.narrow(d, 0, 0) if nothing else after)
    return concatenated(parts, d) if len(parts) > 1 else x.clone()
