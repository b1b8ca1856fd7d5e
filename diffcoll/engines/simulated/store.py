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
        self._awaited: dict[str, list[Meeting]] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        for meeting in self._awaited.pop(key, []):
            meeting.results = dict.fromkeys(meeting.entries)
            self._world.wake(meeting)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        if not value:
            self._give_way()
        total = int(self._values.get(key, b"0")) + value
        self.set(key, str(total))
        return total

    def check(self, keys: Sequence[str]) -> bool:
        self._give_way()
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        """Return when all keys are set; there are no timeouts: if nobody can set one, that is a deadlock."""
        for key in keys:
            if key not in self._values:
                refuse_thread("torch.distributed.Store")
                me = THREAD.rank
                name = key.rpartition("//")[2]  # what is before is of torch.distributed
                entry = Entry(f"torch.distributed.Store, for key {name!r},", None, None, None, of_torch=True)
                meeting = Meeting(range(self._world.size), {me.number: entry})
                self._awaited.setdefault(key, []).append(meeting)
                self._world.wait(me, meeting)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected = expected_value.encode() if isinstance(expected_value, str) else bytes(expected_value)
        if self._values.get(key, b"") == expected:
            self.set(key, desired_value)
        return self._values.get(key, expected)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def append(self, key: str, value: str | bytes) -> None:
        self.set(key, self._values.get(key, b"") + (value.encode() if isinstance(value, str) else bytes(value)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: object) -> None:
        pass

    # By these names C++ calls them.
    deleteKey, getNumKeys = delete_key, num_keys
    compareSet, multiGet, multiSet, hasExtendedApi = compare_set, multi_get, multi_set, has_extended_api

    def _give_way(self) -> None:
        if THREAD.rank is not None:
            self._world.give_way(THREAD.rank)
