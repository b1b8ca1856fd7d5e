"""async_op=True: the same results and gradients; communication overlaps with computation in both directions."""

import gc
import time
import warnings
from functools import partial

import pytest
import torch
from runs import gloo, profiled, runs_on
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from diffcoll.core.groups import resolve
from diffcoll.engines.turn import BackendError

CALLS = {
    "all_reduce": dc.all_reduce,
    "mean": partial(dc.all_reduce, op="mean"),
    "max": partial(dc.all_reduce, op="max"),
    "half": lambda x, **more: dc.all_reduce(x.bfloat16(), **more),
    "all_gather": partial(dc.all_gather, dim=1),
    "reduce_scatter": dc.reduce_scatter,
    "all_to_all": dc.all_to_all,
    "blocks that are not contiguous": partial(dc.all_to_all, split_dim=1, concat_dim=0),
    "broadcast": partial(dc.broadcast, src=1),
    "reduce": partial(dc.reduce, dst=1),
    "gather": partial(dc.gather, dst=1),
    "scatter": dc.scatter,
    "permute": partial(dc.permute, pairs=[(0, 1)]),
    "shift": dc.shift,
}


def x_of(r):
    """Large enough to be in flight for a while."""
    return torch.linspace(r, 1, 80_000, dtype=torch.float64).view(-1, 2)


