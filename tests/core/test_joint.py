"""joint_backward: gradients equal truth's on every rank and no rank hangs, whichever outputs the ranks' losses use."""

import gc
import random
import weakref
from functools import cache, partial
from itertools import product

import nests
import pytest
import torch
from runs import gloo, gloo_messages, rules, runs_on
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from diffcoll.testing import cases, new_group, simulate

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
    sub_groups,
    after_an_exception,
]


def inputs(r):
    return torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(r))


def in_region(program, r, x):
    with dc.joint_backward() as joint:
        return joint(program(r, x, joint))


def truth(program):
    xs = [inputs(r).requires_grad_() for r in range(N)]
    losses = simulate(partial(in_region, program), range(N), xs)
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
        for r, expected in enumerate(truth(program)):
            once, twice = got[r][i]
            torch.testing.assert_close(once, expected, msg=program.__name__)
            torch.testing.assert_close(twice, 2 * expected, msg=program.__name__)


@runs_on("rules", "gloo")
def test_every_collective_ignored_by_one_rank(run):
    table = [c for c in cases.table(N) if None not in c.shapes and c.arguments.get("grad_placement") is None]
    assert len(table) > 50

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
        right = torch.autograd.grad(sum(simulate(partial(loss, case), range(N), xs)), xs)
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
    losses = simulate(lambda r, x: program(r, x, lambda loss: loss), range(N), xs)
    gs = torch.autograd.grad(sum(losses), xs, create_graph=True)
    hs = torch.autograd.grad(sum(penalty(r, g) for r, g in enumerate(gs)), xs)
    for r, (g, h) in enumerate(run(body, range(N))):
        torch.testing.assert_close(g, gs[r])
        torch.testing.assert_close(h, hs[r])


def test_forward_mode_and_values_are_as_before():
    def body(r):
        x, t = inputs(r), inputs(r + 7)
        _, outside = torch.func.jvp(lambda x: dc.all_reduce(x.sin()), (x,), (t,))
        with dc.joint_backward() as joint:
            _, inside = torch.func.jvp(lambda x: dc.all_reduce(x.sin()), (x,), (t,))
            with torch.autograd.forward_ad.dual_level():
                y = joint(dc.all_reduce(torch.autograd.forward_ad.make_dual(x, t).sin()))
                dual = torch.autograd.forward_ad.unpack_dual(y).tangent
            integers = dc.all_reduce(torch.tensor([r]))
        assert torch.equal(outside, inside)
        assert torch.equal(outside, dual)
        assert torch.equal(y, dc.all_reduce(x.sin()))
        assert not integers.requires_grad
        assert not dc.all_reduce(x).requires_grad  # outside of the region
        return True

    assert rules(body, range(N)) == [True] * N


def through_links(r, x):
    return dc.all_reduce(dc.all_gather(x.sin()) ** 2)


def through_async(r, x):
    pending = dc.all_reduce(x.sin(), async_op=True)
    return pending.wait() * r


def without_grad(r, x):
    dc.all_reduce(torch.tensor([r]))
    with torch.no_grad():
        return dc.all_reduce(x, "product")


def of_a_tree(r, x):
    return dc.all_reduce({"a": x, "b": x.cos()}, "mean")["b"]


@runs_on("rules", "gloo")
def test_a_tangent_on_one_rank_only(run):
    """Equal to a tangent of zero on the others."""

    def tangents(r, has_tangent, requires_grad):
        found = []
        for program in (through_links, through_async, without_grad, of_a_tree):
            with dc.joint_backward() as joint, forward_ad.dual_level():
                x = inputs(r).requires_grad_(requires_grad)
                t = inputs(r + 7) if r == 1 else torch.zeros(2, 3, dtype=x.dtype)
                loss = joint(program(r, forward_ad.make_dual(x, t) if has_tangent else x).square().sum())
                tangent = forward_ad.unpack_dual(loss).tangent
                if requires_grad:  # forward over reverse
                    tangent = torch.autograd.grad(joint(tangent), x, allow_unused=True)[0]
                found.append(tangent)
        return found

    def body(r):
        for requires_grad in (False, True):
            for one, all_ in zip(tangents(r, r == 1, requires_grad), tangents(r, True, requires_grad), strict=True):
                assert (one is None) == (all_ is None)
                if one is not None:
                    torch.testing.assert_close(one, all_)
        return [t.norm() > 0 for t in tangents(r, r == 1, False)]

    for size in (2, 3):
        for r, moved in enumerate(run(body, range(size))):
            assert all(moved) or r == 0  # the result of through_async is multiplied by r


