"""Leaves a line of the library out."""

import inspect
import textwrap


def planted(owner, name, line, instead="pass", setattr=setattr):
    """Replace one line of a function of a class or module; it must be there once."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{line!r} in {name}"
    found = {}
    exec("from __future__ import annotations\n" + source.replace(line, instead), function.__globals__, found)
    setattr(owner, name, found[name])
