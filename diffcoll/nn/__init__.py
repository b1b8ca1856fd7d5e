"""Layers and losses whose values and gradients are those of one process with the whole batch.

Modules are here, functions in `diffcoll.nn.functional`. They use the public functions of diffcoll alone.
"""

from __future__ import annotations

from diffcoll.nn import functional
from diffcoll.nn.batch_norm import SyncBatchNorm
from diffcoll.nn.clip import CLIPLoss
from diffcoll.nn.clipping import clip_grad_norm_
from diffcoll.nn.conversion import convert_sync_batchnorm, revert_sync_batchnorm
from diffcoll.nn.decorrelation import BarlowTwinsLoss, VICRegLoss
from diffcoll.nn.dice import DiceLoss, IoULoss, TverskyLoss
from diffcoll.nn.feature_queue import FeatureQueue
from diffcoll.nn.grad_cache import grad_cache
from diffcoll.nn.info_nce import InfoNCELoss
from diffcoll.nn.koleo import KoLeoLoss
from diffcoll.nn.nt_xent import NTXentLoss
from diffcoll.nn.siglip import SigLIPLoss
from diffcoll.nn.sigreg import SIGRegLoss
from diffcoll.nn.supcon import SupConLoss
from diffcoll.nn.vocab_parallel import VocabParallelCrossEntropy

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
    "clip_grad_norm_",
    "convert_sync_batchnorm",
    "functional",
    "grad_cache",
    "revert_sync_batchnorm",
]
