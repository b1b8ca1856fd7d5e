"""async_op=True: the same results and gradients; communication overlaps with computation in both directions."""

import gc
import threading
import time
import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import gloo, refusal, rules, runs_on
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from diffcoll.core.groups import resolve
from diffcoll.engines.c10d import C10dEngine
from diffcoll.testing import new_group, simulate, spawn

CALLS = {
    "all_reduce": lambda x, **more: dc.all_reduce(x, **more),
    "mean": lambda x, **more: dc.all_reduce(x, "mean", **more),
    "max": lambda x, **more: dc.all_reduce(x, "max", **more),
    "all_gather": lambda x, **more: dc.all_gather(x, dim=1, **more),
    "reduce_scatter": lambda x, **more: dc.reduce_scatter(x, sizes=[1, 3], **more),
    "all_to_all": lambda x, **more: dc.all_to_all(x, **more),
    "broadcast": lambda x, **more: dc.broadcast(x, src=1, **more),
    "reduce": lambda x, **more: dc.reduce(x, dst=1, **more),
    "gather": lambda x, **more: dc.gather(x, dst=1, **more),
    "scatter": lambda x, **more: dc.scatter(x, **more),
    "permute": lambda x, **more: dc.permute(x, [(0, 1)], sizes="auto", **more),
    "shift": lambda x, **more: dc.shift(x, **more),
    "scan": lambda x, **more: dc.scan(x, exclusive=True, **more),
}


@pytest.mark.parametrize("rows", [4, 40_000])
def test_several_at_once_awaited_in_any_order(rows):
    """Each rank waits in a different order."""

    def body(r):
        calls = {**CALLS, "reduce_scatter": lambda x, **more: dc.reduce_scatter(x, **more)}
        x = torch.linspace(r, 1, rows * 2, dtype=torch.float64).view(rows, 2).requires_grad_()
        pending = {name: call(x, async_op=True) for name, call in calls.items()}
        halves = dc.all_reduce(x.bfloat16(), async_op=True)
        names = list(calls)[r:] + list(calls)[:r]
        got = {name: pending[name].wait() for name in names}
        assert halves.wait().dtype == torch.bfloat16
        for name, call in calls.items():
            torch.testing.assert_close(got[name], call(x))
            assert pending[name].wait() is got[name]
        return sum((got[name] * (r + 1)).sum().item() for name in calls)

    assert gloo(body, range(2)) == pytest.approx(rules(body, range(2)))


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_truth(gradients, name):
    def loss(x, w):
        y = CALLS[name](x, async_op=True)
        other = dc.all_reduce(x.sin(), async_op=True)
        return w * (y.wait().square().sum() + other.wait().sum())

    def at_once(x, w):
        return w * (CALLS[name](x).square().sum() + dc.all_reduce(x.sin()).sum())

    xs, ws = torch.linspace(-1, 2, 16, dtype=torch.float64).view(2, 4, 2), [1.0, 10.0]
    torch.testing.assert_close(gradients(loss, list(xs), ws), gradients(at_once, list(xs), ws))


