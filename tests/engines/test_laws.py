"""The laws of engines: each holds on every engine, and each fails for an engine that breaks it."""

import functools

import laws
import pytest
import torch
from runs import mpi, new_group, rules

from diffcoll.core.groups import resolve
from diffcoll.engines import c10d
from diffcoll.engines.engine import done
from diffcoll.engines.scratch import NEW_BYTES
from diffcoll.engines.simulated.engine import LocalEngine
from diffcoll.engines.solo import SoloEngine
from diffcoll.testing import spawn

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")
TIMEOUT = 100


def on_rank(r, chosen=laws.ALL):
    return laws.hold(resolve(None, "test"), chosen)


def on_rank_as_nccl(r):
    """gloo with native collectives for all primitives, as on NCCL. Tests which calls are made, not a GPU's results."""
    engine = resolve(None, "test")
    names, own = {"cpu": "other"}, c10d.C10dEngine.twin

    def twin(self):  # torch cannot create a group of that backend
        self.backends = {"cpu": "gloo"}
        found = own(self)
        self.backends = found.backends = names
        return found

    engine.backends, c10d.C10dEngine.twin = names, twin
    c10d.SUMS["other"] = c10d.SUMS["gloo"]
    return laws.hold(engine)


def by_default_on_rank(r, chosen):
    engine = resolve(None, "test")
    engine.__class__ = laws.by_default(engine)
    return laws.hold(engine, chosen)


def simulated(n, on_rank=on_rank):
    """Run each law in a separate simulation, because an error ends the simulation."""
    found = [{} for _ in range(n)]
    for law in laws.ALL:
        for r, of_rank in enumerate(rules(functools.partial(on_rank, chosen=[law]), range(n))):
            found[r] |= of_rank
    return found


