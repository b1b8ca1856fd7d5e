"""joint_backward: gradients equal truth's on every rank and no rank hangs, whichever outputs the ranks' losses use."""

import gc
import weakref
from functools import cache, partial

import pytest
import torch
from releases import compiles
from runs import gloo, new_group, profiled, runs_on, truth
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from diffcoll.testing import cases

N = 3


def weighted(r, y):
    return (y * (r + 1)).sum()


# The loss of rank r from its x. Ranks use different outputs. `joint` is the region.


def ignores_everything(r, x, joint):
    y = dc.all_reduce(x.sin())
    return weighted(r, y) if r == 1 else torch.tensor(5.0, dtype=x.dtype)


def ignores_some(r, x, joint):
    ys = [dc.all_reduce(x * 2), dc.all_gather(x.exp()), dc.broadcast(x, src=1), dc.all_reduce(x, "product")]
    return sum(weighted(r, y) for i, y in enumerate(ys) if i % N == r)


def needs_no_gradient(r, x, joint):
    y = dc.all_gather(x.detach() if r == 0 else x)
    return weighted(r, y.square()) + weighted(r, dc.all_reduce(x if r else x.detach(), "max")) + x.sum()


def other_control_flow(r, x, joint):
    y = dc.all_reduce(x)
    if r == 0:
        return y.sum()
    z = y.square() if r == 1 else y.detach() * x
    return z.sum() * 3


def used_twice(r, x, joint):
    y = dc.reduce_scatter(dc.all_gather(x))
    return weighted(r, y) + weighted(r, y * y) if r else x.sum()


def nested(r, x, joint):
    y = dc.all_reduce(x)
    with dc.joint_backward() as inner:
        z = dc.all_reduce(y.cos())
        if r == 0:
            inner(z.sum())  # not the loss
    shifted = dc.shift(y)
    return weighted(r, z) + weighted(r, shifted) if r == 2 else y.sum()


def without_gradients(r, x, joint):
    with torch.no_grad():
        scale = dc.all_reduce(x.abs().sum())
    y = dc.all_reduce(x)
    return weighted(r, y) / scale if r else x.sum()


def async_ones(r, x, joint):
    a, b = dc.all_reduce(x, async_op=True), dc.all_gather(x.sin(), async_op=True)
    b, a = b.wait(), a.wait()
    return weighted(r, a) if r == 0 else weighted(r, b) if r == 1 else x.sum()


def trees(r, x, joint):
    y = dc.all_reduce({"a": x, "b": [x.sin(), x.float()]})
    return weighted(r, y["b"][0]) if r == 1 else x.sum()


def complex_numbers(r, x, joint):
    y = dc.all_reduce(torch.complex(x, x.sin()))
    return weighted(r, y.abs()) if r == 1 else x.sum()


def sub_groups(r, x, joint):
    low, high = new_group([0, 1]), new_group([1, 2])
    y = dc.all_reduce(x)
    a = dc.all_gather(y.exp(), group=low) if r < 2 else y
    b = dc.all_reduce(a.sum(), group=high) if r > 0 else a
    return weighted(r, b) if r == 2 else x.sum()


def after_an_exception(r, x, joint):
    with pytest.raises(KeyError), dc.joint_backward():
        dc.all_reduce(x)
        raise KeyError
    y = dc.all_reduce(x * 2)
    return weighted(r, y) if r == 1 else x.sum()


PROGRAMS = [
    ignores_everything,
    ignores_some,
    needs_no_gradient,
    other_control_flow,
    used_twice,
    nested,
    without_gradients,
    async_ones,
    trees,
    complex_numbers,
    sub_groups,
    after_an_exception,
]


def inputs(r):
    return torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(r))


def in_region(program, r, x):
    with dc.joint_backward() as joint:
        return joint(program(r, x, joint))


def true(program):
    xs = [inputs(r).requires_grad_() for r in range(N)]
    losses = truth(partial(in_region, program), range(N), xs)
    return torch.autograd.grad(sum(losses), xs)


