"""`diffcoll verify`: every collective against a reference gradient, on real processes.

Rank 0 prints a line for each call as soon as it is known, and one at the end.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import diffcoll
from diffcoll.core.control import Control
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.release import COMPILES
from diffcoll.engines.devices import device_of_backend, select_device
from diffcoll.testing import RanksFailedError, cases, spawn
from diffcoll.testing.cases import Case, Measure

#: The largest relative error of float64 at which a call is right.
TOLERANCE = 1e-10
#: Seconds in which a rank must come to a call: for the others it may compile.
PATIENCE = 120
Errors = dict[str, float]


def launcher() -> str:
    """Return what has launched this process together with others: "mpi", "torch", or "" if nothing has."""
    if any(_several(variable) for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")):
        return "mpi"
    return "torch" if _several("WORLD_SIZE") else ""


def _several(variable: str) -> bool:
    value = os.environ.get(variable, "")
    return value.isdigit() and int(value) > 1


def run(options: argparse.Namespace, engine: str) -> int:
    """Run the command on the processes of this launcher, or on some of its own; returns the exit status."""
    rank, found = 0, []
    if engine:
        where, backend = _join(options.backend, engine)
        rank, n = diffcoll.get_rank(), diffcoll.get_world_size()
        try:
            found = _check(options.only, options.seed, backend, n, COMPILES, rank)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # other ranks may wait for this one, and a group in use cannot be destroyed
        if engine == "torch":
            dist.destroy_process_group()
    else:
        where, sizes = f"{options.backend} processes of this machine", options.world_size or [2, 3]
        for n in sizes:
            # Every rank compiles for itself, which takes most of the time.
            check = partial(_check, options.only, options.seed, options.backend, n, COMPILES and n == max(sizes))
            try:
                found += spawn(check, range(n), backend=options.backend, timeout=1800)[0]
            except RanksFailedError as error:
                print(error, file=sys.stderr)
                return 1
    if rank == 0:
        about = f"torch {torch.__version__}, float64, seed {options.seed}"
        print(f"{sum(found)} of {len(found)} calls are right: {where}, {about}")
    return 0 if all(found) else 1


def _join(backend: str, engine: str) -> tuple[str, str]:
    """Join the processes of a launcher; returns what they are, and the backend."""
    if engine == "mpi":
        from mpi4py import MPI

        diffcoll.set_default_group(MPI.COMM_WORLD)
        return f"{MPI.COMM_WORLD.size} processes of MPI", "mpi"
    select_device(backend, int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend)
    return f"{dist.get_world_size()} launched {backend} processes", backend


# ── on each rank ─────────────────────────────────────────────────────────────────────────────────────────


def _check(names: Sequence[str], seed: int, backend: str, n: int, compiled: bool, rank: int) -> list[bool]:
    """Check all calls, which rank 0 prints; returns which are right."""
    if dist.is_initialized():
        diffcoll.set_default_group(dist.new_group(timeout=timedelta(seconds=PATIENCE)))
    control, found = Control(resolve(None, "diffcoll verify"), "diffcoll verify"), []
    device = torch.device("cpu" if backend == "mpi" else device_of_backend(backend))
    for call, measure in _calls(names, seed, n, compiled, rank, device):
        try:
            each = measure()
        except Exception:
            print(f"✗ {call} raises on rank {rank} of {n}", file=sys.stderr, flush=True)
            raise
        mine = {name: max(of_call[name] for of_call in each) for name in each[0]}
        of_ranks = control.gather(torch.tensor([*mine.values()], dtype=torch.float64), [len(mine)] * n)
        worst = torch.stack(of_ranks).amax(0).tolist()
        found.append(max(worst) <= TOLERANCE)
        if rank == 0:
            shown = ", ".join(f"{name} {value:.0e}" for name, value in zip(mine, worst, strict=True))
            print(f"{'✓' if found[-1] else '✗'} {call} on {n} ranks: {shown}", flush=True)
    return found


def _calls(
    names: Sequence[str], seed: int, n: int, compiled: bool, rank: int, device: torch.device
) -> Iterator[tuple[str, Callable[[], list[Errors]]]]:
    """Yield words for each call, and what measures this rank's relative errors, of one call or of several.

    Each call in reverse mode; then all calls of a collective in forward mode, and compiled in one graph.
    """
    table = cases.table(n)

    def errors(own: Sequence[Case], measure: Measure, compiles: bool = False) -> list[Errors]:
        def program(xs: list[Tensor]) -> list[Tensor]:
            return [case.call(x.to(device), rank).cpu() for case, x in zip(own, xs, strict=True)]

        # Loops instead of vectors: the C++ compiler takes a fifth of the time.
        run: Any = torch.compile(program, fullgraph=True, options={"cpp.simdlen": 1}) if compiles else program
        found = measure([(case, rank) for case in own], run, seed)
        expected = [cases.in_truth(case, seed, measure) for case in own]
        return [cases.errors(m, of_ranks, rank) for m, of_ranks in zip(found, expected, strict=True)]

    def in_graphs(own: Sequence[Case]) -> list[Errors]:
        found: list[Errors] = []
        for numbers in (False, True):  # torch.compile traces a graph twice that has a 0-d float64 input
            if kind := [case for case in own if (() in case.shapes) == numbers]:
                torch.compiler.reset()
                found += errors(kind, partial(cases.derivatives, orders=1), compiles=True)
        return found

    for name in names:
        own = [case for case in table if case.name == name]
        for case in own:
            yield f"{name}({case.label})", partial(errors, [case], cases.derivatives)
        yield f"{name}(all calls, forward mode)", partial(errors, own, cases.tangents)
        if compiled:
            yield f"{name}(all calls, compiled)", partial(in_graphs, own)
