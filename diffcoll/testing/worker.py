"""A process that runs one rank of many tests, one after the other.

On the first message of a test the rank sets a group up, runs the test body and sends the outcome. The second message
is sent when the bodies of all ranks have ended. The rank then destroys the group and sends what the body has changed in
the process; if that is nothing, the process runs the next test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from diffcoll.core.checks import is_on
from diffcoll.engines.process_state import seed_rank
from diffcoll.testing.processes import GRACE, Forked, join, leave, surround, surroundings
from diffcoll.testing.rank_body import Body, BodyEnd, attempt, packed, text_of, traceback_of

STREAMS = ("stdout", "stderr")
#: Threads of the library that stay.
_OURS = {"diffcoll watch"}


@dataclass
class Seat:
    """What one rank of one test is told about its surroundings."""

    kind: str  # "gloo", "mpi" or "nccl"
    rank: int
    size: int
    timeout: float
    folder: str  # for files of this test
    around: tuple[str, list[str], dict[str, str]]
    preload: list[str]
    verbosity: int


class Worker(Forked):
    """One forked process that serves."""

    @override
    def begin(self, setups: list[Any], payloads: list[bytes], timeout: float) -> None:
        self._fork(1, _forked_main, surroundings())


def _forked_main(pipe: Connection, around: tuple[str, list[str], dict[str, str]]) -> None:
    surround(*around)
    serve(pipe)
    os._exit(0)


def serve(pipe: Connection, folder: str = "", rank: int = 0) -> bool:
    """Run tests until the other end of the pipe is closed."""
    gc.freeze()  # what was imported is never garbage; `gc.collect` takes milliseconds then
    with contextlib.suppress(EOFError):
        while True:
            _one_test(pipe, pickle.loads(pipe.recv_bytes()), pipe.recv_bytes())
    return True


def _one_test(pipe: Connection, seat: Seat, payload: bytes) -> None:
    surround(*seat.around)
    before = _state()
    with open(Path(seat.folder, f"stack-{seat.rank}"), "w") as stack, _output_to_files(seat):
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        groups: list[Any] = []
        outcome, log = _run(pipe, seat, payload, groups)
        pipe.send_bytes(_pickled(outcome, log))
        failed, outcome = outcome.kind != "passed", BodyEnd(seat.rank, "")  # tracebacks refer to the group
        if failed and seat.kind != "mpi":
            gc.collect()  # tracebacks are circular
            leave()  # closes the connections, so that ranks that wait for this one raise
        pipe.recv_bytes()
        for group in groups:
            if seat.kind == "mpi":
                group.Free()
        leave()
        faulthandler.unregister(signal.SIGUSR1)
    pipe.send_bytes(pickle.dumps(_difference(before)))


def _run(pipe: Connection, seat: Seat, payload: bytes, groups: list[Any]) -> tuple[BodyEnd, list[Any]]:
    """Run the test body. Returns its outcome, and the warnings that it gave."""
    call = Body(_run, (), {})
    with warnings.catch_warnings(record=True) as log:
        try:
            for module in seat.preload:
                importlib.import_module(module)
            call, filters = pickle.loads(payload)
            _explain_comparisons(seat.verbosity)
            group = join(seat.kind, seat.rank, seat.size, f"{seat.folder}/rendezvous", seat.timeout)
            if seat.kind == "mpi":
                groups.append(group := _own_communicator(group))
            elif seat.kind == "gloo":  # a rank that fails early must not leave while others still connect to it
                dist.barrier()
            seed_rank(0, seat.rank)
            warnings.filters[:] = filters  # type: ignore[index]
            warnings.simplefilter("ignore", _hypothesis_deprecation())
        except BaseException as error:
            return BodyEnd(seat.rank, "failed", error, traceback_of(error, call), time.monotonic()), []
        outcome = attempt(call, seat.rank, {"rank": seat.rank, "group": group})
    return outcome, [(w.message, w.category, w.filename, w.lineno) for w in log]


def _own_communicator(world: Any) -> Any:
    from diffcoll.core.groups import set_default_group

    set_default_group(group := world.Dup())
    return group


def _pickled(outcome: BodyEnd, log: list[Any]) -> bytes:
    """Pickle an outcome and warnings, without what cannot be pickled."""
    import cloudpickle

    def dumped(x: Any) -> bytes | None:
        try:
            pickle.loads(data := cloudpickle.dumps(x))
        except Exception:
            return None
        return bytes(data)

    chain = outcome.chain
    if dumped(chain) is None:
        chain = text_of("\n".join(str(element[0]) for element in chain))
    words = [dumped(warning) or pickle.dumps((str(warning[0]), UserWarning, *warning[2:])) for warning in log]
    return pickle.dumps((replace(outcome, error=None, chain=chain), dumped(packed(outcome.error)), words))


@contextlib.contextmanager
def _output_to_files(seat: Seat) -> Iterator[None]:
    """Write standard output and error, of C code too, to files that outlive this process."""
    streams = sys.stdout, sys.stderr
    for number, name in enumerate(STREAMS, start=1):
        file = os.open(Path(seat.folder, f"{name}-{seat.rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
        unbuffered: Any = open(number, "wb", buffering=0, closefd=False)
        setattr(sys, name, io.TextIOWrapper(unbuffered, "utf-8", "backslashreplace", write_through=True))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


# ── what a body may have changed ─────────────────────────────────────────────────────────────────────────


def _state() -> dict[str, object]:
    """Return what must be the same after a test as before it."""
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


# ── what pytest and hypothesis do in the test's own process ──────────────────────────────────────────────


def _explain_comparisons(verbosity: int) -> None:
    """Let rewritten asserts of the form a == b show how a and b differ."""
    # pytest sets this, without a public name, for the time of a test.
    from _pytest.assertion import util

    def explain(op: str, left: object, right: object) -> str | None:
        try:
            lines = _comparison(op, left, right)
        except Exception:  # another release of pytest; the values are shown without
            return None
        if len(lines) > 10 and verbosity < 2:
            lines = [*lines[:9], "...", "Full output truncated, use '-vv' to show"]
        return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%") or None

    util._reprcompare = explain


def _comparison(op: str, left: object, right: object) -> list[str]:
    """Return pytest's explanation of how two values differ."""
    global _config
    from _pytest.config import _prepareconfig

    if _config is None:
        arguments = ["-s", "-c", os.devnull, "--rootdir", "/", "-p", "no:cacheprovider"]
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the environment is set anew for each test
        _config = _prepareconfig(arguments)
    found = _config.hook.pytest_assertrepr_compare(config=_config, op=op, left=left, right=right)
    return next((list(lines) for lines in found if lines), [])


_config: Any = None


def _hypothesis_deprecation() -> type[Warning]:
    """Return the category of the warning that assume() gives in a process other than that of @given."""
    hypothesis = sys.modules.get("hypothesis.errors")
    category: type[Warning] = hypothesis.HypothesisDeprecationWarning if hypothesis else _NoWarning
    return category


class _NoWarning(Warning):
    """A category that nobody uses."""
