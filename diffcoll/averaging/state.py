"""State of an averager: the backward pass, the weights, and the loop over unequal numbers of batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["NAME", "Backward", "Join", "Weights"]

#: Name in errors, profiles and check mode.
NAME = "GradientAverager"


@dataclass
class Backward:
    """The current backward pass, including passes nested in it."""

    #: Count of backward passes.
    number: int = 0
    #: Autograd's graph task ids of the pass and of those nested in it; empty: no pass runs.
    tasks: set[int] = field(default_factory=set)
    #: Index of the bucket to be sent next.
    next_bucket: int = 0
    #: Whether a callback at the end of the outermost pass was registered.
    has_end_callback: bool = False
    #: Whether a nested pass has accumulated a gradient: then nothing is sent before the end.
    is_nested: bool = False
    #: Whether check mode was on when the pass began.
    is_checked: bool = False
    #: The version of each trainable parameter when the pass began.
    value_versions: list[int] = field(default_factory=list)


@dataclass
class Weights:
    """The weights of this rank's batches since gradients were last reduced."""

    #: Weight of the next batch.
    current: float | Tensor = 0.0
    #: Sum of the weights of all batches whose gradients are reduced together.
    total: float | Tensor = 0.0
    #: The number of reductions when a weight was last set.
    set_at: int = -1


@dataclass
class Join:
    """State of `join`, the loop over unequal numbers of batches."""

    is_active: bool = False
    #: The loop has ended, and gradients accumulated in it have not been reduced yet.
    is_leaving: bool = False
    #: This rank has no more batches; it repeats its last one with weight zero.
    ran_out: bool = False
    #: Whether the gradients to be reduced next include a batch that is not such a repetition.
    took_part: bool = True

    def leave(self) -> None:
        """Return to the state outside of the loop: every rank's gradients count."""
        self.is_active = self.is_leaving = False
        self.took_part = True
