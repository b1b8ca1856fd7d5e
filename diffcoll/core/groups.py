"""Resolves `group` arguments to engines.

None means the first of these that exists: the simulated group of which this thread is a rank, the group of
`set_default_group`, torch's default process group, and, if no launcher is detected, a group of one rank.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from types import ModuleType, TracebackType
from typing import Any

import torch

from diffcoll.core.joint import is_joint
from diffcoll.core.torch_private.autograd import backward_at_work
from diffcoll.core.torch_private.tracing import constant_in_graphs, unfaked
from diffcoll.core.torch_private.transforms import carries_tangents, is_differentiating, is_within_transform
from diffcoll.engines import c10d
from diffcoll.engines.engine import Engine
from diffcoll.engines.named import Constants, NamedEngine, constants_of
from diffcoll.engines.rank_state import NO_GRAPHS, PROCESS, THREAD, outsiders, refuse_thread
from diffcoll.engines.solo import SoloEngine
from diffcoll.engines.types import Group

_solo = SoloEngine()

#: What launchers set: torchrun and compatible ones; Open MPI, MPICH and compatible ones (Intel MPI, Slurm's PMI).
_LAUNCHERS = "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"


def resolve(group: Any, operation: str, query: bool = False) -> Engine:
    """Return the engine of `group` for this rank; errors are prefixed with `operation`.

    `query`: for a number that a thread of a simulated rank may ask for.
    """
    if group is None:
        group = (_asking(query) or PROCESS).default_group
    if torch.compiler.is_compiling():
        return NamedEngine(_constants(group, operation))
    return _resolved(group, operation, query)


def _asking(query: bool) -> Any:
    return THREAD.rank or (THREAD.started_by if query else None)


def _resolved(group: Any, operation: str, query: bool = False) -> Engine:
    if (me := _asking(query)) is None:
        refuse_thread(operation)
    try:
        engine = _find(group)
    except ValueError as error:
        raise ValueError(f"{operation}: group: {error}") from None
    if engine is not None:
        return engine
    if group is not None:
        raise TypeError(
            f"{operation}: group: got {type(group).__name__}, expected None, a torch.distributed.ProcessGroup, "
            "a one-dimensional DeviceMesh or an mpi4py.MPI.Comm; torch.distributed.new_group([…]) makes one"
        )
    if me is not None:
        raise RuntimeError(f"{operation}: group: the process group of this simulated rank was destroyed")
    if not outsiders and _launched():  # simulated ranks set the environment
        raise RuntimeError(
            f"{operation}: {_launched()} processes were launched, but no group connects them; call "
            "torch.distributed.init_process_group() first, or name a group, with group=… or "
            "diffcoll.set_default_group(…): MPI.COMM_WORLD under an MPI launcher"
        )
    return _solo


def _find(group: Any) -> Engine | None:
    found: Engine | None = _mpi().engine_of(group) if "mpi4py.MPI" in sys.modules else None
    return c10d.engine_of(group) if found is None else found


@cache
def _mpi() -> ModuleType:
    """Import the engine of MPI, which only programs that have imported mpi4py use."""
    from diffcoll.engines import mpi

    return mpi


# ── compiled graphs refer to groups by name ──────────────────────────────────────────────────────────────


def refuse_derivatives(name: str) -> None:
    """Raise where a collective in a graph would be differentiated in a way that is not in the graph.

    A backward within a region of joint_backward is allowed: its forward was called outside.
    """
    if is_joint() and backward_at_work() < 0:
        raise RuntimeError(
            f"{name}: in a compiled graph within joint_backward: the chain of its region is not in the graph; call the "
            "function uncompiled there, or compile the parts without collectives"
        )
    if is_differentiating():
        raise RuntimeError(
            f"{name}: in a compiled graph within torch.func.grad, vjp, jvp, … or forward_ad: PyTorch has no such rules "
            "for ops and would drop tangents; compile the function and differentiate it by autograd"
        )


@constant_in_graphs
def _constants(group: Any, operation: str) -> Constants:
    # Dynamo calls this once instead of tracing it: engines are mutable, so a graph must hold their facts only.
    _refuse_simulated()
    refuse_derivatives(operation)
    return constants_of(_resolved(unfaked(group), operation))


def key_in_graphs(engine: Engine) -> str:
    """Return the name of a group in a graph, with rank and size, for which the graph is specialised."""
    return f"rank {engine.rank} of {engine.size} in {engine.key}"


def engine_named(key: str) -> Engine:
    """Return this process's engine of the group that a graph names; raise if rank or size have changed."""
    _refuse_simulated()
    name = key.partition(" in ")[2]
    engine: Engine | None
    if name == _solo.key:
        engine = None if _find(PROCESS.default_group) else _solo
    else:
        engine = (_mpi().engine_named(name) if "mpi4py.MPI" in sys.modules else None) or c10d.engine_named(name)
    if engine is None or key_in_graphs(engine) != key:
        raise RuntimeError(
            f"a graph was compiled or traced for {key!r}, and this process is no longer that rank; compile it again, "
            "after torch.compiler.reset()"
        )
    return engine


