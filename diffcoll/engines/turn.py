"""What a rank is doing in a group, and errors of the group's backend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from diffcoll.core.errors import Origin, failure

T = TypeVar("T")


class BackendError(RuntimeError):
    """An error of the library that moves a group's data; `Turn` makes it a `CollectiveFailedError`."""


def of_backend(call: Callable[..., T], *arguments: Any, what: str = "") -> T:
    """Call a function of the backend, whose errors are a `BackendError`; `what` is the beginning of its text."""
    try:
        return call(*arguments)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise BackendError(f"{what}{error}") from error


class Turn:
    """Context manager: this thread starts a collective in the group, or waits for one, which is the engine's `now`.

    Args:
        engine: the `Engine` of the group.
        name: of the collective.
        origin: the forward call, if the collective is part of its backward.
        compared: whether check mode compares the ranks' calls.
        detail: what else tells this call from others of its name, such as the reduction.

    Raises:
        CollectiveFailedError: on exit, for an error of the backend. Other errors pass.
    """

    __slots__ = ("_before", "_engine", "compared", "detail", "name", "origin", "thread")

    def __init__(
        self, engine: Any, name: str, origin: Origin | None = None, compared: bool = False, detail: str = ""
    ) -> None:
        self._engine, self.name, self.origin, self.compared, self.detail = engine, name, origin, compared, detail
        self.thread = threading.get_ident()

    def __enter__(self) -> None:
        """Become the engine's `now`."""
        self._before, self._engine.now = self._engine.now, self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Name the collective in an error of the backend."""
        engine = self._engine
        engine.now = self._before
        if isinstance(error, BackendError):
            cause = error.__cause__ or error
            raise failure(self.name, engine.description, engine.rank, self.origin, error, self.compared) from cause


#: The turn of a group in which no collective is in progress.
IDLE = Turn(None, "nothing")
