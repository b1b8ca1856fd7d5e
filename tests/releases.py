"""Marks of tests that some releases of PyTorch cannot run; notes/versions.md says what these lack."""

import pytest
import torch

from diffcoll._torch import COMPILES

RELEASE = tuple(int(n) for n in torch.__version__.split(".")[:2])

compiles = pytest.mark.skipif(not COMPILES, reason="collectives are compiled on torch 2.12 and later")
hooks_are_shown = pytest.mark.skipif(
    RELEASE < (2, 8), reason="hooks for saved tensors are shown by torch 2.8 and later"
)
