"""The same call on real processes.

The processes are forked from a server that has imported PyTorch. Each runs one rank: it receives a `Call`, joins a
group of torch.distributed, makes the call, and sends its result or how it failed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from diffcoll.core.check_mode import check_mode, set_in_environment
from diffcoll.core.errors import message
from diffcoll.core.groups import set_default_group
from diffcoll.core.torch_private.release import LAZY_MODULES
from diffcoll.core.trees import tree_map
from diffcoll.engines.devices import expect_device, needs_accelerator, select_device
from diffcoll.engines.rank_state import launched_as, seed_rank
from diffcoll.engines.watch import waiting
from diffcoll.testing._calls import missing, per_rank_arguments
from diffcoll.testing.failures import WAITS, RankFailure, RanksFailedError
from diffcoll.testing.pickling import dumps, load

T = TypeVar("T")

#: What the server imports before it forks.
PRELOADED = [__name__, *LAZY_MODULES]
#: When one rank has failed, the others may need this long to say why (s).
GRACE = 3.0
#: A rank that hangs may need this long to write its stack (s).
_STACK = 0.5


def spawn(
    fn: Callable[..., T], *per_rank: Sequence[Any], backend: str = "gloo", seed: int = 0, timeout: float = 60
) -> list[T]:
    """Run fn on N processes of this machine, as `simulate` does on simulated ranks; returns the list of all results.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import spawn
    >>> def gradient(x, w):
    ...     x.requires_grad_()
    ...     (w * dc.all_reduce(x)).backward()
    ...     return x.grad
    >>> spawn(gradient, [torch.tensor(3.0), torch.tensor(5.0)], [1.0, 10.0])
    [tensor(11.), tensor(11.)]

    Needs the `test` extra (cloudpickle). The processes listen on loopback only. Each uses one thread.

    Args:
        fn: called as fn(a_r, b_r, …) on rank r with torch's default process group set up; closures and
            lambdas work. What it holds is copied to every process.
        per_rank: one or more sequences of equal length N, one element for each rank.
        backend: a backend of torch.distributed, by name. Ranks of one that needs an accelerator use those of this
            machine in turn.
        seed: rank r starts its streams of random numbers from (seed, r), the same as under `simulate`.
        timeout: seconds until the whole call ends at the latest, also if ranks hang.

    Each rank has the caller's environment, and the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, …).

    Returns:
        The ranks' results, in order; tensors in them come detached, on the CPU.

    Raises:
        TypeError, ValueError: per_rank are no sequences of one length, PyTorch has no such backend, or timeout is not
            above 0.
        ModuleNotFoundError: cloudpickle is not installed.
        RuntimeError: the backend needs an accelerator, and this machine has none.
        RanksFailedError: a rank raised, died or hung; all are ended then, and the message shows every rank's
            traceback, or the Python stack it hung in.
    """
    rows = per_rank_arguments("spawn", per_rank)
    with contextlib.closing(Ranks(len(rows), backend)) as ranks:
        return ranks.call(fn, rows, seed=seed, timeout=timeout)


class Ranks:
    """Processes, one for each of n ranks, which are kept from call to call. A call that fails ends them.

    What a call changes in a process, such as torch's default dtype, is there in the next call.
    """

    def __init__(self, n: int, backend: str = "gloo") -> None:
        try:
            import cloudpickle  # noqa: F401
        except ModuleNotFoundError as error:
            raise missing("spawn", "cloudpickle") from error
        if multiprocessing.current_process().daemon:
            raise RuntimeError(
                "spawn: called while a rank imports the module that calls it, expected a call in a function: the ranks "
                'would start ranks again; put the call into a function, or under if __name__ == "__main__"'
            )
        expect_device(backend)
        self._backend = backend
        self._processes = [_Process(forked=not needs_accelerator(backend)) for _ in range(n)]

    def call(
        self, fn: Callable[..., T], rows: Sequence[Sequence[Any]], *, seed: int = 0, timeout: float = 60
    ) -> list[T]:
        """Call fn on each rank with its row of arguments; return the results.

        Raises:
            RanksFailedError: a rank raised, died or hung, in this call or one before.
        """
        if not timeout > 0:
            raise ValueError(message("spawn", "timeout", timeout, "a number of seconds above 0"))
        n, end = len(self._processes), time.monotonic() + timeout
        if not n:
            raise RanksFailedError("spawn: a call on these ranks has failed; start new ones")
        payloads = [dumps((fn, tuple(row))) for row in rows]
        door = socket.create_server(("127.0.0.1", 0))
        port: int = door.getsockname()[1]
        # Made here, and on loopback: one that a rank makes listens on all interfaces.
        store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=door.detach())  # type: ignore[attr-defined]
        around = os.getcwd(), list(sys.path), dict(os.environ)
        try:
            for rank, (process, payload) in enumerate(zip(self._processes, payloads, strict=True)):
                process.send(Call(self._backend, rank, n, seed, timeout, port, around, payload))
            answers = _answers(self._processes, end)
        except BaseException:  # such as KeyboardInterrupt
            self.close()
            raise
        finally:
            del store
        failures = {r: answer if isinstance(answer, RankFailure) else None for r, answer in answers.items()}
        if any(failures.values()):
            self.close()
            raise RanksFailedError("spawn", failures, timeout)
        return [load(answer) for answer in answers.values() if isinstance(answer, bytes)]

    def close(self) -> None:
        """End the processes, and those that they have started."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.end()