@runs_on("rules", "gloo")
def test_check_mode_compares_recording_and_tangents(run):
    def body(r):
        x = inputs(r).requires_grad_()
        with pytest.raises(dc.CollectiveMismatchError) as no_grad, dc.check_mode(), dc.joint_backward():
            with torch.set_grad_enabled(r != 1):
                dc.all_reduce(x)
        found = [str(no_grad.value)]
        for async_op in (False, True):
            with pytest.raises(dc.CollectiveMismatchError) as tangent, dc.check_mode(), forward_ad.dual_level():
                y = dc.all_reduce(x if r else forward_ad.make_dual(x, torch.ones_like(x)), async_op=async_op)
                if async_op:
                    y.wait()
            found.append(str(tangent.value))
        with dc.check_mode(), dc.joint_backward() as joint, forward_ad.dual_level():
            y = dc.all_reduce(x if r else forward_ad.make_dual(x, torch.ones_like(x)))
            joint(forward_ad.unpack_dual(y).tangent.sum()).backward()
        return found

    for no_grad, *tangents in run(body, range(N)):
        assert "rank 0: all_reduce at " in no_grad
        assert ", recorded for joint_backward\n" in no_grad
        assert ", of integers, or with grad mode off, and not recorded for joint_backward\n" in no_grad
        for tangent in tangents:
            assert "rank 0: tangent of all_reduce at " in tangent
            assert "rank 1: the end of check mode at " in tangent


def test_a_region_sends_no_further_bytes():
    """If all ranks use all outputs, the bytes are those without the region."""

    def body(r):
        x = inputs(r).requires_grad_()

        def loss():
            return dc.all_reduce(x).sum() + dc.all_gather(x, sizes="auto").sum()

        def with_region():
            with dc.joint_backward() as joint:
                joint(loss()).backward()

        return gloo_messages(with_region), gloo_messages(lambda: loss().backward())

    for region, plain in gloo(body, range(3)):
        assert region == plain != []


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


def local_tensors(r, x, again):
    """Ranks save different tensors, after different collectives."""

    def part(t):
        y = dc.all_reduce(t.sin())
        y = y.square() if r == 0 else y * 2
        with torch.no_grad():
            scale = dc.all_reduce(y.sum())
        z = dc.all_reduce(y, "product") + dc.all_reduce(torch.tensor([r])) / scale
        return z.exp() if r == 1 else z

    return again(part, dc.all_reduce(x) * x)


def saved_nowhere(r, x, again):
    return again(lambda t: dc.all_reduce(dc.all_gather(t)), x)


def no_gradient(r, x, again):
    return again(lambda t: dc.all_gather(t.cos()).square(), x.detach() if r == 1 else x) + x.sum()


def within_another(r, x, again):
    def inner(t):
        return dc.all_gather(t.cos()).square().sum() * t

    def middle(t):
        y = again(inner, dc.all_reduce(t * t))
        z = dc.broadcast(again(inner, y), src=1)
        return z if r else z.sin()

    def outer(t):
        y = again(middle, dc.all_reduce(t.sin()).cos())
        return y.square() if r == 0 else y

    return again(outer, x * 1.0)


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


CHECKPOINTED = [local_tensors, saved_nowhere, no_gradient, within_another, async_within, region_within]


def backward_of(program, again, ignored_by, inside, r):
    x = inputs(r).requires_grad_()
    with dc.joint_backward() as joint:
        y = program(r, x, again)
        loss = joint(x.sum() if r == ignored_by else weighted(r, y))
        if inside:
            loss.backward(retain_graph=True)
            loss.backward()
    if not inside:
        loss.backward(retain_graph=True)
        loss.backward()
    return x.grad


@runs_on("rules", "gloo")
def test_checkpoints(run):
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    ways = [(p, by, (i + j) % 2 == 0) for i, p in enumerate(CHECKPOINTED) for j, by in enumerate((None, 0, 1))]
    ways += [(p, by, not inside) for p, by, inside in ways if run is rules]

    @cache
    def right(program, ignored_by, size):
        def loss(r, x):
            y = program(r, x, plainly)
            return x.sum() if r == ignored_by else weighted(r, y)

        xs = [inputs(r).requires_grad_() for r in range(size)]
        return torch.autograd.grad(sum(simulate(loss, range(size), xs)), xs)

    for size in (2, 3):
        got = run(lambda r: [backward_of(p, again, by, inside, r) for p, by, inside in ways], range(size))
        for i, (program, by, inside) in enumerate(ways):
            for r, expected in enumerate(right(program, by, size)):
                why = f"{program.__name__}, ignored by {by}, {inside=}, rank {r} of {size}"
                torch.testing.assert_close(got[r][i], 2 * expected, msg=lambda text: f"{why}: {text}")  # noqa: B023