@runs_on("rules", "gloo", "mpi")
def test_gradients_are_those_of_truth(run):
    def body(r):
        found = []
        for program in PROGRAMS:
            x = inputs(r).requires_grad_()
            loss = in_region(program, r, x)
            loss.backward(retain_graph=True)
            once = x.grad.clone()
            loss.backward()  # a second time, on all ranks
            found.append((once, x.grad))
        return found

    got = run(body, range(N))
    for i, program in enumerate(PROGRAMS):
        for r, expected in enumerate(true(program)):
            once, twice = got[r][i]
            torch.testing.assert_close(once, expected, msg=program.__name__)
            torch.testing.assert_close(twice, 2 * expected, msg=program.__name__)


@runs_on("rules", "gloo")
def test_every_collective_ignored_by_one_rank(run):
    table = [case for case in cases.table(N) if case.arguments.get("grad_placement") is None]

    def loss(case, r, x):
        y = case.call(x, r)
        return weighted(r, y.sin()) if r != 1 else x.sum()

    def body(r):
        found = []
        for case in table:
            x = case.x(r, 5).requires_grad_()
            (g,) = torch.autograd.grad(in_region(lambda r, x, joint: loss(case, r, x), r, x), x)  # noqa: B023
            found.append(g)
        return found

    got = run(body, range(N))
    for i, case in enumerate(table):
        xs = [case.x(r, 5).requires_grad_() for r in range(N)]
        right = torch.autograd.grad(sum(truth(partial(loss, case), range(N), xs)), xs)
        for r in range(N):
            torch.testing.assert_close(got[r][i], right[r], msg=str(case))


@runs_on("rules", "gloo", "mpi")
def test_second_order(run):
    """One rank has no penalty on the gradients; another one's loss does not use the collectives."""

    def program(r, x, joint):
        y = dc.all_reduce(x.sin()) * dc.all_gather(x).sum()
        return joint(weighted(r, y * y) if r else x.square().sum())

    def penalty(r, g):
        return g.square().sum() if r == 2 else g.sum() * 0

    def body(r):
        x = inputs(r).requires_grad_()
        with dc.joint_backward() as joint:
            (g,) = torch.autograd.grad(program(r, x, joint), x, create_graph=True)
            (h,) = torch.autograd.grad(joint(penalty(r, g)), x)
        return g.detach(), h

    xs = [inputs(r).requires_grad_() for r in range(N)]
    losses = truth(lambda r, x: program(r, x, lambda loss: loss), range(N), xs)
    gs = torch.autograd.grad(sum(losses), xs, create_graph=True)
    hs = torch.autograd.grad(sum(penalty(r, g) for r, g in enumerate(gs)), xs)
    for r, (g, h) in enumerate(run(body, range(N))):
        torch.testing.assert_close(g, gs[r])
        torch.testing.assert_close(h, hs[r])


@runs_on("rules", "gloo")
def test_values_transforms_and_forward_mode(run):
    """Values are those outside of the region; transforms of torch.func are not recorded; forward mode is an error."""

    def body(r):
        x, t = inputs(r), inputs(r + 7)

        def found():
            return [
                dc.all_reduce(x.sin()),
                torch.func.jvp(lambda x: dc.all_reduce(x.sin()), (x,), (t,))[1],
                torch.func.vmap(dc.all_gather)(x),
                torch.func.grad(lambda x: (dc.all_gather(x) * (r + 1)).sum())(x),
            ]

        outside = found()
        with dc.joint_backward() as joint:
            torch.testing.assert_close([y.detach() for y in found()], outside, rtol=0, atol=0)
            integers = dc.all_reduce(torch.tensor([r]))
            with forward_ad.dual_level(), pytest.raises(RuntimeError, match="joint_backward: all_reduce: "):
                dc.all_reduce(forward_ad.make_dual(x, t))
            (g,) = torch.autograd.grad(joint(dc.all_reduce(x.requires_grad_()).sum()), x)  # the region works
        return integers.requires_grad, dc.all_reduce(inputs(r)).requires_grad, g.unique().tolist()

    assert run(body, range(N)) == [(False, False, [N])] * N


