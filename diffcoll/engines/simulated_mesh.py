"""Meshes of simulated ranks: what depends on the rank that made a mesh raises on the others.

A mesh stores the coordinates of its maker. A program that keeps meshes in globals or caches, as processes may, would
find another rank's there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from diffcoll.engines.guards import THREAD
from diffcoll.engines.replacing import replace

MESH_REMEDY = (
    "make meshes on every rank and do not keep them in globals or caches, which simulated ranks share; a program that "
    'keeps them runs on processes: use spawn, or on=("gloo",)'
)
_MAKER = "_diffcoll_maker"


class _Maker:
    """The simulated rank that has made a mesh; a copy of the mesh has none."""

    def __init__(self, rank: Any = None) -> None:
        self.number = None if rank is None else rank.number
        self.rank = None if rank is None else weakref.ref(rank)

    @override
    def __reduce__(self) -> Any:
        return _Maker, ()


def _make_mesh(real: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of meshes, which records the rank."""

    @wraps(real)
    def init(mesh: Any, *args: Any, **more: Any) -> None:
        mesh.__dict__[_MAKER] = _Maker(THREAD.rank)
        real(mesh, *args, **more)

    return init


def _of_mesh(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of meshes that raises on another rank than the maker, which the answer would be of."""

    @wraps(real)
    def method(mesh: Any, *args: Any, **more: Any) -> Any:
        maker, me = mesh.__dict__.get(_MAKER), THREAD.rank
        if me is not None and maker is not None and maker.rank is not None and maker.rank() is not me:
            raise RuntimeError(
                f"{real.__qualname__}: got a DeviceMesh that simulated rank {maker.number} has made, on another one, "
                f"rank {me.number}; {MESH_REMEDY}"
            )
        return real(mesh, *args, **more)

    return method


_OF_RANK = ("get_coordinate", "get_local_rank", "get_group", "__getitem__")
_METHODS = {"__init__": _make_mesh, **dict.fromkeys(_OF_RANK, _of_mesh)}


def replace_methods(undo: ExitStack) -> None:
    """Replace the methods of `DeviceMesh` until `undo` is closed."""
    for name, replaced in _METHODS.items():
        replace(undo, DeviceMesh, name, replaced(getattr(DeviceMesh, name)))
