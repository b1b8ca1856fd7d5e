"""Where a thread is in the user's code, and how to end one that does not return."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
import traceback
from collections.abc import Sequence

from diffcoll.core.errors import is_users_file

#: Seconds after which a thread that has not ended is stopped again.
_NOTICE = 0.2


class Stopped(BaseException):
    """Ends a simulated rank whose time is over; not an Exception, so that the user's code does not catch it."""


class Stoppable(threading.Thread):
    """A thread that runs when it has its turn, and can be stopped at any time."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.turn = closed_lock()
        self.is_over = False  # whether nothing is left to stop
        self._end = threading.Lock()

    def stop(self) -> None:
        """Raise Stopped where the thread next executes Python code; wake it if it waits for its turn."""
        with contextlib.suppress(RuntimeError):  # it does not wait
            self.turn.release()
        with self._end:
            if not self.is_over and self.ident is not None:
                _raise_in(self.ident)

    def no_more_stops(self) -> None:
        """Called by the thread at its end; raises a Stopped that it has not noticed yet."""
        with self._end:
            self.is_over = True
        time.sleep(0)  # where it is raised; one that nobody notices stops profiled code, see `end_all`


def end_all(threads: Sequence[Stoppable], seconds: float) -> None:
    """Stop threads, one after the other. One that does not execute Python code, such as a sleep, ends later."""
    end = time.monotonic() + seconds
    for thread in threads:
        while thread.is_alive():
            thread.stop()  # again, for it is lost where Python ignores errors, as in __del__
            thread.join(min(_NOTICE, seconds))
            if time.monotonic() > end:
                break
    # As long as Python 3.11 knows of an error that a thread has not noticed, code under sys.setprofile and sys.settrace
    # does not go on, in any thread. It forgets that when any thread notices one.
    with contextlib.suppress(Stopped):
        _raise_in(threading.get_ident())
        time.sleep(0)


def _raise_in(thread: int) -> None:
    """Raise Stopped in a thread; Python has no other way to interrupt a loop in one."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Stopped))


def closed_lock() -> threading.Lock:
    """Return a lock that is held."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def place_of(thread: threading.Thread) -> str:
    """Return the innermost line of the user's code that a thread executes, in words; "" if there is none."""
    frame = sys._current_frames().get(thread.ident or 0)
    lines = traceback.extract_stack(frame) if frame is not None else []
    found = next((line for line in reversed(lines) if is_users_file(line.filename)), None)
    return "" if found is None else f"at {found.filename}:{found.lineno}, in {found.name}: {found.line}"
