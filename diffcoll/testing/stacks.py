"""The Python stacks of ranks that hang: which line of the user's each one is in."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import signal
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from diffcoll.core.errors import is_users_file
from diffcoll.testing import worker
from diffcoll.testing.processes import GRACE, Member, RankFailure

#: A frame of faulthandler's.
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')

#: The module that calls the user's function; what is called in it, and "<string>", starts the process.
_CALLER = f'  File "{worker.__file__}"'


def stacks(members: Sequence[Member], hanging: Sequence[int], folder: str) -> dict[int, RankFailure]:
    """Ask ranks that hang for their Python stacks."""
    for r in hanging:
        with contextlib.suppress(ProcessLookupError):
            os.kill(members[r].process.pid or 0, signal.SIGUSR1)
    found = {}
    end = time.monotonic() + GRACE
    for r in hanging:
        file = Path(folder, f"stack-{r}")
        while not (file.exists() and file.read_bytes().endswith(b"\n")) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.05)
        # Whatever the rank has written to it.
        found[r] = of_dump(file.read_text("utf-8", "replace") if file.exists() else "")
    return found


def of_dump(dump: str) -> RankFailure:
    """Return the failure of a rank that hangs with these stacks of all its threads, as faulthandler writes them.

    The text begins with the user's innermost line. It has the threads that run code of the user's, each from the call
    that waits to the user's outermost line: neither what called the user's function nor threads of the library.
    """
    if not dump:
        return RankFailure("hung", "hung; no stack trace available\n")
    threads = [users for thread in dump.rstrip().split("\n\n") if (users := _of_user(thread.splitlines()))]
    if not threads:
        return RankFailure("hung", f"hung, in no line of the user's\n{dump}")
    # The signal is handled in the main thread, which runs the call.
    threads.sort(key=lambda lines: not lines[0].startswith("Current thread"))
    innermost = next(frame for line in threads[0] if (frame := _users_frame(line)))
    place = f"{innermost['file']}:{innermost['line']}"
    code = linecache.getline(innermost["file"], int(innermost["line"])).strip()
    first = f"hung in {place}, in {innermost['function']}" + (f": {code}" if code else "")
    shown = "\n\n".join("\n".join(lines) for lines in threads)
    return RankFailure("hung", f"{first}\n{shown}\n", line=place)


def _of_user(thread: list[str]) -> list[str]:
    """Return the lines of a thread up to the user's outermost frame; none if it has no frame of the user's."""
    called = list(takewhile(lambda line: not line.startswith(_CALLER), thread))
    last = max((i for i, line in enumerate(called) if _users_frame(line)), default=-1)
    return called[: last + 1]


def _users_frame(line: str) -> re.Match[str] | None:
    frame = _FRAME.fullmatch(line)
    return frame if frame and is_users_file(frame["file"]) else None
