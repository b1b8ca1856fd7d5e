"""Errors of the library and the form of their messages.

A message names the operation and the argument, what it got, what it expected, and the remedy.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from types import FrameType

__all__ = ["CollectiveFailedError", "CollectiveMismatchError", "Origin", "failure", "line_of", "message", "user_line"]

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


def line_of(frame: FrameType) -> str:
    """Return "file:line" of the innermost frame, from this one outwards, outside this library and torch."""
    while _is_inside(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Origin:
    """Where a collective was called, kept for an error that comes later: in backward, the call is long gone.

    Args:
        name: of the collective.
        inside: how many callers are known to be of this library or torch, so that their frames need not be made.
    """

    __slots__ = ("_at", "_code", "name")

    def __init__(self, name: str, inside: int = 0) -> None:
        self.name = name
        frame: FrameType = sys._getframe(1 + inside)
        while _is_inside(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        # The code and a place in it are cheap to note, and hold no variables.
        self._code, self._at = frame.f_code, frame.f_lasti

    @property
    def line(self) -> str:
        """Return "file:line" of the innermost frame outside this library and torch."""
        lines = (line for start, end, line in self._code.co_lines() if start <= self._at < end)
        return f"{self._code.co_filename}:{next(lines, None) or self._code.co_firstlineno}"


@cache
def _is_inside(file: str) -> bool:
    """Whether a file is of this library, of torch, or none (what dataclasses make)."""
    return file.startswith((_HERE, "<")) or f"{os.sep}torch{os.sep}" in file


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
