"""Sentence embeddings with hard negatives: InfoNCE among the passages of all ranks.

Sentences are made up: a query has words of one topic, its two passages too, and its hard negative has half of its words
from that topic and half from the next one.

    python examples/retrieval.py [--steps 200]    three processes, and one; with torchrun or mpiexec: see on_ranks.py
"""

import torch
from on_ranks import BATCH, main
from torch import nn

import diffcoll as dc

TOPICS, WORDS = 100, 12


def sentences(topics, length, generator):
    """Return sentences of this many words, one for each topic."""
    return WORDS * topics.unsqueeze(-1) + torch.randint(WORDS, (*topics.shape, length), generator=generator)


class Embedder(nn.Module):
    """The mean of a sentence's words."""

    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(TOPICS * WORDS, 32)
        self.loss = dc.nn.InfoNCELoss(temperature=0.1)

    def embed(self, sentences):
        return self.words(sentences.flatten(0, -2)).unflatten(0, sentences.shape[:-1])

    def forward(self, query, passages, hard):
        return self.loss(self.embed(query), self.embed(passages), self.embed(hard))


def batch(generator):
    topics = torch.randint(TOPICS, (BATCH,), generator=generator)
    passages = sentences(topics.unsqueeze(1).expand(-1, 2), 6, generator)
    mixed = torch.cat([sentences(topics, 3, generator), sentences((topics + 1) % TOPICS, 3, generator)], 1)
    return sentences(topics, 4, generator), passages, mixed.unsqueeze(1)


def recall(model):
    """Return how many new queries are nearest to the passage of their topic, in percent."""
    generator, topics = torch.Generator().manual_seed(2), torch.arange(TOPICS)
    query, passage = (model.embed(sentences(topics, n, generator)) for n in (4, 6))
    nearest = (nn.functional.normalize(query) @ nn.functional.normalize(passage).T).argmax(1)
    return 100 * float((nearest == topics).double().mean())


if __name__ == "__main__":
    main([Embedder], batch, recall, steps=200)
