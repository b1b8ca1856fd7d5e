"""Copies a test body with its arguments to other processes.

The test's module and conftest files are copied by value: the asserts in them have been rewritten by pytest already, and
their global variables are as in the test's own process. Everything else is imported by the other process.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

import pytest

from diffcoll.testing._calls import missing
from diffcoll.testing.pickling import by_value, dumps
from diffcoll.testing.rank_body import Body, RankFixture, run_in_process

#: Fixtures that act on the test's own process, and what to use instead.
_LOCAL = {
    **dict.fromkeys(
        ("capsys", "capsysbinary", "capteesys", "capfd", "capfdbinary"),
        "each rank's output is in the report of a failed test",
    ),
    "caplog": "attach a handler in the test body",
    "recwarn": "use pytest.warns or warnings.catch_warnings in the test body",
    "request": "use its values in a fixture, and take those",
    "subtests": "use pytest.mark.parametrize",
    "pytester": "use it in a test without ranks",
    "record_property": "record in a fixture",
    "record_xml_attribute": "record in a fixture",
    "record_testsuite_property": "record in a fixture",
}


def payload_of(item: pytest.Function, call: Body, kind: str, preload: Sequence[str]) -> bytes:
    """Return a pickled call of `run_in_process`.

    Fails the test if it uses something that cannot be copied.
    """
    if importlib.util.find_spec("cloudpickle") is None:
        raise missing(f"ranks on {kind}", "cloudpickle", "test")
    for value in item.funcargs.values():
        if isinstance(value, pytest.MonkeyPatch):
            _refuse_patches(value, kind)
    patches: dict[int, RankFixture] = {}
    call.kwargs = _checked(item, call.kwargs, kind, patches)
    for fixture in call.fixtures:
        fixture.arguments = _checked(item, fixture.arguments, kind, patches)
    with by_value(_modules_of(item)):
        data, error = _dumped((run_in_process, (call, warnings.filters, preload, item.config.get_verbosity())))
        if error is None:
            return data
        _refuse(call, kind, error)


def _dumped(x: object) -> tuple[bytes, Exception | None]:
    """Pickle x; a class is copied without the hypothesis part of its methods."""
    try:
        return dumps(x, _without_hypothesis), None
    except Exception as error:
        return b"", error


def _without_hypothesis(obj: Any) -> Any:
    if inspect.isfunction(obj) and getattr(obj, "is_hypothesis_test", False):
        return getattr, (sys.modules[__name__], "_given")
    return NotImplemented


def _given(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("a test with @given runs in the process of pytest, and cannot be called on a rank")


def _checked(
    item: pytest.Function, arguments: dict[str, Any], kind: str, patches: dict[int, RankFixture]
) -> dict[str, Any]:
    """Return arguments without fixtures that act on this process; each rank makes a monkeypatch of its own."""
    checked = dict(arguments)
    for name, value in arguments.items():
        if name in _LOCAL and name in item.fixturenames and not hasattr(value, "param"):
            _fail(kind, f"fixture {name!r} acts on the process of pytest, and the ranks are others; {_LOCAL[name]}")
        if isinstance(value, pytest.MonkeyPatch):
            checked[name] = patches.setdefault(id(value), RankFixture(name, _monkeypatch))
    return checked


def _monkeypatch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def _refuse_patches(patch: pytest.MonkeyPatch, kind: str) -> None:
    """Fail if attributes or items were set before the body. The environment, sys.path and the folder are copied."""
    # These have no public names; without them nothing is checked.
    changed = [f"{target!r:.80}.{name}" for target, name, _ in getattr(patch, "_setattr", ())]
    changed += [f"{d!r:.80}[{key!r}]" for d, key, _ in getattr(patch, "_setitem", ()) if d is not os.environ]
    if changed:
        _fail(
            kind,
            f"fixture 'monkeypatch' has changed {', '.join(changed)} before the test body, which the ranks' processes "
            "do not see; change it in the body",
        )


def _modules_of(item: pytest.Function) -> Iterator[ModuleType]:
    """Yield the test's module and conftest files; what has no module of this name is copied by value anyway."""
    plugins = item.config.pluginmanager.get_plugins()
    for module in [item.module, *(p for p in plugins if _file(p) == "conftest.py")]:
        if isinstance(module, ModuleType) and sys.modules.get(module.__name__) is module:
            yield module


def _file(module: object) -> str:
    return os.path.basename(getattr(module, "__file__", None) or "")


def _refuse(call: Body, kind: str, error: Exception) -> NoReturn:
    """Fail the test, and name what cannot be pickled."""
    own = {name: value for name, value in call.kwargs.items() if not isinstance(value, RankFixture)}
    found = [(f"fixture or argument {name!r}", value) for name, value in own.items()]
    for fixture in call.fixtures:
        found += [(f"fixture {name!r}, used by {fixture.name!r},", value) for name, value in fixture.arguments.items()]
        found.append((f"fixture {fixture.name!r}", fixture.function))
    function = inspect.unwrap(getattr(call.function, "__func__", call.function))
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        found += [(f"global variable {name!r}", value) for name, value in variables.globals.items()]
        found += [(f"variable {name!r} of an enclosing function", value) for name, value in variables.nonlocals.items()]
    for name, value in [*found, ("the test function or its instance", call.function)]:
        _, reason = _dumped(value)
        if reason is not None:
            what = "" if name.startswith("the test") else f" of type {type(value).__name__}"
            _fail(
                kind,
                f"{name}{what} cannot be copied to the ranks' processes ({type(reason).__name__}: {reason}); make it "
                'in the test body, or run the test with on="simulated"',
            )
    _fail(kind, f"the test cannot be copied to the ranks' processes: {type(error).__name__}: {error}")


def _fail(kind: str, text: str) -> NoReturn:
    pytest.fail(f"ranks on {kind}: {text}", pytrace=False)
