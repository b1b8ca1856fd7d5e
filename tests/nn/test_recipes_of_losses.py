"""Programs of the notes that need no function of their own: each is one process with the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from references import data, holds
from runs import gloo, rules
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from diffcoll.nn import functional as f


def after_step(by, model, loss, *batch):
    """Return the loss and the gradients of a step by DDP or an averager, or on one process."""
    called = DistributedDataParallel(model) if by == "DDP" else model
    backward = dc.GradientAverager(model).backward if by == "averager" else torch.Tensor.backward
    value = loss(*called(*batch))
    backward(value)
    return value.detach(), {name: p.grad for name, p in model.named_parameters()}


by_each = pytest.mark.parametrize("by", ["DDP", "averager"])

# ── GradCache: the model in chunks, by checkpoints ───────────────────────────────────────────────────────


def at_once(encoder, x):
    return encoder(x)


def in_chunks(encoder, x):
    return torch.cat([encoder(part) for part in x.split(2)])


def again(encoder, x):
    return torch.cat([checkpoint(encoder, part, use_reentrant=False) for part in x.split(2)])


class Towers(nn.Module):
    """Two encoders with dropout and a scale, which is returned too: all that the loss uses passes DDP's forward."""

    def __init__(self, encode, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 3)).double() for _ in range(2)
        )
        self.scale, self.encode = nn.Parameter(torch.tensor(2.0).double()), encode

    def forward(self, image, text):
        features = self.encode(self.image, image), self.encode(self.text, text)
        return *(F.normalize(x, dim=1) for x in features), self.scale


@by_each
def test_grad_cache(by):
    """As one process without chunks; and with dropout as chunks that are not computed again. A rank has no rows."""
    pairs = data(9, 4), data(9, 4, seed=1)

    def on_ranks(*options):
        def step(image, text):
            model = Towers(*options)
            torch.manual_seed(dc.get_rank())
            return after_step(by, model, f.clip_loss, image, text)

        return gloo(step, *(x.split([5, 4, 0]) for x in pairs))

    expected = after_step(None, Towers(at_once), f.clip_loss, *pairs)
    torch.testing.assert_close(on_ranks(again), [expected] * 3)
    torch.testing.assert_close(on_ranks(again, 0.3), on_ranks(in_chunks, 0.3))


# ── each loss and batch norm ─────────────────────────────────────────────────────────────────────────────


class Views(nn.Module):
    """Two views' features, after batch norm over the batch of all ranks."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), norm(6), nn.Tanh(), nn.Linear(6, 3)).double()

    def forward(self, x, y):
        return self.layers(torch.cat([x, y])).chunk(2)


STEPS = {
    "clip": lambda x, y: f.clip_loss(x, y, 5.0, normalize=True),
    "siglip": lambda x, y: f.siglip_loss(x, y, 5.0, -3.0, normalize=True),
    "nt_xent": f.nt_xent_loss,
    "supcon": lambda x, y: f.supcon_loss(torch.stack([x, y], 1), (x[:, 0] > 0).long()),
    "vicreg": f.vicreg_loss,
    "barlow twins": f.barlow_twins_loss,
    "koleo": lambda x, y: f.koleo_loss(x + y),
    "sigreg": lambda x, y: f.sigreg_loss(x - y, seed=1, num_slices=4),
    "dice": lambda x, y: f.dice_loss(x.sigmoid(), (y > 0).double()),
    "token_mean": lambda x, y: f.token_mean((x - y).square(), (y > 0).double()),
}


@by_each
def test_a_step_of_each_loss(by):
    """With SyncBatchNorm; ranks have 5, 1 and 3 rows."""
    pairs = data(9, 4), data(9, 4, seed=1)

    def step(*batch, by=by, norm=dc.nn.SyncBatchNorm):
        return {name: after_step(by, Views(norm), loss, *batch) for name, loss in STEPS.items()}

    expected = step(*pairs, by=None, norm=nn.BatchNorm1d)
    torch.testing.assert_close(gloo(step, *(x.split([5, 1, 3]) for x in pairs)), [expected] * 3)


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


# ── late interaction: documents whose numbers of tokens differ between ranks ─────────────────────────────


def max_sim(queries, documents, is_token):
    """Of each query and document: the sum over the query's tokens of the largest product with one of the document."""
    products = torch.einsum("qld,kmd->qklm", queries, documents)
    return products.masked_fill(~is_token[:, None], -torch.inf).amax(3).sum(2)


def test_late_interaction():
    queries, documents = data(6, 2, 3), data(6, 5, 3, seed=1)
    is_token = torch.arange(5) < torch.tensor([5, 2, 4, 1, 3, 3])[:, None]

    def of_ranks(queries, documents, is_token):
        longest = int(is_token.sum(1).max()) if len(is_token) else 1  # of this rank's documents
        mine = {"documents": documents[:, :longest], "is_token": is_token[:, :longest]}
        everyone = dc.gather_batch(mine, pad=0.0)
        scores = max_sim(queries, everyone.tree["documents"], everyone.tree["is_token"])
        own = torch.arange(len(queries)) + everyone.offset
        return f.token_mean(F.cross_entropy(scores, own, reduction="none"))

    def of_one(queries, documents, is_token):
        return F.cross_entropy(max_sim(queries, documents, is_token), torch.arange(len(queries)))

    holds(of_ranks, of_one, (queries, documents, is_token), sizes=[(3, 3), (3, 0, 3), (1, 5)], order=1)
