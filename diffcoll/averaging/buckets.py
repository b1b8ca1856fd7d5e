"""Buckets: contiguous memory in which gradients are reduced in one message."""

from __future__ import annotations

from math import inf
from typing import TypeAlias

import torch
from torch import Tensor

from diffcoll.averaging.messages import NAME
from diffcoll.core.dtypes import wider
from diffcoll.core.torch_private.tensors import copy_each, storage_uses, version
from diffcoll.engines.devices import current_stream, is_capturing
from diffcoll.engines.engine import Engine

#: Gradients of fewer bytes are copied into the bucket by one call: for them a call takes longer than the copy.
SMALL = 64 << 10


class Parameter:
    """One parameter, and its gradient as the last block has left it."""

    def __init__(self, index: int, name: str, tensor: Tensor, comm_dtype: torch.dtype | None) -> None:
        self.index, self.name, self.tensor = index, name, tensor
        self.dtype, self.device, self.shape = tensor.dtype, tensor.device, tensor.shape
        #: The dtype in which its gradient is sent.
        self.sent_dtype = self.dtype if comm_dtype is None or comm_dtype == self.dtype.to_real() else comm_dtype
        #: Whether its gradient is copied together with others; the same on all ranks: small ones stand first.
        self.is_small = self.sent_dtype == self.dtype and tensor.nbytes < SMALL and not is_channels_last(tensor)
        #: Where its gradient is reduced; None: it was frozen when the buckets were made.
        self.bucket: Bucket | None = None
        #: `.grad` as a block has assigned it, and its version then; backward outside of a block advances that.
        self.assigned: Tensor | None = None
        self.version = 0

    def as_sent(self) -> Tensor:
        """Return the parameter in the shape in which its gradient is sent."""
        return _as_sent(self.tensor.detach(), self.sent_dtype)

    def check(self, grad: Tensor) -> None:
        """Raise if a gradient cannot be reduced."""
        is_strided = grad.layout is torch.strided
        if not is_strided or grad.requires_grad or grad.dtype is not self.dtype or grad.shape != self.shape:
            raise RuntimeError(
                f"{NAME}.reduce: {self.name}: got a gradient of {tuple(grad.shape)} {grad.dtype} {grad.layout}, "
                f"create_graph={grad.requires_grad}; expected {tuple(self.shape)} {self.dtype} as when the {NAME} was "
                "made (after a conversion make a new one), dense (sparse=False in nn.Embedding), and "
                "create_graph=False, since a block is not differentiable: use torch.autograd.grad and "
                'dc.all_reduce(gradients, "mean")'
            )

    def is_reduced(self) -> bool:
        """Whether `.grad` is what the last block assigned, and was neither zeroed nor modified."""
        grad = self.tensor.grad
        return grad is not None and grad is self.assigned and version(grad) == self.version

    def refuse_reduced(self) -> None:
        """Raise if a reduced gradient would be reduced again."""
        if self.is_reduced():
            raise RuntimeError(
                f"{NAME}.reduce: {self.name}: its gradient was reduced by the last block, and a sum would reduce it "
                "again; call zero_grad() before the next gradients"
            )

    def assign(self, reduced: Tensor) -> None:
        """Make a reduced gradient `.grad`: a view of its memory, or a copy if it was sent in another dtype.

        The view is a new tensor in every block, with a version of its own, so that a bucket can tell who holds it.
        """
        if reduced.dtype == self.dtype:
            grad = reduced.data
        elif self.dtype.is_complex:
            grad = torch.view_as_complex(reduced.to(self.dtype.to_real())).clone()
        else:
            grad = reduced.to(self.dtype)
        self.tensor.grad = self.assigned = grad
        self.version = version(grad)

    def drop(self) -> None:
        """Set `.grad` to None, unless the parameter is frozen."""
        if self.tensor.requires_grad:
            self.tensor.grad = None
        self.assigned = None


