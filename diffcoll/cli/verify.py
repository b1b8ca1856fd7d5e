"""`diffcoll verify`: every collective against its ground truth, on real processes, beside PyTorch's own.

Spawns processes on this machine, with gloo or, by `--engine mpi`, under mpiexec. Under `torchrun` (or any launcher
that sets RANK and WORLD_SIZE) and under `mpiexec` it uses the processes that were launched, on whatever machines they
are. PyTorch's own always run on torch.distributed.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diffcoll.cli import digits, report
from diffcoll.cli.competitors import SYSTEMS, Adapter, Call
from diffcoll.cli.launch import ENGINES, gloo_beside_mpi, launcher
from diffcoll.collectives import COLLECTIVES
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
from diffcoll.testing.spawn import RanksFailedError, spawn

__all__ = ["BAR", "TRAINING_BAR", "Row", "Training", "add_to"]

#: The largest relative error at which a collective of the library counts as right.
BAR = 1e-10
#: The same for the training on real input.
TRAINING_BAR = 1e-9
TRAINING = "digits"

#: What one system does on one call: errors by name, or a word for why there are none.
Outcome = dict[str, float] | str
#: (rank, cases, adapter, whether it is our own, seed) → an outcome for each row.
Measure = Callable[[int, list[Case], Adapter, bool, int], list[Outcome]]


@dataclass
class Row:
    """One call at one world size."""

    collective: str
    call: str
    world_size: int
    systems: dict[str, Outcome] = field(default_factory=dict)

    def passes(self) -> bool:
        """Whether the library's own errors are all within the bar."""
        own = self.systems["diffcoll"]
        return isinstance(own, dict) and max(own.values()) <= BAR


@dataclass
class Training:
    """Loss curves of a training on one process and, by the way the keys were gathered, on several."""

    world_size: int
    one_process: list[float]
    curves: dict[str, list[float]] = field(default_factory=dict)
    #: The largest differences from the one process, of the loss and of the final parameters.
    differences: dict[str, tuple[float, float]] = field(default_factory=dict)

    def passes(self) -> bool:
        """Whether the library's training is that of one process."""
        return max(self.differences["diffcoll.all_gather"]) <= TRAINING_BAR


