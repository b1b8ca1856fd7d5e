"""Losses in chunks in the surroundings of a training: each gradient is that of the loss without chunks, on one rank."""

import contextlib
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from diffcoll.nn.functional import clip_loss, info_nce_loss, nt_xent_loss, siglip_loss, supcon_loss

LOSSES = {
    "clip": lambda x, y, **more: clip_loss(x, y, 2.0, **more),
    "nt_xent": nt_xent_loss,
    "supcon": lambda x, y, **more: supcon_loss(x, torch.arange(6) % 2, **more) + y.sum(),
    "siglip": lambda x, y, **more: siglip_loss(x, y, 2.0, -1.0, **more),
    "info_nce": lambda x, y, **more: info_nce_loss(x, y, negatives=2 * y, **more),
}
#: The last one is in one chunk.
OPTIONS = [{"chunk_size": 2}, {"exchange": "ring", "chunk_size": 4}, {"chunk_size": 100}]
SAVED = (torch.ops.aten.mm.default, torch.ops.aten.exp.default, torch.ops.aten.logsumexp.default)


def features(dtype=torch.double):
    return [torch.randn(6, 4, dtype=dtype, generator=torch.Generator().manual_seed(s)).requires_grad_() for s in (0, 1)]


def gradients(loss, *xs, **more):
    return torch.autograd.grad(loss(*xs), xs, **more)


def policy(context, op, *arguments, **more):
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def selective(loss):
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return lambda *xs: checkpoint(loss, *xs, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_surroundings(name, options):
    loss, xs = partial(LOSSES[name], **options), features()
    right = gradients(LOSSES[name], *xs)
    same = partial(torch.testing.assert_close, expected=right)
    same(gradients(lambda *xs: checkpoint(loss, *xs, use_reentrant=False), *xs))
    same(gradients(selective(loss), *xs))
    checkpoint(loss, *xs, use_reentrant=True).backward()
    same(tuple(x.grad for x in xs))
    for around in torch.autograd.graph.save_on_cpu(), torch.autograd.set_detect_anomaly(True), contextlib.nullcontext():
        with around:
            value = loss(*xs)
            for retain in True, False:
                same(torch.autograd.grad(value, xs, retain_graph=retain))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, xs)
    frozen = loss(xs[0], xs[1].detach())
    torch.testing.assert_close(torch.autograd.grad(frozen, xs[0])[0], right[0])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_backward_within_autocast_is_in_full_precision(name, options):
    right = gradients(LOSSES[name], *features())
    xs = features(torch.float)
    xs = [x.detach().copy_(y).requires_grad_() for x, y in zip(xs, features(), strict=True)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(partial(LOSSES[name], **options), *xs)
    for g, expected in zip(found, right, strict=True):
        torch.testing.assert_close(g.double(), expected, rtol=1e-4, atol=1e-6)
