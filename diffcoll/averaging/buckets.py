"""Buckets: contiguous memory for gradients that are reduced in one message."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from diffcoll.averaging.messages import NAME
from diffcoll.averaging.parameters import SPARSE
from diffcoll.core.dtypes import wider
from diffcoll.core.torch_private.tensors import copy_each, storage_uses, version
from diffcoll.engines.devices import current_stream, is_capturing
from diffcoll.engines.engine import Engine

#: Gradients of fewer bytes are copied into the bucket by one call: for them a call takes longer than the copy.
SMALL = 64 << 10


class Parameter:
    """One parameter, its gradient in this block, and the place of that in a bucket."""

    #: Where its gradient is reduced; None: it has no place, since it was frozen when the buckets were made.
    bucket: Bucket | None = None
    #: The part of the bucket's memory, in the shape of the gradient as it is sent.
    memory: Tensor

    def __init__(self, index: int, name: str, tensor: Tensor) -> None:
        self.index, self.name, self.tensor = index, name, tensor
        self.dtype, self.device = tensor.dtype, tensor.device
        #: `.grad` as a block has assigned it, until it is replaced, and its version; backward calls outside of a block,
        #: which add to it, advance that.
        self.assigned: Tensor | None = None
        self.reduced_version = 0
        #: In this block: whether its hook was called, and whether a gradient is in `memory`.
        self.has_arrived = self.is_packed = False
        #: Whether it is copied together with others: the same on all ranks, since small ones stand first in a message.
        self.is_small = False

    # ── its place ────────────────────────────────────────────────────────────────────────────────────────

    def enter_bucket(self, bucket: Bucket) -> None:
        """Get a place in this bucket, which sets `memory`."""
        self.bucket = bucket
        is_plain = bucket.dtype == self.dtype and not is_channels_last(self.tensor)
        self.is_small = is_plain and self.tensor.nbytes < SMALL

    def leave_bucket(self) -> None:
        """Give up the place, and the reference to its memory."""
        self.bucket = None
        self.memory = torch.empty(0, device="cpu")

    def as_sent(self, dtype: torch.dtype) -> Tensor:
        """The parameter in the shape in which its gradient is sent in this dtype."""
        return _as_sent(self.tensor.detach(), dtype)

    def holds_memory(self) -> bool:
        """Whether `.grad` is a view of `memory`; conversions of a module give the same object other memory."""
        grad = self.assigned
        return self.bucket is not None and grad is not None and self.tensor.grad is grad and grad.is_set_to(self.memory)

    # ── a block ──────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> bool:
        """Start a block; return whether `.grad` is a view of the memory."""
        self.has_arrived = self.is_packed = False
        if self.assigned is None or self.tensor.grad is not self.assigned:
            self.assigned = None
            return False
        return self.holds_memory()

    def pack(self, scale: float) -> None:
        """Move `.grad`, times scale, to the memory; a further one of this block is added. Without one, write zeros."""
        grad = self.tensor.grad if self.tensor.requires_grad else None
        if grad is None:
            if not self.is_packed:
                self.memory.zero_()
            return
        self.refuse(grad)
        memory, sent = self.memory, _as_sent(grad, self.memory.dtype)
        if self.is_packed:
            memory.add_(sent, alpha=scale)
        elif self.holds_memory():
            memory.mul_(scale)
        elif scale == 1:
            memory.copy_(sent)
        elif memory.itemsize > sent.itemsize:
            memory.copy_(sent).mul_(scale)
        else:
            torch.mul(sent, scale, out=memory)
        self.is_packed = True
        self.tensor.grad = self.assigned = None

    def take_late(self, dtype: torch.dtype, scale: float) -> Tensor:
        """Return `.grad`, times scale, flat and in the dtype in which it is sent; zeros if there is none."""
        grad, shape = self.tensor.grad, self.as_sent(dtype).shape
        row = torch.zeros(shape.numel(), dtype=dtype, device=self.device)
        if grad is not None and self.tensor.requires_grad:
            row.view(shape).copy_(_as_sent(grad, dtype)).mul_(scale)
        self.tensor.grad = self.assigned = None
        return row

    def add_late(self, reduced: Tensor) -> None:
        """Add a late gradient, reduced, to what was reduced before, if anything was."""
        reduced = reduced.view(self.as_sent(reduced.dtype).shape)
        self.memory = reduced if self.bucket is None else self.memory.add_(reduced)

    def assign(self) -> None:
        """Make the reduced gradient `.grad`: a view of the memory, or a copy if it was sent in another dtype.

        The view is a new tensor in every block, with a version of its own, so that a bucket can tell who holds it.
        """
        grad = self.memory
        if grad.dtype == self.dtype:
            grad = grad.data
        elif self.dtype.is_complex:
            grad = torch.view_as_complex(grad.to(self.dtype.to_real())).clone()
        else:
            grad = grad.to(self.dtype)
        self.tensor.grad = self.assigned = grad
        self.reduced_version = version(grad)

    def drop(self) -> None:
        """Drop the gradient."""
        if self.tensor.requires_grad:
            self.tensor.grad = None
        self.assigned = None

    # ── what is wrong ────────────────────────────────────────────────────────────────────────────────────

    def is_reduced(self) -> bool:
        """Whether `.grad` is what the last block assigned, and was neither zeroed nor modified."""
        grad = self.tensor.grad
        return grad is not None and grad is self.assigned and version(grad) == self.reduced_version

    def refuse_reduced(self) -> NoReturn:
        """Raise since a reduced gradient would be reduced again."""
        raise RuntimeError(
            f"{NAME}.reduce: {self.name}: its gradient was reduced by the last block, and a sum would reduce it again; "
            "call zero_grad() before the next gradients"
        )

    def refuse(self, grad: Tensor) -> None:
        """Raise if a gradient cannot be reduced."""
        if grad.layout != torch.strided:
            raise TypeError(f"{NAME}.reduce: {self.name}: {SPARSE}")
        if grad.requires_grad:
            raise RuntimeError(
                f"{NAME}.reduce: {self.name}: its gradient is part of a graph (create_graph=True), and a block is not "
                'differentiable; use torch.autograd.grad(…, create_graph=True) and dc.all_reduce(gradients, "mean")'
            )
        if grad.dtype != self.dtype or grad.device != self.device or grad.shape != self.tensor.shape:
            was, now = f"{self.dtype} on {self.device}", f"{grad.dtype} on {grad.device}"
            raise RuntimeError(
                f"{NAME}.reduce: {self.name}: was {was} when the {NAME} was made, and is {now}; make a new one"
            )


class Bucket:
    """Gradients that are reduced in one message, followed by `tail` more numbers."""

    def __init__(
        self, parameters: list[Parameter], dtype: torch.dtype, device: torch.device, engine: Engine, tail: int
    ) -> None:
        self.dtype, self.device, self._n_tail = dtype, device, tail
        for p in parameters:
            p.enter_bucket(self)
        self.parameters = sorted(parameters, key=lambda p: not p.is_small)
        self._small = [p for p in self.parameters if p.is_small]
        #: The number of gradients that are still to come in this block.
        self.pending = 0
        self._stream: torch.Stream | None = None
        self._others: set[torch.Stream] = set()
        self.allocate()
        self.overlaps = engine.overlaps(self.row)

    def allocate(self) -> None:
        """Allocate the memory and count the bucket's own references to it, without those of local variables."""
        self._lay_out()
        self._uses = storage_uses(self.row)

    def _lay_out(self) -> None:
        parts = [p.as_sent(self.dtype) for p in self.parameters]
        sizes = [part.numel() for part in parts]
        memory = torch.empty(sum(sizes) + self._n_tail, dtype=self.dtype, device=self.device)
        self.row = torch.view_as_real(memory).view(-1) if self.dtype.is_complex else memory  # what is reduced
        self.body, self.tail = memory.split_with_sizes([sum(sizes), self._n_tail])
        self._row_of_small = memory[: sum(sizes[: len(self._small)])]
        for p, part, row in zip(self.parameters, parts, self.body.split_with_sizes(sizes), strict=True):
            strides = part.stride() if is_channels_last(part) else part.new_empty(part.shape, device="meta").stride()
            p.memory = row.as_strided(part.shape, strides, row.storage_offset())
        self._memory_of_small = [p.memory for p in self._small]
        if not memory.is_cpu:  # without synchronization, memory is safe on its allocation stream only
            self._stream = current_stream(memory.device)
            self._others.clear()

    def begin(self) -> None:
        """Start a block; memory that anything but `.grad` refers to is replaced: a gradient that is held stays.

        Memory shared with other processes is always replaced, since their references cannot be counted.
        """
        if self._stream is not None and is_capturing():
            self._stream = current_stream(self.device)  # a captured stream cannot wait for one outside of the graph
        held = sum([p.begin() for p in self.parameters])
        self.pending = len(self.parameters)
        if storage_uses(self.body) > self._uses + held or (
            self.body.is_cpu and self.body.untyped_storage().is_shared()
        ):
            self.allocate()

    def pack(self, scale: float) -> None:
        """Move all gradients that are not here yet, times scale, to the memory; zeros where there is none."""
        here = self._join_streams()
        if here is not None:
            for p in self.parameters:
                if p.tensor.grad is not None:  # copied on this stream, and then freed
                    p.tensor.grad.record_stream(here)
        small = self._small
        grads: list[Tensor] = []
        for p in small:
            tensor = p.tensor
            grad = tensor.grad
            if grad is None or grad is p.assigned or p.is_packed or not tensor.requires_grad:
                break
            if grad.requires_grad or grad.dtype is not p.dtype or grad.layout is not torch.strided:
                break
            grads.append(grad)
        if grads and len(grads) == len(small):
            copy_each(self._memory_of_small, grads)
            if scale != 1:
                self._row_of_small *= scale
            for p in small:
                p.is_packed, p.tensor.grad, p.assigned = True, None, None
            rest = self.parameters[len(small) :]
        else:
            rest = self.parameters
        for p in rest:
            p.pack(scale)

    def enter_stream(self) -> None:
        """Make the current stream, on which a gradient is accumulated, wait for the bucket's stream."""
        if self._stream is None:
            return
        here = current_stream(self.device)
        assert here is not None
        if here != self._stream:
            here.wait_stream(self._stream)
            self._others.add(here)

    def _join_streams(self) -> torch.Stream | None:
        """Make the current stream wait for all gradients, since the backend waits for that one only; return it."""
        if self._stream is None:
            return None
        here = current_stream(self.device)
        assert here is not None
        for other in self._others - {here}:
            here.wait_stream(other)
        if here != self._stream:
            here.wait_stream(self._stream)
        self._others.clear()
        return here

    def __str__(self) -> str:
        names = [p.name for p in self.parameters]
        if len(names) < 2:
            return names[0] if names else "the count"
        return f"{names[0]} … {names[-1]}, {len(names)} parameters"


