"""Process groups of torch.distributed: gloo, NCCL, and any other backend that is registered there.

All ranks here are ranks within the group. Functions of torch.distributed take global ranks in some places and group
ranks in others (pytorch#130515), and look groups up, which a twin is not in; so methods of the group are used, which
also take 5 µs less. They have no documentation but that of the functions.
"""

from __future__ import annotations

import atexit
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from diffcoll.core.torch_private.names import require
from diffcoll.engines.c10d_twins import backends_of, gloo_twin_of, twin_of, unwrapped
from diffcoll.engines.devices import is_capturing
from diffcoll.engines.engine import Engine, Wait, is_even
from diffcoll.engines.messages import MessageEngine, Messages
from diffcoll.engines.turn import BackendError, Turn, of_backend
from diffcoll.engines.watch import watch

require("torch.distributed")
#: What is not exported or typed there.
_c10d: Any = distributed_c10d

# The primitives that use the backend's own collective. The others use the defaults of `Engine`, that is, point-to-point
# messages. Measured on gloo (`python -m benchmarks`): its all_gather and reduce_scatter are slow, and messages are
# received directly in the result, which saves a copy into newly allocated memory. Backends that are not listed use all
# of their own collectives.
NATIVE = {"gloo": {"all_reduce", "broadcast"}}
ALL = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}
# Tensors of at most this many bytes on all ranks together are reduced by an all-gather and a local reduction, see
# `Engine.small`. Of NCCL it is not measured: a group of messages takes about 20 µs, in which 100 Gb/s carry 256 KB.
SMALL = {"gloo": 128 << 10, "nccl": 256 << 10}

