"""How often the host waits for the device in a loss and its backward, on one rank."""

import late
import pytest
import torch

import diffcoll as dc

f = dc.nn.functional


def two(loss, **options):
    """A loss of two tensors of features."""
    a, b = (torch.randn(8, 4).to("late").requires_grad_() for _ in range(2))
    return lambda: loss(a, b, **options)


def one(loss, *more, **options):
    """A loss of one, which are between 0 and 1."""
    a, more = torch.rand(8, 4).to("late").requires_grad_(), [x.to("late") for x in more]
    return lambda: loss(a, *more, **options)


def batch_norm():
    layer = dc.nn.SyncBatchNorm(4).to("late")
    return one(lambda x: layer(x).square().sum())


#: A function that makes the call, and how often the host waits: for a number of the device that it reads.
ROWS = {
    "clip_loss": (lambda: two(f.clip_loss, logit_scale=10.0), 0),
    "siglip_loss": (lambda: two(f.siglip_loss, logit_scale=10.0, logit_bias=-1.0), 0),
    "info_nce_loss": (lambda: two(f.info_nce_loss, temperature=0.1), 0),
    "nt_xent_loss": (lambda: two(f.nt_xent_loss, temperature=0.5), 0),
    "barlow_twins_loss": (lambda: two(f.barlow_twins_loss), 0),
    "vicreg_loss": (lambda: two(f.vicreg_loss), 0),
    "koleo_loss": (lambda: one(f.koleo_loss), 0),
    "supcon_loss": (lambda: one(f.supcon_loss, torch.arange(8) % 3), 0),
    "dice_loss": (lambda: one(f.dice_loss, torch.ones(8, 4)), 0),
    "token_mean": (lambda: one(f.token_mean, torch.ones(8, 4)), 0),
    "sigreg_loss": (lambda: one(f.sigreg_loss, seed=1), 0),
    "SyncBatchNorm": (batch_norm, 0),
}


@pytest.mark.parametrize("name", ROWS)
def test_numbers_are_filled_in_on_the_device(name):
    """A number that is copied there from the host's ordinary memory would make the host wait."""
    make, waits = ROWS[name]
    loss = make()
    before = late.host_waits()
    loss().backward()
    assert late.host_waits() - before == waits
