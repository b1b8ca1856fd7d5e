"""GradientAverager in one backward with other averagers, DistributedDataParallel, and losses with collectives."""

import pytest
import torch
from runs import gloo
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import RUNS, attach, everywhere

import diffcoll as dc
from diffcoll.testing import new_group, simulate


class TwoTowers(nn.Module):
    """With a loss that learns its scale."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
        self.loss = dc.nn.CLIPLoss(nn.Parameter(torch.tensor(14.0))).double()

    def forward(self, x, y):
        return self.loss(self.a(x), self.b(y))


def train(r, n, reduction):
    """Gradients of the second of two steps, of which the first has a micro-batch."""
    torch.manual_seed(1)
    x, y = (torch.randn(6, 4, dtype=torch.double).chunk(n)[r] for _ in range(2))
    model = TwoTowers()
    _, backward = attach(model, reduction, bucket_mb=1e-4)
    for is_first in (True, False):
        model.zero_grad()
        if is_first:
            backward(lambda: model(x, y), 3, reduces=False)
        backward(lambda: model(x, y), 2)
    return {name: p.grad for name, p in model.named_parameters()}


@everywhere
@pytest.mark.parametrize("reduction", ["mean", "weighted"])
def test_a_contrastive_loss_that_learns_its_scale(reduction, where):
    """As on one process: each rank's loss is that of the whole batch."""
    (wanted,) = simulate(lambda r: train(r, 1, "mean"), [0], rules=True)
    assert wanted["loss.logit_scale"].abs() > 1e-4
    for n in (2, 3):
        for found in RUNS[where](lambda r, n=n: train(r, n, reduction), range(n)):
            for name, g in wanted.items():
                torch.testing.assert_close(found[name], g, rtol=1e-8, atol=1e-10)


@everywhere
def test_averagers_on_groups_that_overlap(where):
    """In one backward, with one on all ranks; weights, sums and means do not mix."""

    def body(r):
        pairs = ([0, 1], [1, 2], [0, 2])
        groups = {i: new_group(ranks) for i, ranks in enumerate(pairs)}
        shared = nn.Parameter(torch.ones(2, dtype=torch.double))
        dc.GradientAverager([shared], reduction="sum")
        own = {i: nn.Parameter(torch.ones(2, dtype=torch.double)) for i in groups if r in pairs[i]}
        averagers = {i: dc.GradientAverager([p], group=groups[i], reduction="weighted") for i, p in own.items()}
        for step in range(3):
            for p in (shared, *own.values()):
                p.grad = None
            loss = (shared * (r + 1)).sum()
            for i, p in own.items():
                averagers[i].set_weight(r + 1)
                loss = loss + (p * (r + 1 + step)).sum()
            loss.backward()
            assert shared.grad.tolist() == [6.0] * 2
            for i, p in own.items():
                weights = [s + 1 for s in pairs[i]]
                right = sum(w * (w + step) for w in weights) / sum(weights)
                assert p.grad.tolist() == [pytest.approx(right)] * 2

    RUNS[where](body, range(3))


def test_beside_distributed_data_parallel():
    """Of another module, in one backward, also if it feeds the averaged one."""

    def body(r):
        torch.manual_seed(0)
        theirs, ours, last = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(1, 1, bias=False)
        nn.init.ones_(last.weight)
        wrapped, averager = DistributedDataParallel(theirs), dc.GradientAverager(ours, reduction="sum")
        dc.GradientAverager(last)
        x = torch.full((1, 3), r + 1.0)
        for step in range(3):
            for module in (theirs, ours, last):
                module.zero_grad()
            if step == 1:
                with wrapped.no_sync(), averager.no_sync():
                    (wrapped(x) + ours(x)).sum().backward()
            (last(wrapped(x)) + 2 * ours(x)).sum().backward()
            assert theirs.weight.grad.tolist() == [[3.0 if step == 1 else 1.5] * 3]
            assert ours.weight.grad.tolist() == [[9.0 if step == 1 else 6.0] * 3]

    gloo(body, range(2))
