"""@pytest.mark.ranks: what users see, on simulated ranks and on processes."""

import multiprocessing.popen_forkserver
import os
import signal
import subprocess
import sys
import time
import uuid
from itertools import pairwise
from pathlib import Path

import hypothesis
import pytest
import torch

import diffcoll
import diffcoll.testing.plugin
from diffcoll.testing import rank_body

pytest_plugins = ["pytester"]
#: A run of pytest in this process forgets what it was the first to import; the server that forks would start again.
KEPT = (multiprocessing.popen_forkserver, hypothesis, diffcoll.testing.plugin)
ROOT = Path(diffcoll.__file__).parent.parent
on_both = pytest.mark.parametrize("kind", ["simulated", "gloo"])
HEAD = """
import os, signal, sys, threading, time, warnings
import pytest, torch, torch.distributed as dist
import diffcoll as dc
"""


@pytest.fixture
def run(pytester):
    """Runs test functions in a pytest inside this process: name of a test → report of its failed phase or its call."""

    def run(source, *options, **files):
        pytester.makepyfile(test_it=HEAD + source, **files)
        found = pytester.inline_run("-p", "diffcoll_pytest", "-p", "no:cacheprovider", *options)
        reports = {}
        for report in found.getreports("pytest_runtest_logreport pytest_collectreport"):
            name = report.nodeid.split("::", 1)[-1].replace("::()", "")
            if report.when == "collect" or report.when == "call" or not report.passed:
                reports[name] = report
        return reports

    return run


def outcomes(reports):
    return {name: r.outcome for name, r in reports.items() if r.when != "collect"}


def texts(reports):
    """By name of the test function."""
    return {name.split("[")[0]: r.longreprtext for name, r in reports.items()}


def with_outcome(reports, outcome):
    return {name.split("[")[0] for name, of_test in outcomes(reports).items() if of_test == outcome}


GOOD = """
@pytest.fixture(scope="module")
def shared():
    return {"weights": torch.tensor([1.0, 10.0, 100.0])}

@pytest.fixture(params=[1, 2])
def factor(request):
    return request.param

log = {}

@pytest.fixture
def x(rank, factor, shared):
    log[rank] = ["up"]
    yield (shared["weights"][rank] * factor).requires_grad_()
    assert log.pop(rank) == ["up", "body"]

@pytest.mark.ranks(2, 3)
def test_gradient(x, rank, world_size, group, factor):
    loss = (rank + 1) * dc.all_reduce(x, group=group)
    loss.backward()
    assert x.grad.item() == world_size * (world_size + 1) / 2
    assert loss.item() == (rank + 1) * factor * (11 if world_size == 2 else 111)
    assert (dc.get_rank(group), dc.get_world_size()) == (rank, world_size)
    log[rank].append("body")

@pytest.mark.ranks(3)
class TestClass:
    def setup_method(self):
        self.values = [3, 4, 5]

    @pytest.mark.parametrize("factor", [7], ids=["seven"])
    def test_method(self, rank, factor):
        assert dc.all_reduce(torch.tensor(self.values[rank] * factor)).item() == 84

@pytest.mark.ranks(2)
def test_files_and_patches(tmp_path, monkeypatch, rank):
    monkeypatch.setenv(f"OF_RANK_{rank}", "1")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setattr(sys, f"of_rank_{rank}", 1, raising=False)
    (tmp_path / str(rank)).touch()
    dc.all_reduce(torch.ones(1))
    assert len(list(tmp_path.iterdir())) == 2
    assert [name for name in os.environ if name.startswith("OF_RANK_")] == [f"OF_RANK_{rank}"]
    assert os.environ["RANK"] == "7" and "LOCAL_RANK" not in os.environ

@pytest.mark.ranks(2)
def test_patches_of_the_environment_are_undone_on_each_rank(monkeypatch, rank):
    monkeypatch.setenv("RANK", "7")
    with monkeypatch.context() as patch:
        patch.delenv("LOCAL_RANK")
        dc.all_reduce(torch.ones(1))
        monkeypatch.undo()
        assert os.environ["RANK"] == str(rank) and "LOCAL_RANK" not in os.environ
    assert os.environ["LOCAL_RANK"] == str(rank)

@pytest.mark.ranks(2)
def test_raises_and_warns(rank):
    for i in range(2):
        with pytest.warns(UserWarning, match=f"^of rank {rank}$") as log:
            dc.all_reduce(torch.ones(1))
            warnings.warn(f"of rank {rank}")
            dc.all_reduce(torch.ones(1))
        assert len(log) == 1
    with pytest.raises(ValueError, match="x must"):
        dc.all_reduce(torch.ones(1))
        raise ValueError("x must")

@pytest.fixture
def model():
    return torch.nn.Linear(1, 1)

@pytest.mark.ranks(2)
class TestWhatRanksDoNotShare:
    def setup_method(self):
        self.leaf = torch.ones(1, requires_grad=True)

    @pytest.fixture(autouse=True)
    def mine(self, rank):
        self.rank = rank

    @pytest.mark.parametrize("x", [torch.ones(1, requires_grad=True)], ids=["x"])
    def test_it(self, model, rank, x):
        ((rank + 1) * (x.sum() + self.leaf.sum() + model.weight.sum())).backward()
        dc.all_reduce(torch.ones(1))
        assert self.rank == rank
        assert x.grad.item() == self.leaf.grad.item() == model.weight.grad.item() == rank + 1

@pytest.fixture(autouse=True)
def of_each_rank(request):
    if "rank" in request.fixturenames:
        request.getfixturevalue("marked")

@pytest.fixture
def marked(rank):
    torch.manual_seed(rank)

def test_nothing_is_left():
    assert not [name for name in os.environ if name.startswith("OF_RANK_") or name in ("RANK", "LOCAL_RANK")]
    assert not [name for name in vars(sys) if name.startswith("of_rank_")]
"""


