"""One rank's tensor; every rank receives its block.

forward   y_r    = x_src[block r]                      blocks along dim
adjoint   gx_src = [gy_0 … gy_{N-1}]; empty elsewhere  gather
note      notes/scatter.md                             truth  diffcoll.truth.scatter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    """y_r = x_src[block r], with sizes[r] the size of block r along dim; on other ranks x has size 0 along dim."""

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

    @cached_property
    def adjoint(self) -> Linear:
        """gx_src = [gy_0 … gy_{N-1}]; empty elsewhere."""
        return gather.Gather(self.engine, self.src, self.dim, self.sizes)


def scatter(x: Tensor | None, src: int = 0, dim: int = 0, group: Group = None, *, sizes: Parts = None) -> Tensor:
    """Send block r of rank src's x, along a dimension, to each rank r.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import simulate
    >>> simulate(dc.scatter, [torch.tensor([1.0, 2.0]), None])
    [tensor([1.]), tensor([2.])]

    Args:
        x: at least one dimension; any dtype. On ranks other than src it may be None, or a tensor, whose gradient is
            zero. With None the rank takes part in `backward()`, but not in `torch.autograd.grad` or a `torch.func`
            transform, which differentiate with respect to chosen inputs: pass a tensor there.
            Under `torch.compile` x must be a tensor of the same shape on all ranks.
        src: the rank within the group that sends.
        dim: the dimension to cut along.
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.
        sizes: None: N equal blocks. A list: each rank's size, zeros allowed. `dim` and `sizes` of rank src are used on
            all ranks. It sends them, with shape and dtype, in an additional small message.

    Returns:
        A new tensor with the dtype of rank src's x, and its shape except for this rank's size along `dim`.

    Raises:
        TypeError, ValueError: an argument is invalid.
        CollectiveMismatchError: on the other ranks, if an argument is invalid on rank src.

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
            raise CollectiveMismatchError(f"scatter: an argument is invalid on rank {root}, see the error there")
        d, parts, tensor = _empty(numbers, call.engine.size, x)
    call.arguments.update(dim=d, sizes=list(parts))  # those of rank src
    return call.submit(Scatter(call.engine, root, d, parts), tensor)


def _compiled(call: Call, root: int, x: Tensor | None) -> Any:
    """Scatter under torch.compile: shapes must be known while tracing, so src does not send them."""
    if x is None:
        remedy = "pass a tensor of the shape that rank src has, whose values are not used"
        raise call.error("x", "a tensor on every rank under torch.compile", remedy, got="None")
    tensor = call.tensor(x)
    d = call.dim("dim", tensor)
    parts = call.sizes_of_parts(tensor, d)
    mine = tensor if call.engine.rank == root else tensor.narrow(d, 0, 0)
    return call.submit(Scatter(call.engine, root, d, parts), mine)


# ── the header that rank src sends: dtype, shape, dim and sizes ──────────────────────────────────────────

_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "npu")
_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)


def _header(x: Tensor, dim: int, sizes: tuple[int, ...]) -> list[int]:
    device = _DEVICES.index(x.device.type) if x.device.type in _DEVICES else 0
    return [_DTYPES.index(x.dtype), device, x.requires_grad, dim, x.dim(), *x.shape, *sizes]


def _empty(header: list[int], n: int, x: Tensor | None) -> tuple[int, tuple[int, ...], Tensor]:
    """Return the dimension, the sizes, and this rank's x, of size 0 along the dimension."""
    dtype, device, requires_grad, dim, dims, *rest = header
    shape, sizes = rest[:dims], rest[dims : dims + n]
    shape[dim] = 0
    if x is not None and (x.requires_grad or not requires_grad):
        x = x if requires_grad or not x.requires_grad else x.detach()
        return dim, tuple(sizes), x.flatten()[:0].to(_DTYPES[dtype]).reshape(shape)
    # A new leaf, so that this rank takes part in the gather of the backward.
    none = torch.empty(shape, dtype=_DTYPES[dtype], device=_DEVICES[device])
    return dim, tuple(sizes), none.requires_grad_() if requires_grad else none
