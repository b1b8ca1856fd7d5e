"""DTensor sums the gradients of replicated weights over rows that are sharded; nobody divides.

With tensor parallelism alone nobody averages over the data-parallel ranks; FSDP does.
"""

import dataclasses

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from trainings import CLIP, RANKS, Way, loop, sgd

import diffcoll as dc

#: Rows as torch.chunk deals them out, which is how DTensor counts them: uneven, and a rank with none.
CHUNKS = dataclasses.replace(CLIP, sizes=((3, 3, 1), (2, 2, 0), (2, 2, 2)))


def replicated(to_local):
    """Return a function that trains with replicated weights; the loss calls to_local(model, mesh, *batch)."""

    def train(model, updates, loss):
        mesh = init_device_mesh("cpu", (RANKS,))
        distribute_module(model, mesh)
        loop(lambda *batch: to_local(model, mesh, *batch), updates, loss, sgd(model))

    return train


def local_rows(model, mesh, *batch):
    """The model takes rows that are sharded, the loss this rank's rows of the features."""

    def sharded(x):
        rows = int(dc.all_reduce(torch.tensor(len(x))))
        return DTensor.from_local(x, mesh, [Shard(0)], shape=(rows, *x.shape[1:]), stride=x.stride())

    image, text, scale = model(*map(sharded, batch))
    return image.to_local(), text.to_local(), scale.to_local(grad_placements=[Partial()])


def local_weights(model, mesh, *batch):
    """The features are plain tensors, of any number of rows; of each weight, the gradient is this rank's part."""
    weights = {name: p.to_local(grad_placements=[Partial()]) for name, p in model.named_parameters()}
    return torch.func.functional_call(model, weights, batch)


# ── tensor parallelism: 3 × 2 ranks, rows over "dp", outputs of layers over "tp" ─────────────────────────


def mesh_of_data():
    """Return the mesh; the ranks of "dp" become the default group, which the loss is of."""
    mesh = init_device_mesh("cpu", (RANKS, 2), mesh_dim_names=("dp", "tp"))
    dc.set_default_group(mesh["dp"].get_group())
    return mesh


def average(modules):
    """Average by hand what tensor parallelism has split."""
    pieces = [p.grad.to_local() for module in modules for p in module.parameters()]
    for piece, mean in zip(pieces, dc.all_reduce(pieces, "mean"), strict=True):
        piece.copy_(mean)


def tensor_parallel(by_fsdp):
    def train(model, updates, loss):
        mesh, gathered = mesh_of_data(), ColwiseParallel(output_layouts=Replicate())
        encoders = model.image, model.text
        parallelize_module(model, mesh["tp"], {"image": gathered, "text": gathered})
        for encoder in encoders if by_fsdp else ():
            fully_shard(encoder, mesh=mesh["dp"])
        before_step = (lambda: None) if by_fsdp else (lambda: average(encoders))
        loop(model, updates, loss, averager=dc.GradientAverager([model.scale]), before_step=before_step)

    return train


WEIGHTS = "DTensor: rows `Shard(0)`, weights `Replicate()`"
PARALLEL = "Tensor parallel × FSDP, six ranks"
ROWS = [
    (WEIGHTS, Way(replicated(local_rows), CHUNKS)),
    (WEIGHTS, Way(replicated(local_weights))),
    (PARALLEL, Way(tensor_parallel(by_fsdp=True), copies=2)),
    (PARALLEL, Way(tensor_parallel(by_fsdp=False), copies=2)),
]