@pytest.mark.parametrize("kind", ["simulated", "gloo", "mpi"])
def test_what_passes(run, kind):
    reports = run(GOOD, f"--ranks={kind}", "-W", "error")
    assert {name: r.longreprtext for name, r in reports.items() if not r.passed} == {}
    assert sorted(outcomes(reports)) == sorted(
        [
            *(f"test_gradient[{factor}-{n} ranks]" for n in (2, 3) for factor in (1, 2)),
            "TestClass::test_method[seven-3 ranks]",
            "TestWhatRanksDoNotShare::test_it[x-2 ranks]",
            "test_files_and_patches[2 ranks]",
            "test_patches_of_the_environment_are_undone_on_each_rank[2 ranks]",
            "test_raises_and_warns[2 ranks]",
            "test_nothing_is_left",
        ]
    )


def test_copies_refer_to_each_other():
    """Not in a pytest inside this process: an optimizer imports modules that cannot be imported twice."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    copied = rank_body.Copies(None)
    mine, its_model = copied(optimizer), copied(model)
    assert mine.param_groups[0]["params"][0] is its_model.weight is not model.weight
    y = model(torch.ones(1))
    assert copied(y) is y  # in a graph: cannot be copied


BAD = """
@pytest.mark.ranks(3)
def test_assert(rank):
    print("printed by rank", rank)
    print("error of rank", rank, file=sys.stderr)
    y = dc.all_reduce(torch.ones(2)) + (rank == 1)
    assert y.tolist() == [3, 3]

@pytest.mark.ranks(3)
def test_all_alike(rank):
    total = dc.all_reduce(torch.tensor(rank)).item()
    assert total == 4

@pytest.mark.ranks(3)
def test_cut_off(rank):
    if rank == 1:
        raise KeyError("of rank 1")
    dc.all_reduce(torch.ones(2))

class Mine(Exception):
    def __init__(self, a, b):
        super().__init__("cannot be unpickled")

@pytest.mark.ranks(2)
def test_own_exception(rank):
    raise Mine(1, rank)

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=KeyError, strict=True)
def test_expected(): raise KeyError("x")

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=KeyError, strict=True)
def test_expected_other(): raise ValueError("x")

