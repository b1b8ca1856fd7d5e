"""A rank under no_grad or inference_mode while others train: an error on every rank, which would wait for it."""

from contextlib import nullcontext

import pytest
import torch
from releases import compiles
from runs import gloo, rules
from test_followers import PROGRAMS, data

import diffcoll as dc

CONTRASTIVE = {
    f"{name}, {exchange}": lambda x, loss=loss, exchange=exchange: loss(x, exchange)
    for exchange in ("gather", "ring")
    for name, loss in {
        "clip_loss": lambda x, exchange: dc.nn.functional.clip_loss(x, x.cos(), 2.0, exchange=exchange),
        "siglip_loss": lambda x, exchange: dc.nn.functional.siglip_loss(x, x.cos(), 2.0, -1.0, exchange=exchange),
    }.items()
}
LOSSES = {**PROGRAMS, **CONTRASTIVE}
del LOSSES["dice_loss of images"]  # it sends nothing in backward
CONTEXTS = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "": nullcontext}


def outcome(x, trained, context, program):
    """Return the error of the call, or whether the loss requires a gradient."""
    x = x.clone().requires_grad_(trained)
    try:
        with CONTEXTS[context]():
            loss = LOSSES[program](x)
    except dc.CollectiveMismatchError as error:
        return str(error), dc.all_reduce(torch.ones(1)).item()
    return loss.requires_grad


@pytest.mark.parametrize("program", LOSSES)
def test_one_rank_without_grad_mode_while_others_train(program):
    parts = data((4, 2, 3))
    for context in ("no_grad", "inference"):
        found = rules(outcome, parts, [True, True, False], ["", context, ""], [program] * 3)
        for text, after in found:
            assert "some ranks need gradients, and others will not run backward" in text
            assert after == 3
        if "1 of 3 ranks" in text:
            words = [f"1 of 3 ranks; this is rank {r}, with{'out' * (r == 1)} grad mode" for r in range(3)]
        else:
            words = ["compile all or none: rank 1"] * 3
        assert all(text.endswith(end) for (text, _), end in zip(found, words, strict=True))
        for trained, contexts in (([True] * 3, [context] * 3), ([False] * 3, ["", context, ""])):
            assert not any(rules(outcome, parts, trained, contexts, [program] * 3))


def test_on_processes():
    def body(x, context):
        return [outcome(x, True, context, program) for program in LOSSES]

    for found in zip(*gloo(body, data((4, 3)), ["", "no_grad"]), strict=True):
        assert all("others will not run backward" in text and after == 2 for text, after in found)


@pytest.mark.parametrize("program", LOSSES)
def test_a_frozen_rank_with_tensors_of_inference_mode_follows(program):
    def body(x, trained):
        if trained:
            x = x.clone().requires_grad_()
        else:
            with torch.inference_mode():
                x = x.clone()
        LOSSES[program](x).backward()
        return x.grad

    parts = data((4, 3))
    want = rules(body, parts, [True, True])
    found = rules(body, parts, [True, False])
    torch.testing.assert_close(found, [want[0], None])


@compiles
@pytest.mark.timeout(300)
def test_compiled_ranks():
    """A compiled call of a rank that trains nothing cannot follow, and one under no_grad never runs backward."""

    def body(x, r):
        texts = []
        for program, trained, context in (
            ("barlow_twins_loss", r == 0, ""),
            ("clip_loss, gather", True, "no_grad" if r else ""),
        ):
            y = x.clone().requires_grad_(trained)
            compiled = torch.compile(LOSSES[program], backend="aot_eager")
            with pytest.raises(Exception) as caught, CONTEXTS[context]():
                compiled(y)
            texts.append(str(caught.value))
        return texts, dc.all_reduce(torch.ones(1)).item()

    for texts, after in gloo(body, data((4, 3)), range(2), timeout=200):
        for name, text in zip(("barlow_twins_loss", "clip_loss"), texts, strict=True):
            assert f"{name}: some ranks need gradients, and others will not run backward" in text
        assert after == 2
