"""supcon_loss: value, gradients and second order are those of Khosla et al.'s code on one process."""

import pytest
import torch
import torch.nn.functional as F
from references import OPTIONS, SIZES, Scale, holds, precision

from diffcoll.nn import SupConLoss
from diffcoll.nn.functional import supcon_loss

scale = Scale(temperature=0.4)


def khosla(features, labels, temperature, ids=None, normalize=True):
    """As `SupConLoss` of HobbitLong/SupContrast, contrast_mode "all", base_temperature = temperature; features
    normalized first, as its model does."""
    features = F.normalize(features, dim=-1) if normalize else features
    features = features[:, None] if features.ndim == 2 else features
    views = features.shape[1]
    mask = (labels[:, None] == labels).double().repeat(views, views)
    contrast = torch.cat(torch.unbind(features, dim=1))
    logits = contrast @ contrast.T / temperature
    logits = logits - logits.max(1, keepdim=True).values.detach()
    logits_mask = 1 - torch.eye(len(contrast), dtype=torch.double)
    mask = mask * logits_mask
    if ids is not None:
        logits_mask = logits_mask * (1 - (ids[:, None] == ids).double().repeat(views, views) * (1 - mask))
    log_prob = logits - (logits.exp() * logits_mask).sum(1, keepdim=True).log()
    pairs = mask.sum(1)
    pairs = torch.where(pairs < 1e-6, 1, pairs)
    return -((mask * log_prob).sum(1) / pairs).mean()


def batch(*shape, marks=1):
    def make(rows):
        g = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, *shape, generator=g, dtype=torch.double)
        labels = torch.tensor([0, 1, 2, 0, 1, 1, 3, 2])[:rows]
        return x, labels, *(torch.randint(0, 4, (rows,), generator=g) for _ in range(marks - 1))

    return make


def ours(**options):
    return lambda x, y, *ids: supcon_loss(x, y, ids=ids[0] if ids else None, temperature=scale.temperature, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(6,), (2, 6)], ids=str)
def test_it_is_the_loss_of_one_process(options, shape):
    holds(ours(**options), lambda x, y: khosla(x, y, scale.temperature), batch(*shape), scale)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ids(options):
    holds(
        ours(**options),
        lambda x, y, ids: khosla(x, y, scale.temperature, ids),
        batch(2, 6, marks=2),
        scale,
        sizes=SIZES[1:4],
    )


def test_on_processes():
    holds(ours(), lambda x, y: khosla(x, y, scale.temperature), batch(2, 6), scale, on=["gloo"], sizes=[(5, 0, 3)])


def test_a_row_without_a_positive_contributes_0_and_counts():
    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    loss, alone = supcon_loss(x, torch.tensor([0, 0, 1])), supcon_loss(x[:2], torch.tensor([0, 0]))
    torch.testing.assert_close(loss, khosla(x, torch.tensor([0, 0, 1]), 0.1))
    assert loss > 0 == alone  # the only other row is the positive
    one = supcon_loss(x[:1], torch.tensor([0]))
    assert one == 0
    assert torch.autograd.grad(one, x)[0].tolist() == [[0.0] * 4] * 3


def test_precision_at_scale_100():
    labels = torch.arange(16) % 5

    def two_views(loss, *x, **options):
        return loss(torch.stack(x, 1), labels, temperature=0.01, **options)

    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        precision(lambda *x: two_views(supcon_loss, *x), lambda *x: two_views(khosla, *x), dtype, tolerance)


def test_the_module_and_its_errors():
    x, y = torch.randn(5, 2, 4), torch.tensor([0, 1, 1, 2, 0])
    assert SupConLoss(temperature=0.2)(x, y) == supcon_loss(x, y, temperature=0.2)
    with pytest.raises(TypeError, match=r"supcon_loss: labels: got None, expected a tensor of shape \(5,\); pass the"):
        supcon_loss(x, None)
    with pytest.raises(ValueError, match=r"supcon_loss: features: got shape \(4,\), expected shape \(b, D\) or \(b, v"):
        supcon_loss(x[0, 0], y)
