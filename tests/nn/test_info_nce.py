"""info_nce_loss: value, gradients and second order are those of a cross-entropy on one process."""

import copy

import pytest
import torch
import torch.nn.functional as F
from references import OPTIONS, SIZES, Scale, batch, holds, masks, precision, softmax
from runs import gloo

from diffcoll.nn import InfoNCELoss
from diffcoll.nn.functional import info_nce_loss

scale = Scale(temperature=0.3)


def cross_entropy(q, k, temperature):
    return F.cross_entropy(F.normalize(q) @ F.normalize(k).T / temperature, torch.arange(len(q)))


def reference(q, k, labels=None, ids=None):
    return softmax(F.normalize(q) @ F.normalize(k).T / scale.temperature, *masks(len(q), labels, ids))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_the_loss_of_one_process(options):
    holds(
        lambda q, k: info_nce_loss(q, k, temperature=scale.temperature, **options),
        lambda q, k: cross_entropy(q, k, scale.temperature),
        batch(2),
        scale,
    )


def test_numbers_and_no_normalization():
    holds(
        lambda q, k: info_nce_loss(q, k, temperature=2.0, normalize=False),
        lambda q, k: F.cross_entropy(q @ k.T / 2, torch.arange(len(q))),
        batch(2),
        sizes=SIZES[2:4],
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_labels_and_ids(options):
    def labelled(q, k, labels):
        return info_nce_loss(q, k, labels=labels, temperature=scale.temperature, **options)

    def without_false_negatives(q, k, ids):
        return info_nce_loss(q, k, ids=ids, temperature=scale.temperature, **options)

    holds(labelled, reference, batch(2, 1), scale, sizes=SIZES[1:4])
    holds(without_false_negatives, lambda q, k, ids: reference(q, k, ids=ids), batch(2, 1), scale, sizes=SIZES[1:4])


def test_on_processes():
    def ours(q, k, labels, ids):
        return info_nce_loss(q, k, labels=labels, ids=ids, temperature=scale.temperature)

    holds(ours, reference, batch(2, 2), scale, on=["gloo"], sizes=[(5, 0, 3)])


def test_precision_at_scale_100():
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        precision(
            lambda q, k: info_nce_loss(q, k, temperature=0.01), lambda q, k: cross_entropy(q, k, 0.01), dtype, tolerance
        )


def test_invalid_arguments():
    x = torch.ones(2, 3)
    with pytest.raises(
        ValueError, match=r"info_nce_loss: temperature: got 0, expected a number above 0; logits are divided"
    ):
        info_nce_loss(x, x, temperature=0)
    with pytest.raises(ValueError, match=r"temperature: got a tensor with -0\.5, expected a number above 0"):
        info_nce_loss(x, x, temperature=torch.tensor([-0.5], requires_grad=True))
    assert info_nce_loss(x, x, temperature=torch.tensor(float("nan"))).isnan()
    gradient = torch.func.grad(lambda t: info_nce_loss(x, x, temperature=t))(torch.tensor(0.5))
    assert gradient.isfinite()  # a number that is differentiated so is not read
    with pytest.raises(
        ValueError, match=r"info_nce_loss: positive: got shape \(1, 3\), expected shape \(2, 3\), as query"
    ):
        info_nce_loss(x, x[:1])


def test_the_module():
    loss = InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.5)), chunk_size=2)
    assert [name for name, _ in loss.named_parameters()] == ["temperature"]
    assert (
        repr(loss)
        == "InfoNCELoss(temperature=0.5, normalize=True, rank_reduction='mean', chunk_size=2, exchange='gather')"
    )
    x, y, marks = torch.randn(5, 4), torch.randn(5, 4), torch.tensor([0, 1, 1, 2, 0])
    torch.testing.assert_close(loss(x, y, ids=marks), info_nce_loss(x, y, ids=marks, temperature=0.5))
    with torch.device("meta"):
        assert "temperature=tensor(..., device='meta'" in repr(InfoNCELoss(temperature=torch.tensor(0.5)))


def test_a_copy_of_the_module_has_its_own_temperature_and_the_same_group():
    def body(r):
        group = torch.distributed.group.WORLD
        loss = InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.5)), group=group)
        copied = copy.deepcopy(torch.nn.Sequential(loss))[0]
        copied.temperature.data.fill_(0.25)
        return copied.group is group, loss.temperature.item(), [p.item() for p in copied.parameters()]

    assert gloo(body, range(2)) == [(True, 0.5, [0.25])] * 2
