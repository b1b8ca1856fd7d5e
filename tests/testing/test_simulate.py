"""Simulated ranks: deterministic, deadlocks detected at once, cheap with many ranks."""

import _thread
import os
import random
import signal
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import refusal
from torch import nn
from torch.autograd import forward_ad

import diffcoll as dc
from diffcoll.engines.rank_state import NotARankError
from diffcoll.testing import RanksFailedError, simulate, spawn, true_gradients

LAUNCHER = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"


def total(r):
    return dc.all_reduce(torch.tensor(r)).item()


# ── calls and results ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("call", [simulate, spawn])
def test_called_like_map(call):
    found = call(lambda a, b: (dc.get_rank(), dc.get_world_size(), a + b), [1, 2, 3], (10, 20, 30))
    assert found == [(0, 3, 11), (1, 3, 22), (2, 3, 33)]
    for column in ("ab", (x for x in (10, 20)), np.arange(2), torch.eye(2), {3: 0, 4: 0}.values()):
        assert len(call(lambda a, b: (a, b), range(2), column)) == 2


@pytest.mark.parametrize("call", [simulate, spawn])
@pytest.mark.parametrize(
    "error, per_rank",
    [
        (ValueError, ([1, 2], [1, 2, 3])),
        (ValueError, ([],)),
        (ValueError, ()),
        (TypeError, (2,)),
        (TypeError, (range(2), None)),
        (TypeError, (torch.tensor(1.0),)),
    ],
    ids=str,
)
def test_arguments_that_are_not_one_for_each_rank(call, error, per_rank):
    with pytest.raises(error):
        call(lambda *a: a, *per_rank)


def test_results_are_detached():
    """In any tree; also tensors that fn keeps in a dict, whose keys may be anything."""
    xs = [torch.tensor([1.0 + r, -2.0 * r], requires_grad=True) for r in range(2)]
    for y, (z, [w]), d in simulate(lambda x: (dc.all_reduce(x), (x * 2, [x]), {frozenset(): x * 3}), xs):
        assert not any(t.requires_grad for t in (y, z, w, d[frozenset()]))
    assert all(x.requires_grad for x in xs)


