"""MPI communicators, through mpi4py and the MPI library that it finds.

mpi4py is not imported here: a user who passes a communicator has imported it. MPI reads and writes the tensors' own
memory. Messages are sent on a duplicate of the user's communicator, so that the user's calls never receive them.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from diffcoll.engines.devices import accelerator_type, current_stream
from diffcoll.engines.engine import Blocks, Wait, add_up, done, is_even
from diffcoll.engines.messages import KINDS, MessageEngine, Messages
from diffcoll.engines.mpi_library import end_the_job_on_errors, mpi_library, reads_cuda
from diffcoll.engines.mpi_requests import TAGS, Deferred, Duplicate, Polled, Wanted
from diffcoll.engines.watch import watch

#: MPI counts in 32-bit ints. Larger tensors are sent in pieces of this many bytes, equal on all ranks.
PIECE = 1 << 30
#: Blocking sums are split into pieces of this many bytes, which fit the caches: on two ranks of one host, sums of 12 MB
#: in place took 0.77 times as long as in one call, and 25 MB 0.74 times.
ADDED = 1 << 20
#: Sums of at most this many bytes use a shorter code path.
SMALL = 16 << 10
#: Tensors of at most this many bytes on all ranks together are reduced by an all-gather and a local reduction.
TOGETHER = 128 << 10

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

    def __init__(self, comm: Any, key: str, number: int = 0) -> None:
        super().__init__(rank=comm.Get_rank(), size=comm.Get_size())
        self.key = key
        self.description = f"an MPI communicator of {self.size} ranks"
        self.users, self._duplicate, self._making = comm, None, Duplicate(comm, number)
        self._twins: list[MpiEngine] = []
        self._twins_made = 0
        self._twin_of: MpiEngine | None = None
        self._mpi = mpi_library()
        self._kinds = {dtype: getattr(self._mpi, name) for dtype, name in SUMS.items()}
        watch(self)

    @property
    def comm(self) -> Any:
        """The duplicate of the user's communicator. The first call makes it, on all ranks together."""
        if self._duplicate is None:
            if self.size > 1:
                end_the_job_on_errors()
            self._duplicate = self._making.get()
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
        for twin in [*self._twins]:
            twin.close()
        if self._twin_of is not None and self in self._twin_of._twins:
            self._twin_of._twins.remove(self)
        self._making.free()
        self._duplicate = None

    @override
    def small(self, device: str) -> int:
        return TOGETHER // self.size

    @override
    def twin(self) -> MpiEngine:
        self._twins_made += 1
        twin = MpiEngine(self.users, f"{self.key}, {next(_numbers)}", self._twins_made)
        _ = twin.comm  # now: at first use, a rank may make this engine's duplicate while another makes the twin's
        twin._twin_of = self
        self._twins.append(twin)
        return twin

    @property
    @override
    def global_ranks(self) -> tuple[int, ...]:
        mpi, mine = mpi_library(), self.users.Get_group()
        world = mpi.COMM_WORLD.Get_group()
        return tuple(mpi.Group.Translate_ranks(mine, list(range(self.size)), world))  # in mpi4py 3 a class method

    @override
    def subgroup(self, ranks: Sequence[int]) -> Any:
        return self.users.Create(self.users.Get_group().Incl(list(ranks)))

    @override
    def reaches(self, x: Tensor) -> bool:
        return x.is_cpu or (x.is_cuda and reads_cuda())  # MPI's query, and its streams, are those of CUDA

    @override
    def exchange(self, sends: Blocks, recvs: Blocks) -> Wait:
        if self._duplicate is None:  # also on ranks without messages: all ranks make it
            self._begin(lambda comm: Polled(None, []))
        return super().exchange(sends, recvs)

    @override
    def messages(self, sends: Messages, recvs: Messages) -> Wait:
        byte, number = self._mpi.BYTE, self.number_of_call()
        tag = {t.dtype: (KINDS[t.dtype] ^ number) & TAGS for _, t in (*sends, *recvs)}
        wanted = [(s, t.dtype, piece) for s, t in recvs for piece in self._pieces(t)]
        given = [(s, t.dtype, piece) for s, t in sends for piece in self._pieces(t)]

        def start(comm: Any) -> Polled:
            requests = [comm.Irecv([piece, byte], s) for s, _, piece in wanted]  # of any tag; the wait compares it
            requests += [comm.Isend([piece, byte], s, tag[dtype]) for s, dtype, piece in given]
            return Polled([sends, recvs], requests, [Wanted(s, p.nbytes, dtype, tag[dtype]) for s, dtype, p in wanted])

        return self._begin(start)

    # ── MPI's own collectives ────────────────────────────────────────────────────────────────────────────

    @override
    def all_reduce(self, x: Tensor, y: Tensor) -> Wait:
        kind, nbytes = self._kinds.get(y.dtype), y.nbytes
        if kind is not None and 0 < nbytes <= SMALL and y.is_cpu and not self.now.later:
            # As below, for one piece. A small sum takes about as long as a few Python statements.
            mpi, x = self._mpi, x.contiguous()
            at = mpi.buffer.fromaddress
            sent = mpi.IN_PLACE if x is y else [at(x.data_ptr(), nbytes), kind]
            (self._duplicate or self.comm).Allreduce(sent, [at(y.data_ptr(), nbytes), kind])
            return done
        if kind is None or not self.reaches(y):
            return super().all_reduce(x, y)
        if self.now.later:  # x must have been read when this returns
            x = y.copy_(x)
        spare = None
        if not x.is_contiguous():  # not y.copy_(x): MPI wants all ranks to sum in place, or none
            spare = self.scratch.take(x.numel(), like=x)
            x = spare.view(x.shape).copy_(x)
        calls: list[tuple[Any, Any]] = []
        size = PIECE if self.now.later else min(ADDED, PIECE)
        for a, b in zip(self._pieces(x, size), self._pieces(y, size), strict=True):
            calls.append((self._mpi.IN_PLACE if x is y else [a, kind], [b, kind]))
        wait = self._do("Allreduce", calls, y)
        if spare is not None:
            self.scratch.give(spare)  # the call was blocking, so it has been read
        return wait

    @override
    def all_gather(self, x: Tensor | None, row: Tensor, counts: list[int]) -> Wait:
        nbytes, byte = row.nbytes, self._mpi.BYTE
        if not 0 < nbytes <= PIECE or not self.reaches(row):
            return super().all_gather(x, row, counts)
        if not row.is_cpu:
            _settle(row)  # earlier kernels may still use its memory
        at = self._mpi.buffer.fromaddress
        sent = self._mpi.IN_PLACE
        if x is not None:
            sent = [at(x.data_ptr(), x.nbytes), byte] if x.numel() else [None, 0, byte]
        received = [at(row.data_ptr(), nbytes), byte]
        if is_even(counts):
            return self._do("Allgather", [(sent, received)], [x, row])
        sizes = [row.element_size() * count for count in counts]
        received.insert(1, (sizes, [0, *accumulate(sizes[:-1])]))
        return self._do("Allgatherv", [(sent, received)], [x, row])

    @override
    def reduce_scatter_in_order(self, row: Tensor, counts: list[int], out: Tensor) -> Wait:
        nbytes = row.nbytes
        if not (0 < nbytes <= SMALL and is_even(counts) and row.is_cpu) or self.now.later:
            return super().reduce_scatter_in_order(row, counts, out)
        # One call instead of two messages per rank.
        at, byte, terms = self._mpi.buffer.fromaddress, self._mpi.BYTE, torch.empty_like(row)
        (self._duplicate or self.comm).Alltoall(
            [at(row.data_ptr(), nbytes), byte], [at(terms.data_ptr(), nbytes), byte]
        )
        add_up(terms.split_with_sizes(counts), out.view(-1))
        return done

    @override
    def broadcast(self, y: Tensor, src: int) -> Wait:
        mpi, nbytes = self._mpi, y.nbytes
        if 0 < nbytes <= SMALL and y.is_cpu and not self.now.later:  # as below, for one piece
            (self._duplicate or self.comm).Bcast([mpi.buffer.fromaddress(y.data_ptr(), nbytes), mpi.BYTE], src)
            return done
        if not self.reaches(y):
            return super().broadcast(y, src)
        return self._do("Bcast", [([piece, self._mpi.BYTE], src) for piece in self._pieces(y)], y)

    @override
    def reduce(self, y: Tensor, dst: int) -> Wait:
        kind, mpi, nbytes = self._kinds.get(y.dtype), self._mpi, y.nbytes
        if kind is not None and 0 < nbytes <= SMALL and y.is_cpu and not self.now.later:  # as below, for one piece
            memory, comm = [mpi.buffer.fromaddress(y.data_ptr(), nbytes), kind], self._duplicate or self.comm
            if self.rank == dst:
                comm.Reduce(mpi.IN_PLACE, memory, mpi.SUM, dst)
            else:
                comm.Reduce(memory, None, mpi.SUM, dst)
            return done
        if kind is None or not self.reaches(y):
            return super().reduce(y, dst)
        if self.rank == dst:
            calls: list[tuple[Any, ...]] = [(mpi.IN_PLACE, [piece, kind], mpi.SUM, dst) for piece in self._pieces(y)]
        else:
            calls = [([piece, kind], None, mpi.SUM, dst) for piece in self._pieces(y)]
        return self._do("Reduce", calls, y)

    def _do(self, name: str, calls: Iterable[tuple[Any, ...]], memory: object) -> Wait:
        """Call a collective of MPI once for each piece; with `later`, its non-blocking variant."""
        if self.now.later:
            name = "I" + name.lower()
            return self._begin(lambda comm: Polled(memory, [getattr(comm, name)(*call) for call in calls]))
        call = getattr(self._duplicate or self.comm, name)
        for arguments in calls:
            call(*arguments)
        return done

    def _begin(self, start: Callable[[Any], Polled]) -> Wait:
        """Start requests in the library's communicator: with `later`, without waiting for it."""
        wait: Polled | Deferred
        if self._duplicate is None and self.now.later and self.size > 1:
            end_the_job_on_errors()
            self._making.defer(wait := Deferred(start))
            self._duplicate = self._making.comm
        else:
            wait = start(self._duplicate or self.comm)
        if self.now.polls is not None:
            self.now.polls.append(wait.done)
        return wait

    def _pieces(self, x: Tensor, size: int = 0) -> list[Any]:
        """The memory of a contiguous tensor as buffers of mpi4py, of a size that MPI can count."""
        size = size or PIECE
        if not x.is_cpu:
            _settle(x)
        at, here, nbytes = self._mpi.buffer.fromaddress, x.data_ptr(), x.nbytes
        if 0 < nbytes <= size:
            return [at(here, nbytes)]
        return [at(here + i, min(size, nbytes - i)) for i in range(0, nbytes, size)]


