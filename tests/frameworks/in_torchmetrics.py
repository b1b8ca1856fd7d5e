"""torchmetrics as losses: `dist_sync_fn` must keep gradients; then every rank has the loss of the whole batch."""

import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainings import CLIP, Training, undivided
from variants import Way, loop

import diffcoll as dc


def gather(x, group=None):
    """Return the states of all ranks, with gradients."""
    if x.ndim == 0:
        return list(dc.all_gather(x, stack=True, group=group))
    rows, sizes, *_ = dc.gather_batch(x, group=group)
    return list(rows.split(list(sizes)))


class Contrastive(torchmetrics.Metric):
    """A loss of list states, whose rows differ in number between ranks."""

    full_state_update = False

    def __init__(self, **options):
        super().__init__(**options)
        self.add_state("image", [], dist_reduce_fx="cat")
        self.add_state("text", [], dist_reduce_fx="cat")

    def update(self, image, text, scale):
        self.image.append(image)
        self.text.append(text)
        self.scale = scale

    def compute(self):
        image, text = (torchmetrics.utilities.dim_zero_cat(z) for z in (self.image, self.text))
        logits, own = self.scale * image @ text.T, torch.arange(len(image))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 1).double()

    def forward(self, x):
        return self.layer(x).squeeze(1)


def rows(n, generator):
    return torch.randn(n, 6, generator=generator, dtype=torch.double), torch.randn(n, generator=generator).double()


METRICS = {  # by the kind of their states: sums; lists; means and variances, merged by the metric
    "sums": torchmetrics.MeanSquaredError,
    "lists": Contrastive,
    "moments": torchmetrics.ConcordanceCorrCoef,
}


def of(name, **options):
    """Return a loss: each batch is passed to a new metric."""

    def loss(model, batch, update):
        metric = METRICS[name](**options).set_dtype(torch.double)
        value = metric(*model(*batch)) if name == "lists" else metric(model(batch[0]), batch[1])
        return value / len(update)

    return loss


def training(name):
    def whole(model, batches):
        return sum(of(name)(model, batch, batches) for batch in batches)

    return Training(*((CLIP.model, CLIP.rows) if name == "lists" else (Regression, rows)), whole)


def under_ddp(loss):
    return lambda model, updates: loop(DistributedDataParallel(model), updates, loss)


OURS = {name: of(name, dist_sync_on_step=True, dist_sync_fn=gather) for name in METRICS}
RIGHT = {name: Way(under_ddp(OURS[name]), training(name)) for name in ("sums", "lists")}
ROW = "torchmetrics, gathered with gradients, under DDP"
FACTORS = [(ROW, Way(under_ddp(undivided(OURS[name])), training(name))) for name in METRICS]
