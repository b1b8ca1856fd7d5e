"""sentence-transformers: DDP takes the mean over ranks, the trainer divides by the micro-batches."""

import dataclasses
import functools

import datasets
import sentence_transformers
from in_trainer import OPTIONS, averaging
from sentence_transformers.sentence_transformer import losses
from torch import nn
from trainings import EQUAL, Training, Way, layers, normal, of_page, parameters

import diffcoll as dc


class Encoder(nn.Module):
    """A module of a SentenceTransformer."""

    def __init__(self):
        super().__init__()
        self.layers = layers(6, 4)

    def forward(self, features):
        return {**features, "sentence_embedding": self.layers(features["sentence_embedding"])}


Trainer = sentence_transformers.SentenceTransformerTrainer
TRAINERS = Trainer, averaging(Trainer)
Ranking = of_page("sentence-transformers.md", "Ranking")


def ranking(encoder, batch, update):
    return Ranking(encoder)([{"sentence_embedding": x} for x in batch], None)


def trainer(make_loss=Ranking, kind=Trainer):
    """Return a function that trains by the trainer; `make_loss` takes the SentenceTransformer."""

    def train(encoder, updates, loss):
        assert loss.factor == 1
        batches = iter([batch for update in updates for batch in update])

        def next_batch(_):
            return {f"{i}_sentence_embedding": x for i, x in enumerate(next(batches))}

        next_batch.valid_label_columns = ["label"]
        arguments = sentence_transformers.SentenceTransformerTrainingArguments(
            "unused", **OPTIONS, gradient_accumulation_steps=len(updates[0])
        )
        model = sentence_transformers.SentenceTransformer(modules=[encoder])
        rows = range(dc.get_world_size() * len(updates) * len(updates[0]))
        data = datasets.Dataset.from_dict({"row": list(rows)})
        kind(model, arguments, train_dataset=data, loss=make_loss(model), data_collator=next_batch).train()
        return parameters(encoder)

    return train


TRIPLETS = Training(Encoder, normal(6, 6, 6), ranking)
THEIRS = [
    functools.partial(losses.MultipleNegativesRankingLoss, gather_across_devices=True),
    functools.partial(losses.CachedMultipleNegativesRankingLoss, gather_across_devices=True, mini_batch_size=2),
]
MULTIPLE = "its `MultipleNegativesRankingLoss`, cached or not, `gather_across_devices=True`"
ROWS = [("sentence-transformers, a loss of `dc.nn`", Way(trainer(kind=kind), TRIPLETS)) for kind in TRAINERS]
ROWS += [
    (f"sentence-transformers, {MULTIPLE}", Way(trainer(loss, kind), dataclasses.replace(TRIPLETS, sizes=EQUAL)))
    for kind in TRAINERS
    for loss in THEIRS
]
