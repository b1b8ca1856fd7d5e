"""Gradients that the user replaces, and hooks that lose information."""

from functools import partial

import pytest
import torch
from torch import nn

import diffcoll as dc
from diffcoll.testing import simulate, spawn

RUNS = {"rules": partial(simulate, rules=True), "gloo": spawn}


def made(reduction, **arguments):
    w = nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.double))
    averager = dc.GradientAverager([w], reduction=reduction, **arguments)

    def backward(x):
        if reduction == "weighted":
            averager.set_weight(1)
        (w.sum() * x).backward()
        return w.grad.tolist()[0]

    return w, averager, backward


@pytest.mark.parametrize("where", RUNS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
def test_a_reduced_gradient_that_was_replaced(where, reduction):
    """Right for a mean, else an error, since a gradient of this rank's own cannot be told from it; right in place."""

    def body(r):
        w, _, backward = made(reduction)
        backward(2.0 * r)
        w.grad.mul_(0.5)
        found = [backward(1.0 + r)]
        w.grad = w.grad * 0.5
        if reduction == "mean":
            return found, backward(3.0 * r)
        with pytest.raises(RuntimeError) as caught:
            backward(3.0 * r)
        w.grad = None
        assert backward(1.0) == pytest.approx({"sum": 3.0, "weighted": 1.0}[reduction])
        w.grad = torch.zeros(2, dtype=torch.double)
        assert backward(1.0) == pytest.approx({"sum": 3.0, "weighted": 1.0}[reduction])
        return found, str(caught.value)

    factor = {"sum": 3.0}.get(reduction, 1.0)
    text = (
        "GradientAverager: 0: its gradient was replaced after its reduction, and would be reduced twice; modify it in "
        "place, or call zero_grad() before backward"
    )
    for found, second in RUNS[where](body, range(3)):
        assert found == [pytest.approx(factor * (0.5 * 2.0 + 2.0))]
        assert second == (pytest.approx(0.5 * 3.0 + 3.0) if reduction == "mean" else text)


@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
def test_a_lossy_hook_receives_what_was_not_reduced_yet(reduction):
    """Also if the gradient is not zeroed: a hook that keeps one eighth of a row reduces each gradient once."""
    rows = []

    def eighth(bucket):
        rows.append(bucket.row.tolist())
        return bucket.all_reduce(bucket.row / 8).wait()

    def body(r):
        _, _, backward = made(reduction, comm_hook=eighth)
        return [backward(8.0 * (r + 1)), backward(16.0 * r), backward(0.0)]

    found = simulate(body, range(3), rules=True)
    n = 1.0 if reduction == "sum" else 3.0
    assert found == [pytest.approx([6 / n, 12 / n, 12 / n])] * 3
    assert sorted(row[0] for row in rows) == [0.0, 0.0, 0.0, 0.0, 8.0, 16.0, 16.0, 24.0, 32.0]


@pytest.mark.parametrize("arguments", [{}, {"comm_dtype": torch.float16}, {"bucket_mb": 1e-6}], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
def test_gradients_that_are_views_of_a_flat_buffer(reduction, arguments):
    """They stay so, and the buffer is filled in every step, with micro-batches and without zeroing, too."""

    def body(r):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        averager = dc.GradientAverager(model, reduction=reduction, **arguments)
        flat = torch.zeros(sum(p.numel() for p in model.parameters()))
        parts = flat.split([p.numel() for p in model.parameters()])
        views = [part.view_as(p) for part, p in zip(parts, model.parameters(), strict=True)]
        for p, view in zip(model.parameters(), views, strict=True):
            p.grad = view

        def backward(x):
            if reduction == "weighted":
                averager.set_weight(1)
            model(torch.full((1, 3), x)).sum().backward()

        found = []
        for step in range(4):
            if step != 2:
                flat.zero_()
            if step == 3:
                with averager.no_sync():
                    backward(float(r + step))
            backward(float(r + 2 * step))
            assert all(p.grad is view for p, view in zip(model.parameters(), views, strict=True))
            found.append(flat.clone())
        assert averager.skip_step(False) is False
        return found

    def alone(xs):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        for x in xs:
            model(torch.full((1, 3), float(x))).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    found = simulate(body, range(3), rules=True)
    n = {"sum": 1}.get(reduction, 3)
    first, second, third = (alone([r + 2 * step for r in range(3)]) / n for step in range(3))
    last = alone([r + 6 for r in range(3)] + [r + 3 for r in range(3)]) / (6 if reduction == "weighted" else n)
    for of_rank in found:
        for a, b in zip(of_rank, [first, second, second + third, last], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
