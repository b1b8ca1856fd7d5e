# ruff: noqa: D102
# mypy: disable-error-code="override,misc,attr-defined"
"""`dist.Store` of simulated ranks: a rank that waits for a key, or polls, lets the other ranks run.

torch.distributed, in Python and in C++ (`PrefixStore`), calls the methods of this class by these names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed import Store

from diffcoll.engines.rank_state import THREAD, refuse_thread
from diffcoll.engines.simulated.meetings import Entry, Meeting


class SimulatedStore(Store):
    """Keys and values that all ranks of a world share."""

    def __init__(self, world: Any) -> None:
        super().__init__()
        self._world = world
        self._values: dict[str, bytes] = {}
        self._awaited: dict[str, Meeting] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        if (meeting := self._awaited.pop(key, None)) is not None:
            self._world.end(meeting, dict.fromkeys(meeting.ranks))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        if not value:
            self._world.give_way()
        self.set(key, str(int(self._values.get(key, b"0")) + value))
        return int(self._values[key])

    def check(self, keys: Sequence[str]) -> bool:
        self._world.give_way()
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        """Return when all keys are set; there are no timeouts: if nobody can set one, that is a deadlock."""
        for key in keys:
            if key not in self._values:
                refuse_thread("torch.distributed.Store")
                name = key.rpartition("//")[2]  # what is before is of torch.distributed
                entry = Entry(f"torch.distributed.Store, for key {name!r},", None, None)
                meeting = self._awaited.setdefault(key, Meeting(range(self._world.size)))
                self._world.join(THREAD.rank, meeting, entry)()
