"""What `group` may be, resolved to the engine that moves its bytes.

`None` is, in this order: the simulated world that this thread is a rank of, what `set_default_group` said,
torch's default process group, and, where nothing was launched, the world of one rank.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

from diffcoll.engines import c10d, local
from diffcoll.engines.engine import Engine
from diffcoll.engines.solo import SoloEngine

__all__ = ["get_rank", "get_world_size", "resolve", "set_default_group"]

_default: Any = None
_solo = SoloEngine()

# What launchers say: torchrun and its relatives, Open MPI, MPICH and its relatives (Intel MPI, Slurm's PMI).
_LAUNCHED = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def resolve(group: Any, operation: str) -> Engine:
    """Return the engine of `group` for this rank; errors name `operation`."""
    me = local.here()
    if group is None:
        group = me.default_group if me else _default
    try:
        for engine_of in (local.engine_of, c10d.engine_of):
            engine = engine_of(group)
            if engine is not None:
                return engine
    except ValueError as error:
        raise ValueError(f"{operation}: group: {error}") from None
    if group is not None:
        raise TypeError(
            f"{operation}: group: got {type(group).__name__}, expected None, a torch.distributed.ProcessGroup "
            "or a one-dimensional DeviceMesh"
        )
    _refuse_lonely_launch(operation)
    return _solo


def _refuse_lonely_launch(operation: str) -> None:
    """Processes launched together that were not connected must not each be a silent world of one."""
    for variable in _LAUNCHED:
        value = os.environ.get(variable, "")
        if value.isdigit() and int(value) > 1:
            raise RuntimeError(
                f"{operation}: {variable}={value} says that {value} processes were launched, but no group connects "
                "them; call torch.distributed.init_process_group() first, or name a group "
                "(group=…, or diffcoll.set_default_group)"
            )


def get_rank(group: Any = None) -> int:
    """Return this process's rank within the group, from 0 to N − 1.

    >>> import diffcoll as dc
    >>> dc.get_rank()  # no group was set up: the world of one
    0

    Args:
        group: as everywhere, see `diffcoll.set_default_group`.

    Raises:
        ValueError: this process is not in the group.
    """
    return resolve(group, "get_rank").rank


def get_world_size(group: Any = None) -> int:
    """Return N, the number of ranks in the group.

    >>> import diffcoll as dc
    >>> dc.get_world_size()
    1

    Args:
        group: as everywhere, see `diffcoll.set_default_group`.

    Raises:
        ValueError: this process is not in the group.
    """
    return resolve(group, "get_world_size").size


class set_default_group:
    """Say what `group=None` means from here on; as a context manager, within its block.

    >>> import diffcoll as dc
    >>> with dc.set_default_group(None):
    ...     dc.get_world_size()
    1

    Args:
        group: a `torch.distributed.ProcessGroup`, a one-dimensional `DeviceMesh`, or None for torch's
            default group (the world of one where none was set up). Each process says it for itself; in a
            simulated world each rank does.

    Raises:
        TypeError, ValueError: not a group, or one that this process is not in. Nothing has changed then.
    """

    def __init__(self, group: Any) -> None:
        if group is not None:
            resolve(group, "set_default_group")
        self._before = _set_default(group)

    def __enter__(self) -> None:
        """Nothing to do: the group was set when this was made."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore what was the default before."""
        _set_default(self._before)


def _set_default(group: Any) -> Any:
    global _default
    me = local.here()
    if me is not None:
        me.default_group, before = group, me.default_group
    else:
        _default, before = group, _default
    return before
