"""Buckets: contiguous memory for gradients that are reduced in one message, in the order of accumulation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from diffcoll.averaging.accumulated import Accumulated, state
from diffcoll.core.torch_private.tensors import is_view, storage_uses
from diffcoll.engines.engine import WIDER, Engine, Wait, done

#: Gradients of fewer bytes are copied into the bucket by one call: for them a call takes longer than the copy.
SMALL = 64 << 10
#: `storage_uses` of a tensor whose storage nothing else references.
_SOLE_USES = storage_uses(torch.empty(1))


class Parameter:
    """One parameter, its place in a bucket, and the state of its gradient in this step."""

    bucket: Bucket
    #: View of the bucket's memory in which the gradient is reduced.
    place: Tensor
    #: Whether `.grad` can be a view of the place: False if gradients are sent in another dtype.
    shares: bool
    #: Whether it is copied into the bucket together with other small gradients.
    is_small: bool

    def __init__(self, index: int, name: str, tensor: Tensor) -> None:
        self.index = index
        self.name = name
        self.tensor = tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.strides = tensor.stride() if is_channels_last(tensor) else None  # of its place; None: contiguous
        self.hooks: list[Any] = []
        self.has_pre_hook = False
        self.reference: weakref.ref[Tensor] | None = None  # makes swap_tensors refuse the parameter, see `Hooks.attach`
        self.pass_number = -1  # number of the backward pass in which its gradient was last accumulated
        self.grad_view: Tensor | None = None  # the view of its place that was assigned to `.grad`
        self.weighted_at = -1  # number of reductions when a gradient was last multiplied by the weight
        self.kept: Tensor | None = None  # `.grad`, if it is a view of the user's memory, which receives the result
        self.reduced: Tensor | None = None  # `.grad` after its reduction
        self.was_replaced = False  # whether a pass has begun with another `.grad` than `reduced`, not accumulated yet
        self.earlier: Tensor | None = None  # a reduced gradient to which the gradient of this step is added at the end
        self.accumulated = (
            Accumulated()
        )  # `.grad` after accumulation, recorded while `earlier` or a weight depends on it
        self.is_in_bucket = self.is_used = False
        self.is_accumulated = False  # whether autograd has accumulated a gradient since the last reduction
        # `.grad` when it was copied to or taken from its place, its state, and the version of the parameter.
        self.recorded: Tensor | None = None
        self.recorded_state = 0, 0
        self.value_version = 0

    def raise_kind_changed(self, operation: str) -> None:
        """Raise: shape or dtype differ from those on which the ranks agreed at construction."""
        was, now = f"{tuple(self.shape)} {self.dtype}", f"{tuple(self.tensor.shape)} {self.tensor.dtype}"
        raise RuntimeError(
            f"{operation}: {self.name}: was {was} when {operation} was attached, and is {now}; "
            f"make a new {operation}, which replaces this one"
        )

    def record_gradient(self) -> None:
        """Record `.grad` and its state, for `has_changed`."""
        self.recorded = self.tensor.grad
        self.recorded_state = state(self.recorded)

    def has_changed(self) -> bool:
        """Whether `.grad` was replaced or modified in place since it was recorded."""
        grad = self.tensor.grad
        return grad is not self.recorded or state(grad) != self.recorded_state

    def is_used_since_reduction(self) -> bool:
        """Whether autograd has accumulated a gradient since the last reduction, or the user has assigned one."""
        grad = self.tensor.grad
        return self.is_accumulated or (grad is not None and grad is not self.reduced and grad is not self.grad_view)

    def put(self, scale: float) -> None:
        """place ← scale · `.grad`, or zeros if `.grad` is None; then make `.grad` a view of the place."""
        grad = self.tensor.grad
        if self.is_view(grad):
            grad = self.place
        self.is_in_bucket, self.is_used = True, grad is not None
        self.kept = grad if grad is not None and grad is not self.place and is_view(grad) else None
        if grad is None or scale == 0:
            self.place.zero_()
        else:
            _scaled(_as(self.place.dtype, grad), scale, self.place)
        if self.is_used and self.shares and self.kept is None:
            self.set_view()
        else:
            self.record_gradient()

    def set_view(self) -> Tensor:
        """Make `.grad` a view of the place.

        The view is a new tensor in every step, so that the bucket can tell whether the user still holds an older one.
        `.data` gives it its own version counter, which the library's writes to the bucket do not increment.
        """
        view = self.grad_view
        if view is None or not self.is_view(self.tensor.grad):
            view = self.grad_view = self.place.data
            self.tensor.grad = view
        self.record_gradient()
        return view

    def is_view(self, grad: Tensor | None) -> bool:
        """Whether a gradient is the view of the place; conversions of the module give the same object other memory."""
        return grad is not None and grad is self.grad_view and grad.is_set_to(self.place)

    def drop_views(self) -> None:
        """Drop references to gradients of earlier steps that are no longer `.grad`."""
        grad = self.tensor.grad
        if self.grad_view is not None and not self.is_view(grad):
            self.grad_view = None
        if self.reduced is not grad:
            self.was_replaced = grad is not None and (self.was_replaced or self.reduced is not None)
            self.reduced = None
        self.recorded = None

    def set_aside(self) -> None:
        """Move a reduced gradient to `earlier`, so that it is not reduced again; it is added back at the end."""
        grad = self.tensor.grad
        assert grad is not None
        if is_view(grad) and not grad.any():
            return
        self.earlier = grad.clone()
        self.zero()
        self.record_accumulated()

    def zero(self) -> None:
        """Set `.grad` to None, or to zeros if it is a view of the user's memory."""
        grad = self.tensor.grad
        if grad is not None and is_view(grad):
            grad.detach().zero_()
        else:
            self.tensor.grad = None

    def record_accumulated(self, is_witness: bool = False) -> None:
        """Record `.grad` after accumulation, for `is_zeroed` and `is_modified`."""
        self.accumulated.record(self.tensor.grad, keeps_copy=self.earlier is not None, is_witness=is_witness)

    def is_zeroed(self) -> bool:
        """Whether `.grad` was set to None, or modified to zeros, since `record_accumulated`."""
        grad = self.tensor.grad
        return grad is None or (self.is_modified() and not grad.any())

    def is_modified(self) -> bool:
        """Whether `.grad` was replaced or modified since `record_accumulated`."""
        return self.accumulated.is_modified(self.tensor.grad)

    def set_gradient(self) -> Tensor:
        """Make `.grad` the contents of the place: a view, or a copy if the dtypes differ or the user has the memory."""
        grad = self.kept
        if grad is not None:
            _as(self.place.dtype, grad.detach()).copy_(self.place)
            self.tensor.grad = grad
            return grad
        if self.shares:
            return self.set_view()
        grad = self.tensor.grad
        # Autograd may have made `.grad` a view of another tensor, e.g. of the cotangent that the user passed.
        if grad is None or storage_uses(grad) > _SOLE_USES:
            grad = torch.empty_like(self.tensor)
        _as(self.place.dtype, grad).copy_(self.place)
        self.tensor.grad = grad
        return grad


