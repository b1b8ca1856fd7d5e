"""Simulated ranks: deterministic, deadlocks detected at once, cheap with many ranks."""

import itertools
import os
import random
import re
import signal
import threading
import time

import numpy as np
import properties
import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import diffcoll as dc
from diffcoll.testing import cases, new_group, simulate, spawn


def simulated(*call, **more):
    return simulate(*call, rules=True, **more)


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
    # the last rank to arrive continues at once, then the others in order
    assert order[: len(order) // 2] == order[len(order) // 2 :] == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 0), (1, 1)]


@both
def test_random_streams(run):
    """Each rank has its own generators, as on real processes; the caller's are not changed."""

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
    others = run(body, range(3), seed=1)
    assert others == spawn(body, range(3), seed=1)
    assert {number for stream in others for number in stream}.isdisjoint(itertools.chain(*streams))  # other ranks too


@both
def test_settings_of_the_process_are_each_ranks_own(run):
    """As on real processes, also if ranks are in such a block at the same time; the caller's are not changed."""

    def settings():
        anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.get_default_dtype(), *anomaly, *strict

    def body(r):
        if r != 1:
            torch.set_default_dtype([torch.float64, None, torch.float16][r])
            torch.use_deterministic_algorithms(True, warn_only=r == 2)
        with torch.autograd.set_detect_anomaly(r != 1, check_nan=r == 0):
            dc.all_reduce(torch.ones(1, dtype=torch.float32))
            found = settings()
        dc.all_reduce(torch.ones(1, dtype=torch.float32))
        return found, settings()

    before = settings()
    assert (
        run(body, range(3))
        == spawn(body, range(3))
        == [
            ((torch.float64, True, True, True, False), (torch.float64, False, True, True, False)),
            ((torch.float32, False, False, False, False), (torch.float32, False, True, False, False)),
            ((torch.float16, True, False, True, True), (torch.float16, False, True, True, True)),
        ]
    )
    assert settings() == before


@both
def test_threads_of_an_operation_are_divided_among_the_ranks(run):
    """Each thread that runs parallel operations keeps a pool of threads of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        for n, each in ((1, 6), (2, 3), (4, 1), (7, 1)):
            assert run(lambda r: torch.get_num_threads(), range(n)) == [each] * n
            assert torch.get_num_threads() == 6
        with pytest.raises(KeyError):
            run(lambda r: {}[r], range(2))
        assert torch.get_num_threads() == 6
        found = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert found == [6]
    finally:
        torch.set_num_threads(before)


@both
def test_a_rank_that_returns_while_others_wait(run):
    def body(r):
        return r if r == 1 else dc.all_gather(torch.ones(2))

    with pytest.raises(dc.CollectiveMismatchError) as caught:
        run(body, range(3))
    text = str(caught.value)
    assert "rank 1 returned" in text or "rank 1 has ended" in text
    assert re.search(r"rank 0 waits in all_gather at .*test_simulate\.py:\d+", text)


@both
def test_a_rank_that_raises(run):
    def body(r, others):
        if r == 2:
            raise KeyError("mine")
        others()

    for others in (lambda: dc.all_reduce(torch.ones(2)), lambda: None):  # they wait for it, or return
        with pytest.raises(KeyError, match="mine") as caught:
            run(body, range(3), [others] * 3)
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
    """Rank 0 calls the first group first, rank 1 the second: a deadlock on real processes."""

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


DIMENSIONS = {
    "all_gather": lambda x, i, j, k: dc.all_gather(x, dim=k),
    "stack": lambda x, i, j, k: dc.all_gather(x[..., 0], dim=k, stack=True),
    "reduce_scatter": lambda x, i, j, k: dc.reduce_scatter(x, dim=j),
    "reduce_scatter max": lambda x, i, j, k: dc.reduce_scatter(x, "max", dim=j),
    "all_to_all": lambda x, i, j, k: dc.all_to_all(x, split_dim=j, concat_dim=k),
    "gather": lambda x, i, j, k: dc.gather(x, dim=k),
    "scatter": lambda x, i, j, k: dc.scatter(x, dim=j, sizes=[0, 1, 2]),
    "split": lambda x, i, j, k: dc.split(x * 0, dim=j, sizes=[1, 0, 2]),
}


@both
@pytest.mark.parametrize("name", DIMENSIONS)
def test_dimensions_counted_from_either_end(run, name):
    """Values and gradients do not depend on it, also where rank 1 counts otherwise than the others."""

    def gradients(from_the_back):
        def body(r, x):
            y = DIMENSIONS[name](x, *((-3, -2, -1) if r in from_the_back else (0, 1, 2)))
            return y.detach(), (y.sin() * (torch.arange(y.numel()).view(y.shape) + r)).sum()

        xs = [x.clone().requires_grad_() for x in torch.randn(3, 2, 3, 4, generator=torch.Generator().manual_seed(1))]
        if run is simulate:
            ys, losses = zip(*run(body, range(3), xs), strict=True)
            return [*ys, *torch.autograd.grad(losses, xs)]
        ys, gs = zip(
            *run(lambda r, x: ((b := body(r, x))[0], *torch.autograd.grad(b[1], x)), range(3), xs), strict=True
        )
        return [*ys, *gs]

    expected = gradients({})
    for from_the_back in ({1}, {0, 1, 2}):
        torch.testing.assert_close(gradients(from_the_back), expected, rtol=0, atol=0)


def test_a_dimension_spelled_otherwise_is_not_what_differs():
    def body(r):
        dc.all_gather(torch.zeros(2, 3), dim=(1, -1)[r], grad_placement=("partial", "replicate")[r])

    with pytest.raises(dc.CollectiveMismatchError, match="grad_placement='partial' on rank 0, 'replicate' on rank 1"):
        simulate(body, range(2))


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
    with pytest.raises(dc.CollectiveMismatchError, match=r"all_reduce: a torch.func transform in one rank"):
        simulate(lambda x: torch.func.grad(dc.all_reduce)(x.detach()), xs)


@pytest.mark.parametrize("n", [1, 2])
def test_results_in_a_joint_graph_share_no_memory_with_inputs(n):
    holds = properties.the_input_is_untouched_and_the_output_its_own
    properties.hold([(holds, case) for case in cases.table(n)], n, simulate)


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
    """Private state of torch that simulated ranks share; this fails if torch changes it."""

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
    """A switch wakes one thread: the cost is linear in the number of ranks, not quadratic."""
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
    """PyTorch would broadcast or convert them; on real processes the messages would not match."""
    for ones, text in [
        (torch.ones(1), r"x is torch.float32 \(3,\) on rank 0, torch.float32 \(1,\) on rank 1"),
        (torch.ones(3).double(), r"x is torch.float32 \(3,\) on rank 0, torch.float64 \(3,\) on rank 1"),
    ]:
        for collective in (dc.all_reduce, dc.broadcast, dc.scan, dc.shift):
            with pytest.raises(dc.CollectiveMismatchError, match=f"{collective.__name__}: {text}"):
                simulate(collective, [torch.ones(3), ones])


NO_SEQUENCES = {
    "2": (2, r"got 2, expected a sequence with one element for each rank; range\(2\) gives each of 2 ranks its number"),
    "np.int64": (np.int64(3), r"got np.int64\(3\), expected .* range\(3\)"),
    "dict": ({"a": 1}, r"got dict, expected .* list\(d.values\(\)\)"),
    "set": ({1, 2}, "got set, expected .* a set has no order; pass a sorted list"),
    "0-d": (torch.tensor(1.0), r"got a 0-d tensor, expected .* \[value\] \* N"),
    "None": (None, r"got NoneType, expected .* \[value\] \* N"),
    "module": (torch.nn.Linear(1, 1), "got Linear, expected"),
}


@pytest.mark.parametrize("value, words", NO_SEQUENCES.values(), ids=NO_SEQUENCES)
@pytest.mark.parametrize("call", [simulate, simulated, spawn], ids=["truth", "rules", "spawn"])
def test_what_is_no_sequence(call, value, words):
    name = "spawn" if call is spawn else "simulate"
    with pytest.raises(TypeError, match=rf"{name}: per_rank\[0\]: {words}"):
        call(lambda *a: a, value)
    with pytest.raises(TypeError, match=rf"{name}: per_rank\[1\]: {words}"):
        call(lambda *a: a, range(2), value)


def test_what_is_a_sequence():
    class Old:
        def __getitem__(self, i):
            return [10, 20][i]

    kinds = "ab", (x for x in (10, 20)), np.arange(2), torch.eye(2), {3: 0, 4: 0}.values(), Old(), {3: 0, 4: 0}
    for column in kinds[:-1]:
        assert len(simulate(lambda a, b: (a, b), range(2), column)) == 2
    assert simulate(lambda a, b: (a, b), Old(), kinds[-1].keys()) == [(10, 3), (20, 4)]
    for endless in (itertools.count(), itertools.repeat(1)):
        with pytest.raises(ValueError, match=r"got sequences of lengths \[2, 3\]"):
            simulate(lambda a, b: a, range(2), endless)
    with pytest.raises(ValueError, match="got sequences of 65536 or more elements, expected N"):
        simulate(lambda a: a, itertools.count())


AROUND = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap": lambda f, x: torch.vmap(f)(x),
}


@pytest.mark.parametrize("transform", AROUND.values(), ids=AROUND)
def test_transforms_around_a_call(transform):
    """Also if tensors are in the closure, or nothing is transformed."""
    xs = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])]
    calls = {
        "simulate": lambda x: sum(simulate(dc.all_reduce, [x, x])).sum(),
        "simulate ": lambda x: sum(simulate(lambda r: dc.all_reduce(x), range(2), rules=True)).sum(),
        "simulate  ": lambda x: x.sum() * sum(simulate(dc.all_reduce, xs)).sum(),
        "spawn": lambda x: sum(spawn(lambda r: dc.all_reduce(x), range(2))).sum(),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"^{name.strip()}: called within a transform of torch.func .*expected"):
            transform(call, xs[0])
    assert simulate(lambda x: torch.func.grad(lambda x: dc.all_reduce(x.sum()))(x).sum(), xs, rules=True) == [4.0, 4.0]


def test_regions_and_tracing_around_a_call():
    with dc.joint_backward(), pytest.raises(RuntimeError, match=r"simulate: called within joint_backward\(\)"):
        simulate(lambda r: r, range(2))
    with FakeTensorMode(), pytest.raises(RuntimeError, match="simulate: called within FakeTensorMode"):
        simulate(lambda r: r, range(2))
    with pytest.raises(RuntimeError, match="simulate: called within ProxyTorchDispatchMode"):
        make_fx(lambda x: simulate(lambda r: x, range(2))[0])(torch.ones(1))


@both
def test_forward_mode_around_a_call(run):
    with forward_ad.dual_level():
        xs = [forward_ad.make_dual(torch.tensor(1.0 + r), torch.tensor(10.0**r)) for r in range(3)]
        ys = run(lambda x, r: dc.all_reduce(x) ** 2 * r, xs, range(3))
        tangents = [forward_ad.unpack_dual(y).tangent.item() for y in ys]
        with pytest.raises(RuntimeError, match=r"spawn: called within forward_ad.dual_level\(\)"):
            spawn(lambda x: x, xs)
    assert tangents == [2 * 6 * 111 * r for r in range(3)]  # d (Σ x)² = 2 Σ x · Σ dx


class Counting:
    """A mode that counts calls."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen += 1
        return function(*args, **(kwargs or {}))

    __torch_dispatch__ = __torch_function__


class CountingFunctions(Counting, TorchFunctionMode):
    pass


class CountingOps(Counting, TorchDispatchMode):
    pass


@both
def test_what_pytorch_keeps_for_each_thread(run):
    """Thread-local state of torch that is copied to the ranks; this fails if torch changes it."""

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        found = run(lambda r: (torch.eye(2) @ dc.all_reduce(torch.eye(2))).dtype, range(2))
        cache = run(lambda r: torch.is_autocast_cache_enabled(), range(2))
    assert found == [torch.bfloat16] * 2
    assert cache == [False, False]
    assert run(autocast_of_one_rank, range(2)) == [(torch.float32,) * 2, (torch.float16, torch.float32)]

    def devices(r):
        y = dc.all_reduce(torch.ones(5, device="cpu") * (r + 1))
        return torch.zeros(1).device.type, torch.get_default_device().type, y.tolist()

    with torch.device("meta"):
        assert run(devices, range(2)) == [("meta", "meta", [3] * 5)] * 2
    torch.set_default_device("meta")
    try:
        assert run(devices, range(2)) == [("meta", "meta", [3] * 5)] * 2
        assert run(lambda r: torch.set_default_device(None) or torch.ones(1).device.type, range(2)) == ["cpu", "cpu"]
        assert torch.ones(1).is_meta
    finally:
        torch.set_default_device(None)

    def product(x):
        return (x @ dc.all_reduce(x)).sum()

    xs = [torch.eye(3, requires_grad=True) for _ in range(2)]
    with CountingFunctions() as functions, CountingOps() as ops, FlopCounterMode(display=False) as flops:
        run(product, xs)
    assert functions.seen > 0 and ops.seen > 0
    assert flops.get_total_flops() == 2 * 2 * 3**3

    with torch.autograd.set_multithreading_enabled(False):
        assert run(lambda r: torch._C._is_multithreading_enabled(), range(2)) == [False, False]
    with forward_ad._set_fwd_grad_enabled(False):
        assert run(lambda r: torch._C._is_fwd_grad_enabled(), range(2)) == [False, False]
    with torch.autograd._force_original_view_tracking(True):
        assert run(lambda r: torch._C._is_view_replay_enabled(), range(2)) == [True, True]
    if hasattr(torch._C, "_is_grad_layout_enforcement_enabled"):  # later releases have it
        default = torch._C._is_grad_layout_enforcement_enabled()
        with torch.autograd.grad_mode.enforce_grad_layout_policy(not default):
            assert run(lambda r: torch._C._is_grad_layout_enforcement_enabled(), range(2)) == [not default] * 2
    with torch._C.DisableTorchFunction():
        assert run(lambda r: torch._C._is_torch_function_all_disabled(), range(2)) == [True, True]


def autocast_of_one_rank(r):
    with torch.autocast("cpu", torch.float16, enabled=r == 1):
        mine = (torch.eye(2) @ torch.eye(2)).dtype
        dc.all_reduce(torch.ones(2))
        assert (torch.eye(2) @ torch.eye(2)).dtype == mine
    return mine, (torch.eye(2) @ torch.eye(2)).dtype


@both
def test_hooks_for_saved_tensors(run):
    packed, unpacked = [], []

    def body(x):
        loss = (dc.all_reduce(x) ** 2 * (dc.get_rank() + 1)).sum()
        if run is simulated:
            loss.backward()
        return loss

    def pack(x):
        packed.append(threading.current_thread().name)
        return x * 2

    xs = [torch.tensor([1.0 + r, 2.0], requires_grad=True) for r in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: unpacked.append(x) or x / 2):
        losses = run(body, xs)
    if run is simulate:
        torch.autograd.backward(losses)
    assert set(packed) == {"rank 0", "rank 1", "rank 2"}
    assert len(unpacked) == len(packed) > 0
    for x in xs:
        assert x.grad.tolist() == [2 * 6 * 6, 2 * 6 * 6]
    message = "nothing may be saved elsewhere"
    with torch.autograd.graph.disable_saved_tensors_hooks(message), pytest.raises(RuntimeError, match=message):
        run(lambda x: checkpoint(torch.sin, x, use_reentrant=False), xs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_call(reentrant):
    """The whole simulation is recomputed, with new ranks."""
    xs = [torch.tensor([1.0 + r, 2.0], requires_grad=True) for r in range(3)]

    def total(*xs):
        return sum(simulate(lambda x, w: w * dc.all_reduce(x.sin()).square().sum(), xs, [1.0, 10.0, 100.0]))

    direct = torch.autograd.grad(total(*xs), xs)
    checkpoint(total, *xs, use_reentrant=reentrant).backward()
    for x, gx in zip(xs, direct, strict=True):
        assert torch.equal(x.grad, gx)


@pytest.mark.parametrize("rules", [False, True])
def test_results_may_be_dicts_with_any_keys(rules):
    xs = [torch.ones(2), torch.ones(2)]
    found = simulate(lambda x: {x: dc.all_reduce(x), object: 1, frozenset(): [2]}, xs, rules=rules)
    assert all(y[x].tolist() == [2, 2] for x, y in zip(xs, found, strict=True))


# ── Ctrl-C ───────────────────────────────────────────────────────────────────────────────────────────────


@both
def test_ctrl_c_ends_all_ranks(run):
    """Also those that wait; none of them goes on in the background, with its own state of the process."""
    after, state, environment = [], torch.get_rng_state(), os.environ._data

    def body(r):
        torch.rand(r + 1)
        if r == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(2)  # the caller's thread notices
        dc.all_reduce(torch.ones(1))
        after.append(r)

    with pytest.raises(KeyboardInterrupt):
        run(body, range(3))
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join(20)
    assert not after
    assert torch.equal(torch.get_rng_state(), state) and os.environ._data is environment
    assert run(lambda r: dc.all_reduce(torch.tensor(r)).item(), range(3)) == [3, 3, 3]


def test_a_copy_of_the_process_does_not_wait_for_ranks_that_it_lacks():
    started = threading.Event()

    def body(r):
        started.set()
        time.sleep(1)

    thread = threading.Thread(target=lambda: simulate(body, range(1)))
    thread.start()
    started.wait()
    child = os.fork()
    if child == 0:  # simulates at once
        os._exit(simulate(lambda r: dc.all_reduce(torch.tensor(r)).item(), range(3))[0])
    for _ in range(250):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        time.sleep(0.02)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    thread.join()
    assert found and os.waitstatus_to_exitcode(status) == 3


@both
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: dist.all_reduce(x),
        lambda x: dist.get_rank(),
        lambda x: dist.init_process_group("gloo"),
        lambda x: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)),
    ],
    ids=["all_reduce", "get_rank", "init_process_group", "DDP"],
)
def test_torch_distributed_is_not_simulated_by_default(run, fn):
    with pytest.raises(RuntimeError) as raised:
        run(fn, [torch.ones(1), torch.zeros(1)])
    assert str(raised.value) == (
        "simulate: fn calls torch.distributed, which is not simulated by default; simulate(..., "
        "torch_distributed=True) sets up its default process group on simulated ranks, and runs such code"
    )
    assert isinstance(raised.value.__cause__, ValueError)


@both
def test_other_errors_are_not_blamed_on_torch_distributed(run):
    with pytest.raises(ValueError, match="invalid literal"):
        run(lambda r: int("x"), range(2))
