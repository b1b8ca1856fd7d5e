"""Process groups with the ranks of another one, which are in none of the tables of torch.distributed.

`dist.new_group` names a group by the number of groups that the process has made. If only some processes made one more,
as for one axis of a mesh, the names of all later groups would differ. So these groups are used through their methods:
most functions of torch.distributed look groups up.
"""

from __future__ import annotations

import socket
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

#: What is typed too narrowly there, or not exported.
_c10d: Any = distributed_c10d
#: Time in which all ranks must have connected over gloo.
CONNECT = timedelta(seconds=60)

#: How many of these groups were made for each group: as many on all its ranks, unlike for all groups of one name, which
#: a process may have destroyed and set up again.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def store_of_next(group: dist.ProcessGroup) -> tuple[str, Any]:
    """Return a new name for a group with the same ranks, all of which call this, and the part of the store for it."""
    _made[group] = number = _made.get(group, 0) + 1
    name = f"diffcoll {number} in {group.group_name}"
    return name, _c10d.PrefixStore(name, _c10d._get_process_group_store(group))


def backend_of(group: dist.ProcessGroup, device: str) -> Any:
    """Return what moves a device's tensors, without the wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL puts around it."""
    backend = group._get_backend(torch.device(device))
    return getattr(backend, "wrapped_pg", backend)


def timeout_of(group: dist.ProcessGroup, device: str) -> timedelta:
    """Return the timeout of a group, which has no public access to it."""
    options = getattr(backend_of(group, device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", distributed_c10d.default_pg_timeout)
    return timeout


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return {"cpu": "gloo", "cuda": "nccl"} for "cpu:gloo,cuda:nccl"."""
    pairs = (part.split(":") for part in dist.get_backend_config(group).split(","))
    return {device: backend for device, backend in pairs}


def unwrapped(group: dist.ProcessGroup) -> Any:
    """Return a group that moves this one's data without PyTorch's checks of calls; None: there are none.

    On gloo they count point-to-point messages, too, and refuse the next collective after ones between some ranks.
    """
    if _c10d.get_debug_level() != _c10d.DebugLevel.DETAIL or type(group) is not dist.ProcessGroup:
        return None
    made = {device: (backend, backend_of(group, device)) for device, backend in backends_of(group).items()}
    return _made_of(group, _c10d._get_process_group_store(group), group.group_name, made)


def _made_of(group: dist.ProcessGroup, store: Any, name: str, made: dict[str, tuple[str, Any]]) -> Any:
    """Return a group with the ranks of another one, and these backends and their names, by types of devices."""
    twin: Any = dist.ProcessGroup(store, group.rank(), group.size())
    for device, (backend, instance) in made.items():
        kind = dist.Backend.backend_type_map.get(backend, dist.ProcessGroup.BackendType.CUSTOM)
        twin._register_backend(torch.device(device), kind, instance)
    twin._set_group_name(name)
    return twin


def twin_of(group: dist.ProcessGroup, backends: dict[str, str]) -> Any:
    """Make a group with the ranks of another one, all of which call this, and its backends, by types of devices."""
    name, store = store_of_next(group)
    made: dict[str, Any] = {}
    for device, backend in backends.items():
        if backend not in made:
            part = _c10d.PrefixStore(f"{backend}/", store)
            made[backend] = _backend_like(group, device, backend, name, part)
        if isinstance(made[backend], dist.ProcessGroup):  # one that is written in Python
            made[backend]._set_group_name(name)
            return made[backend]
    return _made_of(group, store, name, {device: (backend, made[backend]) for device, backend in backends.items()})


def _backend_like(group: dist.ProcessGroup, device: str, backend: str, name: str, store: Any) -> Any:
    rank, size, timeout = group.rank(), group.size(), timeout_of(group, device)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    ranks = dist.get_process_group_ranks(group)
    plugin: Any = dist.Backend._plugins.get(backend.upper())
    if plugin is None:  # NCCL, XCCL
        kind: Any = type(backend_of(group, device))
        options = kind.Options()
        options._timeout, options.group_name, options.global_ranks_in_group = timeout, name, ranks
        return kind(store, rank, size, options)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = _c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, timeout
    options.group_id, options.global_ranks_in_group = name, ranks
    return plugin.creator_fn(options, None)


def gloo_twin_of(group: dist.ProcessGroup, device: str) -> tuple[dist.ProcessGroup | None, str]:
    """Connect the ranks of a group over gloo, all of which call this.

    Returns:
        The gloo group on all ranks; or, if one could not connect within `CONNECT` of the last one's call, None on all
        ranks, and why.

    Raises:
        RuntimeError: a rank did not call this within the group's timeout, or did not tell how it went.
    """
    name, store = store_of_next(group)
    rank, size, timeout = group.rank(), group.size(), timeout_of(group, device)
    _told(store, "called", "", rank, size, timeout)
    failure = ""
    try:
        connected: Any = dist.ProcessGroupGloo(store, rank, size, CONNECT)
        connected.allreduce([torch.zeros(1, dtype=torch.float32, device="cpu")]).wait()
    except RuntimeError as error:
        failure = f"rank {rank} on {_here()}: {error}"
    if failure := _told(store, "failure", failure, rank, size, 2 * CONNECT):  # each of both steps has taken as long
        return None, failure
    # Messages keep the timeout with which their group was made: so one more is made, now that all ranks can connect.
    with_timeout = dist.ProcessGroupGloo(_c10d.PrefixStore("connected", store), rank, size, timeout)
    return _made_of(group, store, name, {"cpu": ("gloo", with_timeout)}), ""


def _told(store: Any, key: str, text: str, rank: int, size: int, within: timedelta) -> str:
    """Return on all ranks the first texts that are not empty, once all ranks have called this; rank 0 collects them.

    Raises:
        RuntimeError: a rank has not called it within this time.
    """
    store.set(f"{key} {rank}", text)
    if rank == 0:
        keys = [f"{key} {r}" for r in range(size)]
        store.wait(keys, within)
        store.set(key, "; ".join([said for k in keys if (said := store.get(k).decode())][:3]))
    store.wait([key], within)
    found: str = store.get(key).decode()
    return found


def _here() -> str:
    host = socket.gethostname()
    try:
        return f"host {host} ({socket.gethostbyname(host)})"
    except OSError:
        return f"host {host}, whose name has no address"
