"""FSDP2 takes the mean over all ranks of its mesh; nobody divides by the micro-batches."""

import contextlib

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from trainings import TOKENS, Way, loop

import diffcoll as dc


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def fsdp(shape=(3,), parts=("image", "text"), sync="always", factor=None):
    """Return a function that trains with FSDP2 of these modules, and of what is left with the module around them."""

    def train(model, updates, loss):
        for module in (*(getattr(model, name) for name in parts), model):
            fully_shard(module, mesh=mesh_of(*shape))
        for module in model.modules():
            if factor and isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)

        def around(is_last):
            model.set_requires_gradient_sync(is_last or sync == "always")
            return contextlib.nullcontext()

        loop(model, updates, loss, around=around)

    return train


def scale_outside(model, updates, loss):
    """The encoders are sharded; the scale is a plain parameter."""
    for encoder in (model.image, model.text):
        fully_shard(encoder, mesh=mesh_of(3))
    loop(model, updates, loss, averager=dc.GradientAverager([model.scale]))


SAME = fsdp(), fsdp(parts=()), fsdp(sync="last"), fsdp(shape=(1, 3)), fsdp(shape=(3, 1)), scale_outside
ROWS = [
    *(("FSDP2, and HSDP", Way(train)) for train in SAME),
    ("FSDP2, and HSDP", Way(fsdp(parts=()), TOKENS)),
    ("FSDP2, `set_gradient_divide_factor(1.0)` on each module", Way(fsdp(factor=1.0))),
]
