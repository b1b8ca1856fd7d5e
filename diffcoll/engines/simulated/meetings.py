"""Communications of simulated ranks: what each one brings, and what the others wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from diffcoll.core.errors import Origin

#: What each rank of a meeting brings → each rank's result.
Combine = Callable[[list[Any]], Sequence[Any]]


@dataclass(eq=False, repr=False)
class Entry:
    """What one rank brings to a meeting."""

    what: str  # the collective
    how: object  # what else must be equal on all ranks: the primitive of the engine, or an operation and a root
    payload: Any
    origin: Origin | None = None  # the forward call, if this is its backward
    within: str = ""  # words, if a backward makes this forward call
    group: str = ""  # the dimension of a mesh
    relative: str = ""  # `what`, with the other rank of a message relative to this one
    submodule: str = ""  # whose forward makes the call

    def __post_init__(self) -> None:
        self.forward = self.origin or Origin(self.what)

    def words(self, relative: bool = False) -> str:
        """Return words for the call and its line; `relative`: equal on ranks that do the same."""
        what = (relative and self.relative) or self.what
        call = f"{self.origin.backward} of {self.origin.name} called" if self.origin else what
        return f"{call}{self.group and f' of {self.group}'} at {self.forward.line}{self.within}"


@dataclass(eq=False, repr=False)
class Meeting:
    """A communication of some ranks, each of which adds an entry."""

    ranks: Sequence[int]  # who take part; for a message that any rank may send, all ranks
    entries: dict[int, Entry] = field(default_factory=dict)
    results: dict[int, Any] | None = None
    off: str = ""  # why it was called off, which every rank raises that waits for it
    raised: bool = False  # whether one has

    @property
    def missing(self) -> list[int]:
        """The ranks that have not joined."""
        return [r for r in self.ranks if r not in self.entries]
