"""Ways to train a model on ranks, many in one start of them, each on a fresh model; and factors of their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trainings import CLIP, RATE, UPDATES, Training, parameters

from diffcoll.testing import spawn


class Way(NamedTuple):
    """One way to train: train(model, [update][micro-batch]) returns the parameters, or None if the model has them."""

    train: Callable[..., Any]
    training: Training = CLIP
    micro_batches: tuple[int, ...] = (1, 2)
    #: So many ranks after each other have the same rows, as with tensor parallelism.
    copies: int = 1


def on_ranks(ways: dict[str, Way], micro_batches: int, updates: int) -> dict[str, list[dict[str, Tensor]]]:
    """Return {name: the parameters of each rank}; the ways have one training and one number of copies."""
    (training,), (copies,) = {way.training for way in ways.values()}, {way.copies for way in ways.values()}
    trains = {name: way.train for name, way in ways.items()}

    def on_rank(mine):
        found = {}
        for name, train in trains.items():
            model = training.model()
            try:
                found[name] = train(model, mine) or parameters(model)
            except Exception as error:
                raise AssertionError(f"{name} raises") from error
        return found

    batches = [mine for mine in training.batches(micro_batches, updates) for _ in range(copies)]
    ranks = spawn(on_rank, batches, timeout=100)
    return {name: [rank[name] for rank in ranks] for name in ways}


def assert_as_one_process(ways: dict[str, Way], micro_batches: int) -> None:
    """Check that each way ends, on every rank, in the parameters that one process has, to rounding."""
    training = next(iter(ways.values())).training
    expected = training.on_one_process(micro_batches)
    for way, ranks in on_ranks(ways, micro_batches, UPDATES).items():
        for found in ranks:
            assert found.keys() == expected.keys()
            for name in expected:
                says = f"{way}, {name}: {{}}".format
                torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-11, msg=says)
                assert torch.equal(found[name], ranks[0][name]), f"{way}: {name} differs between ranks"


def factors(ways: dict[str, Way], micro_batches: int) -> dict[str, str]:
    """Return, for each way, what the gradients of one process are multiplied by, as the table of the notes says it.

    "wrong": another direction, "differs": not one value on all ranks; the scale's is told apart if it is another.
    """
    training = next(iter(ways.values())).training
    start, expected = parameters(training.model()), training.on_one_process(micro_batches, 1)
    found = {}
    for way, ranks in on_ranks(ways, micro_batches, 1).items():
        of_each = {name: _factor(name, ranks, start, expected) for name in expected}
        scale = of_each.pop("scale", None)
        others = sorted(set(of_each.values()))
        is_one = scale is None or others == [scale]
        found[way] = ", ".join(others) if is_one else f"{', '.join(others)} / {scale}: encoders / scale"
    return found


def _factor(name: str, ranks: list[dict[str, Tensor]], start: dict[str, Tensor], right: dict[str, Tensor]) -> str:
    if not all(torch.equal(ranks[0][name], rank[name]) for rank in ranks):
        return "differs"
    found, expected = ranks[0][name] - start[name], right[name] - start[name]
    ratio = float((found * expected).sum() / expected.square().sum())
    return f"{ratio:.6g}" if torch.allclose(found, ratio * expected, rtol=1e-7, atol=1e-11) else "wrong"


def loop(model, updates, loss, optimized=None, averager=None, around=None, before_step=None):
    """Train by a plain loop; around(is_last) surrounds a micro-batch, the last one is in a block of the averager."""
    optimizer = torch.optim.SGD(list(model.parameters() if optimized is None else optimized), RATE)
    for update in updates:
        for k, batch in enumerate(update, 1):
            is_last = k == len(update)
            with around(is_last) if around else contextlib.nullcontext():
                with averager.reduce() if averager and is_last else contextlib.nullcontext():
                    loss(model, batch, update).backward()
        if before_step:
            before_step()
        optimizer.step()
        optimizer.zero_grad()
