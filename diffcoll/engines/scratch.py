"""Scratch memory that is kept between calls, because the first write to newly allocated pages is slow (page faults)."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

#: An engine keeps at most this much between two calls.
KEPT_BYTES = 64 << 20
#: Less than this is allocated anew: malloc has it in pages that are mapped already (glibc: M_MMAP_THRESHOLD).
NEW_BYTES = 64 << 10


class Scratch:
    """One buffer of CPU memory, lent to one caller at a time; further callers get newly allocated memory.

    Memory on other devices is always newly allocated: PyTorch caches it.
    """

    def __init__(self) -> None:
        self._kept: deque[Tensor] = deque(maxlen=1)

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Return an uninitialized 1-d tensor of `numel` elements with the dtype and device of `like`."""
        nbytes = numel * like.element_size()
        if nbytes < NEW_BYTES or nbytes > KEPT_BYTES or not like.is_cpu:
            return like.new_empty(numel)
        try:  # pop is atomic: two threads never hold the same buffer
            kept = self._kept.pop()
        except IndexError:  # none is kept, or another caller has it
            kept = torch.empty(0, dtype=torch.uint8, device="cpu")
        if kept.numel() < nbytes:
            with torch.inference_mode(False):  # calls outside of inference mode cannot write to an inference tensor
                kept = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return kept[:nbytes].view(like.dtype)

    def give(self, memory: Tensor) -> None:
        """Return what `take` lent. The caller must not use it any more."""
        if memory.nbytes >= NEW_BYTES and memory.is_cpu and memory.untyped_storage().nbytes() <= KEPT_BYTES:
            with torch.inference_mode(False):
                self._kept.append(torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory.untyped_storage()))
