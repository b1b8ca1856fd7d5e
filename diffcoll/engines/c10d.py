"""torch.distributed's process groups: gloo, NCCL, and whatever else is registered there.

Ranks here are ranks within the group, always: torch's own calls take global ones in some places and group
ones in others (pytorch#130515), so the group is asked itself, or `group_src`/`group_dst` is given.
"""

from __future__ import annotations

import inspect
import math
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from typing_extensions import override

from diffcoll.core._torch import RELEASE
from diffcoll.engines.engine import Blocks, Exclusive, Wait, is_even
from diffcoll.engines.messages import MessageEngine, Messages
from diffcoll.engines.watch import watch

__all__ = ["C10dEngine", "engine_of", "is_running"]

# Which primitives run on the backend's own collective; the others run on `exchange`, that is, on
# point-to-point messages. On gloo that was measured (`diffcoll bench`): its all_gather and reduce_scatter are
# slow, and a message received in its place spares the fresh memory that a copy would fault in. A backend
# that is not listed has all of its own. NCCL: not measured by us.
NATIVE = {"gloo": {"all_reduce", "broadcast"}}
# Up to this many bytes a tensor is reduced from one gather to all, see `Engine.small`.
SMALL = {"gloo": 16 << 10}
# From this many bytes on a sum travels in two halves, so that the second is copied while the first is under way.
HALVED = {"gloo": 4 << 20}
ALL = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}

