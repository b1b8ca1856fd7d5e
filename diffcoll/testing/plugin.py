"""Runs pytest's tests on ranks: the part of the plugin that needs torch. See `diffcoll_pytest` for the rest."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from types import MethodType
from typing import Any

import pytest

from diffcoll.engines.simulated_c10d import default_group
from diffcoll.testing.payload import payload_of
from diffcoll.testing.pool import Pool
from diffcoll.testing.processes import preload
from diffcoll.testing.rank_body import Body, BodyEnd, Copies, RankFixture, attempt, chained, text_of, unpacked
from diffcoll.testing.simulate import simulate
from diffcoll.testing.verdict import conclude, report_of
from diffcoll.testing.worker import STREAMS, Answer
from diffcoll_pytest import Ranks, ranks_of

_CAPTURING = {"capsys", "capsysbinary", "capteesys", "capfd", "capfdbinary"}
_OURS = {"rank", "group", "world_size"}


class Plugin:
    """The hooks of tests that run on ranks."""

    def __init__(self, config: pytest.Config) -> None:
        modules = [name.strip() for name in config.getoption("--ranks-preload").split(",") if name.strip()]
        preload("pytest", "diffcoll.testing.worker", *modules)
        self._modules, self._pool = modules, Pool()
        self._outcomes: list[BodyEnd] = []  # of the last run of the current test's body

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
        """Leave fixtures that use rank or group to the ranks."""
        if ranks_of(request.node) is None:
            return (yield)
        names = [name for name in fixturedef.argnames if name != "request"]
        arguments = {name: request.getfixturevalue(name) for name in names}
        if not any(isinstance(value, RankFixture) for value in arguments.values()):
            return (yield)
        if "request" in fixturedef.argnames:
            arguments["request"] = _Parameter(fixturedef.argname, getattr(request, "param", None))
        function = fixturedef.func
        if isinstance(function, MethodType) and request.instance is not None:
            function = MethodType(function.__func__, request.instance)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fixturedef, "func", lambda **_: RankFixture(fixturedef.argname, function, arguments))
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Adapt hypothesis's settings to ranks."""
        if ranks_of(item) is None or not _is_given(item):
            return (yield)
        assert isinstance(item, pytest.Function)
        with pytest.MonkeyPatch.context() as patch:
            # The attribute that hypothesis's own plugin sets for parametrized tests; settings have no public setter.
            function, name = getattr(item.obj, "__func__", item.obj), "_hypothesis_internal_use_settings"
            patch.setattr(function, name, _settings(item, getattr(function, name, None)), raising=False)
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run the body of a test on its ranks."""
        ranks = ranks_of(pyfuncitem)
        if ranks is None:
            return None
        # The names of the function's arguments, which have no public name; other plugins read them here too.
        names = pyfuncitem._fixtureinfo.argnames
        arguments = {name: pyfuncitem.funcargs[name] for name in names}
        try:
            if _is_given(pyfuncitem):
                self._run_examples(pyfuncitem, ranks, arguments)
            else:
                self._run(pyfuncitem, ranks, pyfuncitem.obj, (), arguments)
        finally:
            self._show_output(pyfuncitem)
        return True

    def _run_examples(self, item: pytest.Function, ranks: Ranks, arguments: dict[str, Any]) -> None:
        """Let hypothesis draw in this process, and run each example on the ranks."""
        handle = item.obj.hypothesis
        inner = handle.inner_test

        @functools.wraps(inner)
        def on_ranks(*args: Any, **kwargs: Any) -> None:
            self._run(item, ranks, inner, args, kwargs)

        handle.inner_test = on_ranks
        try:
            item.obj(**arguments)
        finally:
            handle.inner_test = inner

    def _run(
        self, item: pytest.Function, ranks: Ranks, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> None:
        """Run one function on all ranks, and raise what it has raised."""
        own = [value for value in item.funcargs.values() if isinstance(value, RankFixture) and value.function]
        call = Body(function, args, kwargs, own, _style(item.config))
        if ranks.kind == "simulated":
            captured = item.config.getoption("capture", "fd") != "no" and not _CAPTURING & set(item.fixturenames)
            self._outcomes = _on_simulated_ranks(call, ranks.size, captured, item.instance)
        else:
            payload = payload_of(item, call, ranks.kind, self._modules)
            answers = self._pool.run(ranks.kind, ranks.timeout, [payload] * ranks.size, captured=True)
            self._outcomes = [_outcome(rank, answers, ranks.timeout) for rank in range(ranks.size)]
        conclude(self._outcomes)

    def _show_output(self, item: pytest.Item) -> None:
        """Add what the ranks have printed to the test's report; without capturing, print it."""
        outcomes, self._outcomes = self._outcomes, []
        for outcome in outcomes:
            for name, text in outcome.output.items():
                if text and item.config.getoption("capture", "fd") == "no":
                    print(f"── {name} of rank {outcome.rank} ──\n{text}", file=getattr(sys, name))
                elif text:
                    item.add_report_section("call", f"{name} of rank {outcome.rank}", text)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Show the tracebacks of all ranks that failed."""
        report = yield
        chain, notes = report_of(call.excinfo.value) if call.excinfo is not None else ([], [])
        if chain:
            report.longrepr = chained(chain, notes)
        return report

    def pytest_unconfigure(self) -> None:
        """End the processes."""
        self._pool.close()


class _Parameter:
    """The `request` of a fixture that each rank sets up; it has `param` only."""

    def __init__(self, name: str, param: Any) -> None:
        self._name, self.param = name, param

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        raise AttributeError(
            f"fixture {self._name!r}: request.{attribute}: a fixture that uses rank or group runs on each rank, where "
            "request has param only; use request in another fixture, of which this one takes the value"
        )


def _outcome(rank: int, answers: Sequence[Answer], timeout: float) -> BodyEnd:
    """Return how the body ended on one rank; a rank that died or hung has the kind "lost"."""
    answer, failure = answers[rank], answers[rank].failure
    if failure is None:
        outcome = unpacked(answer.data)
    else:
        text = failure.text.rstrip()
        if failure.kind == "hung":
            others = any(a.failed and not (a.failure and a.failure.kind == "hung") for a in answers)
            when = "when another rank had ended" if others else f"after {timeout:g} s"
            text = f"the rank had not ended {when}; it {text}"
        outcome = BodyEnd(rank, "lost", None, text_of(text), answer.at)
    outcome.output = answer.output
    return outcome


def _is_given(item: pytest.Item) -> bool:
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


def _settings(item: pytest.Function, settings: Any) -> Any:
    """Return hypothesis's settings without the checks that ranks would fail.

    * The same method runs on another instance for each number of ranks, as under parametrize.
    * rank, group and world_size are function-scoped fixtures that examples cannot change.
    * The deadline, by default 200 ms, is for one body. An example runs N, one after the other on simulated ranks,
      and sets a group up on processes.
    """
    from hypothesis import HealthCheck
    from hypothesis import settings as Settings

    settings = settings or Settings.default
    unchecked = {*settings.suppress_health_check, HealthCheck.differing_executors}
    info = item._fixtureinfo
    scopes = [d.scope for name in info.argnames if name not in _OURS for d in info.name2fixturedefs.get(name, ())[-1:]]
    if "function" not in scopes:
        unchecked.add(HealthCheck.function_scoped_fixture)
    return Settings(parent=settings, suppress_health_check=list(unchecked), deadline=None)


def _style(config: pytest.Config) -> dict[str, Any]:
    """Return how the user wants tracebacks, as arguments of ExceptionInfo.getrepr and for `attempt`."""
    style = config.getoption("tbstyle", "auto")
    return {
        "style": "long" if style == "auto" else style,
        "short_between": style == "auto",
        "fulltrace": config.getoption("fulltrace", False),
        "showlocals": config.getoption("showlocals", False),
        "truncate_locals": config.get_verbosity() <= 1,
        "funcargs": True,
    }


def _on_simulated_ranks(call: Body, n: int, captured: bool, instance: object) -> list[BodyEnd]:
    outcomes: dict[int, BodyEnd] = {}
    contexts = _contexts_of_hypothesis()

    def body(rank: int) -> None:
        with contexts(), _captured(captured) as output:
            known = {"rank": rank, "group": default_group()}
            outcome = outcomes[rank] = attempt(call, rank, known, Copies(instance))
        outcome.output = {name: text.buffer.getvalue().decode() for name, text in output.items()}
        if outcome.error is not None:
            raise outcome.error

    try:
        simulate(body, range(n), torch_distributed=True)
    except BaseException as error:
        if all(outcome.error is not error for outcome in outcomes.values()):
            raise
    return [outcomes[r] for r in range(n)]


@contextlib.contextmanager
def _captured(wanted: bool) -> Iterator[dict[str, Any]]:
    """Capture this rank's output. While another rank runs, the streams are that rank's."""
    if not wanted:
        yield {}
        return
    new = {name: io.TextIOWrapper(io.BytesIO(), "utf-8", newline="", write_through=True) for name in STREAMS}
    with contextlib.redirect_stdout(new["stdout"]), contextlib.redirect_stderr(new["stderr"]):
        yield new


def _contexts_of_hypothesis() -> Callable[[], contextlib.ExitStack]:
    """Return a function that enters the current example in a rank's thread, for assume, note, event and target."""
    places = (("hypothesis.control", "_current_build_context"), ("hypothesis.reporting", "reporter"))
    found = [getattr(sys.modules.get(module), name, None) for module, name in places]
    current = [(variable, variable.value) for variable in found if variable is not None]

    def enter() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for variable, value in current:
            stack.enter_context(variable.with_value(value))
        return stack

    return enter
