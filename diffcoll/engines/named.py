"""What a compiled graph contains of a group: its name, and constants."""

from __future__ import annotations

import torch
from typing_extensions import override

from diffcoll.engines.engine import Blocks, Engine, Wait

Constants = tuple[str, int, int, str, tuple[str, ...] | None, str, tuple[tuple[str, int], ...], tuple[int, ...]]


class NamedEngine(Engine):
    """Stands for an engine while Dynamo traces. The graph's ops find the engine by its key and move the data."""

    compiling = True

    def __init__(self, constants: Constants) -> None:
        # Not super().__init__: this engine needs no locks and buffers, and Dynamo would have to trace their creation.
        self.key, self.rank, self.size, self.description, self.devices = constants[:5]
        self._control_device, self._small, self._global_ranks = constants[5:]

    @property
    @override
    def control_device(self) -> torch.device:
        return torch.device(self._control_device)

    @property
    @override
    def global_ranks(self) -> tuple[int, ...]:
        return self._global_ranks

    @override
    def small(self, device: str) -> int:
        return dict(self._small).get(device, 0)

    @override
    def exchange(self, sends: Blocks, recvs: Blocks, later: bool = False) -> Wait:
        raise NotImplementedError("a graph under compilation moves nothing")


def constants_of(engine: Engine) -> Constants:
    """Return the arguments of a `NamedEngine`: constants that Dynamo can write into a graph."""
    small = tuple((device, engine.small(device)) for device in engine.devices or ())
    control = str(engine.control_device)
    ranks = engine.global_ranks
    return engine.key, engine.rank, engine.size, engine.description, engine.devices, control, small, ranks
