"""`async_op` in compiled graphs: the order of messages is that of eager code, so ranks may be compiled or not."""

import importlib

import pytest
import torch
from releases import compiles, one_graph

import diffcoll as dc
from diffcoll.core.linear import MAPS
from diffcoll.testing import simulate, spawn

pytestmark = [pytest.mark.timeout(300), compiles]

#: name → the call and, from its result, a tensor in the shape of x; for x of shape (6, 2) on three ranks.
CALLS = {
    "sum": (lambda x, **more: dc.all_reduce(x, **more), lambda y: y),
    "max": (lambda x, **more: dc.all_reduce(x, "max", **more), lambda y: y),
    "product in parts": (lambda x, **more: dc.all_reduce(x.repeat(3000, 1), "product", **more), lambda y: y[-6:]),
    "mean of halves": (lambda x, **more: dc.all_reduce(x.bfloat16(), "mean", **more), lambda y: y.double()),
    "tree": (
        lambda x, **more: dc.all_reduce([x, x.float(), x[:2]], **more),
        lambda y: y[0] + y[1].double() + y[2].repeat(3, 1),
    ),
    "gathered": (lambda x, **more: dc.all_gather(x, **more), lambda y: y.view(3, 6, 2).sum(0)),
    "gathered in rows": (lambda x, **more: dc.all_gather(x, 1, **more), lambda y: y[:, :2] + y[:, -2:]),
    "asked for sizes": (lambda x, **more: dc.all_gather(x, sizes="auto", **more), lambda y: y[:6] + y[-6:]),
    "scattered": (lambda x, **more: dc.reduce_scatter(x.repeat(3, 1), **more), lambda y: y),
    "exchanged": (lambda x, **more: dc.all_to_all(x, **more), lambda y: y),
    "broadcast": (lambda x, **more: dc.broadcast(x, 1, **more), lambda y: y),
    "reduced": (lambda x, **more: dc.reduce(x, 2, **more), lambda y: y),
    "on one": (lambda x, **more: dc.gather(x, 1, **more), lambda y: y.sum(0).expand(6, 2)),
    "permuted": (lambda x, **more: dc.permute(x, [(0, 1), (1, 2)], **more), lambda y: y),
    "shifted": (lambda x, **more: dc.shift(x, **more), lambda y: y),
    "summed up": (lambda x, **more: dc.scan(x, **more), lambda y: y),
}


def loss(x, r, names, order):
    """The loss of results that are started in one order and waited for in another; every one counts differently."""
    pending = [CALLS[name][0](x * (0.3 * i + 1), async_op=True) for i, name in enumerate(names)]
    later = x.sin()
    waited = {i: CALLS[names[i]][1](pending[i].wait()) for i in order}
    return sum(((i + 1.0) * (r + 2) * y.cos()).sum() for i, y in waited.items()) + later.sum()


def numbers(r):
    return torch.linspace(0.4 + 0.1 * r, 1.3, 12, dtype=torch.float64).view(6, 2).requires_grad_()


def gradient(f, x, *more):
    return torch.autograd.grad(f(x, *more), x)[0]


FEW = ("sum", "gathered", "gathered in rows", "tree", "sum", "on one", "max", "broadcast", "product in parts")
EVERY = pytest.param("gloo", (*CALLS, "sum"), marks=pytest.mark.slow, id="every call")


@pytest.mark.parametrize(("backend", "names"), [("gloo", FEW), ("mpi", FEW), EVERY])
def test_ranks_may_be_compiled_or_not(backend, names):
    """Waits in another order than calls; eager code starts the adjoints in the reverse order of the waits."""
    order = [7 * i % len(names) for i in range(1, len(names) + 1)]
    ways = [(True, True, True), (True, False, False), (False, True, True), (False, False, True), (False, False, False)]

    def body(r):
        x = numbers(r)
        eager = lambda x: loss(x, r, names, order)  # noqa: E731
        compiled = one_graph(eager)
        return [gradient(compiled if which[r] else eager, x) for which in ways]

    found = spawn(body, range(3), backend=backend, timeout=280)
    xs = [numbers(r) for r in range(3)]
    torch.autograd.backward(simulate(lambda x, r: loss(x, r, names, order), xs, range(3)))
    near = 1e-2 if "mean of halves" in names else 1e-5  # a leaf of the tree is float32
    for x, (*mixed, eager) in zip(xs, found, strict=True):
        torch.testing.assert_close(eager, x.grad, rtol=near, atol=near)
        torch.testing.assert_close(mixed, [eager] * len(mixed), rtol=1e-5, atol=1e-5)


def test_a_pending_crosses_the_boundary_of_a_graph():
    """Started in a graph and awaited in eager code or in another graph; or started in eager code."""

    def started(x):
        return dc.all_gather(x.sin(), async_op=True), dc.all_reduce([x * 3, x.cos()], async_op=True)

    def awaited(gathered, summed, r):
        x, y = summed.wait()
        return ((r + 1.0) * gathered.wait().square()).sum() + (x * y).sum()

    def graph(f, fullgraph=True):
        return torch.compile(f, fullgraph=fullgraph, backend="aot_eager")

    def body(r):
        x = numbers(r)
        expected = gradient(lambda x: awaited(*started(x), r), x)
        found = [
            gradient(lambda x: awaited(*graph(started)(x), r), x),
            gradient(lambda x: graph(awaited)(*graph(started)(x), r), x),
            gradient(lambda x: graph(awaited, fullgraph=False)(*started(x), r), x),
        ]
        pending = dc.all_reduce(x, async_op=True)
        with pytest.raises(Exception, match="call wait\\(\\) before the compiled function") as caught:
            graph(lambda pending: pending.wait() * 2)(pending)
        pending.wait()
        pending, other = graph(started)(x)
        with pytest.raises(RuntimeError, match="in a graph: waited for twice, or backward without wait"):
            pending.wait().sum().backward()
        other.abandon()
        after = dc.all_reduce(torch.tensor([r + 1.0])).tolist()
        return expected, found, after, type(caught.value).__name__

    for expected, found, after, kind in spawn(body, range(2), timeout=200):
        for g in found:
            torch.testing.assert_close(g, expected)
        assert (after, kind) == ([3.0], "Unsupported")


def test_a_ticket_keeps_alive_what_was_started():
    def body(r):
        compiled = importlib.import_module("diffcoll.core.compiled")
        x = torch.tensor([1.0 + r, 2.0])
        op = compiled._ops[MAPS["AllReduce"]].start
        ticket = op(x, [1], f"rank {r} of 2 in 0", False, False, False)
        before = len(compiled._flights)
        del ticket  # as after an error between start and wait
        gone = len(compiled._flights)
        batch = torch.compile(torch.vmap(lambda x: dc.all_reduce(x, async_op=True).wait()), backend="aot_eager")
        return before, gone, batch(torch.stack([x, -x])).tolist(), dc.all_reduce(x).tolist()

    assert spawn(body, range(2), timeout=200) == [(1, 0, [[3, 4], [-3, -4]], [3, 4])] * 2
