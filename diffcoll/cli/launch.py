"""Detects the launcher of this process, and sets up gloo on its ranks, next to MPI too."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from typing import Any

import torch.distributed as dist

import diffcoll
from diffcoll.core.control import Control
from diffcoll.core.groups import resolve

#: Values of `--engine`: a process group of torch.distributed, or an MPI communicator.
ENGINES = ("torch", "mpi")


class UnreachableError(RuntimeError):
    """Other hosts cannot connect to gloo on one of the hosts."""


def launcher(engine: str | None) -> str | None:
    """Return the engine of the processes that were launched together with this one; None if there are none.

    Args:
        engine: the value of `--engine`; only with "mpi" is a launcher that sets no world size (`srun --mpi=pmix`)
            recognised as MPI's.
    """
    if engine != "torch" and any(map(_several, ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))):
        return "mpi"
    if engine == "mpi":
        return "mpi" if "PMIX_NAMESPACE" in os.environ else None
    return "torch" if _several("WORLD_SIZE") else None


def _several(variable: str) -> bool:
    value = os.environ.get(variable, "")
    return value.isdigit() and int(value) > 1


def gloo_on_hosts(backend: str) -> None:
    """Set up torch.distributed on the ranks of torchrun, on one host or several."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])) < int(os.environ["WORLD_SIZE"]):
        refuse_unreachable([unreachable()])
    dist.init_process_group(backend)


def unreachable() -> str:
    """Return why other hosts cannot connect to gloo on this one; "" if they can, as far as is known here.

    Without GLOO_SOCKET_IFNAME, gloo listens on the first address of the host's name that is this host's, or else on
    loopback. Connections of other hosts to 127.0.1.1, as Debian names a host, end at themselves.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    name = socket.gethostname()
    try:
        found = [str(address[0]) for *_, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        found = []
    mine = next(filter(_is_of_this_host, found), None)
    if mine is not None and not ipaddress.ip_address(mine.partition("%")[0]).is_loopback:
        return ""
    return f"the host name {name!r} means {mine}" if mine else f"the host name {name!r} means no address of this host"


def refuse_unreachable(reasons: list[str]) -> None:
    """Raise if gloo on one of the hosts is out of the others' reach."""
    if why := next(filter(None, reasons), ""):
        raise UnreachableError(
            f"gloo on several hosts: {why}, where the other hosts cannot connect to it; set GLOO_SOCKET_IFNAME on each "
            "host to the interface that the others reach it by (ip -brief address lists them), or mend /etc/hosts"
        )


def _is_of_this_host(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def gloo_beside_mpi() -> Any:
    """Make MPI.COMM_WORLD the library's default group and set up torch.distributed on gloo in the same processes."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    diffcoll.set_default_group(world)
    control = Control(resolve(world, "diffcoll verify"), "diffcoll verify")
    one_host = world.Split_type(MPI.COMM_TYPE_SHARED).Get_size() == world.Get_size()
    host = "127.0.0.1" if one_host else socket.gethostname()
    if one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        refuse_unreachable(control.texts(unreachable()))
    n, rank = world.Get_size(), world.Get_rank()
    tcp: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = None
    if rank == 0:
        # Without a socket of ours the store would listen on all interfaces.
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
        port = listener.getsockname()[1]
        store = tcp(host, port, n, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    host, port = json.loads(control.texts(json.dumps([host, store.port] if store else None))[0])
    dist.init_process_group("gloo", store=store or tcp(host, port, n), rank=rank, world_size=n)
    return world
