"""Dice, IoU and Tversky losses on ranks against one process with the whole batch; and a loss of sums of one's own."""

from functools import partial

import pytest
import torch
from references import data, holds, ratio
from runs import gloo, profiled, rules
from torch import nn

from diffcoll.nn.functional import dice_loss, iou_loss, loss_of_sums, tversky_loss

SIZES = ((6,), (4, 4), (5, 0, 3), (0, 2, 1), (2, 3, 1, 2))
DIMS = [None, (0, 1, 2, 3), "per class", (0, 2, 3), (0, -1), 0, (2, 3), (1, 2, 3)]
LOSSES = {"dice": dice_loss, "iou": iou_loss, "tversky": partial(tversky_loss, alpha=0.3, beta=0.8)}


def segmented(n, seed=0):
    """Images of three unbalanced classes; soft targets, so that they have gradients too."""
    g = torch.Generator().manual_seed(100 * seed + n)
    rate = torch.tensor([0.8, 0.15, 0.05])[:, None, None]
    p = torch.rand(n, 3, 4, 2, generator=g).pow(1 / rate)
    t = 0.9 * (torch.rand(n, 3, 4, 2, generator=g) < rate) + 0.05
    return p.double(), t.double()


def of_one_class(n):
    return tuple(each[:, -1:] for each in segmented(n))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("kind", LOSSES)
def test_matches_one_process(kind, dims):
    ours = partial(LOSSES[kind], dims=dims, smooth=0.5)
    make = of_one_class if dims is None else segmented
    holds(ours, lambda p, t: ratio(kind, p, t, 0.5, dims), make, sizes=SIZES)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64])
def test_targets_of_any_dtype(dtype):
    p, t = of_one_class(6)
    t = (t > 0.5).to(dtype)
    for value in rules(lambda p, t: dice_loss(p, t).detach(), p.float().split([4, 2]), t.split([4, 2])):
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(value.double(), ratio("dice", p, t.double()), rtol=1e-5, atol=0)


def test_a_class_that_is_nowhere():
    """smooth=0: nothing predicted and nothing there is 0/0, as on one process; with a prediction it is 1."""
    none, some = torch.zeros(2, 3), torch.tensor([[0.0, 0.5, 0.2]])
    assert all(v != v for v in rules(lambda p: dice_loss(p, 0 * p, smooth=0).item(), none.split(1)))
    assert rules(lambda p: dice_loss(p, 0 * p, smooth=0).item(), [none, some]) == [1, 1]


# ── loss_of_sums ─────────────────────────────────────────────────────────────────────────────────────────


def correlation(n, x, y, xx, yy, xy):
    return 1 - (xy - x * y / n) / ((xx - x * x / n) * (yy - y * y / n)).sqrt()


def one_minus_correlation(x, y):
    sums = x.new_tensor(float(len(x))), x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()
    return loss_of_sums(correlation, *sums)


def test_a_loss_of_ones_own():
    """A correlation over all ranks, to second order."""

    def single(x, y):
        return 1 - torch.corrcoef(torch.stack([x, y]))[0, 1]

    holds(one_minus_correlation, single, lambda n: (data(n, seed=n), data(n, seed=n + 100)), sizes=[(6,), (5, 0, 3)])


def test_parameters_inside_f():
    """A learned variance and an exponent: no collective sums what each rank's f adds to their gradients."""
    module = nn.ParameterDict({"log_variance": torch.tensor(0.3).double(), "power": torch.tensor(1.7).double()})

    def f(total, n):
        return (-module.log_variance).exp() * (total / n) ** module.power + module.log_variance

    def of_ranks(x):
        return loss_of_sums(f, x.square().sum(), x.new_tensor(float(len(x))))

    def of_one(x):
        return f(x.square().sum(), len(x))

    holds(of_ranks, of_one, lambda n: (data(n, 2),), module=module, sizes=[(6,), (4, 2), (5, 0, 3)])


def test_every_rank_runs_backward_also_where_its_sums_need_no_gradient():
    """As of a rank without rows whose features were made for this step."""

    def body(r):
        x = data(3).requires_grad_(r == 0)
        loss = loss_of_sums(torch.div, x.sum(), x.new_tensor(3.0))
        messages = profiled(loss.backward)
        return x.grad, [name for name, _ in messages]

    (g, of_first), (none, of_second) = gloo(body, range(2))
    torch.testing.assert_close(g, torch.full((3,), 2 / 6).double())
    assert none is None
    assert of_first == of_second == ["all_reduce backward"]
    for dtype in (torch.bfloat16, torch.double):
        one = torch.ones((), dtype=dtype)

        def loss(records, one=one):
            with torch.set_grad_enabled(records):
                found = loss_of_sums(torch.div, one, one)
            return found.item(), found.dtype, found.requires_grad

        for records in (True, False):
            assert rules(loss, [records] * 2) == [(1, dtype, records)] * 2
        assert not loss_of_sums(torch.div, one, one).requires_grad
