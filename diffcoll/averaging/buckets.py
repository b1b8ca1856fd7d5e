"""Buckets: contiguous memory for gradients that are reduced in one message, in the order of accumulation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffcoll.averaging.gradient import Parameter, Place, as_summed, is_own
from diffcoll.core.dtypes import wider
from diffcoll.core.torch_private.tensors import copy_each, storage_uses, version_and_address
from diffcoll.engines.devices import current_stream
from diffcoll.engines.engine import Engine


class Bucket:
    """Gradients that are reduced in one message, followed by `tail` more numbers."""

    def __init__(
        self, parameters: list[Parameter], dtype: torch.dtype, device: torch.device, engine: Engine, tail: int = 0
    ) -> None:
        self.parameters = parameters
        for p in parameters:
            p.place = Place(p, dtype)
        self._sorted = sorted((p.place for p in parameters), key=lambda place: not place.is_small)
        self._small = [place for place in self._sorted if place.is_small]
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._tail = tail
        self.stream: torch.Stream | None = None
        self._others: set[torch.Stream] = set()
        self.allocate()
        self.overlaps = engine.overlaps(self.row)

    def allocate(self) -> None:
        """Allocate the memory and count the bucket's own references to it."""
        self._lay_out()
        if not self.body.is_cpu:  # without synchronization, memory is safe on its allocation stream only
            self.stream = current_stream(self.body.device)
            self._others.clear()
        self._uses = storage_uses(self.body)

    def _lay_out(self) -> None:
        dtype = self._like.dtype
        parts = [as_summed(dtype, place.tensor.detach()) for place in self._sorted]
        sizes = [part.numel() for part in parts]
        memory = self._like.new_empty(sum(sizes) + self._tail)
        self.row = torch.view_as_real(memory).view(-1) if dtype.is_complex else memory  # what is reduced
        self.body, self.tail = memory.split_with_sizes([sum(sizes), self._tail])
        self._row_of_small = memory[: sum(sizes[: len(self._small)])]
        for place, part, row in zip(self._sorted, parts, self.body.split_with_sizes(sizes), strict=True):
            strides = place.strides if part.dim() == place.tensor.dim() else None
            place.view = None
            shape, offset = part.shape, row.storage_offset()
            place.memory = row.view(shape) if strides is None else row.as_strided(shape, strides, offset)
            place.new_state = version_and_address(place.memory.data)
        self._memory_of_small = [place.memory for place in self._small]

    def reallocate_if_held(self) -> None:
        """Allocate new memory if anything but `.grad` references the old: gradients that the user holds never change.

        Memory shared with other processes is always replaced, since their references cannot be counted.
        """
        views = 0
        for p in self.parameters:
            place, grad = p.place, p.tensor.grad
            place.is_filled, place.recorded = False, None
            if grad is None or not place.holds(grad):
                place.view = None
            else:
                views += 1
            p.drop_reduced()
        if storage_uses(self.body) > self._uses + views or (
            self.body.is_cpu and self.body.untyped_storage().is_shared()
        ):
            self.allocate()

    def enter_stream(self) -> None:
        """Make the current stream, on which a gradient is accumulated, wait for the bucket's stream."""
        if self.stream is None:
            return
        here = current_stream(self.body.device)
        assert here is not None
        if here != self.stream:
            here.wait_stream(self.stream)
            self._others.add(here)

    def join_streams(self) -> None:
        """Make the current stream wait for all gradients: the backend waits for the current stream only."""
        if self.stream is None:
            return
        here = current_stream(self.body.device)
        assert here is not None
        for other in self._others:
            self.stream.wait_stream(other)
        here.wait_stream(self.stream)
        if self._others or here != self.stream:
            for p in self.parameters:  # copied on this stream, then freed; their memory is that of their own stream
                if not p.place.is_filled and p.tensor.grad is not None:
                    p.tensor.grad.record_stream(here)
        self._others.clear()

    def is_whole(self) -> bool:
        """Whether all gradients can be sent before the end of backward, where an error reaches all ranks.

        Hooks of the user's may still write to the memory of the user's, which `.grad` stays a view of.
        """
        return all(p.tensor.grad is None or is_own(p.tensor.grad) for p in self.parameters)

    def put_small(self, scale: float) -> None:
        """Put all small gradients by one call, if all are there, outside the bucket, and nothing is to be checked."""
        grads: list[Any] = [place.tensor.grad for place in self._small]
        if scale == 0 or not grads:
            return
        for place, grad in zip(self._small, grads, strict=True):
            if place.is_filled or grad is None or grad is place.view or grad.requires_grad or not is_own(grad):
                return
        copy_each(self._memory_of_small, grads)
        if scale != 1:
            self._row_of_small *= scale
        for place in self._small:  # as Place.put does, in fewer calls
            place.is_filled = place.is_used = True
            place.kept = None
            place.tensor.grad = place.view = place.recorded = place.memory.data
            place.recorded_state = place.new_state

    def divide(self, divisor: Tensor) -> None:
        """Divide the reduced gradients; half precision is divided in float32, which can represent the divisor."""
        wide = wider(self.body.dtype)
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
        more = as_summed(dtype, p.tensor).numel() * dtype.itemsize
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