def add_to(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("verify", help="hold every collective against its ground truth, on real processes")
    parser.add_argument("--world-size", type=int, nargs="+", default=None, metavar="N", help="default: 2 3")
    parser.add_argument("--only", default="", metavar="NAMES", help=f"of {', '.join((*COLLECTIVES, TRAINING))}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=ENGINES, help="default: torch, and under mpiexec mpi")
    parser.add_argument("--backend", default="gloo", help="of torch.distributed; under torchrun too (default: gloo)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--html", type=Path, metavar="FILE", help="one page that stands by itself")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    names = [name for name in options.only.split(",") if name] or [*COLLECTIVES, TRAINING]
    unknown = [name for name in names if name not in (*COLLECTIVES, TRAINING)]
    if unknown:
        known = ", ".join((*COLLECTIVES, TRAINING))
        raise SystemExit(f"diffcoll verify: --only: got {unknown[0]!r}, expected names of {known}")
    launched = launcher(options.engine)
    if launched and options.world_size:
        raise SystemExit("diffcoll verify: --world-size: the launcher has set it already; leave it out")
    world: _World
    if launched:
        world = _LaunchedByMpi() if launched == "mpi" else _Launched(options.backend)
    else:
        world = _Spawned("mpi" if options.engine == "mpi" else options.backend)
    sizes = [dist.get_world_size()] if launched else options.world_size or [2, 3]

    collectives = [name for name in names if name != TRAINING]
    steps = len(sizes) * (len(collectives) + bool(collectives)) * len(SYSTEMS) + (TRAINING in names)
    with report.progress(steps, quiet=not world.speaks) as advance:
        rows: list[Row] = []
        for n in sizes:
            for name in collectives:
                rows += _rows(world, n, name, options.seed, advance)
            rows += _compiled_rows(world, n, collectives, options.seed, advance) if collectives else []
        training = None
        if TRAINING in names:
            training = _train(world, dist.get_world_size() if launched else 3)
            advance(TRAINING)
    world.close()
    passed = all(row.passes() for row in rows) and (training is None or training.passes())
    if world.speaks:
        about = f"{world.description}, torch {torch.__version__}, float64, seed {options.seed}"
        report.show(rows, training, about)
        if options.json:
            content = {"about": about, "passed": passed, "rows": [asdict(row) for row in rows]}
            content["training"] = asdict(training) if training else None
            options.json.write_text(json.dumps(content, indent=1) + "\n")
        if options.html:
            options.html.write_text(report.page(rows, training, about))
    return 0 if passed else 1


# ── the matrix ───────────────────────────────────────────────────────────────────────────────────────────


def _rows(world: _World, n: int, name: str, seed: int, advance: Callable[[str], None]) -> Iterable[Row]:
    """All calls of one collective, by all systems, and the forward mode of all of them in one row."""
    cases = [case for case in table(n) if case.name == name]
    rows = [Row(name, label, n) for label in (*(case.label for case in cases), "jvp, all calls")]
    for system in SYSTEMS:
        for row, outcome in zip(rows, world.outcomes(n, _calls, cases, system, seed), strict=True):
            row.systems[system] = outcome
        advance(f"{name}, {n} processes")
    return rows


def _compiled_rows(world: _World, n: int, names: list[str], seed: int, advance: Callable[[str], None]) -> Iterable[Row]:
    """torch.compile(fullgraph=True) of all calls, in one graph; a row for each collective."""
    cases = [case for case in table(n) if case.name in names and None not in case.shapes]
    rows = [Row(name, "compiled, all calls", n) for name in dict.fromkeys(case.name for case in cases)]
    for system in SYSTEMS:
        for row, outcome in zip(rows, world.outcomes(n, _compiled, cases, system, seed), strict=True):
            row.systems[system] = outcome
        advance(f"compiled, {n} processes")
    return rows


# What a system does, as far as this rank sees it. Each of these returns an outcome for each row.


def _calls(rank: int, cases: list[Case], adapter: Adapter, ours: bool, seed: int) -> list[Outcome]:
    """Run each case by itself, then all of them in forward mode."""
    found: list[Outcome] = []
    tangents: list[Outcome] = []
    for case in cases:
        call = adapter(case, rank)
        found.append(_outcome(ours, call and partial(_by_order, case, rank, seed, call)))
        if None not in case.shapes:  # takes part in no transform
            tangents.append(_outcome(ours, call and partial(_forward, case, rank, seed, call)))
    return [*found, _all(tangents)]


def _by_order(case: Case, rank: int, seed: int, call: Call) -> dict[str, float]:
    return errors(on_rank(case, rank, seed, call), in_truth(case, seed), rank)


def _forward(case: Case, rank: int, seed: int, call: Call) -> dict[str, float]:
    return errors(tangent_on_rank(case, rank, seed, call), tangents_in_truth(case, seed), rank)


def _compiled(rank: int, cases: list[Case], adapter: Adapter, ours: bool, seed: int) -> list[Outcome]:
    """Compile all cases in one graph; of the others' those that only add up, which is what they claim to do."""
    names = dict.fromkeys(case.name for case in cases)
    calls = [(case, adapter(case, rank)) for case in cases]
    offered = [(case, call) for case, call in calls if call and (ours or "op" not in case.arguments)]

    def program(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [call(x) for (_, call), x in zip(offered, xs, strict=True)]

    table = [case for case, _ in offered]
    found: dict[str, list[Outcome]] = {name: [] for name in names}
    try:
        measured = together_on_rank(table, rank, seed, torch.compile(program, fullgraph=True))
    except Exception as error:
        if ours:
            raise
        for case in table:
            found[case.name].append(f"raises {type(error).__name__}")
    else:
        for case, m in zip(table, measured, strict=True):
            found[case.name].append(errors(m, in_truth(case, seed, orders=1), rank))
    return [_all(outcomes or ["not offered"]) for outcomes in found.values()]


def _outcome(ours: bool, measure: Callable[[], dict[str, float]] | None) -> Outcome:
    if measure is None:
        return "not offered"
    try:
        return measure()
    except Exception as error:
        if ours:
            raise
        return f"raises {type(error).__name__}"


def _all(outcomes: list[Outcome]) -> Outcome:
    """One outcome for several calls: the largest errors; a word where a call that is offered has one."""
    offered = [o for o in outcomes if o != "not offered"] or ["not offered"]
    words = [o for o in offered if isinstance(o, str)]
    numbers = [o for o in offered if isinstance(o, dict)]
    return words[0] if words else {key: max(o[key] for o in numbers) for key in numbers[0]}


def _worst(of_ranks: list[list[Outcome]]) -> list[Outcome]:
    """Join what the ranks saw."""
    return [_all(list(outcomes)) for outcomes in zip(*of_ranks, strict=True)]


class _Spawned:
    """Processes of this machine, new ones for every collective: what one of them breaks is its own."""

    speaks = True

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.description = f"{backend} processes on this machine"

    def outcomes(self, n: int, measure: Measure, cases: list[Case], system: str, seed: int) -> list[Outcome]:
        adapter, ours = SYSTEMS[system], system == "diffcoll"

        def body(rank: int) -> list[Outcome]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the others: that they are deprecated, at every call
                return measure(rank, cases, adapter, ours, seed)

        if not ours and all(adapter(case, 0) is None for case in cases):
            return body(0)  # nothing to run
        try:
            backend = "gloo" if self.backend == "mpi" and not ours else self.backend
            of_ranks = spawn(body, range(n), backend=backend, timeout=30 if measure is _calls else 150, seed=seed)
        except RanksFailedError:
            if ours:
                raise
            names = {case.name for case in cases}
            return ["hangs or dies"] * (len(cases) + 1 if measure is _calls else len(names))
        return _worst(of_ranks)

    def each(self, n: int, fn: Callable[[], list[float]]) -> list[list[float]]:
        return spawn(lambda r: fn(), range(n), backend=self.backend, timeout=120)

    def close(self) -> None:
        pass


class _Launched:
    """The processes that a launcher started; rank 0 reports."""

    def __init__(self, backend: str) -> None:
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend)
        self._introduce(f"launched {backend} processes")

    def _introduce(self, what: str) -> None:
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.speaks = self.rank == 0
        self.description = f"{self.n} {what}"

    def outcomes(self, n: int, measure: Measure, cases: list[Case], system: str, seed: int) -> list[Outcome]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mine = measure(self.rank, cases, SYSTEMS[system], system == "diffcoll", seed)
        numbers = [
            [1.0 + (o != _WORDS[0]), *_NONE] if isinstance(o, str) else [0.0, *map(o.get, _KINDS, _NONE)] for o in mine
        ]
        of_ranks: list[list[Outcome]] = []
        for rank, flat in enumerate(self._gathered([v for row in numbers for v in row])):
            width = 1 + len(_KINDS)
            rows = [flat[i : i + width] for i in range(0, len(flat), width)]
            found: list[Outcome] = [
                _WORDS[int(row[0]) - 1]
                if row[0]
                else {key: value for key, value in zip(_KINDS, row[1:], strict=True) if value >= 0}
                for row in rows
            ]
            of_ranks.append(mine if rank == self.rank else found)
        return _worst(of_ranks)

    def each(self, n: int, fn: Callable[[], list[float]]) -> list[list[float]]:
        return self._gathered(fn())

    def _gathered(self, numbers: list[float]) -> list[list[float]]:
        """All ranks' numbers, by torch's own collective."""
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        mine = torch.tensor(numbers, dtype=torch.float64, device=device)
        all_of_them = [torch.empty_like(mine) for _ in range(self.n)]
        dist.all_gather(all_of_them, mine)
        return [t.tolist() for t in all_of_them]

    def close(self) -> None:
        dist.destroy_process_group()


class _LaunchedByMpi(_Launched):
    """The processes that MPI's launcher started, with gloo beside it for PyTorch's own."""

    def __init__(self) -> None:
        gloo_beside_mpi()
        self._introduce("processes launched by MPI")


_World = _Spawned | _Launched
_KINDS = ("output", "gradient", "second", "tangent")
_NONE = (-1.0,) * len(_KINDS)
#: What other ranks say without numbers.
_WORDS = ("not offered", "raises on another rank")


# ── real input ───────────────────────────────────────────────────────────────────────────────────────────


def _train(world: _World, n: int) -> Training:
    """Train on n processes and on one."""
    images = digits.load()
    alone = digits.train(images, None)
    ways = {"diffcoll.all_gather": digits.differentiable, "the usual detached gather": digits.detached}

    def all_ways() -> list[float]:
        found: list[float] = []
        for gather in ways.values():
            trained = digits.train(images, gather)
            found += [*digits.difference(trained, alone), *trained.losses.tolist()]
        return found

    of_ranks = world.each(n, all_ways)
    result = Training(n, alone.losses.tolist())
    length = digits.STEPS + 2
    for i, way in enumerate(ways):
        parts = [found[i * length : (i + 1) * length] for found in of_ranks]
        result.differences[way] = max(p[0] for p in parts), max(p[1] for p in parts)
        result.curves[way] = parts[0][2:]
    return result
