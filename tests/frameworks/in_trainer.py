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
from trainings import RATE, TOKENS, Way

import diffcoll as dc


def clip(outputs, labels=None, num_items_in_batch=None):
    return dc.nn.functional.clip_loss(*outputs["logits"])


def clip_for_a_sum(*arguments, **options):
    return clip(*arguments, **options) / dc.get_world_size()


def tokens(outputs, labels, num_items_in_batch):
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


class Plain(nn.Module):
    """What a Trainer trains: a forward with names of columns, which returns a loss of pairs, too."""

    config = None  # label smoothing reads it

    def __init__(self, inner, loss=clip):
        super().__init__()
        self.inner, self.loss = inner, loss

    def forward(self, x, y=None, labels=None):
        outputs = {"logits": self.inner(x) if y is None else self.inner(x, y)}
        return outputs if y is None else {"loss": self.loss(outputs), **outputs}


class Keywords(Plain):
    """The same with a forward that takes `num_items_in_batch`, as the models of transformers do."""

    def forward(self, x, y=None, labels=None, **kwargs):
        return super().forward(x, y, labels)


class OwnLoss(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs.pop("labels", None)
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


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


#: Nothing is written or printed; SGD without clipping, one epoch.
OPTIONS = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
OPTIONS |= {"optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
OPTIONS |= {"num_train_epochs": 1, "per_device_train_batch_size": 1}


def trainer(loss=None, model=Plain, kind=transformers.Trainer, labelled=True, scaled=None, **options):
    """Return a function that trains with the Trainer, whose loader deals out one batch to each rank in turn."""

    def columns(x, y):
        """Of pairs the labels are there and mean nothing."""
        if not y.is_floating_point():
            return {"x": x, "labels": y}
        return {"x": x, "y": y, **({"labels": torch.zeros(len(x), dtype=torch.long)} if labelled else {})}

    def train(inner, updates, _):
        data = [columns(*batch) for update in updates for batch in update for _ in range(dc.get_world_size())]
        more = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": len(updates[0])}
        arguments = transformers.TrainingArguments("unused", **OPTIONS, **more, **options)
        collate = lambda items: dict(items[0])  # noqa: E731
        made = kind(model(inner), arguments, compute_loss_func=loss, train_dataset=data, data_collator=collate)
        if scaled is not None:
            made.loss_is_scaled_for_ga = scaled
        made.train()

    return train


OWN_COUNTS = {"average_tokens_across_devices": False}
RIGHT = {
    "compute_loss": Way(trainer(kind=DividedLoss, model=Keywords)),
    "GradientAverager": Way(trainer(kind=averaging(DividedLoss))),
    "compute_loss_func": Way(trainer(clip_for_a_sum, scaled=False)),
    "compute_loss_func, own counts": Way(trainer(clip, scaled=False, **OWN_COUNTS)),
    "the model's own loss": Way(trainer(model=functools.partial(Keywords, loss=clip_for_a_sum), scaled=False)),
    "tokens": Way(trainer(tokens), TOKENS),
    "tokens, keywords": Way(trainer(tokens, Keywords), TOKENS),
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
    "the model's own loss, `**kwargs` in forward, `labels` in the batch": [trainer(model=Keywords)],
    "the model's own loss, no `**kwargs` or no `labels`": [
        trainer(),
        trainer(model=Keywords, labelled=False),
    ],
}
FACTORS = [(f"Trainer, {row}", Way(train)) for row, trains in ROWS.items() for train in trains]
