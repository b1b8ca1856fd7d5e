"""What a graph under compilation knows of a group: its name, and facts that do not change."""

from __future__ import annotations

import torch
from typing_extensions import override

from diffcoll.engines.engine import Blocks, Engine, Wait

__all__ = ["NamedEngine", "facts"]

Facts = tuple[str, int, int, str, tuple[str, ...] | None, str, tuple[tuple[str, int], ...]]


class NamedEngine(Engine):
    """Stands for an engine while Dynamo traces; moves nothing: ops do, which find the engine by its key."""

    compiling = True

    def __init__(self, facts: Facts) -> None:
        # Not super().__init__: no memory is kept here, and Dynamo would have to trace that.
        self.key, self.rank, self.size, self.description, self.devices, self._control_device, self._small = facts

    @property
    @override
    def control_device(self) -> torch.device:
        return torch.device(self._control_device)

    @override
    def small(self, device: str) -> int:
        return dict(self._small).get(device, 0)

    @override
    def exchange(self, sends: Blocks, recvs: Blocks) -> Wait:
        raise NotImplementedError("a graph under compilation moves nothing")


def facts(engine: Engine) -> Facts:
    """Return what a `NamedEngine` is made of: constants that Dynamo can write into a graph."""
    small = tuple((device, engine.small(device)) for device in engine.devices or ())
    control = str(engine.control_device)
    return engine.key, engine.rank, engine.size, engine.description, engine.devices, control, small
