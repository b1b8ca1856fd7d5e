"""Groups of simulated ranks, and what their ranks bring to a communication."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diffcoll.core.errors import Origin, within_backward


@dataclass(frozen=True)
class LocalGroup:
    """Some ranks of a simulated world, in order. Users pass it as `group=`."""

    ranks: tuple[int, ...]
    #: Tells groups of the same ranks apart.
    number: tuple[int, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the hash once: it is used in every call, and takes time proportional to the number of ranks."""
        object.__setattr__(self, "_hash", hash((self.ranks, self.number)))

    def __hash__(self) -> int:
        """Return the hash."""
        return self._hash


@dataclass(eq=False, repr=False)
class Entry:
    """What one rank brings to a meeting."""

    what: str  # the collective
    step: str  # the primitive of the engine, if one of those
    payload: Any
    origin: Origin | None  # the forward call, if this is its backward

    def __post_init__(self) -> None:
        self.within = ""  # words, if this is a forward call that a backward makes
        if self.origin is None:
            self.line, self.within = Origin(self.what), within_backward()

    def __str__(self) -> str:
        if self.origin is None:
            return f"waits in {self.what} at {self.line.line}{self.within}"
        return f"waits in {self.origin.backward} of {self.origin.name} called at {self.origin.line}"


@dataclass(eq=False, repr=False)
class Meeting:
    """A communication of the ranks of a group, each of which adds an entry."""

    ranks: tuple[int, ...]
    entries: dict[int, Entry] = field(default_factory=dict)
    results: dict[int, Any] | None = None
    off: str = ""  # why it was called off; ranks that join later raise the same error
    is_work: bool = False  # whether its Wait is that of a Work of torch.distributed
