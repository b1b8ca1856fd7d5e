"""Where gradients lie while they travel: side by side, in the order in which they come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffcoll.core._torch import storage_uses, version
from diffcoll.engines.engine import WIDER, Engine, Wait, done

__all__ = ["Bucket", "Parameter", "cut", "is_channels_last"]

#: Gradients of fewer bytes are put in their places all at once: they are many, and calls take longer than copies.
SMALL = 64 << 10
#: `storage_uses` of a tensor that shares its memory with nothing.
_SOLE_USES = storage_uses(torch.empty(1))


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
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.strides = tensor.stride() if is_channels_last(tensor) else None  # of its place; None: contiguous
        self.hooks: list[Any] = []
        self.node: Any = None  # what accumulates its gradient, kept alive for its hook
        self.turn = -1  # of the backward in which its gradient came last
        self.grad_view: Tensor | None = None  # the view of its place that was made `.grad`
        self.reduced: Tensor | None = None  # its gradient, if that has been reduced
        self.kept: Tensor | None = None  # a reduced gradient to which this step's is to be added
        self.added: Tensor | None = None  # the gradient of this step so far, and how often it had been changed
        self.version = 0
        self.is_put = self.is_used = False
        # The gradient that was put in its place or made of it, and how often that and the value had been changed.
        self.recorded: Tensor | None = None
        self.recorded_version = self.value_version = 0

    def refuse_kind(self, operation: str) -> None:
        """Raise: it is another kind of tensor than at the start, when the ranks agreed on it."""
        was, now = f"{tuple(self.shape)} {self.dtype}", f"{tuple(self.tensor.shape)} {self.tensor.dtype}"
        raise RuntimeError(
            f"{operation}: {self.name}: was {was} when {operation} was attached, and is {now}; "
            f"make the {operation} anew, which takes over"
        )

    def record_gradient(self) -> None:
        """Remember the gradient as it is, to see whether it is changed before backward has ended."""
        self.recorded = grad = self.tensor.grad
        self.recorded_version = 0 if grad is None else version(grad)

    def has_changed(self) -> bool:
        """Whether the gradient is another one than was recorded, or was changed in place."""
        grad = self.tensor.grad
        return grad is not self.recorded or (grad is not None and version(grad) != self.recorded_version)

    def put(self, scale: float) -> None:
        """Copy scale · gradient of this rank to its place, and make a view of that `.grad`; no gradient is zero."""
        grad = self.tensor.grad
        if grad is self.grad_view and grad is not None:
            grad = self.place
        self.is_put, self.is_used = True, grad is not None
        if grad is None or scale == 0:
            self.place.zero_()
        else:
            _scaled(_as(self.place.dtype, grad), scale, self.place)
        if self.is_used and self.shares:
            self.share()
        else:
            self.record_gradient()

    def share(self) -> Tensor:
        """Make a view of the place `.grad`.

        The bucket must be able to see whether anyone still holds it, so it is another tensor in every step. `.data`
        gives it a version counter of its own: what the user does to it is told from what the library does to the place.
        """
        view = self.grad_view
        if view is None or self.tensor.grad is not view:
            view = self.grad_view = self.place.data
            self.tensor.grad = view
        self.recorded, self.recorded_version = view, version(view)
        return view

    def forget_views(self) -> None:
        """Let go of gradients of earlier steps that are no longer `.grad`."""
        grad = self.tensor.grad
        if self.grad_view is not grad:
            self.grad_view = None
        if self.reduced is not grad:
            self.reduced = None
        self.recorded = None

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
        """Make the contents of its place the gradient."""
        if self.shares:
            return self.share()
        grad = self.tensor.grad
        # Autograd may have made a view of another tensor `.grad`, e.g. of the cotangent that the user gave.
        if grad is None or storage_uses(grad) > _SOLE_USES:
            grad = torch.empty_like(self.tensor)
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
            p.bucket, p.shares = self, p.tensor.dtype == dtype
            p.is_small = p.shares and p.tensor.nbytes < SMALL and p.strides is None  # the same on all ranks
        self._sorted = sorted(parameters, key=lambda p: not p.is_small)
        self._small = [p for p in self._sorted if p.is_small]
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._tail = tail
        self.stream: torch.cuda.Stream | None = None
        self._others: set[torch.cuda.Stream] = set()
        self.allocate()
        self.overlaps = engine.overlaps(self.row)

    def allocate(self) -> None:
        """Take memory, and count how often the bucket itself holds it."""
        self._lay_out()
        if self.body.is_cuda:  # memory is safe to use on the stream on which it was allocated
            self.stream = torch.cuda.current_stream(self.body.device)
            self._others.clear()
        self._uses = storage_uses(self.body)

    def _lay_out(self) -> None:
        dtype = self._like.dtype
        parts = [_as(dtype, p.tensor.detach()) for p in self._sorted]
        sizes = [part.numel() for part in parts]
        memory = self._like.new_empty(sum(sizes) + self._tail)
        self.row = torch.view_as_real(memory).view(-1) if dtype.is_complex else memory  # what is reduced
        self.body, self.tail = memory.split_with_sizes([sum(sizes), self._tail])
        self._row_of_small = memory[: sum(sizes[: len(self._small)])]
        for p, part, row in zip(self._sorted, parts, self.body.split_with_sizes(sizes), strict=True):
            strides = p.strides if part.dim() == p.tensor.dim() else None
            p.place, p.grad_view = _laid_out(row, part, strides), None

    def let_go(self) -> None:
        """Take new memory if anyone but `.grad` holds this one: a gradient of an earlier step is never written again.

        Memory shared with other processes is always given up: how many tensors they have of it cannot be known.
        """
        views = 0
        for p in self.parameters:
            p.forget_views()
            views += p.grad_view is not None
        if storage_uses(self.body) > self._uses + views or (
            self.body.is_cpu and self.body.untyped_storage().is_shared()
        ):
            self.allocate()

    def enter_stream(self) -> None:
        """Let the current stream, on which a gradient is accumulated, wait for the bucket's own."""
        assert self.stream is not None
        here = torch.cuda.current_stream(self.body.device)
        if here != self.stream:
            here.wait_stream(self.stream)
            self._others.add(here)

    def join_streams(self) -> None:
        """Let the current stream wait for all gradients: a backend waits for the stream from which it is called."""
        assert self.stream is not None
        for other in self._others:
            self.stream.wait_stream(other)
        self._others.clear()
        here = torch.cuda.current_stream(self.body.device)
        if here != self.stream:
            here.wait_stream(self.stream)

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
            if p.is_put or grad is None or grad is p.grad_view or not grad.is_contiguous() or grad.is_conj():
                return
        torch.cat([grad.view(-1) for grad in grads], out=self._row_of_small)  # type: ignore[union-attr]
        if scale != 1:
            self._row_of_small *= scale
        for p in self._small:
            p.is_put = p.is_used = True
            p.share()

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


def _laid_out(row: Tensor, like: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """Return a row of numbers in the shape of a tensor, and in the order of its strides; None: contiguous."""
    return row.view(like.shape) if strides is None else row.as_strided(like.shape, strides, row.storage_offset())


def _scaled(x: Tensor, scale: float, out: Tensor) -> None:
    """out ← scale · x, in the wider of their dtypes."""
    if out.dtype.itemsize > x.dtype.itemsize or scale == 1:
        out.copy_(x)
        x = out
    if scale != 1:
        torch.mul(x, scale, out=out)
