"""Processes that run ranks: how they begin, how they end, and how a rank fails."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.util import get_temp_dir
from typing import Any, Literal

from diffcoll.core.errors import is_users_file
from diffcoll.core.torch_private.release import LAZY_MODULES

#: When one rank has failed, the others may need this long to say why (s); the same for the last words of
#: ranks that hang.
GRACE = 3.0


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed."""

    kind: Literal["raised", "died", "hung"]
    #: The traceback, how the process ended, or the Python stack it hung in.
    text: str
    #: The exception's class, as tracebacks name it, and its message with notes; "" unless one was raised.
    type: str = ""
    message: str = ""
    #: "file:line" of the user's innermost line that raised or hangs; "" if there is none.
    line: str = ""

    @classmethod
    def of(cls, error: BaseException) -> RankFailure:
        """Return the failure of a rank that raised this error."""
        name = type(error).__qualname__
        if type(error).__module__ not in ("builtins", "__main__"):
            name = f"{type(error).__module__}.{name}"
        words, frame = _words_and_frame(error)
        line = f"{frame.filename}:{frame.lineno}" if frame else ""
        message = words.removeprefix(name).removeprefix(": ")
        return cls("raised", "".join(traceback.format_exception(error)), name, message, line)

    @property
    def summary(self) -> str:
        """The exception as the last lines of a traceback show it, or the first line of the text."""
        if self.kind != "raised":
            return self.text.partition("\n")[0]
        return f"{self.type}: {self.message}" if self.message else self.type


class RanksFailedError(RuntimeError):
    """One rank or several failed; the message has every rank's traceback, or where it hung.

    >>> from diffcoll.testing import RanksFailedError, spawn
    >>> try:
    ...     spawn(lambda r: 1 / r, range(2))
    ... except RanksFailedError as error:
    ...     print(error.failures[0].type, error.failures[0].message, error.failures[1])
    ZeroDivisionError division by zero None
    """

    def __init__(self, text: str, failures: dict[int, RankFailure | None] | None = None) -> None:
        super().__init__(text)
        #: Per rank: how it failed; None for a rank that returned.
        self.failures = failures or {}

    @property
    def reports(self) -> dict[int, str]:
        """Per rank: its traceback, or the Python stack it hung in; "" for a rank that returned."""
        return {rank: failure.text if failure else "" for rank, failure in self.failures.items()}

    @property
    def first(self) -> RankFailure | None:
        """The failure that explains the others: not one that only says that another rank failed, if there is one."""

        def late(failure: RankFailure) -> int:
            return 2 if failure.type.endswith("CollectiveFailedError") else int(failure.kind == "died")

        return min((f for f in self.failures.values() if f and f.kind != "hung"), key=late, default=None)


def in_words(error: BaseException) -> str:
    """Return an error without traceback, but with the lines of the user's code that raised it."""
    if isinstance(error, RanksFailedError) and error.failures:
        found = [f"rank {r}: {_in_words(failure)}" for r, failure in error.failures.items() if failure]
        return "\n".join(found)
    words, frame = _words_and_frame(error)
    return words + (f"\nraised at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}" if frame else "")


