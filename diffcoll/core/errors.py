"""Errors of the library and the form of their messages.

A message names the operation and the argument, what it got, what it expected, and the remedy.
"""

from __future__ import annotations

import os
import sys
import threading
from copy import copy
from functools import cache
from types import CodeType, FrameType

import torch

from diffcoll.core.torch_private.autograd import backward_at_work

#: Folders of the library, of torch and of Python, below which installed packages may be, which are users' code.
_OURS = tuple(os.path.dirname(str(path)) + os.sep for path in (os.path.dirname(__file__), torch.__file__))
_PYTHON = os.path.dirname(os.__file__) + os.sep
_INSTALLED = tuple(_PYTHON + folder + os.sep for folder in ("site-packages", "dist-packages"))
#: Prefixes of the file names of generated code: importlib, torch.fx, and decorators of other libraries.
_GENERATED = ("<frozen ", "<eval_with_key>", "<@beartype", "<attrs generated ", "<decorator-gen")
#: What ranks whose x differ in size can do.
UNEVEN = 'blocks of other sizes: all_gather and gather with sizes="auto"'
#: Why a rank may not have joined a forward call.
NOT_MADE = f"did not make this call, or its x is of another shape ({UNEVEN})"


class CollectiveFailedError(RuntimeError):
    """The backend of a group failed: a rank died or did not join the collective in time."""


class CollectiveMismatchError(RuntimeError):
    """The ranks of a group made different calls, or one call with different arguments."""


def message(operation: str, argument: object, got: object, expected: str, remedy: str = "") -> str:
    """Return the text of an error about one argument of one operation."""
    text = f"{operation}: {argument}: got {got}, expected {expected}"
    return f"{text}; {remedy}" if remedy else text


def of_uneven(collective: str) -> str:
    """Return what to add to an error if ranks gather blocks that do not fit together."""
    return f"; {UNEVEN}" if collective in ("all_gather", "gather") else ""


def user_line() -> str:
    """Return "file:line" of the innermost frame outside this library, torch and the standard library."""
    return Origin("").line


class Origin:
    """The line of a collective's forward call, kept for errors in its backward.

    Args:
        name: of the collective.
        inside: number of callers known to be of this library or torch, whose frames are skipped.
        frame: the frame to start from, for another thread; None: the caller's.
        number: of the call, counted in its group.
        order: of the backward for which this is kept; 0: the call itself.
    """

    __slots__ = ("_at", "_code", "elsewhere", "name", "number", "order")

    def __init__(
        self, name: str, inside: int = 0, frame: FrameType | None = None, number: int = 0, order: int = 1
    ) -> None:
        self.name, self.number, self.order = name, number, order
        #: Whether the graph of that backward was made in another thread than the forward's.
        self.elsewhere = False
        frame = frame or sys._getframe(1 + inside)
        while frame is not None and (_is_inside(frame.f_code.co_filename) or _is_ours(frame.f_globals.get("__name__"))):
            frame = frame.f_back
        # A code object and an offset are cheap to keep; a frame would keep its variables alive.
        self._code: CodeType | str
        if frame is None:  # the thread's target is a function of the library or torch
            self._code, self._at = f"<start of thread {threading.current_thread().name!r}>", 0
        else:
            self._code, self._at = frame.f_code, frame.f_lasti

    @property
    def line(self) -> str:
        """Return "file:line" of the call."""
        code = self._code
        if isinstance(code, str):
            return code
        lines = (line for start, end, line in code.co_lines() if start <= self._at < end)
        return f"{code.co_filename}:{next(lines, None) or code.co_firstlineno}"

    @property
    def backward(self) -> str:
        """Return words for the backward of this order."""
        first = {1: "backward", 2: "second-order backward"}
        return first.get(self.order, f"backward of order {self.order}")

    def derived(self, order: int, elsewhere: bool = False) -> Origin:
        """Return a copy for the backward of this order; `elsewhere` stays true in higher ones."""
        following = copy(self)
        following.order, following.elsewhere = order, self.elsewhere or elsewhere
        return following


@cache
def _is_inside(file: str) -> bool:
    """Whether this file belongs to the library, torch or the standard library, or is generated."""
    return file.startswith((*_OURS, *_GENERATED)) or (file.startswith(_PYTHON) and not file.startswith(_INSTALLED))


@cache
def is_users_file(file: str) -> bool:
    """Whether this file is neither of the library, torch or the standard library, nor of an installed package."""
    installed = any(os.sep + folder + os.sep in file for folder in ("site-packages", "dist-packages"))
    return not _is_inside(file) and not file.startswith(_PYTHON) and not installed


@cache
def _is_ours(module: str | None) -> bool:
    """Whether a module is of the library or torch; dataclasses and inductor generate code of these in other files.

    So is the wrapper of what torch deprecates.
    """
    return module is not None and module.partition(".")[0] in ("diffcoll", "torch", "typing_extensions")


def within_backward() -> str:
    """Return words for a forward call made within a backward: by a checkpoint, a hook or the user's Function."""
    return "" if backward_at_work() == -1 else " (within a backward)"


def not_run(origin: Origin | None) -> str:
    """Return why a rank may not have made a call of a backward, and the remedy.

    Args:
        origin: of the forward call whose backward this is; None: it is a forward call within a backward.
    """
    if origin is None:
        why = "a checkpoint computes its part again only on ranks whose loss needs a tensor saved in it"
    elif origin.order == 1:
        why = "its loss does not use the output or its x requires no gradient"
    else:
        why = "the gradients in its loss do not depend on the output, e.g. if the loss is linear in it"
    why = f"it called backward() less often, or {why}"
    remedy = "in the last case, `with diffcoll.joint_backward()` makes every rank run it"
    return f"did not run this backward: {why}; {remedy}"


def described(name: str, origin: Origin | None, compared: bool, frame: FrameType | None = None) -> tuple[str, str, str]:
    """Return words for a call that other ranks have not joined, its line, and why they may not have.

    Args:
        name: of the collective.
        origin: the forward call, if it is part of its backward.
        compared: whether check mode compares the ranks' calls.
        frame: where the call is in progress, in another thread; None: in this one.
    """
    if origin is not None:
        by = "" if origin.name == name else f" (which is {name})"
        return f"{origin.name}, {origin.backward}{by}", origin.line, not_run(origin)
    within = "" if frame else within_backward()
    why = not_run(None) if within else NOT_MADE if compared else f"{NOT_MADE}; DIFFCOLL_CHECK=1 compares all calls"
    return f"{name}, forward{within}", Origin(name, frame=frame).line, why


def failure(
    name: str, group: str, rank: int, origin: Origin | None, error: BaseException, compared: bool = False
) -> CollectiveFailedError:
    """Return the error of a call whose backend has failed, see `described`, on this rank of a group."""
    what, line, why = described(name, origin, compared)
    said = " ".join(str(error).split())
    return CollectiveFailedError(
        f"{what}: failed on rank {rank} of {group}, called at {line}: {said}; look at the other ranks "
        f"first: one died, hangs, or {why}"
    )
