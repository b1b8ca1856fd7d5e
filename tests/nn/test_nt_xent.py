"""nt_xent_loss: value, gradients and second order are those of SimCLR's loss on one process."""

import pytest
import torch
import torch.nn.functional as F
from references import OPTIONS, SIZES, Scale, batch, holds, precision, softmax

from diffcoll.nn import NTXentLoss
from diffcoll.nn.functional import nt_xent_loss

scale = Scale(temperature=0.4)


def simclr(z1, z2, temperature, normalize=True):
    """As a cross-entropy of 2B rows, the diagonal excluded."""
    b, z = len(z1), torch.cat([z1, z2])
    z = F.normalize(z) if normalize else z
    logits = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(2 * b).roll(b))


def reference(z1, z2, ids):
    z = F.normalize(torch.cat([z1, z2]))
    n = len(z)
    itself = torch.eye(n, dtype=torch.bool)
    positive = itself.roll(n // 2, 0)
    ids = torch.cat([ids, ids])
    return softmax(z @ z.T / scale.temperature, positive, itself | ((ids[:, None] == ids) & ~positive))


def ours(**options):
    return lambda z1, z2, *ids: nt_xent_loss(
        z1, z2, ids=ids[0] if ids else None, temperature=scale.temperature, **options
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_the_loss_of_one_process(options):
    holds(ours(**options), lambda z1, z2: simclr(z1, z2, scale.temperature), batch(2), scale)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ids(options):
    holds(ours(**options), reference, batch(2, 1), scale, sizes=SIZES[1:4])


def test_on_processes():
    holds(ours(), reference, batch(2, 1), scale, on=["gloo"], sizes=[(5, 0, 3)])


def test_numbers_and_no_normalization():
    holds(
        lambda z1, z2: nt_xent_loss(z1, z2, temperature=2.0, normalize=False),
        lambda z1, z2: simclr(z1, z2, 2.0, False),
        batch(2),
        sizes=SIZES[2:4],
    )


def test_precision_at_scale_100():
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        precision(lambda z1, z2: nt_xent_loss(z1, z2, temperature=0.01), lambda *z: simclr(*z, 0.01), dtype, tolerance)


def test_the_module_and_its_errors():
    x, y, ids = torch.randn(5, 4), torch.randn(5, 4), torch.tensor([0, 1, 1, 2, 0])
    assert NTXentLoss(temperature=0.2)(x, y, ids) == nt_xent_loss(x, y, ids=ids, temperature=0.2)
    with pytest.raises(ValueError, match=r"nt_xent_loss: z2: got shape \(4, 4\), expected shape \(5, 4\), as z1 has"):
        nt_xent_loss(x, y[1:])
    with pytest.raises(ValueError, match="nt_xent_loss: features: got an empty batch on every rank"):
        nt_xent_loss(x[:0], y[:0])
