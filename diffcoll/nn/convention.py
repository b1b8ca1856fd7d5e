"""What a loss returns on each rank, so that a reduction over the ranks gives the loss of the whole batch.

A loss of this package computes on each rank a *share*; the sum of the ranks' shares is the loss of the whole batch.

note  notes/which-convention.md
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Literal

from torch import Tensor, nn

from diffcoll.core.errors import message
from diffcoll.core.groups import get_world_size
from diffcoll.engines.types import Group

__all__ = ["LossModule", "RankReduction", "check_rank_reduction", "returned"]

RankReduction = Literal["mean", "sum"]


def check_rank_reduction(name: str, rank_reduction: object) -> None:
    """Raise unless `rank_reduction`, an argument of the loss `name`, is "mean" or "sum"."""
    if rank_reduction not in ("mean", "sum"):
        remedy = '"mean" if gradients are averaged over the ranks (DDP, GradientAverager), "sum" if they are summed'
        raise ValueError(message(name, "rank_reduction", repr(rank_reduction), '"mean" or "sum"', remedy))


def returned(share: Tensor, rank_reduction: RankReduction, group: Group) -> Tensor:
    """Return N times the share for "mean", whose mean over the ranks is the whole loss; the share for "sum"."""
    return share * get_world_size(group) if rank_reduction == "mean" else share


class LossModule(nn.Module):
    """A loss as a module: keeps the keyword options as attributes and shows them."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        check_rank_reduction(type(self).__name__, options["rank_reduction"])
        self._names = tuple(options)
        for name, value in options.items():
            setattr(self, name, value)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword options of the function."""
        return {name: getattr(self, name) for name in self._names}

    def __deepcopy__(self, memo: dict[int, Any]) -> LossModule:
        """Copy all but the group, which the copy uses too."""
        memo[id(self.group)] = self.group
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    def extra_repr(self) -> str:
        """Show the options, the group only if there is one."""
        shown = {name: value for name, value in self.options.items() if name != "group" or value is not None}
        read = {name for name, x in shown.items() if isinstance(x, Tensor) and x.numel() == 1 and not x.is_meta}
        values = {name: f"{x.item():g}" if name in read else repr(x) for name, x in shown.items()}
        return ", ".join(f"{name}={value}" for name, value in values.items())
