"""One rank's tensor, of which every rank receives its block.

forward   y_r    = x_src[block r]                      blocks along dim
adjoint   gx_src = [gy_0 … gy_{N-1}]; empty elsewhere  gather
note      notes/scatter.md                             truth  diffcoll.truth.scatter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.collectives import gather
from diffcoll.core.arguments import Group, Parts
from diffcoll.core.blocks import cut
from diffcoll.core.call import Call, perform
from diffcoll.core.errors import CollectiveMismatchError
from diffcoll.core.linear import Linear, then

__all__ = ["Scatter", "scatter"]


@dataclass(frozen=True)
class Scatter(Linear):
    """y_r = x_src[block r], with sizes[r] the size of block r along dim; x is of size 0 along dim elsewhere."""

    name: ClassVar[str] = "scatter"
    src: int
    dim: int
    sizes: tuple[int, ...]

    @override
    def start(self, x: Tensor) -> Callable[[], Tensor]:
        n, rank = self.engine.size, self.engine.rank
        y = x.new_empty(self.shape(x.shape))
        blocks = cut(x, self.dim, self.sizes) if rank == self.src else [None] * n
        return then(self.engine.exchange(blocks, [y if s == self.src else None for s in range(n)]), y)

    @override
    def shape(self, x: Sequence[int]) -> list[int]:
        return [*x[: self.dim], self.sizes[self.engine.rank], *x[self.dim + 1 :]]

    @property
    def adjoint(self) -> Linear:
        """gx_src = [gy_0 … gy_{N-1}]; empty elsewhere."""
        return gather.Gather(self.engine, self.src, self.dim, self.sizes)


def scatter(x: Tensor | None, src: int = 0, dim: int = 0, group: Group = None, *, sizes: Parts = None) -> Tensor:
    """Rank src's x, of which rank r receives block r along a dimension.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(dc.scatter, [torch.tensor([1.0, 2.0]), None])
    [tensor([1.]), tensor([2.])]

    Args:
        x: at least one dimension; any dtype. On the ranks other than src it may be None; what is passed there
            takes part in the graph, with gradient zero. None takes part in `backward()`, but not in
            `torch.autograd.grad` or a `torch.func` transform, which ask for chosen inputs: pass a tensor.
            Under `torch.compile` x is a tensor of one shape on all ranks.
        src: the rank within the group that sends.
        dim: the dimension to cut along.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        sizes: None: N equal blocks. A list: each rank's size, zeros allowed. Both `dim` and `sizes` count as
            rank src gives them; the others learn them from there, in a small message of its own.

    Returns:
        A new tensor, dtype of rank src's x, and its shape but for this rank's size along `dim`.

    Raises:
        TypeError, ValueError: an argument is wrong on its own.
        CollectiveMismatchError: on the other ranks, when the arguments are wrong on rank src.

    Source: notes/scatter.md.
    """
    y: Tensor = perform(_scatter, "scatter", x, group, src=src, dim=dim, sizes=sizes)
    return y


def _scatter(call: Call, x: Tensor | None) -> Any:
    root = call.root("src")
    if torch.compiler.is_compiling():
        return _compiled(call, root, x)
    if call.engine.rank == root:
        try:
            tensor = call.tensor(x)
            d = call.dim("dim", tensor)
            parts = call.sizes_of_parts(tensor, d)
        except (TypeError, ValueError):
            call.broadcast_numbers(root, [])
            raise
        call.broadcast_numbers(root, _header(tensor, d, parts))
    else:
        numbers = call.broadcast_numbers(root, None)
        if not numbers:
            raise CollectiveMismatchError(f"scatter: the arguments are wrong on rank {root}, see the error there")
        d, parts, tensor = _empty(numbers, call.engine.size, x)
    call.arguments.update(dim=d, sizes=list(parts))  # as they count
    return call.submit(Scatter(call.engine, root, d, parts), tensor)


def _compiled(call: Call, root: int, x: Tensor | None) -> Any:
    """Scatter where shapes must be known beforehand, so that src cannot tell them."""
    if x is None:
        remedy = "pass a tensor of the shape that rank src has, whose values do not count"
        raise call.error("x", "a tensor on every rank under torch.compile", remedy, got="None")
    tensor = call.tensor(x)
    d = call.dim("dim", tensor)
    parts = call.sizes_of_parts(tensor, d)
    mine = tensor if call.engine.rank == root else tensor.narrow(d, 0, 0)
    return call.submit(Scatter(call.engine, root, d, parts), mine)


# ── rank src tells the others what comes ─────────────────────────────────────────────────────────────────

_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "npu")
_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)


def _header(x: Tensor, dim: int, sizes: tuple[int, ...]) -> list[int]:
    device = _DEVICES.index(x.device.type) if x.device.type in _DEVICES else 0
    return [_DTYPES.index(x.dtype), device, x.requires_grad, dim, x.dim(), *x.shape, *sizes]


def _empty(header: list[int], n: int, x: Tensor | None) -> tuple[int, tuple[int, ...], Tensor]:
    """The dimension, the sizes, and this rank's x: nothing of it along the dimension."""
    dtype, device, requires_grad, dim, dims, *rest = header
    shape, sizes = rest[:dims], rest[dims : dims + n]
    shape[dim] = 0
    if x is not None and (x.requires_grad or not requires_grad):
        x = x if requires_grad or not x.requires_grad else x.detach()
        return dim, tuple(sizes), x.flatten()[:0].to(_DTYPES[dtype]).reshape(shape)
    # A leaf of its own, so that this rank's backward takes part in the gather.
    none = torch.empty(shape, dtype=_DTYPES[dtype], device=_DEVICES[device])
    return dim, tuple(sizes), none.requires_grad_() if requires_grad else none
