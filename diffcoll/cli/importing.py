"""Finds what the command line names: `package.module:name`, `path/to/file.py:name`.

The module that is imported may be a program that trains when it is imported.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest.mock import patch

from diffcoll.core.errors import is_users_file
from diffcoll.testing.simulate import calls_torch_distributed

#: Seconds after the time limit in which Python code can be interrupted; other code, such as a wait for a peer, cannot.
_GRACE = 3.0
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_EXPECTED = "one that defines functions"


class NotUsableError(Exception):
    """What an argument of the command line names cannot be used; the text says why, and what to do."""

    def __init__(self, argument: str, got: object, expected: str, remedy: str = "") -> None:
        super().__init__(f"argument {argument}: got {got}, expected {expected}{remedy and '; '}{remedy}")


def named(text: str, argument: str, home: ModuleType | None = None, timeout: float = 60) -> tuple[ModuleType, Any]:
    """Return the Python module that a name leads to, and the object in it. Changes `sys.path`.

    Args:
        text: "package.module:name", "path/to/file.py:name", or "name" for one in `home`; a name may have dots.
        argument: of the command line, for errors.
        home: the module of names without a colon; None: there is none.
        timeout: seconds that the import of a module may take.

    Raises:
        NotUsableError: there is no such module or name, or the module is a program that runs when it is imported.
        Exception: what the module raised when it was imported.
    """
    where, colon, name = text.rpartition(":")
    relative = where.startswith(".") and not where.endswith(".py") and os.sep not in where
    if not name or relative or bool(colon) != bool(where) or not (where or home):
        raise NotUsableError(argument, repr(text), "package.module:name or path/to/file.py:name")
    module = _imported(where, argument, timeout) if where else home
    assert module is not None
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            known = _names(module)
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]}?" if near else f"it has {', '.join(known) or 'none'}"
            expected = f"a name in {place(module)}"
            raise NotUsableError(argument, repr(name), expected, remedy) from None
    return module, found


def called(found: Any) -> str:
    """Return the name of a function or another object, for errors."""
    return str(getattr(found, "__name__", type(found).__name__))


def place(module: ModuleType) -> str:
    """Return the file of a module, or its name if it has none, for errors."""
    return getattr(module, "__file__", None) or module.__name__


def _imported(where: str, argument: str, timeout: float) -> ModuleType:
    file = Path(where).absolute() if where.endswith(".py") or os.sep in where else None
    folder, name = (Path.cwd(), where) if file is None else _importable(file, argument)
    sys.path.insert(0, str(folder))
    try:
        with _importing(argument, str(file or name), timeout):
            module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, and imports one that does not
        expected = f"a module that can be imported in {folder}"
        raise NotUsableError(argument, repr(where), expected, "for a file pass path/to/file.py:name") from None
    if file is not None and Path(module.__file__ or "").resolve() != file.resolve():
        expected = f"another name: Python has the module {name!r} from {module.__file__ or 'itself'}"
        raise NotUsableError(argument, repr(where), expected, "rename the file")
    return module


def _importable(file: Path, argument: str) -> tuple[Path, str]:
    """Return the folder from which a file is imported, outside of all packages, and its name there."""
    if not file.is_file():
        raise NotUsableError(argument, str(file), "a file of Python code; there is none")
    folder, parts = file.parent, [file.stem]
    while (folder / "__init__.py").exists():
        folder, parts = folder.parent, [folder.name, *parts]
    return folder, ".".join(parts)


def _names(module: ModuleType) -> list[str]:
    """Return the names that a module defines itself."""

    def is_own(value: Any) -> bool:
        if inspect.isfunction(value) or inspect.isclass(value):
            return value.__module__ == module.__name__
        return not inspect.ismodule(value) and not inspect.isbuiltin(value)

    return [name for name, value in vars(module).items() if not name.startswith("_") and is_own(value)]


# ── the import ───────────────────────────────────────────────────────────────────────────────────────────


class _Late(BaseException):
    """Ends an import whose time is over; not an Exception, so that the user's code does not catch it."""


@contextlib.contextmanager
def _importing(argument: str, program: str, seconds: float) -> Iterator[None]:
    """Import a module of the user's within, as a program without arguments and input, and within a time limit.

    Raises:
        NotUsableError: the module does what only a program should do; the text says which lines to move.
    """
    late = f"a module whose import had not ended after {seconds:g} s"
    try:
        with patch.multiple(sys, argv=[program], stdin=io.StringIO()), _limited(argument, late, seconds):
            yield
    except BaseException as error:
        got = late if isinstance(error, _Late) else _only_a_program(error)
        if got is None:
            raise
        remedy = _remedy(traceback.walk_tb(error.__traceback__))
        raise NotUsableError(argument, got, _EXPECTED, remedy) from None


def _only_a_program(error: BaseException) -> str | None:
    """Say what a module did that only a program should do, by the error that it raised; None: nothing such."""
    if isinstance(error, SystemExit):
        return f"a module that ends the program when it is imported ({error.code})"
    if isinstance(error, EOFError):
        return "a module that reads the standard input when it is imported"
    variable = isinstance(error, KeyError) and error.args[:1] and error.args[0] in _LAUNCHERS
    if variable or (isinstance(error, Exception) and calls_torch_distributed(error)):
        return f"a module that needs a launcher when it is imported ({type(error).__name__}: {error})"
    return None


@contextlib.contextmanager
def _limited(argument: str, late: str, seconds: float) -> Iterator[None]:
    """Raise _Late when the time is over, and end the process if that does not help. In the main thread only."""
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        yield
        return

    def end() -> None:
        frames = traceback.walk_stack(sys._current_frames()[thread.ident or 0])
        error = NotUsableError(argument, late, _EXPECTED, _remedy(reversed(list(frames))))
        print(f"diffcoll check: error: {error}", file=sys.stderr, flush=True)
        os._exit(2)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Late

    timer = threading.Timer(seconds + _GRACE, end)
    timer.daemon = True
    before: Any = signal.signal(signal.SIGALRM, interrupt)
    timer.start()
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)  # again, where it was ignored, as in a destructor
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        timer.cancel()


def _remedy(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Say which statement to move: that of the innermost module of the user's which is being imported."""
    places = [(f.f_code.co_filename, n) for f, n in frames if f.f_code.co_name == "<module>"]
    places = [(file, n) for file, n in places if is_users_file(file)]
    guard = "below `if __name__ == '__main__':`"
    if not places:
        return f"move what only the program needs {guard}"
    file, line = places[-1]
    first, last, text = _statement(file, line)
    lines = f"line {first}" if first == last else f"lines {first} to {last}"
    return f"move {lines} of {file}, `{text}`, and what else only the program needs, {guard}"


def _statement(file: str, line: int) -> tuple[int, int, str]:
    """Return the first and the last line of a module's statement, and the text of its first line."""
    with contextlib.suppress(OSError, ValueError, SyntaxError):
        source = Path(file).read_text(encoding="utf-8")
        for each in ast.parse(source).body:
            last = each.end_lineno or each.lineno
            if each.lineno <= line <= last:
                return each.lineno, last, source.splitlines()[each.lineno - 1].strip()
    return line, line, "…"
