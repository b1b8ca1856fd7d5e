"""torch.distributed on simulated ranks: each rank's thread has its own process groups and its own default group.

While a simulation runs, these private names of torch.distributed are replaced, and nothing else:

- `distributed_c10d._world`, the process's groups. Ranks are threads, so each thread sees its own. torch documents this
  variable as an extension point.
- `distributed_c10d._new_process_group_helper`, which makes groups. Programs name a backend in `new_group`, which is
  then simulated as well.
- `distributed_c10d.rendezvous` and `_store_based_barrier`, which would wait for other processes.
- `device_mesh._resolve_process_group`, by which a mesh finds its groups: its error names the way out.
- Methods of `DeviceMesh` that answer for one rank, and its constructor: they raise on another rank than its maker.
- C++ finds groups by name. `_set_thread_isolation_mode` makes it keep one table of names for each thread.

Compiled functions run uncompiled meanwhile. Graphs have no guard for the default group, so one that was compiled
without a group would run without its collectives.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from typing_extensions import override

from diffcoll.engines.c10d import use
from diffcoll.engines.guards import NO_GRAPHS, OWN_THREAD, THREAD, NotARankError
from diffcoll.engines.local import engine_of
from diffcoll.engines.meeting import LocalGroup
from diffcoll.engines.replacing import Replacing, replace
from diffcoll.engines.simulated_group import SimulatedGroup
from diffcoll.engines.simulated_mesh import MESH_REMEDY, replace_methods
from diffcoll.engines.simulated_moves import Mailbox
from diffcoll.engines.world import World

_NAME = "diffcoll_simulated"
_RESOLVE = "_resolve_process_group"
_c = torch._C._distributed_c10d


class Simulation:
    """Connects the ranks of a world by torch.distributed."""

    def __init__(self, world: World) -> None:
        self.world = world
        # Programs of several processes may wait for a key that another rank sets later; here that rank would not run.
        self.store = _c.HashStore()
        self.store.set_timeout(timedelta(seconds=1))
        self._mailboxes: dict[LocalGroup, list[Mailbox]] = {}
        self._numbers: dict[tuple[tuple[int, ...], str], int] = {}

    def body(self, fn: Callable[[], Any]) -> Callable[[], Any]:
        """Return fn with torch.distributed set up for this rank."""

        def run() -> Any:
            with _rank_of(self):
                return fn()

        return run

    def group(self, options: Any) -> SimulatedGroup:
        """Make a rank's side of a group. Waits for the group's other ranks."""
        me = THREAD.rank
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        default = not options.global_ranks_in_group
        asked, given = (options.group_rank, len(ranks)), (me.number, self.world.size)
        if default and asked != given:
            got = f"rank={asked[0]}, world_size={asked[1]}"
            raise ValueError(f"init_process_group: got {got} on simulated rank {given[0]} of {given[1]}")
        # The default group is the same group for torch.distributed as for diffcoll. Others never meet in each other.
        key = ranks, options.group_id
        # Below zero, so that no sub-group or twin has the same number.
        number = () if default else (self._numbers.setdefault(key, -1 - len(self._numbers)),)
        handle = LocalGroup(ranks, number)
        engine = engine_of(handle)
        assert engine is not None
        group = SimulatedGroup(engine, options.group_id, self._mailboxes.setdefault(handle, [Mailbox() for _ in ranks]))
        use(group, engine)
        if not default:
            group._meet("new_group", "", [], []).wait()
        return group


# ── each rank's groups ───────────────────────────────────────────────────────────────────────────────────


class _OfGroups(dict[Any, Any]):
    """Raises if it is asked for a group of another rank."""

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default

    @override
    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (isinstance(key, SimulatedGroup) and key.engine is None)


class _Groups(c10d._World):
    """The process groups of one rank. The base class keeps some of these in globals of its module."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count: Any = 0

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.simulation = simulation
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"):
            setattr(self, name, _OfGroups())


def groups_of_rank() -> _Groups | None:
    """Return the groups of the rank that this thread is; None if it is none for which torch.distributed is set up."""
    groups: _Groups | None = THREAD.rank and THREAD.rank.c10d_groups
    return groups


