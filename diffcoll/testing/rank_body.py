"""One rank's part of a test: its own fixtures, the test body, and how it ended."""

from __future__ import annotations

import contextlib
import copy
import inspect
import time
import traceback
import unittest
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import Optimizer

from diffcoll.engines.process_state import copies_end_here


class RankFixture:
    """Stands for a value that each rank has for itself: rank, group, or a fixture that uses one of these.

    Args:
        name: of the fixture.
        function: the fixture function, which each rank calls; None for rank and group.
        arguments: of the fixture function; some of them are RankFixture too.
    """

    def __init__(
        self, name: str, function: Callable[..., Any] | None = None, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self.name = name
        self.function = function
        self.arguments = dict(arguments or {})

    def __repr__(self) -> str:
        return f"<{self.name} of each rank>"


@dataclass
class Body:
    """A test body, its arguments, and how to format a traceback."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fixtures: list[RankFixture] = field(default_factory=list)  # those of this test, in the order of their setup
    style: dict[str, Any] = field(default_factory=dict)  # arguments of ExceptionInfo.getrepr


@dataclass
class BodyEnd:
    """How the test body ended on one rank."""

    rank: int
    kind: str  # "passed", "skipped", "xfailed", "failed", "rejected" by hypothesis, "interrupted"
    error: BaseException | None = None
    chain: list[Any] = field(default_factory=list)  # as in pytest's ExceptionChainRepr
    at: float = 0.0  # time.monotonic(), which is the same in all processes of a machine
    line: tuple[str, int] | None = None  # file and line where the error was raised
    output: dict[str, str] = field(default_factory=dict)  # of "stdout" and "stderr"


class Copies:
    """What simulated ranks must not share, copied for one of them: tensors, modules, optimizers, the test's instance.

    On processes all arguments are copies.
    """

    def __init__(self, instance: object) -> None:
        self._instance = instance
        self._memo: dict[int, Any] = {}
        self._own: Any = None
        if instance is not None:
            self._own = copy.copy(instance)
            for name, value in vars(instance).items():
                setattr(self._own, name, self(value))

    def __call__(self, x: Any) -> Any:
        """Return this rank's copy of an argument or a function, or x itself."""
        if self._instance is not None and x is self._instance:
            return self._own
        if self._instance is not None and getattr(x, "__self__", None) is self._instance:
            return MethodType(x.__func__, self._own)
        if isinstance(x, (nn.Module, Optimizer)) or (isinstance(x, Tensor) and x.is_leaf):
            with contextlib.suppress(Exception):  # such as a lock in a module
                return copy.deepcopy(x, self._memo)
        return x


def attempt(call: Body, rank: int, known: Mapping[str, Any], copied: Callable[[Any], Any] | None = None) -> BodyEnd:
    """Run the test body on this rank.

    Args:
        call: the test body.
        rank: this rank.
        known: values of the fixtures rank and group.
        copied: returns this rank's copy of an argument; None: the arguments are this rank's already.
    """
    if copied is not None:
        call = replace(call, function=copied(call.function))
    try:
        with contextlib.ExitStack() as stack, copies_end_here():
            value = partial(_value_of, known=known, own={}, stack=stack, copied=copied or (lambda x: x))
            for fixture in call.fixtures:
                value(fixture)
            call.function(*map(value, call.args), **{name: value(x) for name, x in call.kwargs.items()})
    except BaseException as error:
        *_, (frame, number) = traceback.walk_tb(error.__traceback__)
        line = frame.f_code.co_filename, number
        return BodyEnd(rank, _kind(error), error, traceback_of(error, call), time.monotonic(), line)
    return BodyEnd(rank, "passed", at=time.monotonic())


def _value_of(
    x: Any,
    known: Mapping[str, Any],
    own: dict[int, Any],
    stack: contextlib.ExitStack,
    copied: Callable[[Any], Any],
) -> Any:
    """Return this rank's value of an argument; set a fixture up at its first use."""
    if not isinstance(x, RankFixture):
        return copied(x)
    if x.function is None:
        return known[x.name]
    if id(x) not in own:
        arguments = {name: _value_of(y, known, own, stack, copied) for name, y in x.arguments.items()}
        made = copied(x.function)(**arguments)
        if inspect.isgenerator(made):
            generator, made = made, next(made)
            stack.callback(_tear_down, x.name, generator)
        own[id(x)] = made
    return own[id(x)]


def _tear_down(name: str, generator: Any) -> None:
    try:
        next(generator)
    except StopIteration:
        return
    raise RuntimeError(f"fixture {name!r} yields more than once")


def _kind(error: BaseException) -> str:
    if isinstance(error, (pytest.skip.Exception, unittest.SkipTest)):
        return "skipped"
    if isinstance(error, pytest.xfail.Exception):
        return "xfailed"
    if isinstance(error, (KeyboardInterrupt, pytest.exit.Exception)):
        return "interrupted"
    # By name, so that tests without hypothesis do not import it: raised by assume() and by strategies.
    if type(error).__module__.startswith("hypothesis.") and type(error).__name__ in (
        "UnsatisfiedAssumption",
        "StopTest",
    ):
        return "rejected"
    return "failed"


def traceback_of(error: BaseException, call: Body) -> list[Any]:
    """Return the error's traceback, formatted as pytest does in the test's own process."""
    try:
        info = pytest.ExceptionInfo.from_exception(error)
        style = dict(call.style)
        if isinstance(error, pytest.fail.Exception) and not error.pytrace:
            style["style"] = "value"
        if not style.pop("fulltrace", False):
            style["tbfilter"] = partial(_filtered, call.function, style.pop("short_between", False))
        shown = info.getrepr(**style)
    except Exception as failure:  # such as an exception whose __str__ raises
        return text_of(f"{type(error).__name__}, which could not be shown: {type(failure).__name__}: {failure}")
    return list(getattr(shown, "chain", [(shown.reprtraceback, shown.reprcrash, None)]))


def _filtered(function: Callable[..., Any], short: bool, info: pytest.ExceptionInfo[BaseException]) -> Any:
    """Return the traceback from the test function on, without frames that hide themselves."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    whole = info.traceback
    if code is None:
        return whole.filter(info)
    cut = whole.cut(path=code.co_filename, firstlineno=code.co_firstlineno - 1)
    if cut == whole:
        cut = whole.cut(path=code.co_filename)
    cut = cut.filter(info)
    if short and len(cut) > 2:
        cut = type(cut)([cut[0], *(entry.with_repr_style("short") for entry in cut[1:-1]), cut[-1]])
    return cut


def text_of(text: str) -> list[Any]:
    """Return text in the place of a traceback."""
    try:
        raise RuntimeError(text)
    except RuntimeError as error:
        shown: Any = pytest.ExceptionInfo.from_exception(error).getrepr(style="value")
    return [(shown.reprtraceback, shown.reprcrash, None)]


def chained(chain: list[Any], notes: list[str]) -> Any:
    """Return tracebacks and notes as one, in the form of a report of pytest, which xdist can send."""
    try:
        raise RuntimeError
    except RuntimeError as error:
        kind: Any = type(pytest.ExceptionInfo.from_exception(error).getrepr(style="value"))
    shown = kind(chain)
    if notes:
        shown.addsection("notes", "\n".join(notes))
    return shown


def packed(error: BaseException | None) -> Any:
    """Return the error, or what to make one of pytest's from, which cannot be pickled."""
    for name in ("skip", "xfail", "fail", "exit"):
        if isinstance(error, getattr(pytest, name).Exception):
            return name, str(error), getattr(error, "pytrace", True), getattr(error, "returncode", None)
    return error


def unpacked(x: Any) -> BaseException | None:
    """Return the error that was packed."""
    if not isinstance(x, tuple):
        return x if isinstance(x, BaseException) else None
    name, text, pytrace, code = x
    kind = getattr(pytest, name).Exception
    error: BaseException = kind(text, returncode=code) if name == "exit" else kind(text, pytrace=pytrace)
    return error
