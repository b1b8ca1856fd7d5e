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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import diffcoll
from diffcoll.core.control import Control
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.release import COMPILES
from diffcoll.engines.devices import device_of_backend, select_device
from diffcoll.testing import RanksFailedError, cases, spawn
from diffcoll.testing.cases import Case

#: The largest relative error of float64 at which a call is right.
TOLERANCE = 1e-10
#: Seconds in which a rank must come to a call: for the others it may compile.
PATIENCE = 120
Errors = dict[str, float]


class Row(NamedTuple):
    """One call, or all calls of a collective together, and this rank's relative errors."""

    collective: str
    call: str
    errors: Callable[[], Errors]


class Found(NamedTuple):
    """How many calls were checked, and how many of them are right."""

    right: int
    calls: int


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
    about = f"torch {torch.__version__}, float64, seed {options.seed}"
    if engine:
        found, rank, where = _on_launched(options, engine)
    else:
        found, rank, where = _on_spawned(options), 0, f"{options.backend} processes of this machine"
    if found is None:
        return 1
    if rank == 0:
        print(f"{found.right} of {found.calls} calls are right: {where}, {about}")
    return 0 if found.right == found.calls else 1


def _on_spawned(options: argparse.Namespace) -> Found | None:
    """Check on processes of this machine, with each number of ranks; None: a call has raised."""
    sizes = options.world_size or [2, 3]
    right = calls = 0
    for n in sizes:
        # Every rank compiles for itself, which takes most of the time.
        check = partial(_check, options.only, options.seed, options.backend, n, COMPILES and n == max(sizes))
        try:
            found = spawn(check, range(n), backend=options.backend, timeout=1800)[0]
        except RanksFailedError as error:
            print(error, file=sys.stderr)
            return None
        right, calls = right + found.right, calls + found.calls
    return Found(right, calls)


def _on_launched(options: argparse.Namespace, engine: str) -> tuple[Found | None, int, str]:
    """Check on the processes of a launcher; returns what was found, this rank, and what they are."""
    if engine == "mpi":
        from mpi4py import MPI

        diffcoll.set_default_group(MPI.COMM_WORLD)
        backend, where = "mpi", "processes of MPI"
    else:
        backend, where = options.backend, f"launched {options.backend} processes"
        select_device(backend, int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend)
    rank, n = diffcoll.get_rank(), diffcoll.get_world_size()
    try:
        found = _check(options.only, options.seed, backend, n, COMPILES, rank)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # other ranks may wait for this one, and a group in use cannot be destroyed
    if engine == "torch":
        dist.destroy_process_group()
    return found, rank, f"{n} {where}"


# ── on each rank ─────────────────────────────────────────────────────────────────────────────────────────


def _check(names: Sequence[str], seed: int, backend: str, n: int, compiled: bool, rank: int) -> Found:
    """Check all calls; rank 0 prints them."""
    if dist.is_initialized():
        diffcoll.set_default_group(dist.new_group(timeout=timedelta(seconds=PATIENCE)))
    control, found = Control(resolve(None, "diffcoll verify"), "diffcoll verify"), []
    device = torch.device("cpu" if backend == "mpi" else device_of_backend(backend))
    for row in _rows(names, seed, n, compiled, rank, device):
        try:
            mine = row.errors()
        except Exception:
            print(f"✗ {row.collective}({row.call}) raises on rank {rank} of {n}", file=sys.stderr, flush=True)
            raise
        of_ranks = control.gather(torch.tensor([*mine.values()], dtype=torch.float64), [len(mine)] * n)
        worst = torch.stack(of_ranks).amax(0).tolist()
        found.append(max(worst) <= TOLERANCE)
        if rank == 0:
            shown = ", ".join(f"{name} {value:.0e}" for name, value in zip(mine, worst, strict=True))
            print(f"{'✓' if found[-1] else '✗'} {row.collective}({row.call}) on {n} ranks: {shown}", flush=True)
    return Found(sum(found), len(found))


def _rows(names: Sequence[str], seed: int, n: int, compiled: bool, rank: int, device: torch.device) -> Iterator[Row]:
    """Yield each call in reverse mode; then all calls of a collective in forward mode, and compiled in one graph."""
    table = cases.table(n)

    def called(case: Case, x: Tensor) -> Tensor:
        return case.call(x.to(device), rank).cpu()

    def backward(case: Case) -> Errors:
        measured = cases.on_rank(case, rank, seed, partial(called, case))
        return cases.errors(measured, cases.in_truth(case, seed), rank)

    def forward_mode(own: Sequence[Case]) -> Errors:
        return _worst(
            [
                cases.errors(
                    cases.tangent_on_rank(case, rank, seed, partial(called, case)),
                    cases.tangents_in_truth(case, seed),
                    rank,
                )
                for case in own
            ]
        )

    def in_one_graph(own: Sequence[Case]) -> list[Errors]:
        torch.compiler.reset()

        def program(xs: list[Tensor]) -> list[Tensor]:
            return [called(case, x) for case, x in zip(own, xs, strict=True)]

        # Loops instead of vectors: the C++ compiler takes a fifth of the time.
        function: Any = torch.compile(program, fullgraph=True, options={"cpp.simdlen": 1})
        measured = cases.together_on_rank(own, rank, seed, function)
        return [cases.errors(m, cases.in_truth(case, seed), rank) for case, m in zip(own, measured, strict=True)]

    def compiled_calls(own: Sequence[Case]) -> Errors:
        # torch.compile traces a graph twice that has a 0-d float64 input.
        kinds = [[case for case in own if (() in case.shapes) == numbers] for numbers in (False, True)]
        return _worst([errors for kind in kinds if kind for errors in in_one_graph(kind)])

    for name in names:
        own = [case for case in table if case.name == name]
        for case in own:
            yield Row(name, case.label, partial(backward, case))
        yield Row(name, "all calls, forward mode", partial(forward_mode, own))
        if compiled:
            yield Row(name, "all calls, compiled", partial(compiled_calls, own))


def _worst(each: Sequence[Errors]) -> Errors:
    return {name: max(errors[name] for errors in each) for name in each[0]}
