"""FSDP2 takes the mean over all ranks of its mesh; nobody divides by the micro-batches."""

import contextlib

import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from trainings import TOKENS, pairs, summed, tokens, undivided
from variants import Way, loop

import diffcoll as dc


class Scaled(nn.Module):
    """The model with a scale of shape (1,): fully_shard refuses 0-d parameters."""

    def __init__(self, model):
        super().__init__()
        self.image, self.text, self.scale = model.image, model.text, nn.Parameter(model.scale.detach()[None].clone())

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.scale[0].exp()


def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def whole(model):
    full = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in model.named_parameters()}
    return {name: p.reshape(()) if name == "scale" else p for name, p in full.items()}


def fsdp(loss=pairs, shape=(3,), parts=("image", "text"), sync="always", factor=None):
    """Return a function that trains with FSDP2 of these modules, and of what is left with the module around them."""

    def train(model, updates):
        model = Scaled(model) if hasattr(model, "scale") else model
        for module in (*(getattr(model, name) for name in parts), model):
            fully_shard(module, mesh=mesh_of(shape))
        for module in model.modules():
            if factor and isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)

        def around(is_last):
            model.set_requires_gradient_sync(is_last or sync == "always")
            return contextlib.nullcontext()

        loop(model, updates, loss, around=around)
        return whole(model)

    return train


def scale_outside(model, updates):
    """The encoders are sharded; the scale is a plain parameter, of shape ()."""
    for encoder in (model.image, model.text):
        fully_shard(encoder, mesh=mesh_of((3,)))
    loop(model, updates, pairs, averager=dc.GradientAverager([model.scale]))
    return whole(model)


RIGHT = {
    "each encoder": Way(fsdp()),
    "the root alone": Way(fsdp(parts=())),
    "sent once": Way(fsdp(sync="last"), micro_batches=(2,)),
    "HSDP 1 × 3": Way(fsdp(shape=(1, 3))),
    "HSDP 3 × 1": Way(fsdp(shape=(3, 1))),
    "a sum over ranks": Way(fsdp(summed(pairs), factor=1.0)),
    "scale outside, averaged": Way(scale_outside),
    "tokens": Way(fsdp(tokens, parts=()), TOKENS),
}
FACTORS = [
    ("FSDP2, and HSDP", Way(fsdp(undivided(pairs)))),
    ("FSDP2, and HSDP", Way(fsdp(undivided(pairs), shape=(1, 3)))),
    (
        "FSDP2, `set_gradient_divide_factor(1.0)` on each module",
        Way(fsdp(undivided(pairs), factor=1.0)),
    ),
]
