"""What an averager remembers between two calls, by what changes together."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["NAME", "Backward", "Join", "Weights"]

#: In errors, profiles and comparisons.
NAME = "GradientAverager"


@dataclass
class Backward:
    """The backward pass that runs, together with those that run within it."""

    #: How many there have been.
    number: int = 0
    #: Autograd's numbers of the pass and of those within it; empty: none runs.
    tasks: set[int] = field(default_factory=set)
    #: The bucket to be sent next.
    next_bucket: int = 0
    #: Whether a callback at the end of the outermost pass was asked for.
    is_end_awaited: bool = False
    #: Whether a gradient has come from a pass within another one: then nothing is sent before the end.
    is_nested: bool = False
    #: Whether the ranks compare what they send: check mode, when the pass began.
    compares: bool = False
    #: How often each parameter that is not frozen had been modified when the pass began.
    value_versions: list[int] = field(default_factory=list)


@dataclass
class Weights:
    """The weights of this rank's batches since gradients were last reduced."""

    #: Of the batch whose backward comes next.
    current: float | Tensor = 0.0
    #: Of all batches whose gradients are reduced together.
    total: float | Tensor = 0.0
    #: How many reductions there had been when a weight was last set.
    set_at: int = -1


@dataclass
class Join:
    """Where this rank stands in a loop over batches of which ranks have unequal numbers."""

    is_active: bool = False
    #: The loop has ended, and gradients accumulated in it have not been reduced yet.
    is_leaving: bool = False
    #: This rank has no more batches; it repeats its last one, which counts zero.
    ran_out: bool = False
    #: A batch that counts is among those whose gradients are reduced next.
    took_part: bool = True

    def leave(self) -> None:
        """Let all ranks count again."""
        self.is_active = self.is_leaving = False
        self.took_part = True
