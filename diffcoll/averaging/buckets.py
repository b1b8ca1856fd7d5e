"""Buckets: contiguous memory in which gradients are reduced in one message."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcoll.averaging.messages import NAME, UNUSED, USED
from diffcoll.averaging.unreduced import gradient_of
from diffcoll.core.dtypes import wider
from diffcoll.core.torch_private.tensors import copy_each, storage_uses
from diffcoll.engines.devices import stream_source

#: Gradients of fewer bytes are copied into the bucket by one call: for them a call takes longer than the copy.
SMALL, SMALL_ON_ACCELERATOR = 64 << 10, 4 << 20
#: Bytes of which the address of a gradient in a bucket is a multiple, as vectorized kernels and Inductor expect.
ALIGNMENT = 16


class Parameter:
    """One parameter of an averager, and where its gradient is in a block."""

    def __init__(self, index: int, name: str, tensor: Tensor, comm_dtype: torch.dtype | None) -> None:
        self.index, self.name, self.tensor, self.gradient = index, name, tensor, gradient_of(tensor)
        self.dtype, self.shape = tensor.dtype, tensor.shape
        sent_dtype = self.dtype if comm_dtype is None or comm_dtype == self.dtype.to_real() else comm_dtype
        self._is_sent_in_pairs = self.dtype.is_complex and not sent_dtype.is_complex
        #: Its gradient as it is sent, without memory: its dtype, shape and strides, those of a dense parameter.
        self.meta = torch.empty_like(self.as_sent(tensor.detach()), dtype=sent_dtype, device="meta")
        #: Its numbers in a bucket, with what aligns the next gradient.
        self.n_sent = -(-self.meta.nbytes // ALIGNMENT) * ALIGNMENT // sent_dtype.itemsize
        #: Whether its gradient is copied together with others; the same on all ranks: small ones stand first.
        small = SMALL if tensor.is_cpu else SMALL_ON_ACCELERATOR
        self.is_small = sent_dtype == self.dtype and tensor.nbytes < small
        #: Where its gradient is reduced; None: it was frozen when the buckets were made.
        self.bucket: Bucket | None = None
        #: In a block, where its gradient is on this rank; after the note, the largest state of all ranks.
        self.state = UNUSED

    def as_sent(self, x: Tensor) -> Tensor:
        """Return a gradient in the shape in which it is sent: complex numbers in a real dtype as pairs."""
        return torch.view_as_real(x.resolve_conj()) if self._is_sent_in_pairs else x

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

    def refuse_reduced(self) -> None:
        """Raise if a reduced gradient would be reduced again."""
        if self.gradient.is_reduced():
            raise RuntimeError(
                f"{NAME}.reduce: {self.name}: its gradient was reduced by the last block, of any {NAME}, and a sum "
                "would reduce it again; accumulate micro-batches by plain backward() before one block, whose count "
                "is of all of them, and call zero_grad() before the next step"
            )

    def assign(self, reduced: Tensor) -> None:
        """Make a reduced gradient `.grad`: a view of its memory, or a copy if it was sent in another dtype.

        The view is a new tensor in every block, with a version of its own, so that a bucket can tell who holds it.
        """
        if self._is_sent_in_pairs:
            reduced = torch.view_as_complex(reduced.to(self.dtype.to_real()))
        self.gradient.assign(reduced.to(self.dtype).data)


class Bucket:
    """Gradients of one dtype and device that are reduced in one message."""

    def __init__(self, parameters: list[Parameter]) -> None:
        self.parameters = sorted(parameters, key=lambda p: not p.is_small)
        self._dtype, self._device = parameters[0].meta.dtype, parameters[0].tensor.device
        self._current_stream = stream_source(self._device)
        self._allocate()
        self.begin()

    def _allocate(self) -> None:
        """Allocate the memory and count the bucket's own references to it, without those of local variables."""
        sizes = [p.n_sent for p in self.parameters]
        row = torch.zeros(sum(sizes), dtype=self._dtype, device=self._device)  # zeros between gradients stay zeros
        pieces = zip(self.parameters, row.split_with_sizes(sizes), strict=True)
        self.memory = {p: piece.as_strided(p.meta.shape, p.meta.stride()) for p, piece in pieces}
        self.row = torch.view_as_real(row).view(-1) if row.is_complex() else row  # what is reduced
        self._row_of_small = row[: sum(p.n_sent for p in self.parameters if p.is_small)]
        del row, pieces
        self._uses = storage_uses(self.row)

    def begin(self) -> None:
        """Start a block; memory that anything but `.grad` refers to is replaced: a gradient that is held stays.

        Memory shared with other processes is always replaced, since their references cannot be counted.
        """
        uses = self._uses
        for p, memory in self.memory.items():
            assigned = p.gradient.assigned
            if assigned is None or p.tensor.grad is not assigned:
                assigned = p.gradient.assigned = None
            elif p.tensor.requires_grad and assigned.is_set_to(memory):
                uses += 1  # not a frozen gradient, which stays, nor one to which a conversion gave other memory
        is_shared = self.row.is_cpu and self.row.untyped_storage().is_shared()
        if storage_uses(self.row) > uses or is_shared:
            self._allocate()
        #: Parameters whose gradient is still to come in this block.
        self.pending = set(self.parameters)
        #: On an accelerator the stream on which the block begins, and others on which gradients are packed.
        self._stream = None if self._current_stream is None else self._current_stream()
        self._others: set[torch.Stream] = set()

    def enter_stream(self) -> None:
        """Make the current stream, on which a gradient is accumulated, wait for the one on which the block began."""
        if self._stream is None or self._current_stream is None:
            return
        here = self._current_stream()
        if here != self._stream:
            here.wait_stream(self._stream)
            self._others.add(here)

    def pack(self, p: Parameter, scale: float) -> None:
        """Move `.grad`, times scale, to the memory; a further one of this block is added."""
        grad, memory = p.tensor.grad, self.memory[p]
        assert grad is not None
        p.check(grad)
        sent = p.as_sent(grad)
        if p.state == USED:
            memory.add_(sent, alpha=scale)
        elif memory.itemsize > sent.itemsize:
            memory.copy_(sent).mul_(scale)
        else:
            torch.mul(sent, scale, out=memory)
        p.state, p.tensor.grad = USED, None

    def complete(self, scale: float) -> None:
        """Pack all gradients that are not here yet, zeros where there is none, and join the streams."""
        here = None if self._current_stream is None else self._current_stream()
        if here is not None and self._stream is not None:
            for other in (self._others | {self._stream}) - {here}:
                here.wait_stream(other)  # the backend waits for this stream only
        small: dict[Parameter, Tensor] = {}
        for p in self.parameters:
            grad = p.tensor.grad
            if grad is None or not p.tensor.requires_grad:
                if p.state != USED:
                    self.memory[p].zero_()
                continue
            if here is not None:
                grad.record_stream(here)  # copied on this stream, and then freed
            # Here, since a call of `check` for each small gradient would take longer than its copy.
            if p.is_small and grad.dtype is p.dtype and grad.layout is torch.strided and not grad.requires_grad:
                small[p] = grad
                p.state, p.tensor.grad = USED, None
            else:
                self.pack(p, scale)
        if small:
            copy_each([self.memory[p] for p in small], [*small.values()])
            if scale != 1:
                self._row_of_small *= scale

    def divide(self, divisor: Tensor) -> None:
        """Divide reduced gradients; half precision in float32, which can represent the divisor."""
        wide = self.row.to(wider(self.row.dtype))
        torch.div(wide, divisor.to(wide), out=self.row)

    def __str__(self) -> str:
        first, *others = [p.name for p in self.parameters]
        return f"{first} … {others[-1]}, {len(self.parameters)} parameters" if others else first


def cut(order: list[Parameter], nbytes: float) -> list[Bucket]:
    """Distribute parameters over buckets, in the order in which their gradients are expected.

    A bucket has at most nbytes, or one larger gradient.
    """
    contents: list[list[Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], float] = {}
    for p in order:
        key, size = (p.meta.dtype, p.tensor.device), p.n_sent * p.meta.itemsize
        if size > nbytes:
            contents.append([p])
            continue
        if key not in filling or sizes[key] + size > nbytes:
            filling[key], sizes[key] = [], 0.0
            contents.append(filling[key])
        filling[key].append(p)
        sizes[key] += size
    return [Bucket(parameters) for parameters in sorted(contents, key=lambda each: order.index(each[-1]))]
