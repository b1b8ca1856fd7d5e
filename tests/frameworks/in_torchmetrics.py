"""torchmetrics as losses: `dist_sync_fn` must keep gradients; then every rank has the loss of the whole batch."""

from functools import partial

import torch
import torchmetrics
from trainings import SIZES, Training, Way, ddp, layers, normal, of_page

gather = of_page("README.md", "gather")
#: Some have states that are sums, or lists; the last one merges means and variances, and needs rows on each rank.
METRICS = {
    torchmetrics.MeanSquaredError: SIZES,
    partial(torchmetrics.KLDivergence, log_prob=True, reduction="none"): SIZES,
    partial(torchmetrics.ConcordanceCorrCoef, num_outputs=3): SIZES[:2],
}


def of(make, model, batch, update):
    """Return the value of a new metric of this batch."""
    metric = make(dist_sync_on_step=True, dist_sync_fn=gather).set_dtype(torch.double)
    return metric(model(batch[0]), batch[1]).mean()


TRAININGS = [Training(lambda: layers(6, 3), normal(6, 3), partial(of, make), rows) for make, rows in METRICS.items()]
ROWS = [("torchmetrics, gathered with gradients, under DDP", Way(ddp(), training)) for training in TRAININGS]