#: Numbers of ranks, and a function that checks all laws on that many; real processes in one run.
ENGINES = {
    "solo": ([1], lambda n: [laws.hold(SoloEngine())]),
    "local": ([1, 2, 3], simulated),
    "local-by-default": ([1, 2, 3], functools.partial(simulated, on_rank=by_default_on_rank)),
    "gloo": ([1, 2, 3], lambda n: spawn(on_rank, range(n), timeout=TIMEOUT)),
    "gloo-as-nccl": ([3], lambda n: spawn(on_rank_as_nccl, range(n), timeout=TIMEOUT)),
    "mpi": ([1, 2, 3], lambda n: mpi(on_rank, range(n), timeout=TIMEOUT)),
    "nccl": ([1], lambda n: spawn(on_rank, range(n), backend="nccl", timeout=TIMEOUT)),  # one rank per GPU
}
#: Two ranks on a backend take as long as three.
MARKS = {
    "nccl-1": [pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
    **{name: [pytest.mark.slow] for name in ("gloo-2", "mpi-2")},
}
EACH = [(name, n) for name, (sizes, _) in ENGINES.items() for n in sizes]
RUNS = [pytest.param(name, n, id=f"{name}-{n}", marks=MARKS.get(f"{name}-{n}", [])) for name, n in EACH]


@pytest.mark.parametrize(("name", "n"), RUNS)
def test_laws_hold(name, n):
    """All laws in one run: how each is broken on each rank, or the error that ended the run, which names the law."""
    for of_rank in ENGINES[name][1](n):
        assert list(of_rank) == [law.__name__ for law in laws.ALL]
        assert {law: how for law, how in of_rank.items() if how} == {}


# ── planted faults ───────────────────────────────────────────────────────────────────────────────────────


class Faulty(LocalEngine):
    """A simulated engine with one fault, which its twins have too."""

    def twin(self):
        twin = super().twin()
        twin.__class__ = type(self)
        return twin


class DoesNotFillTheOwnBlock(Faulty):
    def exchange(self, sends, recvs, later=False):
        return super().exchange(sends, [None if s == self.rank else b for s, b in enumerate(recvs)])


class DoesNotGatherTheOwnBlock(Faulty):
    def all_gather(self, x, row, counts, later=False):
        parts = row.split(counts)
        x = parts[self.rank] if x is None else x.view(-1)
        return self.exchange(
            *[[None if s == self.rank else b for s, b in enumerate(bs)] for bs in ([x] * self.size, parts)]
        )


class ScattersTheSumOfTheOthers(Faulty):
    def reduce_scatter(self, row, counts, out, later=False):
        super().reduce_scatter(row, counts, out)()
        out -= row.split(counts)[self.rank].view(out.shape)
        return done


class DropsTheRemainder(Faulty):
    def all_reduce(self, x, y, later=False):
        parts = (x.numel() // self.size) * self.size
        whole, z = x.reshape(-1)[:parts], torch.empty(parts, dtype=x.dtype)
        super().all_reduce(whole, z)()
        y.copy_(x).view(-1)[:parts] = z
        return done


class BroadcastsFromRank0(Faulty):
    def broadcast(self, y, src, later=False):
        return super().broadcast(y, 0, later)


class ReducesToRank0(Faulty):
    def reduce(self, y, dst, later=False):
        return super().reduce(y, 0, later)


class MovesFloats(Faulty):
    def exchange(self, sends, recvs, later=False):
        landing = [None if b is None else b.to(torch.float32) for b in recvs]
        wait = super().exchange([None if b is None else b.to(torch.float32) for b in sends], landing)

        def finish():
            wait()
            for b, landed in zip(recvs, landing, strict=True):
                if b is not None:
                    b.copy_(landed)

        return finish


class SumsRealParts(Faulty):
    def reduce_scatter(self, row, counts, out, later=False):
        if not out.is_complex():
            return super().reduce_scatter(row, counts, out)
        total = torch.empty(out.shape, dtype=out.dtype.to_real())
        super().reduce_scatter(row.real.contiguous(), counts, total)()
        out.copy_(total)
        return done


class StacksAndSums(Faulty):
    """Every rank sums all tensors in the order given by `order`, in the dtype of x."""

    def order(self, terms):
        return terms

    def all_reduce(self, x, y, later=False):
        found = y.new_empty(self.size * y.numel())
        self.all_gather(x.contiguous(), found, [y.numel()] * self.size)()
        first, *rest = self.order(list(found.view(self.size, *y.shape)))
        y.copy_(first)
        for term in rest:
            y += term
        return done


class SumsFromItsOwnRank(StacksAndSums):
    def order(self, terms):
        return terms[self.rank :] + terms[: self.rank]


class AddsFromTheLastRank(StacksAndSums):
    def order(self, terms):
        return terms[::-1]


class ClearsItsOutput(Faulty):
    def all_reduce(self, x, y, later=False):
        y.zero_()
        return super().all_reduce(x, y, later)


class WritesPartialSums(Faulty):
    def reduce(self, y, dst, later=False):
        self.all_reduce(y, y)()
        return done


class WritesBeforeItsOutput(Faulty):
    def broadcast(self, y, src, later=False):
        wait = super().broadcast(y, src, later)
        if y.storage_offset():
            y.as_strided((1,), (1,), y.storage_offset() - 1).zero_()
        return wait


class ReadsLate(Faulty):
    def all_reduce(self, x, y, later=False):
        if x is y or not x.is_contiguous():
            return super().all_reduce(x, y, later)
        found = [torch.empty_like(y) for _ in range(self.size)]
        wait = self.exchange([x] * self.size, found)
        return lambda: (wait(), y.copy_(sum(found).to(y.dtype)))


class GivesMemoryBackAtOnce(Faulty):
    def exchange(self, sends, recvs, later=False):
        lent = [None if b is None else self.scratch.take(NEW_BYTES + b.numel(), like=b) for b in sends]
        places = zip(lent, sends, strict=True)
        copies = [None if b is None else memory[: b.numel()].view(b.shape).copy_(b) for memory, b in places]
        for memory in lent:
            if memory is not None:
                self.scratch.give(memory)
        return super().exchange(copies, recvs, later)


class SendsMoreIfNotContiguous(Faulty):
    def all_reduce(self, x, y, later=False):
        if not x.is_contiguous():
            self.broadcast(torch.zeros(1), 0)()
        return super().all_reduce(x, y, later)


class SkipsCallsWithoutDataOfItsOwn(Faulty):
    def exchange(self, sends, recvs, later=False):
        if any(b is not None and b.numel() for b in sends) or self.size == 1:
            return super().exchange(sends, recvs, later)
        return done


class WaitsInTheOrderOfCalls(Faulty):
    def exchange(self, sends, recvs, later=False):
        received = [None if b is None else torch.empty_like(b) for b in recvs]
        wait = super().exchange(sends, received, later)

        def first():
            wait()
            for into, block in zip(recvs, received, strict=True):
                if into is not None:
                    into.copy_(block)

        queue = self.__dict__.setdefault("queue", [])
        queue.append(first)
        return lambda: queue.pop(0)()


class StartsInTheWait(Faulty):
    def exchange(self, sends, recvs, later=False):
        return lambda: LocalEngine.exchange(self, sends, recvs)()


class IsItsOwnTwin(Faulty):
    def twin(self):
        return self


class ClosesItself(Faulty):
    closed = False
    ended = property(lambda self: self.closed)

    def twin(self):
        twin = super().twin()
        twin.close = lambda: setattr(self, "closed", True)
        return twin


class HasAlwaysEnded(Faulty):
    ended = True


class ConnectsFromRank0(Faulty):
    def connect(self, device):
        if self.rank == 0:
            self.all_reduce(torch.zeros(1), torch.zeros(1))()


class ControlsFromWhereItMovesNothing(Faulty):
    devices = ("cuda",)


class ControlsInAnotherOrder(Faulty):
    def control(self):
        return resolve(new_group([*range(self.size)][::-1]), "test")


class IsSmallByRank(Faulty):
    def small(self, device):
        return self.rank


class OverlapsByLayout(Faulty):
    def overlaps(self, x):
        return x.is_contiguous()


class SaysThatItOverlaps(Faulty):
    def all_reduce(self, x, y, later=False):
        super().all_reduce(x, y, later)()  # blocks until the other ranks have called it
        return done

    def overlaps(self, x):
        return True


FAULTS = [
    (laws.exchange_fills_every_block, DoesNotFillTheOwnBlock),
    (laws.all_gather_gives_every_rank_all_blocks, DoesNotGatherTheOwnBlock),
    (laws.reduce_scatter_gives_every_rank_its_sum, ScattersTheSumOfTheOthers),
    (laws.all_reduce_gives_every_rank_the_sum, DropsTheRemainder),
    (laws.broadcast_gives_every_rank_the_tensor_of_src, BroadcastsFromRank0),
    (laws.reduce_gives_dst_the_sum, ReducesToRank0),
    (laws.every_dtype_is_moved, MovesFloats),
    (laws.every_number_is_summed, SumsRealParts),
    (laws.half_precisions_are_summed_in_float32, StacksAndSums),
    (laws.all_reduce_is_bitwise_equal_on_all_ranks, SumsFromItsOwnRank),
    (laws.default_sums_are_added_in_the_order_of_ranks, AddsFromTheLastRank),
    (laws.an_output_may_be_an_input_where_that_is_allowed, ClearsItsOutput),
    (laws.nothing_but_the_outputs_is_written, WritesPartialSums),
    (laws.nothing_but_the_outputs_is_written, WritesBeforeItsOutput),
    (laws.all_reduce_has_read_x_when_it_returns, ReadsLate),
    (laws.memory_is_kept_until_the_wait, GivesMemoryBackAtOnce),
    (laws.memory_layout_is_each_ranks_own, SendsMoreIfNotContiguous),
    (laws.calls_without_data_need_no_data_on_other_ranks, SkipsCallsWithoutDataOfItsOwn),
    (laws.waits_may_be_called_in_any_order, WaitsInTheOrderOfCalls),
    (laws.a_wait_sends_no_messages, StartsInTheWait),
    (laws.a_twin_has_the_same_ranks_and_messages_of_its_own, IsItsOwnTwin),
    (laws.closing_a_twin_leaves_its_engine_as_it_was, ClosesItself),
    (laws.a_group_has_ended_when_its_backend_has_destroyed_it, HasAlwaysEnded),
    (laws.connect_may_be_called_again, ConnectsFromRank0),
    (laws.control_device_is_one_that_the_engine_moves, ControlsFromWhereItMovesNothing),
    (laws.control_has_the_same_ranks, ControlsInAnotherOrder),
    (laws.small_is_equal_on_all_ranks, IsSmallByRank),
    (laws.overlaps_is_equal_on_all_ranks, OverlapsByLayout),
    (laws.what_overlaps_needs_no_further_call, SaysThatItOverlaps),
]


@pytest.mark.parametrize(("law", "fault"), FAULTS, ids=lambda o: o.__name__)
def test_a_planted_fault_is_detected(law, fault):
    found = set()

    def body(r):
        engine = resolve(None, "test")
        engine.__class__ = fault
        for later in (False, True):
            found.add(laws.broken(law, engine, later))

    try:
        rules(body, range(3))
    except Exception as error:
        found.add(str(error))
    assert found - {""}


def test_every_law_has_a_planted_fault():
    of_one_thread = {laws.a_wait_may_be_called_in_another_thread}  # which simulated ranks are
    assert {law for law, _ in FAULTS} == set(laws.ALL) - of_one_thread
    assert len(set(laws.ALL)) == len(laws.ALL)