# What gloo and NCCL add up themselves. Half precisions are left out for gloo, so that they are accumulated
# in float32 by `Engine.all_reduce` at the price of the same number of bytes.
SUMS = {
    "gloo": {torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64},
    "nccl": {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    | {torch.int8, torch.uint8, torch.int32, torch.int64},
}

# How long the ranks of a failed group wait for each other's word: they have waited for the same message.
ABSENT_SECONDS = 2.0

# Our messages carry tags of their own, so that they never meet the user's on the same group. On gloo a message that is
# longer than its receiver expects ends the process, and a shorter one is taken for the whole. So the size is part of
# the tag: messages of two sizes do not meet, and their ranks get an error when the group's timeout is over.
TAG = 1 << 30


def _tag(x: Tensor) -> int:
    return TAG + x.nbytes % TAG


def _filled(x: Tensor) -> Tensor:
    """An empty block is a message too, of one byte: else its rank would not notice that the other's is not empty."""
    return x if x.nbytes else torch.zeros(1, dtype=torch.uint8, device="cpu")


class C10dEngine(MessageEngine):
    """A `torch.distributed.ProcessGroup`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(rank=dist.get_rank(group), size=dist.get_world_size(group))
        self._group = weakref.ref(group)
        self._ends = False  # whether it may be destroyed
        self._connected: set[torch.device] = set()
        self.key = group.group_name
        # {"cpu": "gloo", "cuda": "nccl"}, from the public "cpu:gloo,cuda:nccl"
        pairs = (p.split(":") for p in dist.get_backend_config(group).split(","))
        self.backends = {device: backend for device, backend in pairs}
        self.devices = tuple(self.backends)
        self.description = f"a {dist.get_backend(group)} group of {self.size} ranks"
        watch(self)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, which is torch's: held here, its threads would outlive destroy_process_group() and the program."""
        group = self._group()
        if group is None:
            raise RuntimeError(f"{self.operation}: the process group was destroyed; set up a new one")
        return group

    @property
    @override
    def ended(self) -> bool:
        group = self._group()
        return group is None or not _exists(group)

    @property
    @override
    def control_device(self) -> torch.device:
        if "cpu" in self.backends:
            return torch.device("cpu")
        device = next(iter(self.backends))
        return torch.device(device, torch.get_device_module(device).current_device())

    @override
    def small(self, device: str) -> int:
        return SMALL.get(self.backends[device], 0)

    @override
    def subgroup(self, ranks: Sequence[int]) -> Any:
        return _new_group([dist.get_global_rank(self.group, r) for r in ranks])

    def twin(self) -> C10dEngine:
        """See `Engine.twin`; its group lives as long as torch's others do, until destroy_process_group()."""
        group, kinds = self.group, set(self.backends.values())
        backend = kinds.pop() if len(kinds) == 1 else dist.get_backend_config(group)
        # What a group was made with, it does not say in public.
        timeout = group._get_backend(torch.device(next(iter(self.backends)))).options._timeout
        ranks = dist.get_process_group_ranks(group)
        whole = len(ranks) == dist.get_world_size()  # else the others do not call it
        group = _new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=not whole)
        twin = C10dEngine(group)
        twin._ends = whole
        word = torch.zeros(1, device=twin.control_device)
        with Exclusive(twin, "making a group"):
            twin.all_reduce(word, word)()  # else a rank may leave the group while another has yet to connect
        return twin

    @override
    def overlaps(self, x: Tensor) -> bool:
        return self._runs_natively("all_reduce", x, adds=True)

    def close(self) -> None:
        """See `Engine.close`. A group that some ranks made by themselves stays.

        torch names it after its ranks, and the next one of the same ranks would find the addresses of this one.
        """
        if self._ends and not self.ended:
            destroy(self.group)

    def absent(self) -> list[int]:
        """See `Engine.absent`: the ranks of a failed group say so in the store that brought them together."""
        # Groups have no public way to their store.
        store = distributed_c10d._get_default_store()
        word = f"diffcoll/failed/{self.key}/{{}}"
        end = time.monotonic() + ABSENT_SECONDS
        try:
            store.set(word.format(self.rank), "")
            silent = [r for r in range(self.size) if r != self.rank]
            while silent and time.monotonic() < end:
                silent = [r for r in silent if not store.check([word.format(r)])]
                time.sleep(0.02)
        except RuntimeError:  # it went with the rank that kept it
            return []
        return silent

    def connect(self, device: torch.device) -> None:
        """See `Engine.connect`.

        NCCL connects all ranks in the group's first call on a device. If that is point-to-point, it waits for the ranks
        that send and receive nothing in it as well. gloo connects them when the group is made.
        """
        if device in self._connected or self.size == 1:
            return
        if self.backends[device.type] != "gloo":
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)
        self._connected.add(device)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────

    def reaches(self, x: Tensor) -> bool:
        """See `MessageEngine.reaches`: gloo's point-to-point messages read and write CPU memory only."""
        return x.is_cpu or self._backend(x) != "gloo"

    @override
    def messages(self, sends: Messages, recvs: Messages) -> Wait:
        if self.backends.get((recvs or sends)[0][1].device.type, "gloo") == "gloo":
            # Straight to the group: dist.isend and dist.irecv cost another 10 µs each.
            works = [self.group.send([_filled(t)], s, _tag(t)) for s, t in sends]
            works += [self.group.recv([_filled(t)], s, _tag(t)) for s, t in recvs]
        else:
            ops = [dist.P2POp(dist.irecv, _bytes(t), group=self.group, group_peer=s) for s, t in recvs]
            ops += [dist.P2POp(dist.isend, _bytes(t), group=self.group, group_peer=s) for s, t in sends]
            works = dist.batch_isend_irecv(ops)

        def finish() -> None:
            for work in works:
                work.wait()

        return finish

    def _to_others(self, blocks: Blocks) -> Messages:
        """See `MessageEngine._to_others`; on gloo with empty blocks, see `_filled`."""
        others = [(s, t) for s, t in enumerate(blocks) if s != self.rank and t is not None]
        return [(s, t) for s, t in others if t.numel() or self._backend(t) == "gloo"]

    # ── the backend's own collectives, where the tables above say so ─────────────────────────────────────

    @override
    def all_reduce(self, x: Tensor, y: Tensor) -> Wait:
        if not self._runs_natively("all_reduce", y, adds=True):
            return super().all_reduce(x, y)
        if not x.is_contiguous():
            x = y.copy_(x)
        pairs = [(x, y)]
        if y.numel() * y.element_size() >= HALVED.get(self._backend(y), math.inf):
            pairs = list(zip(x.view(-1).chunk(2), y.view(-1).chunk(2), strict=True))
        waits = []
        for part, into in pairs:
            if x is not y:
                into.copy_(part)
            waits.append(_wait(dist.all_reduce(_real(into), group=self.group, async_op=True)))

        def finish() -> None:
            for wait in waits:
                wait()

        return finish

    @override
    def all_gather(self, x: Tensor | None, row: Tensor, counts: list[int]) -> Wait:
        if not (is_even(counts) and self._runs_natively("all_gather", row)):
            return super().all_gather(x, row, counts)
        parts = [_bytes(part) for part in row.split_with_sizes(counts)]
        mine = parts[self.rank] if x is None else _bytes(x)
        return _wait(dist.all_gather(parts, mine, group=self.group, async_op=True))

    @override
    def reduce_scatter(self, row: Tensor, counts: list[int], out: Tensor) -> Wait:
        if not (is_even(counts) and self._runs_natively("reduce_scatter", out, adds=True)):
            return super().reduce_scatter(row, counts, out)
        parts = [_real(part) for part in row.split_with_sizes(counts)]
        return _wait(dist.reduce_scatter(_real(out.view(-1)), parts, group=self.group, async_op=True))

    @override
    def broadcast(self, y: Tensor, src: int) -> Wait:
        if not self._runs_natively("broadcast", y):
            return super().broadcast(y, src)
        return _wait(dist.broadcast(_bytes(y), group=self.group, group_src=src, async_op=True))

    @override
    def reduce(self, y: Tensor, dst: int) -> Wait:
        if not self._runs_natively("reduce", y, adds=True):
            return super().reduce(y, dst)
        y = y if self.rank == dst else y.clone()  # a backend may leave partial sums in it
        return _wait(dist.reduce(_real(y), group=self.group, group_dst=dst, async_op=True))

    def _backend(self, x: Tensor) -> str:
        return self.backends[x.device.type]

    def _runs_natively(self, primitive: str, x: Tensor, adds: bool = False) -> bool:
        backend = self._backend(x)
        known = SUMS.get(backend)
        dtype = x.dtype.to_real() if x.dtype.is_complex else x.dtype
        return (
            x.numel() > 0
            and primitive in NATIVE.get(backend, ALL)
            and not (adds and known is not None and dtype not in known)
        )