class _GroupsOfThread:
    """Stands in for `distributed_c10d._world`: the groups of this thread's rank, or the process's own."""

    def __init__(self, before: Any) -> None:
        self.__dict__["_before"] = before
        self.__dict__["_threads"] = weakref.WeakSet(threading.enumerate())

    def _of_thread(self) -> Any:
        if (groups := groups_of_rank()) is not None:
            # No public API tells whether this thread compiles: Dynamo calls functions to get constants for its graph.
            if torch._guards.CompileContext.current_compile_id() is not None:
                raise RuntimeError(f"torch.distributed: {NO_GRAPHS}")
            return groups
        if THREAD.rank is None and threading.current_thread() not in self._threads:
            raise NotARankError(
                "torch.distributed: called while simulate(torch_distributed=True) runs, from a thread that is not one "
                f"of its ranks; {OWN_THREAD}"
            )
        return self._before

    def __getattr__(self, name: str) -> Any:
        if name == "default_pg" and groups_of_rank() is not None and _is_default_argument():
            return None
        return getattr(self._of_thread(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._of_thread(), name, value)


def _is_default_argument() -> bool:
    """Whether a module that is being imported asks for `dist.group.WORLD`, and keeps it in all ranks and afterwards.

    `torch.distributed.nn.functional` has it as the default of arguments. None, which means the default group too, is
    what a process finds there that imports before it calls init_process_group.
    """
    frame = sys._getframe(2)  # in the property
    caller = frame.f_back
    if frame.f_code.co_name != "WORLD" or caller is None or caller.f_code.co_flags & inspect.CO_OPTIMIZED:
        return False  # CO_OPTIMIZED: the code of a function, neither of a module nor of a class
    return bool(getattr(caller.f_globals.get("__spec__"), "_initializing", False))


@contextmanager
def _rank_of(simulation: Simulation) -> Iterator[None]:
    """Make this thread, a rank, one whose default group is set up."""
    me = THREAD.rank
    me.c10d_groups = groups = _Groups(simulation)
    try:
        group, _ = c10d._new_process_group_helper(
            simulation.world.size,
            me.number,
            [],
            "gloo",
            simulation.store,
            c10d._process_group_name([], use_hashed_name=False),
            timeout=timedelta(minutes=30),
            group_desc="default_pg",
        )
        groups.default_pg = group
        groups.pg_group_ranks[group] = {r: r for r in range(simulation.world.size)}
        yield
    finally:
        me.c10d_groups = None
        _c._unregister_all_process_groups()


# ── what is replaced in torch.distributed ────────────────────────────────────────────────────────────────


def _on_ranks(simulated: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the first on ranks of a simulation, with it and `real`, and else the second."""

    def either(*args: Any, **more: Any) -> Any:
        groups = groups_of_rank()
        return real(*args, **more) if groups is None else simulated(groups, real, *args, **more)

    return either


def _make_group(groups: _Groups, real: Callable[..., Any], *args: Any, **more: Any) -> Any:
    call = inspect.signature(real).bind(*args, **more).arguments
    call.update(backend=_NAME, backend_options=None, device_id=None)
    group, store = real(**call)
    if isinstance(group, SimulatedGroup):
        group._device_types = (torch.device("cpu"),)
        # As under gloo on CPU, so that programs that ask for the backend do what they do there.
        groups.pg_map[group] = dist.Backend("gloo"), store
        groups.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend("gloo")))
    return group, store


def _rendezvous(
    groups: _Groups, real: object, url: str, rank: int = -1, world_size: int = -1, **_: Any
) -> Iterator[Any]:
    simulation = groups.simulation
    yield (
        _c.PrefixStore("rendezvous", simulation.store),
        THREAD.rank.number if rank < 0 else rank,
        simulation.world.size if world_size < 0 else world_size,
    )


def _no_barrier(groups: _Groups, real: object, *_: Any, **__: Any) -> None:
    """Do nothing: the ranks of a group have met when it was made."""


def _resolve(groups: _Groups, real: Callable[..., Any], name: Any) -> Any:
    """Return this rank's group of a name; a mesh keeps names."""
    try:
        return real(name)
    except RuntimeError as error:
        raise RuntimeError(
            f"got a DeviceMesh of process group {name!r}, which this simulated rank has not made; {MESH_REMEDY}"
        ) from error


_REPLACED = {"_new_process_group_helper": _make_group, "rendezvous": _rendezvous, "_store_based_barrier": _no_barrier}
_KEPT = ("_world", "_backend", "_default_pg_init_method", *_REPLACED)


def _install(undo: ExitStack) -> None:
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu"])
    undo.callback(lambda: c10d._update_default_pg(c10d._world.default_pg))  # at the end: tells C++ the process's rank
    undo.callback(setattr, sys, "excepthook", sys.excepthook)  # init_process_group on a rank replaces it
    for name in _KEPT:
        by = _REPLACED.get(name)
        real = getattr(c10d, name)
        replace(undo, c10d, name, real if by is None else _on_ranks(by, real))
    replace(undo, device_mesh, _RESOLVE, _on_ranks(_resolve, getattr(device_mesh, _RESOLVE)))
    replace_methods(undo)
    replace(undo, c10d, "_world", _GroupsOfThread(c10d._world))
    _c._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    undo.callback(_c._set_thread_isolation_mode, False)  # type: ignore[attr-defined]
    if "torch._dynamo" in sys.modules:  # else nothing has been compiled, and its import takes seconds
        undo.enter_context(torch.compiler.set_stance("force_eager"))


#: Replaces what the ranks' threads need replaced.
installed = Replacing(_install)


def _create(options: Any, _: object) -> SimulatedGroup:
    if (groups := groups_of_rank()) is None:
        raise RuntimeError(f"the backend {_NAME!r} is for the ranks of diffcoll.testing.simulate")
    return groups.simulation.group(options)
