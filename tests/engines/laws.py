"""The laws that `diffcoll.engines.engine.Engine` states, as checks that run on every engine.

A law is a generator function. Every rank runs it with its engine and yields pairs (got, expected), which are compared
after the last message, so a wrong value on one rank does not block the others. Data differ on every rank; sizes are
uneven, some zero.
"""

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from functools import reduce as fold
from math import prod
from typing import Any

import properties
import torch
import torch.distributed as dist
from runs import new_group
from torch import Tensor

from diffcoll.core.dtypes import wider
from diffcoll.core.groups import resolve
from diffcoll.engines import c10d, mpi
from diffcoll.engines.engine import Engine, Wait, even_sizes
from diffcoll.engines.messages import MessageEngine
from diffcoll.engines.simulated.engine import LocalEngine
from diffcoll.engines.solo import SoloEngine

Pairs = Iterator[tuple[Any, Any]]
Law = Callable[[Engine], Pairs]

SUMMED = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
]
MOVED = [*SUMMED, torch.bool, torch.complex32, torch.float8_e4m3fn]
#: The value that fills memory before anything is received.
BEFORE = 77
#: Number of elements of a message that no backend sends eagerly.
LARGE = 40_000


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────


def apart(tensors: list[Tensor]) -> list[Tensor]:
    """Each in a separate allocation."""
    return [t.clone() for t in tensors]


def together(tensors: list[Tensor]) -> list[Tensor]:
    """One after the other in one allocation."""
    memory = torch.cat([t.reshape(-1) for t in tensors])
    return [part.view(t.shape) for part, t in zip(memory.split([t.numel() for t in tensors]), tensors, strict=True)]


def backwards(tensors: list[Tensor]) -> list[Tensor]:
    """In one allocation, from the last to the first, with gaps."""
    gap = tensors[0].new_empty(3)
    padded = [part for t in reversed(tensors) for part in (gap, t.reshape(-1))]
    parts = torch.cat(padded).split([p.numel() for p in padded])[1::2]
    return [part.view(t.shape) for part, t in zip(reversed(parts), tensors, strict=True)]


def strides_of_zero(tensors: list[Tensor]) -> list[Tensor]:
    """In dimensions of size 1, as `expand` leaves them."""
    strides = [[k * (n != 1) for n, k in zip(t.shape, t.stride(), strict=True)] for t in tensors]
    return [t.as_strided(t.shape, k) for t, k in zip(apart(tensors), strides, strict=True)]