def _words_and_frame(error: BaseException) -> tuple[str, traceback.FrameSummary | None]:
    """Return the last lines of a traceback, and the innermost line of the user's that raised the error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users_file(f.filename)]
    return "".join(traceback.format_exception_only(error)).strip(), frames[-1] if frames else None


def _in_words(failure: RankFailure) -> str:
    return failure.summary + (f"\nraised at {failure.line}" if failure.kind == "raised" and failure.line else "")


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


_LAST = "diffcoll.testing.unblocked"
_PRELOADED: tuple[str, ...] = ("diffcoll.testing.processes", "diffcoll.testing.worker", *LAZY_MODULES)


def preload(*modules: str) -> None:
    """Add to what the server imports before it forks. It has an effect before the first fork only."""
    global _PRELOADED
    _PRELOADED = tuple(dict.fromkeys((*_PRELOADED, *modules)))


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """Let Ctrl-C wait here, and in the server, if this starts it, until its imports have ended (unblocked.py)."""
    multiprocessing.resource_tracker.ensure_running()  # it unblocks SIGINT when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _context() -> ForkServerContext:
    return multiprocessing.get_context("forkserver")


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
    return RanksFailedError(text, dict.fromkeys(range(n), RankFailure("died", why)))


class Member:
    """A process forked from a server that has imported what ranks need, and done nothing else.

    Args:
        n: how many processes are started, for the error if there is no server.
        main: called in the process as main(pipe, *arguments), with its end of `pipe`.
        job: the job of mpiexec that the process belongs to.
        forked: False: a new interpreter, for ranks that use an accelerator. A forked process cannot if its parent has
            asked for a device, as modules of PyTorch do when they are imported.
    """

    def __init__(
        self, n: int, main: Callable[..., None], *arguments: Any, job: Any = None, forked: bool = True
    ) -> None:
        context: ForkServerContext | SpawnContext = _context() if forked else multiprocessing.get_context("spawn")
        if forked:
            context.set_forkserver_preload([*_PRELOADED, _LAST])
        self.job = job
        self.pipe, theirs = context.Pipe()
        leash, self._leash = context.Pipe(duplex=False)
        with _without_main(), theirs, leash:
            # A daemon is ended at exit, where others would be waited for.
            self.process = context.Process(target=_main, args=(leash, main, theirs, *arguments), daemon=True)
            try:
                if forked:
                    with _interrupted_later():
                        multiprocessing.forkserver.ensure_running()
                self.process.start()
            except (EOFError, OSError) as error:
                raise _no_server(error, n) from error

    def send(self, *messages: bytes) -> None:
        """Send messages; nothing happens if the process has ended, which is noticed when it is waited for."""
        with contextlib.suppress(OSError):
            for data in messages:
                self.pipe.send_bytes(data)

    def receive(self) -> bytes:
        """Return a message that has arrived; EOFError or OSError: the process has ended without one."""
        if not self.pipe.poll():
            raise EOFError
        return self.pipe.recv_bytes()

    def last_words(self) -> str:
        """Say how the process ended."""
        self.process.join(GRACE)
        if self.job is not None:
            how: str = self.job.last_words(self.process.exitcode)
            return how
        return f"the process ended with exit code {self.process.exitcode}\n"

    def end(self) -> None:
        """Kill the process and what it has started."""
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.join()
        self._leash.close()
        self.pipe.close()


def _main(leash: Connection, main: Callable[..., None], *arguments: Any) -> None:
    """Run in the process."""
    _end_with(leash)
    # A rank may start processes as any program does.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method(None, force=True)
    main(*arguments)


# ── ranks end, and their folder is removed, with the process that started them, whatever ends it ──────────

#: Removes the first folder when it receives a line, or all when its standard input is closed because the process that
#: uses them has ended. Ranks that are being killed may still write to the first one.
_REMOVE = """
trap "" HUP INT TERM
read _ && set -- "$1"
for i in 1 2 3 4 5 6 7 8 9; do rm -rf "$@" && break; sleep 0.1; done
"""


def _end_with(leash: Connection) -> None:
    """Let the kernel kill this process, and all that it starts, when the other end of the leash is closed.

    Nothing is sent on the leash. The other end is held by the process that started this one, and only there.
    """
    os.setpgid(0, 0)  # Ctrl-C reaches that process only, and what this one starts ends with it
    fcntl.fcntl(leash, fcntl.F_SETOWN, -os.getpid())
    if hasattr(fcntl, "F_SETSIG"):  # Linux; elsewhere SIGIO, which ends a process too unless it handles it
        fcntl.fcntl(leash, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(leash, fcntl.F_SETFL, os.O_ASYNC)
    if wait([leash], timeout=0):  # it was closed before
        os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """Create a folder for one call. It is removed when the block is left, or when this process is killed."""
    folders = [folder := tempfile.mkdtemp(prefix="diffcoll-")]
    if parent_process() is None:  # else it may be the parent's
        folders.append(get_temp_dir())  # of the fork server's socket; multiprocessing removes it at exit
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        remover = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE, "sh", *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # signals to this process's group do not reach it
        )
        stack.callback(remover.communicate, b"\n")  # not by closing stdin: a copy of this process may hold it too
        yield folder
