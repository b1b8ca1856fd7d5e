"""Programs of the notes that need no function of their own: each is one process with the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from references import LOSSES, data
from runs import gloo, rules
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import diffcoll as dc

# ── each loss and batch norm ─────────────────────────────────────────────────────────────────────────────


class Views(nn.Module):
    """Two views' features, after batch norm over the batch of all ranks."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), norm(6), nn.Tanh(), nn.Linear(6, 3)).double()

    def forward(self, x, y):
        return self.layers(torch.cat([x, y])).chunk(2)


def step(by, loss, norm, x, y):
    """Return the loss and the gradients of a step by DDP or an averager, or on one process."""
    model = Views(norm)
    called = DistributedDataParallel(model) if by == "DDP" else model
    backward = dc.GradientAverager(model).backward if by == "averager" else torch.Tensor.backward
    value = loss(*called(x, y), (y[:, 0] > 0).long())
    backward(value)
    return value.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("by", ["DDP", "averager"])
def test_a_step_of_each_loss(by):
    """With SyncBatchNorm; ranks have 5, no and 4 rows."""
    pairs = data(9, 4), data(9, 4, seed=1)

    def body(*mine):
        return [step(by, loss.ours, dc.nn.SyncBatchNorm, *mine) for loss in LOSSES.values()]

    expected = [step(None, loss.whole, nn.BatchNorm1d, *pairs) for loss in LOSSES.values()]
    torch.testing.assert_close(gloo(body, *(x.split([5, 0, 4]) for x in pairs)), [expected] * 3)


# ── PartialFC with ArcFace's margin: a data-parallel backbone, classes sharded over the same ranks ───────


def arcface(features, labels, weight, first, scale=8.0, margin=0.3):
    """Return scaled cosines of these classes, the first of which is `first`, and the mask of the labels' own."""
    cosine = F.normalize(features) @ F.normalize(weight).T
    own = labels[:, None] == torch.arange(len(weight)) + first
    angle = cosine.clamp(-1 + 1e-7, 1 - 1e-7).acos()
    return scale * torch.where(own, (angle + margin).cos(), cosine), own


def partial_fc(features, labels, weight, sizes):
    """The loss of all rows and all classes, the same on every rank, which counts once."""
    everyone = dc.gather_batch({"x": features, "y": labels})
    logits, own = arcface(*everyone.tree.values(), weight, sum(sizes[: dc.get_rank()]))
    log_z = dc.all_reduce(logits.logsumexp(1), "logsumexp", grad_placement="replicate")
    of_label = dc.all_reduce((logits * own).sum(1), grad_placement="replicate")
    return (log_z - of_label).mean()


def test_partial_fc():
    """Gradients of the backbone are summed over ranks; those of a rank's classes are whole there."""
    x, labels, classes = data(7, 4), torch.tensor([0, 5, 2, 1, 3, 4, 0]), data(6, 3, seed=1)
    sizes = [4, 2]

    def backbone():
        torch.manual_seed(0)
        return nn.Linear(4, 3).double()

    def body(x, labels, weight):
        model, weight = backbone(), weight.clone().requires_grad_()
        dc.GradientAverager(model, reduction="sum").backward(partial_fc(model(x), labels, weight, sizes))
        return model.weight.grad, weight.grad

    model, weight = backbone(), classes.clone().requires_grad_()
    F.cross_entropy(arcface(model(x), labels, weight, 0)[0], labels).backward()
    for run in (rules, gloo):
        of_model, of_classes = zip(*run(body, x.split([5, 2]), labels.split([5, 2]), classes.split(sizes)), strict=True)
        for g in of_model:
            torch.testing.assert_close(g, model.weight.grad)
        torch.testing.assert_close(torch.cat(of_classes), weight.grad)
