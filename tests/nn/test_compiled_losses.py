"""Losses within torch.compile, on processes with unequal numbers of rows."""

import torch
from releases import compiles

import diffcoll as dc
from diffcoll.testing import spawn

LABELS = torch.tensor([0, 1, 0, 1])
LOSSES = {
    "clip_loss": lambda a, b: dc.nn.clip_loss(a, b, 5.0, normalize=True),
    "siglip_loss": lambda a, b: dc.nn.siglip_loss(a, b, 2.0, -1.0),
    "supcon_loss": lambda a, b: dc.nn.supcon_loss(a, LABELS[: len(a)]),
}


@compiles
def test_one_graph_gives_the_same_gradients():
    def body(r):
        g = torch.Generator().manual_seed(r)
        a, b = (torch.randn(3 + r, 4, generator=g).double().requires_grad_() for _ in range(2))
        found = {}
        for name, loss in LOSSES.items():
            torch._dynamo.reset()
            compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
            found[name] = [(y.detach(), torch.autograd.grad(y, a)[0]) for y in (f(a, b) for f in (loss, compiled))]
        return found

    for found in spawn(body, range(2)):
        for name, (eager, compiled) in found.items():
            torch.testing.assert_close(compiled, eager, msg=lambda text, name=name: f"{name}: {text}")
