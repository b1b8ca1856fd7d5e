"""async_op=True: the same results and gradients, started early and awaited late, in both directions."""

import gc
import warnings

import pytest
import torch

import diffcoll as dc
from diffcoll.engines.c10d import C10dEngine
from diffcoll.testing import simulate, spawn

CALLS = {
    "all_reduce": lambda x, **more: dc.all_reduce(x, **more),
    "mean": lambda x, **more: dc.all_reduce(x, "mean", **more),
    "max": lambda x, **more: dc.all_reduce(x, "max", **more),
    "all_gather": lambda x, **more: dc.all_gather(x, dim=1, **more),
    "reduce_scatter": lambda x, **more: dc.reduce_scatter(x, sizes=[1, 3], **more),
    "all_to_all": lambda x, **more: dc.all_to_all(x, **more),
    "broadcast": lambda x, **more: dc.broadcast(x, src=1, **more),
}


@pytest.mark.parametrize("rows", [4, 40_000])
def test_several_at_once_awaited_in_any_order(rows):
    """Each rank waits in an order of its own."""

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

    assert spawn(body, range(2)) == pytest.approx(simulate(body, range(2), rules=True))


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_truth(gradients, name):
    def loss(x, w):
        y = CALLS[name](x, async_op=True)
        other = dc.all_reduce(x.sin(), async_op=True)
        return w * (y.wait().square().sum() + other.wait().sum())

    def at_once(x, w):
        return w * (CALLS[name](x).square().sum() + dc.all_reduce(x.sin()).sum())

    xs, ws = torch.linspace(-1, 2, 16, dtype=torch.float64).view(2, 4, 2), [1.0, 10.0]
    torch.testing.assert_close(
        torch.tensor(gradients(loss, list(xs), ws)), torch.tensor(gradients(at_once, list(xs), ws))
    )


def test_the_backward_is_the_mirror_image(monkeypatch):
    """The adjoint starts where the forward waited, and is awaited where the forward started."""

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


def test_higher_orders_and_transforms_nest():
    def body(r, later):
        def f(x):
            if not later:
                return dc.all_gather(x).sin() * (r + 1)
            pending = dc.all_gather(x, async_op=True)
            return pending.wait().sin() * (r + 1)

        def loss(x):
            return f(x).square().sum()

        x = torch.linspace(r, 1, 3, dtype=torch.float64)
        v = torch.ones_like(x)
        twice = torch.func.jvp(lambda x: torch.func.jvp(loss, (x,), (v,))[1], (x,), (v,))[1]
        nested = torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(x)
        mapped = torch.func.vmap(torch.func.grad(loss))(torch.stack([x, 2 * x]))
        leaf = x.clone().requires_grad_()
        y = loss(leaf)
        (again,) = torch.autograd.grad(y, leaf, retain_graph=True)
        (g,) = torch.autograd.grad(y, leaf, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), leaf)
        return twice, nested, mapped, again, g, h, torch.func.hessian(loss)(x)

    for run in (lambda *a: simulate(*a, rules=True), spawn):
        for got, expected in zip(run(body, range(2), [True] * 2), run(body, range(2), [False] * 2), strict=True):
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rules", [True, False])
def test_a_forgotten_wait_is_reported(rules):
    def body(x):
        dc.all_reduce(x, async_op=True)
        gc.collect()

    with pytest.warns(
        RuntimeWarning, match=r"all_reduce\(async_op=True\) at .*test_pending.py:\d+ was never waited for"
    ):
        simulate(body, [torch.ones(2)] * 2, rules=rules)


def test_forgotten_on_real_processes_the_group_goes_on():
    def body(r):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(3):
                dc.all_gather(torch.ones(100_000), async_op=True)
            gc.collect()
        return len(found), dc.all_reduce(torch.tensor(r)).item()

    assert spawn(body, range(2)) == [(3, 1)] * 2


def test_what_it_says_of_itself():
    pending = dc.all_reduce(torch.ones(1), async_op=True)
    assert "all_reduce started at" in repr(pending)
    assert ", not waited for>" in repr(pending)
    pending.wait()
    assert ", waited for>" in repr(pending)


def test_compiled_it_is_the_collective():
    def loss(x):
        pending = dc.all_reduce(x, "max", async_op=True)
        y = x.square()
        return (pending.wait() * y).sum()

    def body(r):
        x = torch.tensor([1.0, -r], requires_grad=True)
        (a,) = torch.autograd.grad(loss(x), x)
        (b,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
        return torch.equal(a, b)

    assert spawn(body, range(2), timeout=60) == [True, True]


def test_modified_in_place_after_the_wait():
    x = torch.ones(2, requires_grad=True)
    y = dc.all_reduce(x, async_op=True).wait()
    y.add_(1)
    y.sum().backward()
    assert x.grad.tolist() == [1, 1]
