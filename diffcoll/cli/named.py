"""Finds the functions and modules that the command line names: `package.module:name`, `path/to/file.py:name`."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from diffcoll.cli.importing import NotUsableError, importing


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
        with importing(argument, str(file or name), timeout):
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