# The dtypes that a backend sums itself. Half precisions are omitted for gloo: `Engine.all_reduce` accumulates them in
# float32, and sends the same number of bytes.
SUMS = {
    "gloo": {torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64},
    "nccl": {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    | {torch.int8, torch.uint8, torch.int32, torch.int64},
}

# The variants on one tensor, by the names of torch 2.13 or before. Those on lists copy their tensors into a buffer of
# their own first: an all-gather of two ranks on NCCL then takes twice the memory.
_HAS_SINGLE = hasattr(dist.ProcessGroup, "all_gather_single")
_ALL_GATHER = "all_gather_single" if _HAS_SINGLE else "_allgather_base"
_REDUCE_SCATTER = "reduce_scatter_single" if _HAS_SINGLE else "_reduce_scatter_base"

# Tags of the library's messages, which the user's calls in the same group never receive. gloo ends the process if a
# message is longer than its receiver expects, and accepts a shorter one. So the size is part of the tag: if two ranks
# expect different ones, no message is received, and both get an error after the group's timeout.
TAG = 1 << 30


class C10dEngine(MessageEngine):
    """A `torch.distributed.ProcessGroup`, or `own`: a group with the same ranks that is in none of PyTorch's tables."""

    def __init__(
        self, group: dist.ProcessGroup, own: dist.ProcessGroup | None = None, backends: dict[str, str] | None = None
    ) -> None:
        super().__init__(rank=dist.get_rank(group), size=dist.get_world_size(group))
        # Only a weak reference is kept: else its threads would survive destroy_process_group().
        self._users: Callable[[], dist.ProcessGroup | None] = weakref.ref(group)
        self._group: Callable[[], dist.ProcessGroup | None] = self._users if own is None else lambda: own
        self._connected: set[torch.device] = set()
        # If this group moves no tensors of the CPU: the ranks over gloo, once they have tried; this one if they cannot.
        self._cpu: Engine | None = None
        self.key = (own or group).group_name
        self.backends = backends or backends_of(group)
        self.devices = tuple(self.backends)
        names = " and ".join(dict.fromkeys(self.backends.values()))
        self.description = f"a {names} group of {self.size} ranks"
        watch(self)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group whose methods move the data."""
        group = self._group()
        if group is None:
            raise BackendError("the process group was destroyed; set up a new one")
        return group

    @property
    @override
    def global_ranks(self) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(self._users()))

    @property
    @override
    def ended(self) -> bool:
        group = self._users()
        return group is None or self._group() is None or not _exists(group)

    @property
    @override
    def control_device(self) -> torch.device:
        if "cpu" in self.backends:
            return torch.device("cpu")
        device = next(iter(self.backends))
        return torch.device(device, torch.get_device_module(device).current_device())

    @override
    def control(self) -> Engine:
        group = self._users()
        is_known = "cpu" in self.backends or self._cpu is not None
        if group is None or is_known or is_capturing():  # what ranks exchange in a capture does not change anyway
            return self._cpu or self
        if self.size == 1:  # which sends nothing
            self._cpu = C10dEngine(group, backends={"cpu": "gloo"})
            return self._cpu
        device, backend = next(iter(self.backends.items()))
        own, failure = of_backend(gloo_twin_of, group, device)  # an error, on all ranks: the next call tries again
        self._cpu = self if own is None else C10dEngine(group, own, {"cpu": "gloo"})
        if own is None and self.rank == 0:
            warnings.warn(
                f"diffcoll: the ranks of {self.description} cannot connect over gloo: {failure}; so numbers that the "
                f"host needs, such as sizes, are sent over {backend}, and wait for all work that the device has queued;"
                " set GLOO_SOCKET_IFNAME to the network interface that connects the hosts",
                stacklevel=2,
            )
        return self._cpu

    @override
    def small(self, device: str) -> int:
        return SMALL.get(self.backends[device], 0) // self.size

    @override
    def twin(self) -> C10dEngine:
        group = self._users() or self.group
        with Turn(self, "making a group"):
            x = torch.zeros(self.size, dtype=torch.float32, device=self.control_device)
            self.all_gather(None, x, [1] * self.size)()  # fails if a rank has died; a new group would wait for it
            twin = C10dEngine(group, of_backend(twin_of, group, self.backends), self.backends)
            twin.all_reduce(x, x)()  # so that no rank closes it while another one still connects
        return twin

    @override
    def overlaps(self, x: Tensor) -> bool:
        return self._runs_natively("all_reduce", x, adds=True)

    @override
    def close(self) -> None:
        if self._group is not self._users:
            self._group = lambda: None

    @override
    def connect(self, device: torch.device) -> None:
        # NCCL connects all ranks in the group's first call on a device. If that call is point-to-point, it also waits
        # for ranks that send and receive nothing in it. gloo connects the ranks when the group is made.
        if device in self._connected or self.size == 1:
            return
        if self.backends[device.type] != "gloo":
            x = torch.zeros(1, dtype=torch.float32, device=device)
            self.all_reduce(x, x)()
        self._connected.add(device)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────

    @override
    def reaches(self, x: Tensor) -> bool:
        # gloo's point-to-point messages read and write CPU memory only.
        return x.is_cpu or self._backend(x) != "gloo"

    @override
    def messages(self, sends: Messages, recvs: Messages) -> Wait:
        group, first = self.group, (recvs or sends)[0][1]
        works: list[tuple[str, dist.Work, object]] = []
        is_gloo = self._backend(first) == "gloo"
        # NCCL starts messages that are to make progress together as one call.
        is_one = (
            not is_gloo and type(group) is dist.ProcessGroup and group._get_backend(first.device).supports_coalescing
        )
        if is_one:
            group._start_coalescing(first.device)
        for words, begin, messages in ("to rank", group.send, sends), ("from rank", group.recv, recvs):
            for s, t in messages:
                what, tag = f"message {words} {s}: ", TAG + t.nbytes % TAG if is_gloo else 0
                works.append((what, of_backend(begin, [t if is_gloo else _bytes(t)], s, tag, what=what), t))
        if is_one:
            works = [("", of_backend(group._end_coalescing, first.device), works)]

        def wait() -> None:
            for what, work, _ in works:
                of_backend(work.wait, what=what)

        return wait

    # ── the backend's own collectives, where the tables above say so ─────────────────────────────────────

    @override
    def all_reduce(self, x: Tensor, y: Tensor, later: bool = False) -> Wait:
        if not self._runs_natively("all_reduce", y, adds=True):
            return super().all_reduce(x, y, later)
        if x is not y:
            y.copy_(x)
        return self._wait(self.group.allreduce, [_real(y)], _c10d.AllreduceOptions())

    @override
    def all_gather(self, x: Tensor | None, row: Tensor, counts: list[int], later: bool = False) -> Wait:
        if not (self._runs_natively("all_gather", row) and is_even(counts)):
            return super().all_gather(x, row, counts, later)
        mine = row.split_with_sizes(counts)[self.rank] if x is None else x
        return self._wait(getattr(self.group, _ALL_GATHER), _bytes(row), _bytes(mine), _c10d.AllgatherOptions())

    @override
    def reduce_scatter(self, row: Tensor, counts: list[int], out: Tensor, later: bool = False) -> Wait:
        if not (self._runs_natively("reduce_scatter", out, adds=True) and is_even(counts)):
            return super().reduce_scatter(row, counts, out, later)
        call = getattr(self.group, _REDUCE_SCATTER)
        return self._wait(call, _real(out.view(-1)), _real(row), _c10d.ReduceScatterOptions())

    @override
    def broadcast(self, y: Tensor, src: int, later: bool = False) -> Wait:
        if not self._runs_natively("broadcast", y):
            return super().broadcast(y, src, later)
        options = _c10d.BroadcastOptions()
        options.rootRank = src
        return self._wait(self.group.broadcast, [_bytes(y)], options)

    @override
    def reduce(self, y: Tensor, dst: int, later: bool = False) -> Wait:
        if not self._runs_natively("reduce", y, adds=True):
            return super().reduce(y, dst, later)
        y = y if self.rank == dst else y.clone()  # backends may write partial sums to it
        options = _c10d.ReduceOptions()
        options.rootRank = dst
        return self._wait(self.group.reduce, [_real(y)], options)

    def _wait(self, call: Callable[..., dist.Work], *arguments: Any) -> Wait:
        return partial(of_backend, of_backend(call, *arguments).wait)

    def _backend(self, x: Tensor) -> str:
        # A group of gloo without a CPU moves copies there. x.device.type takes four times as long as x.is_cpu.
        return self.backends.get("cpu" if x.is_cpu else x.device.type, "gloo")

    def _runs_natively(self, primitive: str, x: Tensor, adds: bool = False) -> bool:
        backend = self._backend(x)
        if primitive not in NATIVE.get(backend, ALL) or not x.numel():
            return False
        known, dtype = SUMS.get(backend), x.dtype
        return not adds or known is None or (dtype.to_real() if dtype.is_complex else dtype) in known


def _bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8, for moving dtypes that the backend does not know.

    Not x.view(-1): a contiguous tensor of one element may have any stride, such as 0 after expand.
    """
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


# ── from a group to its engine ───────────────────────────────────────────────────────────────────────────

_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, Engine] = weakref.WeakKeyDictionary()


