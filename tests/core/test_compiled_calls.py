"""Calls in compiled code that PyTorch traces in ways of their own: equal to eager, or an error on every rank."""

from functools import partial

import pytest
import torch
from releases import compiles, generated, one_graph
from runs import rules

import diffcoll as dc
from diffcoll.testing import cases, spawn
from diffcoll.testing.layouts import with_layout

pytestmark = [pytest.mark.timeout(300), compiles]


@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_results_are_contiguous(layout):
    """As compiled graphs assume, whatever the strides of x."""

    def is_contiguous(case, x, r):
        return case.call(with_layout(x, layout), r).is_contiguous()

    for case in cases.table(3):
        if None not in case.shapes:
            xs = [torch.ones(shape, dtype=case.dtype) for shape in case.shapes]
            assert all(rules(partial(is_contiguous, case), xs, range(3))), case


class Doubled(torch.autograd.Function):
    """The identity, whose backward is a collective."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gy):
        later = dc.all_reduce(gy * 3, async_op=True)
        block = dc.reduce_scatter(dc.all_gather(gy, dim=1), "max", dim=1)
        return later.wait() + dc.sum_gradients(gy) + dc.all_reduce([block], "product")[0]


def test_in_the_backward_of_a_users_function():
    def body(r):
        x = torch.tensor([[1.0, 2.0 + r], [0.5, r]], requires_grad=True)

        def loss(x):
            return (Doubled.apply(x.sin()) * torch.tensor([[1.0 + r, 2.0], [3.0, 4.0 - r]])).sum()

        found = [loss, one_graph(loss), generated(loss)]
        return [torch.autograd.grad(f(x), x)[0] for f in found]

    for eager, *compiled in spawn(body, range(2), timeout=200):
        for g in compiled:
            torch.testing.assert_close(g, eager)


def test_reductions_of_sizes_that_are_known_at_run_time_only():
    """They are reduced in parts, however small."""

    def loss(x, r):
        return ((r + 2) * dc.all_reduce(dc.all_gather(x, sizes="auto"), "max")).sum()

    def body(r):
        compiled = one_graph(lambda x: loss(x, r))
        x = torch.tensor([[3.0 - r, 1.0 + r]] * (2 + r), requires_grad=True)
        return [torch.autograd.grad(f, x)[0] for f in (compiled(x), loss(x, r))]

    for g, expected in spawn(body, range(2), timeout=200):
        torch.testing.assert_close(g, expected)


def test_control_flow_is_refused_on_every_rank():
    """A branch would run the collective on the ranks whose predicate is true."""

    def branch(x):
        return torch.cond(x.sum() > 2, dc.all_reduce, lambda x: x * 2, (x,))

    def inside(x):
        return torch.cond(x.sum() > 2, lambda x: dc.all_gather(x)[:2] * x, lambda x: dc.all_gather(x)[2:], (x,))

    def loop(x):
        return torch.while_loop(lambda x: x.sum() < 9, lambda x: (dc.all_reduce(x) + 1,), (x,))[0]

    def body(r):
        x = torch.tensor([1.0, 1.0 + r])
        texts = []
        for program in (branch, inside, loop):
            for f in (program, one_graph(program)):
                with pytest.raises(Exception, match="cannot be compiled") as caught:
                    f(x)
                texts.append(str(caught.value))
        outside = one_graph(lambda x: torch.cond(x.sum() > 2, torch.sin, torch.cos, (x * r,)) + dc.all_reduce(x))
        return texts, outside(x)

    for r, (texts, y) in enumerate(spawn(body, range(2), timeout=200)):
        assert all("a collective within torch.cond cannot be compiled: each rank" in text for text in texts[:4])
        assert all("within torch.while_loop cannot be compiled" in text for text in texts[4:])
        x = torch.tensor([1.0, 1.0 + r])
        torch.testing.assert_close(y, ((x * r).sin() if r else (x * r).cos()) + torch.tensor([2.0, 3.0]))
