"""Where gradients lie while they travel: side by side, in the order in which they come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffcoll._torch import version
from diffcoll.engines.engine import WIDER, Engine, Wait, done

__all__ = ["Bucket", "Parameter", "cut", "is_channels_last"]

#: Gradients of fewer bytes are put in their places all at once: they are many, and calls take longer than copies.
SMALL = 64 << 10


class Parameter:
    """One parameter, its place in a bucket, and what has become of its gradient in this step."""

    bucket: Bucket
    place: Tensor
    #: Whether the place can be the gradient: not if it travels in another dtype.
    shares: bool
    #: Whether it is put in its place together with others.
    is_small: bool

    def __init__(self, index: int, name: str, tensor: Tensor) -> None:
        self.index = index
        self.name = name
        self.tensor = tensor
        self.hooks: list[Any] = []
        self.node: Any = None  # what accumulates its gradient, kept alive for its hook
        self.turn = -1  # of the backward in which its gradient came last
        self.reduced: Tensor | None = None  # its gradient, if that has been reduced
        self.kept: Tensor | None = None  # a reduced gradient to which this step's is to be added
        self.added: Tensor | None = None  # the gradient of this step so far, and how often it had been changed
        self.version = 0
        self.is_put = self.is_used = False

    def put(self, scale: float) -> None:
        """Put scale times this rank's gradient in its place, which becomes the gradient; nothing is zero."""
        grad = self.tensor.grad
        self.is_put, self.is_used = True, grad is not None
        if grad is None or scale == 0:
            self.place.zero_()
        else:
            _scaled(_as(self.place.dtype, grad), scale, self.place)
        if self.is_used and self.shares:
            self.tensor.grad = self.place

    def put_aside(self) -> None:
        """Keep what has been reduced from being reduced again: what comes now is to be added to it."""
        assert self.tensor.grad is not None
        self.kept = self.tensor.grad.clone()
        self.tensor.grad = None

    def recall(self) -> bool:
        """Forget what was put aside if the user has zeroed it; False: who knows what has been done to the gradient."""
        grad = self.tensor.grad
        if grad is None:
            self.kept = None
        return grad is None or self.kept is None or (self.added is grad and version(grad) == self.version)

    def note(self) -> None:
        """Remember the gradient as it is, after more was added."""
        self.added = grad = self.tensor.grad
        self.version = 0 if grad is None else version(grad)

    def take(self) -> Tensor:
        """Make what lies in its place the gradient."""
        if self.shares:
            grad = self.place
        else:
            grad = torch.empty_like(self.tensor) if self.tensor.grad is None else self.tensor.grad
            _as(self.place.dtype, grad).copy_(self.place)
        self.tensor.grad = grad
        return grad