PLACES = [apart, together, backwards, strides_of_zero]
LAYOUTS = [torch.clone, properties.LAYOUTS["strided"], properties.LAYOUTS["transposed"]]


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Data:
    """The arguments of a primitive."""

    numel: int = 13
    tail: tuple[int, ...] = ()
    scalar: bool = False
    dtype: torch.dtype = torch.float64
    random_bits: bool = False
    seed: int = 0
    place: Callable[[list[Tensor]], list[Tensor]] = apart
    layout: Callable[[Tensor], Tensor] = torch.clone
    in_place: bool = False

    def block(self, engine: Engine, at: int, size: int = 2) -> Tensor:
        """A block of `size` times half of `numel` rows.

        Small integers, whose sums are exact in every dtype, also as imaginary parts; or random bits, including NaNs.
        """
        shape = () if self.scalar else (self.numel * size // 2, *self.tail)
        generator = torch.Generator().manual_seed(1000 * self.seed + at)
        if self.random_bits:
            bits, most = (prod(shape) * self.dtype.itemsize,), 2 if self.dtype == torch.bool else 256
            x = torch.randint(0, most, bits, dtype=torch.uint8, generator=generator).view(self.dtype).view(shape)
        else:
            x, y = torch.randint(0, 9, (2, *shape), generator=generator)
            x = x + 1j * y if self.dtype.is_complex else x
        return x.to(self.dtype).to(engine.control_device)


@dataclass(frozen=True)
class Call:
    """One prepared call of a primitive."""

    start: Callable[[], Wait]
    reads: list[tuple[Tensor, Tensor]]  # tensors it must not modify, and their values
    writes: list[tuple[Tensor, Tensor]]  # its outputs, and their expected values


def put(data: Data, tensors: list[Tensor | None]) -> list[Tensor | None]:
    placed = iter(data.place(given) if (given := [t for t in tensors if t is not None]) else [])
    return [None if t is None else next(placed) for t in tensors]


def fresh(data: Data, tensors: list[Tensor | None]) -> list[Tensor | None]:
    """Memory for tensors like these, filled with other values."""
    before = torch.tensor(BEFORE, dtype=torch.uint8)
    return put(data, [None if t is None else before.to(t).expand(t.shape).contiguous() for t in tensors])


def exchange(engine: Engine, data: Data) -> Call:
    """Blocks of different sizes; some pairs of ranks exchange none."""

    def block(s: int, t: int) -> Tensor | None:
        return None if (s + t) % 4 == 3 else data.block(engine, 10 * s + t, (s + 2 * t + 1) % 3)

    r, n = engine.rank, engine.size
    sent, expected = [block(r, s) for s in range(n)], [block(s, r) for s in range(n)]
    sends, recvs = put(data, sent), fresh(data, expected)
    reads, writes = (list(zip(*both, strict=True)) for both in ((sends, sent), (recvs, expected)))
    if data.in_place:
        recvs[r] = sends[r]
        writes[r] = (recvs[r], expected[r])
        reads.pop(r)
    return Call(
        lambda: engine.exchange(sends, recvs, later(engine)),
        [(t, e) for t, e in reads if t is not None],
        [(t, e) for t, e in writes if t is not None],
    )


def all_gather(engine: Engine, data: Data) -> Call:
    every = [data.block(engine, s, (s + 1) % 3) for s in range(engine.size)]
    mine, (whole, counts) = every[engine.rank], as_row(every)
    (row,), (x,) = fresh(data, [whole]), put(data, [mine])
    if data.in_place:
        row.split(counts)[engine.rank].copy_(mine.view(-1))
    given = None if data.in_place else x
    return Call(lambda: engine.all_gather(given, row, counts, later(engine)), [(x, mine)], [(row, whole)])


def as_row(blocks: list[Tensor]) -> tuple[Tensor, list[int]]:
    return torch.cat([block.view(-1) for block in blocks]), [block.numel() for block in blocks]


def reduce_scatter(engine: Engine, data: Data) -> Call:
    r, n = engine.rank, engine.size
    every = [[data.block(engine, 10 * s + t, (t + 1) % 3) for t in range(n)] for s in range(n)]
    whole, counts = as_row(every[r])
    (row,), (out,) = put(data, [whole]), fresh(data, [every[r][r]])
    total = sum(blocks_of_one[r] for blocks_of_one in every).to(data.dtype)
    return Call(lambda: engine.reduce_scatter(row, counts, out, later(engine)), [(row, whole)], [(out, total)])


def terms(engine: Engine, data: Data) -> list[Tensor]:
    """The tensors of all ranks."""
    return [data.block(engine, s) for s in range(engine.size)]


def all_reduce(engine: Engine, data: Data) -> Call:
    every = terms(engine, data)
    mine, total = every[engine.rank], sum(every).to(data.dtype)
    if data.in_place:
        (y,) = put(data, [mine])
        return Call(lambda: engine.all_reduce(y, y, later(engine)), [], [(y, total)])
    x, (y,) = data.layout(mine), fresh(data, [mine])
    return Call(lambda: engine.all_reduce(x, y, later(engine)), [(x, mine)], [(y, total)])


def broadcast(engine: Engine, data: Data, src: int = -1) -> Call:
    every, src = terms(engine, data), src % engine.size
    (y,) = put(data, [every[engine.rank]])
    return Call(lambda: engine.broadcast(y, src, later(engine)), [], [(y, every[src])])


def reduce(engine: Engine, data: Data, dst: int = -1) -> Call:
    every, dst = terms(engine, data), dst % engine.size
    (y,) = put(data, [every[engine.rank]])
    start = partial(engine.reduce, y, dst, later(engine))
    is_dst = engine.rank == dst
    return Call(start, [(y, every[engine.rank])] * (not is_dst), [(y, sum(every).to(data.dtype))] * is_dst)


MOVES = [exchange, all_gather, broadcast]
SUMS = [reduce_scatter, all_reduce, reduce]
ONE_COLUMN = Data(numel=2, tail=(1,), place=strides_of_zero)
SHAPES = [Data(), Data(tail=(3,)), Data(scalar=True), Data(numel=2), ONE_COLUMN, Data(numel=0), Data(tail=(0, 2))]


def later(engine: Engine) -> bool:
    """Whether laws are checked with `later` on this engine."""
    return getattr(engine, "with_later", False)


def like(engine: Engine, other: Engine) -> Engine:
    """Return another engine, on which laws are checked as on the first."""
    other.with_later = later(engine)
    return other


def outcome(primitive: Callable[..., Call], engine: Engine, data: Data) -> list[tuple[Tensor, Tensor]]:
    call = primitive(engine, data)
    call.start()()
    return call.writes


def word(engine: Engine, value: int = 0) -> Tensor:
    """A tensor of one integer."""
    return torch.tensor([int(value)], device=engine.control_device)


def of_all(engine: Engine, value: int) -> list[int]:
    """Return the value of every rank."""
    found = torch.cat([word(engine) for _ in range(engine.size)])
    engine.all_gather(word(engine, value), found, [1] * engine.size)()
    return found.tolist()


# ── each primitive ───────────────────────────────────────────────────────────────────────────────────────


def every(engine: Engine) -> list[Callable[..., Call]]:
    """Return all primitives, with every root."""
    roots = range(engine.size)
    rooted = [partial(broadcast, src=src) for src in roots] + [partial(reduce, dst=dst) for dst in roots]
    return [exchange, all_gather, reduce_scatter, all_reduce, *rooted]


def every_output_is_filled_in_every_shape(engine: Engine) -> Pairs:
    for primitive in every(engine):
        for data in SHAPES:
            yield from outcome(primitive, engine, data)


def every_dtype_is_moved(engine: Engine) -> Pairs:
    for dtype in MOVED:
        for primitive in MOVES:
            yield from outcome(primitive, engine, Data(dtype=dtype, random_bits=True))


def every_number_is_summed(engine: Engine) -> Pairs:
    for dtype in SUMMED:
        for primitive in SUMS:
            yield from outcome(primitive, engine, Data(dtype=dtype))


def half_precisions_are_summed_in_float32(engine: Engine) -> Pairs:
    """Unless the backend sums them itself. One rank has a number to which adding 1 changes nothing."""
    r, n = engine.rank, engine.size
    for dtype, large in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        every = torch.ones(n, n, device=engine.control_device).fill_diagonal_(large)
        x, total = every[r].to(dtype), every.sum(0).to(dtype)
        if isinstance(engine, c10d.C10dEngine) and engine._runs_natively("all_reduce", x, adds=True):
            continue
        yield from sums(engine, x, total, [1] * n)


def sums(engine: Engine, x: Tensor, total: Tensor, counts: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Run all primitives that add up; expect this total."""
    r, last = engine.rank, engine.size - 1
    engine.all_reduce(x, y := torch.empty_like(total), later(engine))()
    engine.reduce_scatter(x.view(-1), counts, out := total.new_empty(counts[r]), later(engine))()
    engine.reduce(reduced := x.clone(), last, later(engine))()
    return [(y, total), (out, total.view(-1).split(counts)[r]), (reduced, total if r == last else x)]


def unordered(s: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of rank s, whose sum depends on the order."""
    own = torch.Generator().manual_seed(s)
    x = torch.randn(shape, generator=own) * 10.0 ** torch.randint(-3, 4, shape, generator=own)
    return x.to(dtype).to(device)


def all_reduce_is_bitwise_equal_on_all_ranks(engine: Engine) -> Pairs:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        x = unordered(engine.rank, (101,), dtype, engine.control_device)
        engine.all_reduce(x, y := torch.empty_like(x), later(engine))()
        found = y.new_empty(engine.size * y.numel())
        engine.all_gather(y, found, [y.numel()] * engine.size)()
        yield from ((other, y) for other in found.split(y.numel()))


def default_sums_are_added_in_the_order_of_ranks(engine: Engine) -> Pairs:
    """So are those of simulated ranks. Half precisions in float32. Every size from 0-d to one that is not small."""
    if type(engine).all_reduce is not Engine.all_reduce and not isinstance(engine, LocalEngine):
        return
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64):
        for shape in ((), (7,), (3, 11), (LARGE,)):
            xs = [unordered(s, shape, dtype, engine.control_device) for s in range(engine.size)]
            total = fold(torch.add, [x.to(wider(dtype)) for x in xs]).to(dtype)
            yield from sums(engine, xs[engine.rank], total, list(even_sizes(total.numel(), engine.size))[::-1])


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────


def an_output_may_be_an_input_where_that_is_allowed(engine: Engine) -> Pairs:
    for data in SHAPES:
        for primitive in (all_reduce, all_gather, exchange):
            yield from outcome(primitive, engine, replace(data, in_place=True))
    every = terms(engine, Data())
    found = [torch.empty_like(x) for x in every]
    engine.exchange([every[engine.rank]] * engine.size, found, later(engine))()
    yield from zip(found, every, strict=True)


def nothing_but_the_outputs_is_written(engine: Engine) -> Pairs:
    """Neither the inputs nor the memory around the outputs is modified."""
    memory = []

    def guarded(tensors: list[Tensor]) -> list[Tensor]:
        found = []
        for t in tensors:
            whole = torch.full((t.numel() + 16,), BEFORE, dtype=t.dtype, device=t.device)
            whole[8:-8] = t.reshape(-1)
            memory.append(whole)
            found.append(whole[8:-8].view(t.shape))
        return found

    for data in (Data(place=guarded), Data(tail=(3,), place=guarded), Data(numel=0, place=guarded)):
        for primitive in every(engine):
            call = primitive(engine, data)
            call.start()()
            yield from call.reads
    for whole in memory:
        edges = torch.cat([whole[:8], whole[-8:]])
        yield edges, torch.full_like(edges, BEFORE)


def all_reduce_has_read_x_when_it_returns(engine: Engine) -> Pairs:
    """With `later`, x may be modified after the call; the result is right after the Wait."""
    for layout in LAYOUTS if later(engine) else []:
        call = all_reduce(engine, Data(numel=LARGE, tail=(3,), layout=layout))
        wait = call.start()
        call.reads[0][0].fill_(BEFORE)
        wait()
        yield from call.writes


def memory_is_kept_until_the_wait(engine: Engine) -> Pairs:
    """Also if the caller drops its references to the tensors, and other calls and allocations follow."""
    waits, expected = [], []
    for seed in range(6):
        for primitive in (exchange, reduce_scatter, reduce, all_reduce):
            call = primitive(engine, Data(numel=60 if seed % 2 else LARGE // 8, seed=seed))
            waits.append(call.start())
            expected += call.writes
            del call
            [torch.full((LARGE // 8,), float(BEFORE), dtype=torch.float64) for _ in range(3)]
    wait_for(waits)
    yield from expected


def memory_layout_is_each_ranks_own(engine: Engine) -> Pairs:
    """Ranks whose tensors have different memory layouts make the same call."""
    for turn in range(12):
        i = turn + engine.rank
        place, layout = PLACES[i % len(PLACES)], LAYOUTS[i % len(LAYOUTS)]
        data = Data(tail=(3,) if turn % 2 else (1,), numel=(2, 13, 1)[turn % 3], place=place, layout=layout, seed=turn)
        for primitive in (*MOVES, *SUMS):
            yield from outcome(primitive, engine, data)
        yield from outcome(all_gather, engine, replace(data, in_place=True))


def calls_without_data_need_no_data_on_other_ranks(engine: Engine) -> Pairs:
    """A rank whose blocks are all empty takes part like the others; the next call does not get its messages."""
    n, r = engine.size, engine.rank
    for empty in range(n):

        def block(s: int, t: int, empty: int = empty) -> Tensor:
            return torch.full((0 if s == empty else 3 + s,), 10.0 * s + t, device=engine.control_device)

        for seed in range(2):
            got = [torch.empty_like(block(s, r)) for s in range(n)]
            engine.exchange([block(r, s) for s in range(n)], got, later(engine))()
            yield from ((b, block(s, r)) for s, b in enumerate(got))
            whole, counts = as_row([block(s, s) for s in range(n)])
            engine.all_gather(block(r, r), row := torch.empty_like(whole), counts, later(engine))()
            yield row, whole
            yield from outcome(all_reduce, engine, Data(numel=0 if seed else 4, seed=empty))


# ── waits ────────────────────────────────────────────────────────────────────────────────────────────────


def started(engine: Engine, rounds: int) -> tuple[list[Wait], list[tuple[Tensor, Tensor]]]:
    """Start several calls of every primitive, all in flight at once; return the waits and all outputs."""
    waits, writes = [], []
    for seed in range(rounds):
        for primitive in (*MOVES, *SUMS):
            call = primitive(engine, Data(numel=LARGE // 4 if seed else 13, seed=seed))
            waits.append(call.start())
            writes += call.writes
    return waits, writes


def wait_for(waits: list[Wait]) -> None:
    for wait in waits:
        wait()


def waits_may_be_called_in_any_order(engine: Engine) -> Pairs:
    waits, writes = started(engine, 3)
    random.Random(engine.rank).shuffle(waits)
    wait_for(waits)
    yield from writes


def a_wait_sends_no_messages(engine: Engine) -> Pairs:
    """The other ranks complete their calls while one has not yet waited."""
    for late in range(engine.size):
        waits, writes = started(engine, 2)
        if engine.rank != late:
            wait_for(waits)
        yield of_all(engine, engine.rank), list(range(engine.size))
        if engine.rank == late:
            wait_for(waits)
        yield from writes


def a_wait_may_be_called_in_another_thread(engine: Engine) -> Pairs:
    waits, writes = started(engine, 2)
    if isinstance(engine, LocalEngine):  # a simulated rank is one thread
        wait_for(waits)
    else:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(wait_for, waits).result()
    yield from writes


# ── groups ───────────────────────────────────────────────────────────────────────────────────────────────


def crosswise(one: Engine, other: Engine) -> list[tuple[Any, Any]]:
    """Start calls in both, on half of the ranks in the opposite order; without `later` some wait for their peers."""
    primitives = MOVES if later(one) else [exchange]
    calls = [[primitive(engine, Data(seed=i)) for primitive in primitives] for i, engine in enumerate((one, other))]
    waits = {i: [call.start() for call in calls[i]] for i in ([0, 1] if one.rank % 2 else [1, 0])}
    wait_for([*waits[0], *waits[1]])
    return [pair for call in (*calls[0], *calls[1]) for pair in call.writes]


def a_twin_has_the_same_ranks_and_messages_of_its_own(engine: Engine) -> Pairs:
    """Also if neither group has been used before."""
    group = None if isinstance(engine, SoloEngine) else new_group(list(range(engine.size)))
    other = resolve(group, "test")
    twin = other.twin()
    yield (twin.rank, twin.size), (engine.rank, engine.size)
    like(engine, other), like(engine, twin)
    yield from crosswise(other, twin)
    yield from crosswise(engine, twin)
    yield of_all(twin, 3), [3] * twin.size
    twin.close()
    twins = [like(engine, engine.twin()) for _ in range(2)]
    yield from crosswise(*twins)
    yield from crosswise(engine, twins[1])
    for twin in twins:
        twin.close()


def closing_a_twin_leaves_its_engine_as_it_was(engine: Engine) -> Pairs:
    for _ in range(2):
        twin = engine.twin()
        yield of_all(twin, engine.rank), list(range(engine.size))
        twin.close()
        yield engine.ended, False
        for primitive in (*MOVES, *SUMS):
            yield from outcome(primitive, engine, Data())


def a_group_has_ended_when_its_backend_has_destroyed_it(engine: Engine) -> Pairs:
    yield engine.ended, False
    if isinstance(engine, SoloEngine):
        return
    group = new_group(list(range(engine.size)))
    other = resolve(group, "test")
    yield other.ended, False
    yield of_all(other, 1), [1] * engine.size
    if isinstance(group, dist.ProcessGroup):
        dist.destroy_process_group(group)
    elif hasattr(group, "Free"):  # of MPI
        group.Free()
    yield other.ended, not isinstance(other, LocalEngine)  # the rank ends it
    yield engine.ended, False


# ── facts ────────────────────────────────────────────────────────────────────────────────────────────────


def connect_may_be_called_again(engine: Engine) -> Pairs:
    """Afterwards the first call may be a message between two ranks only."""
    for _ in range(2):
        engine.connect(engine.control_device)
        last, sends, recvs = engine.size - 1, [None] * engine.size, [None] * engine.size
        if engine.rank == 0:
            sends[last] = word(engine, 5)
        if engine.rank == last:
            recvs[0] = word(engine)
        engine.exchange(sends, recvs, later(engine))()
        yield recvs[0], word(engine, 5) if engine.rank == last else None


def control_device_is_one_that_the_engine_moves(engine: Engine) -> Pairs:
    yield engine.devices is None or engine.control_device.type in engine.devices, True
    numbers = torch.tensor([2**40 + engine.rank, -1], device=engine.control_device)
    found = numbers.new_empty(2 * engine.size)
    engine.all_gather(numbers, found, [2] * engine.size)()
    yield found.tolist(), [number for s in range(engine.size) for number in (2**40 + s, -1)]


def control_has_the_same_ranks(engine: Engine) -> Pairs:
    control = engine.control()
    yield (control.rank, control.size), (engine.rank, engine.size)
    yield of_all(control, engine.rank), list(range(engine.size))
    yield engine.control() is control, True


def small_is_equal_on_all_ranks(engine: Engine) -> Pairs:
    size = engine.small(engine.control_device.type)
    yield of_all(engine, size), [size] * engine.size
    yield size >= 0, True


def overlaps_is_equal_on_all_ranks(engine: Engine) -> Pairs:
    for dtype in SUMMED:
        x = Data(numel=4, tail=(3,), dtype=dtype).block(engine, engine.rank)
        own = engine.overlaps(LAYOUTS[engine.rank % len(LAYOUTS)](x))
        yield of_all(engine, own), [own] * engine.size


def what_overlaps_needs_no_further_call(engine: Engine) -> Pairs:
    """Rank 0 starts before the other ranks; they get the result before rank 0 waits."""
    call = all_reduce(engine, Data(numel=LARGE))
    if not (later(engine) and engine.overlaps(call.writes[0][0])):
        call.start()()
        yield from call.writes
        return
    twin = engine.twin()
    if engine.rank == 0:
        wait = call.start()
        twin.broadcast(word(engine), 0)()
    else:
        twin.broadcast(word(engine), 0)()
        wait = call.start()
        wait()
    yield of_all(twin, 1), [1] * engine.size
    if engine.rank == 0:
        wait()
    yield from call.writes
    twin.close()


#: Every generator function of this file is a law.
ALL: list[Law] = [f for f in list(globals().values()) if inspect.isgeneratorfunction(f) and f.__module__ == __name__]
#: Laws of groups, and of the facts that engines report; the others are about calls in one group.
GROUPS = ALL[ALL.index(a_twin_has_the_same_ranks_and_messages_of_its_own) :]
CALLS = ALL[: -len(GROUPS)]


# ── on one rank ──────────────────────────────────────────────────────────────────────────────────────────


def broken(law: Law, engine: Engine, later: bool) -> str:
    """Return how a law is broken on this rank; "" if it holds.

    An error is raised: other ranks wait for messages that this one has not sent, and would hang in the next law.
    """
    engine.with_later = later
    try:
        found = list(law(engine))
    except Exception as error:
        raise AssertionError(f"{law.__name__}: {type(error).__name__}: {error}") from error
    for i, (got, expected) in enumerate(found):
        if not same(got, expected):
            return f"rank {engine.rank}, comparison {i}: got {got}, expected {expected}"
    return ""


def same(got: object, expected: object) -> bool:
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        return bool(got == expected)
    alike = (got.shape, got.dtype, got.device) == (expected.shape, expected.dtype, expected.device)
    got, expected = (t.clone(memory_format=torch.contiguous_format).view(-1) for t in (got, expected))
    return alike and (not len(got) or torch.equal(got.view(torch.uint8), expected.view(torch.uint8)))


@contextmanager
def small_pieces() -> Iterator[None]:
    """Lower all thresholds of the backends below the message sizes, and LARGE, so that messages stay small."""
    global LARGE
    before = LARGE, c10d.SMALL, mpi.TOGETHER, mpi.SMALL, mpi.PIECE, mpi.ADDED
    LARGE, c10d.SMALL, mpi.TOGETHER, mpi.SMALL, mpi.PIECE, mpi.ADDED = 96, {}, 0, 0, 16, 16
    try:
        yield
    finally:
        LARGE, c10d.SMALL, mpi.TOGETHER, mpi.SMALL, mpi.PIECE, mpi.ADDED = before


def by_default(engine: Engine) -> type[Engine]:
    """The engine's class with the default primitives, which are built on `exchange`."""
    names = ("all_gather", "broadcast", "reduce_scatter", "all_reduce", "reduce", "overlaps")
    return type("Default", (type(engine),), {name: getattr(Engine, name) for name in names})


def hold(engine: Engine, chosen: Sequence[Law] = ALL) -> dict[str, str]:
    """Check every law, with and without `later`; on real processes also in small pieces, by default, and via the CPU.

    Return how each law is broken on this rank, by its name; "" if it holds.
    """
    found = dict.fromkeys([law.__name__ for law in chosen], "")

    def note(how: str, laws: Sequence[Law], laters: Sequence[bool] = (False, True)) -> None:
        for later in laters:
            for law in laws:
                if problem := broken(law, engine, later):
                    found[law.__name__] += f"{how}, later={later}: {problem}\n"

    note("as it is", chosen)
    own = type(engine)
    if issubclass(own, MessageEngine):
        with small_pieces():
            note("in small pieces", CALLS)
        engine.__class__ = by_default(engine)
        note("by default", CALLS, [True])
        engine.__class__ = type("ThroughCpu", (own,), {"reaches": lambda self, x: False})
        note("through the CPU", CALLS, [True])
    engine.__class__ = own
    return found