def test_backward_overlaps_with_computation():
    """The backward of the wait starts the adjoint; the backward of the start waits for it."""

    class Meanwhile(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch.profiler.record_function("diffcoll.work: 0 B"):
                return x.clone()

        @staticmethod
        def backward(ctx, g):
            with torch.profiler.record_function("diffcoll.work backward: 0 B"):
                return g

    def body(r):
        x = torch.ones(3, requires_grad=True)

        def program():
            pending = dc.all_reduce(x, async_op=True)
            z = Meanwhile.apply(2 * x)
            (pending.wait() * z).sum().backward()

        return [name for name, _ in profiled(program)], x.grad.tolist()

    events = ["all_reduce", "work", "all_reduce", "all_reduce backward", "work backward", "all_reduce backward"]
    assert gloo(body, range(2)) == [(events, [2 * 2 + 2 * 2] * 3)] * 2  # Σ_r z_r, and 2 y


@runs_on("truth", "rules", "gloo", "mpi")
def test_a_forgotten_wait_is_reported_and_the_group_works(run):
    def body(r):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for x in (1.0, 2.0), (3.0, 4):
                dc.all_gather([torch.full((100_000,), r + each) for each in x], async_op=True)
            dc.all_gather(torch.full((100_000,), float(r)), async_op=True)
            gc.collect()
        kinds = {(w.category, "all_gather" in str(w.message), "test_pending.py:" in str(w.message)) for w in found}
        return len(found), kinds, dc.all_reduce(torch.tensor(r)).item()

    assert run(body, range(2)) == [(3, {(RuntimeWarning, True, True)}, 1)] * 2


@runs_on("rules", "gloo")
def test_an_error_of_what_was_given_up_is_not_that_of_the_next_call(run):
    def fails():
        raise BackendError

    def body(r):
        resolve(None, "test").abandoned.append(fails)
        return dc.all_reduce(torch.tensor(r)).item()

    assert run(body, range(2)) == [1, 1]


# ── tensors that change while a collective is in flight ──────────────────────────────────────────────────


def changing_x(r):
    """Return the collectives that are wrong if x is modified after the start, on rank 0 before rank 1 starts.

    All of them are in flight at once, and each rank waits in a different order.
    """
    right, pending, wrong = {}, {}, []
    for number, (name, call) in enumerate(CALLS.items()):
        x = x_of(r) + number
        right[name] = call(x.clone())
        if r:
            time.sleep(0.02)
        pending[name] = call(x, async_op=True)
        x.fill_(7)
    for name in [*CALLS][5 * r :] + [*CALLS][: 5 * r]:
        y = pending[name].wait()
        if pending[name].wait() is not y or not torch.equal(y, right[name]):
            wrong.append(name)
    return wrong


def changing_the_gradient(r):
    """The same in backward: a hook zeroes b.grad, which shares memory with the gradient that the adjoint was given."""
    wrong = []

    def zero(b):
        b.grad.zero_()

    for name, call in CALLS.items():
        found = []
        for hooked in (False, True):
            x = x_of(r).requires_grad_()
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
@pytest.mark.parametrize("program", [changing_x, changing_the_gradient])
def test_memory_may_change_once_a_collective_has_been_started(run, program):
    assert run(program, range(2)) == [[], []]


# ── graphs that run more than once, or in part ───────────────────────────────────────────────────────────


@runs_on("rules", "gloo", "mpi")
def test_a_backward_in_a_hook_through_the_same_graph(run):
    """Twice, while the adjoint of the outer backward is in flight; also to second order."""

    def loss(r, x, y, between):
        return (r + 1) * (y.square().sum() + between.prod())

    def body(r, create):
        x = torch.tensor([1.0, 2.0 + r], dtype=torch.float64, requires_grad=True)
        pending = dc.all_gather(x, async_op=True)
        between = x.cos()  # its backward runs between the start of the adjoint and its wait
        total, found, hooks = loss(r, x, pending.wait(), between), [], [None] * 2

        def hook(g):
            if hooks:
                hooks.pop()
                found.extend(torch.autograd.grad(total, x, retain_graph=True, create_graph=create))

        between.register_hook(hook)
        (g,) = torch.autograd.grad(total, x, retain_graph=True, create_graph=create)
        second = torch.autograd.grad(g.square().sum(), x)[0] if create else None
        return [gx.detach() for gx in (g, *found)], second

    xs = [torch.tensor([1.0, 2.0 + r], dtype=torch.float64, requires_grad=True) for r in range(2)]
    total = sum(loss(r, x, torch.cat(xs), x.cos()) for r, x in enumerate(xs))
    gs = torch.autograd.grad(total, xs, create_graph=True)
    seconds = torch.autograd.grad(sum(g.square().sum() for g in gs), xs)
    for create in (False, True):
        for r, found in enumerate(run(body, range(2), [create] * 2)):
            torch.testing.assert_close(found, ([gs[r].detach()] * 3, seconds[r] if create else None))


def before(x):
    pending = dc.all_reduce(x.sin(), async_op=True)
    z = x * x
    return pending.wait() + z


def after(x):
    pending = dc.all_gather(x.sin(), async_op=True)
    z = x.exp()
    return (pending.wait() * 2).square().sum() * z


def left(x):
    """Returns what is in flight, which nobody waits for when this is recomputed."""
    pending = dc.all_reduce(x.sin(), async_op=True)
    return x * x, pending


@runs_on("rules", "gloo", "mpi")
@pytest.mark.parametrize("part", [before, after, left])
def test_checkpoints_that_stop_before_at_and_after_the_wait(run, part):
    """Recomputation starts a collective, and stops once all tensors that backward needs are recomputed."""

    def gradient(r, call):
        x = torch.tensor([0.5, 0.1 + r], dtype=torch.float64, requires_grad=True)
        y = call(x)
        ((r + 1) * (y[0] * y[1].wait() if part is left else y)).sum().backward()
        return x.grad

    def body(r):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            again = [gradient(r, lambda x: checkpoint(part, x, use_reentrant=False)) for _ in range(3)]
            gc.collect()
        return again, gradient(r, part), [w.category for w in said if w.category is RuntimeWarning]

    for again, once, said in run(body, range(2)):
        torch.testing.assert_close(again, [once] * 3)
        assert said == []  # what is left is not a forgotten wait


@runs_on("rules", "gloo")
@pytest.mark.parametrize("waits", [False, True, "on rank 0, within"])
def test_not_waited_for_in_its_region_of_joint_backward(run, waits):
    """It counts as a result that this rank's loss does not use."""
    within = waits not in (False, True)

    def body(r):
        x = torch.ones(2, requires_grad=True)
        with dc.joint_backward() as joint:
            pending = dc.all_to_all(x * 2, async_op=True)
            used = 5 * pending.wait().sum() if within and r == 0 else 0
            loss = joint((r + 1) * dc.all_gather(x).sum() + used)
        if waits is True:
            pending.wait()
        loss.backward()
        pending.wait()
        return x.grad.tolist()

    assert run(body, range(2)) == [[3.0 + 10 * within, 3.0]] * 2  # block 0 of each rank is on rank 0


# ── the wait in any place of the program ─────────────────────────────────────────────────────────────────


def under(mode):
    def place(pending, h):
        with mode():
            pending.wait()
        return lambda: h.exp() * pending.wait()

    return place


def in_a_checkpoint(reentrant):
    def place(pending, h):
        return lambda: checkpoint(lambda h: h.exp() * pending.wait(), h, use_reentrant=reentrant)

    return place


def in_a_hook(pending, h):
    def hook(g):
        pending.wait()

    z = 0 * h
    z.register_hook(hook)
    z.sum().backward()
    return lambda: h.exp() * pending.wait()


PLACES = {
    "no_grad": under(torch.no_grad),
    "inference_mode": under(torch.inference_mode),
    "enable_grad": under(torch.enable_grad),
    "save_on_cpu": under(torch.autograd.graph.save_on_cpu),
    "checkpoint": in_a_checkpoint(False),
    "reentrant": in_a_checkpoint(True),
    "hook": in_a_hook,
}
STARTED = {
    "here": lambda call, x: call(x, async_op=True),
    "in a checkpoint": lambda call, x: checkpoint(lambda x: call(x.exp().log(), async_op=True), x, use_reentrant=False),
}


@runs_on("rules", "gloo")
@pytest.mark.parametrize("start", STARTED)
@pytest.mark.parametrize("place", PLACES)
def test_the_wait_may_be_anywhere(run, place, start):
    """The gradients are those of a plain call, wherever `wait()` is called first."""

    def gradients(r, call):
        """Of the plain call, and of one that is waited for in this place."""
        leaves, plain = [(x_of(r)[:6] + 1).requires_grad_() for _ in range(2)], call(x_of(r)[:6] + 1)
        h = torch.linspace(0, r + 1.0, plain.numel(), dtype=torch.float64).view(plain.shape)
        y, pending = call(leaves[0]), STARTED[start](call, leaves[1])
        hs = [h.clone().requires_grad_() for _ in leaves]
        programs = [lambda: hs[0].exp() * y, PLACES[place](pending, hs[1])]
        hs[1].grad = None
        for program in programs:
            ((r + 1) * program()).sum().backward()
        return [[x.grad, h.grad] for x, h in zip(leaves, hs, strict=True)]

    for of_rank in run(lambda r: [gradients(r, call) for call in CALLS.values()], range(2)):
        for name, (plain, placed) in zip(CALLS, of_rank, strict=True):
            torch.testing.assert_close(placed, plain, msg=name)


# ── the object ───────────────────────────────────────────────────────────────────────────────────────────

USES = [
    lambda p, x: p + 1,
    lambda p, x: 1 + p,
    lambda p, x: x @ p,
    lambda p, x: -p,
    lambda p, x: p[0],
    lambda p, x: list(p),
    lambda p, x: len(p),
    lambda p, x: bool(p),
    lambda p, x: float(p),
    lambda p, x: torch.sin(p),
    lambda p, x: torch.stack((x, p)),
    lambda p, x: x.add_(p),
    lambda p, x: dc.all_gather(p),
]


def test_it_is_no_tensor_and_an_object_like_others():
    x = torch.ones(2)
    pending, other = (dc.all_reduce(x, async_op=True) for _ in range(2))
    for use in USES:
        with pytest.raises(TypeError, match=r"wait\(\)"):
            use(pending, x)
    assert not hasattr(pending, "sum")
    assert pending == pending and pending != other and {pending: 1}[pending] == 1
    assert "all_reduce" in repr(pending) and "test_pending.py:" in repr(pending)
    waiting = repr(pending)
    assert pending.wait().equal(x) and x.equal(torch.ones(2)) and repr(pending) != waiting
    other.wait()
