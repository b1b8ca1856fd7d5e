"""Many ways to train one model, in one start of the ranks, each on a fresh model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from trainings import RATE, UPDATES, Training, _factor, parameters

from diffcoll.testing import spawn

#: Trains a model by updates of micro-batches; returns its parameters, or None if they are in the model.
Train = Callable[..., Any]


def on_ranks(
    training: Training, trains: dict[str, Train], micro_batches: int = 1, updates: int = UPDATES, copies: int = 1
):
    """Return {name: the parameters of each rank, or the error that all ranks raised}.

    `copies`: so many ranks after each other have the same rows, as with tensor parallelism.
    """

    def on_rank(mine):
        found = {}
        for name, train in trains.items():
            model = training.model()
            try:
                found[name] = train(model, mine) or parameters(model)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        return found

    batches = [mine for mine in training.batches(micro_batches, updates) for _ in range(copies)]
    ranks = spawn(on_rank, batches, timeout=100)
    found: dict[str, Any] = {}
    for name in trains:
        each = [rank[name] for rank in ranks]
        errors = [one for one in each if isinstance(one, str)]
        assert not errors or len(errors) == len(each), f"{name}: only some ranks raised: {errors}"
        found[name] = errors[0] if errors else each
    return found


def assert_as_one_process(
    training: Training, trains: dict[str, Train], micro_batches: int = 1, copies: int = 1
) -> None:
    """Check that each way ends, on every rank, in the parameters that one process has, to rounding."""
    expected = training.on_one_process(micro_batches)
    for way, ranks in on_ranks(training, trains, micro_batches, copies=copies).items():
        assert not isinstance(ranks, str), f"{way}: {ranks}"
        for found in ranks:
            assert found.keys() == expected.keys()
            for name in expected:
                says = f"{way}, {name}: {{}}".format
                torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-11, msg=says)
                assert torch.equal(found[name], ranks[0][name]), f"{way}: {name} differs between ranks"


def factors(training: Training, trains: dict[str, Train], micro_batches: int = 1, copies: int = 1) -> dict[str, Any]:
    """Return, for each way, what the gradients of one process are multiplied by; the text of an error if it raises.

    By parameter unless it is one factor for all; "wrong": another direction, "differs": not one value on all ranks.
    """
    start, expected = parameters(training.model()), training.on_one_process(micro_batches, 1)
    found: dict[str, Any] = {}
    for way, ranks in on_ranks(training, trains, micro_batches, 1, copies).items():
        found[way] = ranks if isinstance(ranks, str) else {n: _of(n, ranks, start, expected) for n in expected}
        if not isinstance(ranks, str) and len(set(found[way].values())) == 1:
            (found[way],) = set(found[way].values())
    return found


def _of(name: str, ranks: list[dict[str, Tensor]], start: dict[str, Tensor], expected: dict[str, Tensor]):
    if not all(torch.equal(ranks[0][name], rank[name]) for rank in ranks):
        return "differs"
    return _factor(ranks[0][name] - start[name], expected[name] - start[name])


def loop(model, updates, loss, optimized=None, last_only=None, divides=False, before_step=None):
    """Train by a plain loop; `last_only(is_last)` surrounds a micro-batch's backward, `divides` each loss by them.

    The last backward of an update is in a block of `model.averager`, if there is one.
    """
    averager = getattr(model, "averager", None)
    optimizer = torch.optim.SGD(list(model.parameters() if optimized is None else optimized), RATE)
    for update in updates:
        for k, batch in enumerate(update, 1):
            with last_only(k == len(update)) if last_only else contextlib.nullcontext():
                with averager.reduce() if averager and k == len(update) else contextlib.nullcontext():
                    (loss(model, *batch) / (len(update) if divides else 1)).backward()
        if before_step:
            before_step()
        optimizer.step()
        optimizer.zero_grad()
