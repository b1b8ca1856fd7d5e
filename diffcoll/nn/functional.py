"""The losses and statistics of `diffcoll.nn` as functions."""

from __future__ import annotations

from diffcoll.nn.clip import clip_loss, siglip_loss
from diffcoll.nn.decorrelation import barlow_twins_loss, koleo_loss, sigreg_loss, vicreg_loss
from diffcoll.nn.dice import dice_loss, iou_loss, tversky_loss
from diffcoll.nn.info_nce import info_nce_loss, nt_xent_loss, supcon_loss
from diffcoll.nn.moments import Moments, moments, token_mean, weighted_mean
from diffcoll.nn.sinkhorn import sinkhorn
from diffcoll.nn.vocab_parallel import vocab_parallel_cross_entropy
from diffcoll.nn.whole import loss_of_sums

__all__ = [
    "Moments",
    "barlow_twins_loss",
    "clip_loss",
    "dice_loss",
    "info_nce_loss",
    "iou_loss",
    "koleo_loss",
    "loss_of_sums",
    "moments",
    "nt_xent_loss",
    "siglip_loss",
    "sigreg_loss",
    "sinkhorn",
    "supcon_loss",
    "token_mean",
    "tversky_loss",
    "vicreg_loss",
    "vocab_parallel_cross_entropy",
    "weighted_mean",
]
