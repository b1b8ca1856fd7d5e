"""Marks of tests that some releases of PyTorch cannot run; notes/versions.md says what these lack."""

import pytest
import torch

from diffcoll._torch import COMPILES

RELEASE = tuple(int(n) for n in torch.__version__.split(".")[:2])

compiles = pytest.mark.skipif(not COMPILES, reason="collectives are compiled on torch 2.12 and later")

#: Whether joint_backward can go through checkpoints.
HOOKS_ARE_SHOWN = RELEASE >= (2, 8)
hooks_are_shown = pytest.mark.skipif(not HOOKS_ARE_SHOWN, reason="torch 2.8 and later show hooks for saved tensors")
