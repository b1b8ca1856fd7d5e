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
from diffcoll.nn.functional import clip_loss, token_mean

# ── GradCache: the model in chunks, by checkpoints ───────────────────────────────────────────────────────


class Towers(nn.Module):
    """Two encoders with dropout and a scale; `chunk` rows at a time, which backward computes again."""

    def __init__(self, chunk=None, again=True, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 3)).double() for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(2.0).double())
        self.chunk, self.again = chunk, again

    def encode(self, encoder, x):
        if self.chunk is None:
            return encoder(x)
        parts = x.split(self.chunk)
        found = [checkpoint(encoder, part, use_reentrant=False) if self.again else encoder(part) for part in parts]
        return torch.cat(found)

    def forward(self, image, text):
        """The scale is returned too: what the loss uses is what DDP's forward returns."""
        features = self.encode(self.image, image), self.encode(self.text, text)
        return *(F.normalize(x, dim=1) for x in features), self.scale


def gradients(model):
    return {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("by", ["DDP", "averager"])
def test_grad_cache(by):
    """As one process without chunks; and with dropout as chunks that are not computed again. A rank has no rows."""
    pairs = data(9, 4), data(9, 4, seed=1)

    def step(image, text, options):
        model = Towers(**options)
        torch.manual_seed(dc.get_rank())
        if by == "DDP":
            wrapped = DistributedDataParallel(model)
            clip_loss(*wrapped(image, text)).backward()
        else:
            dc.GradientAverager(model).backward(clip_loss(*model(image, text)))
        return gradients(model)

    whole = Towers()
    clip_loss(*whole(*pairs)).backward()
    parts = [x.split([5, 4, 0]) for x in pairs]
    for found in gloo(step, *parts, [{"chunk": 2}] * 3):
        torch.testing.assert_close(found, gradients(whole))
    for again, kept in zip(
        *(gloo(step, *parts, [{"chunk": 2, "again": a, "dropout": 0.3}] * 3) for a in (True, False)), strict=True
    ):
        torch.testing.assert_close(again, kept)


def test_grad_cache_where_a_chunk_trains_nothing():
    """A router sends all rows of a chunk to a frozen encoder."""
    x, y, of_live = data(4, 3), data(4, 2, seed=1), [True, True, False, False]

    def encode(live, frozen, rows, routes):
        return torch.cat([(live if to_live else frozen)(row[None]) for row, to_live in zip(rows, routes, strict=True)])

    def gradient(chunk):
        torch.manual_seed(0)
        live, frozen = nn.Linear(3, 2).double(), nn.Linear(3, 2).double().requires_grad_(False)
        parts = [(x[i : i + chunk], of_live[i : i + chunk]) for i in range(0, 4, chunk)]
        features = [checkpoint(encode, live, frozen, *part, use_reentrant=False) for part in parts]
        f.info_nce_loss(torch.cat(features), y).backward()
        return live.weight.grad

    torch.testing.assert_close(gradient(2), gradient(4))


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


@pytest.mark.parametrize("by", ["DDP", "averager"])
def test_a_step_of_each_loss(by):
    """With SyncBatchNorm; ranks have 5, 1 and 3 rows."""
    pairs = data(9, 4), data(9, 4, seed=1)

    def step(x, y):
        found = {}
        for name, loss in STEPS.items():
            model = Views(dc.nn.SyncBatchNorm)
            if by == "DDP":
                wrapped = DistributedDataParallel(model)
                value = loss(*wrapped(x, y))
                value.backward()
            else:
                averager = dc.GradientAverager(model)
                value = loss(*model(x, y))
                averager.backward(value)
            found[name] = value.detach(), gradients(model)
        return found

    right = {}
    for name, loss in STEPS.items():
        model = Views(nn.BatchNorm1d)
        value = loss(*model(*pairs))
        value.backward()
        right[name] = value.detach(), gradients(model)
    for found in gloo(step, *(x.split([5, 1, 3]) for x in pairs)):
        torch.testing.assert_close(found, right)


# ── MoCo: keys of earlier steps, those of the query's id left out ────────────────────────────────────────


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(data(4, 3))
        self.queue = dc.nn.FeatureQueue(7, 3, labels=True, dtype=torch.double)
        self.kept = []

    def logits(self, query, key, ids, others, of_others):
        """Of a query with its own key, and with the queue."""
        q, k = F.normalize(query @ self.weight), F.normalize(key @ self.weight).detach()
        same = ids[:, None] == of_others
        return torch.cat([(q * k).sum(1, keepdim=True), (q @ others.T).masked_fill(same, -torch.inf)], 1) / 0.2, k


def test_moco():
    """Three steps with a queue smaller than what they append."""
    model = MoCo()

    def positives(logits):
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long), reduction="none")

    def of_ranks(query, key, ids):
        logits, k = model.logits(query, key, ids, model.queue.features(), model.queue.labels())
        model.queue.enqueue(k, ids)
        return token_mean(positives(logits))

    def of_one(query, key, ids):
        rows = torch.tensor([row for row, _ in model.kept], dtype=torch.double).reshape(-1, 3)
        logits, k = model.logits(query, key, ids, rows, torch.tensor([i for _, i in model.kept], dtype=torch.long))
        model.kept = [*model.kept, *zip(k.tolist(), ids.tolist(), strict=True)][-7:]
        model.queue.enqueue(k, ids)
        return positives(logits).mean()

    def in_steps(loss):
        return lambda *steps: sum(loss(*rows) for rows in steps)

    def batch(rows):
        x = data(rows, 3, 2, 4, seed=rows)
        return tuple((x[:, i, 0].clone().requires_grad_(), x[:, i, 1], torch.arange(rows) % 3) for i in range(3))

    holds(in_steps(of_ranks), in_steps(of_one), batch, module=model, sizes=[(6,), (3, 0, 3)], order=1)


