"""One rank's part of a test: its own fixtures, the test body, and how it ended."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import os
import pickle
import sys
import time
import traceback
import unittest
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import Optimizer

from diffcoll.core.groups import get_rank
from diffcoll.engines.process_state import copies_end_here
from diffcoll.testing.patches import RankPatch
from diffcoll.testing.pickling import dumps
from diffcoll.testing.worker import Failed, current_group


@dataclass(eq=False, repr=False)
class RankFixture:
    """Stands for a value that each rank has for itself: rank, group, or a fixture that uses one of these."""

    name: str
    function: Callable[..., Any] | None = None  # which each rank calls; None for rank and group
    arguments: dict[str, Any] = field(default_factory=dict)  # of the function; some of them are RankFixture too

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
    """What simulated ranks must not share, copied for one of them.

    These are tensors, modules, optimizers, patches of the environment, and the test's instance.

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
        if isinstance(x, pytest.MonkeyPatch):
            return self._memo.setdefault(id(x), RankPatch(x))
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
    own: dict[int, Any] = {}
    stack = contextlib.ExitStack()

    def value(x: Any) -> Any:
        """Return this rank's value of an argument; set a fixture up at its first use."""
        if not isinstance(x, RankFixture):
            return x if copied is None else copied(x)
        if x.function is None:
            return known[x.name]
        if id(x) not in own:
            function = x.function if copied is None else copied(x.function)
            made = function(**{name: value(y) for name, y in x.arguments.items()})
            if inspect.isgenerator(made):
                generator, made = made, next(made)
                stack.callback(_tear_down, x.name, generator)
            own[id(x)] = made
        return own[id(x)]

    try:
        with stack, copies_end_here():
            for fixture in call.fixtures:
                value(fixture)
            call.function(*map(value, call.args), **{name: value(x) for name, x in call.kwargs.items()})
    except BaseException as error:
        *_, (frame, number) = traceback.walk_tb(error.__traceback__)
        line = frame.f_code.co_filename, number
        return BodyEnd(rank, _kind(error), error, traceback_of(error, call), time.monotonic(), line)
    return BodyEnd(rank, "passed", at=time.monotonic())


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


def _shown(text: str) -> Any:
    """Return what pytest shows of an error with this text and without a traceback."""
    try:
        raise RuntimeError(text)
    except RuntimeError as error:
        return pytest.ExceptionInfo.from_exception(error).getrepr(style="value")


def text_of(text: str) -> list[Any]:
    """Return text in the place of a traceback."""
    shown = _shown(text)
    return [(shown.reprtraceback, shown.reprcrash, None)]


def chained(chain: list[Any], notes: list[str]) -> Any:
    """Return tracebacks and notes as one, in the form of a report of pytest, which xdist can send."""
    shown = type(_shown(""))(chain)
    if notes:
        shown.addsection("notes", "\n".join(notes))
    return shown


# ── on processes ─────────────────────────────────────────────────────────────────────────────────────────


def run_in_process(call: Body, filters: list[Any], preload: Sequence[str], verbosity: int) -> bytes | Failed:
    """Run the test body in this rank's process. Returns the pickled outcome, for `unpacked`."""
    with warnings.catch_warnings(record=True) as log:
        try:
            for module in preload:
                importlib.import_module(module)
            _explain_comparisons(verbosity)
            warnings.filters[:] = filters  # type: ignore[index]
            if hypothesis := sys.modules.get("hypothesis.errors"):  # of assume() in another process than that of @given
                warnings.simplefilter("ignore", hypothesis.HypothesisDeprecationWarning)
        except BaseException as error:
            outcome = BodyEnd(get_rank(), "failed", error, traceback_of(error, call), time.monotonic())
        else:
            outcome = attempt(call, get_rank(), {"rank": get_rank(), "group": current_group()})
    data = _packed(outcome, [(w.message, w.category, w.filename, w.lineno) for w in log])
    return data if outcome.kind == "passed" else Failed(data)


def _packed(outcome: BodyEnd, log: list[Any]) -> bytes:
    """Pickle an outcome and warnings, without what cannot be pickled."""

    def dumped(x: Any) -> bytes | None:
        try:
            pickle.loads(data := dumps(x, _reduce))
        except Exception:
            return None
        return data

    chain = outcome.chain
    if dumped(chain) is None:
        chain = text_of("\n".join(str(element[0]) for element in chain))
    words = [dumped(warning) or pickle.dumps((str(warning[0]), UserWarning, *warning[2:])) for warning in log]
    return pickle.dumps((replace(outcome, error=None, chain=chain), dumped(outcome.error), words))


def unpacked(data: bytes) -> BodyEnd:
    """Return the outcome of a rank, and give its warnings in this process."""
    outcome: BodyEnd
    outcome, error, words = pickle.loads(data)
    if error is not None:
        with contextlib.suppress(Exception):  # its class cannot be imported here
            outcome.error = pickle.loads(error)
    for word in words:
        text, category, file, line = pickle.loads(word)
        warnings.warn_explicit(text, category, file, line)
    return outcome


def _reduce(obj: Any) -> Any:
    """Pickle the errors that pytest raises to end a test, which cannot be pickled otherwise."""
    for name in ("skip", "xfail", "fail", "exit"):
        if isinstance(obj, getattr(pytest, name).Exception):
            more = {"returncode": obj.returncode} if name == "exit" else {"pytrace": obj.pytrace}
            return partial(_of_pytest, name, str(obj), **more), ()
    return NotImplemented


def _of_pytest(name: str, text: str, **more: Any) -> BaseException:
    error: BaseException = getattr(pytest, name).Exception(text, **more)
    return error


# ── what pytest and hypothesis do in the test's own process ──────────────────────────────────────────────


def _explain_comparisons(verbosity: int) -> None:
    """Let rewritten asserts of the form a == b show how a and b differ."""
    # pytest sets this, without a public name, for the time of a test.
    from _pytest.assertion import util

    def explain(op: str, left: object, right: object) -> str | None:
        try:
            lines = _comparison(op, left, right)
        except Exception:  # another release of pytest; the values are shown without
            return None
        if len(lines) > 10 and verbosity < 2:
            lines = [*lines[:9], "...", "Full output truncated, use '-vv' to show"]
        return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%") or None

    util._reprcompare = explain


def _comparison(op: str, left: object, right: object) -> list[str]:
    """Return pytest's explanation of how two values differ."""
    global _config
    from _pytest.config import _prepareconfig

    if _config is None:
        arguments = ["-s", "-c", os.devnull, "--rootdir", "/", "-p", "no:cacheprovider"]
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the environment is set anew for each test
        _config = _prepareconfig(arguments)
    found = _config.hook.pytest_assertrepr_compare(config=_config, op=op, left=left, right=right)
    return next((list(lines) for lines in found if lines), [])


_config: Any = None
