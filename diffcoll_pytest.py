"""The pytest plugin: options, the marker `ranks` and its fixtures.

pytest imports this module in every project of an environment in which diffcoll is installed. It is not in the package
because that would import torch. `diffcoll.testing.plugin`, which runs marked tests, is imported when the first one is
collected.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

KINDS = ("simulated", "gloo", "mpi", "nccl")

_MARKER = (
    "ranks(*sizes, on=None, timeout=60): run the test body once on each of N ranks, for each N of sizes, with the "
    'fixtures rank, world_size and group; on: "simulated", "gloo", "mpi", "nccl" or a list of these (default: the '
    "option --ranks); timeout: seconds until ranks on processes are ended"
)
_NO_MARKER = (
    "fixture '{}' exists in tests with a number of ranks only; mark the test function or its class with "
    "@pytest.mark.ranks(N)"
)


class Ranks(NamedTuple):
    """What one test runs on."""

    size: int
    kind: str
    timeout: float


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("ranks", "tests marked with @pytest.mark.ranks (diffcoll)")
    group.addoption(
        "--ranks",
        choices=KINDS,
        default="simulated",
        help="what the ranks of tests marked with @pytest.mark.ranks are: simulated in this process (default), or "
        "processes on gloo, mpi or nccl",
    )
    group.addoption(
        "--ranks-preload",
        metavar="MODULES",
        default="",
        help="modules to import once in the server that forks the ranks' processes, separated by commas",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(trylast=True)  # so that the ranks are the last part of a test's id
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each number of ranks, and load the plugin that runs them."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    try:
        runs = _runs(marker, metafunc.function, metafunc.config)
    except ValueError:
        return  # pytest_runtest_setup raises it: here it would keep the tests of the whole file from running
    pinned = len({run.kind for run in runs}) > 1
    ids = [f"{run.size} rank{'s' * (run.size > 1)}{f' on {run.kind}' * pinned}" for run in runs]
    metafunc.fixturenames.append("_ranks")
    metafunc.parametrize("_ranks", runs, indirect=True, ids=ids, scope="function")
    plugins = metafunc.config.pluginmanager
    if not plugins.has_plugin("diffcoll.testing.plugin"):
        from diffcoll.testing import plugin

        plugins.register(plugin.Plugin(metafunc.config), "diffcoll.testing.plugin")


def _runs(marker: pytest.Mark, function: Callable[..., Any], config: pytest.Config) -> list[Ranks]:
    """Return what a marker means; ValueError: its arguments or the function are wrong."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError("got an async test, expected a plain function; call asyncio.run() in its body")
    sizes, more = marker.args, {"on": None, "timeout": 60, **marker.kwargs}
    on, timeout = more.pop("on"), more.pop("timeout")
    if more:
        got = ", ".join(f"{name}={value!r}" for name, value in more.items())
        raise ValueError(f"got {got}, expected numbers of ranks, on= and timeout=, e.g. ranks(2, 3, on='gloo')")
    if not sizes or not all(type(n) is int and n > 0 for n in sizes):
        raise ValueError(f"got sizes {list(sizes)}, expected one or more numbers of ranks, e.g. ranks(2, 3)")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= 1e6:
        raise ValueError(f"timeout: got {timeout!r}, expected a number of seconds above 0, at most a million")
    kinds = config.getoption("--ranks") if on is None else on
    kinds = list(kinds) if isinstance(kinds, (list, tuple)) else [kinds]
    if not kinds or any(kind not in KINDS for kind in kinds):
        raise ValueError(f"on: got {on!r}, expected one or more of {', '.join(map(repr, KINDS))}")
    return [Ranks(n, kind, timeout) for n in dict.fromkeys(sizes) for kind in dict.fromkeys(kinds)]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse what carries the marker and would run once, without ranks."""
    marker = item.get_closest_marker("ranks")
    if marker is None or ranks_of(item) is not None or not isinstance(item, pytest.Function):
        return
    text = (
        "got a method of unittest.TestCase, or a marker that was added after collection or with pytest.param, expected "
        "a decorator of a test function, of a plain class, or pytestmark"
    )
    try:
        _runs(marker, item.function, item.config)
    except ValueError as error:
        text = str(error)
    pytest.fail(f"pytest.mark.ranks: {text}", pytrace=False)


def ranks_of(item: pytest.Item) -> Ranks | None:
    """Return what a test runs on; None for a test without ranks."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("_ranks") if callspec is not None else None


@pytest.fixture
def _ranks(request: pytest.FixtureRequest) -> Ranks | None:
    return getattr(request, "param", None)


@pytest.fixture
def world_size(_ranks: Ranks | None) -> int:
    """The number of ranks of a test marked with @pytest.mark.ranks."""
    if _ranks is None:
        pytest.fail(_NO_MARKER.format("world_size"), pytrace=False)
    return _ranks.size


@pytest.fixture
def rank(_ranks: Ranks | None) -> Any:
    """This rank, from 0 to world_size - 1, in a test marked with @pytest.mark.ranks."""
    return _per_rank(_ranks, "rank")


@pytest.fixture
def group(_ranks: Ranks | None) -> Any:
    """The group of all ranks, a value for `group=`, in a test marked with @pytest.mark.ranks."""
    return _per_rank(_ranks, "group")


def _per_rank(ranks: Ranks | None, name: str) -> Any:
    if ranks is None:
        pytest.fail(_NO_MARKER.format(name), pytrace=False)
    from diffcoll.testing import rank_body

    make: Callable[[str], Any] = rank_body.RankFixture
    return make(name)
