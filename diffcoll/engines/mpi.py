"""MPI communicators, through mpi4py and the MPI library that it finds.

mpi4py is not imported here: a user who passes a communicator has imported it. MPI reads and writes the tensors' own
memory. Messages are sent on a duplicate of the user's communicator, so that the user's calls never receive them.
"""

from __future__ import annotations

import atexit
import sys
from functools import cache, partial
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.engines.devices import accelerator_type, current_stream
from diffcoll.engines.engine import Blocks, Wait, add_up, done, is_even
from diffcoll.engines.messages import MessageEngine, Messages
from diffcoll.engines.mpi_library import end_the_job_on_errors, mpi_library, reads_cuda
from diffcoll.engines.turn import of_backend
from diffcoll.engines.watch import watch

#: Before MPI 4, counts are 32-bit ints. Larger tensors are messages in pieces of this many bytes, equal on all ranks.
PIECE = 1 << 30
#: Blocking sums are split into pieces of this many bytes, which fit the caches: on two ranks of one host, sums of 12 MB
#: in place took 0.77 times as long as in one call, and 25 MB 0.74 times.
ADDED = 1 << 20
#: Of at most this many bytes, a reduce_scatter is one Alltoall and a local sum.
SMALL = 16 << 10
#: Tensors of at most this many bytes on all ranks together are reduced by an all-gather and a local reduction.
TOGETHER = 128 << 10
#: The largest tag that every MPI has.
TAGS = (1 << 15) - 1

#: MPI's names for the dtypes that it sums. It has none for half precisions: the defaults of `Engine` accumulate them in
#: float32, and send the same number of bytes.
SUMS = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
}


class MpiEngine(MessageEngine):
    """An intracommunicator of mpi4py.

    Without `later`, MPI's blocking collectives are called. The non-blocking ones take up to 1.6 times as long on Open
    MPI. There is no thread that makes progress between start and wait: on two ranks on two cores it saved no time.
    From SMALL bytes on, reduce_scatter uses the default, messages and a local sum: MPI's own takes twice as long.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__(rank=comm.Get_rank(), size=comm.Get_size())
        self.key = f"MPI communicator {next(_numbers)}"
        self.description = f"an MPI communicator of {self.size} ranks"
        self.users, self._duplicate = comm, None
        self._twins: list[MpiEngine] = []
        self._mpi = mpi_library()
        self._kinds = {dtype: getattr(self._mpi, name) for dtype, name in SUMS.items()}
        watch(self)

    @property
    def comm(self) -> Any:
        """The duplicate of the user's communicator. The first call makes it, and waits for all ranks."""
        if self._duplicate is None:
            if self.size > 1:
                end_the_job_on_errors()
            self._duplicate = of_backend(self.users.Dup)
        return self._duplicate

    @property
    def devices(self) -> tuple[str, ...]:  # type: ignore[override]
        """CPU, CUDA, and the accelerator: a package may register one after the engine was made."""
        return tuple(dict.fromkeys(("cpu", "cuda", accelerator_type() or "cpu")))

    @property
    @override
    def ended(self) -> bool:
        return bool(self._mpi.Is_finalized() or self.users == self._mpi.COMM_NULL)

    @override
    def close(self) -> None:
        for engine in (self, *self._twins):
            if engine._duplicate is not None and not self._mpi.Is_finalized():
                engine._duplicate.Free()
            engine._duplicate = None
        self._twins.clear()

    @override
    def small(self, device: str) -> int:
        return TOGETHER // self.size

    @override
    def twin(self) -> MpiEngine:
        twin = MpiEngine(self.users)
        _ = twin.comm  # now: at first use, a rank may make this engine's duplicate while another makes the twin's
        self._twins.append(twin)
        return twin

    @property
    @override
    def global_ranks(self) -> tuple[int, ...]:
        mpi, mine = mpi_library(), self.users.Get_group()
        world = mpi.COMM_WORLD.Get_group()
        return tuple(mpi.Group.Translate_ranks(mine, list(range(self.size)), world))

    @override
    def reaches(self, x: Tensor) -> bool:
        return x.is_cpu or (x.is_cuda and reads_cuda())  # MPI's query, and its streams, are those of CUDA

    @override
    def exchange(self, sends: Blocks, recvs: Blocks, later: bool = False) -> Wait:
        _ = self.comm  # also on ranks without messages: all ranks make it
        return super().exchange(sends, recvs, later)

    @override
    def messages(self, sends: Messages, recvs: Messages) -> Wait:
        requests: list[Any] = []
        for start, messages in (self.comm.Irecv, recvs), (self.comm.Isend, sends):
            for s, t in messages:
                parts = [t] if t.nbytes <= PIECE else torch.split(t.view(-1).view(torch.uint8), PIECE)
                # As on gloo, a message of another size than expected is not received.
                requests += [of_backend(start, self._memory(part), s, t.nbytes & TAGS) for part in parts]
        return partial(_wait_for, requests, (sends, recvs))

    # ── MPI's own collectives ────────────────────────────────────────────────────────────────────────────

    @override
    def all_reduce(self, x: Tensor, y: Tensor, later: bool = False) -> Wait:
        kind, nbytes = self._kinds.get(y.dtype), y.nbytes
        if kind is None or not nbytes or (later and nbytes > PIECE) or not self.reaches(y):
            return super().all_reduce(x, y, later)
        in_place = x is y or later  # all ranks must sum in place, or none
        if in_place and x is not y:
            y.copy_(x)
        x = x.contiguous()
        if nbytes <= ADDED or later:
            sent = self._mpi.IN_PLACE if in_place else self._memory(x, kind)
            return self._call("Allreduce", later, y, sent, self._memory(y, kind))
        size = ADDED // y.itemsize
        for a, b in zip(torch.split(x.view(-1), size), torch.split(y.view(-1), size), strict=True):
            self.all_reduce(b if in_place else a, b)
        return done

    @override
    def all_gather(self, x: Tensor | None, row: Tensor, counts: list[int], later: bool = False) -> Wait:
        if not 0 < row.nbytes <= PIECE or not self.reaches(row):
            return super().all_gather(x, row, counts, later)
        sent, received = self._mpi.IN_PLACE if x is None else self._memory(x), self._memory(row)
        if is_even(counts):
            return self._call("Allgather", later, (x, row), sent, received)
        sizes = [row.itemsize * count for count in counts]
        received.insert(1, (sizes, [0, *accumulate(sizes[:-1])]))
        return self._call("Allgatherv", later, (x, row), sent, received)

    @override
    def reduce_scatter(self, row: Tensor, counts: list[int], out: Tensor, later: bool = False) -> Wait:
        if later or not (0 < row.nbytes <= SMALL and is_even(counts) and row.is_cpu):
            return super().reduce_scatter(row, counts, out, later)
        terms = torch.empty_like(row)
        self._call("Alltoall", False, None, self._memory(row), self._memory(terms))
        add_up(terms.split_with_sizes(counts), out.view(-1))
        return done

    @override
    def broadcast(self, y: Tensor, src: int, later: bool = False) -> Wait:
        if not 0 < y.nbytes <= PIECE or not self.reaches(y):
            return super().broadcast(y, src, later)
        return self._call("Bcast", later, y, self._memory(y), src)

    @override
    def reduce(self, y: Tensor, dst: int, later: bool = False) -> Wait:
        kind, mpi = self._kinds.get(y.dtype), self._mpi
        if kind is None or not 0 < y.nbytes <= PIECE or not self.reaches(y):
            return super().reduce(y, dst, later)
        memory = self._memory(y, kind)
        buffers = (mpi.IN_PLACE, memory) if self.rank == dst else (memory, None)
        return self._call("Reduce", later, y, *buffers, mpi.SUM, dst)

    def _call(self, name: str, later: bool, memory: object, *arguments: Any) -> Wait:
        """Call a collective of MPI; with `later`, its non-blocking variant, which uses this memory until the wait."""
        if later:
            return partial(_wait_for, [of_backend(getattr(self.comm, "I" + name.lower()), *arguments)], memory)
        of_backend(getattr(self.comm, name), *arguments)
        return done

    def _memory(self, x: Tensor, kind: Any = None) -> list[Any]:
        """Return the memory of a contiguous tensor, as MPI's numbers of some kind or as bytes, as mpi4py takes it."""
        if not x.is_cpu:
            _settle(x)
        return [self._mpi.buffer.fromaddress(x.data_ptr(), x.nbytes), kind or self._mpi.BYTE]


