"""The laws of engines: each holds on every engine, and each fails for an engine that breaks it."""

import functools

import laws
import pytest
import torch
from runs import mpi, new_group, rules

from diffcoll.core.groups import resolve
from diffcoll.engines import c10d
from diffcoll.engines.engine import done
from diffcoll.engines.simulated.engine import LocalEngine
from diffcoll.engines.solo import SoloEngine
from diffcoll.testing import spawn

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")
TIMEOUT = 100
#: Memory of an engine that breaks a law, by the rank that it sends to.
LENT = {}


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
    c10d.SUMS["other"], c10d.SMALL["other"] = c10d.SUMS["gloo"], c10d.SMALL["nccl"]
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

#: Laws, and simulated engines that break them.
FAULTS = []


class Faulty(LocalEngine):
    """A simulated engine with one fault, which its twins have too."""

    def twin(self):
        twin = super().twin()
        twin.__class__ = type(self)
        return twin


def plant(law, **members):
    FAULTS.append((law, type(f"Faulty_{'_'.join(members)}", (Faulty,), members)))


def breaks(law, name, **members):
    """Plant a method of this name, which is called with the right one as its second argument."""

    def decorator(fault):
        def method(engine, *arguments):
            return fault(engine, functools.partial(getattr(LocalEngine, name), engine), *arguments)

        plant(law, **{name: method}, **members)
        return fault

    return decorator


@breaks(laws.every_output_is_filled_in_every_shape, "exchange")
def does_not_fill_its_own_block(engine, exchange, sends, recvs, *later):
    return exchange(sends, [None if s == engine.rank else b for s, b in enumerate(recvs)])


