"""Where the checks of `diffcoll verify` run: on processes that it starts and keeps, or on those of a launcher."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

import diffcoll
from diffcoll.cli.checks import NOT_OFFERED, TIMEOUT_COMPILED, Check, Errors, worst
from diffcoll.cli.competitors import SYSTEMS, Adapter
from diffcoll.cli.launch import gloo_beside_mpi, gloo_on_hosts
from diffcoll.core.control import Control
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.release import COMPILES
from diffcoll.engines.devices import select_device
from diffcoll.testing.pool import Pool
from diffcoll.testing.processes import RankFailure, RanksFailedError, preload

#: Seconds by which starting processes may exceed the timeout of a job.
LATE = 60.0
T = TypeVar("T")


def _reason(error: BaseException) -> str:
    """Return the first line of an error; of several ranks' errors, one that does not report the failure of another."""
    failure = RankFailure.of(error)
    if isinstance(error, RanksFailedError):
        if error.first is None:
            return str(error).splitlines()[0]
        failure = error.first
    first = failure.summary.splitlines()[0]
    return f"raises {first}" if failure.kind == "raised" else first


# ── ranks of this machine ────────────────────────────────────────────────────────────────────────────────


class Spawned:
    """Processes of this machine, which are kept; those of a check that failed are replaced."""

    speaks = True

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.description = f"{backend} processes on this machine"
        #: The reason why no processes can be started.
        self.broken = ""
        self._pool = Pool()
        preload("diffcoll.cli.verify", *(["torch._inductor.compile_fx"] if COMPILES else []))

    def run(self, checks: Sequence[Check], timeout: float, system: str, seed: int) -> list[Errors]:
        """Run checks; after one that failed the following ones run on new processes."""
        adapter, ours = SYSTEMS[system], system == "diffcoll"
        if not ours and not any(check.offered(adapter, 0) for check in checks):
            return [NOT_OFFERED] * len(checks)
        backend = "gloo" if self.backend == "mpi" and not ours else self.backend
        found: list[Errors] = []
        while len(found) < len(checks):
            with tempfile.TemporaryDirectory(prefix="diffcoll-") as folder:
                left = checks[len(found) :]
                arguments = [(rank, left, adapter, ours, seed, folder) for rank in range(left[0].world_size)]
                error = self._failure(_on_rank, arguments, backend, timeout)
                of_ranks = [_outcomes_in(folder, rank) for rank in range(len(arguments))]
                found += [worst(outcomes) for outcomes in zip(*of_ranks, strict=False)]
            if error is not None and len(found) < len(checks):
                rest = len(checks) - len(found)
                if self.broken or not ours:
                    return [*found, *[self.broken or "hangs or dies"] * rest]
                found.append(_reason(error))
        return found

    def _failure(
        self, fn: Callable[..., Any], arguments: list[Any], backend: str, timeout: float
    ) -> BaseException | None:
        """Call fn on all ranks. If it fails, find out whether processes can be started at all."""
        if self.broken:
            return RuntimeError(self.broken)
        try:
            _in_time(lambda: self._pool.call(fn, arguments, backend, timeout), timeout + LATE)
            return None
        except Exception as error:
            n, failed = len(arguments), error
        try:
            _in_time(lambda: self._pool.call(int, [(0,)] * n, backend, timeout), timeout + LATE)
        except Exception as error:
            self.broken = f"not run, since {n} processes cannot be started: {_reason(error)}"
        return failed

    def close(self) -> None:
        """End the processes."""
        if not self.broken:
            self._pool.close()


def _on_rank(rank: int, checks: Sequence[Check], adapter: Adapter, ours: bool, seed: int, folder: str) -> None:
    """Run checks on this rank, and write each outcome to a file, which is there whatever happens after it.

    An error of diffcoll's ends this rank, since the other ranks may wait in any call after it. PyTorch's own raise on
    all ranks.
    """
    with warnings.catch_warnings(), Path(folder, str(rank)).open("w", buffering=1) as file:
        warnings.simplefilter("ignore")  # PyTorch's own warn of their deprecation at every call
        for check in checks:
            try:
                outcome = check.measure(check, rank, adapter, ours, seed)
            except Exception as error:
                if ours:
                    raise
                outcome = f"raises {type(error).__name__}"
            print(json.dumps(outcome), file=file)


def _outcomes_in(folder: str, rank: int) -> list[Errors]:
    file = Path(folder, str(rank))
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _in_time(fn: Callable[[], T], seconds: float) -> T:
    """Return fn(), or raise TimeoutError; fn runs in a daemon thread, which goes on after a timeout."""
    future: Future[T] = Future()

    def body() -> None:
        try:
            future.set_result(fn())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"the processes have not ended after {seconds:g} s")
    return future.result()


# ── ranks that were launched ─────────────────────────────────────────────────────────────────────────────


class Launched:
    """The processes that a launcher started; rank 0 reports."""

    def __init__(self, backend: str) -> None:
        self._on_mpi = backend == "mpi"
        if self._on_mpi:  # with gloo in addition, for PyTorch's own collectives
            gloo_beside_mpi()
        else:
            select_device(backend, int(os.environ.get("LOCAL_RANK", "0")))
            gloo_on_hosts(backend)
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.speaks = self.rank == 0
        self.description = (
            f"{self.n} {'processes launched by MPI' if self._on_mpi else f'launched {backend} processes'}"
        )
        #: For the exchange of outcomes; its timeout is longer than that of a call.
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * TIMEOUT_COMPILED))
        self._control = Control(resolve(control, "diffcoll verify"), "diffcoll verify")
        #: The reason why this rank no longer waits for others.
        self.broken = ""
        self._connect()

    def _connect(self) -> None:
        """Make a new group the default: one of torch.distributed is not usable after a failure."""
        if not self._on_mpi:
            diffcoll.set_default_group(dist.new_group(timeout=timedelta(seconds=TIMEOUT_COMPILED)))

    def run(self, checks: Sequence[Check], timeout: float, system: str, seed: int) -> list[Errors]:
        """Run checks, each when all ranks have finished the one before it."""
        adapter, ours = SYSTEMS[system], system == "diffcoll"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [self._outcome(check, adapter, ours, seed) for check in checks]

    def _outcome(self, check: Check, adapter: Adapter, ours: bool, seed: int) -> Errors:
        if self.broken or not check.offered(adapter, self.rank):
            return self.broken or NOT_OFFERED
        try:
            mine = check.measure(check, self.rank, adapter, ours, seed)
        except Exception as error:
            mine = _reason(error) if ours else f"raises {type(error).__name__}"
        outcome = worst(self._gathered(mine))
        if ours and isinstance(outcome, str) and not self.broken:
            self._connect()
        return outcome

    def _gathered(self, mine: T) -> list[T]:
        """Return all ranks' values."""
        if self.broken:
            return [mine]
        try:
            return [json.loads(text) for text in self._control.texts(json.dumps(mine))]
        except RuntimeError as error:
            self.broken = f"not run: rank {self.rank} waited for a rank that failed: {str(error).splitlines()[0][:80]}"
            print(f"diffcoll verify: {self.broken}", file=sys.stderr)
            return [mine]

    def close(self) -> None:
        """Leave the group; end this process if that could hang."""
        if not self.broken:
            dist.destroy_process_group()
            return
        sys.stdout.flush()
        time.sleep(0 if self.speaks else 10)  # the launcher ends all ranks when one exits; rank 0 must report first
        os._exit(1)  # a group that hangs cannot be destroyed
