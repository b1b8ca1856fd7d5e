"""set_weight: weights are added exactly, and those of batches without a gradient do not count."""

import pytest
import torch
from runs import rules
from torch import nn
from training import RUNS, attach, on_two

import diffcoll as dc


def made():
    model = nn.Linear(2, 1, bias=False, dtype=torch.double)
    nn.init.ones_(model.weight)
    return model, *attach(model, "weighted")


def of(r, k):
    """The gradient of batch k on rank r, and its weight."""
    return 1.0 + 10 * r + k * k, 1.0 + r + 2 * k


def loss(model, r, k):
    return model(torch.full((1, 2), of(r, k)[0], dtype=torch.double)).sum()


def mean(pairs):
    return sum(g * w for g, w in pairs) / sum(w for _, w in pairs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.uint8, torch.int8, torch.int64])
def test_weights_of_any_dtype(dtype):
    """Their sum is not a number of the dtype."""
    weight = {torch.float16: 40000.0, torch.bfloat16: 257.0, torch.uint8: 200, torch.int8: 100}.get(dtype, 2.0**24)
    weights = [torch.tensor(w, dtype=dtype) for w in (weight, weight, 3)]

    def body(r):
        model, _, backward = made()
        for k, w in enumerate(weights):
            backward(loss(model, r, k), w, reduces=k == 2)
        return model.weight.grad[0, 0].item()

    expected = mean([(of(r, k)[0], weights[k].item()) for r in range(3) for k in range(3)])
    assert rules(body, range(3)) == [pytest.approx(expected, rel=1e-12)] * 3


def micro_batch(model, averager, r, k):
    averager.set_weight(of(r, k)[1])
    with averager.no_sync():
        loss(model, r, k).backward()


def retry(model, averager, r):
    """The forward of batch 1 raises and is repeated; batch 0 is accumulated before."""
    micro_batch(model, averager, r, 0)
    for fails in (True, False):
        averager.set_weight(of(r, 1)[1])
        if not fails:
            loss(model, r, 1).backward()


def retried_backward(model, averager, r):
    """Backward raises after some gradients; all are dropped."""
    handle = model.weight.register_post_accumulate_grad_hook(lambda p: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        micro_batch(model, averager, r, 4)
    handle.remove()
    model.zero_grad()
    micro_batch(model, averager, r, 0)
    averager.set_weight(of(r, 1)[1])
    loss(model, r, 1).backward()


def zeroed_by_data(model):
    for p in model.parameters():
        p.grad.data.zero_()


#: How a user drops what was accumulated.
DROPS = {
    "in place": lambda model: model.zero_grad(set_to_none=False),
    "to None": lambda model: model.zero_grad(),
    "data": zeroed_by_data,
}


def dropped(how, weight_first):
    """A micro-batch is dropped, before or after the weight of the next is set."""

    def program(model, averager, r):
        micro_batch(model, averager, r, 5)
        if weight_first:
            averager.set_weight(of(r, 0)[1])
        DROPS[how](model)
        if not weight_first:
            averager.set_weight(of(r, 0)[1])
        with averager.no_sync():
            loss(model, r, 0).backward()
        averager.set_weight(of(r, 1)[1])
        loss(model, r, 1).backward()

    return program


def never_used(model, averager, r):
    """A weight whose batch was left out."""
    micro_batch(model, averager, r, 0)
    micro_batch(model, averager, r, 1)
    averager.set_weight(100.0 * r)
    averager.synchronize()


PROGRAMS = {
    "retry": retry,
    "retried backward": retried_backward,
    "never used": never_used,
    **{f"dropped, {how}, {first}": dropped(how, first) for how in DROPS for first in (False, True)},
}


@on_two
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_weight_counts_when_its_gradient_is_accumulated(where, program):
    """On rank 1 only; the others have batches 0 and 1 as usual. The weights are those of another step, twice."""

    def body(r):
        model, averager, _ = made()
        found = []
        for _ in range(2):
            if r == 1 or program == "never used":
                PROGRAMS[program](model, averager, r)
            else:
                micro_batch(model, averager, r, 0)
                averager.set_weight(of(r, 1)[1])
                loss(model, r, 1).backward()
            found.append(model.weight.grad[0, 1].item())
            model.zero_grad(set_to_none=False)
        return found

    expected = pytest.approx(mean([of(r, k) for r in range(3) for k in range(2)]), rel=1e-12)
    assert RUNS[where](body, range(3)) == [[expected] * 2] * 3


@pytest.mark.parametrize("how", DROPS)
def test_one_of_several_gradients_that_is_zero_or_dropped(how):
    """Rank 1: the first that is accumulated is zero; all are dropped. Rank 2: one of three is dropped."""

    def body(r):
        layers = [nn.Linear(2, 1, bias=False, dtype=torch.double) for _ in range(3)]
        model = nn.ModuleList(layers)
        _, backward = attach(model, "weighted")
        x = torch.ones(1, 2, dtype=torch.double)
        ordered = sum(k * layer(x).sum() * (r + 1) for k, layer in enumerate(reversed(layers)))
        backward(ordered, 3.0 + r, reduces=False)
        if r == 1:
            DROPS[how](model)
        elif r == 2:
            DROPS[how](layers[0])
        backward(sum(layer(x).sum() for layer in layers), 1.0)
        return [layer.weight.grad[0, 0].item() for layer in layers]

    def expected(k, kept_on_2):
        dropped, counted = [False, True, not kept_on_2], [3.0, 0.0, 5.0]
        sums = [1.0 + (0.0 if d else w * k * (r + 1)) for r, (d, w) in enumerate(zip(dropped, counted, strict=True))]
        return pytest.approx(sum(sums) / (sum(counted) + 3))

    assert rules(body, range(3)) == [[expected(2, False), expected(1, True), expected(0, True)]] * 3


def test_a_batch_whose_gradient_is_zero_counts():
    """Its gradient is exactly zero, and was not dropped."""

    def body(r):
        model, _, backward = made()
        backward(loss(model, r, 0) * 0, 5, reduces=False)
        backward(loss(model, r, 1))
        return model.weight.grad[0, 0].item()

    assert rules(body, range(2)) == [pytest.approx(mean([(0, 5), (2, 1), (0, 5), (12, 1)]))] * 2


def test_a_counter_that_is_reset_before_backward():
    def body(r):
        w = nn.Parameter(torch.ones(()))
        averager = dc.GradientAverager([w], reduction="weighted")
        samples = torch.zeros((), dtype=torch.float64)
        found = []
        for _ in range(2):
            samples += 1 + 2 * r
            averager.set_weight(samples)
            loss = w * (r + 1)
            samples.zero_()
            loss.backward()
            found.append(w.grad.item())
            w.grad = None
        return found

    assert rules(body, range(2)) == [[1.75, 1.75]] * 2
