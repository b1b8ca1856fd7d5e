"""Errors of the library and the form of their messages.

A message names the operation and the argument, what it got, what it expected, and the remedy.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

__all__ = ["CollectiveFailedError", "CollectiveMismatchError", "Origin", "failure", "message", "user_line"]

#: How many frames of the library and of torch stand above the user's, at most.
_DEPTH = 24
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class CollectiveFailedError(RuntimeError):
    """The backend of a group failed: a peer died or did not come in time."""


class CollectiveMismatchError(RuntimeError):
    """The ranks of a group disagree on what they do together."""


def message(operation: str, argument: str, got: object, expected: str, remedy: str = "") -> str:
    """Return the text of an error about one argument of one operation."""
    text = f"{operation}: {argument}: got {got}, expected {expected}"
    return f"{text}; {remedy}" if remedy else text


def user_line() -> str:
    """Return "file:line" of the innermost frame outside this library and torch."""
    return Origin("").line


class Origin:
    """Where a collective was called, kept for an error that comes later: in backward, the call is long gone."""

    __slots__ = ("_frames", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        #: Code and place in it, innermost first: cheap to note, and holds no variables.
        self._frames: list[tuple[CodeType, int]] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(self._frames) < _DEPTH:
            self._frames.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back

    @property
    def line(self) -> str:
        """Return "file:line" of the innermost frame outside this library and torch."""
        for code, at in self._frames:
            file = code.co_filename
            inside = file.startswith(_HERE) or f"{os.sep}torch{os.sep}" in file or file.startswith("<frozen")
            if not inside and not (file.startswith("<") and code.co_name == "__init__"):  # what dataclasses make
                lines = (line for start, end, line in code.co_lines() if start <= at < end)
                return f"{file}:{next(lines, None) or code.co_firstlineno}"
        return "an unknown line"


def failure(name: str, group: str, rank: int, origin: Origin | None, error: BaseException) -> CollectiveFailedError:
    """Return what a collective of this name raises when its backend has failed.

    Args:
        name: of the collective that failed.
        group: words for it.
        rank: this rank within it.
        origin: of the forward call, if this was its backward; None: this was the forward call.
        error: of the backend.
    """
    if origin is None:
        what, line = f"{name}, forward", user_line()
        remedy = "look at the other ranks first: one died, hangs, or did not make this call"
    else:
        by = "" if origin.name == name else f" (which is {name})"
        what, line = f"{origin.name}, backward{by}", origin.line
        remedy = (
            "look at the other ranks first: one died, hangs, or did not run this backward because its loss does not "
            "use the output or its x requires no gradient; `with diffcoll.joint_backward()` makes every rank run it"
        )
    said = " ".join(str(error).split())
    return CollectiveFailedError(f"{what}: failed on rank {rank} of {group}, called at {line}: {said}; {remedy}")
