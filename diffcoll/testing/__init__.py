"""Testing: run a function on simulated ranks (`simulate`) or on real processes (`spawn`)."""

from __future__ import annotations

from diffcoll.testing.simulate import new_group, simulate
from diffcoll.testing.spawn import RanksFailedError, spawn

__all__ = ["RanksFailedError", "new_group", "simulate", "spawn"]
