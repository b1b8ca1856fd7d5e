"""open_clip: its own training loop, with its own loss and with ours."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from trainings import CLIP, EQUAL, RATE, cell, clip, row_of_the_table, without_torchvision

import diffcoll as dc


class Model(nn.Module):
    """The towers as open_clip calls its models."""

    def __init__(self, towers):
        super().__init__()
        self.towers = towers

    @property
    def logit_scale(self):
        return self.towers.scale

    def forward(self, images, texts):
        image, text, scale = self.towers(images, texts)
        return {"image_features": image, "text_features": text, "logit_scale": scale}


def with_open_clip(make_loss):
    """Return a function that trains with `train_one_epoch`; each update is one of `accum_freq` batches."""

    def train(towers, updates):
        without_torchvision("ftfy")
        from open_clip.loss import ClipLoss
        from open_clip_train.train import train_one_epoch

        class Loader(list):
            num_batches = num_samples = sum(map(len, updates))

        loader = Loader(batch for update in updates for batch in update)
        data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
        off = dict.fromkeys(("distill", "horovod", "wandb", "grad_clip_norm"))
        args = SimpleNamespace(**off, device="cpu", precision="fp32", skip_scheduler=True, rank=dc.get_rank())
        args.accum_freq, args.world_size, args.batch_size, args.log_every_n_steps = len(updates[0]), 3, 3, 1000
        args.local_rank, args.log_local = dc.get_rank(), False
        model = nn.parallel.DistributedDataParallel(Model(towers))
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        loss = make_loss(ClipLoss)
        train_one_epoch(model, data, loss, 0, optimizer, None, None, None, args)

    return train


def theirs(**options):
    return lambda ClipLoss: ClipLoss(rank=dc.get_rank(), world_size=dc.get_world_size(), **options)


def ours(_, steps=1):
    def loss(image_features, text_features, logit_scale, output_dict):
        scale = logit_scale / steps + (logit_scale - logit_scale / steps).detach()  # its gradient, divided by the steps
        return {"contrastive_loss": dc.nn.functional.clip_loss(image_features, text_features, scale)}

    return loss


def of_all_rows(model, micro_batches):
    """What `accum_freq` means: one batch, of all micro-batches."""
    return clip(model, *map(torch.cat, zip(*micro_batches, strict=True)))


ALL_ROWS = dataclasses.replace(CLIP, whole=of_all_rows)


def factors(make_loss, micro_batches=1):
    found = dataclasses.replace(ALL_ROWS, sizes=EQUAL).factor(with_open_clip(make_loss), micro_batches)
    scale = found.pop("scale")
    (encoders,) = set(found.values())
    return encoders, scale


def test_factors_of_the_table():
    found, row = factors(ours), row_of_the_table("[open_clip](open_clip.md), a loss of `dc.nn`")
    assert set(map(cell, found)) == {row[0]}
    found = factors(ours, 2)
    assert " / ".join(map(cell, found)) + ": encoders / scale" == row[1]


def test_their_loss():
    assert factors(theirs()) == (0.333333, 1)
    assert factors(theirs(gather_with_grad=True)) == factors(theirs(gather_with_grad=True, local_loss=True)) == (1, 1)
    assert factors(theirs(local_loss=True)) == ("wrong", 1)


def test_ours_as_one_process():
    ALL_ROWS.assert_as_one_process(with_open_clip(ours))
    ALL_ROWS.assert_as_one_process(with_open_clip(partial(ours, steps=2)), 2)


def test_accumulation():
    """The features are right; each of the two backward calls has the whole gradient of the scale."""
    assert factors(theirs(gather_with_grad=True), 2) == factors(ours, 2) == (1, 2)
