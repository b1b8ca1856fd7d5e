"""How ranks fail: what each one raised, how its process ended, or the line it hangs in; and the error of them all."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from diffcoll.core.errors import is_users_file


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed."""

    kind: Literal["raised", "died", "hung"]
    #: The traceback, how the process ended, or the Python stack it hung in.
    text: str
    #: The exception's class, as tracebacks name it, and its message with notes; "" unless one was raised.
    type: str = ""
    message: str = ""
    #: "file:line" of the user's innermost line that raised or hangs; "" if there is none.
    line: str = ""

    @classmethod
    def of(cls, error: BaseException) -> RankFailure:
        """Return the failure of a rank that raised this error."""
        name = type(error).__qualname__
        if type(error).__module__ not in ("builtins", "__main__"):
            name = f"{type(error).__module__}.{name}"
        words, frame = _words_and_frame(error)
        line = f"{frame.filename}:{frame.lineno}" if frame else ""
        message = words.removeprefix(name).removeprefix(": ")
        return cls("raised", "".join(traceback.format_exception(error)), name, message, line)

    @classmethod
    def hanging(cls, dump: str, caller: str) -> RankFailure:
        """Return the failure of a rank that hangs with these stacks of all its threads, as faulthandler writes them.

        The text begins with the user's innermost line. It has the threads that run code of the user's, each from the
        call that waits to the user's outermost line: not what called the user's function, which the file `caller` did.
        """
        threads = [users for thread in dump.rstrip().split("\n\n") if (users := _of_user(thread.splitlines(), caller))]
        if not threads:
            return cls("hung", f"hung, in no line of the user's\n{dump}")
        # The signal is handled in the main thread, which runs the call.
        threads.sort(key=lambda lines: not lines[0].startswith("Current thread"))
        innermost = next(frame for line in threads[0] if (frame := _users_frame(line)))
        place = f"{innermost['file']}:{innermost['line']}"
        code = linecache.getline(innermost["file"], int(innermost["line"])).strip()
        first = f"hung in {place}, in {innermost['function']}" + (f": {code}" if code else "")
        shown = "\n\n".join("\n".join(lines) for lines in threads)
        return cls("hung", f"{first}\n{shown}\n", line=place)

    @property
    def summary(self) -> str:
        """The exception as the last lines of a traceback show it, or the first line of the text."""
        if self.kind != "raised":
            return self.text.partition("\n")[0]
        return f"{self.type}: {self.message}" if self.message else self.type


class RanksFailedError(RuntimeError):
    """One rank or several failed; the message has the cause first, then every rank's traceback, or where it hung.

    >>> from diffcoll.testing import RanksFailedError, spawn
    >>> try:
    ...     spawn(lambda r: 1 / r, range(2))
    ... except RanksFailedError as error:
    ...     print(error.failures[0].type, error.failures[0].message, error.failures[1])
    ZeroDivisionError division by zero None
    """

    def __init__(self, text: str, failures: dict[int, RankFailure | None] | None = None) -> None:
        super().__init__(text)
        #: Per rank: how it failed; None for a rank that returned.
        self.failures = failures or {}

    @classmethod
    def of(cls, name: str, failures: dict[int, RankFailure | None], timeout: float) -> RanksFailedError:
        """Return the error of a call in which ranks failed: first the cause, then what happened on each rank."""
        each = (f"── rank {r} of {len(failures)} ──\n{f.text if f else 'returned'}" for r, f in failures.items())
        return cls("\n".join((f"{name}: {_cause(failures, timeout)}", *each)), failures)

    @property
    def first(self) -> RankFailure | None:
        """The failure that explains the others: not one that only says that another rank failed, if there is one."""
        return _first(self.failures)


def _first(failures: Mapping[int, RankFailure | None]) -> RankFailure | None:
    def late(failure: RankFailure) -> int:
        return 2 if failure.type.endswith("CollectiveFailedError") else int(failure.kind == "died")

    return min((f for f in failures.values() if f and f.kind != "hung"), key=late, default=None)


def _cause(failures: Mapping[int, RankFailure | None], timeout: float) -> str:
    """Return the failure that explains the others, in one sentence that begins with what it is."""
    first = _first(failures)
    if first is None:
        each = (f"  rank {r}: {f.summary if f else 'returned'}" for r, f in failures.items())
        return "\n".join((f"no end after {timeout:g} s", *each))
    alike = [
        r for r, f in failures.items() if f and (f.kind, f.type, f.message) == (first.kind, first.type, first.message)
    ]
    where = f"rank{'s' * (len(alike) > 1)} {' and '.join(map(str, alike))} of {len(failures)}"
    if first.kind != "raised":
        return f"{where}: {first.summary}"
    where = "every rank" if len(alike) == len(failures) > 1 else where
    lines = {f.line for r, f in failures.items() if f and r in alike}
    line = f", at {first.line}" if lines == {first.line} != {""} else ""
    said = f": {first.message}" if first.message else ""
    return f"{first.type.rpartition('.')[2]} on {where}{line}{said}"


def _words_and_frame(error: BaseException) -> tuple[str, traceback.FrameSummary | None]:
    """Return the last lines of a traceback, and the innermost line of the user's that raised the error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users_file(f.filename)]
    return "".join(traceback.format_exception_only(error)).strip(), frames[-1] if frames else None


# ── stacks, as faulthandler writes them ──────────────────────────────────────────────────────────────────

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')


def _of_user(thread: list[str], caller: str) -> list[str]:
    """Return the lines of a thread up to the user's outermost frame; none if it has no frame of the user's."""
    called = list(takewhile(lambda line: not line.startswith(f'  File "{caller}"'), thread))
    last = max((i for i, line in enumerate(called) if _users_frame(line)), default=-1)
    return called[: last + 1]


def _users_frame(line: str) -> re.Match[str] | None:
    frame = _FRAME.fullmatch(line)
    return frame if frame and is_users_file(frame["file"]) else None
