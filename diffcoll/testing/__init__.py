"""The harness: simulated ranks with the ground truth, and real processes, called alike."""

from __future__ import annotations

from diffcoll.testing.simulate import new_group, simulate
from diffcoll.testing.spawn import RanksFailedError, spawn

__all__ = ["RanksFailedError", "new_group", "simulate", "spawn"]
