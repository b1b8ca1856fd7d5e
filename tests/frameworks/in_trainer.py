"""Models, losses and subclasses as users of the HF Trainer write them, and how they train."""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from trainings import RATE

import diffcoll as dc


class Plain(nn.Module):
    """What a Trainer trains: a forward with names of columns; with a loss, it returns that of its outputs."""

    config = None  # label smoothing reads it

    def __init__(self, inner, loss=None):
        super().__init__()
        self.inner, self.loss = inner, loss

    def forward(self, x, y=None, labels=None):
        outputs = self.inner(x) if y is None else self.inner(x, y)
        return {"loss": self.loss(outputs, labels)} if self.loss else {"logits": outputs}


class Keywords(Plain):
    """The same with a forward that takes `num_items_in_batch`, as the models of transformers do."""

    def forward(self, x, y=None, labels=None, **kwargs):
        return super().forward(x, y, labels)


def clip(outputs, labels=None, num_items_in_batch=None, summed=False):
    loss = dc.nn.functional.clip_loss(*(outputs["logits"] if isinstance(outputs, dict) else outputs))
    return loss / dc.get_world_size() if summed else loss


def summed_tokens(outputs, labels, num_items_in_batch):
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


def tokens(outputs, labels, num_items_in_batch):
    return dc.get_world_size() * summed_tokens(outputs, labels, num_items_in_batch)


class OwnLoss(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs.pop("labels", None)
        outputs = model(**inputs)
        return (clip(outputs), outputs) if return_outputs else clip(outputs)


class DividedLoss(OwnLoss):
    loss_is_scaled_for_ga = False


def without_ddp(kind):
    """Return the Trainer with a model that accelerate does not wrap."""

    class WithoutDDP(kind):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)

    return WithoutDDP


def averaging(kind):
    """Return the Trainer with `GradientAverager` in place of DDP."""

    class Averaging(without_ddp(kind)):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.averager = dc.GradientAverager(self.model)

        def training_step(self, *arguments, **options):
            with self.averager.reduce() if self.accelerator.sync_gradients else contextlib.nullcontext():
                return super().training_step(*arguments, **options)

    return Averaging


def run(model, data, kind=transformers.Trainer, loss=None, output="unused", scaled=None, resume=None, **options):
    """Train by SGD without clipping and shuffling, unless the options say otherwise; return the trainer.

    The data are rows that the Trainer's loader deals out, or the list of this rank's batches.
    """
    options = {
        "learning_rate": RATE,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1,
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
        **options,
    }
    arguments = transformers.TrainingArguments(output, use_cpu=True, report_to=[], disable_tqdm=True, **options)
    if arguments.per_device_train_batch_size == 1:  # each rank takes one batch after the other
        data = [batch for batch in data for _ in range(dc.get_world_size())]
        collate = next_one
    else:
        collate = None
    trainer = kind(model, arguments, compute_loss_func=loss, train_dataset=data, data_collator=collate)
    if scaled is not None:
        trainer.loss_is_scaled_for_ga = scaled
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def next_one(items):
    return dict(items[0])


def columns(batch, labelled=True):
    """Return a micro-batch of tokens, or one of pairs, whose labels are there and mean nothing."""
    x, y = batch
    if not y.is_floating_point():
        return {"x": x, "labels": y}
    return {"x": x, "y": y, **({"labels": torch.zeros(len(x), dtype=torch.long)} if labelled else {})}


def trainer(loss=None, model=Plain, labelled=True, averager=False, **options):
    """Return a function that trains with the Trainer."""

    def train(inner, updates):
        batches = [columns(batch, labelled) for update in updates for batch in update]
        more = {"kind": averaging(options.get("kind", transformers.Trainer))} if averager else {}
        run(model(inner), batches, loss=loss, gradient_accumulation_steps=len(updates[0]), **(options | more))

    return train


def returning(loss, kind=Plain):
    return lambda inner: kind(inner, loss)