@breaks(laws.every_output_is_filled_in_every_shape, "all_reduce")
def drops_the_remainder(engine, all_reduce, x, y, *later):
    parts = (x.numel() // engine.size) * engine.size
    whole, z = x.reshape(-1)[:parts], torch.empty(parts, dtype=x.dtype)
    all_reduce(whole, z)()
    y.copy_(x).view(-1)[:parts] = z
    return done


@breaks(laws.every_output_is_filled_in_every_shape, "broadcast")
def broadcasts_from_rank_0(engine, broadcast, y, src, *later):
    return broadcast(y, 0, *later)


def copies_in_the_wait(wait, received, recvs):
    pairs = [(b, got) for b, got in zip(recvs, received, strict=True) if b is not None]
    return lambda: (wait(), [b.copy_(got) for b, got in pairs])


@breaks(laws.every_dtype_is_moved, "exchange")
def moves_floats(engine, exchange, sends, recvs, *later):
    sent, received = ([None if b is None else b.to(torch.float32) for b in blocks] for blocks in (sends, recvs))
    return copies_in_the_wait(exchange(sent, received), received, recvs)


@breaks(laws.every_number_is_summed, "reduce_scatter")
def sums_real_parts(engine, reduce_scatter, row, counts, out, *later):
    if not out.is_complex():
        return reduce_scatter(row, counts, out)
    total = torch.empty(out.shape, dtype=out.dtype.to_real())
    reduce_scatter(row.real.contiguous(), counts, total)()
    out.copy_(total)
    return done


def stacks_and_sums(order):
    """Return a method by which every rank sums all tensors in an order that depends on rank and size, in x's dtype."""

    def all_reduce(engine, x, y, *later):
        found = y.new_empty(engine.size * y.numel())
        engine.all_gather(x.contiguous(), found, [y.numel()] * engine.size)()
        terms = found.view(engine.size, *y.shape)
        y.copy_(functools.reduce(torch.add, [terms[s] for s in order(engine.rank, engine.size)]))
        return done

    return all_reduce


plant(laws.half_precisions_are_summed_in_float32, all_reduce=stacks_and_sums(lambda r, n: range(n)))
plant(laws.all_reduce_is_bitwise_equal_on_all_ranks, all_reduce=stacks_and_sums(lambda r, n: (*range(r, n), *range(r))))
plant(laws.default_sums_are_added_in_the_order_of_ranks, all_reduce=stacks_and_sums(lambda r, n: range(n)[::-1]))


@breaks(laws.an_output_may_be_an_input_where_that_is_allowed, "all_reduce")
def clears_its_output(engine, all_reduce, x, y, *later):
    y.zero_()
    return all_reduce(x, y, *later)


@breaks(laws.nothing_but_the_outputs_is_written, "reduce")
def writes_partial_sums(engine, reduce, y, dst, *later):
    engine.all_reduce(y, y)()
    return done


@breaks(laws.nothing_but_the_outputs_is_written, "broadcast")
def writes_before_its_output(engine, broadcast, y, src, *later):
    if y.storage_offset():
        y.as_strided((1,), (1,), y.storage_offset() - 1).zero_()
    return broadcast(y, src, *later)


@breaks(laws.all_reduce_has_read_x_when_it_returns, "all_reduce")
def reads_late(engine, all_reduce, x, y, *later):
    if x is y or not x.is_contiguous():
        return all_reduce(x, y, *later)
    found = [torch.empty_like(y) for _ in range(engine.size)]
    wait = engine.exchange([x] * engine.size, found)
    return lambda: (wait(), y.copy_(sum(found).to(y.dtype)))


@breaks(laws.memory_is_kept_until_the_wait, "exchange")
def gives_memory_back_at_once(engine, exchange, sends, recvs, *later):
    lent = [LENT.setdefault((engine, s), torch.empty(1 << 20, dtype=torch.uint8)) for s in range(engine.size)]
    pairs = zip(lent, sends, strict=True)
    copies = [None if b is None else memory[: b.nbytes].view(b.dtype).view(b.shape).copy_(b) for memory, b in pairs]
    return exchange(copies, recvs, *later)


@breaks(laws.memory_layout_is_each_ranks_own, "all_reduce")
def sends_more_if_not_contiguous(engine, all_reduce, x, y, *later):
    if not x.is_contiguous():
        engine.broadcast(torch.zeros(1), 0)()
    return all_reduce(x, y, *later)


@breaks(laws.calls_without_data_need_no_data_on_other_ranks, "exchange")
def skips_calls_without_data_of_its_own(engine, exchange, sends, recvs, *later):
    return exchange(sends, recvs, *later) if any(b is not None and b.numel() for b in sends) else done


@breaks(laws.waits_may_be_called_in_any_order, "exchange")
def waits_in_the_order_of_calls(engine, exchange, sends, recvs, *later):
    received = [None if b is None else torch.empty_like(b) for b in recvs]
    queue = engine.__dict__.setdefault("queue", [])
    queue.append(copies_in_the_wait(exchange(sends, received, *later), received, recvs))
    return lambda: queue.pop(0)()


@breaks(laws.a_wait_sends_no_messages, "exchange")
def starts_in_the_wait(engine, exchange, sends, recvs, *later):
    return lambda: exchange(sends, recvs)()


@breaks(laws.closing_a_twin_leaves_its_engine_as_it_was, "twin")
def closes_its_engine(engine, right):
    twin = right()
    twin.close = lambda: setattr(type(engine), "ended", True)
    return twin


@breaks(laws.connect_may_be_called_again, "connect")
def connects_from_rank_0(engine, connect, device):
    if engine.rank == 0:
        engine.all_reduce(torch.zeros(1), torch.zeros(1))()


@breaks(laws.what_overlaps_needs_no_further_call, "all_reduce", overlaps=lambda engine, x: True)
def blocks_until_the_other_ranks_have_called_it(engine, all_reduce, x, y, *later):
    all_reduce(x, y)()
    return done


plant(laws.a_twin_has_the_same_ranks_and_messages_of_its_own, twin=lambda engine: engine)
plant(laws.a_group_has_ended_when_its_backend_has_destroyed_it, ended=True)
plant(laws.control_device_is_one_that_the_engine_moves, devices=("cuda",))
plant(laws.control_has_the_same_ranks, control=lambda engine: resolve(new_group([2, 1, 0]), "test"))
plant(laws.small_is_equal_on_all_ranks, small=lambda engine, device: engine.rank)
plant(laws.overlaps_is_equal_on_all_ranks, overlaps=lambda engine, x: x.is_contiguous())


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