def test_a_region_sends_nothing_more():
    """If all ranks use all outputs, the messages are those without the region."""

    def body(r):
        x = inputs(r).requires_grad_()

        def loss():
            return dc.all_reduce(x).sum() + dc.all_gather(x, sizes="auto").sum()

        def with_region():
            with dc.joint_backward() as joint:
                joint(loss()).backward()

        return sorted(profiled(with_region)), sorted(profiled(lambda: loss().backward()))

    for region, plain in gloo(body, range(3)):
        assert region == plain != []


@compiles
def test_a_region_is_not_compiled():
    with dc.joint_backward(), pytest.raises(Exception, match="joint_backward"):
        torch.compile(dc.all_reduce, backend="eager", fullgraph=True)(torch.ones(1))


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lambda x: dc.all_reduce(x * 2), id="plain"),
        pytest.param(
            lambda x: checkpoint(lambda t: dc.all_reduce(t * 2).square(), x, use_reentrant=False), id="checkpoint"
        ),
    ],
)
def test_a_region_is_freed_without_the_garbage_collector(program):
    gc.disable()
    try:
        x = torch.ones(3, requires_grad=True)
        with dc.joint_backward() as joint:
            y = program(x)
            loss = joint(y.sum())
        loss.backward()
        kept = weakref.ref(y)
        del y, loss, joint
        assert kept() is None
    finally:
        gc.enable()


# ── checkpoints: collectives in a recomputed part run again, on every rank ───────────────────────────────────────


def plainly(function, x):
    return function(x)


def a_part(r, x, again):
    def part(t):
        y = dc.all_reduce(t.sin())
        z = dc.all_gather(y, 1)
        return z.exp().mean(1, keepdim=True) * dc.all_reduce(y, "product")

    return again(part, dc.all_reduce(x) * x)


def with_calls_without_gradients(r, x, again):
    def part(t):
        y = dc.all_reduce(t.sin())
        with torch.no_grad():
            scale = dc.all_reduce(y.square().sum())
        return dc.all_reduce(y, "product") + dc.all_reduce(torch.tensor([r + 1])) / scale

    return again(part, x)


def saved_nowhere(r, x, again):
    return again(lambda t: dc.all_reduce(dc.all_gather(t)), x)


def several(r, x, again):
    y = again(lambda t: dc.all_reduce(t.sin()).square(), x)
    z = again(lambda t: dc.shift(t.cos()).exp(), y * x)
    return y + z if r else z


def within_another(r, x, again):
    def inner(t):
        return dc.all_gather(t.cos()).square().sum() * t

    def middle(t):
        y = again(inner, dc.all_reduce(t * t))
        return dc.broadcast(again(inner, y), src=1).sin()

    return again(lambda t: again(middle, dc.all_reduce(t.sin()).cos()).square(), x * 1.0)


def other_tensors_saved_afterwards(r, x, again):
    def part(t):
        y = dc.all_reduce(t.sin())
        return y.square() if r == 0 else y

    return again(part, x) * x


def async_within(r, x, again):
    def part(t):
        a, b = dc.all_reduce(t.sin(), async_op=True), dc.all_gather(t.exp(), async_op=True)
        y = t.cos() if r == 1 else t
        return b.wait().sum() * a.wait() * y

    return again(part, x)


def region_within(r, x, again):
    def part(t):
        with dc.joint_backward() as joint:
            y = dc.all_reduce(t.sin())
            return joint(y * y if r == 1 else t)

    return again(part, x) * x


CHECKPOINTED = [
    a_part,
    with_calls_without_gradients,
    saved_nowhere,
    several,
    within_another,
    other_tensors_saved_afterwards,
    async_within,
    region_within,
]


