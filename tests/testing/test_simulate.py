"""Simulated ranks: deterministic, found out at once when they cannot go on, and cheap."""

import random
import re
import threading
import time

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import diffcoll as dc
from diffcoll.testing import new_group, simulate, spawn


def simulated(*call):
    return simulate(*call, rules=True)


both = pytest.mark.parametrize("run", [simulate, simulated], ids=["truth", "rules"])


@both
def test_called_like_map(run):
    assert run(lambda a, b: (dc.get_rank(), dc.get_world_size(), a + b), [1, 2, 3], (10, 20, 30)) == [
        (0, 3, 11),
        (1, 3, 22),
        (2, 3, 33),
    ]
    with pytest.raises(ValueError, match=re.escape("simulate: got sequences of lengths [2, 3], expected N elements")):
        run(lambda a, b: a, [1, 2], [1, 2, 3])
    with pytest.raises(TypeError, match="simulate: got no per-rank arguments"):
        run(lambda: 1)


@both
def test_one_rank_runs_at_a_time_and_in_order(run):
    order = []

    def body(r):
        for step in range(2):
            order.append((step, r))
            dc.shift(torch.ones(1))

    run(body, range(3))
    run(body, range(3))
    # the last to come goes on at once, then the others in their order
    assert order[: len(order) // 2] == order[len(order) // 2 :] == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 0), (1, 1)]


@both
def test_random_streams(run):
    """Each rank has its own, the same as on real processes, and the caller's are left alone."""

    def body(r):
        first = torch.rand(1).item(), random.random(), np.random.rand()
        dc.all_reduce(torch.ones(1))
        return *first, torch.rand(1).item(), random.random(), np.random.rand()

    torch.manual_seed(0)
    random.seed(0)
    expected = torch.rand(2)[1].item(), [random.random() for _ in range(2)][1]
    torch.manual_seed(0)
    random.seed(0)
    torch.rand(1), random.random()
    streams = run(body, range(3))
    assert (torch.rand(1).item(), random.random()) == expected
    assert streams == run(body, range(3)) == spawn(body, range(3))
    assert len({number for stream in streams for number in stream}) == 18
    assert simulate(body, range(3), seed=1) != streams


@both
def test_a_rank_that_returns_while_others_wait(run):
    def body(r):
        return r if r == 1 else dc.all_gather(torch.ones(2))

    with pytest.raises(dc.CollectiveMismatchError) as caught:
        run(body, range(3))
    text = str(caught.value)
    assert "rank 1 returned" in text or "rank 1 is gone" in text
    assert re.search(r"rank 0 waits in all_gather at .*test_simulate\.py:\d+", text)


@both
def test_a_rank_that_raises(run):
    def body(r):
        if r == 2:
            raise KeyError("mine")
        dc.all_reduce(torch.ones(2))

    with pytest.raises(KeyError, match="mine") as caught:
        run(body, range(3))
    if hasattr(caught.value, "__notes__"):
        assert "raised on simulated rank 2 of 3" in caught.value.__notes__[-1]


@both
def test_ranks_in_different_collectives(run):
    def body(r):
        return dc.all_reduce(torch.ones(2)) if r else dc.broadcast(torch.ones(2))

    with pytest.raises(dc.CollectiveMismatchError, match="the ranks are in different collectives") as caught:
        run(body, range(2))
    assert re.search(r"rank 0 waits in broadcast at .*\n  rank 1 waits in all_reduce at ", str(caught.value))


@both
def test_groups_that_wait_for_each_other(run):
    """Rank 0 wants one group first, rank 1 the other: on real processes a hang."""

    def body(r):
        groups = [new_group([0, 1]), new_group([0, 1, 2])]
        for group in groups if r == 0 else groups[::-1]:
            if r in group.ranks:
                dc.all_reduce(torch.ones(1), group=group)

    start = time.monotonic()
    with pytest.raises(dc.CollectiveMismatchError, match="no rank can go on"):
        run(body, range(3))
    assert time.monotonic() - start < 5


@both
def test_shapes_that_do_not_fit(run):
    with pytest.raises(dc.CollectiveMismatchError, match="simulated ranks cannot go on: "):
        run(lambda r: dc.all_gather(torch.ones(2 + r)), range(2))


def test_arguments_that_differ():
    with pytest.raises(dc.CollectiveMismatchError, match="broadcast: src=0 on rank 0, 1 on rank 1"):
        simulate(lambda r: dc.broadcast(torch.ones(2), src=r), range(2))
    simulate(lambda r: dc.all_gather(torch.ones(2, r + 1), dim=[1, -1][r], sizes=[[1, 2], (1, 2)][r]), range(2))


@both
def test_an_error_that_the_ranks_catch_leaves_the_world_usable(run):
    def body(r):
        with pytest.raises(dc.CollectiveMismatchError):
            dc.all_reduce(torch.ones(2)) if r else dc.shift(torch.ones(2))
        return dc.all_reduce(torch.tensor(r)).item()

    assert run(body, range(3)) == [3, 3, 3]


def test_backward_inside_a_joint_graph_is_refused():
    def body(x):
        dc.all_reduce(x).backward()

    xs = [torch.tensor(1.0, requires_grad=True) for _ in range(2)]
    with pytest.raises(RuntimeError, match=r"backward ran through all_reduce inside simulate\(\).*rules=True"):
        simulate(body, xs)
    with pytest.raises(dc.CollectiveMismatchError, match=r"all_reduce: torch.func transforms inside a joint graph"):
        simulate(lambda x: torch.func.grad(dc.all_reduce)(x.detach()), xs)


def test_rules_after_the_world_has_ended():
    xs = [torch.tensor(1.0, requires_grad=True) for _ in range(2)]
    losses = simulated(dc.all_reduce, xs)
    with pytest.raises(RuntimeError, match=r"the world had ended; under simulate\(rules=True\) call backward inside"):
        losses[0].backward()


def test_a_foreign_thread_is_refused():
    def body(r):
        engine_thread = []

        def other():
            try:
                dc.all_reduce(torch.ones(1), group=group)
            except ValueError as error:
                engine_thread.append(str(error))

        group = new_group([0])
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return engine_thread

    assert "outside of that world" in simulated(body, range(1))[0][0]


@both
def test_modes_of_the_caller_hold(run):
    with torch.no_grad():
        assert run(lambda r: torch.is_grad_enabled(), range(2)) == [False, False]
    with torch.inference_mode():
        assert run(lambda r: dc.all_reduce(torch.ones(1)).is_inference(), range(2)) == [True, True]
    assert run(lambda r: torch.is_grad_enabled(), range(2)) == [True, True]


def test_a_world_within_a_world():
    def body(r):
        inner = simulate(lambda s: dc.all_reduce(torch.tensor(s + 1)).item(), range(r + 1))
        return inner, dc.all_reduce(torch.tensor(r)).item()

    assert simulate(body, range(3)) == [([1], 3), ([3, 3], 3), ([6, 6, 6], 3)]


def test_forward_mode_of_many_ranks_at_once():
    """Private state of torch that simulated ranks share; if it moves, this fails."""

    def body(r):
        x = torch.tensor(2.0)
        with forward_ad.dual_level():
            y = dc.all_reduce(forward_ad.make_dual(x, torch.tensor(10.0**r)))
            tangent = forward_ad.unpack_dual(y).tangent.item()
            with pytest.raises(RuntimeError, match="Nested forward mode"), forward_ad.dual_level():
                pass
        outside = forward_ad.unpack_dual(y).tangent
        nested = torch.func.jvp(lambda x: torch.func.jvp(lambda x: dc.all_reduce(x) ** 3, (x,), (x,))[1], (x,), (x,))
        return tangent, outside, [t.item() for t in nested]

    # y = 4, dy = 4: 3 y² dy = 192, and its derivative along the same direction 6 y dy² + 3 y² dy = 576
    assert simulated(body, range(2)) == [(11, None, [192, 576])] * 2


def test_many_ranks_are_cheap():
    """A hand-over wakes one thread: the work grows with the ranks, not with their square."""
    xs = [torch.randn(128, requires_grad=True) for _ in range(256)]

    def body(x):
        for _ in range(10):
            x = dc.all_reduce(x) / 256
        return x.sum()

    losses = simulate(body, xs)
    torch.autograd.backward(losses)
    torch.testing.assert_close(xs[7].grad, torch.ones(128))
    assert threading.active_count() < 20


def test_shapes_and_dtypes_that_differ_are_an_error_in_truth_too():
    """Where PyTorch would broadcast or convert them, the ranks' messages would not fit."""
    for ones, text in [
        (torch.ones(1), r"x is torch.float32 \(3,\) on rank 0, torch.float32 \(1,\) on rank 1"),
        (torch.ones(3).double(), r"x is torch.float32 \(3,\) on rank 0, torch.float64 \(3,\) on rank 1"),
    ]:
        for collective in (dc.all_reduce, dc.broadcast, dc.scan, dc.shift):
            with pytest.raises(dc.CollectiveMismatchError, match=f"{collective.__name__}: {text}"):
                simulate(collective, [torch.ones(3), ones])
