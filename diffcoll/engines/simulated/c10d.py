"""torch.distributed on simulated ranks: each rank's thread has its own process groups and its own default group.

While ranks run, these private names of torch.distributed are replaced, and nothing else:

- `distributed_c10d._world`, the process's groups. Ranks are threads, so each thread sees its own. torch documents this
  variable as an extension point.
- `distributed_c10d._new_process_group_helper`, which makes groups. Programs name a backend in `new_group`, which is
  then simulated as well; and `_store_based_barrier`, which would wait for other processes.
- Methods of `DeviceMesh` that answer for one rank, and its constructor: they raise on another rank than its maker.
- C++ finds groups by name. `_set_thread_isolation_mode` makes it keep one table of names for each thread.

Compiled functions run uncompiled meanwhile: simulated ranks share one cache of graphs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

# Its functions have the default group of the first import as a default argument; that must not be one rank's.
import torch.distributed.nn.functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from diffcoll.engines.c10d import use
from diffcoll.engines.rank_state import THREAD, refuse_thread
from diffcoll.engines.simulated.engine import NO_GRAPHS, engine_of
from diffcoll.engines.simulated.group import Mailbox, SimulatedGroup
from diffcoll.engines.simulated.world import LocalGroup, Rank, World

_NAME = "diffcoll_simulated"
_MAKER = "_diffcoll_maker"
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
        ranks = tuple(options.global_ranks_in_group) or self.world.group.ranks
        default = not options.global_ranks_in_group
        # The default group is the same group for torch.distributed as for diffcoll. Others never meet in each other.
        # Below zero, so that no twin has the same number.
        key = ranks, options.group_id
        handle = LocalGroup(ranks, () if default else (self._numbers.setdefault(key, -1 - len(self._numbers)),))
        engine = engine_of(handle)
        assert engine is not None
        group = SimulatedGroup(engine, options.group_id, self._mailboxes.setdefault(handle, [Mailbox() for _ in ranks]))
        use(group, engine)
        if not default:
            group.barrier().wait()
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


class _GroupsOfThread:
    """Stands in for `distributed_c10d._world`: the groups of this thread's rank, or the process's own."""

    def __init__(self, before: Any) -> None:
        self.__dict__["_before"] = before

    def _of_thread(self) -> Any:
        if THREAD.rank is None:
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


@contextmanager
def _rank_of(simulation: Simulation) -> Iterator[None]:
    """Make this thread, a rank, one whose default group is set up."""
    me: Rank = THREAD.rank
    me.c10d_groups = groups = _Groups(simulation)
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
    try:
        yield
    finally:
        _c._unregister_all_process_groups()


# ── what is replaced in torch ────────────────────────────────────────────────────────────────────────────


@contextmanager
def installed() -> Iterator[None]:
    """Replace what the ranks' threads need replaced; one world at a time."""
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu"])
    with ExitStack() as undo:
        undo.callback(lambda: c10d._update_default_pg(c10d._world.default_pg))  # tells C++ the process's rank
        for name in ("_backend", "_default_pg_init_method"):
            _replace(undo, c10d, name, getattr(c10d, name))
        for name, on_ranks in (("_new_process_group_helper", _make_group), ("_store_based_barrier", _no_barrier)):
            _replace(undo, c10d, name, _on_ranks(on_ranks, getattr(c10d, name)))
        for name in ("get_coordinate", "get_local_rank", "get_group", "__getitem__"):
            _replace(undo, DeviceMesh, name, _of_maker(getattr(DeviceMesh, name)))
        _replace(undo, DeviceMesh, "__init__", _made(DeviceMesh.__init__))
        _replace(undo, c10d, "_world", _GroupsOfThread(c10d._world))
        _c._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
        undo.callback(_c._set_thread_isolation_mode, False)  # type: ignore[attr-defined]
        if "torch._dynamo" in sys.modules:  # else nothing has been compiled, and its import takes seconds
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _replace(undo: ExitStack, where: Any, name: str, by: object) -> None:
    undo.callback(setattr, where, name, vars(where)[name])
    setattr(where, name, by)


def _on_ranks(simulated: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the first on simulated ranks, with the other one, and else the other one."""

    def either(*args: Any, **more: Any) -> Any:
        return real(*args, **more) if THREAD.rank is None else simulated(real, *args, **more)

    return either


def _make_group(real: Callable[..., Any], *args: Any, **more: Any) -> Any:
    groups = THREAD.rank.c10d_groups
    call = inspect.signature(real).bind(*args, **more).arguments
    call.update(backend=_NAME, backend_options=None, device_id=None)
    group, store = real(**call)
    if isinstance(group, SimulatedGroup):
        group._device_types = (torch.device("cpu"),)
        # As under gloo on CPU, so that programs that ask for the backend do what they do there.
        groups.pg_map[group] = dist.Backend("gloo"), store
        groups.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend("gloo")))
    return group, store


def _no_barrier(real: object, *_: Any, **__: Any) -> None:
    """Do nothing: the ranks of a group have met when it was made."""


def _made(real: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of meshes, which records the rank."""

    @wraps(real)
    def init(mesh: Any, *args: Any, **more: Any) -> None:
        mesh.__dict__[_MAKER] = _who()
        real(mesh, *args, **more)

    return init


def _of_maker(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of meshes that raises on another rank than the maker, which the answer would be of."""

    @wraps(real)
    def method(mesh: Any, *args: Any, **more: Any) -> Any:
        if (maker := mesh.__dict__.get(_MAKER)) is not None and maker != _who():
            raise RuntimeError(
                f"{real.__qualname__}: got a DeviceMesh that simulated rank {maker[1]} has made, on another rank; make "
                "meshes on every rank, and do not keep them in globals or caches, which simulated ranks share; a "
                "program that keeps them runs on processes (diffcoll.testing.spawn)"
            )
        return real(mesh, *args, **more)

    return method


def _who() -> tuple[int, int] | None:
    """Return the simulation and the rank that this thread is; None: no rank."""
    return THREAD.rank and (THREAD.rank.world.serial, THREAD.rank.number)


def _create(options: Any, _: object) -> SimulatedGroup:
    if THREAD.rank is None:
        raise RuntimeError(f"the backend {_NAME!r} is for the ranks of diffcoll.testing.simulate")
    simulation: Simulation = THREAD.rank.c10d_groups.simulation
    return simulation.group(options)
