"""Ranks whose tensors have different dtypes: the loss of one process, or an error on all ranks."""

import pytest
import torch
from references import data
from releases import compiles, one_graph
from runs import gloo, mpi, refusal, rules, runs_on

import diffcoll as dc
from diffcoll.nn.functional import barlow_twins_loss, dice_loss, iou_loss, sigreg_loss, vicreg_loss

DTYPES = torch.float64, torch.float32, torch.bfloat16
SIZES = 4, 1, 3
TARGETS = data(8, 3, 2, seed=1) > 0
RIGHT = {
    "sigreg": lambda x, t: sigreg_loss(x.flatten(1), seed=3, num_slices=5),
    "dice": lambda x, t: dice_loss(x, t),
    "dice per image": lambda x, t: dice_loss(x, t, dims=(1, 2), rank_reduction="sum"),
    "iou": lambda x, t: iou_loss(x, t.to(x.dtype), dims="per class"),
}


def gradient(loss, x, t):
    x = x.clone().requires_grad_()
    y = loss(x, t)
    return y.detach(), torch.autograd.grad(y, x)[0]


@runs_on("rules", "gloo", "mpi")
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("sizes", [SIZES, (0, 8, 0), (8, 0, 0)], ids=str)
def test_statistics_of_ranks_with_different_dtypes(run, name, sizes):
    """Each rank's loss and gradient have its own dtype; no rank's numbers are rounded to another rank's."""
    whole, loss = data(8, 3, 2).sigmoid(), RIGHT[name]
    whole[5:] = whole[5:].bfloat16().double()
    parts = [x.to(dtype) for x, dtype in zip(whole.split(sizes), DTYPES, strict=True)]
    expected, right = gradient(loss, torch.cat(parts).double(), TARGETS)
    values, found = zip(*run(lambda x, t: gradient(loss, x, t), parts, TARGETS.split(sizes)), strict=True)
    assert [v.dtype for v in values] == [torch.float64, torch.float32, torch.float32]
    total = sum(v.double() for v in values)
    torch.testing.assert_close(total if "image" in name else total / 3, expected, rtol=1e-6, atol=0)
    right = right if "image" in name else 3 * right
    for g, r, dtype in zip(found, right.split(sizes), DTYPES, strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(g.double(), r, rtol=max(1e-5, 2 * torch.finfo(dtype).eps), atol=1e-6)


def test_backward_and_second_order():
    """On processes, where the gradient of the loss is a message too."""

    def body(x):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(sigreg_loss(x, seed=0, num_slices=4), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    z = data(7, 3)
    expected = gloo(body, z.split([4, 3]))
    found = gloo(body, [z[:4], z[4:].float()])
    torch.testing.assert_close([g.double() for g in found], expected, rtol=1e-4, atol=1e-5)


@runs_on("rules", "gloo", "mpi")
@pytest.mark.parametrize("loss", [barlow_twins_loss, vicreg_loss])
@pytest.mark.parametrize("checked", [False, True])
def test_matrices_of_different_dtypes_are_an_error_on_all_ranks(run, loss, checked):
    """The first message, of 2 D + 3 numbers, tells. Half precision is computed in float32, and agrees with it."""

    def body(x):
        with dc.check_mode(checked):
            text = refusal(dc.CollectiveMismatchError, loss, x, x + 1)
        x = x.bfloat16() if len(x) > 2 else x.float()
        return text, loss(x, x + 1).dtype

    expected = (
        f"{loss.__name__}: z1, z2: got float64 on 1 of 3 ranks, and float32 or half precision on the others, expected "
        "one dtype on all ranks; pass z.float() or z.double() on all of them"
    )
    parts = [x.to(dtype) for x, dtype in zip(data(8, 3).split(SIZES), DTYPES[1:] + DTYPES[:1], strict=True)]
    assert run(body, parts) == [(expected, torch.float32)] * 3


def test_within_transforms():
    def body(x):
        def loss(x):
            return barlow_twins_loss(x, x.square())

        with torch.no_grad():
            texts = [refusal(dc.CollectiveMismatchError, loss, x)]
        return [
            *texts,
            refusal(dc.CollectiveMismatchError, torch.func.grad(loss), x),
            refusal(dc.CollectiveMismatchError, torch.vmap(loss), torch.stack([x, 2 * x])),
        ]

    for run in (rules, gloo, mpi):
        for texts in run(body, [data(4, 3), data(4, 3).float()]):
            assert all("z1, z2: got float64 on 1 of 2 ranks" in text for text in texts)


@compiles
@pytest.mark.slow
def test_compiled():
    """In a graph the error is an assertion."""

    def body(r, x):
        texts = refusal(RuntimeError, one_graph(lambda x: barlow_twins_loss(x, x.square())), x)
        return texts, one_graph(lambda x: sigreg_loss(x, seed=0, num_slices=4))(x)

    z = data(7, 3)
    for text, value in gloo(body, range(2), [z[:4], z[4:].float()]):
        assert "dtypes that differ between ranks" in text
        torch.testing.assert_close(value.double(), sigreg_loss(z, seed=0, num_slices=4), rtol=1e-5, atol=0)