# ── the norm of the gradients of a model of which a part is sharded ──────────────────────────────────────


def clip_gradients(replicated, sharded, most, group=None):
    """Scale the gradients so that their norm, of all shards and of what is replicated once, is at most `most`."""
    squares = [sum((p.grad.square().sum() for p in part), torch.zeros(())) for part in (replicated, sharded)]
    norm = (squares[0] + dc.all_reduce(squares[1], group=group)).sqrt()
    for p in (*replicated, *sharded):
        p.grad.mul_((most / norm).clamp(max=1))
    return norm


def test_the_norm_of_a_partly_sharded_model():
    grads = data(3), data(6, 2)

    def body(shard):
        parts = [torch.zeros_like(g, requires_grad=True) for g in (grads[0], shard)]
        for p, g in zip(parts, (grads[0], shard), strict=True):
            p.grad = g.clone()
        norm = clip_gradients(parts[:1], parts[1:], 0.5)
        return norm.double(), parts[0].grad, parts[1].grad

    whole = [torch.zeros_like(g, requires_grad=True) for g in grads]
    for p, g in zip(whole, grads, strict=True):
        p.grad = g.clone()
    right = nn.utils.clip_grad_norm_(whole, 0.5)
    norms, replicated, shards = zip(*rules(body, grads[1].split([4, 0, 2])), strict=True)
    for norm, g in zip(norms, replicated, strict=True):
        torch.testing.assert_close(norm, right)
        torch.testing.assert_close(g, whole[0].grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(shards), whole[1].grad, rtol=1e-5, atol=1e-6)


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
        return token_mean(F.cross_entropy(scores, own, reduction="none"))

    def of_one(queries, documents, is_token):
        return F.cross_entropy(max_sim(queries, documents, is_token), torch.arange(len(queries)))

    holds(of_ranks, of_one, (queries, documents, is_token), sizes=[(3, 3), (3, 0, 3), (1, 5)], order=1)