@pytest.mark.ranks(2)
def test_fail(): pytest.fail("in words", pytrace=False)

@pytest.mark.ranks(2)
def test_exit(): sys.exit(3)

@pytest.fixture
def bad(rank):
    yield rank
    raise ValueError(f"tear-down of {rank}")

@pytest.mark.ranks(2)
def test_fixture(bad): pass

@pytest.mark.ranks(2)
def test_skip(): pytest.skip("for a reason")

@pytest.mark.ranks(2)
def test_xfail(): pytest.xfail("for a reason")

@pytest.mark.ranks(3)
def test_skip_some(rank):
    if rank == 2: pytest.skip("for a reason")

@pytest.mark.ranks(2)
def test_skip_and_wait(rank):
    if rank: pytest.skip("for a reason")
    dc.all_reduce(torch.ones(2))

@pytest.mark.ranks(2)
def test_warnings_that_are_errors(): warnings.warn("hello", DeprecationWarning)

@pytest.mark.ranks(3)
def test_good_at_the_end(rank):
    assert dc.all_reduce(torch.tensor(rank)) == 3
"""


@on_both
def test_what_fails(run, kind):
    reports = run(BAD, f"--ranks={kind}", "-W", "error")
    text = texts(reports)
    assert with_outcome(reports, "skipped") == {"test_skip", "test_xfail", "test_expected"}
    assert with_outcome(reports, "passed") == {"test_good_at_the_end"}
    assert "── rank 1 of 3 ──" in text["test_assert"]
    assert "assert [4.0, 4.0] == [3, 3]" in text["test_assert"]
    assert "At index 0 diff: 4.0 != 3" in text["test_assert"]
    assert "rank 0 of" not in text["test_assert"]
    sections = dict(reports["test_assert[3 ranks]"].sections)
    for r in range(3):
        assert sections[f"Captured stdout of rank {r} call"] == f"printed by rank {r}\n"
        assert sections[f"Captured stderr of rank {r} call"] == f"error of rank {r}\n"

    assert text["test_all_alike"].count("of 3 ──") == 1
    assert "── ranks 0, 1, 2 of 3 ──" in text["test_all_alike"]
    assert "assert 3 == 4" in text["test_all_alike"]
    assert "── rank 1 of 3, the first to fail ──" in text["test_cut_off"]
    assert "KeyError: 'of rank 1'" in text["test_cut_off"].split("the first to fail")[1]
    assert reports["test_cut_off[3 ranks]"].longrepr.reprcrash.message == "KeyError: 'of rank 1'"
    error = "CollectiveMismatchError: simulated ranks" if kind == "simulated" else "CollectiveFailedError: all_reduce"
    assert error in text["test_cut_off"].split("the first to fail")[0]
    assert "Mine: cannot be unpickled" in text["test_own_exception"]
    assert "ValueError: x" in text["test_expected_other"]
    assert text["test_fail"].splitlines()[-1] == "in words"
    assert "SystemExit: 3" in text["test_exit"]
    assert "tear-down of 1" in text["test_fixture"]
    assert reports["test_skip[2 ranks]"].longrepr[2] == "Skipped: for a reason"
    assert text["test_skip_some"].startswith(
        "the ranks disagree: rank 2 skipped (for a reason), ranks 0, 1 passed; expected all ranks to call pytest.skip"
    )
    assert "── rank 1 of 2 skipped (for a reason), expected all or none ──" in text["test_skip_and_wait"]
    assert "DeprecationWarning: hello" in text["test_warnings_that_are_errors"]


HOSTILE = """
import subprocess
HERE = os.getcwd()

@pytest.fixture(autouse=True)
def pid(rank):
    name = os.environ["PYTEST_CURRENT_TEST"].split("::")[1].split("[")[0]
    with open(f"{HERE}/pids-{rank}", "a") as file:
        print(name, os.getpid(), file=file)

