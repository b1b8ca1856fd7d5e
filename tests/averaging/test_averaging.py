"""average_gradients and global_mean: differentiable averages of any order, and averages for logging."""

import math

import pytest
import torch
import torch.distributed as dist
from runs import gloo, rules
from torch import nn
from training import RUNS, everywhere, on_two, refused, same

import diffcoll as dc
from diffcoll.core.reductions import spelled

SIZES = [4, 0, 3]


def task(r):
    g = torch.Generator().manual_seed(r)
    return torch.randn(SIZES[r], 2, generator=g).double(), torch.randn(SIZES[r], generator=g).double()


def start():
    g = torch.Generator().manual_seed(9)
    return [torch.randn(shape, generator=g).double().requires_grad_() for shape in (2, ())]


def predict(parameters, x):
    w, b = parameters
    return (x @ w + b).tanh()


def sum_of_squares(parameters, x, t):
    return (predict(parameters, x) - t).pow(2).sum()


def adapted(parameters, gradients, lr=0.3):
    return [p - lr * g for p, g in zip(parameters, gradients, strict=True)]


@everywhere
def test_maml(where):
    """An inner step with averaged gradients, then an outer loss: second-order gradients equal those of one process."""

    def body(r, op):
        parameters = start()
        x, t = task(r)
        inner = sum_of_squares(parameters, x, t)
        if op == "weighted":
            inner = inner / len(x)  # NaN for an empty batch
        gs = torch.autograd.grad(inner, parameters, create_graph=True)
        if op == "weighted":
            averaged = dc.average_gradients(dict(enumerate(gs)), weight=len(x))
            gs = [averaged[k] for k in range(2)]
        else:
            gs = dc.average_gradients(gs, reduction=op)
        outer = sum_of_squares(adapted(parameters, gs), x.flip(0), t)
        outer.backward()
        dc.GradientAverager(parameters, reduction="sum", hooks=False).synchronize()
        return [p.grad for p in parameters]

    def alone(op):
        parameters = start()
        x, t = (torch.cat(v) for v in zip(*[task(r) for r in range(3)], strict=True))
        total = sum_of_squares(parameters, x, t) / {"mean": 3, "sum": 1, "weighted": sum(SIZES)}[op]
        gs = torch.autograd.grad(total, parameters, create_graph=True)
        flipped = torch.cat([task(r)[0].flip(0) for r in range(3)])
        return torch.autograd.grad(sum_of_squares(adapted(parameters, gs), flipped, t), parameters)

    ops = ["mean", "sum", "weighted"]
    expected = [g for op in ops for g in alone(op)]
    for of_rank in RUNS[where](lambda r: [g for op in ops for g in body(r, op)], range(3)):
        same(of_rank, expected, 1e-10)


@on_two
def test_gradient_penalty(where):
    """The squared norm of the averaged gradient is part of every rank's loss."""

    def body(r):
        parameters = start()
        x, t = task(r)
        loss = sum_of_squares(parameters, x, t)
        gs = dc.average_gradients(torch.autograd.grad(loss, parameters, create_graph=True), reduction="sum")
        penalty = sum(g.pow(2).sum() for g in gs)
        (loss + penalty / 3).backward()  # every rank adds it, so each takes a third
        return dc.average_gradients([p.grad for p in parameters], reduction="sum")

    parameters = start()
    loss = sum(sum_of_squares(parameters, *task(r)) for r in range(3))
    gs = torch.autograd.grad(loss, parameters, create_graph=True)
    expected = torch.autograd.grad(loss + sum(g.pow(2).sum() for g in gs), parameters)
    for of_rank in RUNS[where](body, range(3)):
        same(of_rank, expected, 1e-10)


def test_dtypes_and_weights():
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]

    def body(r):
        tree = {str(d): torch.full((3,), r + 1.0, dtype=d) * (1j if d.is_complex else 1) for d in dtypes}
        tree["nan"] = torch.full((2,), math.nan if r == 1 else 4.0)
        weighted = dc.average_gradients(tree, weight=[3, 0, torch.tensor(1.0)][r])
        summed = dc.average_gradients((tree["torch.float32"],), reduction="sum", weight=r)
        nothing = dc.average_gradients(tree, weight=0)
        return weighted, summed, nothing

    for weighted, (summed,), nothing in gloo(body, range(3)):
        for d in dtypes:
            assert weighted[str(d)].dtype == d
            assert torch.equal(weighted[str(d)], torch.full((3,), 1.5, dtype=d) * (1j if d.is_complex else 1))
        assert weighted["nan"].tolist() == [4.0, 4.0]
        assert summed.tolist() == [8.0] * 3
        assert all(torch.equal(x, torch.zeros_like(x)) for x in nothing.values())


