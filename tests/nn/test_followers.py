"""Ranks whose tensors require no gradient, where other ranks train: they send the same messages in backward."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from runs import gloo, rules
from torch.utils.flop_counter import FlopCounterMode

import diffcoll as dc
from diffcoll.nn.functional import moments, weighted_mean


def half(x):
    return torch.linspace(1, 2, len(x), dtype=x.dtype)


def normalized(x, affine, checked=False):
    with dc.check_mode(checked):
        layer = dc.nn.SyncBatchNorm(3, affine=affine, dtype=x.dtype).requires_grad_(x.requires_grad)
        y = layer(layer(x))
        assert not layer.running_mean.requires_grad
    return y.pow(3).sum()


#: Of x, (b, 3), in (0, 1).
PROGRAMS = {
    "barlow_twins_loss": lambda x: dc.nn.functional.barlow_twins_loss(x, x.sin() + 1),
    "vicreg_loss": lambda x: dc.nn.functional.vicreg_loss(x, x.square()),
    "koleo_loss": lambda x: dc.nn.functional.koleo_loss(x),
    "sigreg_loss": lambda x: dc.nn.functional.sigreg_loss(x, seed=3, num_slices=4),
    "dice_loss": lambda x: dc.nn.functional.dice_loss(x, (x.detach() > 0.4).double()),
    "iou_loss": lambda x: dc.nn.functional.iou_loss(x, x.detach(), dims="per class"),
    "tversky_loss": lambda x: dc.nn.functional.tversky_loss(x, x.detach(), dims=0),
    "dice_loss of images": lambda x: dc.nn.functional.dice_loss(x, x.detach(), dims=1),
    "moments": lambda x: sum((y**2).sum() for y in moments(x, 0)[1:]),
    "moments, weights": lambda x: sum((y**2).sum() for y in moments(x, 0, weight=half(x)[:, None])),
    "weighted_mean": lambda x: weighted_mean(x, weight=half(x)).square().sum(),
    "weighted_mean, complex": lambda x: weighted_mean(x * (1 + 2j)).abs().sum(),
    "SyncBatchNorm": partial(normalized, affine=True),
    "SyncBatchNorm, no parameters": partial(normalized, affine=False),
    "SyncBatchNorm in check mode": partial(normalized, affine=True, checked=True),
}


def data(sizes):
    g = torch.Generator().manual_seed(sum(sizes))
    return torch.rand(sum(sizes), 3, generator=g, dtype=torch.double).split(list(sizes))


def gradient(x, trained, program):
    x = x.clone().requires_grad_(trained)
    loss = PROGRAMS[program](x)
    if not trained:  # the other ranks' gradients are summed in its backward
        loss.backward()
        assert x.grad is None
        return None
    (gx,) = torch.autograd.grad(loss, x)
    return gx


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("sizes", [(4, 3), (3, 0, 5)], ids=str)
def test_one_rank_trains_nothing(program, sizes):
    parts, n = data(sizes), len(sizes)
    want = rules(gradient, parts, [True] * n, [program] * n)
    for frozen in range(n):
        if program == "dice_loss of images":
            continue
        trained = [r != frozen for r in range(n)]
        found = rules(gradient, parts, trained, [program] * n)
        torch.testing.assert_close(found, [g if on else None for g, on in zip(want, trained, strict=True)])


@pytest.mark.parametrize("program", PROGRAMS)
def test_where_no_rank_trains_nothing_requires_a_gradient(program):
    def body(x):
        return PROGRAMS[program](x)

    assert not any(y.requires_grad for y in rules(body, data((4, 3))))


def test_on_processes():
    def all_of_them(x, trained):
        return [gradient(x, trained, program) for program in PROGRAMS if program != "dice_loss of images"]

    parts = data((4, 3))
    want = rules(all_of_them, parts, [True] * 2)
    found = gloo(all_of_them, parts, [True, False])
    torch.testing.assert_close(found, [want[0], [None] * len(want[1])])


@pytest.mark.parametrize("program", ["moments", "weighted_mean", "dice_loss", "vicreg_loss", "SyncBatchNorm"])
def test_a_rank_that_observes_joint_backward_and_no_grad(program):
    def body(x, trained, within):
        with torch.no_grad():
            assert not PROGRAMS[program](x).requires_grad
        if within == "joint":
            x = x.clone().requires_grad_(trained)
            with dc.joint_backward() as joint:
                joint(PROGRAMS[program](x)).backward()
            return x.grad
        with FlopCounterMode(display=False) if within == "mode" and not trained else nullcontext():
            return gradient(x, trained, program)

    parts = data((4, 3))
    want = rules(gradient, parts, [True] * 2, [program] * 2)[0]
    for within in ("joint", "mode"):
        torch.testing.assert_close(rules(body, parts, [True, False], [within] * 2), [want, None])
