"""Layers and losses whose values and gradients are those of one process with the whole batch.

They use the public functions of diffcoll alone.
"""

from __future__ import annotations

from diffcoll.nn import functional
from diffcoll.nn.batch_norm import SyncBatchNorm
from diffcoll.nn.clip import CLIPLoss, clip_loss
from diffcoll.nn.conversion import convert_sync_batchnorm, revert_sync_batchnorm
from diffcoll.nn.decorrelation import BarlowTwinsLoss, VICRegLoss, barlow_twins_loss, vicreg_loss
from diffcoll.nn.dice import DiceLoss, IoULoss, TverskyLoss, dice_loss, iou_loss, tversky_loss
from diffcoll.nn.info_nce import InfoNCELoss, info_nce
from diffcoll.nn.nt_xent import NTXentLoss, nt_xent
from diffcoll.nn.siglip import SigLIPLoss, siglip_loss
from diffcoll.nn.supcon import SupConLoss, supcon_loss

__all__ = [
    "BarlowTwinsLoss",
    "CLIPLoss",
    "DiceLoss",
    "InfoNCELoss",
    "IoULoss",
    "NTXentLoss",
    "SigLIPLoss",
    "SupConLoss",
    "SyncBatchNorm",
    "TverskyLoss",
    "VICRegLoss",
    "barlow_twins_loss",
    "clip_loss",
    "convert_sync_batchnorm",
    "dice_loss",
    "functional",
    "info_nce",
    "iou_loss",
    "nt_xent",
    "revert_sync_batchnorm",
    "siglip_loss",
    "supcon_loss",
    "tversky_loss",
    "vicreg_loss",
]