@pytest.mark.ranks(2)
def test_00_begin(): pass

@pytest.mark.ranks(2)
def test_01_second(): dc.all_reduce(torch.ones(1))

@pytest.mark.ranks(2)
def test_02_raises(rank):
    assert rank < 0

@pytest.mark.ranks(2)
def test_03_same_processes(): pass

@pytest.mark.ranks(2)
def test_04_changes():
    os.environ["LEFT"] = "1"
    os.chdir("/")
    sys.path.insert(0, "/nowhere")
    dist.destroy_process_group()
    dc.set_default_group(None)
    sys.stdout = None

@pytest.mark.ranks(2)
def test_05_unchanged():
    assert "LEFT" not in os.environ and os.getcwd() != "/" and sys.path[0] != "/nowhere" and sys.stdout is not None
    assert dc.get_world_size() == 2

@pytest.mark.ranks(2)
def test_06_left_group():
    dc.set_default_group(dist.new_group([0, 1]))
    dc.all_reduce(torch.ones(1))

@pytest.mark.ranks(2)
def test_07_dies(rank):
    if rank == 0:
        print("last words")
        os._exit(7)
    dc.all_reduce(torch.ones(1))

@pytest.mark.ranks(2)
def test_08_after(): dc.all_reduce(torch.ones(1))

@pytest.mark.ranks(2, timeout=1)
def test_09_hangs(rank):
    if rank == 0:
        waits_for_ever()
    dc.all_reduce(torch.ones(1))

def waits_for_ever(): time.sleep(1000)

@pytest.mark.ranks(2)
def test_10_thread(rank):
    if rank == 0:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()

@pytest.mark.ranks(2)
def test_11_no_thread():
    assert len([t for t in threading.enumerate() if t.name != "diffcoll watch"]) == 1

@pytest.mark.ranks(2)
def test_12_check_mode_and_dtype():
    dc.check_mode()
    torch.set_default_dtype(torch.float64)

@pytest.mark.ranks(2)
def test_13_neither():
    assert torch.ones(1).dtype == torch.float32
    dc.all_reduce(torch.ones(1 + dc.get_rank()).sum())

@pytest.mark.ranks(2)
def test_14_forks():
    if os.fork() == 0:
        return  # the copy leaves the body too
    os.wait()
    dc.all_reduce(torch.ones(1))

@pytest.mark.ranks(2)
def test_15_leaves_a_process(rank):
    with open(f"{HERE}/left-{rank}", "w") as file:
        print(subprocess.Popen(["sleep", "1000"]).pid, file=file)