def test_one_rank_runs_at_a_time_and_in_order():
    order = []

    def body(r):
        for step in range(2):
            order.append((step, r))
            dc.shift(torch.ones(1))

    simulate(body, range(3))
    simulate(body, range(3))
    # the last rank to arrive continues at once, then the others in order
    assert order[: len(order) // 2] == order[len(order) // 2 :] == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 0), (1, 1)]


def test_many_ranks():
    """In simulate and true_gradients; none of their threads stays."""

    def loss(x):
        for _ in range(10):
            x = dc.all_reduce(x) / 256
        return x.sum()

    def gradient(x):
        (g,) = torch.autograd.grad(loss(x), x)
        for _ in range(10):
            dist.all_reduce(g)
            g /= 256
        return (g,)

    xs = [torch.full((8,), float(r), requires_grad=True) for r in range(256)]
    for found in (simulate(gradient, xs), true_gradients(loss, xs)):
        torch.testing.assert_close(found, [(torch.ones(8),)] * 256)
    assert threading.active_count() < 20


# ── what each rank has for itself ────────────────────────────────────────────────────────────────────────


def test_random_streams():
    """Those of real processes with this seed and rank; the caller's generators are not changed."""

    def body(r):
        first = torch.rand(1).item(), random.gauss(), np.random.randn()  # Python and NumPy draw two, and keep one
        for _ in range(2):
            dc.all_reduce(torch.ones(1))
        return *first, torch.rand(1).item(), random.gauss(), random.random(), np.random.randn(), np.random.rand()

    def state():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    before = state()
    streams, others = simulate(body, range(3)), simulate(body, range(3), seed=1)
    assert state() == before
    assert streams == simulate(body, range(3)) == spawn(body, range(3))
    assert others == spawn(body, range(3), seed=1)
    assert len({number for stream in streams + others for number in stream}) == 48


def test_random_streams_of_which_one_rank_draws():
    """A rank that has drawn none begins its own stream, whatever the others have drawn."""

    def body(r):
        drawn = []
        for i in range(4):
            drawn += [np.random.randn() for _ in range(i != 3 * (r % 2))]
            dc.all_reduce(torch.ones(1))
        return drawn

    def at_once(r):
        return [np.random.randn() for _ in range(3)]

    assert simulate(body, range(4)) == simulate(at_once, range(4)) == spawn(at_once, range(4))


def test_what_a_rank_leaves_behind():
    """Settings of the process are the caller's again, also if the rank has raised."""

    def settings():
        deterministic = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
        return *deterministic, torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled(), dict(os.environ)

    def body(r):
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")
        torch.autograd.set_detect_anomaly(True, check_nan=False)
        os.environ.update(HOME="elsewhere", OF_A_RANK="1")
        del os.environ["PATH"]
        {}[r]

    before = settings()
    with pytest.raises(KeyError):
        simulate(body, range(2))
    assert settings() == before


@pytest.mark.parametrize("call", [simulate, spawn])
def test_the_variables_of_a_launcher_and_the_default_group(call, monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    before = dict(os.environ)

    def body(r):
        first = {name: os.environ[name] for name in LAUNCHER}
        if r == 1:
            del os.environ["LOCAL_WORLD_SIZE"]
        dc.all_reduce(torch.ones(1))
        assert {name: os.environ.get(name, "3") for name in LAUNCHER} == first
        assert ("LOCAL_WORLD_SIZE" in os.environ) == (r != 1)
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (r, 3, "gloo")
        return [first[name] for name in LAUNCHER[:5]], os.getcwd(), torch.get_num_threads()

    assert call(body, range(3)) == [([str(r), "3", str(r), "3", "127.0.0.1"], os.getcwd(), 1) for r in range(3)]
    with pytest.raises((KeyError, RanksFailedError)):
        call(lambda r: {}[r], range(2))
    assert dict(os.environ) == before


def test_warnings_and_output_of_each_rank(tmp_path):
    """Ranks may catch warnings, or redirect output, at the same time."""

    def body(r):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore" if r == 1 else "always")
            dc.all_reduce(torch.ones(1))
            warnings.warn(f"of rank {r}", stacklevel=1)
        return [str(w.message) for w in caught]

    def printing(r):
        sys.stdout = mine = open(tmp_path / str(r), "w")
        dc.all_reduce(torch.ones(1))
        print("rank", r)
        mine.close()

    before = warnings.filters, warnings.showwarning, sys.stdout
    assert simulate(body, range(3)) == [["of rank 0"], [], ["of rank 2"]]
    simulate(printing, range(3))
    assert [(tmp_path / str(r)).read_text() for r in range(3)] == ["rank 0\n", "rank 1\n", "rank 2\n"]
    assert all(now is then for now, then in zip((warnings.filters, *before[1:]), before, strict=True))
    assert (warnings.showwarning, sys.stdout) == before[1:]


def test_modes():
    """Those of the caller are not inherited, and those of a rank are its own."""

    def modes(r):
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return grad, inference, (torch.eye(2) @ torch.eye(2)).dtype, torch.ones(1).device.type

    def own(r):
        with torch.set_grad_enabled(r == 1), torch.autocast("cpu", torch.float16, enabled=r == 1):
            dc.all_reduce(torch.ones(2))
            return modes(r)

    autocast = torch.autocast("cpu", torch.bfloat16)
    for around in (torch.no_grad(), torch.inference_mode(), autocast, torch.device("meta")):
        with around:
            assert simulate(modes, range(2)) == [(True, False, torch.float32, "cpu")] * 2
    assert simulate(own, range(2)) == [(False, False, torch.float32, "cpu"), (True, False, torch.float16, "cpu")]


def test_threads_of_an_operation_are_divided_among_the_ranks():
    """Each thread that runs parallel operations keeps a pool of threads of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        for n, each in ((1, 6), (2, 3), (4, 1), (7, 1)):
            assert simulate(lambda r: torch.get_num_threads(), range(n)) == [each] * n
            assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)


# ── the store ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_store(monkeypatch):
    """A rank that waits for a key, or polls, lets the others run; so does PyTorch's barrier of new groups."""
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")

    def body(r):
        dist.new_group([0, 1])
        store = dist.distributed_c10d._get_default_store()
        if r == 2:
            store.set("key", "of 2")
        found = [store.get("key")]
        store.add("count", r + 1)
        while store.add("count", 0) < 6:
            pass
        while not store.check(["last"]):
            if r == 0:
                store.set("last", "1")
        return [*found, store.get("count")]

    assert simulate(body, range(3)) == [[b"of 2", b"6"]] * 3


def test_a_key_that_nobody_sets_is_named():
    def body(r):
        return r or dist.distributed_c10d._get_default_store().wait(["nobody's"])

    assert "nobody's" in refusal(dc.CollectiveMismatchError, simulate, body, range(2))


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────


def test_arguments_that_mean_the_same():
    simulate(lambda r: dc.all_gather(torch.ones(2, r + 1), dim=[1, -1][r], sizes=[[1, 2], (1, 2)][r]), range(2))


def test_an_error_that_the_ranks_catch_leaves_the_world_usable():
    def body(r):
        with pytest.raises(dc.CollectiveMismatchError):
            dc.all_reduce(torch.ones(2)) if r else dc.shift(torch.ones(2))
        return total(r)

    assert simulate(body, range(3)) == [3, 3, 3]


def test_a_rank_that_raises():
    """The others wait for it, some of them in C++, or return."""

    def body(r, others):
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        if r == 2:
            raise KeyError("mine")
        others(model)

    for others in (
        lambda model: dc.all_reduce(torch.ones(2)),
        lambda model: model(torch.ones(1, 2)).sum().backward(),
        lambda model: None,
    ):
        with pytest.raises(KeyError, match="mine") as caught:
            simulate(body, range(3), [others] * 3)
        assert "raised on simulated rank 2 of 3" in caught.value.__notes__[-1]


def test_calls_within_a_world_a_transform_or_a_region():
    x = torch.tensor([1.0, 2.0])
    with pytest.raises(RuntimeError):
        simulate(lambda r: simulate(total, range(2)), range(2))
    for call in (simulate, spawn):
        for around in (torch.func.grad, torch.vmap):
            with pytest.raises(RuntimeError):
                around(lambda x, call=call: call(lambda r: x, range(2))[0].sum())(x)
        with dc.joint_backward(), pytest.raises(RuntimeError):
            call(total, range(2))
    with forward_ad.dual_level(), pytest.raises(RuntimeError):
        simulate(total, range(2))
    assert simulate(total, range(2)) == [1, 1]


def test_a_backward_after_the_ranks_have_ended():
    kept = []
    simulate(lambda r: kept.append(dc.all_reduce(torch.ones(1, requires_grad=True))), range(2))
    with pytest.raises(RuntimeError):
        kept[0].backward()


# ── threads and Ctrl-C ───────────────────────────────────────────────────────────────────────────────────


def test_threads_beside_the_ranks():
    """One that a rank starts is no rank; one that was there before is none either, and calls on one rank."""
    ask, ended, said = threading.Event(), threading.Event(), []

    def before():
        ask.wait(10)
        said.append(total(5))

    def started():
        said.append(
            (dist.get_rank(), dc.get_rank(), dc.get_world_size(), dist.get_process_group_ranks(dist.group.WORLD))
        )
        refused()

    def refused():
        for call in (total, lambda r: dist.all_reduce(torch.ones(1))):
            try:
                call(1)
            except NotARankError:
                said.append("no rank")

    def body(r):
        dc.all_reduce(torch.ones(1))
        if r == 1:
            ask.set()
            older.join(10)
            thread = threading.Thread(target=started)
            thread.start()
            thread.join()
            _thread.start_new_thread(lambda: (refused(), ended.set()), ())
            assert ended.wait(10)

    older = threading.Thread(target=before)
    older.start()
    simulate(body, range(2))
    assert said == [5, (1, 1, 2, [0, 1]), *["no rank"] * 4]


@pytest.mark.parametrize("thread", [threading.main_thread, threading.current_thread])
def test_ctrl_c_ends_all_ranks(thread, request):
    """Also those that wait; none of them goes on in the background, with its own state of the process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    after, state, environment = [], torch.get_rng_state(), dict(os.environ)

    def body(r):
        torch.rand(r + 1)
        if r == 1:
            signal.pthread_kill(thread().ident, signal.SIGINT)  # the system chooses the thread that gets it
            time.sleep(1)  # the caller's thread notices
        dc.all_reduce(torch.ones(1))
        after.append(r)

    with pytest.raises(KeyboardInterrupt):
        simulate(body, range(3))
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join(20)
    assert not after
    assert torch.equal(torch.get_rng_state(), state)
    assert dict(os.environ) == environment
    assert simulate(total, range(3)) == [3, 3, 3]
