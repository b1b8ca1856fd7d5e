"""sentence-transformers: DDP takes the mean over ranks, the trainer divides by the micro-batches."""

import functools
from dataclasses import replace

import datasets
import sentence_transformers
import torch
from in_trainer import OPTIONS, averaging
from sentence_transformers.sentence_transformer import losses
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainings import EQUAL, Training, parameters
from variants import Way

import diffcoll as dc


class Encoder(nn.Module):
    """A module of a SentenceTransformer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4).double()

    def forward(self, features):
        return {**features, "sentence_embedding": self.layer(features["sentence_embedding"])}


class Cached(Encoder):
    """GradCache: backward computes the features of two rows at a time again."""

    def forward(self, features):
        chunks = [checkpoint(self.layer, x, use_reentrant=False) for x in features["sentence_embedding"].split(2)]
        return {**features, "sentence_embedding": torch.cat(chunks)}


class Loss(nn.Module):
    """A loss as the trainer calls it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, sentence_features, labels):
        return ranking(*(self.model(each)["sentence_embedding"] for each in sentence_features))


def ranking(query, positive, negatives):
    """MultipleNegativesRankingLoss: the cosine, times 20, also with the negatives of all ranks."""
    negatives = dc.gather_batch(negatives).tree.expand(len(query), -1, -1)
    return dc.nn.functional.info_nce_loss(query, positive, negatives, temperature=1 / 20)


def whole(model, micro_batches):
    return sum(ranking(*map(model.layer, batch)) for batch in micro_batches) / len(micro_batches)


def triplets(rows, generator):
    return tuple(torch.randn(rows, 6, generator=generator, dtype=torch.double) for _ in range(3))


TRIPLETS = Training(Encoder, triplets, whole)
CACHED = replace(TRIPLETS, model=Cached)
OF_EQUAL_ROWS = replace(TRIPLETS, sizes=EQUAL)


def trainer(loss, kind=sentence_transformers.SentenceTransformerTrainer):
    """Return a function that trains by the trainer; `loss` takes the SentenceTransformer."""

    def train(encoder, updates):
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
        kind(model, arguments, train_dataset=data, loss=loss(model), data_collator=next_batch).train()
        return parameters(encoder)

    return train


Averaging = averaging(sentence_transformers.SentenceTransformerTrainer)
THEIRS = [
    functools.partial(losses.MultipleNegativesRankingLoss, gather_across_devices=True),
    functools.partial(losses.CachedMultipleNegativesRankingLoss, gather_across_devices=True, mini_batch_size=2),
]
RIGHT = {
    "DDP": Way(trainer(Loss), TRIPLETS),
    "GradientAverager": Way(trainer(Loss, Averaging), TRIPLETS),
    "DDP, cached": Way(trainer(Loss), CACHED),
    "GradientAverager, cached": Way(trainer(Loss, Averaging), CACHED),
}
PAGE = "sentence-transformers"
MULTIPLE = f"{PAGE}, its `MultipleNegativesRankingLoss`, cached or not, `gather_across_devices=True`"
FACTORS = [
    (f"{PAGE}, a loss of `dc.nn`", Way(trainer(Loss), TRIPLETS)),
    *((MULTIPLE, Way(trainer(loss), OF_EQUAL_ROWS)) for loss in THEIRS),
    *((MULTIPLE, Way(trainer(loss, Averaging), OF_EQUAL_ROWS)) for loss in THEIRS),
]
