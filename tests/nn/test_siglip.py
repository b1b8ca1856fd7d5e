"""siglip_loss: value, gradients and second order are those of open_clip's formula on one process."""

import pytest
import torch
import torch.nn.functional as F
from references import OPTIONS, SIZES, Scale, batch, holds, masks, precision

from diffcoll.nn import SigLIPLoss
from diffcoll.nn.functional import siglip_loss

scale = Scale(logit_scale=3.0, logit_bias=-2.0)


def open_clip(image, text, logit_scale, logit_bias):
    """As open_clip.loss.SigLipLoss on one process."""
    logits = logit_scale * image @ text.T + logit_bias
    labels = 2 * torch.eye(len(image), dtype=logits.dtype) - torch.ones_like(logits)
    return -F.logsigmoid(labels * logits).sum() / len(image)


def reference(image, text, labels=None, ids=None):
    logits = scale.logit_scale * image @ text.T + scale.logit_bias
    positive, excluded = masks(len(image), labels, ids)
    terms = F.binary_cross_entropy_with_logits(logits, positive.double(), reduction="none")
    return terms[~excluded].sum() / len(image)


def ours(**options):
    return lambda x, y: siglip_loss(x, y, scale.logit_scale, scale.logit_bias, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_the_loss_of_one_process(options):
    holds(ours(**options), lambda x, y: open_clip(x, y, scale.logit_scale, scale.logit_bias), batch(2), scale)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_labels_and_ids(options):
    def both(x, y, labels, ids):
        return ours(labels=labels, ids=ids, **options)(x, y)

    holds(both, reference, batch(2, 2), scale, sizes=SIZES[1:4])
    holds(
        lambda x, y, ids: ours(ids=ids)(x, y),
        lambda x, y, ids: reference(x, y, ids=ids),
        batch(2, 1),
        scale,
        sizes=SIZES[3:4],
    )


def test_on_processes():
    holds(ours(), reference, batch(2), scale, on=["gloo"], sizes=[(5, 0, 3)])


def test_numbers_and_normalization():
    holds(
        lambda x, y: siglip_loss(x, y, 10.0, -10, normalize=True),
        lambda x, y: open_clip(F.normalize(x), F.normalize(y), 10.0, -10),
        batch(2),
        sizes=SIZES[2:4],
    )


def test_precision_at_scale_100():
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        precision(lambda *x: siglip_loss(*x, 100.0, -10.0), lambda *x: open_clip(*x, 100.0, -10.0), dtype, tolerance)


def test_the_module_and_its_errors():
    x, y, ids = torch.randn(5, 4), torch.randn(5, 4), torch.tensor([0, 1, 1, 2, 0])
    assert SigLIPLoss()(x, y, 2.0, torch.tensor([-1.0]), ids=ids) == siglip_loss(x, y, 2.0, -1.0, ids=ids)
    with pytest.raises(
        ValueError, match=r"siglip_loss: logit_bias: got a torch.float32 tensor of shape \(2,\), expect"
    ):
        siglip_loss(x, y, 1.0, torch.ones(2))
