"""One thread per process that warns, once per call, when this rank has waited long for the others.

A rank whose peers do not call the same collective waits until the group's timeout: half an hour by default on gloo,
for ever on MPI. Calls only set `Engine.now`, which this thread reads about once a second.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass

from diffcoll.core.errors import NOT_MADE, Origin, message, not_run
from diffcoll.engines.engine import Engine
from diffcoll.engines.turn import IDLE, Turn

#: Environment variable for the seconds after which to warn (0: never), and its default.
_VARIABLE, _DEFAULT = "DIFFCOLL_WARN_AFTER", "30"

_thread: threading.Thread | None = None


@dataclass(eq=False, repr=False)
class _Watched:
    """An engine, the process that created it, the last value of its `now`, and when that was first seen."""

    engine: weakref.ref[Engine]
    pid: int  # a forked process inherits the engines, but not the threads that execute collectives in them
    turn: Turn = IDLE
    since: float = 0.0


_watched: list[_Watched] = []


def watch(engine: Engine) -> None:
    """Start to watch an engine, unless it has one rank or the user has turned the warnings off."""
    global _thread
    seconds = _seconds()
    if engine.size == 1 or seconds == 0:
        return
    _watched.append(_Watched(weakref.ref(engine), os.getpid()))
    if _thread is None or not _thread.is_alive():  # not started yet, or not in this forked process
        _thread = threading.Thread(target=_look_again, args=(seconds,), name="diffcoll watch", daemon=True)
        _thread.start()


def _seconds() -> float:
    said = os.environ.get(_VARIABLE, "") or _DEFAULT
    try:
        seconds = float(said)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(message("diffcoll", _VARIABLE, repr(said), "seconds, or 0 for no warnings"))
    return seconds


def _look_again(seconds: float) -> None:
    while True:
        time.sleep(min(1.0, seconds / 4))
        for watched in list(_watched):
            _look(watched, seconds)


def _look(watched: _Watched, seconds: float) -> None:
    engine, now = watched.engine(), time.monotonic()
    if engine is None or watched.pid != os.getpid():
        _watched.remove(watched)
        return
    turn = engine.now  # a new object in every call
    if turn is IDLE or turn is not watched.turn:
        watched.turn, watched.since = turn, now
    elif now - watched.since >= seconds:
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            print(_words(engine, turn, now - watched.since), file=sys.stderr, flush=True)
        watched.since = math.inf


def _words(engine: Engine, turn: Turn, waited: float) -> str:
    name, origin = turn.name, turn.origin
    if origin is None:
        frame = sys._current_frames().get(turn.thread)
        what = f"{name}, called at {Origin(name, frame=frame).line}" if frame is not None else name
        others = NOT_MADE
    else:
        by = "" if origin.name == name else f" (which is {name})"
        what = f"{origin.name}, {origin.backward}{by}, called at {origin.line}"
        others = not_run(origin)
    return (
        f"diffcoll: rank {engine.rank} has waited {waited:.3g} s in {what}, for other ranks of {engine.description}: "
        f"one is busy, hangs, has ended, is in another collective, or {others}; DIFFCOLL_CHECK=1 makes ranks that "
        f"disagree an error that lists their calls; printed once per call, after {_VARIABLE} seconds (0: never)"
    )
