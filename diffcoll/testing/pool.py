"""Processes that run the ranks of many tests."""

from __future__ import annotations

import contextlib
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from diffcoll.testing.launched import Launched
from diffcoll.testing.lifetime import temporary_folder
from diffcoll.testing.processes import GRACE, Processes, surroundings
from diffcoll.testing.rank_body import BodyEnd, text_of, unpacked
from diffcoll.testing.spawn import stacks
from diffcoll.testing.worker import STREAMS, Seat, Worker, serve

#: Seconds until an MPI job must have started.
_START = 60


class _Member:
    """One process of the pool, and the processes that started and end with it."""

    def __init__(self, crew: Processes, number: int) -> None:
        self.crew = crew
        self.number = number

    @property
    def pipe(self) -> Connection:
        return self.crew.pipes[self.number]

    @property
    def pid(self) -> int:
        return self.crew.pids[self.number]


class Pool:
    """Processes that run one rank each, kept for the next test if they are as before the last one.

    Args:
        preload: modules that each process imports before its first test.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = list(preload)
        self._forked: list[_Member] = []  # a test on N ranks uses the first N
        self._launched: dict[int, list[_Member]] = {}  # MPI jobs, by size
        self._folder: str | None = None
        self._holds_folder = contextlib.ExitStack()
        self._tests = count()

    def members(self, kind: str, n: int) -> list[_Member]:
        """Return n processes; start those that do not exist yet."""
        if self._folder is None:
            self._folder = self._holds_folder.enter_context(temporary_folder())
        if kind == "mpi":
            if n not in self._launched:
                folder = tempfile.mkdtemp(dir=self._folder)
                setups = [(rank, n, kind, _START, 0, folder, surroundings()) for rank in range(n)]
                self._launched[n] = _begin(Launched(serve), setups)
            return self._launched[n]
        while len(self._forked) < n:
            self._forked += _begin(Worker(), [()])
        return self._forked[:n]

    def run(self, kind: str, n: int, timeout: float, payload: bytes, verbosity: int = 0) -> list[BodyEnd]:
        """Run one test on n ranks. The payload is a pickled `Call` and the filters of warnings."""
        members = self.members(kind, n)
        assert self._folder is not None
        try:
            with tempfile.TemporaryDirectory(prefix=f"{next(self._tests)}-", dir=self._folder) as folder:
                for rank, member in enumerate(members):
                    seat = Seat(kind, rank, n, timeout, folder, surroundings(), self._preload, verbosity)
                    with contextlib.suppress(OSError):  # it died; `_outcomes` says so
                        member.pipe.send_bytes(pickle.dumps(seat))
                        member.pipe.send_bytes(payload)
                outcomes = _outcomes(members, folder, timeout)
                for outcome in outcomes:
                    outcome.output = {name: _read(folder, name, outcome.rank) for name in STREAMS}
                unclean = _leave(members) if all(o.kind != "lost" for o in outcomes) else members
        except BaseException:  # such as KeyboardInterrupt, or the end of the test's time
            self._discard(members)
            raise
        self._discard(unclean)
        if unclean:  # now, so that it does not count in the next example's time
            self.members(kind, n)
        return outcomes

    def _discard(self, members: Sequence[_Member]) -> None:
        """End processes, and those that end with them."""
        for member in list(members):
            member.crew.end()
            self._forked = [m for m in self._forked if m.crew is not member.crew]
            self._launched = {n: job for n, job in self._launched.items() if job[0].crew is not member.crew}

    def end(self) -> None:
        """End all processes."""
        everybody = [*self._forked, *(member for job in self._launched.values() for member in job)]
        for member in everybody:
            member.pipe.close()  # the process returns then, and an MPI job calls MPI_Finalize
        crews = list({id(member.crew): member.crew for member in everybody}.values())
        for crew in crews:
            crew.leave()
        self._discard(everybody)
        self._holds_folder.close()
        self._folder = None


def _begin(crew: Processes, setups: list[Any]) -> list[_Member]:
    try:
        crew.begin(setups, [b""] * len(setups), _START)
    except BaseException:
        crew.end()
        raise
    return [_Member(crew, number) for number in range(len(setups))]


def _outcomes(members: list[_Member], folder: str, timeout: float) -> list[BodyEnd]:
    """Wait for the outcome of every rank. One that died or hangs has the kind "lost"."""
    outcomes: dict[int, BodyEnd] = {}
    end = time.monotonic() + timeout
    try:
        while len(outcomes) < len(members):
            silent = {r: member for r, member in enumerate(members) if r not in outcomes}
            sentinels = {r: member.crew.sentinel(member.number) for r, member in silent.items()}
            ready = wait([*(m.pipe for m in silent.values()), *sentinels.values()], max(0.0, end - time.monotonic()))
            if not ready:
                break
            for r, member in silent.items():
                if member.pipe in ready or sentinels[r] in ready:
                    outcomes[r] = _outcome(r, member)
                    if outcomes[r].kind != "passed":
                        end = min(end, time.monotonic() + GRACE)
    except BaseException:
        _print_stacks(members, [r for r in range(len(members)) if r not in outcomes], folder)
        raise
    failed = any(o.kind != "passed" for o in outcomes.values())
    why = "when another rank had ended" if failed else f"after {timeout:g} s"
    hanging = [r for r in range(len(members)) if r not in outcomes]
    for r, stack in stacks([m.pid for m in members], hanging, folder).items():
        outcomes[r] = _lost(r, f"the rank had not ended {why}; it {stack}")
    return [outcomes[r] for r in range(len(members))]


def _outcome(rank: int, member: _Member) -> BodyEnd:
    """Receive the outcome of one rank, and give its warnings in this process."""
    try:
        if not member.pipe.poll():
            raise EOFError
        outcome, error, words = pickle.loads(member.pipe.recv_bytes())
    except (EOFError, OSError):
        return _lost(rank, member.crew.last_words(member.number))
    assert isinstance(outcome, BodyEnd)
    if error is not None:
        with contextlib.suppress(Exception):  # its class cannot be imported here
            outcome.error = unpacked(pickle.loads(error))
    for word in words:
        text, category, file, line = pickle.loads(word)
        warnings.warn_explicit(text, category, file, line)
    return outcome


def _lost(rank: int, text: str) -> BodyEnd:
    return BodyEnd(rank, "lost", None, text_of(text.rstrip()), time.monotonic())


def _leave(members: list[_Member]) -> list[_Member]:
    """Let all ranks destroy their groups. Returns the members that cannot be used again."""
    for member in members:
        with contextlib.suppress(OSError):
            member.pipe.send_bytes(b"")
    end = time.monotonic() + GRACE
    unclean = []
    for member in members:
        try:
            clean = member.pipe.poll(max(0.0, end - time.monotonic())) and pickle.loads(member.pipe.recv_bytes()) == ""
        except (EOFError, OSError):
            clean = False
        if not clean:
            unclean.append(member)
    return unclean


def _print_stacks(members: list[_Member], hanging: list[int], folder: str) -> None:
    """Show where the ranks are when the test is interrupted."""
    for r, stack in stacks([m.pid for m in members], hanging, folder).items():
        print(f"── rank {r} of {len(members)} was interrupted; it {stack}", file=sys.stderr)


def _read(folder: str, name: str, rank: int) -> str:
    file = Path(folder, f"{name}-{rank}")
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