def penalty(r, g):
    return g.square().sum() * (r + 1) if r != 1 else g.sum() * 0


def in_a_region(program, again, ignored_by, inside, r):
    """Return the gradient of two backwards, in the region or after it, and the second derivative."""
    x = inputs(r).requires_grad_()
    with dc.joint_backward() as joint:
        y = program(r, x, again)
        loss = joint(x.sum() if r == ignored_by else weighted(r, y))
        if inside:
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        (h,) = torch.autograd.grad(joint(penalty(r, g) + 0 * x.sum()), x, retain_graph=not inside)
    if not inside:
        loss.backward(retain_graph=True)
        loss.backward()
    return x.grad, h


@cache
def right(program, ignored_by, size):
    """The same by truth, without checkpoints and the region."""

    def loss(r, x):
        y = program(r, x, plainly)
        return x.sum() if r == ignored_by else weighted(r, y)

    xs = [inputs(r).requires_grad_() for r in range(size)]
    gs = torch.autograd.grad(sum(truth(loss, range(size), xs)), xs, create_graph=True)
    total = sum(penalty(r, g) + 0 * x.sum() for r, (g, x) in enumerate(zip(gs, xs, strict=True)))
    return [(2 * g.detach(), h) for g, h in zip(gs, torch.autograd.grad(total, xs), strict=True)]


@runs_on("rules", "gloo")
@pytest.mark.parametrize("program", CHECKPOINTED)
@pytest.mark.parametrize("size", [2, 3])
def test_checkpoints_around_some_collectives(run, program, size):
    """To second order, where ranks ignore different outputs, or none."""
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    ways = [(by, inside) for by in (None, 0, 1) for inside in (True, False)]
    got = run(lambda r: [in_a_region(program, again, *way, r) for way in ways], range(size))
    for i, (by, inside) in enumerate(ways):
        for r, expected in enumerate(right(program, by, size)):
            why = f"ignored by {by}, {inside=}, rank {r}"
            torch.testing.assert_close(got[r][i], expected, msg=lambda text: f"{why}: {text}")  # noqa: B023


@runs_on("rules", "gloo")
def test_a_checkpoint_of_an_x_that_needs_no_gradient_on_one_rank(run):
    def gradient(r, again):
        x = inputs(r).requires_grad_()
        with dc.joint_backward() as joint:
            y = again(lambda t: dc.all_reduce(t).square().exp(), x if r else x.detach())
            joint(weighted(r, y) + x.sum() if r < 2 else x.sum()).backward()
        return x.grad

    again = partial(checkpoint, use_reentrant=False)
    for plain, recomputed in run(lambda r: [gradient(r, plainly), gradient(r, again)], range(N)):
        torch.testing.assert_close(recomputed, plain)


@runs_on("rules", "gloo")
@pytest.mark.parametrize("nested", [False, True])
def test_a_reentrant_checkpoint_is_an_error_on_every_rank(run, nested):
    """A rank's backward may not reach the node of such a checkpoint, and its collectives are not recorded before."""

    def part(x):
        return dc.all_reduce(x.sin()).square()

    def body(r):
        x = inputs(r).requires_grad_()
        again = partial(checkpoint, use_reentrant=True)
        with dc.joint_backward() as joint:
            with pytest.raises(RuntimeError, match=r"all_reduce: checkpoint: "):
                again(partial(again, part) if nested else part, x)
            joint(dc.all_reduce(x).sum()).backward()  # the group works
        y = again(part, x)  # allowed outside a region
        with dc.joint_backward() as joint:
            z = dc.all_reduce(x * 2)
            y.sum().backward()  # within a region, which does not record the recomputed collectives
            joint(z.sum()).backward()
        return x.grad

    found = run(body, range(N))
    total = sum(inputs(r).sin() for r in range(N))
    for r, g in enumerate(found):
        torch.testing.assert_close(g, N + 2 * N * total * inputs(r).cos() + 2 * N)
