"""Batches of gradients: `is_grads_batched` and `functional.jacobian(vectorize=True)`, autograd's own vmap."""

from functools import partial

import torch
from runs import runs_on
from torch.autograd import forward_ad, gradcheck
from torch.autograd.functional import hessian, jacobian

import diffcoll as dc
from diffcoll.testing import cases

N = 3


def vectorized(function):
    """Return the result of a function of one row under `vectorize=True`."""
    return lambda rows: torch._vmap_internals._vmap(function)(rows)


def tangent(function, x, tx):
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(function(forward_ad.make_dual(x, tx)))
        return torch.zeros_like(y.primal) if y.tangent is None else y.tangent


@runs_on("rules", "gloo")
def test_the_whole_table(run):
    """First and second order, and forward mode, equal the results row by row."""

    def body(r):
        seen = 0
        for case in cases.table(N):
            x = case.x(r, 1)
            if x is None or None in case.shapes or not (x.is_floating_point() or x.is_complex()):
                continue
            seen += 1
            x.requires_grad_()
            y = case.call(x, r)
            gys = torch.randn((2, *y.shape), dtype=y.dtype)
            found = torch.autograd.grad(y, x, gys, is_grads_batched=True, create_graph=True)[0]
            rows = torch.stack([torch.autograd.grad(y, x, gy, create_graph=True)[0] for gy in gys])
            torch.testing.assert_close(found, rows, msg=f"{case.name} {case.label}")
            assert found.requires_grad == rows.requires_grad
            if rows.requires_grad:
                second = [torch.autograd.grad(g.abs().square().sum(), x, retain_graph=True)[0] for g in (found, rows)]
                torch.testing.assert_close(*second, msg=f"{case.name} {case.label}, second order")
            if x.is_complex():
                continue

            along = partial(tangent, lambda x, case=case: case.call(x, r), x.detach())
            txs = torch.randn((2, *x.shape), dtype=x.dtype)
            torch.testing.assert_close(vectorized(along)(txs), torch.stack([*map(along, txs)]), msg=f"{case.name}, jvp")
        return seen

    assert min(run(body, range(N))) > 50


def program(x):
    waits = dc.all_gather(x, async_op=True)
    y = dc.all_reduce(x, "product").sin() + dc.all_reduce(x * x, lambda s: s.median(0).values, async_op=True).wait()
    return (waits.wait().sum(0, keepdim=True) * y).cumsum(-1)


@runs_on("rules", "mpi")
def test_jacobian_and_hessian(run):
    def body(r):
        x = torch.linspace(0.5, 1 + r, 4, dtype=torch.float64)
        found = [jacobian(program, x, vectorize=v, create_graph=True) for v in (False, True)]
        torch.testing.assert_close(*found)
        second = [hessian(lambda x: program(x).square().sum(), x, vectorize=v) for v in (False, True)]
        torch.testing.assert_close(*second)
        for vectorize in (False, True):  # forward over reverse
            along = partial(tangent, partial(jacobian, program, vectorize=vectorize, create_graph=True), x)
            found.append(torch.stack([*map(along, torch.eye(4, dtype=x.dtype))]))
            found.append(vectorized(along)(torch.eye(4, dtype=x.dtype)))
        for other in found[3:]:
            torch.testing.assert_close(other, found[2])

        def in_region(vectorize):
            leaf = x.clone().requires_grad_()
            with dc.joint_backward() as joint:
                y = dc.all_reduce(leaf, "product")
                g = jacobian(lambda t: dc.all_reduce(t).sin() * y, leaf, vectorize=vectorize, create_graph=True)
                joint(g.square().sum() if r == 0 else torch.tensor(0.0)).backward()
            return leaf.grad

        torch.testing.assert_close(in_region(True), in_region(False))
        with dc.check_mode():
            torch.testing.assert_close(jacobian(program, x, vectorize=True), found[0])

    run(body, range(N))


def test_gradcheck_of_batches():
    x = torch.linspace(0.5, 1, 4, dtype=torch.float64, requires_grad=True)
    for f in (program, lambda x: dc.scan(x, exclusive=True), lambda x: dc.reduce(x, 0, "logsumexp")):
        assert gradcheck(f, x, check_batched_grad=True, check_forward_ad=True, check_batched_forward_grad=True)