def destroy(group: Any = None) -> None:
    """Destroy a group after its last collective; None: all groups.

    Before torch 2.8 the group's destructor holds the GIL while it joins gloo's threads, one of which may still wait for
    the GIL to let go of a tensor: a deadlock. The threads need a moment, and nothing says when they are done.
    """
    if RELEASE < (2, 8):
        time.sleep(0.2)
    dist.destroy_process_group(group)


def _new_group(ranks: list[int], **more: Any) -> Any:
    """Make a group whose ranks are in the given order."""
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:  # since torch 2.12
        return dist.new_group(ranks, sort_ranks=False, **more)
    if ranks != sorted(ranks):
        remedy = "pass ranks in ascending order, or use torch 2.12 or later"
        raise ValueError(f"new_group: got ranks {ranks}, which torch {torch.__version__} would sort; {remedy}")
    return dist.new_group(ranks, **more)


def _bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor, for what is only moved: so no dtype is unknown to a backend.

    Not x.view(-1): a tensor of one element may be contiguous with any stride, 0 from expand.
    """
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _wait(work: dist.Work | None) -> Wait:
    if work is None:
        return lambda: None
    return partial(work.wait)


# ── which group a user means ─────────────────────────────────────────────────────────────────────────────

_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, C10dEngine] = weakref.WeakKeyDictionary()


def is_running() -> bool:
    """Whether torch's default process group has been set up."""
    return dist.is_available() and dist.is_initialized()


def engine_of(group: object) -> C10dEngine | None:
    """Return the engine of a `ProcessGroup` or a one-dimensional `DeviceMesh`; None for anything else.

    None as a group is torch's default group. A group that this process is not in, and a mesh of several
    dimensions, are ValueErrors.
    """
    if group is None and is_running():
        group = dist.group.WORLD
    elif (mesh := _as_mesh(group)) is not None:
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names
            remedy = f'one of its dimensions, e.g. mesh["{names[0]}"]' if names else "mesh.get_group(dim)"
            raise ValueError(f"got a DeviceMesh of {mesh.ndim} dimensions, expected one; pass {remedy}")
        if mesh.get_coordinate() is None:
            raise ValueError("got a DeviceMesh that this process is not in; call it on the mesh's ranks only")
        group = mesh.get_group(0)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("got a group that this process is not in; call it on the group's ranks only")
    if not isinstance(group, dist.ProcessGroup):
        return None
    if not _exists(group):
        raise ValueError("got a ProcessGroup after destroy_process_group(); set up a new one")
    engine = _engines.get(group)
    if engine is None:
        if dist.get_rank(group) < 0:
            raise ValueError("got a group that this process is not in; call it on the group's ranks only")
        engine = _engines[group] = C10dEngine(group)
    return engine


def engine_named(key: str) -> C10dEngine | None:
    """Return the engine of the group with this `group_name`; None if there is none."""
    # torch has no public way from a name to its group; its own compiled collectives go this one.
    try:
        return engine_of(distributed_c10d._resolve_process_group(key))  # type: ignore[attr-defined,arg-type]
    except (RuntimeError, ValueError):  # torch does not know it, or does not any more
        return None


def _exists(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_rank(group)
    except ValueError:  # torch does not know it any more
        return False
    return True


def _as_mesh(group: object) -> dist.device_mesh.DeviceMesh | None:
    return group if isinstance(group, dist.device_mesh.DeviceMesh) else None
