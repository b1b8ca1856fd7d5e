"""`spawn` and `Ranks`: what goes to the processes and comes back, how ranks fail, and how they end.

What `simulate` does, too, is in test_simulate.py.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from ports import listening
from runs import ROOT, line_of, python

import diffcoll as dc
from diffcoll.core.arguments import MOVED
from diffcoll.core.check_mode import is_on
from diffcoll.testing import RanksFailedError, assert_matches_single_process, spawn
from diffcoll.testing.pickling import dumps, load
from diffcoll.testing.spawn import Ranks

N = 3


def failed(fn, n=N, **more):
    """Return the error of a call that fails, and the seconds that it took."""
    start = time.monotonic()
    with pytest.raises(RanksFailedError) as caught:
        spawn(fn, range(n), **more)
    return caught.value, time.monotonic() - start


# ── what goes to the ranks, and comes back ───────────────────────────────────────────────────────────────


def test_a_timeout_that_is_none():
    for timeout in (0, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            spawn(lambda r: r, range(2), timeout=timeout)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_a_backend_of_an_accelerator_without_one():
    with pytest.raises(RuntimeError, match="'nccl' moves tensors of an accelerator"):
        spawn(lambda r: r, range(2), backend="nccl")


@pytest.mark.filterwarnings("ignore:.*support is experimental")
def test_tensors_of_every_dtype_in_both_directions():
    given = [torch.zeros(3).to(dtype) for dtype in MOVED] + [torch.ones(2, 3).T, torch.nn.Parameter(torch.ones(1))]

    def body(xs):
        return {"same": [x.dtype for x in xs], "xs": xs, "sum": xs[-1].sum() * 2}

    for found in spawn(body, [given] * 2):
        assert found["same"] == [x.dtype for x in given]
        assert not any(x.requires_grad for x in [*found["xs"], found["sum"]])
        for x, y in zip(given, found["xs"], strict=True):
            same = [z.detach().contiguous().view(torch.uint8) for z in (x, y)]
            assert torch.equal(*same) and x.stride() == y.stride()


SCRIPT = """
import torch, diffcoll as dc
from diffcoll.testing import spawn

class Point:
    made = 0
    def __init__(self, x):
        self.x = x

def f(r):
    Point.made += 1
    return Point(dc.all_reduce(torch.tensor(r)).item())