@pytest.mark.ranks(2)
def test_16_does_not_join(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    assert rank == 0

@pytest.mark.ranks(2)
def test_17_end(): assert dc.all_reduce(torch.ones(1)) == 2
"""


def test_hostile_bodies_on_processes(run, pytester):
    reports = run(HOSTILE, "--ranks=gloo")
    text = texts(reports)
    assert with_outcome(reports, "failed") == {
        "test_02_raises",
        "test_07_dies",
        "test_09_hangs",
        "test_16_does_not_join",
    }, text
    assert "the process ended with exit code 7" in text["test_07_dies"]
    assert dict(reports["test_07_dies[2 ranks]"].sections)["Captured stdout of rank 0 call"] == "last words\n"
    assert "the rank had not ended after 1 s; it hung in" in text["test_09_hangs"]
    assert "in waits_for_ever" in text["test_09_hangs"]

    lines = [Path(pytester.path, f"pids-{r}").read_text().split() for r in range(2)]
    pids = {name: [of[of.index(name) + 1] for of in lines] for name in lines[0][::2]}
    names = sorted(pids)
    new = {b for a, b in pairwise(names) if pids[a][0] != pids[b][0]}
    # After test_16, releases of torch differ in whether the group of a collective that never ends can be destroyed.
    assert new - {"test_17_end"} == {
        "test_08_after",
        "test_10_thread",
        "test_11_no_thread",
        "test_13_neither",
        "test_16_does_not_join",
    }
    left = [int(Path(pytester.path, f"left-{r}").read_text()) for r in range(2)]
    assert not any(map(is_running, [*left, *(int(pid) for of in pids.values() for pid in of)]))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_cannot_be_sent(run):
    source = """
lock = threading.Lock()

@pytest.fixture
def unpicklable(): return threading.Lock()

@pytest.fixture
def patched(monkeypatch): monkeypatch.setattr(torch, "ones", torch.zeros)

@pytest.fixture
def of_rank(rank, unpicklable): return rank

@pytest.fixture
def asks(rank, request): return request.config

@pytest.mark.ranks(2)
def test_fixture(unpicklable): pass

@pytest.mark.ranks(2)
def test_inner_fixture(of_rank): pass

@pytest.mark.ranks(2)
def test_request(asks): pass

@pytest.mark.ranks(2)
def test_global(): print(lock)

@pytest.mark.ranks(2)
def test_capsys(capsys): pass

@pytest.mark.ranks(2)
def test_patched(patched, monkeypatch): pass

@pytest.mark.ranks(2)
def test_patched_before(patched): pass
"""
    text = texts(run(source, "--ranks=gloo"))
    assert text["test_patched_before"] == text["test_patched"]
    copied = "cannot be copied to the ranks' processes (TypeError: cannot pickle '_thread.lock' object); make it in the"
    assert f"ranks on gloo: fixture or argument 'unpicklable' of type lock {copied}" in text["test_fixture"]
    assert f"fixture 'unpicklable', used by 'of_rank', of type lock {copied}" in text["test_inner_fixture"]
    assert "fixture 'asks': request.config: a fixture that uses rank or group runs on each rank" in text["test_request"]
    assert f"global variable 'lock' of type lock {copied} test body" in text["test_global"]
    assert "fixture 'capsys' acts on the process of pytest" in text["test_capsys"]
    assert "fixture 'monkeypatch' has changed <module 'torch'" in text["test_patched"]
    assert "before the test body, which the ranks' processes do not see" in text["test_patched"]


def test_capturing_fixtures_work_on_simulated_ranks(run):
    source = """
@pytest.mark.ranks(2)
def test_capsys(capsys, rank):
    print("from", rank)
    dc.all_reduce(torch.ones(1))
    if rank == 0:
        assert capsys.readouterr().out == "from 0\\\\nfrom 1\\\\n"
"""
    assert outcomes(run(source.replace("\\\\", "\\"))) == {"test_capsys[2 ranks]": "passed"}


PROPERTIES = """
from hypothesis import assume, given, note, settings, strategies as st

class TestClass:
    @pytest.mark.ranks(2, 3)
    @settings(max_examples=8, database=None, derandomize=True)
    @given(xs=st.lists(st.integers(-9, 9), min_size=3, max_size=3))
    def test_holds(self, rank, world_size, group, xs):
        assert dc.all_reduce(torch.tensor(xs[rank]), group=group) == sum(xs[:world_size])

@pytest.mark.ranks(2)
@settings(max_examples=60, database=None, derandomize=True)
@given(x=st.integers(0, 1000))
def test_fails(rank, x):
    assert dc.all_reduce(torch.tensor(x)) == 2 * x
    assert x < 100 or rank == 0

@pytest.mark.ranks(2)
@settings(max_examples=8, database=None, derandomize=True)
@given(x=st.integers(0, 1000))
def test_assumes(rank, x):
    assume(x % 3)
    dc.all_reduce(torch.ones(1))
    assert x % 3
"""


@on_both
def test_properties(run, kind):
    reports = run(PROPERTIES, f"--ranks={kind}", "-W", "error")
    failed = {name: r.longreprtext for name, r in reports.items() if r.failed}
    assert list(failed) == ["test_fails[2 ranks]"], failed
    text = failed["test_fails[2 ranks]"]
    assert "── rank 1 of 2 ──" in text
    assert "x=100," in text  # the smallest
    assert reports["test_fails[2 ranks]"].longrepr.reprcrash.message.startswith("assert (100 < 100")


def test_wrong_markers(run):
    source = """
import unittest

def test_no_marker(rank): pass

class TestUnit(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_method(self): pass

@pytest.mark.parametrize("a", [pytest.param(1, marks=pytest.mark.ranks(2))])
def test_param(a): pass

@pytest.fixture(scope="module")
def wide(rank): pass

@pytest.mark.ranks(2)
def test_wide(wide): pass
"""
    text = {name: r.longreprtext for name, r in run(source).items() if not r.passed}
    assert "fixture 'rank' exists in tests with a number of ranks only; mark the test" in text["test_no_marker"]
    assert "pytest.mark.ranks: got a method of unittest.TestCase, or a marker" in text["TestUnit::test_method"]
    assert "expected a decorator of a test function" in text["test_param[1]"]
    assert "ScopeMismatch" in text["test_wide[2 ranks]"]


WRONG_ARGUMENTS = {
    "ranks()\n": "got sizes [], expected one or more numbers of ranks, e.g. ranks(2, 3)",
    "ranks(2, 0)\n": "got sizes [2, 0]",
    "ranks(2, on='tcp')\n": "on: got 'tcp', expected one or more of 'simulated', 'gloo', 'mpi', 'nccl'",
    "ranks(2, on=3)\n": "on: got 3, expected one or more of 'simulated', 'gloo', 'mpi', 'nccl'",
    "ranks(2, timeout=0)\n": "timeout: got 0, expected a number of seconds",
    "ranks(2, kind='gloo')\n": "got kind='gloo', expected numbers of ranks, on= and timeout=",
    "ranks(2)\nasync ": "got an async test, expected a plain function; call asyncio.run() in its body",
}


def test_a_wrong_marker_is_an_error_of_its_test_alone(run):
    tests = [f"@pytest.mark.{marker}def test_{i}(rank): pass" for i, marker in enumerate(WRONG_ARGUMENTS)]
    reports = run("\n".join([*tests, "@pytest.mark.ranks(1)\ndef test_good(rank): pass", "def test_other(): pass"]))
    expected = dict.fromkeys([f"test_{i}" for i in range(len(tests))], "failed")
    assert outcomes(reports) == {**expected, "test_good[1 rank]": "passed", "test_other": "passed"}
    for i, text in enumerate(WRONG_ARGUMENTS.values()):
        report = reports[f"test_{i}"]
        assert report.when == "setup" and report.longreprtext.startswith(f"pytest.mark.ranks: {text}")


def test_kinds_of_one_test_and_preloading(run, pytester):
    source = """
@pytest.mark.ranks(1, 2, on=["simulated", "gloo"])
def test_both(world_size):
    assert dc.all_reduce(torch.ones(1)) == world_size
    assert dist.get_world_size() == world_size

@pytest.mark.ranks(2, on="gloo")
def test_preloaded():
    assert "json.tool" in sys.modules
"""
    found = outcomes(run(source, "--ranks=mpi", "--ranks-preload=json.tool, json"))
    names = [f"test_both[{n} on {kind}]" for n in ("1 rank", "2 ranks") for kind in ("simulated", "gloo")]
    assert found == dict.fromkeys([*names, "test_preloaded[2 ranks]"], "passed")
    reports = run(source, "--ranks-preload=nowhere", "-k", "preloaded")
    assert "No module named 'nowhere'" in reports["test_preloaded[2 ranks]"].longreprtext


# ── a pytest of its own ──────────────────────────────────────────────────────────────────────────────────


def pytest_of_its_own(pytester, *options):
    """Run pytest in a new process; return its output, and the processes that it has left."""
    tag = uuid.uuid4().hex
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, "TAG": tag}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    command = [sys.executable, "-m", "pytest", "-p", "diffcoll_pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment, cwd=pytester.path, check=False
    )
    end = time.monotonic() + 10  # multiprocessing's servers end when they notice that the process has ended
    while (left := _with_environment(f"TAG={tag}")) and time.monotonic() < end:
        time.sleep(0.1)
    return done.stdout + done.stderr, left


def _with_environment(entry):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if entry.encode() in (process / "environ").read_bytes() and is_running(process.name):
                found.append((process.name, (process / "cmdline").read_text()))
        except OSError:
            continue
    return found


def test_unused_it_imports_nothing(pytester):
    """A project without the marker pays for a small module, not for torch."""
    pytester.makepyfile(
        """
        import sys

        def test_x():
            assert "diffcoll_pytest" in sys.modules
            assert not {"torch", "diffcoll", "numpy", "multiprocessing"} & sys.modules.keys()
        """
    )
    output, _ = pytest_of_its_own(pytester, "-p", "no:hypothesispytest", "-p", "no:xdist")
    assert "1 passed" in output, output


@pytest.mark.slow  # starts interpreters that import PyTorch
def test_xdist_and_nothing_left_behind(pytester):
    pytest.importorskip("xdist")
    pytester.makepyfile(
        HEAD
        + """
@pytest.mark.ranks(2, on="gloo")
@pytest.mark.parametrize("i", range(4))
def test_x(rank, i):
    print("printed by", rank)
    assert dc.all_reduce(torch.tensor(rank + i)) == 2 * i + (rank if i == 2 else 1)

@pytest.mark.ranks(2, on="gloo")
@pytest.mark.timeout(1)
def test_late(rank):
    if rank == 0:
        hangs()
    dc.all_reduce(torch.ones(1))

def hangs(): time.sleep(1000)
"""
    )
    output, left = pytest_of_its_own(pytester, "-n", "1")
    assert "2 failed, 3 passed" in output, output
    assert "Timeout (>1.0s)" in output
    assert "in hangs" in output  # where the ranks were then
    assert "── rank 0 of 2 ──" in output
    assert "Captured stdout of rank 1" in output
    assert left == []


STOPPED = """
PID = os.getpid()

@pytest.mark.ranks(2, on="gloo")
def test_x(rank):
    open(f"pid-{rank}", "w").write(str(os.getpid()))
    if rank == 0:
        os.kill(PID, signal.SIGINT)
        time.sleep(1000)
    dc.all_reduce(torch.ones(1))
"""


def test_an_interrupted_session_leaves_nothing(pytester):
    pytester.makepyfile(HEAD + STOPPED)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of xdist ignore it
    try:
        pytester.inline_run("-p", "diffcoll_pytest", "-p", "no:cacheprovider", no_reraise_ctrlc=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not any(is_running(int(path.read_text())) for path in pytester.path.glob("pid-*"))


@pytest.mark.slow  # starts interpreters that import PyTorch
@pytest.mark.parametrize("kind", ["gloo", "mpi"])
def test_a_killed_session_leaves_nothing(pytester, kind):
    pytester.makepyfile(HEAD + STOPPED.replace("SIGINT", "SIGKILL").replace("gloo", kind))
    _, left = pytest_of_its_own(pytester)
    assert left == []
    assert (pytester.path / "pid-0").exists()


WRONG_GRADIENT = """
from diffcoll.testing import assert_matches_single_process, check_gradients

def half(x): return (x.sin().sum() + x.detach().sin().sum()) / 2

def test_against_one_process():
    x = torch.randn(8, 2, dtype=torch.double)
    assert_matches_single_process(half, lambda x: x.sin().sum(), x, rank_reduction="sum", on=["simulated"])

def test_alone(): check_gradients(half, list(torch.randn(2, 3, dtype=torch.double)), on=["simulated"])

def test_wrong_argument(): check_gradients(half, [torch.ones(2)] * 2, on=["simulated"])
"""


def test_a_failed_check_shows_the_test_and_the_report_alone(run):
    reports = run(WRONG_GRADIENT)
    for name in ("test_against_one_process", "test_alone"):
        text = str(reports[name].longrepr)
        assert "WRONG" in text and "test_it.py" in text and "gradients.py:" not in text
    assert "gradients.py:" in str(reports["test_wrong_argument"].longrepr)
