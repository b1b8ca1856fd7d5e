"""A group's turn: one thread at a time starts a collective in a group or waits for one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from diffcoll.core.errors import CollectiveFailedError, CollectiveMismatchError, Origin, failure, message


class Turn:
    """Context manager: this thread starts a collective in the group, or waits for one, and no other thread does.

    Meanwhile it is the engine's `now`.

    Args:
        engine: the `Engine` of the group.
        name: of the collective.
        origin: the forward call, if the collective is part of its backward.
        later: equal on all ranks: whether the caller does something else between a primitive and its Wait. If not, the
            primitive may block until its result is there.
        waits: whether this thread only waits. A Wait sends no messages, so it may be for what another thread started.
        polls: where engines append functions by which what is started can be polled, one for each message or for
            several. They return whether it has completed, and neither block nor raise. True where it cannot wait.
            None: nobody polls.

    Raises:
        ValueError: on entry, if another thread is inside, or, unless `waits`, has started a collective that is not yet
            waited for.
        CollectiveFailedError: on exit, for an error of the backend.
    """

    __slots__ = ("_before", "_engine", "_waits", "later", "name", "origin", "polls", "thread")

    def __init__(
        self,
        engine: Any,
        name: str,
        origin: Origin | None = None,
        later: bool = False,
        *,
        waits: bool = False,
        polls: list[Callable[[], bool]] | None = None,
    ) -> None:
        self._engine, self._waits = engine, waits
        self.name, self.origin, self.later, self.polls = name, origin, later, polls
        self.thread = threading.get_ident()

    def __enter__(self) -> None:
        """Acquire the group's lock, or raise."""
        engine = self._engine
        if engine.size > 1:
            if not engine.lock.acquire(False):
                raise self._refused(f"is in {engine.now.name}")
            if engine.unwaited and not self._waits and self._is_anothers():
                engine.lock.release()
                raise self._refused("has started a collective that is not yet waited for")
        self._before, engine.now = engine.now, self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release it, and name the collective in an error of the backend; other errors name it already."""
        engine = self._engine
        engine.now = self._before
        if engine.size > 1:
            engine.lock.release()
        if error is None:
            return
        ours = CollectiveFailedError, CollectiveMismatchError, torch.OutOfMemoryError
        if isinstance(error, RuntimeError) and not isinstance(error, ours):
            raise failure(self.name, engine.description, engine.rank, self.origin, error) from error

    def _is_anothers(self) -> bool:
        """Whether another thread of the user's has started something.

        Autograd's own threads do not count: the user's thread that called backward is blocked until they are done.
        """
        me, starters = self.thread, set(self._engine.unwaited.values())
        if starters == {me}:
            return False
        users = {t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
        return me in users and not (starters & users) <= {me}

    def _refused(self, does: str) -> ValueError:
        remedy = "give each thread a group of its own, or let one thread make all calls"
        got = f"{self._engine.description}, in which another thread {does}"
        return ValueError(message(self.name, "group", got, "one that is used by one thread at a time", remedy))


#: The turn of a group in which no collective is in progress.
IDLE = Turn(None, "nothing")
