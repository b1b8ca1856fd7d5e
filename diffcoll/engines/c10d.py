"""Process groups of torch.distributed: gloo, NCCL, and any other backend that is registered there.

All ranks here are ranks within the group. Functions of torch.distributed take global ranks in some places and group
ranks in others (pytorch#130515), so methods of the group, or the arguments `group_src` and `group_dst`, are used.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from diffcoll.engines.c10d_absent import absent
from diffcoll.engines.c10d_groups import new_group
from diffcoll.engines.c10d_polling import InThread, of_message, wait_for
from diffcoll.engines.c10d_store import while_it_answers
from diffcoll.engines.engine import Blocks, Engine, Wait, done, is_even
from diffcoll.engines.messages import KINDS, MessageEngine, Messages
from diffcoll.engines.watch import watch

# The primitives that use the backend's own collective. The others use the defaults of `Engine`, that is, point-to-point
# messages. Measured on gloo (`python -m benchmarks`): its all_gather and reduce_scatter are slow, and messages are
# received directly in the result, which saves a copy into newly allocated memory. Backends that are not listed use all
# of their own collectives. NCCL was not measured.
NATIVE = {"gloo": {"all_reduce", "broadcast"}}
# Tensors of at most this many bytes on all ranks together are reduced by an all-gather and a local reduction, see
# `Engine.small`.
SMALL = {"gloo": 128 << 10}
ALL = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}

# The dtypes that a backend sums itself. Half precisions are omitted for gloo: `Engine.all_reduce` accumulates them in
# float32, and sends the same number of bytes.
SUMS = {
    "gloo": {torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64},
    "nccl": {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    | {torch.int8, torch.uint8, torch.int32, torch.int64},
}

# The variants on one tensor, by the names of torch 2.13, where the older names warn. Those on lists copy their tensors
# into a buffer of their own first: an all-gather of two ranks on NCCL then takes twice the memory.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_numbers = itertools.count()  # of groups that the library has made

# Tags of the library's messages, so that they are not received by the user's calls in the same group. gloo ends the
# process if a message is longer than its receiver expects, and accepts a shorter one, and one of another dtype or call.
# So size, dtype and collective are part of the tag: if two ranks expect different ones, no message is received, and
# both get an error after the group's timeout.
TAG = 1 << 30


def _byte() -> Tensor:
    """Return what is sent for an empty block: so the ranks fail, as above, if only one of them expects one."""
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


class C10dEngine(MessageEngine):
    """A `torch.distributed.ProcessGroup`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(rank=dist.get_rank(group), size=dist.get_world_size(group))
        self._group = weakref.ref(group)
        self._ends = False  # whether `close` destroys the group
        self._connected: set[torch.device] = set()
        self.key = group.group_name
        # {"cpu": "gloo", "cuda": "nccl"}, from "cpu:gloo,cuda:nccl"
        pairs = (p.split(":") for p in dist.get_backend_config(group).split(","))
        self.backends = {device: backend for device, backend in pairs}
        self.devices = tuple(self.backends)
        self.description = f"a {dist.get_backend(group)} group of {self.size} ranks"
        watch(self)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group. Only a weak reference is kept: else its threads would survive destroy_process_group()."""
        group = self._group()
        if group is None:
            raise RuntimeError(f"{self.now.name}: the process group was destroyed; set up a new one")
        return group

    @property
    @override
    def global_ranks(self) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(self.group))

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
        return SMALL.get(self.backends[device], 0) // self.size

    @override
    def subgroup(self, ranks: Sequence[int]) -> Any:
        return self._new_group([dist.get_global_rank(self.group, r) for r in ranks])

    @override
    def twin(self) -> C10dEngine:
        group, kinds = self.group, set(self.backends.values())
        backend = kinds.pop() if len(kinds) == 1 else dist.get_backend_config(group)
        # There is no public access to a group's timeout.
        timeout = group._get_backend(torch.device(next(iter(self.backends)))).options._timeout
        twin = C10dEngine(self._new_group(dist.get_process_group_ranks(group), timeout=timeout, backend=backend))
        twin._ends = True
        x = torch.zeros(1, dtype=torch.float32, device=twin.control_device)
        with twin.turn("making a group"):
            twin.all_reduce(x, x)()  # so that no rank destroys the group while another still connects to it
        return twin

    def _new_group(self, ranks: list[int], **more: Any) -> Any:
        """Make a group of some of these ranks, under a name on which they agree; all of them call it.

        torch names groups by how many the process has made, so the names differ if the ranks have made different ones.
        """
        number = torch.tensor([next(_numbers)], device=self.control_device)
        of_ranks = number.new_empty(self.size)
        with self.turn("making a group"):
            # Not a broadcast: a rank that waits for nobody would wait in new_group for one that has died before it.
            self.all_gather(number, of_ranks, [1] * self.size)()
            # If this is not the whole world, the processes outside do not call new_group.
            more["use_local_synchronization"] = self.size < dist.get_world_size()
            with while_it_answers(more.get("timeout", distributed_c10d.default_pg_timeout)):
                return new_group(ranks, name=f"diffcoll {of_ranks[0].item()} in {self.key}", **more)

    @override
    def overlaps(self, x: Tensor) -> bool:
        return self._runs_natively("all_reduce", x, adds=True)

    @override
    def close(self) -> None:
        if self._ends and not self.ended:
            dist.destroy_process_group(self.group)

    @override
    def absent(self) -> list[int]:
        return absent(self.key, self.rank, range(self.size))

    @override
    def connect(self, device: torch.device) -> None:
        # NCCL connects all ranks in the group's first call on a device. If that call is point-to-point, it also waits
        # for ranks that send and receive nothing in it. gloo connects the ranks when the group is made.
        if device in self._connected or self.size == 1:
            return
        if self.backends[device.type] != "gloo":
            dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=self.group)
        self._connected.add(device)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────

    @override
    def reaches(self, x: Tensor) -> bool:
        # gloo's point-to-point messages read and write CPU memory only.
        return x.is_cpu or self._backend(x) != "gloo"

    @override
    def messages(self, sends: Messages, recvs: Messages) -> Wait:
        if self._backend((recvs or sends)[0][1]) == "gloo":
            group, number, works = self.group, self.number_of_call(), []
            try:
                # Methods of the group, because dist.isend and dist.irecv take 10 µs longer each.
                for begin, messages in (group.send, sends), (group.recv, recvs):
                    for s, t in messages:
                        nbytes = t.nbytes
                        tag = TAG + (nbytes + (KINDS[t.dtype] ^ number)) % TAG
                        works.append(begin([t if nbytes else _byte()], s, tag))
            except RuntimeError as error:
                raise of_message(len(works), sends, recvs, error) from error
        else:
            ops = [dist.P2POp(dist.irecv, _bytes(t), group=self.group, group_peer=s) for s, t in recvs]
            ops += [dist.P2POp(dist.isend, _bytes(t), group=self.group, group_peer=s) for s, t in sends]
            works = dist.batch_isend_irecv(ops)
            if self.now.polls is not None:
                self.now.polls += [work.is_completed for work in works]
            return partial(wait_for, works)
        if self.now.polls is None:
            return partial(wait_for, works, sends, recvs)
        in_thread = InThread(works, sends, recvs)
        self.now.polls.append(in_thread.done)
        return in_thread

    @override
    def _to_others(self, blocks: Blocks) -> Messages:
        # On gloo with empty blocks, see `_byte`.
        rank = self.rank
        others = [(s, t) for s, t in enumerate(blocks) if s != rank and t is not None]
        if others and self._backend(others[0][1]) != "gloo":  # all blocks are on one device
            others = [(s, t) for s, t in others if t.numel()]
        return others

    # ── the backend's own collectives, where the tables above say so ─────────────────────────────────────

    @override
    def all_reduce(self, x: Tensor, y: Tensor) -> Wait:
        if not self._runs_natively("all_reduce", y, adds=True):
            return super().all_reduce(x, y)
        if x is not y:
            y.copy_(x)
        return self._wait(dist.all_reduce(_real(y), group=self.group, async_op=True))

    @override
    def all_gather(self, x: Tensor | None, row: Tensor, counts: list[int]) -> Wait:
        if not (self._runs_natively("all_gather", row) and is_even(counts)):
            return super().all_gather(x, row, counts)
        mine = row.split_with_sizes(counts)[self.rank] if x is None else x
        return self._wait(_all_gather(_bytes(row), _bytes(mine), group=self.group, async_op=True))

    @override
    def reduce_scatter(self, row: Tensor, counts: list[int], out: Tensor) -> Wait:
        if not (self._runs_natively("reduce_scatter", out, adds=True) and is_even(counts)):
            return super().reduce_scatter(row, counts, out)
        return self._wait(_reduce_scatter(_real(out.view(-1)), _real(row), group=self.group, async_op=True))

    @override
    def broadcast(self, y: Tensor, src: int) -> Wait:
        if not self._runs_natively("broadcast", y):
            return super().broadcast(y, src)
        return self._wait(dist.broadcast(_bytes(y), group=self.group, group_src=src, async_op=True))

    @override
    def reduce(self, y: Tensor, dst: int) -> Wait:
        if not self._runs_natively("reduce", y, adds=True):
            return super().reduce(y, dst)
        y = y if self.rank == dst else y.clone()  # backends may write partial sums to it
        return self._wait(dist.reduce(_real(y), group=self.group, group_dst=dst, async_op=True))

    def _wait(self, work: dist.Work | None) -> Wait:
        if work is None:
            return done
        if self.now.polls is not None:
            self.now.polls.append(work.is_completed)
        return partial(work.wait)

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
        raise ValueError("got a ProcessGroup after destroy_process_group(); set up a new one")
    engine = _engines.get(group)
    if engine is None:
        if dist.get_rank(group) < 0:
            raise ValueError("got a group that this process is not in; call it on the group's ranks only")
        engine = _engines[group] = C10dEngine(group)
    return engine


def engine_named(key: str) -> Engine | None:
    """Return the engine of the group with this `group_name`; None if there is none."""
    # There is no public function from a name to its group. torch's own compiled collectives use this one.
    try:
        return engine_of(distributed_c10d._resolve_process_group(key))  # type: ignore[attr-defined,arg-type]
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
