"""No reference cycles; nothing of a step is left."""

import gc
import os
import time
import weakref
from itertools import product

import pytest
import torch
from runs import MPI_TOO, spawned
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from diffcoll.testing import cases


def step(case, rank, x, joint=lambda loss: loss):
    """Forward and backward of a call; all ranks' losses use it."""
    y = case.call(x, rank)
    joint((y * y).sum()).backward()
    return y


def step_in_a_region(case, rank, x):
    with dc.joint_backward() as joint:
        return step(case, rank, x, joint)


@pytest.mark.parametrize("backend", ["gloo", MPI_TOO])
def test_nothing_is_kept(backend):
    """Without the garbage collector, every tensor of a step is freed when its last reference is dropped."""

    def body(r):
        kept = []
        step(cases.table(2)[0], r, cases.table(2)[0].x(r, 0).requires_grad_())  # objects that are created once
        gc.collect()
        gc.disable()
        for case, call in product(cases.table(2), (step, step_in_a_region)):
            x = case.x(r, 0).requires_grad_()
            inner = x * 2
            y = call(case, r, inner)
            left = [weakref.ref(t) for t in (x, inner, y)]
            del x, inner, y
            # gloo's threads release tensors shortly after they report completion
            end = time.monotonic() + 3
            while any(ref() is not None for ref in left) and time.monotonic() < end:
                time.sleep(0.001)
            if any(ref() is not None for ref in left):
                kept.append(str(case))
        return kept

    assert spawned(body, range(2), backend=backend) == [[], []]


def train(r):
    """Blocking, async, in a checkpoint, and in a region of joint_backward whose results a rank ignores."""
    x = torch.ones(4, 2, requires_grad=True)
    for case in cases.table(2):
        step(case, r, case.x(r, 0).requires_grad_())
    with dc.joint_backward() as joint:
        pending = dc.all_reduce(x.sin(), async_op=True)
        y = checkpoint(lambda x: dc.all_gather(x, async_op=True).wait().exp(), x, use_reentrant=False)
        z = pending.wait()
        joint(z.sum() if r else y.sum()).backward()
    (g,) = torch.autograd.grad(dc.all_reduce(x * x, async_op=True).wait().exp().sum(), x, create_graph=True)
    g.sum().backward()
    for _ in zip(range(2), dc.ring(x), strict=False):  # left early
        pass


@pytest.mark.parametrize("backend", ["gloo", MPI_TOO])
def test_a_step_leaves_nothing(backend):
    """No object, thread or open file."""

    def body(r):
        for _ in range(3):
            train(r)
        counts = []
        for _ in range(2):
            gc.collect()
            counts.append((len(gc.get_objects()), *(len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))))
            for _ in range(10):
                train(r)
        return [after - before for before, after in zip(*counts, strict=True)]

    for objects, threads, files in spawned(body, range(2), backend=backend):
        assert objects < 10  # one object a step would be 10
        assert threads == files == 0