def test_backward_overlaps_with_computation(monkeypatch):
    """The backward of the wait starts the adjoint; the backward of the start waits for it."""

    def body(r):
        events = []
        whole = C10dEngine.all_reduce

        def all_reduce(self, x, y):
            events.append("start")
            wait = whole(self, x, y)
            return lambda: (events.append("wait"), wait())

        C10dEngine.all_reduce = all_reduce

        def during(what):
            class Meanwhile(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    events.append(what)
                    return x.clone()

                @staticmethod
                def backward(ctx, g):
                    events.append(f"{what} backward")
                    return g

            return Meanwhile.apply

        x = torch.ones(3, requires_grad=True)
        pending = dc.all_reduce(x, async_op=True)
        z = during("work")(2 * x)
        y = pending.wait()
        (y * z).sum().backward()
        return events, x.grad.tolist()

    for events, g in spawn(body, range(2)):
        assert events == ["start", "work", "wait", "start", "work backward", "wait"]
        assert g == [2 * 2 + 2 * 2] * 3  # Σ_r z_r, and 2 y


@runs_on("rules", "gloo")
def test_higher_orders_and_transforms_nest(run):
    def body(r, later):
        def f(x):
            if not later:
                return dc.all_gather(x).sin() * (r + 1)
            pending = dc.all_gather(x, async_op=True)
            return pending.wait().sin() * (r + 1)

        def loss(x):
            return f(x).square().sum()

        x = torch.linspace(r, 1, 3, dtype=torch.float64)
        v, u = torch.ones_like(x), x.cos()
        twice = torch.func.jvp(lambda x: torch.func.jvp(loss, (x,), (v,))[1], (x,), (u,))  # along v, and along v and u
        nested = torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(x)
        mapped = torch.func.vmap(torch.func.grad(loss))(torch.stack([x, 2 * x]))
        leaf = x.clone().requires_grad_()
        y = loss(leaf)
        (again,) = torch.autograd.grad(y, leaf, retain_graph=True)
        (g,) = torch.autograd.grad(y, leaf, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), leaf)
        return twice, nested, mapped, again, g, h, torch.func.hessian(loss)(x)

    torch.testing.assert_close(run(body, range(2), [True] * 2), run(body, range(2), [False] * 2))


@pytest.mark.parametrize("rules", [True, False])
def test_a_forgotten_wait_is_reported(rules):
    def body(x):
        dc.all_reduce(x, async_op=True)
        gc.collect()

    with pytest.warns(
        RuntimeWarning, match=r"all_reduce\(async_op=True\) at .*test_pending.py:\d+ was never waited for"
    ):
        simulate(body, [torch.ones(2)] * 2, rules=rules)


def test_after_a_forgotten_wait_the_group_works_on_real_processes():
    def body(r):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(3):
                dc.all_gather(torch.ones(100_000), async_op=True)
            gc.collect()
        return len(found), dc.all_reduce(torch.tensor(r)).item()

    assert gloo(body, range(2)) == [(3, 1)] * 2


def test_repr():
    pending = dc.all_reduce(torch.ones(1), async_op=True)
    assert "all_reduce started at" in repr(pending)
    assert ", not waited for>" in repr(pending)
    pending.wait()
    assert ", waited for>" in repr(pending)


def test_modified_in_place_after_the_wait():
    x = torch.ones(2, requires_grad=True)
    y = dc.all_reduce(x, async_op=True).wait()
    y.add_(1)
    y.sum().backward()
    assert x.grad.tolist() == [1, 1]


# ── tensors that change while a collective is in flight ──────────────────────────────────────────────────

FORWARD = {
    **CALLS,
    "gather in parts": lambda x, **more: dc.all_gather(x, **more),
    "blocks that are not contiguous": lambda x, **more: dc.all_to_all(x, 1, 0, **more),
    "half": lambda x, **more: dc.all_reduce(x.bfloat16(), **more),
}


def rows_of(name):
    return 4 if name == "reduce_scatter" else 40_000  # large enough to be in flight for a while


def changing_x(r):
    """Return the collectives whose result is wrong if x is modified after the start, on rank 0 before rank 1 starts."""
    wrong = []
    for name, call in FORWARD.items():
        x = torch.linspace(r, 1, rows_of(name) * 2, dtype=torch.float64).view(-1, 2)
        right = call(x.clone())
        if r:
            time.sleep(0.02)
        pending = call(x, async_op=True)
        x.fill_(7)
        if not torch.equal(pending.wait(), right):
            wrong.append(name)
    return wrong