class Bucket:
    """Gradients that travel in one message; behind them `tail` numbers more."""

    def __init__(
        self, parameters: list[Parameter], dtype: torch.dtype, device: torch.device, engine: Engine, tail: int = 0
    ) -> None:
        self.parameters = parameters
        self.pending = 0
        self.wait: Wait = done
        # Small ones first, by facts that are equal on all ranks: their order is that of the message. Complex numbers
        # that travel in another dtype lie as pairs of real ones.
        for p in parameters:
            p.is_small = p.tensor.dtype == dtype and p.tensor.nbytes < SMALL and not is_channels_last(p.tensor)
        parameters = sorted(parameters, key=lambda p: not p.is_small)
        self._small = [p for p in parameters if p.is_small]
        parts = [_as(dtype, p.tensor.detach()) for p in parameters]
        sizes = [part.numel() for part in parts]
        memory = torch.empty(sum(sizes) + tail, dtype=dtype, device=device)
        self.row = torch.view_as_real(memory).view(-1) if dtype.is_complex else memory  # what is reduced
        self.overlaps = engine.overlaps(self.row)
        self.body, self.tail = memory.split_with_sizes([sum(sizes), tail])
        self._row_of_small = memory[: sum(sizes[: len(self._small)])]
        for p, part, place in zip(parameters, parts, self.body.split_with_sizes(sizes), strict=True):
            p.bucket, p.place, p.shares = self, _laid_out(place, part), p.tensor.dtype == dtype

    @property
    def ready(self) -> bool:
        """Whether all its gradients are there, and it can travel while backward goes on."""
        return self.pending == 0 and self.overlaps

    def put_small(self, scale: float) -> None:
        """Put small gradients in their places at once, if all are there, and lie elsewhere as they lie here."""
        grads = [p.tensor.grad for p in self._small]
        if scale == 0 or not grads:
            return
        for p, grad in zip(self._small, grads, strict=True):
            if p.is_put or grad is None or grad is p.place or not grad.is_contiguous() or grad.is_conj():
                return
        torch.cat([grad.view(-1) for grad in grads], out=self._row_of_small)  # type: ignore[union-attr]
        if scale != 1:
            self._row_of_small *= scale
        for p in self._small:
            p.is_put = p.is_used = True
            p.tensor.grad = p.place

    def divide(self, divisor: Tensor) -> None:
        """Divide what has been reduced; half precision need not know the divisor."""
        wide = WIDER.get(self.body.dtype, self.body.dtype)
        body = self.body.to(wide)
        body /= divisor.to(body)
        if body is not self.body:
            self.body.copy_(body)

    def __str__(self) -> str:
        names = [p.name for p in self.parameters]
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}, {len(names)} parameters"


def cut(
    order: list[Parameter], nbytes: float, comm_dtype: torch.dtype | None, engine: Engine, tail: int
) -> list[Bucket]:
    """Cut parameters into buckets of at most nbytes, in the order in which their gradients come.

    Returns:
        The buckets in the order in which they travel; the last one has room for `tail` numbers at its end.
    """
    made: list[tuple[list[Parameter], torch.dtype, torch.device]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Parameter], float]] = {}
    for p in order:
        dtype = p.tensor.dtype
        if comm_dtype is not None and comm_dtype != dtype.to_real():
            dtype = comm_dtype
        key = dtype, p.tensor.device
        parameters, before = filling.pop(key, ([], 0.0))
        more = _as(dtype, p.tensor).numel() * dtype.itemsize
        if parameters and before + more > nbytes:
            made.append((parameters, *key))
            parameters, before = [], 0.0
        filling[key] = ([*parameters, p], before + more)
    # The last one has the tail. A weight is no number of half precision, which is why that may go by itself.
    rest = [(parameters, *key) for key, (parameters, _) in filling.items()]
    device = order[-1].tensor.device if order else engine.control_device
    alone: tuple[list[Parameter], torch.dtype, torch.device] = [], torch.float32, device
    fine = [r for r in reversed(rest) if torch.finfo(r[1]).eps < 1e-6]
    end = min(fine, key=lambda r: torch.finfo(r[1]).eps, default=alone)
    buckets = [Bucket(*c, engine) for c in (*made, *(r for r in rest if r is not end))]
    buckets.sort(key=lambda bucket: not bucket.overlaps)  # those that make the ranks wait go at the end of backward
    return [*buckets, Bucket(*end, engine, tail)]


def is_channels_last(x: Tensor) -> bool:
    """Whether x fills a row of memory in another order than that of its dims."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return not x.is_contiguous() and x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def _as(dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return x, complex numbers as pairs if dtype is real."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() and not dtype.is_complex else x


def _laid_out(row: Tensor, like: Tensor) -> Tensor:
    """Return a row of numbers in the shape of a tensor, and in its order."""
    return (
        row.as_strided(like.shape, like.stride(), row.storage_offset())
        if is_channels_last(like)
        else row.view(like.shape)
    )


def _scaled(x: Tensor, scale: float, out: Tensor) -> None:
    """out ← scale · x, in the wider of their dtypes."""
    if out.dtype.itemsize > x.dtype.itemsize or scale == 1:
        out.copy_(x)
        x = out
    if scale != 1:
        torch.mul(x, scale, out=out)
