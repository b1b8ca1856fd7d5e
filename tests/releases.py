"""Marks of tests that some releases of PyTorch cannot run; notes/running/versions.md says what each release lacks."""

import pytest
import torch

from diffcoll.core.torch_private.release import COMPILES, RELEASE

compiles = pytest.mark.skipif(not COMPILES, reason="collectives are compiled on torch 2.12 and later")

keeps_orders = pytest.mark.skipif(RELEASE < (2, 12), reason="groups keep the order of their ranks since torch 2.12")


def one_graph(f, **more):
    """Compile f to one graph, without generating code."""
    return torch.compile(f, fullgraph=True, backend="aot_eager", **more)


def generated(f, **more):
    """Compile f to one graph, and to loops instead of vectors: the C++ compiler takes a fifth of the time."""
    return torch.compile(f, fullgraph=True, options={"cpp.simdlen": 1}, **more)
