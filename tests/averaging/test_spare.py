"""join on ranks without any batch."""

from collections import namedtuple

import torch
from runs import gloo
from torch import nn
from training import RUNS, attach, equal_on_all_ranks, everywhere, refused, shares

import diffcoll as dc

Pair = namedtuple("Pair", "x weight")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, dtype=torch.double), nn.Linear(4, 2)).double()


def batch(r, k):
    x = torch.randn(3 + k, 3, generator=torch.Generator().manual_seed(10 * r + k), dtype=torch.double)
    return {
        "x": x,
        "more": [(1.0 + k, None, "text"), torch.tensor([[True]]), x[:0], x.T[:, ::2], torch.tensor(1j).conj()],
    }


def train(r, lengths, reduction, hook=None):
    """Two epochs; returns parameters, the optimizer's state, buffers, and the last batch."""
    model, x, weight = net(), None, 0
    more = {"bucket_mb": 1e-4, "broadcast_buffers": "each forward", "comm_hook": hook}
    averager, backward = attach(model, reduction, **more)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    steps = 0
    for epoch in range(2):
        spare = batch(7, 1) | {"x": torch.full((4, 3), torch.nan if reduction == "weighted" else 1e9).double()}
        for given in averager.join((batch(r, k) for k in range(lengths[epoch][r])), spare=spare):
            x, weight = given["x"], given["more"][0][0]
            backward(lambda x=x: model(x).square().mean(), weight)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [p.detach() for p in model.parameters()], state, [b.clone() for b in model.buffers()], (steps, given)


def alone(lengths, reduction):
    """The same gradients on one process; the statistics of the lowest rank that has batches."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for epoch in range(2):
        for k in range(max(lengths[epoch])):
            own = [r for r in range(len(lengths[epoch])) if k < lengths[epoch][r]]
            weights = shares(reduction, [(r, 1 + k) for r in own])
            sum(w * model(batch(r, k)["x"]).square().mean() for w, r in zip(weights, own, strict=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@everywhere
def test_a_rank_without_any_batch(where):
    """Parameters, optimizer and statistics are equal on all ranks, also where the model has not run forward before."""
    lengths = [(0, 2, 3), (1, 0, 2)]
    for reduction in {"rules": ("mean", "weighted", "sum"), "gloo": ("weighted",), "mpi": ("mean",)}[where]:
        found = RUNS[where](lambda r, how: train(r, lengths, how), range(3), [reduction] * 3)
        for a, b in zip(found[0][0], alone(lengths, reduction), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
        equal_on_all_ranks([[*parameters, *state, *buffers] for parameters, state, buffers, _ in found])
        assert [steps for *_, (steps, _) in found] == [5] * 3
    last = [of_rank[3][1] for of_rank in found]
    assert torch.equal(last[0]["x"], batch(0, 0)["x"])  # its own, again
    assert len(last[1]["x"]) == 4  # the spare one
    assert last[1]["more"][0] == (2.0, None, "text")


@everywhere
def test_a_rank_that_has_neither_a_batch_nor_a_spare_one(where):
    """An error on every rank, before any batch; the averager works afterwards. Without any batch there is no error."""

    def body(r):
        model = nn.Linear(2, 1)
        averager = dc.GradientAverager(model, reduction="weighted")
        batches = [Pair(torch.ones(1, 2) * r, r)] if r > 1 else []
        texts = []
        for spare in (None, None if r == 1 else batches or Pair(0, 0)):
            texts.append(refused(lambda spare=spare: list(averager.join(batches, spare=spare)), ValueError))
        for pair in averager.join(batches, spare=Pair(torch.full((1, 2), torch.nan), 7)):
            averager.set_weight(pair.weight)
            model(pair.x).sum().backward()
        assert list(averager.join([])) == []
        assert list(averager.join([None] * (r + 1))) == [None] * 3  # None is a batch like any other
        return texts, model.weight.grad.tolist()

    for texts, gradient in RUNS[where](body, range(3)):
        assert gradient == [[2.0, 2.0]]
        assert texts == [
            f"GradientAverager.join: spare: got None on rank {ranks}, which has no batch at all, while others have one"
            ", expected a batch that such a rank repeats with weight zero; pass join(batches, spare=batch) there, a "
            "batch of any values in the form of the others'"
            for ranks in ("0, 1", "1")
        ]


def test_a_spare_batch_in_another_shape():
    def body(r):
        model = nn.Linear(2, 1)
        averager = dc.GradientAverager(model, comm_hook=lambda b: b.all_reduce(b.row))
        spare = [torch.zeros(5, 2), torch.zeros(5, 2), None][r]
        seen = []
        for x in averager.join([torch.ones(1, 2)] * 2 if r == 2 else [], spare=spare):
            seen.append(len(x))
            model(x).sum().backward()
            model.zero_grad()
        return seen

    assert gloo(body, range(3)) == [[5, 5], [5, 5], [1, 1]]
