"""Scratch memory that is kept between calls, because the first write to newly allocated pages is slow (page faults)."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcoll.core.torch_private.tensors import storage_uses

#: An engine keeps at most this much between two calls.
KEPT_BYTES = 64 << 20
#: Less than this is allocated anew: malloc has it in pages that are mapped already (glibc: M_MMAP_THRESHOLD).
NEW_BYTES = 64 << 10


class Scratch:
    """One buffer of CPU memory, lent until no tensor refers to it; meanwhile others get newly allocated memory.

    Memory on other devices is always newly allocated: PyTorch caches it.
    """

    _kept: Tensor | None = None

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Return an uninitialized 1-d tensor of `numel` elements with the dtype and device of `like`."""
        nbytes = numel * like.element_size()
        if nbytes < NEW_BYTES or nbytes > KEPT_BYTES or not like.is_cpu:
            return like.new_empty(numel)
        if self._kept is None or self._kept.numel() < nbytes:
            with torch.inference_mode(False):  # calls outside of inference mode cannot write to an inference tensor
                self._kept = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._uses = storage_uses(self._kept)
        elif storage_uses(self._kept) > self._uses:
            return like.new_empty(numel)
        return self._kept[:nbytes].view(like.dtype)