def changing_the_gradient(r):
    """The same in backward: a hook zeroes b.grad, which shares memory with the gradient that the adjoint was given."""
    wrong = []

    def zero(b):
        b.grad.zero_()

    for name, call in FORWARD.items():
        found = []
        for hooked in (False, True):
            x = torch.linspace(r, 1, rows_of(name) * 2, dtype=torch.float64).view(-1, 2).requires_grad_()
            pending = call(x, async_op=True)
            b = torch.zeros_like(call(x.detach()), requires_grad=True)
            between = b.view_as(b)
            y = pending.wait()
            w = (torch.arange(y.numel()) % 5 + r + 1.0).view(y.shape).to(y)
            if hooked:
                b.register_post_accumulate_grad_hook(zero)
            if hooked and r:
                y.register_hook(lambda gy: time.sleep(0.02))
            torch.autograd.backward(y + between, w)
            assert hooked == (not b.grad.any()) or not b.numel()
            found.append(x.grad)
        if not torch.equal(*found):
            wrong.append(name)
    return wrong


@runs_on("rules", "gloo", "mpi")
def test_memory_may_change_once_a_collective_has_been_started(run):
    assert run(changing_x, range(2)) == run(changing_the_gradient, range(2)) == [[], []]


# ── one thread at a time ─────────────────────────────────────────────────────────────────────────────────


def in_two_threads(r):
    """Between the start and the wait of one thread, another thread's calls raise; after the wait they do not."""

    def in_thread(call):
        found = []

        def work():
            try:
                found.append(call())
            except ValueError as error:
                found.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return found[0]

    def compared():
        with dc.check_mode():
            dc.all_reduce(x)

    x = torch.tensor([1.0 + r], requires_grad=True)
    pending = dc.all_gather(x, async_op=True)
    starts = in_thread(lambda: dc.all_gather(x, async_op=True)), in_thread(lambda: dc.all_reduce(x))
    compares = in_thread(compared)
    own = dc.all_reduce(x).item()  # from the same thread
    waited = in_thread(pending.wait)  # wait sends nothing
    after = in_thread(lambda: dc.all_gather(x, async_op=True).wait())
    (waited * torch.tensor([1.0, 10.0])).sum().backward()  # in the main thread
    return (*starts, compares), own, waited.tolist(), after.tolist(), x.grad.item()


@runs_on("gloo", "mpi")
def test_two_threads_with_a_collective_in_flight(run):
    for r, (refused, *rest) in enumerate(run(in_two_threads, range(2))):
        for name, text in zip(["all_gather", "all_reduce", "check mode"], refused, strict=True):
            assert text.startswith(f"{name}: group: got a")
            assert "in which another thread has started a collective that is not yet waited for, expected one" in text
        assert rest == [3.0, [1.0, 2.0], [1.0, 2.0], 2.0 * [1, 10][r]]


@runs_on("rules", "gloo")
def test_a_wait_that_raised_can_be_repeated(run):
    def body(r):
        turn = resolve(None, "test").turn("broadcast")
        pending = dc.all_gather(torch.tensor([1.0 + r]), async_op=True)
        with turn, pytest.raises(ValueError, match=r"all_gather: group: got .* another thread is in broadcast"):
            pending.wait()
        assert ", not waited for>" in repr(pending)
        return pending.wait().tolist(), pending.wait().tolist()

    assert run(body, range(2)) == [([1.0, 2.0], [1.0, 2.0])] * 2


# ── graphs that run more than once, or in part ───────────────────────────────────────────────────────────


def backward_in_a_hook(r):
    """Twice through the same graph, while the adjoint of the outer backward is in flight; also to second order."""
    results = []
    for create in (False, True):
        x = torch.tensor([1.0, 2.0 + r], dtype=torch.float64, requires_grad=True)
        pending = dc.all_gather(x, async_op=True)
        between = x.cos()  # its backward runs between the start of the adjoint and its wait
        y = pending.wait()
        loss = (r + 1) * (y.square().sum() + between.prod())
        inner = []

        def hook(g, x=x, loss=loss, inner=inner, create=create):
            if len(inner) < 2:
                inner.append(None)
                inner.append(torch.autograd.grad(loss, x, retain_graph=True, create_graph=create)[0].detach())

        handle = between.register_hook(hook)
        (g,) = torch.autograd.grad(loss, x, retain_graph=True, create_graph=create)
        handle.remove()
        second = torch.autograd.grad(g.square().sum(), x)[0] if create else None
        results.append(([g.detach(), *(i for i in inner if i is not None)], second))
    return results


