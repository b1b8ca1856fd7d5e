"""How ranks fail: what each one raised, how its process ended, or the line it hangs in; and the error of them all."""

from __future__ import annotations

import linecache
import re
import traceback
from dataclasses import dataclass
from typing import Literal

from diffcoll.core.errors import is_users_file

#: What begins a line that names a collective in which a rank waits, and where it was called.
WAITS = "waits in "
#: A frame, as faulthandler writes it.
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')


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
        words = "".join(traceback.format_exception_only(error)).strip()
        lines = [
            f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__) if is_users_file(f.filename)
        ]
        message = words.removeprefix(name).removeprefix(": ")
        return cls("raised", "".join(traceback.format_exception(error)), name, message, lines[-1] if lines else "")

    @classmethod
    def hanging(cls, stack: str) -> RankFailure:
        """Return the failure of a rank that hangs with this stack of its main thread, as faulthandler writes it."""
        frames = [f for f in _FRAME.finditer(stack) if is_users_file(f["file"]) and not f["file"].startswith("<")]
        waits = re.search(rf"^{WAITS}.*, called at (?P<line>.*)$", stack, re.MULTILINE)
        what = f"hung: {waits[0]}" if waits else "hung"
        if not frames:
            return cls("hung", f"{what}, in no line of the user's\n{stack}", line=waits["line"] if waits else "")
        file, line, function = frames[0].group("file", "line", "function")
        code = linecache.getline(file, int(line)).strip()
        return cls("hung", f"{what} in {file}:{line}, in {function}: {code}\n{stack}", line=f"{file}:{line}")

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

    def __init__(self, text: str, failures: dict[int, RankFailure | None] | None = None, timeout: float = 0) -> None:
        #: Per rank: how it failed; None for a rank that returned.
        self.failures = failures or {}
        if failures:  # of the call that `text` names
            each = (f"── rank {r} of {len(failures)} ──\n{f.text if f else 'returned'}" for r, f in failures.items())
            text = "\n".join((f"{text}: {self._cause(timeout)}", *each))
        super().__init__(text)

    @property
    def first(self) -> RankFailure | None:
        """The failure that explains the others: not one that only says that another rank failed, if there is one."""

        def late(failure: RankFailure) -> int:
            return 2 if failure.type.endswith("CollectiveFailedError") else int(failure.kind == "died")

        return min((f for f in self.failures.values() if f and f.kind != "hung"), key=late, default=None)

    def _cause(self, timeout: float) -> str:
        """Return the failure that explains the others, on which ranks and where."""
        first = self.first
        if first is None:
            each = (f"  rank {r}: {f.summary if f else 'returned'}" for r, f in self.failures.items())
            return "\n".join((f"no end after {timeout:g} s", *each))
        alike = [str(r) for r, f in self.failures.items() if f and (f.summary, f.line) == (first.summary, first.line)]
        line = f", at {first.line}" if first.line else ""
        return f"rank{'s' * (len(alike) > 1)} {' and '.join(alike)} of {len(self.failures)}{line}: {first.summary}"