def test_a_checkpoint_of_higher_order():
    def gradients(x, r, again, joint):
        y = again(lambda t: dc.all_reduce(t.sin()).square() * (t if r else 1), x)
        (g,) = torch.autograd.grad(joint(weighted(r, y) if r != 1 else x.sum()), x, create_graph=True)
        return g, torch.autograd.grad(joint(g.square().sum() if r != 2 else g.sum() * 0), x)[0]

    def body(r):
        x = inputs(r).requires_grad_()
        with dc.joint_backward() as joint:
            g, h = gradients(x, r, partial(checkpoint, use_reentrant=False), joint)
        return g.detach(), h

    def plain(r):
        x = inputs(r).requires_grad_()
        with dc.joint_backward() as joint:
            return gradients(x, r, plainly, joint)

    for got, expected in zip(rules(body, range(N)), rules(plain, range(N)), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("nested", [False, True])
@runs_on("rules", "gloo")
def test_a_reentrant_checkpoint_is_an_error_on_every_rank(run, nested):
    """A rank's backward may not reach the node of such a checkpoint, and its collectives are not recorded before."""

    def part(x):
        return dc.all_reduce(x.sin()).square()

    def body(r):
        x = inputs(r).requires_grad_()
        again = partial(checkpoint, use_reentrant=True)
        with dc.joint_backward() as joint:
            with pytest.raises(RuntimeError, match=r"all_reduce: checkpoint: got a reentrant .* expected use_reent"):
                again(partial(again, part) if nested else part, x)
            joint(dc.all_reduce(x).sum()).backward()  # the group works
        y = again(part, x)  # allowed outside a region
        with dc.joint_backward() as joint:
            z = dc.all_reduce(x * 2)
            y.sum().backward()  # within a region, which does not record the recomputed collectives
            joint(z.sum()).backward()
        return True

    assert run(body, range(N)) == [True] * N


def test_hooks_for_saved_tensors_stay_in_order():
    """The user's hooks are still called, and a checkpoint that fails leaves no hooks behind."""

    def body(r):
        x, packed = inputs(r).requires_grad_(), []
        with dc.joint_backward() as joint:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
                y = dc.all_reduce(x).sin()
                with pytest.raises(KeyError):
                    checkpoint(lambda t: {}[dc.all_reduce(t)], x, use_reentrant=False)
                y.cos()
            count = len(packed)
            loss = joint(y.cos().sum())
            assert count == len(packed)
            loss.backward()
        return packed.count(x.shape)

    assert rules(body, range(2)) == [3, 3]


def test_wrong_use():
    joint = dc.joint_backward()
    with pytest.raises(
        RuntimeError, match="joint_backward: loss: got a loss before the region, expected one within it"
    ):
        joint(torch.tensor(1.0))
    with joint:
        with pytest.raises(TypeError, match=r"got float, expected a floating-point or complex tensor; torch.tensor"):
            joint(0.0)
        with pytest.raises(TypeError, match=r"got torch.int64, expected a floating-point"):
            joint(torch.tensor(1))
        with pytest.raises(Exception, match="a collective within joint_backward cannot be compiled"):
            torch.compile(dc.all_reduce, backend="eager", fullgraph=True)(torch.ones(1))


# ── torch.func ───────────────────────────────────────────────────────────────────────────────────────────


def _in_transforms(x, r, everything):
    """Ranks use different outputs, or all of them."""
    with dc.joint_backward() as joint:
        y, z = dc.all_reduce(x.sin()), dc.shift((r + 1) * x.cos())
        m = dc.all_reduce(x, "product")
        used = [y.square().sum(), (z * x).sum(), (m.sin() * (z + 1)).sum()]
        return joint(sum((r + 1 + i) * u for i, u in enumerate(used)) if everything else used[r])


def _in_transforms_on_one(xs, everything):
    y, m, found = sum(x.sin() for x in xs), torch.stack(xs).prod(0), []
    for r, x in enumerate(xs):
        z = (1 + (r - 1) % len(xs)) * xs[r - 1].cos()
        used = [y.square().sum(), (z * x).sum(), (m.sin() * (z + 1)).sum()]
        found.append(sum((r + 1 + i) * u for i, u in enumerate(used)) if everything else used[r])
    return found


def _check_nests(n, drawn, everything):
    def x_of(r):
        return torch.tensor([0.4 + 0.5 * r, -0.7 + 0.8 * r], dtype=torch.float64)

    def body(r):
        return [nests.by_transforms(nest, lambda x: _in_transforms(x, r, everything), r)(x_of(r)) for nest in drawn]

    of_ranks = rules(body, range(n))
    for i, nest in enumerate(drawn):
        defined = nests.by_definition(nest, lambda xs: _in_transforms_on_one(xs, everything))
        for r, y in enumerate(defined([x_of(r) for r in range(n)])):
            torch.testing.assert_close(of_ranks[r][i], y.detach(), rtol=1e-9, atol=1e-9, msg=f"{n} {r} {nest}")


@pytest.mark.parametrize("n", [2, 3])
def test_vmap_and_forward_mode_over_losses_that_use_different_outputs(n):
    names = ("vmap", "jacfwd", "jvp")
    drawn = [*product(names, repeat=1), *product(names, repeat=2)]
    _check_nests(n, drawn + [*product(names, repeat=3)][n::5], everything=False)


@pytest.mark.parametrize("n", [2, 3])
def test_nests_of_transforms_over_losses_that_use_every_output(n):
    _check_nests(n, random.Random(n).sample(nests.NESTS, 3), everything=True)
