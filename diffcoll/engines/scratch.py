"""Memory that stays in the library: new pages fault in one by one, kept ones do not."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

__all__ = ["Scratch"]

#: An engine keeps at most this much between two calls.
KEPT_BYTES = 64 << 20


class Scratch:
    """One kept buffer of CPU memory, lent to one user at a time; whoever comes meanwhile gets fresh memory.

    Other devices have a caching allocator of their own and always get fresh memory.
    """

    def __init__(self) -> None:
        self._kept: deque[Tensor] = deque(maxlen=1)

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Return a row of `numel` numbers with dtype and device of `like`; contents are arbitrary."""
        nbytes = numel * like.element_size()
        if like.device.type != "cpu" or nbytes > KEPT_BYTES:
            return like.new_empty(numel)
        try:  # pop is atomic: two threads never hold the same buffer
            kept = self._kept.pop()
        except IndexError:
            kept = torch.empty(0, dtype=torch.uint8, device="cpu")
        if kept.numel() < nbytes:
            with torch.inference_mode(False):  # else the next call, outside that mode, may not write to it
                kept = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return kept[:nbytes].view(like.dtype) if nbytes else like.new_empty(0)

    def give(self, memory: Tensor) -> None:
        """Take back what `take` lent."""
        nbytes = memory.untyped_storage().nbytes()
        if memory.device.type == "cpu" and 0 < nbytes <= KEPT_BYTES:
            with torch.inference_mode(False):
                self._kept.append(torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory.untyped_storage()))