class Bucket:
    """Gradients that are reduced in one message, followed by `tail` more numbers."""

    def __init__(
        self, parameters: list[Parameter], dtype: torch.dtype, device: torch.device, engine: Engine, tail: int = 0
    ) -> None:
        self.parameters = parameters
        self.pending = 0
        self.wait: Wait = done
        # Small gradients come first in the message, so `is_small` must depend on facts equal on all ranks only.
        for p in parameters:
            p.bucket, p.shares = self, p.tensor.dtype == dtype
            p.is_small = p.shares and p.tensor.nbytes < SMALL and p.strides is None
        self._sorted = sorted(parameters, key=lambda p: not p.is_small)
        self._small = [p for p in self._sorted if p.is_small]
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._tail = tail
        self.stream: torch.cuda.Stream | None = None
        self._others: set[torch.cuda.Stream] = set()
        self.allocate()
        self.overlaps = engine.overlaps(self.row)

    def allocate(self) -> None:
        """Allocate the memory and count the bucket's own references to it."""
        self._lay_out()
        if self.body.is_cuda:  # without synchronization, memory is safe on its allocation stream only
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
            p.place, p.grad_view = _shaped_view(row, part, strides), None

    def reallocate_if_held(self) -> None:
        """Allocate new memory if anything but `.grad` references the old: gradients that the user holds never change.

        Memory shared with other processes is always replaced, since their references cannot be counted.
        """
        views = 0
        for p in self.parameters:
            p.drop_views()
            views += p.grad_view is not None
        if storage_uses(self.body) > self._uses + views or (
            self.body.is_cpu and self.body.untyped_storage().is_shared()
        ):
            self.allocate()

    def enter_stream(self) -> None:
        """Make the current stream, on which a gradient is accumulated, wait for the bucket's stream."""
        assert self.stream is not None
        here = torch.cuda.current_stream(self.body.device)
        if here != self.stream:
            here.wait_stream(self.stream)
            self._others.add(here)

    def join_streams(self) -> None:
        """Make the current stream wait for all gradients: the backend waits for the current stream only."""
        assert self.stream is not None
        for other in self._others:
            self.stream.wait_stream(other)
        self._others.clear()
        here = torch.cuda.current_stream(self.body.device)
        if here != self.stream:
            here.wait_stream(self.stream)

    @property
    def ready(self) -> bool:
        """Whether all its gradients are accumulated and its reduction overlaps with the backward pass."""
        return self.pending == 0 and self.overlaps

    def put_small(self, scale: float) -> None:
        """Copy all small gradients into the bucket by one call, if all exist, outside the bucket and contiguous."""
        grads = [p.tensor.grad for p in self._small]
        if scale == 0 or not grads:
            return
        for p, grad in zip(self._small, grads, strict=True):
            if p.is_in_bucket or grad is None or grad is p.grad_view or not grad.is_contiguous() or grad.is_conj():
                return
            if is_view(grad):
                return
        torch.cat([grad.view(-1) for grad in grads], out=self._row_of_small)  # type: ignore[union-attr]
        if scale != 1:
            self._row_of_small *= scale
        for p in self._small:
            p.is_in_bucket, p.is_used, p.kept = True, True, None
            p.set_view()

    def divide(self, divisor: Tensor) -> None:
        """Divide the reduced gradients; half precision is divided in float32, which can represent the divisor."""
        wide = WIDER.get(self.body.dtype, self.body.dtype)
        body = self.body.to(wide)
        body /= divisor.to(body)
        if body is not self.body:
            self.body.copy_(body)

    def __str__(self) -> str:
        names = [p.name for p in self.parameters]
        if len(names) < 2:
            return names[0] if names else "flags and weights"
        return f"{names[0]} … {names[-1]}, {len(names)} parameters"