points = spawn(f, range(2))
print([type(p) is Point for p in points], [p.x for p in points])
"""


def test_a_script_needs_no_guard(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    assert python(tmp_path / "script.py").stdout == "[True, True] [1, 1]\n"


def test_a_module_that_calls_it_when_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "calls_it.py").write_text("from diffcoll.testing import spawn\ndef f(r): pass\nspawn(f, range(1))\n")
    done = python("-c", "import calls_it", returns=1, environment={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert "while a rank imports the module that calls it" in done.stderr


def test_names_of_files(monkeypatch):
    """Releases of cloudpickle from 3.1.3 on write another name."""

    def f():
        return sys._getframe().f_code.co_filename

    reduce = cloudpickle.CloudPickler.dispatch_table[types.CodeType]

    def of_later_releases(code):
        kind, arguments = reduce(code)
        return kind, tuple("<dynamic-code>" if a == code.co_filename else a for a in arguments)

    table = {**cloudpickle.CloudPickler.dispatch_table, types.CodeType: of_later_releases}
    monkeypatch.setattr(cloudpickle.CloudPickler, "dispatch_table", table)
    assert load(dumps(f))() == __file__
    error, _ = failed(lambda r: 1 / r, 1)
    assert error.failures[0].line == line_of(__file__, "error, _ = failed(lambda r: 1 / r, 1)")


@pytest.mark.parametrize("value", ["0", "1"])
def test_check_mode_of_the_environment(value, monkeypatch):
    monkeypatch.setenv("DIFFCOLL_CHECK", value)
    assert spawn(lambda r: is_on(), range(1)) == [value == "1"]


def test_ranks_and_their_store_listen_on_loopback_only():
    before, caller = listening(), os.getpid()

    def body(r):
        dc.all_reduce(torch.ones(1))
        return listening(), listening(caller)

    for of_rank, of_caller in spawn(body, range(2)):
        new = set(of_caller) - set(before)  # the store
        assert new and {address for address, _ in [*of_rank, *new]} == {"127.0.0.1"}


# ── how they fail ────────────────────────────────────────────────────────────────────────────────────────


def test_the_cause_comes_first_then_every_rank():
    def body(r):
        if r == 1:
            raise ValueError("mine alone")
        dc.all_reduce(torch.ones(1))

    error, seconds = failed(body)
    cause, *reports = str(error).split("── rank ")
    assert "ValueError" in cause and "mine alone" in cause and f"{Path(__file__).name}:" in cause
    assert [report[0] for report in reports] == ["0", "1", "2"]
    found = error.first
    assert found is error.failures[1] and (found.kind, found.type, found.message) == (
        "raised",
        "ValueError",
        "mine alone",
    )
    assert all("all_reduce" in error.failures[r].text for r in (0, 2))
    assert seconds < 20


def dies(r):
    if r == 1:
        os._exit(7)
    dc.all_reduce(torch.ones(1))


def crashes(r):
    if r == 1:
        ctypes.string_at(0)
    dc.all_reduce(torch.ones(1))


def dies_before_its_child(r):
    if r == 1 and os.fork() == 0:
        time.sleep(60)  # holds the rank's pipe
        os._exit(0)
    dies(r)


@pytest.mark.parametrize(("body", "code"), [(dies, 7), (crashes, -signal.SIGSEGV), (dies_before_its_child, 7)])
def test_a_rank_that_dies(body, code):
    error, _ = failed(body)
    assert error.failures[1].kind == "died" and f"exit code {code}" in error.failures[1].text


def hangs_forward(r):
    if r == 1:
        dc.all_reduce(torch.ones(1))  # alone in forward
    else:
        time.sleep(100)


def hangs_backward(r):
    y = dc.all_reduce(torch.ones(1, requires_grad=True))
    if r == 1:
        y.sum().backward()  # alone in backward
    else:
        time.sleep(100)


@pytest.mark.parametrize("body", [hangs_forward, hangs_backward])
def test_a_hang_names_the_users_line_within_a_second(body, tmp_path):
    """Of the timeout, which includes the time in which ranks begin."""
    where = body.__name__.removeprefix("hangs_")

    def noting(r):
        (tmp_path / "begins").touch()
        body(r)

    error, _ = failed(noting, 2, timeout=4)
    assert time.time() - (tmp_path / "begins").stat().st_mtime < 4 + 1
    assert error.failures[1].kind == "hung" and error.failures[1].line == line_of(__file__, f"# alone in {where}")
    assert error.failures[0].line and error.first is None


def test_ranks_that_go_on_after_another_has_failed():
    error, seconds = failed(lambda r: time.sleep(100) if r else 1 / r, 2)
    assert error.first is error.failures[0] and error.failures[1].kind == "hung"
    assert seconds < 30


def test_ranks_are_kept_until_a_call_fails():
    with contextlib.closing(Ranks(2)) as ranks:
        one, other = (ranks.call(lambda r: (os.getpid(), dist.get_rank()), [(0,), (1,)]) for _ in range(2))
        assert one == other and [r for _, r in one] == [0, 1]
        for _ in range(2):
            with pytest.raises(RanksFailedError):
                ranks.call(lambda r: 1 / r, [(0,), (1,)])
        assert not any(Path(f"/proc/{pid}").exists() for pid, _ in one)


# ── how they end ─────────────────────────────────────────────────────────────────────────────────────────

ENDS = """
import os, signal, subprocess, sys, time
from diffcoll.testing import spawn

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

def f(r):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    os.write(1, f"{os.getpid()} {child.pid}\\n".encode())
    time.sleep(1000)

spawn(f, range(2))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_caller(number):
    """And what they have started, whatever ends the caller."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ENDS]
    caller = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pids = [*caller.stdout.readline().split(), *caller.stdout.readline().split()]
    assert len(pids) == 4
    try:
        caller.send_signal(number)
        caller.wait(30)
        caller.stdout.close()
        end = time.monotonic() + 10
        while left := [pid for pid in pids if not is_gone(pid)]:
            assert time.monotonic() < end, left
            time.sleep(0.05)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_hang_in_a_backward_of_the_check_names_the_collective_and_the_line():
    """No frame of the stack is the user's."""

    def backward(x):
        y = dc.all_gather(x)
        return (y if dc.get_rank() == 0 else x).square().sum()

    with pytest.raises(RanksFailedError) as error:
        assert_matches_single_process(backward, backward, torch.randn(8, 3), ranks=(4, 4), on=["gloo"], timeout=12)
    (failure,) = (f for f in error.value.failures.values() if f is not None)
    assert failure.kind == "hung" and "all_gather" in failure.summary and "backward" in failure.summary
    assert failure.line.endswith(f"test_spawn.py:{backward.__code__.co_firstlineno + 1}")
