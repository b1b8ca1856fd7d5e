"""Transports that send messages from rank to rank."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.engines.engine import Blocks, Engine, Wait, done

__all__ = ["MessageEngine", "Messages"]

#: The other rank of each message, and the memory that it is read from or written to.
Messages = list[tuple[int, Tensor]]


class MessageEngine(Engine):
    """An engine whose `exchange` is messages between two ranks each."""

    @abstractmethod
    def messages(self, sends: Messages, recvs: Messages) -> Wait:
        """Start all of them, of contiguous tensors that are not empty."""

    def reaches(self, x: Tensor) -> bool:
        """Whether the transport reads and writes such memory; if not, messages go through the CPU."""
        return True

    @override
    def exchange(self, sends: Blocks, recvs: Blocks) -> Wait:
        pairs, wants = self._to_others(sends), self._to_others(recvs)
        some = next((t for _, t in (*pairs, *wants)), None)
        wait: Wait = done
        if some is not None:
            wait = (self.messages if self.reaches(some) else self._through_cpu)(pairs, wants)
        own, into = sends[self.rank], recvs[self.rank]
        if into is not None and own is not None:
            into.copy_(own)
        return wait

    def _to_others(self, blocks: Blocks) -> Messages:
        return [(s, t) for s, t in enumerate(blocks) if s != self.rank and t is not None and t.numel()]

    def _through_cpu(self, pairs: Messages, wants: Messages) -> Wait:
        landing = [(s, _on_cpu(t)) for s, t in wants]
        wait = self.messages([(s, _on_cpu(t).copy_(t)) for s, t in pairs], landing)

        def finish() -> None:
            wait()
            for (_, t), (_, landed) in zip(wants, landing, strict=True):
                t.copy_(landed)

        return finish


def _on_cpu(t: Tensor) -> Tensor:
    """Memory of the CPU for t, pinned where t is on a GPU."""
    return torch.empty_like(t, device="cpu", pin_memory=t.is_cuda)
