"""Errors of the library and the form of their messages.

A message names the operation and the argument, what it got, what it expected, and the remedy.
"""

from __future__ import annotations

import os
import sys

__all__ = ["CollectiveMismatchError", "message", "user_line"]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class CollectiveMismatchError(RuntimeError):
    """The ranks of a group disagree on what they do together."""


def message(operation: str, argument: str, got: object, expected: str, remedy: str = "") -> str:
    """Return the text of an error about one argument of one operation."""
    text = f"{operation}: {argument}: got {got}, expected {expected}"
    return f"{text}; {remedy}" if remedy else text


def user_line() -> str:
    """Return "file:line" of the innermost frame outside this library and torch."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        inside = file.startswith(_HERE) or f"{os.sep}torch{os.sep}" in file or file.startswith("<")
        if not inside:
            return f"{file}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "an unknown line"
