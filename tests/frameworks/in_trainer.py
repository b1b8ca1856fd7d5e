"""The HF Trainer: DDP takes the mean over ranks; who else multiplies or divides depends on five settings.

They are the model's forward (`**kwargs`), a column `labels`, `compute_loss_func`, `loss_is_scaled_for_ga` and
`average_tokens_across_devices`.
"""

import contextlib
import functools

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from trainings import RATE, TOKENS
from variants import Way

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


class OwnLoss(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs.pop("labels", None)
        outputs = model(**inputs)
        return (clip(outputs), outputs) if return_outputs else clip(outputs)


class DividedLoss(OwnLoss):
    loss_is_scaled_for_ga = False


def averaging(kind):
    """Return the Trainer with `GradientAverager` in place of DDP, which accelerate would wrap the model in."""

    class Averaging(kind):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.averager = dc.GradientAverager(self.model)

        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)

        def training_step(self, *arguments, **options):
            with self.averager.reduce() if self.accelerator.sync_gradients else contextlib.nullcontext():
                return super().training_step(*arguments, **options)

    return Averaging


#: SGD without clipping and shuffling, and nothing written.
OPTIONS = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "learning_rate": RATE,
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant",
    "num_train_epochs": 1,
    "per_device_train_batch_size": 1,
    "save_strategy": "no",
}


def trainer(loss=None, model=Plain, kind=transformers.Trainer, labelled=True, scaled=None, **options):
    """Return a function that trains with the Trainer, whose loader deals out one batch to each rank in turn."""

    def columns(batch):
        """Of pairs the labels are there and mean nothing."""
        x, y = batch
        if not y.is_floating_point():
            return {"x": x, "labels": y}
        return {"x": x, "y": y, **({"labels": torch.zeros(len(x), dtype=torch.long)} if labelled else {})}

    def train(inner, updates):
        data = [columns(batch) for update in updates for batch in update for _ in range(dc.get_world_size())]
        more = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": len(updates[0])}
        arguments = transformers.TrainingArguments("unused", **OPTIONS, **more, **options)
        collate = lambda items: dict(items[0])  # noqa: E731
        made = kind(model(inner), arguments, compute_loss_func=loss, train_dataset=data, data_collator=collate)
        if scaled is not None:
            made.loss_is_scaled_for_ga = scaled
        made.train()

    return train


def returning(loss, kind=Plain):
    return lambda inner: kind(inner, loss)


OWN_COUNTS = {"average_tokens_across_devices": False}
SUMMED = functools.partial(clip, summed=True)
RIGHT = {
    "compute_loss": Way(trainer(kind=DividedLoss, model=Keywords)),
    "GradientAverager": Way(trainer(kind=averaging(DividedLoss))),
    "compute_loss_func": Way(trainer(SUMMED, scaled=False)),
    "compute_loss_func, own counts": Way(trainer(clip, scaled=False, **OWN_COUNTS)),
    "the model's own loss": Way(trainer(model=returning(SUMMED, Keywords), scaled=False)),
    "tokens": Way(trainer(summed_tokens), TOKENS),
    "tokens, keywords": Way(trainer(summed_tokens, Keywords), TOKENS),
}
ROWS = {
    "`compute_loss` overridden, `loss_is_scaled_for_ga = False`": [
        trainer(kind=DividedLoss),
        trainer(kind=DividedLoss, labelled=False),
        trainer(kind=DividedLoss, model=Keywords),
        trainer(kind=averaging(DividedLoss)),
    ],
    "`compute_loss` overridden, `**kwargs` in forward, `labels` in the batch": [
        trainer(kind=OwnLoss, model=Keywords),
        trainer(kind=OwnLoss, model=Keywords, **OWN_COUNTS),
    ],
    "`compute_loss_func`, `labels` in the batch": [trainer(clip), trainer(clip, Keywords)],
    "`compute_loss_func`, no `labels` or `average_tokens_across_devices=False`": [
        trainer(clip, labelled=False),
        trainer(clip, **OWN_COUNTS),
    ],
    "the model's own loss, `**kwargs` in forward, `labels` in the batch": [trainer(model=returning(clip, Keywords))],
    "the model's own loss, no `**kwargs` or no `labels`": [
        trainer(model=returning(clip)),
        trainer(model=returning(clip, Keywords), labelled=False),
    ],
}
FACTORS = [(f"Trainer, {row}", Way(train)) for row, trains in ROWS.items() for train in trains]