def _settle(x: Tensor) -> None:
    """Wait for the current stream of x's device, because MPI does not use PyTorch's streams."""
    stream = current_stream(x.device)
    assert stream is not None
    stream.synchronize()


def _wait_for(requests: list[Any], memory: object) -> None:
    """Wait for requests that use some memory."""
    of_backend(mpi_library().Request.Waitall, requests)


# ── from a communicator to its engine ────────────────────────────────────────────────────────────────────

#: By the handle of the communicator.
_engines: dict[int, MpiEngine] = {}
_numbers = count()


def engine_of(group: object) -> MpiEngine | None:
    """Return the engine of a communicator of mpi4py; None for anything else.

    Raises:
        ValueError: it is not an intracommunicator with this process in it, or MPI was initialized for one thread.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(group, mpi.Comm):
        return None
    if mpi.Is_finalized():
        raise ValueError("got a communicator after MPI_Finalize(); use it before")
    engine = _engines.get(group.handle)
    if engine is None:
        if group == mpi.COMM_NULL:
            raise ValueError(
                "got a group that this process is not in, or a freed one (MPI.COMM_NULL); call it on the ranks of the "
                "communicator only, and before comm.Free()"
            )
        if group.Is_inter():
            raise ValueError("got an intercommunicator, expected an intracommunicator; pass comm.Merge()")
        if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
            raise ValueError(
                "got a communicator of an MPI that was set up for one thread, expected MPI_THREAD_SERIALIZED or more, "
                "since PyTorch may run backward in another thread; before `from mpi4py import MPI`, say "
                "`import mpi4py; mpi4py.rc.thread_level = 'multiple'`"
            )
        engine = _engines[group.handle] = MpiEngine(group)
        group.Set_attr(_attribute(), group.handle)  # MPI calls `_close` when it is freed: handles are reused
    return engine


def engine_named(key: str) -> MpiEngine | None:
    """Return the MPI engine with this key; None if there is none."""
    return next((engine for engine in _engines.values() if engine.key == key), None)


@cache
def _attribute() -> int:
    atexit.register(_close_all)  # runs before mpi4py's MPI_Finalize, which was registered earlier
    key: int = mpi_library().Comm.Create_keyval(delete_fn=lambda comm, key, handle: _close(handle))
    return key


def _close(handle: int) -> None:
    if engine := _engines.pop(handle, None):
        engine.close()


def _close_all() -> None:
    for handle in list(_engines):
        _close(handle)