class Call(NamedTuple):
    """What a rank receives."""

    backend: str
    rank: int
    size: int
    seed: int
    timeout: float
    port: int  # of the store by which the ranks find each other
    around: tuple[str, list[str], dict[str, str]]  # the caller's folder, module path and environment
    payload: bytes  # the function and its arguments


def _answers(processes: Sequence[_Process], end: float) -> dict[int, bytes | RankFailure]:
    """Return what every rank answers, in order: until then, and after the first failure not for long."""
    answers: dict[int, bytes | RankFailure] = {}
    while len(answers) < len(processes):
        silent = {r: process for r, process in enumerate(processes) if r not in answers}
        # Processes that a rank has started may hold its pipe open, so its process is watched, too.
        ready = wait([x for p in silent.values() for x in (p.pipe, p.sentinel)], max(0.0, end - time.monotonic()))
        if not ready:
            for process in silent.values():
                process.ask_for_stack()
            end = time.monotonic() + _STACK
            answers |= {r: RankFailure.hanging(process.stack(end)) for r, process in silent.items()}
        for r, process in silent.items():
            if process.pipe in ready or process.sentinel in ready:
                answers[r] = answer = process.answer()
                if isinstance(answer, RankFailure):
                    end = min(end, time.monotonic() + GRACE)
    return dict(sorted(answers.items()))


class _Process:
    """A process of a rank, as its caller sees it.

    Args:
        forked: False: a new interpreter, for ranks that use an accelerator. A forked process cannot if its parent has
            asked for a device, as modules of PyTorch do when they are imported.
    """

    def __init__(self, forked: bool) -> None:
        context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
        if forked:
            context.set_forkserver_preload(PRELOADED)
        self.pipe, theirs = context.Pipe()
        self._stack, writes = context.Pipe(duplex=False)
        asked, self._asks = context.Pipe(duplex=False)
        with _without_main(), theirs, writes, asked:
            # A daemon is ended at exit, where others would be waited for.
            self._process = context.Process(target=_serve, args=(theirs, writes, asked), daemon=True)
            self._process.start()
        self.sentinel = self._process.sentinel

    def send(self, call: Call) -> None:
        with contextlib.suppress(OSError):  # it has ended, which is noticed when its answer is waited for
            self.pipe.send(call)

    def answer(self) -> bytes | RankFailure:
        """Return the answer that has arrived, or how the process ended without one."""
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():
                answer: bytes | RankFailure = self.pipe.recv()
                return answer
        self._process.join(GRACE)
        return RankFailure("died", f"the process ended with exit code {self._process.exitcode}\n")

    def ask_for_stack(self) -> None:
        if self._process.is_alive():
            self._asks.send(None)
            os.kill(self._process.pid, signal.SIGUSR1)

    def stack(self, end: float) -> str:
        """Return what the process has written about its stack until then."""
        text = b""
        while self._stack.poll(0.02 if text else max(0.0, end - time.monotonic())):
            text += os.read(self._stack.fileno(), 1 << 16)
        return text.decode("utf-8", "replace")

    def end(self) -> None:
        """Kill the process and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or not begun yet
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.pipe.close()
        self._stack.close()
        self._asks.close()


_main_lock = threading.Lock()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's script again in every process.

    cloudpickle sends what is defined there by value, so scripts need no `if __name__ == "__main__"`.
    """
    main = vars(sys.modules["__main__"])
    with _main_lock:  # another thread would take the hidden values for the real ones
        hidden: dict[str, Any] = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
        main["__spec__"] = None
        try:
            yield
        finally:
            main.update(hidden)


