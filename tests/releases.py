"""Marks of tests that some releases of PyTorch cannot run; notes/versions.md says what each release lacks."""

import pytest

from diffcoll.core._torch import COMPILES, RELEASE

compiles = pytest.mark.skipif(not COMPILES, reason="collectives are compiled on torch 2.12 and later")

gloo_scatters_sums = pytest.mark.skipif(RELEASE < (2, 8), reason="gloo has a reduce_scatter since torch 2.8")
keeps_orders = pytest.mark.skipif(RELEASE < (2, 12), reason="groups keep the order of their ranks since torch 2.12")

#: Whether joint_backward works through checkpoints.
HOOKS_ARE_SHOWN = RELEASE >= (2, 8)
hooks_are_shown = pytest.mark.skipif(not HOOKS_ARE_SHOWN, reason="torch 2.8 and later show hooks for saved tensors")