@runs_on("rules", "gloo", "mpi")
def test_a_backward_in_a_hook_through_the_same_graph(run):
    xs = [torch.tensor([1.0, 2.0 + r], dtype=torch.float64, requires_grad=True) for r in range(2)]
    total = sum((r + 1) * (torch.cat(xs).square().sum() + xs[r].cos().prod()) for r in range(2))
    gs = torch.autograd.grad(total, xs, create_graph=True)
    seconds = torch.autograd.grad(sum(g.square().sum() for g in gs), xs)
    for r, results in enumerate(run(backward_in_a_hook, range(2))):
        for order, found in enumerate(results):
            torch.testing.assert_close(found, ([gs[r].detach()] * 3, seconds[r] if order else None))


def in_checkpoints(r):
    """Async collectives in checkpoints that stop before, at and after the wait; return gradients and what is left."""

    def before(x):
        pending = dc.all_reduce(x.sin(), async_op=True)
        z = x * x
        return pending.wait() + z

    def after(x):
        pending = dc.all_gather(x.sin(), async_op=True)
        z = x.exp()
        return (pending.wait() * 2).square().sum() * z

    def two(x):
        pending = dc.all_reduce(x.cos(), async_op=True)
        other = dc.all_gather(x.sin(), async_op=True)
        z = x * x
        return (pending.wait() + z).sum() + other.wait().sum()

    def one_step(call):
        x = torch.tensor([0.5, 0.1 + r], dtype=torch.float64, requires_grad=True)
        ((r + 1) * call(x)).sum().backward()
        return x.grad

    engine, found = resolve(None, "test"), []
    for f in (before, after, two):
        for _ in range(3):
            again = one_step(lambda x, f=f: checkpoint(f, x, use_reentrant=False))
            left = len(engine.abandoned), len(engine.unwaited)
        dc.all_reduce(torch.ones(1))
        found.append((again, one_step(f), left, (len(engine.abandoned), len(engine.unwaited))))
    return found


@runs_on("rules", "gloo", "mpi")
def test_checkpoints_that_stop_before_the_wait(run):
    """Recomputation starts a collective, and stops once all tensors that backward needs are recomputed."""
    for of_rank in run(in_checkpoints, range(2)):
        for again, once, _, left in of_rank:
            torch.testing.assert_close(again, once)
            assert left == (0, 0)
        # The number does not grow with every step, and some checkpoints do stop before the wait.
        assert [abandoned for *_, (abandoned, _), _ in of_rank] == [1, 0, 2]


@runs_on("rules", "gloo")
def test_never_waited_for_in_a_region_of_joint_backward(run):
    """Its backward cannot run, because the adjoint is started by the backward of the wait."""

    def body(r):
        x = torch.ones(2, requires_grad=True)
        with dc.joint_backward() as joint:
            pending = dc.all_reduce(x, async_op=True)
            loss = joint(dc.all_gather(x).sum())
            with pytest.raises(
                RuntimeError,
                match=r"all_reduce\(async_op=True\) at .*py:\d+: backward: got a collective in flight, expected one "
                r"that was waited for before joint\(loss\); call wait\(\) or abandon\(\) first, on all ranks$",
            ):
                loss.backward()
        pending.wait()

    run(body, range(2))


