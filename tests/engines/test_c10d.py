"""Groups of torch.distributed: which calls are made, twins, numbers over the CPU, errors."""

import gc
import time
import warnings
import weakref
from datetime import timedelta
from itertools import product

import laws
import pytest
import torch
import torch.distributed as dist
from properties import on_rank
from runs import line_of, noted, refusal, rules

import diffcoll as dc
from diffcoll.core.control import Control
from diffcoll.core.groups import resolve
from diffcoll.core.maps import Permute
from diffcoll.core.moves import move
from diffcoll.engines import c10d, c10d_twins
from diffcoll.engines.turn import IDLE, Turn, of_backend
from diffcoll.testing import RanksFailedError, cases, spawn

N = 3
METHODS = "allreduce", "broadcast", c10d._ALL_GATHER, c10d._REDUCE_SCATTER, "reduce", "send", "recv"


def under_another_name(group=None, **backends):
    """The group's engine, with other names for its backends."""
    engine = resolve(group, "test")
    engine.backends = backends or {"cpu": "other"}
    return engine


def without_cpu(group=None):
    """The group's engine, as if it moved no tensors of the CPU."""
    c10d.C10dEngine.control_device = torch.device("cpu")
    return under_another_name(group, cuda="nccl")


# ── which calls ──────────────────────────────────────────────────────────────────────────────────────────


def test_native_collectives_are_those_of_the_table():
    """The table selects by primitive, dtype and shape; gloo sends everything else as messages."""

    def body(r):
        calls = noted(dist.ProcessGroup, *METHODS)
        engine = resolve(None, "test")
        for primitive in (*laws.MOVES, *laws.SUMS):
            laws.outcome(primitive, engine, laws.Data())
        for dtype in (torch.bfloat16, torch.int16, torch.complex64):
            engine.all_reduce(x := torch.ones(3, dtype=dtype), x.clone())()
        engine.all_reduce(x := torch.ones(0), x.clone())()
        of_gloo = [call for call in calls if call not in ("send", "recv")]
        calls.clear()
        engine = under_another_name()
        for primitive in (laws.all_reduce, laws.broadcast, laws.reduce):
            laws.outcome(primitive, engine, laws.Data())
        x, row = torch.ones(2), torch.empty(4)
        engine.all_gather(x, row, [2, 2])()
        engine.reduce_scatter(row, [2, 2], x)()
        return of_gloo, calls

    of_gloo = ["broadcast", "allreduce", "allreduce"]
    of_others = ["allreduce", "broadcast", "reduce", c10d._ALL_GATHER, c10d._REDUCE_SCATTER]
    assert spawn(body, range(2)) == [(of_gloo, of_others)] * 2


