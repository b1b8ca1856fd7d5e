"""Collectives called from within backward, and from several threads of a process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from runs import gloo, rules, runs_on, truth

import diffcoll as dc

N = 2


@runs_on("rules", "gloo", "mpi")
def test_a_collective_in_a_hook(run):
    """In hooks of a tensor, a parameter and a node, before the backward of another collective."""

    def body(r):
        x = torch.tensor([1.0, 2.0 + r], requires_grad=True)
        seen = []
        x.register_post_accumulate_grad_hook(lambda x: seen.append(dc.all_gather(x.grad)))
        y = dc.all_reduce(x * x)
        y.register_hook(dc.all_reduce)
        z = dc.scan(y)
        z.grad_fn.register_hook(lambda gx, gy: (dc.shift(gx[0]),))
        ((r + 1) * z).sum().backward()
        return x.grad, seen[0]

    found = run(body, range(N))
    # The scan's gradient is 3 on rank 0 and 2 on rank 1; shift, the hook's sum and the adjoint's sum follow.
    for r, (g, gathered) in enumerate(found):
        assert torch.equal(g, 2 * torch.tensor([1.0, 2.0 + r]) * 10)
        assert torch.equal(gathered, torch.cat([found[0][0], found[1][0]]))


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_threads_with_a_group_each(backend):
    def body(r):
        if backend == "mpi":
            from mpi4py import MPI

            groups = [MPI.COMM_WORLD.Dup() for _ in range(3)]
        else:
            groups = [dist.new_group() for _ in range(3)]

        def work(t):
            found = []
            for i in range(40):
                x = torch.full((1 + 500 * t,), float(r + i), requires_grad=True)
                y = dc.all_reduce(dc.shift(x, group=groups[t]), "prod" if i % 2 else "sum", group=groups[t])
                ((r + 1) * y).sum().backward()
                found.append((y[0].item(), x.grad[-1].item()))
            return found

        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(work, range(3)))

    for r, of_threads in enumerate(gloo(body, range(N), backend=backend)):
        right = [(float(i * (i + 1)), 3.0 * (i + 1 - r)) if i % 2 else (2.0 * i + 1, 3.0) for i in range(40)]
        assert of_threads == [right] * 3


def burn(n):
    """Make nodes, whose numbers autograd counts in each thread."""
    a = torch.zeros((), requires_grad=True)
    for _ in range(n):
        a + 1


def loss(x, r):
    """Of three independent collectives."""
    return sum((dc.all_reduce((x * k).sin()) ** 3 * (r + k)).sum() for k in (1.0, 2.0, 3.0))


def second_order(x, r, in_thread, unequal):
    """The first backward in another thread, as on an accelerator, or in this one."""
    x = x.clone().requires_grad_()
    burn(2000 * (r == 1) * unequal)
    y = loss(x, r)

    def first():
        burn(4000 * (r == 0) * unequal)
        torch.autograd.grad(y, x, create_graph=True)  # a first backward may be run again
        return torch.autograd.grad(y, x, create_graph=True)

    if in_thread:
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(first)
        assert done.exception() is None  # only the second backward may raise
        (g,) = done.result()
    else:
        with torch.autograd.set_multithreading_enabled(False):
            (g,) = first()
    (g**2).sum().backward()
    return x.grad


@runs_on("rules", "gloo", "mpi")
def test_a_second_backward_where_ranks_have_made_unequal_numbers_of_nodes(run):
    """Right where both backwards run in one thread; an error that says so where autograd has recorded in another."""
    xs = [torch.linspace(-1, 1 + r, 4, dtype=torch.double) for r in range(N)]

    def body(x, r):
        if run is not rules:  # a simulated rank is one thread
            for unequal in (False, True):
                with pytest.raises(RuntimeError, match=r"all_reduce.*set_multithreading_enabled\(False\)"):
                    second_order(x, r, in_thread=True, unequal=unequal)
        return second_order(x, r, in_thread=False, unequal=True)

    leaves = [x.clone().requires_grad_() for x in xs]
    gs = torch.autograd.grad(sum(truth(loss, leaves, range(N))), leaves, create_graph=True)
    right = torch.autograd.grad(sum((g**2).sum() for g in gs), leaves)
    torch.testing.assert_close(run(body, xs, range(N)), list(right))


def test_a_second_backward_of_one_rank_in_any_thread():
    x = torch.linspace(-1, 1, 4, dtype=torch.double)
    found = [second_order(x, 0, in_thread, unequal=False) for in_thread in (False, True)]
    torch.testing.assert_close(*found)
