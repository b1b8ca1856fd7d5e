"""Worked examples of collectives: what every rank gets, and the gradients of Σ_r ⟨w_r, y_r⟩, both computed by hand."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch


class Example(NamedTuple):
    """A call on three ranks; a list has one entry per rank."""

    call: Callable[[torch.Tensor], torch.Tensor]
    xs: list[Any]
    ys: list[Any]
    ws: list[Any]
    gxs: list[Any]


def numbers(value: Any) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.double)


def each(examples: dict[str, Example]) -> Any:
    """Make a test of `check` for every example; `run` and `gradients` are fixtures."""
    return pytest.mark.parametrize("example", examples.values(), ids=examples)


def check(example: Example, run: Callable[..., Any], gradients: Callable[..., Any]) -> None:
    """Hold results and gradients against the numbers of the example."""
    call, xs, ys, ws, gxs = example
    for y, right in zip(run(lambda x: call(numbers(x)), xs), ys, strict=True):
        torch.testing.assert_close(y, numbers(right).view(y.shape))
    for gx, right in zip(gradients(lambda x, w: (numbers(w) * call(x)).sum(), xs, ws), gxs, strict=True):
        torch.testing.assert_close(numbers(gx), numbers(right))
