"""Process groups with the ranks of another one, which are in none of the tables of torch.distributed.

`dist.new_group` names a group by the number of groups that the process has made. If only some processes made one more,
as for one axis of a mesh, the names of all later groups would differ. So these groups are used through their methods:
most functions of torch.distributed look groups up.
"""

from __future__ import annotations

import socket
import time
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


def timeout_of(group: dist.ProcessGroup, device: str) -> timedelta:
    """Return the timeout of a group, which has no public access to it."""
    options = getattr(group._get_backend(torch.device(device)), "options", None)
    timeout: timedelta = getattr(options, "_timeout", distributed_c10d.default_pg_timeout)
    return timeout


def twin_of(group: dist.ProcessGroup, backends: dict[str, str]) -> dist.ProcessGroup:
    """Make a group with the ranks of another one, all of which call this, and its backends, by types of devices."""
    name, store = store_of_next(group)
    twin: Any = dist.ProcessGroup(store, group.rank(), group.size())
    made: dict[str, Any] = {}
    for device, backend in backends.items():
        if backend not in made:
            part = _c10d.PrefixStore(f"{backend}/", store)
            made[backend] = _backend_like(group, device, backend, name, part)
        if isinstance(made[backend], dist.ProcessGroup):  # one that is written in Python
            return _named(made[backend], name)
        kind = dist.Backend.backend_type_map.get(backend, dist.ProcessGroup.BackendType.CUSTOM)
        twin._register_backend(torch.device(device), kind, made[backend])
    return _named(twin, name)


def _named(group: Any, name: str) -> dist.ProcessGroup:
    group._set_group_name(name)
    named: dist.ProcessGroup = group
    return named


def _backend_like(group: dist.ProcessGroup, device: str, backend: str, name: str, store: Any) -> Any:
    rank, size, timeout = group.rank(), group.size(), timeout_of(group, device)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    ranks = dist.get_process_group_ranks(group)
    plugin: Any = dist.Backend._plugins.get(backend.upper())
    if plugin is None:  # NCCL, XCCL
        kind: Any = type(group._get_backend(torch.device(device)))
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
        The gloo group on all ranks; or, if one could not connect within `CONNECT`, None on all ranks, and why.
    """
    (name, store), begin = store_of_next(group), time.monotonic()
    rank, size = group.rank(), group.size()
    backend: Any = None
    failure = ""
    try:
        backend = dist.ProcessGroupGloo(store, rank, size, CONNECT)
        backend.allreduce([torch.zeros(1, dtype=torch.float32, device="cpu")]).wait()
    except RuntimeError as error:
        failure = f"rank {rank} on {_here()}: {error}"
    store.set(f"rank {rank}", failure)
    if rank == 0:  # one rank decides for all
        left = max(1.0, CONNECT.total_seconds() - time.monotonic() + begin)
        try:
            keys = [f"rank {r}" for r in range(size)]
            store.wait(keys, timedelta(seconds=left))
            failure = "; ".join([said for key in keys if (said := store.get(key).decode())][:3])
        except RuntimeError as error:
            failure = failure or f"rank 0 on {_here()}: {error}"
        store.set("failure", failure)
    failure = store.get("failure").decode()
    if failure or backend is None:
        return None, failure
    # Messages keep the timeout with which their group was made: so one more is made, now that all ranks can connect.
    with_timeout = dist.ProcessGroupGloo(_c10d.PrefixStore("connected", store), rank, size, timeout_of(group, device))
    twin: Any = dist.ProcessGroup(store, rank, size)
    twin._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, with_timeout)
    return _named(twin, name), ""


def _here() -> str:
    host = socket.gethostname()
    try:
        return f"host {host} ({socket.gethostbyname(host)})"
    except OSError:
        return f"host {host}, whose name has no address"
