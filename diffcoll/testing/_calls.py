"""The arguments of `simulate`, `spawn` and `true_gradients`, which are called like `map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffcoll.core.errors import message
from diffcoll.core.joint import is_joint
from diffcoll.core.torch_private.transforms import is_within_transform


def per_rank_arguments(name: str, per_rank: tuple[Sequence[Any], ...]) -> list[tuple[Any, ...]]:
    """Return the arguments of each rank's call."""
    if is_within_transform() or is_joint():
        raise RuntimeError(
            f"{name}: called within a transform of torch.func or joint_backward, expected a call outside of it: it "
            "belongs to this thread, and ranks are others; enter it in the function that each rank runs"
        )
    expected, remedy = "sequences of one length, with an element for each rank", "for one value pass [value] * N"
    try:
        rows = list(zip(*per_rank, strict=True))
    except (TypeError, ValueError) as error:
        raise type(error)(message(name, "per_rank", str(error), expected, remedy)) from None
    if not rows:
        raise ValueError(
            message(name, "per_rank", "no elements", expected, "range(3) gives each of 3 ranks its number")
        )
    return rows


def missing(name: str, what: str) -> ModuleNotFoundError:
    """Return the error for an optional package that is not installed."""
    return ModuleNotFoundError(f"{name}: {what} is not installed; pip install {what}")