def test_a_reduction_on_nccl_is_one_all_gather_if_small():
    """Its blocks would be N − 1 messages to and from each rank, and an all-gather after them."""

    def body(r):
        engine, calls = under_another_name(cpu="nccl"), noted(dist.ProcessGroup, *METHODS)
        most, found = engine.small("cpu") // 4, []
        for op, numel in product(("max", "product", "logsumexp"), (0, 1, most, most // N * N + N)):
            dc.all_reduce(torch.ones(numel), op)
            found.append(calls[:])
            calls.clear()
        return most, found

    small, in_blocks = [c10d._ALL_GATHER], [*["send"] * (N - 1), *["recv"] * (N - 1), c10d._ALL_GATHER]
    assert spawn(body, range(N)) == [((64 << 10) // N, [[], small, small, in_blocks] * 3)] * N


def test_ranks_are_ranks_within_the_group():
    def body(r):
        group = dist.new_group([1, 2])
        if r == 0:
            return None
        under_another_name(group)
        x = torch.tensor([10.0 + r])
        calls = dc.broadcast(x, src=1, group=group), dc.reduce(x, dst=1, group=group), dc.all_gather(x, group=group)
        return [y.tolist() for y in (*calls, dc.permute(x, [(1, 0)], group=group))]

    assert spawn(body, range(N)) == [None, [[12], [0], [11, 12], [12]], [[12], [23], [11, 12], [0]]]


def test_empty_blocks_are_not_sent():
    def body(r):
        calls = noted(dist.ProcessGroup, "send", "recv")
        dc.gather(torch.ones(2), dst=0)
        return calls

    assert spawn(body, range(N)) == [["recv"] * 2, ["send"], ["send"]]


def test_all_ranks_connect_before_the_first_message():
    """NCCL would wait for ranks that do not take part in the first message of a group; gloo needs no such call."""

    class Elsewhere(torch.Tensor):
        """CPU memory that claims to be elsewhere."""

        is_cpu = False

    def body(r):
        calls = noted(dist.ProcessGroup, "allreduce", "send", "recv")
        resolve(None, "test").connect(torch.device("cpu", 0))
        engine = under_another_name()
        for _ in range(2):
            x = torch.full((2,), 1.0 + r).as_subclass(Elsewhere)
            y = move(x, Permute(engine, ((2, 0),)))
            assert y.tolist() == ([3.0, 3.0] if r == 0 else [0.0, 0.0])
        return calls

    messages = [["recv"] * 2, [], ["send"] * 2]
    assert spawn(body, range(N)) == [["allreduce", *messages[r]] for r in range(N)]


def test_messages_are_not_received_by_the_users_calls():
    def body(r):
        mine, theirs = torch.tensor([r]), torch.empty(1, dtype=torch.int64)
        tag = mine.nbytes  # any that a user may choose
        users = dist.irecv(theirs, 1 - r, tag=tag)
        got = dc.shift(mine)
        dist.isend(mine + 10, 1 - r, tag=tag).wait()
        users.wait()
        return got.item(), theirs.item()

    assert spawn(body, range(2)) == [(1, 11), (0, 10)]


def test_every_collective_and_an_averager_in_torchs_debug_mode():
    """Its wrapper of gloo counts messages, which are not equally many on all ranks, and has no class to make twins."""

    def body(r):
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        group = dist.new_group(timeout=timedelta(seconds=40))
        wrapper = group._get_backend(torch.device("cpu"))
        dc.set_default_group(group)
        wrong = []
        for case in {case.name: case for case in cases.table(N)}.values():
            errors = cases.errors(on_rank(case, r, 1), cases.in_truth(case, 1), r)
            wrong += [(case, what, error) for what, error in errors.items() if not error < 1e-12]
        dc.reduce(p := torch.nn.Parameter(torch.ones(2)))
        dc.GradientAverager([p]).backward((p * r).sum())
        kind = type(c10d_twins.backend_of(group, "cpu")).__name__  # of which NCCL's twins are made
        return type(wrapper).__name__, kind, c10d_twins.timeout_of(group, "cpu").seconds, wrong, p.grad.tolist()

    assert spawn(body, range(N)) == [("_ProcessGroupWrapper", "ProcessGroupGloo", 40, [], [1.0, 1.0])] * N


# ── twins, and numbers over the CPU ──────────────────────────────────────────────────────────────────────


def test_a_twin_of_some_ranks_does_not_change_the_names_of_later_groups_and_twins():
    def body(r):
        pair = dist.new_group([0, 1])
        if r < 2:
            twin = resolve(pair, "test").twin()
            assert laws.of_all(twin, r) == [0, 1]
        for twin in [resolve(None, "test").twin() for _ in range(2)]:
            assert laws.of_all(twin, r) == [0, 1, 2]
        later = dist.new_group([0, 2])
        return dc.all_reduce(torch.tensor(r), group=later).item() if r != 1 else 2, later is None

    assert [x for x, _ in spawn(body, range(N))] == [2] * N


def test_a_twin_ends_with_the_users_group():
    def body(r):
        group = dist.new_group([0, 1])
        engine = resolve(group, "test")
        twin, other = engine.twin(), engine.twin()
        kept = weakref.ref(other.group)
        other.close()
        assert kept() is None and other.ended
        before = twin.ended
        dist.destroy_process_group(group)
        del group
        text = refusal(dc.CollectiveFailedError, move, torch.ones(1), Permute(engine, ((0, 1),)))
        return before, twin.ended, "permute" in text

    assert spawn(body, range(2)) == [(False, True, True)] * 2


def test_numbers_are_sent_over_gloo_where_the_group_moves_no_tensors_of_the_cpu():
    def body(r):
        engine = without_cpu()
        c10d.is_capturing = lambda: True
        assert engine.control() is engine
        c10d.is_capturing = lambda: False
        control = engine.control()
        assert control is not engine and control.control() is control
        sent = []
        messages = type(engine).messages
        type(engine).messages = lambda self, *more: sent.append(self is control) or messages(self, *more)
        y = dc.all_gather(torch.ones(1 + r), sizes="auto")
        numbers = Control(engine).numbers([r])
        group = dist.new_group([0, 1, 2])  # the name is that on all ranks
        return y.shape[0], numbers, sent, dc.all_reduce(torch.tensor(r), group=group).item()

    assert spawn(body, range(N)) == [(6, [[0], [1], [2]], [True, False, True], 3)] * N


def test_numbers_of_one_rank_are_on_the_cpu():
    """And its group is freed when it is destroyed."""

    def body(r):
        control = without_cpu().control()
        y = dc.all_gather(torch.ones(3), sizes="auto")
        found = control.devices, Control(control).numbers([4]), len(y)
        group = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        gc.collect()
        return *found, group()

    assert spawn(body, range(1)) == [(("cpu",), [[4]], 3, None)]


def test_numbers_over_gloo_have_the_timeout_of_the_group():
    def body(r):
        group = dist.new_group(timeout=timedelta(seconds=1))
        engine = without_cpu(group)
        engine.control()
        begin = time.monotonic()
        if r == 0:
            refusal(dc.CollectiveFailedError, Control(engine).numbers, [r])
        else:
            time.sleep(4)
        return time.monotonic() - begin

    assert spawn(body, range(2))[0] < 3


def test_ranks_that_cannot_connect_over_gloo_agree_on_the_group_itself():
    def body(r):
        c10d_twins.CONNECT = timedelta(seconds=2)
        engine = without_cpu()
        if r == 1:

            def no_interface(*_):
                raise RuntimeError("no interface")

            c10d_twins.dist.ProcessGroupGloo = no_interface
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            numbers = [Control(engine).numbers([r]) for _ in range(2)]
        assert engine.control() is engine
        return numbers, [str(warning.message) for warning in caught]

    (numbers, (text,)), *others = spawn(body, range(N), timeout=60)
    assert numbers == [[[0], [1], [2]]] * 2
    assert others == [(numbers, [])] * 2
    assert "rank 1" in text and "no interface" in text


def test_a_rank_may_be_late_for_the_connection():
    """Time to connect begins when all ranks have come, for whom the others wait as long as for a message."""

    def body(r):
        c10d_twins.CONNECT = timedelta(seconds=1)
        engine = without_cpu(dist.new_group(timeout=timedelta(seconds=30)))
        time.sleep(3 * (r == 1))
        numbers = Control(engine).numbers([r])
        return numbers, engine.control() is not engine

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spawn(body, range(N)) == [([[0], [1], [2]], True)] * N


@pytest.mark.parametrize(("comes", "lost"), [(False, 0), (True, 1)])
def test_a_rank_that_hangs_before_or_while_it_connects(comes, lost):
    """The first numbers fail on all other ranks, and so does the next call: none takes another way than the others."""

    def body(r):
        c10d_twins.CONNECT = timedelta(seconds=1)
        group = dist.new_group(timeout=timedelta(seconds=2))
        without_cpu(group)
        sent = noted(dist.ProcessGroup, *METHODS)
        if r == lost:
            c10d_twins.dist.ProcessGroupGloo = lambda *_: time.sleep(60)
            time.sleep(0 if comes else 60)

        def call():
            dc.all_gather(torch.ones(1 + r), sizes="auto", group=group)  # sizes

        texts = [refusal(dc.CollectiveFailedError, call) for _ in range(2)]
        raise AssertionError(repr([all(words in text for words in named for text in texts), sent]))

    named = "all_gather, forward", line_of(__file__, "# sizes")
    with pytest.raises(RanksFailedError) as caught:
        spawn(body, range(N), timeout=25)
    for r in {*range(N)} - {lost}:
        assert caught.value.failures[r].text.rstrip().endswith("AssertionError: [True, []]")


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────


def test_only_errors_of_the_backend_become_failures_of_the_collective():
    """Not one of the device's memory, wherever it is raised."""

    def fails(error):
        raise error

    memory = torch.OutOfMemoryError("of a device")
    others = [(fails, RuntimeError("of PyTorch")), (fails, KeyError("of the user")), (fails, memory)]

    def body(r):
        engine, broken = resolve(None, "test"), RuntimeError("a cable broke")
        with pytest.raises(dc.CollectiveFailedError, match="shift") as caught, Turn(engine, "shift"):
            of_backend(fails, broken)
        assert caught.value.__cause__ is broken
        for call, *arguments in [*others, (of_backend, fails, memory)]:
            with pytest.raises(type(arguments[-1])) as raised, Turn(engine, "shift"):
                call(*arguments)
            assert raised.value is arguments[-1]
        return engine.now is IDLE

    assert rules(body, range(2)) == [True] * 2
