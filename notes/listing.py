"""Writes notes/reference.md: every public name and method, with its signature and its docstring's first sentence."""

import inspect
import re
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

from conf import MODULES, public

PAGE = Path(__file__).parent / "reference.md"
HEAD = """# Reference

Every public name, and the methods of classes: the signature, and the first sentence of the docstring, which `help()`
prints whole. The site has a page for each. This page is generated: `python notes/listing.py`.
"""


def signature(value: Any) -> str:
    """Return the parameters without their types, and without those that only catch errors; of an exception, nothing."""
    if isinstance(value, type) and issubclass(value, BaseException):
        return ""
    empty = inspect.Parameter.empty
    found = inspect.signature(value)
    bare = [p.replace(annotation=empty) for p in found.parameters.values() if p.name != "self" and p.name[0] != "_"]
    return str(found.replace(parameters=bare, return_annotation=empty)).replace("'", '"')


def row(name: str, value: Any) -> str:
    """Return the row of a name; first sentences may take several lines."""
    paragraph = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    sentence = re.split(r"(?<=\.)\s", paragraph)[0].rstrip(".").replace("|", "\\|")
    shown = f"{name}{signature(value)}" if callable(value) else name
    return f"| `{shown}` | {sentence} |\n"


def members(name: str, value: Any) -> dict[str, Any]:
    """Return the methods and properties that a class adds to its base, by their full names."""
    own = vars(value) if isinstance(value, type) else {}
    kinds = FunctionType, property
    return {
        f"{name}.{m}": v
        for m, v in own.items()
        if isinstance(v, kinds) and m[0] != "_" and not hasattr(value.__base__, m)
    }


def page() -> str:
    """Return the whole page."""
    text = HEAD
    for module_name, about in MODULES.items():
        module = import_module(module_name)
        text += f"\n## {module_name}\n\n{about}\n\n| name | what it does |\n|---|---|\n"
        for name in public(module):
            value = getattr(module, name)
            text += "".join(row(*each) for each in {name: value, **members(name, value)}.items())
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