def test_weights_that_half_precision_does_not_know():
    def body(r):
        tree = [torch.full((2,), 1e-3 * (r + 1), dtype=d) for d in (torch.float16, torch.bfloat16, torch.float64)]
        return dc.average_gradients(tree, weight=[1e5, 3e5][r])

    for h, b, d in rules(body, range(2)):
        assert (h.double() - 1.75e-3).abs().max() < 1e-5
        assert (b.double() - 1.75e-3).abs().max() < 2e-5
        assert (d - 1.75e-3).abs().max() < 1e-16


def test_one_message_for_gradients_and_weight(monkeypatch):
    def body(r):
        x = torch.ones(3)
        y = dc.average_gradients([x.requires_grad_(), x * 2], weight=r)[0]
        names, node = [], y.grad_fn
        todo, seen = [node], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            names.append(node.name())
            todo += [f for f, _ in node.next_functions]
        return names

    assert rules(body, range(2))[0].count("_ApplyBackward") == 1


@everywhere
def test_global_mean(where):
    def body(r):
        loss = torch.tensor(float(r + 1), requires_grad=True)
        means = [
            dc.global_mean(loss),
            dc.global_mean(r + 1, weight=r),
            dc.global_mean(math.nan if r == 0 else 2.0 * r, weight=torch.tensor(min(r, 1))),
            dc.global_mean(torch.tensor([1.0, 3.0], dtype=torch.bfloat16) * r),
            dc.global_mean(3, weight=0),
            dc.global_mean(torch.tensor(2 * r)),
        ]
        assert not means[0].requires_grad
        return means

    for means in RUNS[where](body, range(3)):
        assert [m.tolist() for m in means[:4]] == [2.0, 8 / 3, 3.0, [1.0, 3.0]]
        assert means[4].isnan()
        assert means[5].item() == 2.0
        assert [m.dtype for m in means[:4]] == [torch.float32, torch.float64, torch.float64, torch.float32]


@everywhere
def test_global_mean_of_numbers_and_tensors(where):
    """A rank without a batch passes 0.0, the others a loss in float32 or bfloat16; large weights are exact."""
    values = [0.0, torch.tensor(3.0), torch.tensor(5.0, dtype=torch.bfloat16)]

    def body(value, tokens):
        return dc.global_mean(value, tokens)

    found = RUNS[where](body, values, [0, 2**25, torch.tensor(1)])
    right = (3.0 * 2**25 + 5.0) / (2**25 + 1)
    assert [mean.item() for mean in found] == [right, 3.0, 3.0]
    assert [mean.dtype for mean in found] == [torch.float64, torch.float32, torch.float32]
    found = RUNS[where](body, [torch.tensor(1j), torch.tensor(2j, dtype=torch.complex128), torch.tensor(3j)], [1, 1, 2])
    assert [mean.item() for mean in found] == [2.25j] * 3


@pytest.mark.parametrize("spelling", ["avg", dist.ReduceOp.AVG, "sum", dist.ReduceOp.SUM])
def test_spellings_are_those_of_all_reduce(spelling):
    """Also if ranks spell it in different ways."""

    def body(r):
        w = nn.Parameter(torch.ones(2))
        averager = dc.GradientAverager([w], reduction=spelling if r else spelled(spelling))
        (w.sum() * (r + 1.0)).backward()
        averager.detach()
        (g,) = dc.average_gradients([torch.full((2,), r + 1.0)], reduction=spelling)
        return [w.grad.tolist(), g.tolist(), dc.all_reduce(torch.full((2,), r + 1.0), spelling).tolist()]

    for found in rules(body, range(3)):
        assert found == [[6.0 if spelled(spelling) == "sum" else 2.0] * 2] * 3


WRONG = [
    (
        lambda: dc.average_gradients([torch.ones(1)], reduction="max"),
        ValueError,
        "average_gradients: reduction: got 'max', expected",
    ),
    (lambda: dc.average_gradients(3), TypeError, "all_reduce: x: got int, expected a dense torch.Tensor"),
    (lambda: dc.average_gradients([torch.ones(1), 3], weight=2), TypeError, "all_reduce: x[1]: got int, expected a t"),
    (lambda: dc.average_gradients([torch.ones(1)], weight=-1), ValueError, "average_gradients: weight: got -1, expec"),
    (lambda: dc.average_gradients([torch.ones(1)], weight="1"), TypeError, "average_gradients: weight: got str, expec"),
    (lambda: dc.average_gradients([torch.ones(1)], group=1), TypeError, "all_reduce: group: got int, expected None"),
    (
        lambda: dc.global_mean(1.0, torch.ones(2)),
        ValueError,
        "global_mean: weight: got a tensor of (2,), expected a nu",
    ),
    (
        lambda: dc.global_mean(1.0, math.inf),
        ValueError,
        "global_mean: weight: got inf, expected a finite non-negative number",
    ),
    (lambda: dc.global_mean("x"), TypeError, "global_mean: value: got str, expected a number or a tensor"),
]


@pytest.mark.parametrize(("call", "error", "text"), WRONG)
def test_wrong_arguments(call, error, text):
    assert refused(call, error).startswith(text)
