"""Layers and losses whose values and gradients are those of one process with the whole batch.

They use the public functions of diffcoll alone.
"""

from __future__ import annotations

from diffcoll.nn import functional
from diffcoll.nn.batch_norm import SyncBatchNorm
from diffcoll.nn.conversion import convert_sync_batchnorm, revert_sync_batchnorm

__all__ = [
    "SyncBatchNorm",
    "convert_sync_batchnorm",
    "functional",
    "revert_sync_batchnorm",
]
