"""What a loss returns on each rank, so that a reduction over the ranks gives the loss of the whole batch.

A loss of this package computes on each rank a *share*; the sum of the ranks' shares is the loss of the whole batch.

note  notes/training/losses.md
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from diffcoll.collectives.sum_gradients import sum_gradients
from diffcoll.core import check_mode, expect
from diffcoll.core.errors import user_line
from diffcoll.core.groups import get_world_size, resolve
from diffcoll.engines.types import Group

RankReduction = Literal["mean", "sum"]


def check_rank_reduction(name: str, rank_reduction: object) -> None:
    """Raise unless `rank_reduction`, an argument of the loss `name`, is "mean" or "sum"."""
    remedy = '"mean" if gradients are averaged over the ranks (DDP, GradientAverager), "sum" if they are summed'
    expect.choice(name, "rank_reduction", rank_reduction, ("mean", "sum"), remedy)


def check_options(name: str, group: Group, rank_reduction: object, **options: object) -> None:
    """Raise unless `rank_reduction` is "mean" or "sum", and in check mode unless all ranks have the same options."""
    check_rank_reduction(name, rank_reduction)
    same_options(name, group, **options, rank_reduction=rank_reduction)


def same_options(name: str, group: Group, **options: object) -> None:
    """In check mode, raise unless all ranks have the same options.

    Ranks whose options differ send the same messages, and compute parts of different results. The numbers of tensors
    are not compared.
    """
    if check_mode.is_on() and not torch.compiler.is_compiling():
        facts = {key: "tensor" if isinstance(x, Tensor) else x for key, x in options.items()}
        words = ", ".join(f"{key}={x!r}" for key, x in facts.items())
        check_mode.compare(resolve(group, name), (name, facts), f"{name}({words}) at {user_line()}")


def share_of_replicated(loss: Tensor, group: Group) -> Tensor:
    """Return 1/N of a loss that every rank has computed from replicated tensors.

    sum_gradients adds the ranks' gradients of this one number, so that the gradient that arrives at the replicated
    tensors is the whole one on every rank, whatever each rank does with its share.
    """
    share: Tensor = sum_gradients(loss, group=group) / get_world_size(group)
    return share


def returned(share: Tensor, rank_reduction: RankReduction, group: Group) -> Tensor:
    """Return N times the share for "mean", whose mean over the ranks is the whole loss; the share for "sum"."""
    return share * get_world_size(group) if rank_reduction == "mean" else share