@atexit.register
def _let_threads_end() -> None:
    """Give gloo's threads the time to free what they have sent.

    One that asks for Python's lock while the interpreter shuts down ends the process, with exit code −6.
    """
    if _engines:
        time.sleep(0.01)


def use(group: dist.ProcessGroup, engine: Engine) -> None:
    """Let another engine move the data of this group: that of a simulated rank."""
    _engines[group] = engine


def engine_of(group: object) -> Engine | None:
    """Return the engine of a `ProcessGroup` or a one-dimensional `DeviceMesh`; None for anything else.

    None means torch's default group.

    Raises:
        ValueError: this process is not in the group, or the mesh has several dimensions.
    """
    if group is None:
        group = dist.group.WORLD
        if group is None or (engine := _engines.get(group)) is not None:  # the usual cases; it has not been destroyed
            return None if group is None else engine
    elif isinstance(group, DeviceMesh):
        group = _group_of(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("got a group that this process is not in; call it on the group's ranks only")
    if not isinstance(group, dist.ProcessGroup):
        return None
    if not _exists(group):
        raise ValueError(
            "got a ProcessGroup that was destroyed, or that another simulated rank has made; make one on every rank"
        )
    engine = _engines.get(group)
    if engine is None:
        engine = _engines[group] = C10dEngine(group, unwrapped(group))
    return engine


def engine_named(key: str) -> Engine | None:
    """Return the engine of the group with this `group_name`; None if there is none."""
    # There is no public function from a name to its group. torch's own compiled collectives use this one.
    try:
        return engine_of(_c10d._resolve_process_group(key))
    except (RuntimeError, ValueError):  # no group has this name, or it was destroyed
        return None


def _exists(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_rank(group)
    except ValueError:  # it was destroyed
        return False
    return True


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        remedy = f'one of its dimensions, e.g. mesh["{names[0]}"]' if names else "mesh.get_group(dim)"
        raise ValueError(f"got a DeviceMesh of {mesh.ndim} dimensions, expected one; pass {remedy}")
    if mesh.get_coordinate() is None:
        raise ValueError("got a DeviceMesh that this process is not in; call it on the mesh's ranks only")
    return mesh.get_group(0)