@runs_on("rules", "gloo")
@pytest.mark.parametrize("ends", ["wait", "abandon", "in another region"])
def test_waited_for_after_the_region_it_is_a_part_of_it(run, ends):
    """Rank 1 ignores the result, so its backward reaches the wait through the chain only."""

    def body(r):
        x = torch.tensor([1.0 + r, -2.0], requires_grad=True)
        with dc.joint_backward() as joint:
            pending = dc.all_gather([x.sin(), x.double()[:r]], sizes="auto", async_op=True)
            z = dc.all_reduce(x * (r + 1), "max")
        dc.all_reduce(torch.ones(1))
        if ends == "abandon":
            pending.abandon()
            y = torch.zeros(4)
        elif ends == "in another region":
            with dc.joint_backward() as other:
                other(dc.all_reduce(x.cos()).sum())  # whose backward does not run
                y = pending.wait()[0]
        else:
            y = pending.wait()[0]
        weights = torch.arange(4.0)
        loss = (weights * y).sum() if r == 0 else z.square().sum()
        joint(loss).backward()
        return x.grad.tolist(), dc.all_reduce(torch.ones(1)).item()

    def expected(r):
        x = torch.tensor([1.0 + r, -2.0], requires_grad=True)
        z = dc.all_reduce(x * (r + 1), "max")
        y = dc.all_gather(x.sin()) * (ends != "abandon")
        loss = (torch.arange(4.0) * y).sum() if r == 0 else z.square().sum()
        with_all = loss + 0 * (y.sum() + z.sum())
        with_all.backward()
        return x.grad.tolist(), 2

    assert run(body, range(2)) == rules(expected, range(2))


def with_errors_in_between(r):
    """A collective in flight keeps its memory until it is complete; the next call waits for it and works."""

    def fails(g):
        raise KeyError("a hook")

    def one_step():
        x = torch.full((100_000,), 1.0 + r, requires_grad=True)
        pending = dc.all_gather(x, async_op=True)
        z = 2 * x
        z.register_hook(fails)
        try:
            (pending.wait()[:100_000] * z).sum().backward()
        except KeyError:
            return
        raise AssertionError("no error")

    for _ in range(3):
        one_step()
    # PyTorch keeps the graph of a backward that has failed until the next
    left = len(resolve(None, "test").unwaited) <= 1
    return dc.all_reduce(torch.tensor(1.0 + r)).item(), left


@runs_on("rules", "gloo", "mpi")
def test_an_error_between_the_start_and_the_wait(run):
    assert run(with_errors_in_between, range(2)) == [(3.0, True)] * 2


# ── polling ──────────────────────────────────────────────────────────────────────────────────────────────


def polled(r):
    """Rank 1 starts only after a collective in another group, for which it waits. Return what done() said, and y."""
    pair, one = new_group([0, 1]), torch.ones(1)
    dc.all_reduce(one)
    found = []
    for call in (dc.all_gather, dc.all_reduce, dc.shift, dc.broadcast):
        for tree in (False, True):
            x = torch.full((1000,), 1.0 + r, requires_grad=True)
            if r == 1:
                dc.all_reduce(one, group=pair)
            pending = call([x, x.double()] if tree else x, async_op=True)
            needs_all = call in (dc.all_gather, dc.all_reduce)  # in the shift, rank 0 receives from rank 2
            early = needs_all and r == 0 and pending.done()
            if r == 0:
                dc.all_reduce(one, group=pair)
            end = time.monotonic() + 20
            while not pending.done():
                assert time.monotonic() < end, call
                time.sleep(0.001)
            y = pending.wait()
            assert pending.done()
            y = y[0] if tree else y
            (y * (r + 1)).sum().backward()
            found.append((early, y.sum().item(), x.grad.sum().item()))
    return found


@runs_on("rules", "gloo", "mpi")
def test_done_polls_without_consuming_the_wait(run):
    for r, found in enumerate(run(polled, range(3))):
        shifted = [3000, 1000, 2000][r], [2000, 3000, 1000][r]
        expected = [(6000, 6000), (6000, 6000), shifted, (1000, [6000, 0, 0][r])]
        assert found == [(False, *pair) for pair in expected for _ in range(2)]


def test_done_of_one_rank_and_in_truth():
    pending = dc.all_gather(torch.ones(2), async_op=True)
    assert [pending.done(), pending.wait().tolist(), pending.done()] == [True, [1, 1], True]

    def body(r):
        pending = dc.all_gather([torch.tensor([r])], async_op=True)
        return pending.done(), pending.wait()[0].tolist()

    assert simulate(body, range(2)) == [(True, [0, 1])] * 2


