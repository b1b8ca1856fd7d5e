"""Memory of gradients belongs to who holds them; what an averager keeps alive, and what is left of a freed one."""

import gc
import os
import weakref

import numpy
import pytest
import torch
from runs import gloo, new_group, spawned
from torch import nn
from torch.utils import dlpack
from training import averaged, equal_on_all_ranks, loss, made, on_two, same

import diffcoll as dc

#: What refers to a gradient, and its numbers.
KEPT = {
    "the gradient": (lambda p: p.grad, torch.Tensor.tolist),
    "a detached view": (lambda p: p.grad.detach(), torch.Tensor.tolist),
    "one number": (lambda p: p.grad.view(-1)[0], torch.Tensor.tolist),
    "an array": (lambda p: p.grad.numpy(), numpy.ndarray.tolist),
    "its storage": (lambda p: p.grad.untyped_storage(), lambda storage: list(bytes(storage))),
    "a capsule": (lambda p: dlpack.from_dlpack(dlpack.to_dlpack(p.grad)), torch.Tensor.tolist),
    "a graph": (
        lambda p: (torch.ones(()).double().requires_grad_() * p.grad).sum(),
        lambda y: y.grad_fn.next_functions[0][0]._saved_other.tolist(),
    ),
    "another's gradient": (
        lambda p: setattr(other := nn.Parameter(torch.empty_like(p)), "grad", p.grad) or other,
        lambda other: other.grad.tolist(),
    ),
}


@on_two
def test_a_gradient_that_is_kept_is_never_written_again(run):
    """By whatever reference, on one rank only too; gradients of all ranks stay right."""

    def body(r):
        for reduction, comm in (("mean", None), ("sum", None), ("mean", torch.float32)):
            tolerance = 1e-12 if comm is None else 1e-5
            for bucket_mb in (1e-4, 25):
                model = made()
                averager = dc.GradientAverager(model, bucket_mb=bucket_mb, reduction=reduction, comm_dtype=comm)
                scale = dc.get_world_size() if reduction == "sum" else 1
                history = []
                for k, (keep, numbers) in enumerate(KEPT.values()):
                    model.zero_grad()
                    averager.backward(loss(model, r, k))
                    same([p.grad / scale for p in model.parameters()], averaged(2, k), tolerance * (k + 1))
                    if r == 1 or k % 2:
                        for p in list(model.parameters())[k % 2 :: 2]:
                            kept = keep(p)
                            history.append((numbers, kept, numbers(kept)))
                for numbers, kept, before in history:
                    assert numbers(kept) == before
                averager.close()

    run(body, range(2))


def test_memory_is_taken_only_where_a_gradient_is_kept():
    """Otherwise every step uses the same memory, whether gradients are set to None, zeroed or accumulated."""
    model = made()
    averager = dc.GradientAverager(model, bucket_mb=1e-4)

    def memory():
        return [p.grad.data_ptr() for p in model.parameters()]

    def after_step():
        averager.backward(loss(model, 0))
        return memory()

    def after_steps(set_to_none=True):
        for _ in range(2):
            model.zero_grad(set_to_none=set_to_none)
            found = after_step()
        return found

    before = after_steps()
    assert after_steps() == after_steps(set_to_none=False) == after_steps() == before
    assert after_step() == before  # accumulated
    loss(model, 0).backward()
    assert after_step() == before
    g = model[2].bias.grad
    now = after_steps()
    assert 0 < sum(a != b for a, b in zip(now, before, strict=True)) < len(before)
    del g
    assert after_steps() == now
    model[0].weight.grad.share_memory_()  # its references in other processes cannot be counted
    now = memory()
    assert after_steps()[0] != now[0]


def test_the_cotangent_that_autograd_makes_the_gradient_is_not_written():
    """Autograd may make views of the user's cotangent the gradient, even of two parameters."""

    def body(r):
        a, b = (nn.Parameter(torch.zeros(4, dtype=torch.double)) for _ in range(2))
        averager = dc.GradientAverager([a, b], comm_dtype=torch.float32)
        gy = torch.arange(4.0, dtype=torch.double) * (r + 1)
        given = gy.clone()
        with averager.reduce():
            (a.view(2, 2) + b.view(2, 2) * 1).backward(gy.view(2, 2))
        assert torch.equal(gy, given)
        return a.grad, b.grad

    for found in gloo(body, range(2)):
        same(found, [torch.arange(4.0, dtype=torch.double) * 1.5] * 2)


# ── construction, and the end ────────────────────────────────────────────────────────────────────────────


def test_broadcast_and_close():
    """Values of rank 0, buffers of any dtype too; after close() plain PyTorch."""

    def body(r):
        torch.manual_seed(r)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
        model.register_buffer("mask", torch.full((2, 3), r))
        model.register_parameter("codes", nn.Parameter(torch.tensor([r]), requires_grad=False))
        model[1].num_batches_tracked.fill_(r + 5)
        averager = dc.GradientAverager(model)
        state = [t.clone() for t in model.state_dict().values()]
        model[1].running_mean.fill_(r)
        dc.GradientAverager(model, broadcast=False).close()
        averager.close()
        averager.close()
        (model[0].weight.sum() * r).backward()
        return state, model[1].running_mean.clone(), model[0].weight.grad

    found = gloo(body, range(2))
    equal_on_all_ranks([state for state, _, _ in found])
    assert found[1][0][-1].tolist() == 5
    assert found[1][1].tolist() == [1.0, 1.0]
    assert found[1][2].tolist() == [[1.0, 1.0]] * 2 and found[0][2].tolist() == [[0.0, 0.0]] * 2


def fails(model, averager, r):
    with pytest.raises((ZeroDivisionError, RuntimeError)), averager.reduce():
        loss(model, r).backward()
        1 / (1 - r)


def hooked(model, averager, r):
    for register in (model[0].weight.register_hook, model.register_forward_hook):
        register(lambda *_: model and None)
    averager.backward(loss(model, r))


@on_two
@pytest.mark.parametrize("use", [hooked, fails])
def test_a_model_is_freed_with_its_averager(use, run):
    """Also if a hook refers to it or a block has failed; a new model with a new averager works."""

    def body(r):
        for _ in range(2):
            model = made()
            averager = dc.GradientAverager(model, bucket_mb=1e-4)
            for _ in range(2):
                use(model, averager, r)
            left = weakref.ref(model), weakref.ref(averager)
            del model, averager
            gc.collect()
            assert [ref() for ref in left] == [None] * 2

    run(body, range(2))


def handles():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize(("backend", "ranks"), [("gloo", [0, 1, 2]), ("gloo", [0, 2]), ("mpi", [0, 1])])
def test_sockets_and_threads_of_averagers_that_were_freed(backend, ranks):
    """Freed in another order on every rank, or closed: the next averagers of the group close them."""

    def body(r):
        group = new_group(ranks)
        if r not in ranks:
            return 0, 0
        kept, before = [], (0, 0)
        for k in range(6):
            model = nn.Linear(2, 1, bias=False)
            averager = dc.GradientAverager(model, group=group)
            averager.backward(model(torch.full((1, 2), r + 1.0)).sum())
            assert model.weight.grad.tolist() == [[sum(ranks) / len(ranks) + 1] * 2]
            if k % 3 == 1:
                averager.close()
            kept.append(averager)
            del model, averager
            if k % 3 == 2:
                before = before if k > 2 else handles()
                while kept:
                    kept.pop(-(r % 2))
                    gc.collect()
        after = handles()
        return after[0] - before[0], after[1] - before[1]

    for more in spawned(body, range(3), backend=backend):
        assert max(more) <= 2
