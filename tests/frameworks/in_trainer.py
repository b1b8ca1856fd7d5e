"""The HF Trainer: DDP takes the mean over ranks; who else multiplies or divides depends on five settings.

They are the model's forward (`**kwargs`), a column `labels`, `compute_loss_func`, `loss_is_scaled_for_ga` and
`average_tokens_across_devices`.
"""

import contextlib
import functools

import torch
import transformers
from torch import nn
from trainings import RATE, TOKENS, Way, of_page

import diffcoll as dc


class Plain(nn.Module):
    """What a Trainer trains: a forward with names of columns, which returns a loss of pairs, too."""

    def __init__(self, inner, loss):
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


def batch_loss(loss):
    """Return a `compute_loss_func` of pairs."""
    return lambda outputs, labels=None, num_items_in_batch=None: loss(lambda: outputs["logits"], (), None)


def token_loss(_):
    return of_page("trainer.md", "mean_over_tokens")


def trainer(kind=transformers.Trainer, model=Plain, func=None, labelled=True, **options):
    """Return a function that trains with the Trainer, whose loader deals out one batch to each rank in turn.

    func: makes the argument `compute_loss_func` of the loss.
    """

    def columns(x, y):
        """Of pairs the labels are there and mean nothing."""
        if not y.is_floating_point():
            return {"x": x, "labels": y}
        return {"x": x, "y": y, **({"labels": torch.zeros(len(x), dtype=torch.long)} if labelled else {})}

    def train(inner, updates, loss):
        data = [columns(*batch) for update in updates for batch in update for _ in range(dc.get_world_size())]
        more = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": len(updates[0])}
        arguments = transformers.TrainingArguments("unused", **OPTIONS, **more, **options)
        kind(
            model(inner, batch_loss(loss)),
            arguments,
            compute_loss_func=func and func(loss),
            train_dataset=data,
            data_collator=lambda items: dict(items[0]),
        ).train()

    return train


OWN_COUNTS = {"average_tokens_across_devices": False}
ROWS_OF = {
    "`compute_loss` overridden, `loss_is_scaled_for_ga = False`": [
        trainer(DividedLoss),
        trainer(DividedLoss, labelled=False),
        trainer(DividedLoss, Keywords),
        trainer(averaging(DividedLoss)),
    ],
    "`compute_loss` overridden, `**kwargs` in forward, `labels` in the batch": [
        trainer(OwnLoss, Keywords),
        trainer(OwnLoss, Keywords, **OWN_COUNTS),
    ],
    "`compute_loss_func`, `labels` in the batch": [
        trainer(func=batch_loss),
        trainer(model=Keywords, func=batch_loss),
    ],
    "`compute_loss_func`, no `labels` or `average_tokens_across_devices=False`": [
        trainer(func=batch_loss, labelled=False),
        trainer(func=batch_loss, **OWN_COUNTS),
    ],
    "a loss of `dc.nn` in the model, `**kwargs` in forward, `labels` in the batch": [trainer(model=Keywords)],
    "a loss of `dc.nn` in the model, no `**kwargs` or no `labels`": [
        trainer(),
        trainer(model=Keywords, labelled=False),
    ],
}
ROWS = [(f"Trainer, {row}", Way(train)) for row, trains in ROWS_OF.items() for train in trains]
ROWS += [(None, Way(trainer(model=model, func=token_loss), TOKENS)) for model in (Plain, Keywords)]
