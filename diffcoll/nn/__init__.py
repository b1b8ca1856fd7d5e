"""Layers and losses whose values and gradients are those of one process with the whole batch.

Modules are here, functions in `diffcoll.nn.functional`. They use the public functions of diffcoll alone.
"""

from __future__ import annotations

from diffcoll.nn import functional
from diffcoll.nn.batch_norm import SyncBatchNorm
from diffcoll.nn.conversion import convert_sync_batchnorm, revert_sync_batchnorm
from diffcoll.nn.feature_queue import FeatureQueue
from diffcoll.nn.modules import (
    BarlowTwinsLoss,
    CLIPLoss,
    DiceLoss,
    InfoNCELoss,
    IoULoss,
    KoLeoLoss,
    NTXentLoss,
    SigLIPLoss,
    SIGRegLoss,
    SupConLoss,
    TverskyLoss,
    VICRegLoss,
    VocabParallelCrossEntropy,
)

__all__ = [
    "BarlowTwinsLoss",
    "CLIPLoss",
    "DiceLoss",
    "FeatureQueue",
    "InfoNCELoss",
    "IoULoss",
    "KoLeoLoss",
    "NTXentLoss",
    "SIGRegLoss",
    "SigLIPLoss",
    "SupConLoss",
    "SyncBatchNorm",
    "TverskyLoss",
    "VICRegLoss",
    "VocabParallelCrossEntropy",
    "convert_sync_batchnorm",
    "functional",
    "revert_sync_batchnorm",
]
