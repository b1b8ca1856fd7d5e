"""DTensor sums the gradients of replicated weights over rows that are sharded; nobody divides.

With tensor parallelism alone nobody averages over the data-parallel ranks; FSDP does.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from trainings import CLIP, row_of_the_table
from variants import assert_as_one_process, factors, loop

import diffcoll as dc
from diffcoll.testing import GradientMismatchError, RanksFailedError, assert_matches_single_process, spawn

PARTIAL = [Partial()]
#: Rows as torch.chunk deals them out, which is how DTensor counts them: uneven, and a rank with none.
CHUNKS = dataclasses.replace(CLIP, sizes=((3, 3, 1), (2, 2, 0), (2, 2, 2)))


def sharded(x, mesh):
    rows = int(dc.all_reduce(torch.tensor(len(x))))
    return DTensor.from_local(x, mesh, [Shard(0)], shape=(rows, *x.shape[1:]), stride=x.stride())


def guessed(x, mesh):
    """The number of all rows is not given: DTensor takes this rank's times the number of ranks."""
    return DTensor.from_local(x, mesh, [Shard(0)])


def rows_sharded(of=sharded, scale_gradient=PARTIAL, divides=False, summed=False):
    """Weights are replicated DTensors, and the loss takes this rank's rows of the features."""

    def train(model, updates):
        mesh = init_device_mesh("cpu", (3,))
        distribute_module(model, mesh)

        def loss(model, *batch):
            image, text, scale = model(*(of(x, mesh) for x in batch))
            scale = scale.to_local(grad_placements=scale_gradient)
            loss = dc.nn.functional.clip_loss(image.to_local(), text.to_local(), scale)
            return loss / dc.get_world_size() if summed else loss

        loop(model, updates, loss, divides=divides)
        return whole(model)

    return train


def in_local_map(in_grad_placements, divides=False):
    def train(model, updates):
        mesh = init_device_mesh("cpu", (3,))
        distribute_module(model, mesh)
        mapped = local_map(
            lambda *of_this_rank: dc.nn.functional.clip_loss(*of_this_rank) / dc.get_world_size(),
            out_placements=[Partial()],
            in_placements=([Shard(0)], [Shard(0)], [Replicate()]),
            in_grad_placements=in_grad_placements,
            device_mesh=mesh,
        )
        loop(
            model,
            updates,
            lambda model, *b: mapped(*model(*(sharded(x, mesh) for x in b))).full_tensor(),
            divides=divides,
        )
        return whole(model)

    return train


def weights_of_this_rank(model, updates):
    """The features are plain tensors, of any number of rows; of each weight, the gradient is this rank's part."""
    distribute_module(model, init_device_mesh("cpu", (3,)))

    def loss(model, *batch):
        weights = {name: p.to_local(grad_placements=[Partial()]) for name, p in model.named_parameters()}
        features = torch.func.functional_call(model, weights, batch)
        return dc.nn.functional.clip_loss(*features) / dc.get_world_size()

    loop(model, updates, loss, divides=True)
    return whole(model)


def whole(model):
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_pairs_as_one_process(micro_batches):
    placed = [Shard(0)], [Shard(0)], [Partial()]
    right = {
        "rows": rows_sharded(summed=True, divides=True),
        "local_map": in_local_map(placed, divides=True),
    }
    assert_as_one_process(CHUNKS, right, micro_batches)


def test_pairs_of_any_number_of_rows_as_one_process():
    assert_as_one_process(CLIP, {"weights of this rank": weights_of_this_rank}, 2)


def test_factors_of_the_table():
    cells = row_of_the_table("[DTensor](dtensor.md): rows `Shard(0)`, weights `Replicate()`")
    found = [factors(CHUNKS, {"": rows_sharded()}, micro_batches)[""] for micro_batches in (1, 2)]
    assert found == [float(cell) for cell in cells[:2]]


def test_factors_of_mistakes():
    found = factors(
        CHUNKS,
        {
            "scale": rows_sharded(scale_gradient=None, summed=True),
            "local_map": in_local_map(None),
        },
    )
    encoders = dict.fromkeys(("image.weight", "image.bias", "text.weight", "text.bias"), 1.0)
    assert found["scale"] == found["local_map"] == {"scale": "differs", **encoders}


@pytest.mark.parametrize(
    ("of", "words"),
    [(sharded, r"expanded size of the tensor \(3\) must match the existing size"), (guessed, "no end after 10 s")],
    ids=["given", "guessed"],
)
def test_rows_that_are_not_those_of_chunks(of, words):
    """An error on some ranks; where each guesses the number of all, they disagree, and wait for each other."""

    def train(mine):
        return rows_sharded(of, summed=True)(CLIP.model(), mine)

    with pytest.raises(RanksFailedError, match=words):
        spawn(train, CLIP.batches(2, 20), timeout=10)


# ── tensor parallelism ───────────────────────────────────────────────────────────────────────────────────


def tensor_parallel(averages, divides=False):
    """3 × 2 ranks: rows over "dp", the outputs of each encoder over "tp"; who averages over "dp"."""

    def train(model, updates):
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        data, gathered = mesh["dp"].get_group(), ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], {"image": gathered, "text": gathered})
        for encoder in (model.image, model.text) if averages == "FSDP" else ():
            fully_shard(encoder, mesh=mesh["dp"])
        model.averager = dc.GradientAverager(model if averages == "GradientAverager" else [model.scale], group=data)

        def by_hand():
            pieces = [p.grad.to_local() for p in (*model.image.parameters(), *model.text.parameters())]
            for piece, mean in zip(pieces, dc.all_reduce(pieces, "mean", group=data), strict=True):
                piece.copy_(mean)

        def loss(model, *batch):
            return dc.nn.functional.clip_loss(*model(*batch), group=data)

        loop(model, updates, loss, divides=divides, before_step=by_hand if averages == "by hand" else None)
        return whole(model)

    return train


def test_tensor_parallel_encoders_as_one_process():
    right = {way: tensor_parallel(way, divides=True) for way in ("FSDP", "by hand")}
    assert_as_one_process(CLIP, right, 2, copies=2)


def test_factors_of_tensor_parallel_encoders():
    found = [
        factors(CLIP, {way: tensor_parallel(way) for way in ("FSDP", "nobody", "GradientAverager")}, k, copies=2)
        for k in (1, 2)
    ]
    cells = row_of_the_table("[Tensor parallel × FSDP](dtensor.md), six ranks")
    assert [each["FSDP"] for each in found] == [float(cell) for cell in cells[:2]]
    encoders = dict.fromkeys(("image.weight", "image.bias", "text.weight", "text.bias"), "differs")
    assert found[0]["nobody"] == {"scale": 1, **encoders}
    assert "FSDP or tensor parallelism shards this parameter" in found[0]["GradientAverager"]


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8, dtype=torch.double), nn.Linear(8, 4, dtype=torch.double)

    def forward(self, x):
        return F.normalize(self.down(self.up(x).tanh()), dim=-1)


@pytest.mark.parametrize("name", ["clip_loss", "nt_xent_loss"])
def test_a_loss_over_all_ranks_counts_each_row_for_each_tensor_parallel_rank(name):
    """clip_loss is off by the logarithm of their number, with the right gradients; nt_xent_loss is another loss."""
    arguments = (5.0,) if name == "clip_loss" else ()

    def shard(model, mesh):
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])

    def loss(model, x):
        return getattr(dc.nn.functional, name)(*model(x).unbind(1), *arguments)

    more = {
        "module": Tower(),
        "shard": shard,
        "ranks": {"dp": 2, "tp": 2},
        "placements": {"x": lambda whole, at: whole.split([5, 3])[at["dp"]]},
        "on": ["simulated"],
    }
    x = torch.randn(8, 2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    with pytest.raises(GradientMismatchError) as caught:
        assert_matches_single_process(loss, loss, x, **more)
    wrong = "gradient of up.weight" in str(caught.value)
    assert wrong == (name == "nt_xent_loss")
    assert ("value: larger by log 2" in str(caught.value)) == (name == "clip_loss")


# ── a vocabulary over the ranks ──────────────────────────────────────────────────────────────────────────


def test_loss_parallel_and_ours():
    """The same loss and gradients, also of 7 rows on 3 ranks; label smoothing is an error there."""

    def of(rank, way, smoothing=0.0):
        torch.manual_seed(0)
        mesh, head = init_device_mesh("cpu", (3,)), nn.Linear(4, 7, bias=False, dtype=torch.double)
        hidden = torch.randn(5, 4, dtype=torch.double, requires_grad=True)
        target = torch.tensor([0, 6, 3, -100, 5])
        if way == "one process":
            loss = F.cross_entropy(head(hidden), target, label_smoothing=smoothing)
        elif way == "loss_parallel":
            parallelize_module(head, mesh, ColwiseParallel(use_local_output=False))
            with loss_parallel():
                loss = F.cross_entropy(head(hidden), target, label_smoothing=smoothing)
                loss.backward()
        else:
            parallelize_module(head, mesh, ColwiseParallel())
            placed = DTensor.from_local(hidden, mesh, [Replicate()])
            placed = placed.to_local(grad_placements=[Partial()] if way == "partial" else None)
            loss = dc.nn.functional.vocab_parallel_cross_entropy(
                placed, head.weight.to_local(), target, label_smoothing=smoothing
            )
        if way != "loss_parallel":
            loss.backward()
        full = [t.full_tensor() if isinstance(t, DTensor) else t for t in (loss, hidden.grad, head.weight.grad)]
        return [t.detach() for t in full]

    for smoothing in (0.0, 0.1):
        right, *_ = spawn(lambda rank, s=smoothing: of(rank, "one process", s), range(3))
        for way in ("loss_parallel", "ours") if not smoothing else ("ours",):
            for found in spawn(lambda rank, w=way, s=smoothing: of(rank, w, s), range(3)):
                torch.testing.assert_close(found, right)
    with pytest.raises(RanksFailedError, match=r"got mixed torch\.Tensor and DTensor"):
        spawn(lambda rank: of(rank, "loss_parallel", 0.1), range(3))
    (_, hidden, _), *_ = spawn(lambda rank: of(rank, "partial", 0.1), range(3))
    torch.testing.assert_close(hidden, 3 * right[1])
