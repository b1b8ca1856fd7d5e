"""Where a thread is in the user's code, and how to end one that does not return."""

from __future__ import annotations

import ctypes
import sys
import threading
import traceback

from diffcoll.core.errors import is_users_file


class Stopped(BaseException):
    """Ends a simulated rank whose time is over; not an Exception, so that the user's code does not catch it."""


def stop(thread: threading.Thread) -> None:
    """Raise Stopped in a thread, where it next executes Python code."""
    if thread.ident is not None:  # Python has no other way to interrupt a loop in a thread
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stopped))


def place_of(thread: threading.Thread) -> str:
    """Return the innermost line of the user's code that a thread executes, in words; "" if there is none."""
    frame = sys._current_frames().get(thread.ident or 0)
    lines = traceback.extract_stack(frame) if frame is not None else []
    found = next((line for line in reversed(lines) if is_users_file(line.filename)), None)
    return "" if found is None else f"at {found.filename}:{found.lineno}, in {found.name}: {found.line}"