def test_done_of_a_collective_that_fails():
    """done() is True and raises nothing; wait() raises."""

    def simulated(r):
        if r == 1:
            return
        pending = dc.all_gather(torch.ones(2), async_op=True)
        while not pending.done():
            pass
        pending.wait()

    with pytest.raises(dc.CollectiveMismatchError, match="rank 1 has ended"):
        rules(simulated, range(2))

    def on_gloo(r):
        group = dist.new_group(timeout=timedelta(seconds=1))
        if r == 1:
            time.sleep(3)
            return None
        pending = dc.all_gather(torch.ones(2), group=group, async_op=True)
        polls = 0
        while not pending.done():
            polls += 1
            time.sleep(0.01)
        with pytest.raises(dc.CollectiveFailedError, match="all_gather"):
            pending.wait()
        return polls > 10

    assert gloo(on_gloo, range(2))[0]


@runs_on("rules", "gloo")
def test_after_abandon_nothing_is_left_and_wait_is_an_error(run):
    def body(r):
        engine = resolve(None, "test")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pending = dc.all_gather([torch.ones(100), torch.ones(2)], async_op=True)
            pending.done()
            pending.abandon()
            with pytest.raises(
                RuntimeError, match=r"all_gather started at .*py:\d+: wait\(\) was called after abandon"
            ):
                pending.wait()
            del pending
            gc.collect()
        return dc.all_reduce(torch.tensor(r)).item(), len(engine.abandoned), len(engine.unwaited)

    assert run(body, range(2)) == [(1, 0, 0)] * 2


# ── used as the tensor that it is not ────────────────────────────────────────────────────────────────────

USES = {
    "add": lambda p, x: [lambda: p + 1, lambda: 1 + p, lambda: p + x, lambda: x + p],
    "matmul": lambda p, x: [lambda: p @ x, lambda: x @ p],
    "lt": lambda p, x: [lambda: p < x, lambda: x > p],
    "==": lambda p, x: [lambda: p == x, lambda: x == p],
    "neg": lambda p, x: [lambda: -p],
    "getitem": lambda p, x: [lambda: p[0]],
    "iter": lambda p, x: [lambda: list(p)],
    "len": lambda p, x: [lambda: len(p)],
    "bool": lambda p, x: [lambda: bool(p), lambda: not p],
    "float": lambda p, x: [lambda: float(p)],
    "array": lambda p, x: [lambda: np.asarray(p)],
    ".sum": lambda p, x: [lambda: p.sum()],
    ".shape": lambda p, x: [lambda: p.shape],
    ".backward": lambda p, x: [lambda: p.backward()],
    "sin": lambda p, x: [lambda: torch.sin(p)],
    "stack": lambda p, x: [lambda: torch.stack((x, p))],
    "relu": lambda p, x: [lambda: torch.nn.functional.relu(p)],
    "add_": lambda p, x: [lambda: x.add_(p)],
}


@pytest.mark.parametrize("use", USES)
def test_it_is_no_tensor(use):
    x = torch.ones(2)
    pending = dc.all_reduce(x, async_op=True)
    for attempt in USES[use](pending, x):
        text = refusal((TypeError, AttributeError), attempt)
        assert text.startswith(f"{use}: got the Pending of all_reduce(async_op=True) at {__file__}:")
        assert text.endswith(", expected its result; call .wait()")
    with pytest.raises(
        TypeError, match=r"all_gather: x: got Pending, expected a dense torch.Tensor; pass the result, x.w"
    ):
        dc.all_gather(pending)
    assert pending.wait().equal(x) and x.equal(torch.ones(2))


def test_it_is_an_object_like_others():
    pending, other = (dc.all_reduce(torch.ones(2), async_op=True) for _ in range(2))
    assert pending == pending and pending != other and {pending: 1}[pending] == 1
    assert not hasattr(pending, "sum") and getattr(pending, "no_such", None) is None
    with pytest.raises(AttributeError, match=r"^'Pending' object has no attribute 'no_such'$"):
        pending.no_such  # noqa: B018
    pending.wait()
    other.wait()
