"""joint_backward: derivatives equal truth's on every rank and no rank hangs, whichever outputs the losses use."""

from functools import partial

import pytest
import torch
from runs import gloo, new_group, profiled, runs_on, truth
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from diffcoll.testing import cases

N = 3


def weighted(r, y):
    return (y * (r + 1)).sum()


# What rank r computes from its x. Ranks use different outputs. `again` calls a part, in a checkpoint or not: its
# collectives run again in backward, on every rank.


def ignores_some(r, x, again):
    ys = [dc.all_reduce(x * 2), dc.all_gather(x.exp()), dc.broadcast(x, src=1), dc.all_reduce(x, "product")]
    ys.append(dc.all_reduce(torch.complex(x, x.sin())).abs())
    return sum(weighted(r, y) for i, y in enumerate(ys) if i % N == r)


def needs_no_gradient(r, x, again):
    y = dc.all_gather(x.detach() if r == 0 else x)
    z = again(lambda t: dc.all_reduce(t).square().exp(), x if r else x.detach())
    largest = dc.all_reduce(x if r else x.detach(), "max")
    return weighted(r, y.square()) + weighted(r, largest) + z.sum() * (r > 1) + x.sum()


def needs_an_equal_one(r, x, again):
    equal = x - x.detach() + inputs(0)
    return dc.sum_gradients(equal).sin().sum() + dc.split(equal, 1).cos().sum() * r


def needs_one_in_another_call(r, x, again):
    return dc.all_reduce(x.sin()).sum() + needs_no_gradient(r, x, again)


def nested(r, x, again):
    with pytest.raises(KeyError), dc.joint_backward():
        y = dc.all_reduce(x)
        raise KeyError
    with dc.joint_backward() as inner:
        z = dc.all_reduce(y.cos())
        if r == 0:
            inner(z.sum())  # not the loss
    shifted = dc.shift(y)
    return weighted(r, z) + weighted(r, shifted) if r == 2 else y.sum()


def sub_groups(r, x, again):
    low, high = new_group([0, 1]), new_group([1, 2])
    y = dc.all_reduce(x)
    a = dc.all_gather(y.exp(), group=low) if r < 2 else y
    b = dc.all_reduce(a.sum(), group=high) if r > 0 else a
    return b if r == 2 else x


def with_calls_without_gradients(r, x, again):
    def part(t):
        y = dc.all_reduce(t.sin())
        with torch.no_grad():
            scale = dc.all_reduce(y.square().sum())
        z = dc.all_gather(y, 1).exp().mean(1, keepdim=True)
        return z * dc.all_reduce(y, "product") + dc.all_reduce(torch.tensor([r + 1])) / scale

    return again(part, dc.all_reduce(x) * x)


def saved_nowhere(r, x, again):
    return again(lambda t: dc.all_reduce(dc.all_gather(t)), x)


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


#: test_programs.py has trees, and several checkpoints.
PROGRAMS = [
    *(ignores_some, needs_one_in_another_call, nested, sub_groups, with_calls_without_gradients, saved_nowhere),
    *(within_another, other_tensors_saved_afterwards, async_within, region_within),
]


def of_case(case):
    return lambda r, x, again: case.call(case.x(r, 5) * (1 + x.sum() - x.detach().sum()), r).sin()


RECOMPUTED = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def plainly(function, x):
    return function(x)


def inputs(r):
    return torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(r))


def loss(program, again, ignored_by, r, x):
    y = program(r, x, again)
    return x.sum() if r == ignored_by else weighted(r, y)


def penalty(r, g):
    """Of second order; that of rank 1 does not depend on the gradient."""
    return g.square().sum() * (r + 1) if r != 1 else g.sum() * 0


def derivatives(program, ignored_by, inside, r):
    """Return the gradients of two backwards, in the region or after it, and the second derivative."""
    x = inputs(r).requires_grad_()
    with dc.joint_backward() as joint:
        total = joint(loss(program, RECOMPUTED, ignored_by, r, x))
        if inside:
            total.backward(retain_graph=True)
            total.backward(retain_graph=True)
        (g,) = torch.autograd.grad(total, x, create_graph=True)
        (h,) = torch.autograd.grad(joint(penalty(r, g) + 0 * x.sum()), x, retain_graph=not inside)
    if not inside:
        total.backward(retain_graph=True)
        total.backward()
    return x.grad / 2, h


def true(program, ignored_by):
    """The same by truth, without checkpoints and the region."""
    xs = [inputs(r).requires_grad_() for r in range(N)]
    losses = truth(partial(loss, program, plainly, ignored_by), range(N), xs)
    gs = torch.autograd.grad(sum(losses), xs, create_graph=True, materialize_grads=True)
    hs = torch.autograd.grad(sum(penalty(r, g) + 0 * x.sum() for r, (g, x) in enumerate(zip(gs, xs, strict=True))), xs)
    return [(g.detach(), h) for g, h in zip(gs, hs, strict=True)]


TABLE = [of_case(case) for case in cases.table(N) if not any(case.shared)]


@runs_on("rules", "gloo", "mpi")
@pytest.mark.parametrize("programs", [PROGRAMS, TABLE], ids=["programs", "table"])
def test_derivatives_are_those_of_truth(run, programs):
    """To second order, where ranks ignore different outputs, or none."""
    ways = [(None, True), (0, False), (1, True), (1, False)] if programs is PROGRAMS else [(1, False)]
    each = [(program, *way) for program in programs for way in ways]
    found = run(lambda r: [derivatives(*one, r) for one in each], range(N))
    for (program, by, inside), *of_ranks in zip(each, *found, strict=True):
        for r, (got, expected) in enumerate(zip(of_ranks, true(program, by), strict=True)):
            why = f"{program}, ignored by {by}, {inside=}, rank {r}"
            torch.testing.assert_close(got, expected, msg=lambda text: f"{why}: {text}")  # noqa: B023


@runs_on("rules", "gloo")
@pytest.mark.parametrize("program", [needs_no_gradient, needs_an_equal_one])
def test_first_derivatives_only(run, program):
    """`torch.autograd.grad` would run only what leads to its inputs, and the penalty is not equal on all ranks."""

    def body(r):
        x = inputs(r).requires_grad_()
        with dc.joint_backward() as joint:
            joint(loss(program, RECOMPUTED, 1, r, x)).backward()
        return x.grad

    xs = [inputs(r).requires_grad_() for r in range(N)]
    total = sum(truth(partial(loss, program, plainly, 1), range(N), xs))
    torch.testing.assert_close(run(body, range(N)), [*torch.autograd.grad(total, xs)])


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
