"""Losses within torch.compile, on processes with unequal numbers of rows."""

import pytest
import torch
import torch._dynamo.testing
from references import hard, passages
from releases import compiles
from runs import rules

import diffcoll as dc
from diffcoll.testing import spawn


def vocabulary(weight, b, **options):
    """The bias is of b, and hidden is of all ranks' weights."""
    hidden = dc.all_reduce((weight.sum(0), (weight**2).sum(0)), grad_placement="replicate")
    more = {"bias_shard": b.sum(1), "label_smoothing": 0.1, "z_loss": 0.1, **options}
    return dc.nn.functional.vocab_parallel_cross_entropy(torch.stack(hidden), weight, torch.tensor([1, 5]), **more)


LABELS = torch.tensor([0, 1, 0, 1, 2, 2, 0, 1])
LOSSES = {
    "clip_loss": lambda a, b: dc.nn.functional.clip_loss(a, b, 5.0, normalize=True, chunk_size=2),
    "siglip_loss": lambda a, b: dc.nn.functional.siglip_loss(a.bfloat16(), b.bfloat16(), 2.0, -1.0),
    "supcon_loss": lambda a, b: dc.nn.functional.supcon_loss(a, LABELS[: len(a)]),
    "supcon_loss in chunks": lambda a, b: dc.nn.functional.supcon_loss(a, LABELS[: len(a)], chunk_size=3),
    "clip_loss of labels": lambda a, b: dc.nn.functional.clip_loss(a, b, 3.0, labels=LABELS[: len(a)]),
    "siglip_loss in chunks": lambda a, b: dc.nn.functional.siglip_loss(a, b, 2.0, -1.0, chunk_size=2),
    "info_nce_loss": lambda a, b: dc.nn.functional.info_nce_loss(a, b, ids=LABELS[: len(a)], chunk_size=2),
    "info_nce_loss of hard negatives": lambda a, b: dc.nn.functional.info_nce_loss(a, b, negatives=hard(a, b)),
    "info_nce_loss of passages": lambda a, b: dc.nn.functional.info_nce_loss(
        a, passages(a, b)[0], negatives=passages(a, b)[1], chunk_size=2
    ),
    "info_nce_loss of soft targets": lambda a, b: dc.nn.functional.info_nce_loss(
        a, b, targets=(a @ dc.gather_batch(b).tree.T).softmax(1).detach(), negatives=hard(a, b)
    ),
    "info_nce_loss of soft targets in chunks": lambda a, b: dc.nn.functional.info_nce_loss(
        a, b, targets=(a @ dc.gather_batch(b).tree.T).softmax(1).detach(), chunk_size=2
    ),
    "info_nce_loss with label smoothing": lambda a, b: dc.nn.functional.info_nce_loss(
        a, b, labels=LABELS[: len(a)], ids=LABELS[: len(a)] // 2, label_smoothing=0.1, symmetric=True
    ),
    "clip_loss with label smoothing in chunks": lambda a, b: dc.nn.functional.clip_loss(
        a, b, 3.0, ids=LABELS[: len(a)], label_smoothing=0.1, chunk_size=2
    ),
    "supcon_loss over rows with positives": lambda a, b: dc.nn.functional.supcon_loss(
        a, LABELS[: len(a)], only_rows_with_positives=True
    ),
    "nt_xent_loss": lambda a, b: dc.nn.functional.nt_xent_loss(a, b),
    "nt_xent_loss in chunks": lambda a, b: dc.nn.functional.nt_xent_loss(a, b, chunk_size=2),
    "barlow_twins_loss": lambda a, b: dc.nn.functional.barlow_twins_loss(a, b),
    "vicreg_loss": lambda a, b: dc.nn.functional.vicreg_loss(a, b),
    "koleo_loss": lambda a, b: dc.nn.functional.koleo_loss(a * b),
    "sigreg_loss": lambda a, b: dc.nn.functional.sigreg_loss(a * b, seed=3, num_slices=4),
    "vocab_parallel_cross_entropy": lambda a, b: vocabulary(a, b),
    "vocab_parallel_cross_entropy in chunks": lambda a, b: vocabulary(a, b, chunk_size=2),
    "dice_loss": lambda a, b: dc.nn.functional.dice_loss(a.sigmoid(), (a > 0).double()),
    "moments": lambda a, b: dc.nn.functional.moments(a * b, 0).variance.sum(),
}
FAST = ["clip_loss"]


@compiles
@pytest.mark.parametrize(
    "names", [FAST, pytest.param([name for name in LOSSES if name not in FAST], marks=pytest.mark.slow, id="others")]
)
def test_two_graphs_for_all_batch_sizes_give_the_same_gradients(names):
    """On rank 0 one tower is frozen: compiled and eager ranks take part in its gradient."""

    def body(r):
        found = {}
        for name in names:
            loss = LOSSES[name]
            torch._dynamo.reset()
            graphs, pairs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager"), []
            compiled = torch.compile(loss, fullgraph=True, backend=graphs)
            for rows in (3 + r, 5, 6 - 2 * r):
                g = torch.Generator().manual_seed(r)
                a, b = (torch.randn(rows, 4, generator=g).double() for _ in range(2))
                xs = [a.requires_grad_(), b.requires_grad_(r == 1 or name != "clip_loss")]
                xs = [x for x in xs if x.requires_grad and (x is a or not name.startswith(("supcon", "dice")))]
                pairs.append([(y.detach(), torch.autograd.grad(y, xs)) for y in (f(a, b) for f in (loss, compiled))])
            found[name] = graphs.frame_count, pairs
        return found

    for found in spawn(body, range(2), timeout=250):
        for name, (graphs, pairs) in found.items():
            assert graphs == 2, name
            for eager, compiled in pairs:
                torch.testing.assert_close(compiled, eager, msg=lambda text, name=name: f"{name}: {text}")


@compiles
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_one_rank_compiles_with_graph_breaks(exchange):
    """Half-precision features; a tower is frozen on the compiled rank. The messages are those of eager ranks."""

    def loss(a, b):
        return dc.nn.functional.clip_loss(a, b, 5.0, normalize=True, exchange=exchange)

    def gradients(a, b, compiled, trained):
        torch._dynamo.reset()
        a, b = a.clone().requires_grad_(), b.clone().requires_grad_(trained)
        value = (torch.compile(loss, backend="aot_eager") if compiled else loss)(a, b)
        value.backward()
        return value.detach(), a.grad, b.grad

    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(8, 4, generator=g).bfloat16().split([3, 5]) for _ in range(2))
    want = rules(gradients, a, b, [False] * 2, [True] * 2)
    found = spawn(gradients, a, b, [True, False], [False, True], timeout=110)
    torch.testing.assert_close(found, [(*want[0][:2], None), want[1]])


@compiles
def test_a_ring_is_not_one_graph():
    x = torch.randn(4, 3)
    compiled = torch.compile(
        lambda x: dc.nn.functional.clip_loss(x, x, 5.0, exchange="ring"), fullgraph=True, backend="eager"
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph, or use exchange"):
        compiled(x)
