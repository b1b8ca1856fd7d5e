"""Testing: run a function on simulated ranks (`simulate`) or on real processes (`spawn`)."""

from __future__ import annotations

from diffcoll.testing.failures import RanksFailedError
from diffcoll.testing.gradients import assert_matches_single_process, check_gradients
from diffcoll.testing.harness.report import GradientMismatchError, Report
from diffcoll.testing.ranks import ranks
from diffcoll.testing.simulate import simulate
from diffcoll.testing.spawn import spawn
from diffcoll.testing.truth import true_gradients

__all__ = [
    "GradientMismatchError",
    "RanksFailedError",
    "Report",
    "assert_matches_single_process",
    "check_gradients",
    "ranks",
    "simulate",
    "spawn",
    "true_gradients",
]
