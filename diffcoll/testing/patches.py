"""The fixture `monkeypatch` on simulated ranks, of which each has an environment of its own."""

from __future__ import annotations

import os
from typing import Any

import pytest


class RankPatch(pytest.MonkeyPatch):  # type: ignore[misc]  # final, but tests may ask for an instance of it
    """The `monkeypatch` of one simulated rank: patches its own environment, and what all ranks share through theirs.

    The test's `monkeypatch` undoes its patches after the ranks, in the environment of the process: RANK would be left
    there with the value that it had on a rank.

    Args:
        shared: the `monkeypatch` of the test. It undoes patches of attributes when all ranks have ended. None: a new
            one, as in `monkeypatch.context()`.
    """

    def __init__(self, shared: pytest.MonkeyPatch | None = None) -> None:
        super().__init__()
        self._shared = shared = shared or pytest.MonkeyPatch()
        for name in ("setattr", "delattr", "syspath_prepend", "chdir"):
            setattr(self, name, getattr(shared, name))

    def setitem(self, dic: Any, name: Any, value: Any) -> None:
        """Set an entry."""
        set_item = super().setitem if dic is os.environ else self._shared.setitem
        set_item(dic, name, value)

    def delitem(self, dic: Any, name: Any, raising: bool = True) -> None:
        """Delete an entry."""
        delete = super().delitem if dic is os.environ else self._shared.delitem
        delete(dic, name, raising)

    def undo(self) -> None:
        """Undo all patches: those of this rank's environment, and those that the ranks share."""
        super().undo()
        self._shared.undo()