class Bucket:
    """Gradients that are reduced in one message, followed by `n_tail` more numbers."""

    def __init__(self, parameters: list[Parameter], dtype: torch.dtype, device: torch.device, n_tail: int = 0) -> None:
        self.parameters = sorted(parameters, key=lambda p: not p.is_small)
        self.dtype, self.device, self._n_tail = dtype, device, n_tail
        #: Parameters whose gradient is still to come in this block, and those whose gradient is in the memory.
        self.pending: set[Parameter] = set()
        self.packed: set[Parameter] = set()
        self._stream: torch.Stream | None = None
        self._others: set[torch.Stream] = set()
        self._allocate()

    def _allocate(self) -> None:
        """Allocate the memory and count the bucket's own references to it, without those of local variables."""
        self._lay_out()
        self._uses = storage_uses(self.body)

    def _lay_out(self) -> None:
        parts = [p.as_sent() for p in self.parameters]
        sizes = [part.numel() for part in parts]
        memory = torch.empty(sum(sizes) + self._n_tail, dtype=self.dtype, device=self.device)
        self.row = torch.view_as_real(memory).view(-1) if self.dtype.is_complex else memory  # what is reduced
        self.body, self.tail = memory.split_with_sizes([sum(sizes), self._n_tail])
        self._body_of_small = memory[: sum(p.tensor.numel() for p in self.parameters if p.is_small)]
        self.memory: dict[Parameter, Tensor] = {}
        for p, part, row in zip(self.parameters, parts, self.body.split_with_sizes(sizes), strict=True):
            is_plain = not is_channels_last(part)
            self.memory[p] = row.view(part.shape) if is_plain else row.as_strided(part.shape, part.stride())
        if not memory.is_cpu:  # without synchronization, memory is safe on its allocation stream only
            self._stream = current_stream(memory.device)
            self._others.clear()

    def begin(self) -> None:
        """Start a block; memory that anything but `.grad` refers to is replaced: a gradient that is held stays.

        Memory shared with other processes is always replaced, since their references cannot be counted.
        """
        if self._stream is not None and is_capturing():
            self._stream = current_stream(self.device)  # a captured stream cannot wait for one outside of the graph
        uses = self._uses
        for p, memory in self.memory.items():
            if p.assigned is None or p.tensor.grad is not p.assigned:
                p.assigned = None
            elif p.assigned.is_set_to(memory):  # conversions of a module give the same object other memory
                uses += 1
        self.pending = set(self.parameters)
        self.packed = set()
        is_shared = self.body.is_cpu and self.body.untyped_storage().is_shared()
        if storage_uses(self.body) > uses or is_shared:
            self._allocate()

    def pack(self, p: Parameter, scale: float) -> None:
        """Move `.grad`, times scale, to the memory; a further one of this block is added. Without one, write zeros."""
        grad, memory = p.tensor.grad, self.memory[p]
        if grad is None or not p.tensor.requires_grad:
            if p not in self.packed:
                memory.zero_()
            return
        p.check(grad)
        sent = _as_sent(grad, self.dtype)
        if p in self.packed:
            memory.add_(sent, alpha=scale)
        elif memory.itemsize > sent.itemsize:
            memory.copy_(sent).mul_(scale)
        else:
            torch.mul(sent, scale, out=memory)
        self.packed.add(p)
        p.tensor.grad = None

    def complete(self, scale: float) -> None:
        """Pack all gradients that are not here yet."""
        here = self._join_streams()
        small: dict[Parameter, Tensor] = {}
        for p in self.parameters:
            grad = p.tensor.grad
            if grad is not None and here is not None:
                grad.record_stream(here)  # copied on this stream, and then freed
            if grad is None or not p.is_small or not p.tensor.requires_grad:
                self.pack(p, scale)
                continue
            if grad.requires_grad or grad.dtype is not p.dtype or grad.layout is not torch.strided:
                p.check(grad)  # which raises; a call for each gradient would take longer
            small[p] = grad
            p.tensor.grad = None
        if small:
            copy_each([self.memory[p] for p in small], [*small.values()])
            self.packed.update(small)
            if scale != 1:
                self._body_of_small *= scale

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
        for other in (self._others | {self._stream}) - {here}:
            here.wait_stream(other)
        self._others.clear()
        return here

    def divide(self, divisor: Tensor) -> None:
        """Divide reduced gradients; half precision in float32, which can represent the divisor."""
        wide = self.body.to(wider(self.dtype))
        wide /= divisor.to(wide)
        if wide is not self.body:
            self.body.copy_(wide)

    def __str__(self) -> str:
        names = [p.name for p in self.parameters]
        if len(names) < 2:
            return names[0] if names else "the count"
        return f"{names[0]} … {names[-1]}, {len(names)} parameters"


#: Parameters, and the dtype and the device of their gradients as they are sent.
_Content: TypeAlias = tuple[list[Parameter], torch.dtype, torch.device]


def late_buckets(parameters: list[Parameter]) -> list[Bucket]:
    """Return a bucket for each dtype and device."""
    return [Bucket(*content) for content in _distribute(parameters, inf)[1]]


def cut(order: list[Parameter], nbytes: float, engine: Engine) -> tuple[list[Bucket], list[Bucket]]:
    """Distribute parameters over buckets of at most nbytes, in the order in which gradients are expected.

    Returns:
        The buckets that are sent while backward runs, in the order in which they are sent; and those that are sent at
        the end of a block, the last of which has room for the count.
    """
    full, rest = _distribute(order, nbytes)
    # The finest dtype carries the count. Half precision cannot represent 4097: without another, it has its own message.
    rest.sort(key=lambda content: -_eps(content[1]))
    has_count = bool(rest) and _eps(rest[-1][1]) < 1e-6
    buckets = [Bucket(*content) for content in (*full, *rest[:-1])]
    last = [Bucket(*content, n_tail=int(has_count)) for content in rest[-1:]]
    if not has_count:
        device = order[-1].device if order else engine.control_device
        last.append(Bucket([], torch.float32, device, n_tail=1))
    early = [bucket for bucket in buckets if engine.overlaps(bucket.row)]
    return early, [*(bucket for bucket in buckets if bucket not in early), *last]


def _distribute(order: list[Parameter], nbytes: float) -> tuple[list[_Content], list[_Content]]:
    """Return full contents of at most nbytes, and the last one of each dtype and device."""
    full: list[_Content] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Parameter], float]] = {}
    for p in order:
        key = p.sent_dtype, p.device
        parameters, before = filling.pop(key, ([], 0.0))
        more = p.as_sent().numel() * p.sent_dtype.itemsize
        if parameters and before + more > nbytes:
            full.append((parameters, *key))
            parameters, before = [], 0.0
        filling[key] = ([*parameters, p], before + more)
    return full, [(parameters, *key) for key, (parameters, _) in filling.items()]


def is_channels_last(x: Tensor) -> bool:
    """Whether x is dense in channels-last order and not contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return not x.is_contiguous() and x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _as_sent(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x, as real pairs if x is complex and dtype is real."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() and not dtype.is_complex else x
