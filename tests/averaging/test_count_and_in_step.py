"""Ranks with unequal, empty or no batches: `count`, and `in_step`, also with collectives in the model and the loss."""

import collections
import dataclasses

import pytest
import torch
from runs import new_group, rules
from torch import nn
from training import RUNS, SMALL, each, everywhere, gradients, made, on_two, refused, same

import diffcoll as dc

functional = dc.nn.functional


def normed():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


@everywhere
@pytest.mark.parametrize("sizes", [[6, 2], [5, 0, 3], [8, 0]])
def test_batch_norm_over_ranks_with_unequal_batches(where, sizes):
    """A sum of this rank's rows with its count is the whole batch's mean, though the model has collectives."""
    n = len(sizes)
    torch.manual_seed(1)
    x, t = torch.randn(8, 3).double(), torch.randn(8, 2).double()

    def body(r):
        model = dc.nn.convert_sync_batchnorm(made(normed))
        averager = dc.GradientAverager(model, bucket_mb=SMALL)
        mine = slice(sum(sizes[:r]), sum(sizes[: r + 1]))
        for count in (sizes[r], torch.tensor(sizes[r])):
            model.zero_grad()
            averager.backward((model(x[mine]) - t[mine]).square().sum(), count=count)
        return gradients(model)

    model = made(normed)
    ((model(x) - t).square().sum() / 8).backward()
    same(each(body, n, where), gradients(model))


BATCHES = [[(5, 1), (6, 2), (2, 5)], [(4, 3)], []]
LOSSES = {
    "own rows": lambda y, x: (y.square().sum(), len(x)),
    "token_mean": lambda y, x: (functional.token_mean((y - 1).square().sum(1)), None),
    "info_nce": lambda y, x: (functional.info_nce_loss(y, x[:, :2]), None),
}


def rows(size, k):
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(k)).double()


@everywhere
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("is_normed", [True, False])
def test_ranks_that_run_out_of_batches(where, loss, is_normed):
    """Each step is that of one process on the batches that there are; a rank without any has `empty`."""

    def body(r, synced=True):
        model = made(normed) if is_normed else made(lambda: nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        if r is None:
            for k in range(3):
                x = torch.cat([rows(*of_rank[k]) for of_rank in BATCHES if k < len(of_rank)])
                optimizer.zero_grad()
                value, count = LOSSES[loss](model(x), x)
                (value / (count or 1)).backward()
                optimizer.step()
                found += gradients(model)
            return found
        dc.nn.convert_sync_batchnorm(model)
        averager = dc.GradientAverager(model, bucket_mb=SMALL)
        batches = (rows(*batch) for batch in BATCHES[r])
        for x in dc.in_step(batches, empty=torch.zeros(0, 3).double() if r == 2 else None):
            optimizer.zero_grad()
            value, count = LOSSES[loss](model(x), x)
            averager.backward(value, count=count)
            optimizer.step()
            found += gradients(model)
        return found

    same(each(body, 3, where), body(None))


@on_two
def test_all_counts_zero_and_counts_of_any_dtype(where):
    """Zero gradients, not NaN; a count beyond float32's integers is exact, and may be reset before the block ends."""

    def body(r):
        p = nn.Parameter(torch.ones(3, dtype=torch.double))
        averager = dc.GradientAverager([p])
        with averager.reduce(count=torch.tensor(0)):
            (p.sum() * 0).backward()
        found = [p.grad]
        for dtype in (torch.int64, torch.float32, torch.int32, None):
            p.grad = None
            count = 2**24 if r == 0 else 1
            count = count if dtype is None else torch.tensor(count, dtype=dtype)
            with averager.reduce(count=count):
                if isinstance(count, torch.Tensor):
                    count.zero_()
                p.sum().mul(2**24 + 1).div(2).backward()
            found.append(p.grad)
        return found

    zero, *found = each(body, 2, where)
    assert zero.tolist() == [0.0] * 3
    for grad in found:
        assert grad.tolist() == [1.0] * 3


# ── in_step ──────────────────────────────────────────────────────────────────────────────────────────────

Pair = collections.namedtuple("Pair", ["x", "name"])


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    scale: float


class Mapping(collections.UserDict):
    pass


def test_empty_batches_of_any_structure():
    x, scalar = torch.ones(2, 3), torch.tensor(4.0)
    batch = {
        "pair": Pair(x, "a"),
        "list": [x, scalar],
        "record": Record(x, 2.0),
        "user": Mapping(x=x),
        "tuple": (x, None),
    }

    (_, empty), _ = rules(lambda r: [*dc.in_step([batch] * (r + 1))], range(2))
    assert isinstance(empty["pair"], Pair) and empty["pair"].name == "a" and empty["record"].scale == 2.0
    tensors = [empty["pair"].x, empty["list"][0], empty["record"].x, empty["user"]["x"], empty["tuple"][0]]
    assert [tuple(t.shape) for t in tensors] == [(0, 3)] * 5
    assert empty["list"][1] == scalar and batch["list"][0] is x and batch["user"]["x"] is x


@everywhere
def test_iterators_that_raise_and_ranks_without_any_batch(where):
    """An error on all ranks; no batch anywhere ends the loop; a loop may be left by break on all ranks."""

    def body(r):
        def broken():
            yield r
            if r == 1:
                raise ZeroDivisionError
            yield r

        error = refused(lambda: [*dc.in_step(broken())], ZeroDivisionError if r == 1 else RuntimeError)
        assert r == 1 or "rank 1" in error
        assert "rank 1" in refused(lambda: [*dc.in_step([1] * (r != 1))], ValueError)
        for _ in dc.in_step([1, 2]):
            break
        return [*dc.in_step([])], [*dc.in_step(range(r), empty=-1)]

    assert RUNS[where](body, range(3)) == [([], [-1, -1]), ([], [0, -1]), ([], [0, 1])]


def test_in_step_of_a_group_and_of_one_process():
    assert [*dc.in_step(iter("ab"))] == ["a", "b"]

    def body(r):
        pair = new_group([0, 2])
        return None if r == 1 else [*dc.in_step(range(r), empty=-1, group=pair)]

    assert RUNS["gloo"](body, range(3)) == [[-1, -1], None, [0, 1]]
