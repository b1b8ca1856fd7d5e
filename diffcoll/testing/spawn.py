"""The same call on real processes."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diffcoll._torch import tree_map
from diffcoll.engines.local import seed_rank
from diffcoll.testing._calls import per_rank_arguments

__all__ = ["RanksFailedError", "spawn"]

#: When one rank has failed, the others may need this long to say why (s); the same for the last words of
#: ranks that hang.
GRACE = 3.0


class RanksFailedError(RuntimeError):
    """One rank or several failed; the message has every rank's traceback, or where it hung."""

    def __init__(self, text: str, reports: dict[int, str]) -> None:
        super().__init__(text)
        #: Per rank: its traceback, or the Python stack it hung in; "" for a rank that returned.
        self.reports = reports


def spawn(
    fn: Callable[..., Any],
    *per_rank: Sequence[Any],
    backend: str = "gloo",
    timeout: float = 60,
    seed: int = 0,
) -> list[Any]:
    """Run fn on N real processes of this machine, as `simulate` does on simulated ranks.

    >>> import torch, diffcoll as dc
    >>> from diffcoll.testing import spawn
    >>> def gradient(x, w):
    ...     x.requires_grad_()
    ...     (w * dc.all_reduce(x)).backward()
    ...     return x.grad
    >>> spawn(gradient, [torch.tensor(3.0), torch.tensor(5.0)], [1.0, 10.0])
    [tensor(11.), tensor(11.)]

    Needs the `test` extra (cloudpickle). The processes find each other through a file and listen on loopback
    only. Each uses one thread.

    Args:
        fn: called as fn(a_r, b_r, …) on rank r with torch's default process group set up; closures and
            lambdas work. What it holds is copied to every process.
        per_rank: one or more sequences of equal length N, one element for each rank.
        backend: a backend of torch.distributed, by name.
        timeout: seconds until the whole call ends at the latest, also if ranks hang.
        seed: rank r starts its streams of random numbers from (seed, r), the same as under `simulate`.

    Returns:
        The ranks' results, in order; tensors in them come detached, on the CPU.

    Raises:
        RanksFailedError: a rank raised, died or hung; all are ended then, and the message shows every rank's
            traceback, or the Python stack it hung in.
    """
    import cloudpickle

    calls = per_rank_arguments("spawn", per_rank)
    with tempfile.TemporaryDirectory(prefix="diffcoll-") as folder:
        processes: list[Any] = []
        pipes: list[Connection] = []
        try:
            with _without_main():
                for rank, arguments in enumerate(calls):
                    payload = cloudpickle.dumps((fn, arguments))
                    ours, theirs = multiprocessing.Pipe(duplex=False)
                    setup = (rank, len(calls), backend, timeout, seed, folder, _surroundings())
                    process = _context().Process(target=_rank_main, args=(theirs, setup, payload), daemon=True)
                    process.start()
                    theirs.close()
                    processes.append(process)
                    pipes.append(ours)
            return _collect(processes, pipes, folder, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


# ── this side ────────────────────────────────────────────────────────────────────────────────────────────


def _surroundings() -> tuple[str, list[str], dict[str, str]]:
    """What a process should find as here; the server that forks it may be older than that."""
    return os.getcwd(), list(sys.path), dict(os.environ)


def _context() -> Any:
    """Processes are forked from a server that has imported torch once and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diffcoll.testing.spawn"])
    return context


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


def _collect(processes: list[Any], pipes: list[Connection], folder: str, timeout: float) -> list[Any]:
    """Wait for every rank's word; end all on the first failure."""
    n = len(processes)
    words: dict[int, tuple[str, Any]] = {}
    end = time.monotonic() + timeout
    hung = False
    while len(words) < n:
        silent = [r for r in range(n) if r not in words]
        ready = wait([pipes[r] for r in silent], timeout=max(0.0, end - time.monotonic()))
        if not ready:
            hung = not any(kind != "result" for kind, _ in words.values())
            break
        for r in silent:
            if pipes[r] in ready:
                try:
                    words[r] = pickle.loads(pipes[r].recv_bytes())
                except EOFError:
                    processes[r].join(GRACE)
                    words[r] = "died", f"the process ended with exit code {processes[r].exitcode}\n"
                if words[r][0] != "result":
                    end = min(end, time.monotonic() + GRACE)
    if all(kind == "result" for kind, _ in words.values()) and len(words) == n:
        return [torch.load(io.BytesIO(words[r][1]), weights_only=False) for r in range(n)]

    reports = {r: "" if kind == "result" else text for r, (kind, text) in words.items()}
    for r, stack in _stacks(processes, [r for r in range(n) if r not in words], folder).items():
        reports[r] = stack
    what = f"no end after {timeout:g} s" if hung else "a rank failed"
    text = "\n".join(f"── rank {r} of {n} ──\n{reports[r] or 'returned'}" for r in range(n))
    raise RanksFailedError(f"spawn: {what}\n{text}", dict(sorted(reports.items())))


def _stacks(processes: list[Any], hanging: list[int], folder: str) -> dict[int, str]:
    """Ask ranks that hang for their Python stacks."""
    for r in hanging:
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(processes[r].pid, signal.SIGUSR1)
    stacks = {}
    end = time.monotonic() + GRACE
    for r in hanging:
        file = Path(folder, f"stack-{r}")
        while not (file.exists() and file.read_text().endswith("\n")) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.05)
        stack = file.read_text() if file.exists() else ""
        stacks[r] = f"hung in\n{stack}" if stack else "hung, and did not say where\n"
    return stacks


# ── the other side ───────────────────────────────────────────────────────────────────────────────────────


def _rank_main(pipe: Connection, setup: tuple[Any, ...], payload: bytes) -> None:
    rank, size, backend, timeout, seed, folder, (here, path, environment) = setup
    os.chdir(here)
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
            if backend == "nccl":
                torch.cuda.set_device(rank % torch.cuda.device_count())
            dist.init_process_group(
                backend,
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=2 * timeout),  # so that a hang is reported by `_stacks` first
            )
            seed_rank(seed, rank)
            result = fn(*arguments)
            buffer = io.BytesIO()
            torch.save(tree_map(_plain, result), buffer)
            if dist.is_initialized():
                # Leave together: who goes first closes connections that another may still read from.
                dist.barrier()
                dist.destroy_process_group()
            word: tuple[str, Any] = "result", buffer.getvalue()
        except BaseException:
            word = "raised", traceback.format_exc()
        pipe.send_bytes(pickle.dumps(word))
        pipe.close()
        faulthandler.unregister(signal.SIGUSR1)
    if word[0] != "result":
        os._exit(1)  # a broken group may hang in its own destructor


def _plain(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
