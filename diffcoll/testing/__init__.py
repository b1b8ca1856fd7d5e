"""Testing: run a function on simulated ranks (`simulate`) or on real processes (`spawn`)."""

from __future__ import annotations

from diffcoll.testing.gradients import assert_matches_single_process, check_gradients
from diffcoll.testing.harness.report import GradientMismatchError, Report
from diffcoll.testing.processes import RanksFailedError
from diffcoll.testing.ranks import ranks
from diffcoll.testing.simulate import new_group, simulate
from diffcoll.testing.spawn import spawn

__all__ = [
    "GradientMismatchError",
    "RanksFailedError",
    "Report",
    "assert_matches_single_process",
    "check_gradients",
    "new_group",
    "ranks",
    "simulate",
    "spawn",
]
