"""DistributedDataParallel takes the mean over ranks; nobody divides by the micro-batches."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from trainings import TOKENS, Training, pairs, parameters, summed, tokens, undivided
from variants import Way, loop

import diffcoll as dc


def ddp(loss=pairs, wrap=None, sync="last", hook=None, **options):
    """Return a function that trains with DDP around what `wrap` makes of the model."""

    def train(model, updates):
        wrapped = DistributedDataParallel(wrap(model) if wrap else model, **options)
        if hook:
            wrapped.register_comm_hook(None, hook)

        def around(is_last):
            return contextlib.nullcontext() if is_last or sync == "always" else wrapped.no_sync()

        loop(wrapped, updates, loss, around=around)

    return train


class Within(nn.Module):
    """The loss in the forward of the module that DDP wraps; its encoders, or all of it, are computed again."""

    def __init__(self, model, again=None):
        super().__init__()
        self.model, self.again = model, again

    def forward(self, batch, update):
        if self.again == "all":
            return checkpoint(pairs, self.model, batch, update, use_reentrant=False)
        encoders = self.model
        if self.again == "encoders":
            encoders = lambda *batch: checkpoint(self.model, *batch, use_reentrant=False)  # noqa: E731
        return pairs(encoders, batch, update)


def returned(model, batch, update):
    return model(batch, update)


def summing(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda sent: sent.value()[0])


def scale_outside(model, updates):
    """DDP has the encoders, each in a module of its own; the averager the scale, a parameter of the loss."""
    image, text = DistributedDataParallel(model.image), DistributedDataParallel(model.text)

    def towers(*batch):
        return *(F.normalize(f(x), dim=1) for f, x in zip((image, text), batch, strict=True)), model.scale.exp()

    loop(towers, updates, pairs, model.parameters(), dc.GradientAverager([model.scale]))


class Wide(nn.Module):
    """Layers of 0.7 MB each: torch.compile splits the graph where DDP's buckets of 1 MB end."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(300, 300, dtype=torch.double) for _ in range(4)))

    def forward(self, first, second):
        return dc.nn.functional.nt_xent_loss(self.layers(first).tanh(), self.layers(second).tanh(), temperature=0.5)


def compiled(model, updates):
    """The DDP module is compiled: graphs end where buckets do, and one has the loss's collective."""
    wrapped = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend="aot_eager")
    loop(wrapped, updates, lambda model, batch, update: model(*batch), model.parameters())
    return parameters(model)


def views_of(rows, generator):
    return tuple(torch.randn(rows, 300, generator=generator, dtype=torch.double) for _ in range(2))


WIDE = Training(Wide, views_of, lambda model, batches: model(*batches[0]), sizes=((3, 2, 4),))
RIGHT = {
    "the loss outside": Way(ddp()),
    "the loss within": Way(ddp(returned, Within)),
    "unused parameters are looked for": Way(ddp(find_unused_parameters=True)),
    "static graph": Way(ddp(static_graph=True, sync="always")),
    "small buckets": Way(ddp(returned, Within, bucket_cap_mb=1e-4)),
    "encoders computed again": Way(ddp(returned, lambda model: Within(model, "encoders"))),
    "the loss computed again": Way(ddp(returned, lambda model: Within(model, "all"))),
    "a sum over ranks": Way(ddp(summed(pairs), hook=summing)),
    "scale outside, averaged": Way(scale_outside),
    "tokens": Way(ddp(tokens), TOKENS),
    "compiled": Way(compiled, WIDE, (1,)),
}
FACTORS = [
    ("DDP", Way(ddp(undivided(pairs)))),
    ("DDP with a hook that sums", Way(ddp(undivided(pairs), hook=summing))),
]
