"""Ranks on processes that are started once and run one call after the other."""

from __future__ import annotations

import contextlib
import pickle
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from multiprocessing.connection import wait
from typing import Any

from diffcoll.engines.devices import needs_accelerator
from diffcoll.testing.mpi_job import MpiJob
from diffcoll.testing.pickling import dumps, load
from diffcoll.testing.processes import (
    GRACE,
    Member,
    RankFailure,
    RanksFailedError,
    surroundings,
    temporary_folder,
)
from diffcoll.testing.stacks import stacks
from diffcoll.testing.worker import Answer, Seat, expect_no_import, serve_forked


class Pool:
    """Processes that run one rank each, kept for the next call if they are as before the last one.

    Args:
        start: seconds until a job of MPI must have started.
        once: there is one call only, so no process has to be as before it.
    """

    def __init__(self, start: float = 60, once: bool = False) -> None:
        self._start, self._once = start, once
        self._forked: list[Member] = []  # a call on N ranks uses the first N
        self._on_accelerators: list[Member] = []  # likewise
        self._launched: dict[int, list[Member]] = {}  # MPI jobs, by size
        self._folder: str | None = None
        self._holds_folder = contextlib.ExitStack()
        self._calls = count()

    def _members(self, kind: str, n: int) -> list[Member]:
        """Return n processes; start those that do not exist yet."""
        if self._folder is None:
            self._folder = self._holds_folder.enter_context(temporary_folder())
        if kind == "mpi":
            if n not in self._launched:
                folder = tempfile.mkdtemp(dir=self._folder)
                self._launched[n] = MpiJob(n, folder).begin(self._start)
            return self._launched[n]
        forked = not needs_accelerator(kind)
        members = self._forked if forked else self._on_accelerators
        while len(members) < n:
            members.append(Member(n, serve_forked, surroundings(), forked=forked))
        return members[:n]

    def call(self, fn: Callable[..., Any], rows: Sequence[Any], kind: str, timeout: float, seed: int = 0) -> list[Any]:
        """Run fn once per rank, called with the rank's row of arguments. Returns the results.

        Raises:
            RanksFailedError: a rank raised, died or hung.
        """
        answers = self.run(kind, timeout, [dumps((fn, tuple(row))) for row in rows], seed)
        failures = {r: answer.failure for r, answer in enumerate(answers)}
        if not any(failures.values()):
            return [load(answer.data) for answer in answers]
        raise failed("spawn", failures, timeout)

    def run(self, kind: str, timeout: float, payloads: Sequence[bytes], seed: int = 0) -> list[Answer]:
        """Make one call. A payload is a pickled function with its arguments for one rank."""
        expect_no_import("spawn")
        n = len(payloads)
        members = self._members(kind, n)
        assert self._folder is not None
        try:
            with tempfile.TemporaryDirectory(prefix=f"{next(self._calls)}-", dir=self._folder) as folder:
                with socket.create_server(("127.0.0.1", 0)) as free:
                    port = free.getsockname()[1]
                for rank, (member, payload) in enumerate(zip(members, payloads, strict=True)):
                    seat = Seat(kind, rank, n, timeout, seed, folder, port, surroundings(), self._once)
                    member.send(pickle.dumps(seat), payload)
                answers = _answers(members, folder, timeout)
                lost = any(a.failure is not None and a.failure.kind != "raised" for a in answers)
                if self._once:
                    if any(answer.failed for answer in answers):
                        self._discard(members)
                    return answers
                unclean = members if lost else _leave(members)
        except BaseException:  # such as KeyboardInterrupt, or the end of the test's time
            self._discard(members)
            raise
        self._discard(unclean)
        return answers

    def _discard(self, members: Sequence[Member]) -> None:
        """End processes, and those that end with them."""
        for member in list(members):
            if member.job is None:
                member.end()
            else:
                member.job.end()
        self._forked = [member for member in self._forked if member not in members]
        self._on_accelerators = [member for member in self._on_accelerators if member not in members]
        self._launched = {n: job for n, job in self._launched.items() if job[0].job not in [m.job for m in members]}

    def close(self) -> None:
        """End all processes."""
        everybody = [*self._forked, *self._on_accelerators]
        everybody += [member for job in self._launched.values() for member in job]
        for member in everybody:
            member.pipe.close()  # the process returns then, and an MPI job calls MPI_Finalize
        for member in everybody:
            member.process.join(GRACE)
        for job in self._launched.values():
            job[0].job.leave()
        self._discard(everybody)
        self._holds_folder.close()
        self._folder = None


def _answers(members: list[Member], folder: str, timeout: float) -> list[Answer]:
    """Wait for the answer of every rank; after the first failure not for long."""
    answers: dict[int, Answer] = {}
    end = time.monotonic() + timeout
    while len(answers) < len(members):
        silent = {r: member for r, member in enumerate(members) if r not in answers}
        # Processes that a rank has started may hold its pipe open, so its process is watched too.
        watched = [x for member in silent.values() for x in (member.pipe, member.process.sentinel)]
        ready = wait(watched, max(0.0, end - time.monotonic()))
        if not ready:
            break
        for r, member in silent.items():
            if member.pipe in ready or member.process.sentinel in ready:
                answers[r] = _answer(member)
                if answers[r].failed:
                    end = min(end, time.monotonic() + GRACE)
    hanging = [r for r in range(len(members)) if r not in answers]
    answers |= {r: Answer(b"", hung) for r, hung in stacks(members, hanging, folder).items()}
    return [answers[r] for r in range(len(members))]


def _answer(member: Member) -> Answer:
    try:
        answer: Answer = pickle.loads(member.receive())
    except (EOFError, OSError):
        return Answer(b"", RankFailure("died", member.last_words()))
    return answer


def failed(name: str, failures: dict[int, RankFailure | None], timeout: float) -> RanksFailedError:
    """Return the error of a call in which ranks failed: first the cause, then what happened on each rank."""
    each = (f"── rank {r} of {len(failures)} ──\n{f.text if f else 'returned'}" for r, f in failures.items())
    return RanksFailedError("\n".join((f"{name}: {_cause(failures, timeout)}", *each)), failures)


def _cause(failures: Mapping[int, RankFailure | None], timeout: float) -> str:
    """Return the failure that explains the others, in one sentence that begins with what it is."""
    first = RanksFailedError("", dict(failures)).first
    if first is None:
        each = (f"  rank {r}: {f.summary if f else 'returned'}" for r, f in failures.items())
        return "\n".join((f"no end after {timeout:g} s", *each))
    alike = [
        r for r, f in failures.items() if f and (f.kind, f.type, f.message) == (first.kind, first.type, first.message)
    ]
    where = f"rank{'s' * (len(alike) > 1)} {' and '.join(map(str, alike))} of {len(failures)}"
    if first.kind != "raised":
        return f"{where}: {first.summary}"
    where = "every rank" if len(alike) == len(failures) > 1 else where
    lines = {f.line for r, f in failures.items() if f and r in alike}
    line = f", at {first.line}" if lines == {first.line} != {""} else ""
    said = f": {first.message}" if first.message else ""
    return f"{first.type.rpartition('.')[2]} on {where}{line}{said}"


def _leave(members: Sequence[Member]) -> list[Member]:
    """Let all ranks destroy their groups. Returns the members that cannot be used again."""
    for member in members:
        member.send(b"")
    end = time.monotonic() + GRACE
    unclean = []
    for member in members:
        try:
            clean = member.pipe.poll(max(0.0, end - time.monotonic())) and member.receive() == b""
        except (EOFError, OSError):
            clean = False
        if not clean:
            unclean.append(member)
    return unclean
