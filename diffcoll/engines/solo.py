"""A single rank: no group was set up, and no launcher started several processes."""

from __future__ import annotations

from typing_extensions import override

from diffcoll.engines.engine import Blocks, Engine, Wait, done


class SoloEngine(Engine):
    """Rank 0 of 1. Every collective is its N = 1 case."""

    description = "the world of one rank"
    key = "the world of one rank"

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    @override
    def twin(self) -> SoloEngine:
        return self

    @override
    def exchange(self, sends: Blocks, recvs: Blocks, later: bool = False) -> Wait:
        if recvs[0] is not None and sends[0] is not None:
            recvs[0].copy_(sends[0])
        return done
