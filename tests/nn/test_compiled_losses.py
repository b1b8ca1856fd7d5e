"""Losses within torch.compile, on processes with unequal numbers of rows."""

import pytest
import torch
import torch._dynamo.testing
from references import hard, passages
from releases import compiles

import diffcoll as dc
from diffcoll.nn import functional as f
from diffcoll.testing import spawn


def vocabulary(weight, b, **options):
    """The bias is of b, and hidden is of all ranks' weights."""
    hidden = dc.all_reduce((weight.sum(0), (weight**2).sum(0)), grad_placement="replicate")
    more = {"bias_shard": b.sum(1), "label_smoothing": 0.1, "z_loss": 0.1, **options}
    return f.vocab_parallel_cross_entropy(torch.stack(hidden), weight, torch.tensor([1, 5]), **more)


LABELS = torch.tensor([0, 1, 0, 1, 2, 2, 0, 1])
LOSSES = {
    "clip_loss": lambda a, b: f.clip_loss(a, b, 5.0, normalize=True),
    "clip_loss in chunks": lambda a, b: f.clip_loss(a, b, 5.0, normalize=True, chunk_size=8),
    "siglip_loss": lambda a, b: f.siglip_loss(a.bfloat16(), b.bfloat16(), 2.0, -1.0),
    "siglip_loss in chunks": lambda a, b: f.siglip_loss(a, b, 2.0, -1.0, ids=LABELS[: len(a)], chunk_size=8),
    "supcon_loss": lambda a, b: f.supcon_loss(a, LABELS[: len(a)]),
    "supcon_loss in chunks": lambda a, b: f.supcon_loss(a, LABELS[: len(a)], chunk_size=8),
    "info_nce_loss": lambda a, b: f.info_nce_loss(a, b, ids=LABELS[: len(a)]),
    "info_nce_loss of hard negatives": lambda a, b: f.info_nce_loss(a, b, hard(a, b), chunk_size=8),
    "info_nce_loss of passages": lambda a, b: f.info_nce_loss(a, passages(a, b)),
    "info_nce_loss, pairs left out": lambda a, b: f.info_nce_loss(
        a, b, exclude=(a @ dc.gather_batch(b).tree.T > 0).detach()
    ),
    "nt_xent_loss": lambda a, b: f.nt_xent_loss(a, b),
    "nt_xent_loss in chunks": lambda a, b: f.nt_xent_loss(a, b, chunk_size=16),
    "barlow_twins_loss": lambda a, b: f.barlow_twins_loss(a, b),
    "vicreg_loss": lambda a, b: f.vicreg_loss(a, b),
    "koleo_loss": lambda a, b: f.koleo_loss(a * b),
    "sigreg_loss": lambda a, b: f.sigreg_loss(a * b, seed=3, num_slices=4),
    "vocab_parallel_cross_entropy": lambda a, b: vocabulary(a, b),
    "vocab_parallel_cross_entropy in chunks": lambda a, b: vocabulary(a, b, chunk_size=8),
    "dice_loss": lambda a, b: f.dice_loss(a.sigmoid(), (a > 0).double()),
    "moments": lambda a, b: f.moments(a * b, 0).variance.sum(),
    "token_mean": lambda a, b: f.token_mean(a * b, LABELS[: len(a), None]),
}
FIRST, *OTHERS = LOSSES


@compiles
@pytest.mark.parametrize("names", [[FIRST], pytest.param(OTHERS, marks=pytest.mark.slow, id="others")])
def test_two_graphs_for_all_batch_sizes_give_the_same_gradients(names):
    def body(r):
        found = {}
        for name in names:
            loss = LOSSES[name]
            torch._dynamo.reset()
            graphs, pairs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager"), []
            compiled = torch.compile(loss, fullgraph=True, backend=graphs)
            for rows in (3 + r, 5, 6 - 2 * r):
                g = torch.Generator().manual_seed(r)
                a, b = (torch.randn(rows, 4, generator=g).double().requires_grad_() for _ in range(2))
                xs = [a] if name.startswith(("supcon", "dice")) else [a, b]
                pairs.append([(y.detach(), torch.autograd.grad(y, xs)) for y in (fn(a, b) for fn in (compiled, loss))])
            found[name] = graphs.frame_count, pairs
        return found

    for found in spawn(body, range(2), timeout=250):
        for name, (graphs, pairs) in found.items():
            assert graphs <= 2, name
            for pair in pairs:
                torch.testing.assert_close(*pair, msg=lambda text, name=name: f"{name}: {text}")
