"""Point-to-point messages along given pairs of ranks.

forward   y_dst  = x_src for each pair (src, dst); 0 where none is received     shape unchanged
adjoint   gx_src = gy_dst; 0 where none was sent                                permute, pairs reversed
note      notes/permute.md                                                      truth  diffcoll.truth.permute
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.core.arguments import Group
from diffcoll.core.call import Call, perform
from diffcoll.core.linear import Linear, then

__all__ = ["Permute", "permute"]


@dataclass(frozen=True)
class Permute(Linear):
    """y_dst = x_src for each pair (src, dst); 0 where none is received."""

    name: ClassVar[str] = "permute"
    pairs: tuple[tuple[int, int], ...]

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        n, rank = self.engine.size, self.engine.rank
        source = next((src for src, dst in self.pairs if dst == rank), None)
        target = next((dst for src, dst in self.pairs if src == rank), None)
        make = torch.zeros_like if source is None else torch.empty_like
        y = make(x, memory_format=torch.contiguous_format)
        sends = [x.contiguous() if s == target else None for s in range(n)]
        return then(self.engine.exchange(sends, [y if s == source else None for s in range(n)]), y)

    @cached_property
    def adjoint(self) -> Linear:
        """gx_src = gy_dst; 0 where none was sent."""
        return Permute(self.engine, tuple((dst, src) for src, dst in self.pairs))


def permute(x: Tensor, pairs: Sequence[tuple[int, int]], group: Group = None) -> Tensor:
    """Send x from src to dst for each pair (src, dst) of ranks.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(lambda x: dc.permute(x, [(0, 1), (1, 2)]), [torch.tensor(float(r)) for r in (5, 6, 7)])
    [tensor(0.), tensor(5.), tensor(6.)]

    Args:
        x: any shape and dtype, the same on all ranks.
        pairs: ranks within the group, the same list on all ranks; each rank at most once as src and at most
            once as dst.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Returns:
        A new tensor, shape and dtype of x: what was sent to this rank, or zeros. The loss must use it on every rank,
            also where it is zero: this rank receives the gradient of what it sent in the backward of its result.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: notes/permute.md.
    """
    y: Tensor = perform(_permute, "permute", x, group, pairs=pairs)
    return y


def _permute(call: Call, x: Tensor) -> Any:
    return call.submit(Permute(call.engine, call.pairs("pairs")), x)
