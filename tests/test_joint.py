"""joint_backward: the gradient is that of truth on every rank, whatever the ranks' losses use, and nobody waits."""

import gc
import weakref
from functools import partial

import pytest
import torch

import diffcoll as dc
from diffcoll.engines.engine import Engine
from diffcoll.testing import cases, new_group, simulate, spawn

N = 3
RUNS = {
    "rules": partial(simulate, rules=True),
    "gloo": partial(spawn, timeout=40),
    "mpi": partial(spawn, backend="mpi", timeout=40),
}


def weighted(r, y):
    return (y * (r + 1)).sum()


# What rank r computes from its x; `joint` ties the loss. Ranks use different outputs.


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
    shifted = dc.shift(z)
    return weighted(r, shifted) if r == 2 else y.sum()


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


@pytest.mark.parametrize("where", RUNS)
def test_gradients_are_those_of_truth(where):
    def body(r):
        found = []
        for program in PROGRAMS:
            x = inputs(r).requires_grad_()
            loss = in_region(program, r, x)
            loss.backward(retain_graph=True)
            once = x.grad.clone()
            loss.backward()  # and again, all ranks alike
            found.append((once, x.grad))
        return found

    got = RUNS[where](body, range(N))
    for i, program in enumerate(PROGRAMS):
        for r, expected in enumerate(truth(program)):
            once, twice = got[r][i]
            torch.testing.assert_close(once, expected, msg=program.__name__)
            torch.testing.assert_close(twice, 2 * expected, msg=program.__name__)


@pytest.mark.parametrize("where", ["rules", "gloo"])
def test_every_collective_ignored_by_one_rank(where):
    table = [case for case in cases.table(N) if None not in case.shapes and case.arguments.get("cotangent") is None]
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

    got = RUNS[where](body, range(N))
    for i, case in enumerate(table):
        xs = [case.x(r, 5).requires_grad_() for r in range(N)]
        right = torch.autograd.grad(sum(simulate(partial(loss, case), range(N), xs)), xs)
        for r in range(N):
            torch.testing.assert_close(got[r][i], right[r], msg=str(case))


@pytest.mark.parametrize("where", RUNS)
def test_second_order(where):
    """A penalty that one rank does not have, on gradients of a loss that another does not have."""

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
    for r, (g, h) in enumerate(RUNS[where](body, range(N))):
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
        assert not dc.all_reduce(x).requires_grad  # outside again
        return True

    assert simulate(body, range(N), rules=True) == [True] * N


def test_what_is_used_by_all_costs_nothing_more():
    """The same bytes, with and without the region."""

    def sent(region):
        calls = []

        def body(r):
            whole = Engine.all_reduce
            engine = type(dc.groups.resolve(None, "test"))
            exchange = engine.exchange

            def counted(self, sends, recvs):
                if self.rank == 0:
                    calls.append(sum(b.nbytes for s, b in enumerate(sends) if b is not None and s != self.rank))
                return exchange(self, sends, recvs)

            if r == 0:
                engine.exchange = counted
            x = inputs(r).requires_grad_()
            try:
                if region:
                    with dc.joint_backward() as joint:
                        joint(dc.all_reduce(x).sum() + dc.all_gather(x, sizes="auto").sum()).backward()
                else:
                    (dc.all_reduce(x).sum() + dc.all_gather(x, sizes="auto").sum()).backward()
            finally:
                if r == 0:
                    engine.exchange = exchange
            assert Engine.all_reduce is whole

        simulate(body, range(2), rules=True)
        return calls

    assert sent(True) == sent(False)
    assert sent(True)


def test_nothing_is_kept():
    """A region and its graph go when they are no longer held, without the garbage collector."""
    gc.disable()
    try:
        x = torch.ones(3, requires_grad=True)
        with dc.joint_backward() as joint:
            y = dc.all_reduce(x * 2)
            loss = joint(y.sum())
        loss.backward()
        kept = weakref.ref(y)
        del y, loss, joint
        assert kept() is None
    finally:
        gc.enable()


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
