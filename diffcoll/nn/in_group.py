"""Modules whose ranks are those of a group."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

from torch import nn

from diffcoll.engines.types import Group

_Module = TypeVar("_Module", bound="InGroup")


class InGroup(nn.Module):
    """A module with a group, which copies of the module use too."""

    group: Group

    def __deepcopy__(self: _Module, memo: dict[int, Any]) -> _Module:
        """Copy all but the group."""
        memo[id(self.group)] = self.group
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied
