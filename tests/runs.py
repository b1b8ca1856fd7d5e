"""Where the ranks of a test run: in one autograd graph, simulated by the rules, on gloo, on MPI.

And what tests of many files ask: for the text of an error, what a fresh process prints, which collectives ran.
"""

import contextlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from mpi_ranks import MpiRanks

import diffcoll
from diffcoll.core.torch_private.release import RELEASE
from diffcoll.testing import RanksFailedError, simulate, spawn
from diffcoll.testing.spawn import Ranks
from diffcoll.testing.truth import in_one_graph

ROOT = Path(diffcoll.__file__).parent.parent
#: Processes that are kept, by backend and number.
_ranks = {}

#: Collectives that overlap with computation in both directions, for tests of devices with streams.
OVERLAPPING = {
    "all_reduce": diffcoll.all_reduce,
    "max": partial(diffcoll.all_reduce, op="max"),
    "all_gather": partial(diffcoll.all_gather, dim=1),
    "reduce_scatter": diffcoll.reduce_scatter,
    "all_to_all": diffcoll.all_to_all,
    "broadcast": diffcoll.broadcast,
}


def kept(fn, *per_rank, backend="gloo", seed=0, timeout=60):
    """As `spawn`, on processes that are kept, or on MPI: a test that changes a class or a module uses `spawn`."""
    rows = list(zip(*per_rank, strict=True))
    key = backend, len(rows)
    if key not in _ranks:
        _ranks[key] = MpiRanks(len(rows)) if backend == "mpi" else Ranks(len(rows), backend)
    try:
        return _ranks[key].call(fn, rows, seed=seed, timeout=timeout)
    except RanksFailedError:
        del _ranks[key]
        raise


def spawned(fn, *per_rank, backend="gloo", timeout=60):
    """As `spawn`, on MPI too: on processes for this call alone."""
    if backend != "mpi":
        return spawn(fn, *per_rank, backend=backend, timeout=timeout)
    rows = list(zip(*per_rank, strict=True))
    with contextlib.closing(MpiRanks(len(rows))) as ranks:
        return ranks.call(fn, rows, timeout=timeout)


def truth(fn, *per_rank):
    """Run fn on ranks in one graph, in which collectives are their definitions; call backward on the results."""
    return in_one_graph(fn, list(zip(*per_rank, strict=True)))


rules, gloo, mpi = simulate, kept, partial(kept, backend="mpi")
RUNS = {"truth": truth, "rules": rules, "gloo": gloo, "mpi": mpi}


def new_group(ranks):
    """Make a group of some ranks of the default group, which all of them call."""
    from diffcoll.engines.rank_state import PROCESS

    if (comm := PROCESS.default_group) is not None:  # of MPI
        return comm.Create(comm.group.Incl(ranks))
    group = torch.distributed.new_group(ranks, **({"sort_ranks": False} if RELEASE >= (2, 12) else {}))
    return torch.distributed.GroupMember.NON_GROUP_MEMBER if group is None else group


#: The second engine, for long tests of what an engine does not change; `make test-slow`.
MPI_TOO = pytest.param("mpi", marks=pytest.mark.slow)


def runs_on(*names):
    """What the fixture `run` is: one test for each name."""
    return pytest.mark.parametrize("run", names, indirect=True)


def end():
    for ranks in _ranks.values():
        ranks.close()


def refusal(error, call, *arguments, **options):
    """Return the text of the error that a call raises, of this type."""
    with pytest.raises(error) as caught:
        call(*arguments, **options)
    return str(caught.value)


def line_of(file, words, after=0):
    """The file and the line of these words, or of a line after them."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return f"{file}:{next(i for i, line in enumerate(lines, 1) if words in line) + after}"


def python(*arguments, returns=0, environment=None, timeout=100, **more):
    """Run Python in a process of its own; `done.stdout` and `done.stderr` are what it prints."""
    around = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=around, timeout=timeout, check=False, **more)
    assert done.returncode == returns, done.stderr
    return done


def profiled(call, *arguments):
    """Return (name, bytes) of the collectives that ran in a call, in order; a wait has none."""
    names = [event.name for event in _events("diffcoll.", call, *arguments)]
    return [(name.split(":")[0], int(name.split()[-2]) if name.endswith(" B") else 0) for name in names]


def gloo_messages(call, *arguments):
    """Return (name, numel) of a call's messages on gloo, sent and received, in order, the library's own included."""
    found = [event for event in _events("gloo:", call, *arguments) if event.input_shapes]
    return [(event.name, torch.Size(event.input_shapes[0]).numel()) for event in found]


def _events(prefix, call, *arguments):
    """Return the events of a call, after which nothing may be in flight: gloo's threads would write to freed memory."""
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:  # which torch 2.11 asks for
        call(*arguments)
    found = [event for event in profile.events() if event.name.startswith(prefix)]
    for event in found:
        event.name = event.name.removeprefix(prefix)
    return found


def noted(where, *names, setattr=setattr):
    """Make functions of a class or a module note their names, on this rank; return the notes."""
    notes = []

    def noting(name, call):
        def function(*arguments, **more):
            notes.append(name)
            return call(*arguments, **more)

        return function

    for name in names:
        setattr(where, name, noting(name, getattr(where, name)))
    return notes
