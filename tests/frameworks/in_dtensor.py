"""DTensor sums the gradients of replicated weights over rows that are sharded; nobody divides.

With tensor parallelism alone nobody averages over the data-parallel ranks; FSDP does.
"""

import dataclasses

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from trainings import CLIP, TOKENS, summed, undivided
from variants import Way, loop

import diffcoll as dc

#: Rows as torch.chunk deals them out, which is how DTensor counts them: uneven, and a rank with none.
CHUNKS = dataclasses.replace(CLIP, sizes=((3, 3, 1), (2, 2, 0), (2, 2, 2)))
clip_loss = dc.nn.functional.clip_loss


def whole(model):
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in model.named_parameters()}


def with_replicated_weights(loss_on):
    """Return a function that trains; loss_on(mesh) returns the loss."""

    def train(model, updates):
        mesh = init_device_mesh("cpu", (3,))
        distribute_module(model, mesh)
        loop(model, updates, loss_on(mesh))
        return whole(model)

    return train


def sharded(x, mesh):
    rows = int(dc.all_reduce(torch.tensor(len(x))))
    return DTensor.from_local(x, mesh, [Shard(0)], shape=(rows, *x.shape[1:]), stride=x.stride())


def of_local_rows(mesh):
    """The loss takes this rank's rows of the features."""

    def loss(model, batch, update):
        image, text, scale = model(*(sharded(x, mesh) for x in batch))
        scale = scale.to_local(grad_placements=[Partial()])
        return clip_loss(image.to_local(), text.to_local(), scale) / len(update)

    return loss


def in_local_map(mesh):
    mapped = local_map(
        lambda *of_this_rank: clip_loss(*of_this_rank) / dc.get_world_size(),
        out_placements=[Partial()],
        in_placements=([Shard(0)], [Shard(0)], [Replicate()]),
        in_grad_placements=([Shard(0)], [Shard(0)], [Partial()]),
        device_mesh=mesh,
    )

    def loss(model, batch, update):
        return mapped(*model(*(sharded(x, mesh) for x in batch))).full_tensor() / len(update)

    return loss


def of_local_weights(mesh):
    """The features are plain tensors, of any number of rows; of each weight, the gradient is this rank's part."""

    def loss(model, batch, update):
        weights = {name: p.to_local(grad_placements=[Partial()]) for name, p in model.named_parameters()}
        return clip_loss(*torch.func.functional_call(model, weights, batch)) / len(update)

    return loss


# ── tensor parallelism: 3 × 2 ranks, rows over "dp", outputs of layers over "tp" ─────────────────────────


def mean_of_pieces(model, group):
    pieces = [p.grad.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    for piece, mean in zip(pieces, dc.all_reduce(pieces, "mean", group=group), strict=True):
        piece.copy_(mean)


def tensor_parallel(averages, divides=True):
    def train(model, updates):
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        data, gathered = mesh["dp"].get_group(), ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], {"image": gathered, "text": gathered})
        for encoder in (model.image, model.text) if averages == "FSDP" else ():
            fully_shard(encoder, mesh=mesh["dp"])

        def loss(model, batch, update):
            return clip_loss(*model(*batch), group=data) / (len(update) if divides else 1)

        def before_step():
            if averages == "by hand":
                mean_of_pieces(model, data)

        loop(model, updates, loss, averager=dc.GradientAverager([model.scale], group=data), before_step=before_step)
        return whole(model)

    return train


def vocabulary(model, updates):
    """The last layer's 7 outputs are over "tp"."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    data, (first, tanh, head) = mesh["dp"].get_group(), model.layers
    averager = dc.GradientAverager(first, group=data)
    parallelize_module(head, mesh["tp"], ColwiseParallel())

    def loss(model, batch, update):
        x, labels = batch
        total = dc.all_reduce(sum((labels != -100).sum() for _, labels in update), group=data)
        losses = dc.nn.functional.vocab_parallel_cross_entropy(
            tanh(first(x)).flatten(0, 1),
            head.weight.to_local(),
            labels.flatten(),
            bias_shard=head.bias.to_local(),
            reduction="sum",
            group=mesh["tp"],
        )
        return dc.get_world_size(data) * losses / total

    loop(model, updates, loss, averager=averager, before_step=lambda: mean_of_pieces(model, data))
    return whole(model)


RIGHT = {
    "this rank's rows": Way(with_replicated_weights(lambda mesh: summed(of_local_rows(mesh))), CHUNKS),
    "local_map": Way(with_replicated_weights(in_local_map), CHUNKS),
    "this rank's weights": Way(with_replicated_weights(lambda mesh: summed(of_local_weights(mesh)))),
    "tensor parallel, FSDP": Way(tensor_parallel("FSDP"), copies=2),
    "tensor parallel, averaged by hand": Way(tensor_parallel("by hand"), copies=2),
    "vocabulary": Way(vocabulary, TOKENS, copies=2),
}
FACTORS = [
    (
        "DTensor: rows `Shard(0)`, weights `Replicate()`",
        Way(with_replicated_weights(lambda mesh: undivided(of_local_rows(mesh))), CHUNKS),
    ),
    ("Tensor parallel × FSDP, six ranks", Way(tensor_parallel("FSDP", divides=False), copies=2)),
]
