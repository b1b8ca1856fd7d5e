"""Losses within torch.compile, on processes with unequal numbers of rows."""

import torch
import torch._dynamo.testing
from releases import compiles

import diffcoll as dc
from diffcoll.testing import spawn

LABELS = torch.tensor([0, 1, 0, 1, 2, 2, 0, 1])
LOSSES = {
    "clip_loss": lambda a, b: dc.nn.clip_loss(a, b, 5.0, normalize=True, chunk_size=2),
    "siglip_loss": lambda a, b: dc.nn.siglip_loss(a.bfloat16(), b.bfloat16(), 2.0, -1.0),
    "supcon_loss": lambda a, b: dc.nn.supcon_loss(a, LABELS[: len(a)]),
}


@compiles
def test_two_graphs_for_all_batch_sizes_give_the_same_gradients():
    """On rank 0 one tower is frozen: compiled and eager ranks take part in its gradient."""

    def body(r):
        found = {}
        for name, loss in LOSSES.items():
            torch._dynamo.reset()
            graphs, pairs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager"), []
            compiled = torch.compile(loss, fullgraph=True, backend=graphs)
            for rows in (3 + r, 5, 6 - 2 * r):
                g = torch.Generator().manual_seed(r)
                a, b = (torch.randn(rows, 4, generator=g).double() for _ in range(2))
                xs = [a.requires_grad_(), b.requires_grad_(r == 1 or name != "clip_loss")]
                xs = [x for x in xs if x.requires_grad and (x is a or name != "supcon_loss")]
                pairs.append([(y.detach(), torch.autograd.grad(y, xs)) for y in (f(a, b) for f in (loss, compiled))])
            found[name] = graphs.frame_count, pairs
        return found

    for found in spawn(body, range(2), timeout=110):
        for name, (graphs, pairs) in found.items():
            assert graphs == 2, name
            for eager, compiled in pairs:
                torch.testing.assert_close(compiled, eager, msg=lambda text, name=name: f"{name}: {text}")