def _settle(x: Tensor) -> None:
    """Wait for the current stream of x's device, because MPI does not use PyTorch's streams."""
    stream = current_stream(x.device)
    assert stream is not None
    stream.synchronize()


# ── from a communicator to its engine ────────────────────────────────────────────────────────────────────

#: By the handle of the communicator.
_engines: dict[int, MpiEngine] = {}
#: By the id of the engine's `users`, which is a faster look-up.
_by_identity: dict[int, MpiEngine] = {}
_numbers = count()


def engine_of(group: object) -> MpiEngine | None:
    """Return the engine of a communicator of mpi4py; None for anything else.

    Raises:
        ValueError: it is not an intracommunicator with this process in it, or MPI was initialized for one thread.
    """
    if (known := _by_identity.get(id(group))) is not None and not known._mpi.Is_finalized():
        return known
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
        engine = _engines[group.handle] = _by_identity[id(group)] = MpiEngine(
            group, f"MPI communicator {next(_numbers)}"
        )
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
        del _by_identity[id(engine.users)]
        engine.close()


def _close_all() -> None:
    for handle in list(_engines):
        _close(handle)


def finalize() -> None:
    """End MPI in a process that skips what runs at exit, as those of multiprocessing do."""
    _close_all()
    mpi_library().Finalize()
