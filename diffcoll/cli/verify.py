"""`diffcoll verify`: check every collective against a reference gradient, on real processes, next to PyTorch's own.

Spawns processes on this machine, with gloo or, with `--engine mpi`, under mpiexec. Under `torchrun` (or any launcher
that sets RANK and WORLD_SIZE) and under `mpiexec` it uses the launched processes, which may be on several hosts.
PyTorch's own collectives always run on torch.distributed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import diffcoll
from diffcoll.cli import digits, report
from diffcoll.cli.arguments import TRAINING
from diffcoll.cli.competitors import SYSTEMS, Adapter, CompetitorCall
from diffcoll.cli.launch import gloo_beside_mpi
from diffcoll.cli.report import Errors, Row, Training
from diffcoll.core.errors import CollectiveFailedError
from diffcoll.core.torch_private.release import COMPILES
from diffcoll.testing.cases import (
    Case,
    errors,
    in_truth,
    on_rank,
    table,
    tangent_on_rank,
    tangents_in_truth,
    together_on_rank,
)
from diffcoll.testing.processes import RanksFailedError
from diffcoll.testing.spawn import spawn

#: Timeouts in seconds: for one collective, and for compiling several.
TIMEOUT, TIMEOUT_COMPILED = 30.0, 150.0
#: Seconds by which `spawn` may exceed its timeout.
LATE = 60.0

#: Calls a function that measures errors, and returns the errors or the reason of a failure; None: not offered.
Attempt = Callable[[Callable[[], dict[str, float]] | None], Errors]
#: (rank, cases, adapter, whether the system is diffcoll, seed, attempt) → an outcome for each row.
Program = Callable[[int, list[Case], Adapter, bool, int, Attempt], list[Errors]]
Piece = tuple[Program, list[Case]]
T = TypeVar("T")


@dataclass(frozen=True)
class Measure:
    """A program for several cases at once, and for each row the programs that measure it case by case."""

    program: Program
    timeout: float
    rows: Callable[[list[Case]], list[list[Piece]]]


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    names, launched = options.names, options.launched
    world: _World
    if launched:
        world = _LaunchedByMpi() if launched == "mpi" else _Launched(options.backend)
    else:
        world = _Spawned("mpi" if options.engine == "mpi" else options.backend)
    sizes = [dist.get_world_size()] if launched else options.world_size or [2, 3]

    collectives = [name for name in names if name != TRAINING]
    compiles = COMPILES and bool(collectives)
    steps = len(sizes) * (len(collectives) + compiles) * len(SYSTEMS) + (TRAINING in names)
    with report.progress(steps, quiet=not world.speaks) as advance:
        rows: list[Row] = []
        for n in sizes:
            for name in collectives:
                rows += _rows(world, n, name, options.seed, advance)
            rows += _compiled_rows(world, n, collectives, options.seed, advance) if compiles else []
        training = None
        if TRAINING in names:
            training = _train(world, max(sizes))
            advance(TRAINING)
    passed = all(row.passes() for row in rows) and (training is None or training.passes())
    if world.speaks:
        about = f"{world.description}, torch {torch.__version__}, float64, seed {options.seed}"
        about += "" if COMPILES else "; compiled: not run, which needs torch 2.12 or later"
        report.show(rows, training, about)
        content = {"about": about, "torch": torch.__version__, "passed": passed, "rows": [asdict(row) for row in rows]}
        content["training"] = asdict(training) if training else None
        try:
            if options.json:
                options.json.write_text(json.dumps(content, indent=1) + "\n")
            if options.html:
                options.html.write_text(report.page(rows, training, about))
        except OSError as error:  # the file was writable when the run began
            print(f"diffcoll verify: {error}", file=sys.stderr)
            passed = False
    world.close()
    return 0 if passed else 1


# ── the matrix ───────────────────────────────────────────────────────────────────────────────────────────


def _rows(world: _World, n: int, name: str, seed: int, advance: Callable[[str], None]) -> Iterable[Row]:
    """Rows of one collective for all systems: one for each call, and one for the forward mode of all calls."""
    cases = [case for case in table(n) if case.name == name]
    rows = [Row(name, label, n) for label in (*(case.label for case in cases), "jvp, all calls")]
    for system in SYSTEMS:
        for row, outcome in zip(rows, world.outcomes(n, CALLS, cases, system, seed), strict=True):
            row.systems[system] = outcome
        advance(f"{name}, {n} processes")
    return rows


def _compiled_rows(world: _World, n: int, names: list[str], seed: int, advance: Callable[[str], None]) -> Iterable[Row]:
    """Rows of torch.compile(fullgraph=True), one for each collective; all calls are in one graph."""
    cases = [case for case in table(n) if case.name in names and None not in case.shapes]
    rows = [Row(name, "compiled, all calls", n) for name in dict.fromkeys(case.name for case in cases)]
    for system in SYSTEMS:
        for row, outcome in zip(rows, world.outcomes(n, COMPILED, cases, system, seed), strict=True):
            row.systems[system] = outcome
        advance(f"compiled, {n} processes")
    return rows


# ── measurements on one rank ─────────────────────────────────────────────────────────────────────────────


def _calls(rank: int, cases: list[Case], adapter: Adapter, ours: bool, seed: int, attempt: Attempt) -> list[Errors]:
    """Measure each case in reverse mode, then all cases in forward mode."""
    return [*_orders(rank, cases, adapter, ours, seed, attempt), *_tangents(rank, cases, adapter, ours, seed, attempt)]


def _orders(rank: int, cases: list[Case], adapter: Adapter, ours: bool, seed: int, attempt: Attempt) -> list[Errors]:
    calls = [(case, adapter(case, rank)) for case in cases]
    return [attempt(call and partial(_by_order, case, rank, seed, call)) for case, call in calls]


def _tangents(rank: int, cases: list[Case], adapter: Adapter, ours: bool, seed: int, attempt: Attempt) -> list[Errors]:
    calls = [(case, adapter(case, rank)) for case in _whole(cases)]
    return [_all([attempt(call and partial(_forward, case, rank, seed, call)) for case, call in calls])]


def _by_order(case: Case, rank: int, seed: int, call: CompetitorCall) -> dict[str, float]:
    return errors(on_rank(case, rank, seed, call), in_truth(case, seed), rank)


def _forward(case: Case, rank: int, seed: int, call: CompetitorCall) -> dict[str, float]:
    return errors(tangent_on_rank(case, rank, seed, call), tangents_in_truth(case, seed), rank)


def _compiled(rank: int, cases: list[Case], adapter: Adapter, ours: bool, seed: int, attempt: Attempt) -> list[Errors]:
    """Compile all cases in one graph; of PyTorch's own collectives only the sums."""
    calls = [(case, adapter(case, rank)) for case in cases]
    offered = [(case, call) for case, call in calls if call and (ours or "op" not in case.arguments)]
    found: dict[str, list[Errors]] = {name: [] for name in _names(cases)}

    def program(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [call(x) for (_, call), x in zip(offered, xs, strict=True)]

    def measure() -> dict[str, float]:
        table = [case for case, _ in offered]
        measured = together_on_rank(table, rank, seed, torch.compile(program, fullgraph=True))
        for case, m in zip(table, measured, strict=True):
            found[case.name].append(errors(m, in_truth(case, seed, orders=1), rank))
        return {}

    said = attempt(measure if offered else None)
    if isinstance(said, str):
        for case, _ in offered:
            found[case.name] = [said]
    return [_all(outcomes or ["not offered"]) for outcomes in found.values()]


def _names(cases: list[Case]) -> list[str]:
    return list(dict.fromkeys(case.name for case in cases))


def _whole(cases: list[Case]) -> list[Case]:
    """Return the cases with an x on every rank; others cannot be transformed."""
    return [case for case in cases if None not in case.shapes]


def _rows_of_calls(cases: list[Case]) -> list[list[Piece]]:
    by_order: list[list[Piece]] = [[(_orders, [case])] for case in cases]
    return [*by_order, [(_tangents, [case]) for case in _whole(cases)]]


def _rows_compiled(cases: list[Case]) -> list[list[Piece]]:
    return [[(_compiled, [case for case in cases if case.name == name])] for name in _names(cases)]


CALLS = Measure(_calls, TIMEOUT, _rows_of_calls)
COMPILED = Measure(_compiled, TIMEOUT_COMPILED, _rows_compiled)


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────


def _must(measure: Callable[[], dict[str, float]] | None) -> Errors:
    """Measure; an error ends this rank, since the other ranks may wait in any call after it."""
    return "not offered" if measure is None else measure()


def _may_raise(measure: Callable[[], dict[str, float]] | None) -> Errors:
    """Measure, and continue after an error: PyTorch's own collectives raise on all ranks."""
    try:
        return _must(measure)
    except Exception as error:
        return f"raises {type(error).__name__}"


def _reason(error: BaseException) -> str:
    """Return the first line of an error; of several ranks' errors, one that does not report the failure of another."""
    if not isinstance(error, RanksFailedError):
        return f"raises {type(error).__name__}: {str(error).strip()}".splitlines()[0]
    # The message of a traceback is the first line without indentation after its last frame.
    last = (re.split(r'\n  File "', report)[-1] for report in error.reports.values() if "Traceback" in report)
    lines = [m[0] for m in (re.search(r"^\S.*", text.partition("\n")[2], re.MULTILINE) for text in last) if m]
    dead = [line for text in error.reports.values() for line in text.splitlines()[:1] if "the process ended" in line]
    first = [line for line in lines if CollectiveFailedError.__name__ not in line.partition(":")[0]]
    said = [*(f"raises {line}" for line in first), *dead, *(f"raises {line}" for line in lines)]
    return (said or str(error).splitlines())[0]


def _all(outcomes: list[Errors]) -> Errors:
    """Return one outcome for several calls: the largest errors, or a reason if an offered call failed."""
    offered = [o for o in outcomes if o != "not offered"] or ["not offered"]
    words = [o for o in offered if isinstance(o, str)]
    words.sort(key=ELSEWHERE.__eq__)  # prefer the reason of the rank that raised
    numbers = [o for o in offered if isinstance(o, dict)]
    return words[0] if words else {key: max(o[key] for o in numbers) for key in numbers[0]}


def _worst(of_ranks: list[list[Errors]]) -> list[Errors]:
    """Return one outcome for each row from those of all ranks."""
    return [_all(list(outcomes)) for outcomes in zip(*of_ranks, strict=True)]


class _Spawned:
    """Processes of this machine, new ones for every collective, so that a failure does not affect the next one."""

    speaks = True

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.description = f"{backend} processes on this machine"
        #: The reason why no processes can be started.
        self.broken = ""

    def outcomes(self, n: int, measure: Measure, cases: list[Case], system: str, seed: int) -> list[Errors]:
        adapter, ours = SYSTEMS[system], system == "diffcoll"
        rows = measure.rows(cases)
        if not ours and all(adapter(case, 0) is None for case in cases):
            return ["not offered"] * len(rows)

        def run(program: Program, cases: list[Case]) -> list[Errors]:
            def body(rank: int) -> list[Errors]:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # PyTorch's own warn of their deprecation at every call
                    return program(rank, cases, adapter, ours, seed, _must if ours else _may_raise)

            backend = "gloo" if self.backend == "mpi" and not ours else self.backend
            return _worst(self._spawned(body, n, measure.timeout, backend, seed=seed))

        def alone(program: Program, cases: list[Case]) -> Errors:
            try:
                return run(program, cases)[0]
            except Exception as error:
                return _reason(error)

        try:
            return run(measure.program, cases)
        except Exception as error:
            if self.broken or not ours:
                return [self.broken or "hangs or dies"] * len(rows)
            if len(rows) == 1:
                return [_reason(error)]
        return [_all([alone(*piece) for piece in pieces]) for pieces in rows]

    def each(self, n: int, fn: Callable[[], list[float]]) -> list[list[float]]:
        return self._spawned(lambda r: fn(), n, 120, self.backend)

    def _spawned(self, body: Callable[[int], T], n: int, timeout: float, backend: str, **more: Any) -> list[T]:
        """Run body on n ranks. If it fails, find out whether processes can be started at all."""
        if self.broken:
            raise RuntimeError(self.broken)
        try:
            return _in_time(partial(spawn, body, range(n), backend=backend, timeout=timeout, **more), timeout + LATE)
        except Exception:
            try:
                _in_time(partial(spawn, int, range(n), backend=backend, timeout=timeout), timeout + LATE)
            except Exception as error:
                self.broken = f"not run, since {n} processes cannot be started: {_reason(error)}"
            raise

    def close(self) -> None:
        pass


def _in_time(fn: Callable[[], T], seconds: float) -> T:
    """Return fn(), or raise TimeoutError; fn runs in a daemon thread, which goes on after a timeout."""
    found: list[T] = []
    raised: list[BaseException] = []

    def body() -> None:
        try:
            found.append(fn())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not found:
        raise TimeoutError(f"spawn has not returned after {seconds:g} s")
    return found[0]


class _Launched:
    """The processes that a launcher started; rank 0 reports."""

    def __init__(self, backend: str) -> None:
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend)
        self._introduce(f"launched {backend} processes")
        self._connect()

    def _introduce(self, what: str) -> None:
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.speaks = self.rank == 0
        self.description = f"{self.n} {what}"
        #: Group for the exchange of outcomes; its timeout is longer than that of a call.
        self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * TIMEOUT_COMPILED))
        #: The reason why this rank no longer waits for others.
        self.broken = ""

    def _connect(self) -> None:
        """Make a new group the default: a group is not usable after a failure."""
        diffcoll.set_default_group(dist.new_group(timeout=timedelta(seconds=TIMEOUT_COMPILED)))

    def outcomes(self, n: int, measure: Measure, cases: list[Case], system: str, seed: int) -> list[Errors]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = system == "diffcoll"
            mine = measure.program(self.rank, cases, SYSTEMS[system], ours, seed, partial(self._attempt, ours))
        return _worst(self._gathered(mine))

    def _attempt(self, ours: bool, measure: Callable[[], dict[str, float]] | None) -> Errors:
        """Measure; after an error continue when all ranks have finished the call."""
        if self.broken or measure is None:
            return self.broken or "not offered"
        try:
            mine: Errors = measure()
        except Exception as error:
            mine = _reason(error) if ours else f"raises {type(error).__name__}"
        well = self._gathered(isinstance(mine, dict))
        if ours and not all(well) and not self.broken:
            self._connect()
        return mine if all(well) or isinstance(mine, str) else ELSEWHERE

    def each(self, n: int, fn: Callable[[], list[float]]) -> list[list[float]]:
        found: list[float] = []

        def measure() -> dict[str, float]:
            found.extend(fn())
            return {}

        words = [word for word in self._gathered(self._attempt(True, measure)) if isinstance(word, str)]
        if words:
            raise RuntimeError(words[0])
        return self._gathered(found)

    def _gathered(self, mine: T) -> list[T]:
        """Return all ranks' values, exchanged as JSON by torch's own all_gather."""
        if self.broken:
            return [mine]
        text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.n)]
        try:
            dist.all_gather(lengths, torch.tensor([len(text)]), group=self.control)
            longest = max(int(length) for length in lengths)
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.n)]
            dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))), group=self.control)
        except RuntimeError as error:
            self.broken = f"not run: rank {self.rank} waited for a rank that failed: {str(error).splitlines()[0][:80]}"
            print(f"diffcoll verify: {self.broken}", file=sys.stderr)
            return [mine]
        return [json.loads(bytes(t[: int(n)].tolist())) for t, n in zip(texts, lengths, strict=True)]

    def close(self) -> None:
        if not self.broken:
            dist.destroy_process_group()
            return
        sys.stdout.flush()
        time.sleep(0 if self.speaks else 10)  # the launcher ends all ranks when one exits; rank 0 must report first
        os._exit(1)  # a group that hangs cannot be destroyed


