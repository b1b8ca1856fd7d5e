"""Simulated ranks whose tensors are the device's: autograd would run their backward in a thread of its own."""

import pytest
import torch
from gpu.streams import CALLS

import diffcoll as dc
from diffcoll.testing import simulate

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
