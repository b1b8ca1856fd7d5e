"""open_clip: its own training loop, which calls backward for each micro-batch on the loss of all of them."""

import dataclasses
from types import SimpleNamespace

import torch
from torch import nn
from trainings import CLIP, EQUAL, RATE, without_torchvision
from variants import Way

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


def open_clip(divides_the_scale):
    """Return a function that trains with `train_one_epoch`; each update is one of `accum_freq` batches."""

    def train(towers, updates):
        without_torchvision("ftfy")
        from open_clip_train.train import train_one_epoch

        class Loader(list):
            num_batches = num_samples = sum(map(len, updates))

        steps = len(updates[0])

        def loss(image_features, text_features, logit_scale, output_dict):
            if divides_the_scale:  # its gradient, which each of the backward calls has whole
                logit_scale = logit_scale / steps + (logit_scale - logit_scale / steps).detach()
            return {"contrastive_loss": dc.nn.functional.clip_loss(image_features, text_features, logit_scale)}

        loader = Loader(batch for update in updates for batch in update)
        data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
        off = dict.fromkeys(("distill", "horovod", "wandb", "grad_clip_norm", "log_local"))
        args = SimpleNamespace(**off, device="cpu", precision="fp32", skip_scheduler=True, accum_freq=steps)
        args.rank = args.local_rank = dc.get_rank()
        args.world_size, args.batch_size, args.log_every_n_steps = 3, 3, 1000
        model = nn.parallel.DistributedDataParallel(Model(towers))
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        train_one_epoch(model, data, loss, 0, optimizer, None, None, None, args)

    return train


def of_all_rows(model, micro_batches):
    """What `accum_freq` means: one batch, of all micro-batches."""
    return dc.nn.functional.clip_loss(*model(*map(torch.cat, zip(*micro_batches, strict=True))))


ALL_ROWS = dataclasses.replace(CLIP, whole=of_all_rows)
RIGHT = {"the scale's gradient divided": Way(open_clip(True), ALL_ROWS)}
FACTORS = [
    (
        "open_clip, a loss of `dc.nn`",
        Way(open_clip(False), dataclasses.replace(ALL_ROWS, sizes=EQUAL)),
    )
]