# ── in the process of a rank ─────────────────────────────────────────────────────────────────────────────


def _serve(pipe: Connection, stack: Connection, asked: Connection) -> None:
    """Make calls until the other end of the pipe is closed."""
    os.setpgid(0, 0)  # Ctrl-C reaches the caller alone, and what this process starts can be ended with it
    threading.Thread(target=_end_with_caller, daemon=True).start()
    threading.Thread(target=_say_what_waits, args=(asked, stack), daemon=True).start()
    multiprocessing.set_start_method(None, force=True)  # a rank may start processes as any program does
    faulthandler.register(signal.SIGUSR1, file=stack.fileno(), all_threads=False)
    with contextlib.suppress(EOFError):
        while True:
            call: Call = pipe.recv()
            _leave()  # what the call before has joined; the other ranks have answered
            answer = _answer(call)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(AttributeError, ValueError):  # the call has replaced or closed it
                    stream.flush()
            pipe.send(answer)
            if isinstance(answer, RankFailure):
                gc.collect()  # tracebacks are circular, and refer to the group
                _leave()  # closes the connections, so that ranks that wait for this one raise
    _leave()


def _end_with_caller() -> None:
    """End this process, and what it has started, when the one that started it has ended, whatever ended that."""
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os.killpg(0, signal.SIGKILL)


def _say_what_waits(asked: Connection, stack: Connection) -> None:
    """Write the collectives that this process waits in beside its stack, which ends in autograd in a backward."""
    with contextlib.suppress(EOFError, OSError):
        asked.recv()
        os.write(stack.fileno(), "".join(f"\n{WAITS}{words}\n" for words in waiting()).encode())


def _answer(call: Call) -> bytes | RankFailure:
    """Make the call on this rank; return its result, pickled, or how it failed."""
    here, path, environment = call.around
    os.chdir(here)
    sys.path[:] = path
    os.environ.clear()
    os.environ.update({**environment, **launched_as(call.rank, call.size, call.port)})
    # Loopback only, whatever the host's name resolves to.
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    torch.set_num_threads(1)
    check_mode(set_in_environment())  # the server has imported the library with an environment of before
    process = multiprocessing.current_process()
    try:
        process.daemon = True  # refuses ranks that a module starts when it is imported, see `Ranks`
        fn, arguments = load(call.payload)
        process.daemon = False  # a rank may start processes
        select_device(call.backend, call.rank)
        dist.init_process_group(
            call.backend,
            store=dist.TCPStore("127.0.0.1", call.port, None, False),  # type: ignore[attr-defined]
            rank=call.rank,
            world_size=call.size,
            timeout=timedelta(seconds=2 * call.timeout),  # so that a hang is reported first, with its stacks
        )
        if call.backend == "gloo":  # a rank that fails early must not leave while others still connect to it
            dist.barrier()
        seed_rank(call.seed, call.rank)
        result = fn(*arguments)
        return dumps(tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, result))
    except BaseException as error:
        return RankFailure.of(error)


def _leave() -> None:
    """Destroy torch's process groups, and forget the default group."""
    set_default_group(None)
    if dist.is_initialized():
        dist.destroy_process_group()
