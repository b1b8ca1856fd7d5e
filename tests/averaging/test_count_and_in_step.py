"""Ranks with unequal, empty or no batches: `count`, and `in_step`, also with collectives in the model and the loss."""

import collections
import dataclasses
import itertools

import pytest
import torch
from runs import refusal, rules
from torch import nn
from training import SMALL, each, everywhere, gradients, made, on_two, same

import diffcoll as dc
from diffcoll.nn import functional


def normed():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


BATCHES = [[(5, 1), (6, 2), (2, 5)], [(4, 3)], []]
LOSSES = {
    "own rows": lambda y, x: (y.square().sum(), len(x)),
    "token_mean": lambda y, x: (functional.token_mean((y - 1).square().sum(1)), None),
    "info_nce": lambda y, x: (functional.info_nce_loss(y, x[:, :2]), None),
}


def rows(size, k):
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(k)).double()


@everywhere
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_ranks_that_run_out_of_batches(run, loss):
    """Each step is that of one process on the batches that there are; a rank without any has `empty`."""

    def training():
        model = made(normed)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), []

    def body(r):
        model, optimizer, found = training()
        averager = dc.GradientAverager(dc.nn.convert_sync_batchnorm(model), bucket_mb=SMALL)
        batches = (rows(*batch) for batch in BATCHES[r])
        for x in dc.in_step(batches, empty=torch.zeros(0, 3).double() if r == 2 else None):
            optimizer.zero_grad()
            value, count = loss(model(x), x)
            averager.backward(value, count=count)
            optimizer.step()
            found += gradients(model)
        return found

    model, optimizer, expected = training()
    for batches in itertools.zip_longest(*BATCHES):
        x = torch.cat([rows(*batch) for batch in batches if batch])
        optimizer.zero_grad()
        value, count = loss(model(x), x)
        (value / (count or 1)).backward()
        optimizer.step()
        expected += gradients(model)
    same(each(body, 3, run), expected)


@on_two
def test_all_counts_zero_and_counts_of_any_dtype(run):
    """Zero gradients, not NaN; a count beyond float32's integers is exact, and may be reset before the block ends."""

    def body(r):
        p = nn.Parameter(torch.ones(3, dtype=torch.double))
        averager = dc.GradientAverager([p])
        with averager.reduce(count=torch.tensor(0)):
            (p.sum() * 0).backward()
        found = [p.grad]
        for dtype in (torch.int64, torch.float32, torch.int32):
            p.grad, count = None, torch.tensor(2**24 if r == 0 else 1, dtype=dtype)
            with averager.reduce(count=count):
                count.zero_()
                p.sum().mul(2**24 + 1).div(2).backward()
            found.append(p.grad)
        return found

    assert [g.tolist() for g in each(body, 2, run)] == [[0.0] * 3, *[[1.0] * 3] * 3]


# ── in_step ──────────────────────────────────────────────────────────────────────────────────────────────

Pair = collections.namedtuple("Pair", ["x", "name"])


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    scale: float


def structured(x):
    user = collections.UserDict(x=x)
    return {
        "pair": Pair(x, "a"),
        "list": [x, torch.tensor(4.0)],
        "record": Record(x, 2.0),
        "user": user,
        "n": (x, None),
    }


def test_empty_batches_of_any_structure():
    given = structured(torch.ones(2, 3))
    (_, empty), _ = rules(lambda r: [*dc.in_step([given] * (r + 1))], range(2))
    assert repr(empty) == repr(structured(torch.ones(0, 3))) and isinstance(empty["user"], collections.UserDict)
    assert repr(given) == repr(structured(torch.ones(2, 3)))


@everywhere
def test_iterators_that_raise_and_ranks_without_any_batch(run):
    """An error on all ranks; no batch anywhere ends the loop; a loop may be left by break on all ranks."""
    assert [*dc.in_step(iter("ab"))] == ["a", "b"]  # one process

    def body(r):
        def broken():
            yield r
            if r == 1:
                raise ZeroDivisionError
            yield r

        error = refusal(ZeroDivisionError if r == 1 else RuntimeError, list, dc.in_step(broken()))
        assert r == 1 or "rank 1" in error
        assert "rank 1" in refusal(ValueError, list, dc.in_step([1] * (r != 1)))
        for _ in dc.in_step([1, 2]):
            break
        return [*dc.in_step([])], [*dc.in_step(range(r), empty=-1)]

    assert run(body, range(3)) == [([], [-1, -1]), ([], [0, -1]), ([], [0, 1])]