class _LaunchedByMpi(_Launched):
    """The processes that MPI's launcher started, with gloo in addition for PyTorch's own collectives."""

    def __init__(self) -> None:
        gloo_beside_mpi()
        self._introduce("processes launched by MPI")

    def _connect(self) -> None:
        pass  # a communicator has no timeout


_World = _Spawned | _Launched
#: Errors on a rank where a call succeeded that raised on another.
ELSEWHERE = "raises on another rank"


# ── real input ───────────────────────────────────────────────────────────────────────────────────────────


def _train(world: _World, n: int) -> Training:
    """Train on n processes and on one."""
    images = digits.load()
    alone = digits.train(images, None)
    result = Training(n, alone.losses.tolist())
    ways = {"diffcoll.all_gather": digits.differentiable, "the usual detached gather": digits.detached}

    def all_ways() -> list[float]:
        found: list[float] = []
        for gather in ways.values():
            trained = digits.train(images, gather)
            found += [*digits.difference(trained, alone), *trained.losses.tolist()]
        return found

    try:
        of_ranks = world.each(n, all_ways)
    except Exception as error:
        result.error = _reason(error)
        return result
    length = digits.STEPS + 2
    for i, way in enumerate(ways):
        parts = [found[i * length : (i + 1) * length] for found in of_ranks]
        result.differences[way] = max(p[0] for p in parts), max(p[1] for p in parts)
        result.curves[way] = parts[0][2:]
    return result
