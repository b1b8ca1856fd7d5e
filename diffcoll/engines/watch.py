"""One thread per process that warns, once per call, when this rank has waited long for the others.

A rank whose peers do not call the same collective waits until the group's timeout: half an hour by default on gloo,
for ever on MPI. Calls only set `Engine.now`, which this thread reads about once a second.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref

from diffcoll.core.errors import described, message
from diffcoll.engines.engine import Engine
from diffcoll.engines.turn import IDLE, Turn

#: Environment variable for the seconds after which to warn (0: never), and its default.
_VARIABLE, _DEFAULT = "DIFFCOLL_WARN_AFTER", "30"

_thread: threading.Thread | None = None


#: Of each engine the last value of its `now`, and when that was first seen.
_watched: weakref.WeakKeyDictionary[Engine, tuple[Turn, float]] = weakref.WeakKeyDictionary()


def watch(engine: Engine) -> None:
    """Start to watch an engine, unless it has one rank or the user has turned the warnings off."""
    global _thread
    seconds = _seconds()
    if engine.size == 1 or seconds == 0:
        return
    if _thread is None or not _thread.is_alive():  # not started yet, or not in this forked process
        _watched.clear()  # which inherits the engines, but not the threads that execute collectives
        _thread = threading.Thread(target=_look_again, args=(seconds,), name="diffcoll watch", daemon=True)
        _thread.start()
    _watched[engine] = IDLE, 0.0


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
        for reference in _watched.keyrefs():
            _look(reference(), seconds)


def _look(engine: Engine | None, seconds: float) -> None:
    if engine is None:
        return
    now, turn, (known, since) = time.monotonic(), engine.now, _watched[engine]
    if turn is IDLE or turn is not known:  # a new object in every call
        _watched[engine] = turn, now
    elif now - since >= seconds:
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            print(_words(engine, turn, now - since), file=sys.stderr, flush=True)
        _watched[engine] = turn, float("inf")


def waiting() -> list[str]:
    """Return what this process waits for now in each group that has several ranks, and the user's line, in words."""
    turns = [engine.now for reference in _watched.keyrefs() if (engine := reference()) is not None]
    frames, at_work = sys._current_frames(), [turn for turn in turns if turn is not IDLE]
    each = [described(turn.name, turn.origin, turn.compared, frames.get(turn.thread)) for turn in at_work]
    return [f"{what}, called at {line}" for what, line, _ in each]


def _words(engine: Engine, turn: Turn, waited: float) -> str:
    frame = sys._current_frames().get(turn.thread)
    what, line, why = described(turn.name, turn.origin, turn.compared, frame)
    return (
        f"diffcoll: rank {engine.rank} has waited {waited:.3g} s in {what}, called at {line}, for other ranks of "
        f"{engine.description}: one is busy, hangs, has ended, is in another collective, or {why}; printed once per "
        f"call, after {_VARIABLE} seconds (0: never)"
    )
