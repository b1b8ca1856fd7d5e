"""Simulated ranks whose tensors are the device's, on several streams.

Autograd would run their backward in a thread of its own, and the rank that comes last copies what others have queued.
"""

from functools import partial

import pytest
import torch
from gpu.streams import CALLS, WHERE, awaited_elsewhere, collective, differing, right_of

import diffcoll as dc
from diffcoll.testing import assert_matches_single_process, simulate

MORE = {
    "product": lambda x: dc.all_reduce(x, "product"),
    "info_nce_loss": lambda x: dc.nn.functional.info_nce_loss(x, x.sin()),
}


@pytest.mark.parametrize("call", [*CALLS.values(), *MORE.values()], ids=[*CALLS, *MORE])
def test_gradients_to_second_order_are_those_of_the_cpu(call):
    def body(r, device):
        x = torch.randn(6, 4, dtype=torch.double, generator=torch.Generator().manual_seed(r)).to(device)
        x.requires_grad_()
        loss = (call(x).sin() * (r + 1)).sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        (h,) = torch.autograd.grad((g.square() * (r + 2)).sum(), x)
        assert h.device.type == device
        return loss.detach().cpu(), g.detach().cpu(), h.cpu()

    expected = simulate(body, range(3), ["cpu"] * 3)
    for found, right in zip(simulate(body, range(3), ["late"] * 3), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("program", [*(partial(collective, where=where) for where in WHERE), awaited_elsewhere])
def test_streams(program, order):
    def body(r):
        return [name for name, call in CALLS.items() if differing(program(call, device="late", r=r, n=2))]

    for call in CALLS.values():  # which simulates ranks itself
        right_of(call, 0, 2)
        right_of(call, 1, 2)
    assert simulate(body, range(2)) == [[], []]


def test_a_program_against_one_process():
    def on_ranks(x):
        return dc.all_reduce(x.square().sum())

    x = torch.randn(8, 4, dtype=torch.double).to("late")
    assert_matches_single_process(on_ranks, lambda x: x.square().sum(), x, on=["simulated"])
