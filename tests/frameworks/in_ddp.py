"""DistributedDataParallel takes the mean over ranks; nobody divides by the micro-batches."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from trainings import TOKENS, Training, Way, ddp, layers, loop, normal, sgd

import diffcoll as dc


class Within(nn.Module):
    """The loss in the forward of the module that DDP wraps; its encoders, or all of it, are computed again."""

    def __init__(self, model, loss, again):
        super().__init__()
        self.model, self.loss, self.again = model, loss, again

    def forward(self, batch, update):
        if self.again == "all":
            return checkpoint(self.loss, self.model, batch, update, use_reentrant=False)
        encoders = partial(checkpoint, self.model, use_reentrant=False) if self.again == "encoders" else self.model
        return self.loss(encoders, batch, update)


def within(again="nothing", **options):
    def train(model, updates, loss):
        ddp(**options)(Within(model, loss, again), updates, lambda wrapped, batch, update: wrapped(batch, update))

    return train


def summing(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda sent: sent.value()[0])


def scale_outside(model, updates, loss):
    """DDP has the encoders, each in a module of its own; the averager the scale, a parameter of the loss."""
    image, text = DistributedDataParallel(model.image), DistributedDataParallel(model.text)

    def towers(*batch):
        return *(F.normalize(f(x), dim=1) for f, x in zip((image, text), batch, strict=True)), model.scale[0].exp()

    loop(towers, updates, loss, sgd(model), dc.GradientAverager([model.scale]))


def nt_xent(model, batch, update):
    return dc.nn.functional.nt_xent_loss(*map(model, batch), temperature=0.5)


def compiled(outside, model, updates, loss):
    """Layers of 0.7 MB each: torch.compile splits the graph of encoders and loss where DDP's buckets of 1 MB end.

    Of the model within DDP there is one graph.
    """
    step = Within(model, loss, "nothing")
    if not outside:
        step = torch.compile(step, backend="aot_eager", fullgraph=True)
    step = DistributedDataParallel(step, bucket_cap_mb=1)
    if outside:
        step = torch.compile(step, backend="aot_eager")
    loop(step, updates, lambda step, batch, update: step(batch, update), sgd(model))


WIDE = Training(lambda: layers(*[300] * 5), normal(300, 300), nt_xent, sizes=((3, 2, 4),))
SAME = [
    ddp(),
    ddp(find_unused_parameters=True),
    ddp(static_graph=True, sync="always"),
    within(),
    within(bucket_cap_mb=1e-4),
    within("encoders"),
    within("all"),
    scale_outside,
]
ROWS = [
    *(("DDP", Way(train)) for train in SAME),
    ("DDP", Way(ddp(), TOKENS)),
    *(("DDP", Way(partial(compiled, outside), WIDE, micro_batches=(1,))) for outside in (True, False)),
    ("DDP with a hook that sums", Way(ddp(hook=summing))),
]