def _refuse_simulated() -> None:
    refuse_thread("a compiled collective")
    if THREAD.rank is not None:
        raise RuntimeError(NO_GRAPHS)


@cache
def _launched() -> str:
    """Return which variable of the environment says how many processes were launched, if several; "": none.

    Without a group these would be jobs of one rank each. It is read at the first call without one.
    """
    values = ((name, os.environ.get(name, "")) for name in _LAUNCHERS)
    return next((f"{name}={n} says that {n}" for name, n in values if n.isdigit() and int(n) > 1), "")


def collectives_only(group: Any) -> bool:
    """Whether code that is differentiated now may not call collectives within an autograd Function of its own.

    So in a simulation of one graph, which contains the collectives, in graphs that are compiled, in transforms, which
    differentiate the calls themselves, and in joint_backward, which records them.
    """
    engine = resolve(group, "collectives_only")
    return engine.in_one_graph or engine.compiling or is_joint() or is_within_transform() or carries_tangents()


def get_rank(group: Group = None) -> int:
    """Return this process's rank within the group, from 0 to N − 1.

    >>> import diffcoll as dc
    >>> dc.get_rank()  # no group was set up: one rank
    0

    Args:
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Raises:
        ValueError: this process is not in the group.
    """
    return resolve(group, "get_rank", query=True).rank


def get_world_size(group: Group = None) -> int:
    """Return N, the number of ranks in the group.

    >>> import diffcoll as dc
    >>> dc.get_world_size()
    1

    Args:
        group: None, a `ProcessGroup`, a one-dimensional `DeviceMesh` or an `MPI.Comm`; see `set_default_group`.

    Raises:
        ValueError: this process is not in the group.
    """
    return resolve(group, "get_world_size", query=True).size


class set_default_group:
    """Programs on one group, such as MPI: set the group that `group=None` means, until changed or within a block.

    >>> import diffcoll as dc
    >>> with dc.set_default_group(None):
    ...     dc.get_world_size()
    1

    Args:
        group: a `torch.distributed.ProcessGroup`, a one-dimensional `DeviceMesh`, an `mpi4py.MPI.Comm`, or None
            for torch's default group (one rank if none was set up). The setting is per process; under `simulate`, per
            rank.

    Raises:
        TypeError, ValueError: not a group, or one without this process. The default is unchanged then.
    """

    def __init__(self, group: Group) -> None:
        if group is not None:
            resolve(group, "set_default_group")
        self._before = _set_default(group)

    def __enter__(self) -> None:
        """Do nothing: the group was set on construction."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the previous default."""
        _set_default(self._before)


def _set_default(group: Any) -> Any:
    holder = THREAD.rank or PROCESS
    before, holder.default_group = holder.default_group, group
    return before
