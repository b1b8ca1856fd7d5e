"""torch.distributed on simulated ranks: each rank's thread has its own process groups and its own default group.

While ranks run, these private names of torch.distributed are replaced, and nothing else:

- `distributed_c10d._world`, the process's groups. Ranks are threads, so each thread sees its own. torch documents this
  variable as an extension point.
- `distributed_c10d._new_process_group_helper`, which makes groups, of whatever backend a program names.
- `DeviceMesh._coordinate_on_dim`, which is of the rank that made the mesh: it raises on another rank.
- C++ finds groups by name. `_set_thread_isolation_mode` makes it keep one table of names for each thread.

Compiled functions run uncompiled meanwhile: simulated ranks share one cache of graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

# Its functions have the default group of the first import as a default argument; that must not be one rank's.
import torch.distributed.nn.functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from diffcoll.core.torch_private.names import require
from diffcoll.core.torch_private.release import RELEASE
from diffcoll.engines.c10d import use
from diffcoll.engines.devices import cuda_is_missing
from diffcoll.engines.rank_state import NO_GRAPHS, THREAD, refuse_thread, threads_followed
from diffcoll.engines.simulated.engine import LocalEngine
from diffcoll.engines.simulated.functional import met
from diffcoll.engines.simulated.group import SimulatedGroup
from diffcoll.engines.simulated.submodules import followed

require("simulated ranks")
_c = torch._C._distributed_c10d
# DTensor enters FakeTensorMode, which sets a guard of devices in builds for CUDA without a GPU. In torch 2.11 the guard
# dies with the thread that has set it, and the next one to set it crashes: so this thread sets it, before any rank.
if RELEASE < (2, 12) and cuda_is_missing():
    torch._C._ensureCUDADeviceGuardSet()


def with_groups(fn: Callable[[], Any]) -> Any:
    """Call fn with torch.distributed set up for the rank that this thread is."""
    me = THREAD.rank
    me.c10d_groups = _no_groups(me.world.serial)  # meshes find groups by name; those of another world find none
    dist.init_process_group("gloo", store=me.world.store, rank=me.number, world_size=me.world.size)
    try:
        return fn()
    finally:
        _c._unregister_all_process_groups()


# ── each rank's groups ───────────────────────────────────────────────────────────────────────────────────


def _no_groups(count: int) -> SimpleNamespace:
    """Return the tables of a rank that has no group yet, by the names that `distributed_c10d._World` has for them."""
    tables: dict[str, Any] = {name: {} for name in dir(c10d._World) if not name.startswith("_")}
    return SimpleNamespace(**{**tables, "default_pg": None, "group_count": count, "comms": []})


class _GroupsOfThread:
    """Stands in for `distributed_c10d._world`: the groups of this thread's rank, or the process's own."""

    def __init__(self, before: Any) -> None:
        self.__dict__["_before"] = before

    def _of_thread(self) -> Any:
        if THREAD.rank is None:
            if THREAD.started_by is not None and THREAD.started_by.c10d_groups is not None:
                return THREAD.started_by.c10d_groups  # for queries; its groups refuse to communicate
            refuse_thread("torch.distributed")
            return self._before
        # No public API tells whether this thread compiles: Dynamo calls functions to get constants for its graph.
        if torch._guards.CompileContext.current_compile_id() is not None:
            raise RuntimeError(f"torch.distributed: {NO_GRAPHS}")
        return THREAD.rank.c10d_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_thread(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._of_thread(), name, value)


def _make_group(real: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Make a rank's side of a group, as `_new_process_group_helper` does; waits for the group's other ranks."""
    me = THREAD.rank
    if me is None:
        return real(*args, **more)
    _, _, ranks, _, store, name = args
    if ranks and me.number not in ranks:
        return dist.GroupMember.NON_GROUP_MEMBER, None
    engine = LocalEngine(tuple(ranks or range(me.world.size)), name)
    dim = more.get("group_desc") or ""  # "mesh_tp" of the dimension tp
    engine.mesh_dim = dim.removeprefix("mesh_") if dim.startswith("mesh_") and dim != "mesh_default" else ""
    group = SimulatedGroup(engine)
    use(group, engine)
    groups, tag = me.c10d_groups, more.get("pg_tag")
    tags = [f"user:{tag}"] if tag else ["", f"ptd:{name}"]
    # As under gloo on CPU, so that programs that ask for the backend do what they do there.
    groups.pg_map[group] = dist.Backend("gloo"), c10d.PrefixStore(f"{name}/", store)
    groups.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend("gloo")))
    groups.pg_names[group], groups.pg_to_tag[group] = name, tags[-1]
    for tag in tags:
        groups.tags_to_pg.setdefault(tag, []).append(group)
    _c._register_process_group(name, group)
    if ranks:
        group.barrier().wait()
    return group, groups.pg_map[group][1]


# ── what is replaced in torch ────────────────────────────────────────────────────────────────────────────


@contextmanager
def installed() -> Iterator[None]:
    """Replace what the ranks' threads need replaced; one world at a time."""
    with ExitStack() as undo:
        undo.callback(lambda: c10d._update_default_pg(c10d._world.default_pg))  # tells C++ the process's rank
        for name in ("_backend", "_default_pg_init_method"):
            _replace(undo, c10d, name, getattr(c10d, name))
        _replace(undo, c10d, "_new_process_group_helper", partial(_make_group, c10d._new_process_group_helper))
        _replace(undo, c10d, "_world", _GroupsOfThread(c10d._world))
        _c._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
        undo.callback(_c._set_thread_isolation_mode, False)  # type: ignore[attr-defined]
        if "torch._dynamo" in sys.modules:  # else nothing has been compiled, and its import takes seconds
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        DeviceMesh._coordinate_on_dim = property(_coordinate, _set_coordinate)  # type: ignore[assignment]
        undo.callback(delattr, DeviceMesh, "_coordinate_on_dim")
        undo.enter_context(followed())
        undo.enter_context(threads_followed())
        undo.enter_context(met())
        yield


def _replace(undo: ExitStack, where: Any, name: str, by: object) -> None:
    undo.callback(setattr, where, name, vars(where)[name])
    setattr(where, name, by)


def _coordinate(mesh: Any) -> Any:
    if mesh._rank != dist.get_rank():
        raise RuntimeError(
            f"got a DeviceMesh that simulated rank {mesh._rank} has made, on another rank; make meshes on every rank, "
            "and do not keep them in globals or caches, which simulated ranks share; a program that keeps them runs on "
            "processes (diffcoll.testing.spawn)"
        )
    return mesh.__dict__["_coordinate_on_dim"]


def _set_coordinate(mesh: Any, coordinate: Any) -> None:
    mesh.__dict__["_coordinate_on_dim"] = coordinate
    report, ranks, shape = THREAD.rank.world.report, mesh._flatten_rank_map, mesh.shape
    if len(ranks) == len(report.ranks) and len(shape) > len(report.shape):
        report.dims, report.shape = mesh.mesh_dim_names or tuple(f"dim {dim}" for dim in range(len(shape))), shape
        report.coordinates = dict(zip(ranks, product(*map(range, shape)), strict=True))
