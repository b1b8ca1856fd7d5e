"""torchmetrics as losses: `dist_sync_fn` must keep gradients; then every rank has the loss of the whole batch."""

from functools import partial

import torch
import torchmetrics
from trainings import Training, Way, ddp, layers, normal, of_page

gather = of_page("README.md", "gather")
METRICS = {  # by the kind of their states: sums; lists; means and variances, merged by the metric
    "sums": torchmetrics.MeanSquaredError,
    "lists": partial(torchmetrics.KLDivergence, log_prob=True, reduction="none"),
    "moments": partial(torchmetrics.ConcordanceCorrCoef, num_outputs=3),
}


def of(name, model, batch, update):
    """Return the value of a new metric of this batch."""
    metric = METRICS[name](dist_sync_on_step=True, dist_sync_fn=gather).set_dtype(torch.double)
    return metric(model(batch[0]), batch[1]).mean()


TRAININGS = {name: Training(lambda: layers(6, 3), normal(6, 3), partial(of, name)) for name in METRICS}
RIGHT = {name: Way(ddp(), TRAININGS[name]) for name in ("sums", "lists")}
FACTORS = [("torchmetrics, gathered with gradients, under DDP", Way(ddp(), each)) for each in TRAININGS.values()]
