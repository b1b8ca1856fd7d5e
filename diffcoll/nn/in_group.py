"""The group of a module, which copies of the module share."""

from __future__ import annotations

from typing import Any

from diffcoll.core.errors import message
from diffcoll.engines.types import Group


class InGroup:
    """Holds the group of a module of the class `name`. Copies of the module use the same group."""

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name

    def __deepcopy__(self, memo: dict[int, Any]) -> InGroup:
        return self

    def __reduce__(self) -> tuple[type[InGroup], tuple[None, str]]:
        if self.group is not None:
            got, expected = f"a module with {type(self.group).__name__}", "group=None, which alone can be pickled"
            remedy = "save module.state_dict(), or use dc.set_default_group"
            raise TypeError(message(self.name, "group", got, expected, remedy))
        return InGroup, (None, self.name)
