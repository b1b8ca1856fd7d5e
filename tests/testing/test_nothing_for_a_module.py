"""A rank that has nothing for a module in some micro-batch: the table of notes/how-to/trainers.md."""

import contextlib
from functools import partial

import pytest
import torch
from test_trainers import sgd
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from verdicts import numbers

import diffcoll as dc
from diffcoll import CollectiveMismatchError
from diffcoll.testing import GradientMismatchError, assert_matches_single_process


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3), nn.Tanh())
        self.register_buffer("template", torch.ones(1, 3))

    def forward(self, image):
        return self.layers(image)


class Model(nn.Module):
    """Adds what the encoder makes of images to the rows that have one."""

    def __init__(self, call):
        super().__init__()
        self.encoder, self.head, self.call = Encoder(), nn.Sequential(nn.Linear(3, 2), nn.Tanh()), call

    def forward(self, x, image, has):
        return self.head(self.call(self.encoder, x, image, has.nonzero().flatten())).sin().sum()


# ── what people write ────────────────────────────────────────────────────────────────────────────────────


def skip(encoder, x, image, rows):
    return x.index_add(0, rows, encoder(image[rows])) if len(rows) else x


def no_rows(encoder, x, image, rows):
    return x.index_add(0, rows, encoder(image[rows]))


def dummy(encoder, x, image, rows):
    return skip(encoder, x, image, rows) if len(rows) else x + 0 * encoder(torch.zeros_like(image[:1])).sum()


def template(encoder, x, image, rows):
    return x.index_add(0, rows, encoder(torch.cat([encoder.template, image[rows]]))[1:])


# ── who averages ─────────────────────────────────────────────────────────────────────────────────────────


def ddp(model, parts, **more):
    wrapped, optimizer = DistributedDataParallel(model, **more), sgd(model)
    for k, part in enumerate(parts):
        with contextlib.nullcontext() if k == len(parts) - 1 else wrapped.no_sync():
            (wrapped(**part) / 4).backward()
    optimizer.step()


def averaged(model, parts):
    averager, optimizer = dc.GradientAverager(model), sgd(model)
    with averager.reduce():
        for part in parts:
            (model(**part) / 4).backward()
    optimizer.step()


def fsdp(model, parts):
    optimizer = sgd(model)
    for k, part in enumerate(parts):
        model.set_requires_gradient_sync(k == len(parts) - 1)
        (model(**part) / 4).backward()
    optimizer.step()


def sharded(model, mesh):
    fully_shard(model.encoder, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


STEPS = {"FSDP2": fsdp, "DDP": ddp, "DDP, unused": partial(ddp, find_unused_parameters=True), "averager": averaged}


def one_process(model, parts):
    (model(**parts[0]) / 8).backward()
    sgd(model).step()


#: The rows without an image: of rank 1 all, those of its first or last micro-batch; of both ranks all; none.
MISSING = {
    "one rank": range(4, 8),
    "one micro-batch": range(4, 6),
    "the last": range(6, 8),
    "all": range(8),
    "none": [],
}


def outcome(name, call, missing, needs_gradient=False):
    has = torch.tensor([r not in MISSING[missing] for r in range(8)])
    x, image = numbers(8, 3).requires_grad_(), numbers(8, 3, seed=1).requires_grad_(needs_gradient)
    given = {"x": x, "image": image, "has": has}
    torch.manual_seed(0)
    mesh = {"ranks": {"dp": 2}, "micro_batches": (2, 2), "placements": {key: {"dp": Shard(0)} for key in given}}
    more = {"shard": sharded} if name == "FSDP2" else {}
    try:
        assert_matches_single_process(
            STEPS[name], one_process, given, module=Model(call).double(), on=["simulated"], **mesh, **more
        )
    except GradientMismatchError:
        return "wrong"
    except Exception as error:
        return type(error).__name__
    return "right"


EVERYWHERE = dict.fromkeys(MISSING, "right")
HANGS = dict.fromkeys(["one rank", "the last"], CollectiveMismatchError.__name__)
#: What happens, by code and by who averages, where it is not right everywhere; of images that need a gradient, too.
NOT_RIGHT = {
    (skip, "FSDP2"): {**HANGS, "one micro-batch": HANGS["one rank"]},
    (skip, "DDP"): {**HANGS, "all": "wrong"},
    (dummy, "FSDP2", True): HANGS,
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("call", [skip, no_rows, dummy, template])
def test_the_table(call, name):
    found = {missing: outcome(name, call, missing) for missing in MISSING}
    assert found == {**EVERYWHERE, **NOT_RIGHT.get((call, name), {})}


@pytest.mark.parametrize("call", [no_rows, dummy, template])
def test_images_that_need_a_gradient(call):
    found = {missing: outcome("FSDP2", call, missing, needs_gradient=True) for missing in MISSING}
    assert found == {**EVERYWHERE, **NOT_RIGHT.get((call, "FSDP2", True), {})}


def test_what_was_cut_off_is_still_multiplied():
    """A template of zeros in front of a norm: backward is 0 · NaN."""
    template, x = torch.zeros(1, 3), torch.randn(2, 3, requires_grad=True)
    for cut, needs in (
        (lambda y: y[1:], True),
        (lambda y: torch.where(torch.tensor([[False], [True], [True]]), y, 0), True),
    ):
        weight = torch.ones(3, requires_grad=needs)
        cut(nn.functional.normalize(torch.cat([template, x]) * weight, eps=0)).sum().backward()
        assert weight.grad.isnan().any()
