"""Losses within torch.compile, on processes with unequal numbers of rows."""

from functools import partial

import pytest
import torch
import torch._dynamo.testing
from references import IN_CHUNKS, LOSSES, data
from releases import compiles

import diffcoll as dc
from diffcoll.nn import functional as f
from diffcoll.testing import spawn

OTHERS = {
    "siglip, half precision": lambda x, y, labels: f.siglip_loss(x.bfloat16(), y.bfloat16(), 2.0, -1.0),
    "siglip, ids, in chunks": lambda x, y, labels: f.siglip_loss(x, y, 2.0, -1.0, ids=labels, chunk_size=16),
    "info_nce, ids": lambda x, y, labels: f.info_nce_loss(x, y, ids=labels),
    "info_nce, pairs left out": lambda x, y, labels: f.info_nce_loss(
        x, y, exclude=(x @ dc.gather_batch(y).tree.T > 0).detach()
    ),
}
WHOLE = {name: loss.ours for name, loss in LOSSES.items()}
CHUNKED = {name: partial(LOSSES[name].ours, chunk_size=16) for name in IN_CHUNKS}


@compiles
@pytest.mark.parametrize(
    "losses",
    [
        pytest.param({"clip": WHOLE["clip"]}, id="clip"),
        pytest.param(OTHERS | WHOLE, marks=pytest.mark.slow, id="all"),
        pytest.param(CHUNKED, marks=pytest.mark.slow, id="in chunks"),
    ],
)
def test_two_graphs_for_all_batch_sizes_give_the_same_gradients(losses):
    def body(r):
        found = {}
        for name, loss in losses.items():
            torch._dynamo.reset()
            graphs, pairs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager"), []
            compiled = torch.compile(loss, fullgraph=True, backend=graphs)
            for rows in (3 + r, 5, 6 - 2 * r):
                x, y = (data(rows, 4, seed=seed + r).requires_grad_() for seed in (0, 7))
                values = [fn(x, y, torch.arange(rows) % 3) for fn in (compiled, loss)]
                pairs.append([(value.detach(), torch.autograd.grad(value, (x, y))) for value in values])
            found[name] = graphs.frame_count, pairs
        return found

    for found in spawn(body, range(2), timeout=250):
        for name, (graphs, pairs) in found.items():
            assert graphs <= 2, name
            for pair in pairs:
                torch.testing.assert_close(*pair, msg=lambda text, name=name: f"{name}: {text}")


@compiles
def test_a_rank_whose_rows_need_no_gradient():
    """It runs the backward of the others, in a graph too."""

    def body(r):
        found = []
        for loss in (lambda x: f.loss_of_sums(torch.div, x.square().sum(), x.new_tensor(3.0)), f.token_mean):
            for fn in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
                x = data(3, seed=r).requires_grad_(r == 0)
                fn(x).backward()
                found.append(x.grad)
        return found

    for eager, compiled, *more in spawn(body, range(2), timeout=250):
        torch.testing.assert_close((compiled, more[1]), (eager, more[0]))
