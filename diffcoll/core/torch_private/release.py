"""The release of PyTorch, and what is possible on it."""

from __future__ import annotations

import torch

#: PyTorch imports this at a process's first use of an optimizer, a graph, or grad with cotangents; it takes a second.
LAZY_MODULES = ("torch._dynamo",)

#: PyTorch's release, major and minor number.
RELEASE = tuple(int(n) for n in torch.__version__.split(".")[:2])

#: Whether our ops can be compiled and traced. On torch 2.11 and before, Dynamo does not accept an MPI communicator as a
#: constant, and tracers in threads crash; on 2.9 and before, sizes exchanged between ranks have no value while tracing.
COMPILES = RELEASE >= (2, 12)
