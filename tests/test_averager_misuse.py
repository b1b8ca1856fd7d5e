"""GradientAverager in careless hands: gradients that are kept, averagers made twice, parameters that change."""

from functools import partial

import pytest
import torch
from torch import nn

import diffcoll as dc
from diffcoll._torch import storage_uses
from diffcoll.testing import simulate, spawn

RUNS = {
    "rules": partial(simulate, rules=True),
    "gloo": spawn,
    "mpi": partial(spawn, backend="mpi"),
}


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(r, k=0):
    """Of another value on every rank and in every step."""
    return torch.linspace(-1, 1 + r + k, 6, dtype=torch.double).view(2, 3)


def averaged(n, k=0, model=None):
    """The mean of the ranks' gradients, in one process."""
    model = model or mlp()
    model.zero_grad()
    for r in range(n):
        (model(batch(r, k)).square().sum() / n).backward()
    return [p.grad for p in model.parameters()]


def same(found, expected, tolerance=1e-12):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a - b).abs().max() <= tolerance, (a, b)


# ── gradients that somebody keeps ────────────────────────────────────────────────────────────────────────

KEPT = {
    "the gradient": lambda p: p.grad,
    "a detached view": lambda p: p.grad.detach(),
    "a flat view": lambda p: p.grad.view(-1),
    "one number": lambda p: p.grad.view(-1)[0],
    "an array": lambda p: p.grad.numpy(),
    "its storage": lambda p: p.grad.untyped_storage(),
    "a capsule": lambda p: torch.utils.dlpack.to_dlpack(p.grad),
    "a graph": lambda p: (torch.ones(()).double().requires_grad_() * p.grad).sum(),
    "another's gradient": lambda p: setattr(other := nn.Parameter(torch.empty_like(p)), "grad", p.grad) or other,
}


def numbers(kept):
    if isinstance(kept, torch.UntypedStorage):
        return list(bytes(kept))
    if isinstance(kept, nn.Parameter):
        return kept.grad.tolist()
    if isinstance(kept, torch.Tensor) and kept.grad_fn is not None:
        return (kept.grad_fn.next_functions[0][0]._saved_other).tolist()
    return kept.tolist()


@pytest.mark.parametrize("where", ["rules", "gloo"])
def test_a_gradient_that_is_kept_is_never_written_again(where):
    """Whoever holds it and in whatever way, on one rank only too; nobody else's gradient is wrong for it."""

    def body(r):
        ways = (("mean", None), ("sum", None), ("mean", torch.float32))
        for reduction, comm in ways if where == "rules" else ways[:1]:
            tolerance = 1e-12 if comm is None else 1e-5
            for bucket_mb in (1e-4, 25):
                model = mlp()
                averager = dc.GradientAverager(model, bucket_mb=bucket_mb, reduction=reduction, comm_dtype=comm)
                scale = dc.get_world_size() if reduction == "sum" else 1
                history = []
                for k, keep in enumerate(KEPT.values()):
                    model.zero_grad()
                    model(batch(r, k)).square().sum().backward()
                    same([p.grad / scale for p in model.parameters()], averaged(2, k), tolerance)
                    if r == 1 or k % 2:
                        for p in list(model.parameters())[k % 2 :: 2]:
                            kept = keep(p)
                            if not isinstance(kept, torch.Tensor | torch.UntypedStorage) and not hasattr(
                                kept, "tolist"
                            ):
                                kept = torch.utils.dlpack.from_dlpack(kept)
                            before = numbers(kept)
                            history.append((kept, before))
                for kept, before in history:
                    assert numbers(kept) == before
                averager.detach()

    RUNS[where](body, range(2))


def test_memory_is_taken_only_where_a_gradient_is_kept():
    """Else every step uses the same, whether gradients are set to None, zeroed or added to."""
    model = mlp()
    averager = dc.GradientAverager(model, bucket_mb=1e-4)

    def memory():
        return [bucket.row.data_ptr() for bucket in averager._buckets]

    def step(set_to_none=True):
        model.zero_grad(set_to_none=set_to_none)
        model(batch(0)).square().sum().backward()

    step()
    step()
    before = memory()
    assert len(before) > 1
    for set_to_none in (True, False, True):
        step(set_to_none)
    with averager.no_sync():
        step()
    model(batch(0)).square().sum().backward()
    assert memory() == before
    g = model[2].bias.grad  # and is still the gradient: added to in place, as without an averager
    model(batch(0)).square().sum().backward()
    assert g is model[2].bias.grad
    assert memory() == before
    step()
    assert sum(a != b for a, b in zip(memory(), before, strict=True)) == 1
    del g
    now = memory()
    step()
    step()
    assert memory() == now


def test_memory_that_other_processes_share_is_given_up():
    model = mlp()
    averager = dc.GradientAverager(model)
    model(batch(0)).square().sum().backward()
    model.zero_grad()
    model(batch(0)).square().sum().backward()
    kept = model[0].weight.grad.share_memory_().clone()
    before = averager._buckets[0].row.data_ptr()
    model.zero_grad()
    model(batch(1)).square().sum().backward()
    assert averager._buckets[0].row.data_ptr() != before
    assert not torch.equal(kept, model[0].weight.grad)


def test_the_cotangent_that_autograd_makes_the_gradient_is_not_written():
    """Autograd makes views of the user's cotangent the gradient of a parameter; of two of them, even."""

    def body(r):
        a, b = (nn.Parameter(torch.zeros(4, dtype=torch.double)) for _ in range(2))
        dc.GradientAverager([a, b], comm_dtype=torch.float32)
        gy = torch.arange(4.0, dtype=torch.double) * (r + 1)
        given = gy.clone()
        (a.view(2, 2) + b.view(2, 2) * 1).backward(gy.view(2, 2))
        assert torch.equal(gy, given)
        return a.grad, b.grad

    for found in spawn(body, range(2)):
        same(found, [torch.arange(4.0, dtype=torch.double) * 1.5] * 2)


def test_uses_of_memory_are_counted():
    """What the library asks PyTorch in private: every tensor on a storage counts, and nothing else."""
    x = torch.zeros(4)
    alone = storage_uses(x)
    assert alone == storage_uses(torch.empty(1))
    kept = []
    for keep in (lambda: x[1:], x.detach, lambda: x.data, x.numpy, x.untyped_storage, lambda: memoryview(x.numpy())):
        before = storage_uses(x)
        kept.append(keep())
        assert storage_uses(x) > before
    kept.clear()
    assert storage_uses(x) == alone