def cut(
    order: list[Parameter], nbytes: float, comm_dtype: torch.dtype | None, engine: Engine
) -> tuple[list[Bucket], list[Bucket]]:
    """Distribute parameters over buckets of at most nbytes, in the order in which gradients are expected.

    Returns:
        The buckets that are sent while backward runs, in the order in which they are sent; and those that are sent at
        the end of a block, the last of which has room for the count.
    """
    full: list[Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Parameter], float]] = {}
    for p in order:
        dtype = sent_dtype(p.dtype, comm_dtype)
        key = dtype, p.device
        parameters, before = filling.pop(key, ([], 0.0))
        more = p.as_sent(dtype).numel() * dtype.itemsize
        if parameters and before + more > nbytes:
            full.append(Bucket(parameters, *key, engine, 0))
            parameters, before = [], 0.0
        filling[key] = ([*parameters, p], before + more)
    rest = [(parameters, *key) for key, (parameters, _) in filling.items()]
    # The finest dtype carries the count. Half precision cannot represent 4097: without another, it has its own message.
    rest.sort(key=lambda r: -_eps(r[1]))
    needs_own = not rest or _eps(rest[-1][1]) > 1e-6
    last = [Bucket(*r, engine, int(r is rest[-1] and not needs_own)) for r in rest]
    if needs_own:
        device = order[-1].device if order else engine.control_device
        last.append(Bucket([], torch.float32, device, engine, 1))
    early = [bucket for bucket in (*full, *last[: len(rest) - 1]) if bucket.overlaps]
    return early, [bucket for bucket in (*full, *last) if bucket not in early]


def divide(row: Tensor, divisor: Tensor) -> None:
    """Divide reduced gradients in place; half precision in float32, which can represent the divisor."""
    wide = row.to(wider(row.dtype))
    wide /= divisor.to(wide)
    if wide is not row:
        row.copy_(wide)


def is_channels_last(x: Tensor) -> bool:
    """Whether x is dense in channels-last order and not contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return not x.is_contiguous() and x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def sent_dtype(dtype: torch.dtype, comm_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which gradients of this one are sent, for this argument of the averager."""
    return dtype if comm_dtype is None or comm_dtype == dtype.to_real() else comm_dtype


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _as_sent(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x, as real pairs if x is complex and dtype is real."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() and not dtype.is_complex else x