def cut(
    order: list[Parameter],
    nbytes: float,
    comm_dtype: torch.dtype | None,
    engine: Engine,
    tail: int,
    *,
    tail_alone: bool = False,
) -> list[Bucket]:
    """Distribute parameters over buckets of at most nbytes, in the order in which gradients are expected.

    Returns:
        The buckets in the order in which they are sent; the last one has room for `tail` numbers at its end.
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
    # The last bucket has the tail. Half precision cannot represent weights such as 4097, so without a bucket of
    # float32 or wider the tail is a message of its own.
    rest = [(parameters, *key) for key, (parameters, _) in filling.items()]
    device = order[-1].tensor.device if order else engine.control_device
    alone: tuple[list[Parameter], torch.dtype, torch.device] = [], torch.float32, device
    fine = [r for r in reversed(rest) if torch.finfo(r[1]).eps < 1e-6 and not tail_alone]
    end = min(fine, key=lambda r: torch.finfo(r[1]).eps, default=alone)
    buckets = [Bucket(*c, engine) for c in (*made, *(r for r in rest if r is not end))]
    buckets.sort(key=lambda bucket: not bucket.overlaps)  # blocking reductions wait for the end of backward
    return [*buckets, Bucket(*end, engine, tail)]


def is_channels_last(x: Tensor) -> bool:
    """Whether x is dense in channels-last order and not contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return not x.is_contiguous() and x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def _as(dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return x, viewed as real pairs if x is complex and dtype is real."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() and not dtype.is_complex else x


def _shaped_view(row: Tensor, like: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """Return a view of a row in the shape of a tensor with these strides; None: contiguous."""
    return row.view(like.shape) if strides is None else row.as_strided(like.shape, strides, row.storage_offset())


def _scaled(x: Tensor, scale: float, out: Tensor) -> None:
    """out ← scale · x, in the wider of their dtypes."""
    if out.dtype.itemsize > x.dtype.itemsize or scale == 1:
        out.copy_(x)
        x = out
    if scale != 1:
        torch.mul(x, scale, out=out)
