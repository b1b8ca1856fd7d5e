"""Replaces attributes of other modules and classes while simulated ranks run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class Replacing:
    """The first of the blocks `with self():` replaces attributes, and the end of the last one restores them.

    Args:
        install: replaces them; called with the stack of what restores them.
    """

    def __init__(self, install: Callable[[ExitStack], None]) -> None:
        self._install = install
        self._undo = ExitStack()
        self._lock = threading.Lock()
        self._blocks = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Return the context manager of a block."""
        with self._lock:
            if not self._blocks:
                self._install(self._undo)
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks:
                    self._undo.close()


def replace(undo: ExitStack, where: Any, name: str, by: object) -> None:
    """Set an attribute of a module or class until the stack is closed."""
    if name in vars(where):
        undo.callback(setattr, where, name, vars(where)[name])
    else:
        undo.callback(delattr, where, name)
    setattr(where, name, by)
