"""Derivatives of a composed function: those of the same function of all ranks' blocks, in plain PyTorch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import nests
import torch
from torch import Tensor

#: Values, gradients to second order, forward mode over vmap, and vmap over a gradient.
NESTS = [(), ("grad", "grad"), ("jvp", "vmap"), ("vmap", "grad")]


def check(
    run: Callable[..., Any],
    of_rank: Callable[[int, Tensor], Tensor],
    of_all: Callable[[list[Tensor]], list[Tensor]],
    xs: Sequence[Tensor],
) -> None:
    """Compare what rank r computes from its x with the r-th result of all ranks' xs, in each nest of transforms."""

    def body(r: int, x: Tensor) -> list[Tensor]:
        return [nests.by_transforms(nest, partial(of_rank, r), r)(x) for nest in NESTS]

    found = run(body, range(len(xs)), xs)
    expected = [nests.by_definition(nest, of_all)([*xs]) for nest in NESTS]
    for of_one, right in zip(found, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(of_one, [y.detach() for y in right])
