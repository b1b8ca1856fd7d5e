"""What users may pass of torch.distributed's types, for type checkers and for `core.arguments`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch.distributed.tensor import Partial, Replicate

    #: How the gradient of a result that is the same on all ranks is laid out over the ranks, in DTensor's words.
    GradPlacement = Literal["partial", "replicate"] | Partial | Replicate
else:
    GradPlacement = Literal["partial", "replicate"]

__all__ = ["GradPlacement", "word_of"]


def word_of(placement: object) -> str | None:
    """Return what a placement of torch.distributed.tensor is called here; None: it is none that a gradient may have."""
    tensor = sys.modules.get("torch.distributed.tensor")  # where it was not imported, nobody has a placement
    if tensor is not None and placement == tensor.Partial():
        return "partial"
    return "replicate" if tensor is not None and placement == tensor.Replicate() else None
