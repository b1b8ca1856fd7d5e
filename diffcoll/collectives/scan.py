"""Prefix sums over ranks.

forward   y_r  = Σ_{s≤r} x_s         exclusive: s<r; reverse: s≥r (s>r)
adjoint   gx_r = Σ_{s≥r} gy_s        scan, reversed
note      notes/collectives/collectives.md#scan   truth  diffcoll.truth.scan
"""

from __future__ import annotations

from torch import Tensor

from diffcoll.core.arguments import Call
from diffcoll.core.maps import Scan
from diffcoll.engines.types import Group


def scan(x: Tensor, *, group: Group = None, reverse: bool = False, exclusive: bool = False) -> Tensor:
    """Return the inclusive prefix sum over ranks (MPI_Scan): the sum of x on ranks 0 to r.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> xs = [torch.tensor(v) for v in (1.0, 10.0, 100.0)]
    >>> simulate(dc.scan, xs)
    [tensor(1.), tensor(11.), tensor(111.)]
    >>> simulate(lambda x: dc.scan(x, reverse=True, exclusive=True), xs)
    [tensor(110.), tensor(100.), tensor(0.)]

    Args:
        x: any shape, the same on all ranks; any dtype but bool. Half precisions are accumulated in float32.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        reverse: sum over ranks r to N − 1 instead.
        exclusive: do not include this rank's x (MPI_Exscan).

    Returns:
        A new tensor, shape and dtype of x.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/collectives/collectives.md#scan.
    """
    call = Call("scan", x, group, False, {"reverse": reverse, "exclusive": exclusive})
    call.dtype(x, "numbers")
    y: Tensor = call.perform(Scan(call.engine, call.flag("reverse"), call.flag("exclusive")), x)
    return y
