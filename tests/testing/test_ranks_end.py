"""Ranks, the servers that help them, and folders end with the process that called spawn."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from runs import python

import diffcoll as dc
from diffcoll.testing import processes, simulate, spawn

ROOT = Path(dc.__file__).parent.parent
MARK = "DIFFCOLL_TEST_OF_LIFETIME"

#: Calls spawn on gloo and on MPI at the same time, and is killed when all ranks are in their functions: one hangs, one
#: computes without end, one has started a process.
CALLER = """
import os, signal, subprocess, sys, threading, time, torch
import diffcoll as dc
from diffcoll.testing import spawn

how, folder = int(sys.argv[1]), sys.argv[2]

def body(r, name):
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    if r == 0:
        subprocess.Popen(["sleep", "1000"])
    open(f"{folder}/{name}", "w").close()
    while r == 1:
        pass
    dc.all_reduce(torch.ones(1))

def call(backend):
    spawn(body, range(2), [f"{backend}-{r}" for r in range(2)], backend=backend, timeout=100)

for backend in ("gloo", "mpi"):
    threading.Thread(target=call, args=(backend,), daemon=True).start()
while len(os.listdir(folder)) < 4:
    time.sleep(0.02)
os.kill(os.getpid(), how)
"""


def marked(mark):
    """The command lines of the processes that were started with this mark in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes()[:200])
        except OSError:
            continue
    return found


@pytest.mark.slow  # its ranks once did not all begin within 100 s, beside a run of the suite; the cause is not known
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_caller_that_is_killed(how, tmp_path):
    ready, temporary = tmp_path / "ready", tmp_path / "temporary"
    ready.mkdir()
    temporary.mkdir()
    mark = str(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), MARK: mark}
    command = [sys.executable, "-c", CALLER, str(int(how)), str(ready)]
    done = subprocess.run(command, env=environment, timeout=100, check=False, capture_output=True, text=True)
    assert done.returncode == -how, done.stderr
    end = time.monotonic() + 20
    while (left := marked(mark)) or list(temporary.glob("diffcoll-*")) or list(temporary.glob("pymp-*")):
        assert time.monotonic() < end, (left, list(temporary.iterdir()))
        time.sleep(0.05)


def test_a_folder_is_removed_by_another_process_if_this_one_does_not(monkeypatch):
    with processes.temporary_folder() as folder:
        Path(folder, "file").touch()
        monkeypatch.setattr(processes.shutil, "rmtree", lambda *path, **how: None)
    assert not Path(folder).exists()


def forks(r, folder, ends):
    """Rank 1 has a child, which leaves the function by a result, an error or an exit."""
    child = os.fork() if r == 1 else -1
    if child == 0:
        Path(folder, "child").touch()
        if ends == "raises":
            raise KeyError("of the child")
        if ends == "exits":
            sys.exit(3)
        return -1
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if r == 1 else 0
    return dc.all_reduce(torch.tensor([r + 1.0])).item(), code


@pytest.mark.parametrize("run", ["gloo", "mpi", "simulated"])
def test_a_child_that_a_rank_forks_ends_where_it_leaves_the_function(run, tmp_path):
    call = simulate if run == "simulated" else lambda *call, **more: spawn(*call, backend=run, timeout=30)
    for ends, code in (("returns", 0), ("raises", 1), ("exits", 3)):
        assert call(forks, range(2), [tmp_path] * 2, [ends] * 2) == [(3.0, 0), (3.0, code)]
        (tmp_path / "child").unlink()


SIGNALS = """
import multiprocessing, signal
from diffcoll.testing import spawn

def blocked(*_):
    return [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]

def send(pipe):
    pipe.send(blocked())

if __name__ == "__main__":
    print(blocked(), spawn(blocked, range(2)), blocked())
    context = multiprocessing.get_context("forkserver")  # the same server
    ours, theirs = context.Pipe()
    context.Process(target=send, args=(theirs,)).start()
    print(ours.recv())
"""


def test_ctrl_c_is_blocked_in_no_process_that_the_server_forks(tmp_path):
    """It is blocked while the server is started; ranks, and processes of the user's, receive it."""
    (tmp_path / "program.py").write_text(SIGNALS)
    done = python(tmp_path / "program.py")
    assert done.stdout == "[] [[], []] []\n[]\n"
