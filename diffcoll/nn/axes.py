"""The groups over which a number is reduced, one after another: axes of a mesh over which something is split."""

from __future__ import annotations

from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

from diffcoll.collectives.all_reduce import all_reduce
from diffcoll.core.errors import message
from diffcoll.core.groups import resolve
from diffcoll.engines.types import Group


def axes(name: str, groups: object) -> tuple[Group, ...]:
    """Return the groups of an argument `groups`: those of a list or tuple, or one group; None is the default group.

    Raise if two of them have more ranks in common than this one: what is reduced over both counts such a rank twice.
    """
    listed = tuple(groups) if isinstance(groups, (list, tuple)) else (groups,)
    members = [resolve(group, name).global_ranks for group in listed]
    for some, others in combinations(members, 2):
        common = sorted(set(some) & set(others))
        if len(common) > 1:
            got, expected = f"two groups with the ranks {common}", "groups that have only this rank in common"
            raise ValueError(message(name, "groups", got, expected, "name each axis of the mesh once"))
    return listed


def device_of(group: Group, name: str, near: torch.device | None = None) -> torch.device:
    """Return a device on which the group sends numbers, the same on all ranks if `near` is: `near` if it can."""
    engine = resolve(group, name)
    if near is None or near.type == "meta" or (engine.devices is not None and near.type not in engine.devices):
        return engine.control_device
    return near


def reduced(
    name: str, x: Tensor, op: Literal["sum", "max"], groups: tuple[Group, ...], near: torch.device | None = None
) -> Tensor:
    """Return small x, reduced over each of the groups, which send it on `device_of`."""
    for group in groups:
        x = all_reduce(x.to(device_of(group, name, near)), op, group=group)
    return x
