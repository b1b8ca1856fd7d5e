"""Backends with point-to-point messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.engines.devices import can_pin
from diffcoll.engines.engine import Blocks, Engine, Wait, done

#: For each message the other rank, and the tensor that is sent or filled.
Messages = Sequence[tuple[int, Tensor]]


class MessageEngine(Engine):
    """An engine whose `exchange` consists of point-to-point messages."""

    @abstractmethod
    def messages(self, sends: Messages, recvs: Messages) -> Wait:
        """Start all sends and receives. Tensors are contiguous and not empty.

        Messages between two ranks arrive in the order in which they were started.
        """

    def reaches(self, x: Tensor) -> bool:
        """Whether the backend reads and writes the memory of x directly. If not, it is copied through the CPU."""
        return True

    @override
    def exchange(self, sends: Blocks, recvs: Blocks, later: bool = False) -> Wait:
        rank = self.rank
        wait: Wait = done
        pairs = [(s, t) for s, t in enumerate(sends) if t is not None and s != rank and t.numel()]
        wants = [(s, t) for s, t in enumerate(recvs) if t is not None and s != rank and t.numel()]
        if some := pairs or wants:
            wait = (self.messages if self.reaches(some[0][1]) else self._through_cpu)(pairs, wants)
        own, into = sends[rank], recvs[rank]
        if into is not None and own is not None and own is not into:
            into.copy_(own)
        return wait

    def _through_cpu(self, pairs: Messages, wants: Messages) -> Wait:
        received = [(s, _on_cpu(t)) for s, t in wants]
        wait = self.messages([(s, _on_cpu(t).copy_(t)) for s, t in pairs], received)

        def finish() -> None:
            wait()
            for (_, t), (_, copy) in zip(wants, received, strict=True):
                t.copy_(copy)

        return finish


def _on_cpu(t: Tensor) -> Tensor:
    """Uninitialized CPU memory with the shape and dtype of t, pinned for t's device if possible."""
    return torch.empty_like(t, device="cpu", pin_memory=can_pin(t.device.type))
