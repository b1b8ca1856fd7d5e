"""sentence-transformers: DDP takes the mean over ranks, the trainer divides by the micro-batches."""

import contextlib
import functools
from dataclasses import replace

import pytest
import sentence_transformers
import torch
from in_trainer import averaging
from sentence_transformers.sentence_transformer import losses
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainings import EQUAL, RANKS, RATE, Training, parameters, row_of_the_table
from variants import assert_as_one_process, factors

import diffcoll as dc
from diffcoll.testing import RanksFailedError, assert_matches_single_process, spawn

datasets = pytest.importorskip("datasets", reason="the trainer asks for it")
info_nce = dc.nn.functional.info_nce_loss
ranking_loss = functools.partial(losses.MultipleNegativesRankingLoss, gather_across_devices=True)
cached_loss = functools.partial(
    losses.CachedMultipleNegativesRankingLoss, gather_across_devices=True, mini_batch_size=2
)


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
    """A loss as the trainer calls it; `of` takes the labels and the embeddings of each column."""

    def __init__(self, model, of):
        super().__init__()
        self.model, self.of = model, of

    def forward(self, sentence_features, labels):
        return self.of(labels, *(self.model(each)["sentence_embedding"] for each in sentence_features))


class Scaled(Loss):
    """With a parameter of its own, which the optimizer has and DDP has not."""

    def __init__(self, model, is_averaged):
        super().__init__(model, self.scaled)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.double))
        self.averager = dc.GradientAverager([self.scale]) if is_averaged else None

    def scaled(self, labels, query, positive, *negatives):
        return info_nce(query, positive, of_all(query, negatives), temperature=1 / self.scale.exp())


def of_all(query, negatives):
    """Those of all ranks, for each query."""
    return dc.gather_batch(torch.cat(negatives)).tree.expand(len(query), -1, -1) if negatives else None


def ranking(labels, query, positive, *negatives, summed=False):
    """MultipleNegativesRankingLoss: the cosine, times 20."""
    loss = info_nce(query, positive, of_all(query, negatives), temperature=1 / 20)
    return loss / dc.get_world_size() if summed else loss


def symmetric(labels, query, positive):
    return (ranking(labels, query, positive) + ranking(labels, positive, query)) / 2


def by_label(labels, *columns):
    return dc.nn.functional.supcon_loss(columns[0], labels, temperature=0.1)


def triplets(rows, generator):
    return tuple(torch.randn(rows, 6, generator=generator, dtype=torch.double) for _ in range(3))


def labelled(rows, generator):
    return *triplets(rows, generator)[:1], torch.randint(0, 3, (rows,), generator=generator)


def of_batch(model, *batch, of=ranking):
    columns = [x for x in batch if x.is_floating_point()]
    return of(None if len(columns) == len(batch) else batch[-1], *map(model.layer, columns))


def whole(model, micro_batches, of=ranking):
    return sum(of_batch(model, *batch, of=of) for batch in micro_batches) / len(micro_batches)


TRIPLETS = Training(Encoder, triplets, of_batch, whole)
LABELLED = replace(TRIPLETS, rows=labelled, whole=functools.partial(whole, of=by_label))


class OfTheLoss(sentence_transformers.SentenceTransformerTrainer):
    """Averages the parameters of the loss, if DDP does not have them."""

    def training_step(self, *arguments, **options):
        averager = getattr(self.loss, "averager", None) if self.accelerator.sync_gradients else None
        with averager.reduce() if averager else contextlib.nullcontext():
            return super().training_step(*arguments, **options)


def make(encoder, loss, rows, collate, kind=OfTheLoss, drops=True, **options):
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        "unused",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        num_train_epochs=1,
        learning_rate=RATE,
        optim="sgd",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        **options,
    )
    arguments.dataloader_drop_last = drops
    model = sentence_transformers.SentenceTransformer(modules=[encoder])
    data = datasets.Dataset.from_dict({"row": list(range(rows))})
    collate.valid_label_columns = ["label"]
    return kind(model, arguments, train_dataset=data, loss=loss(model), data_collator=collate)


def trainer(loss, averager=False, **options):
    """Return a function that trains by the trainer; `loss` takes the SentenceTransformer."""

    def train(encoder, updates):
        batches = iter([batch for update in updates for batch in update])

        def next_batch(_):
            columns = next(batches)
            features = {f"{i}_sentence_embedding": x for i, x in enumerate(columns) if x.is_floating_point()}
            return {**features, "label": columns[-1]} if len(features) < len(columns) else features

        rows, steps = dc.get_world_size() * len(updates) * len(updates[0]), len(updates[0])
        sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": steps}
        if averager:
            options.update(kind=averaging(sentence_transformers.SentenceTransformerTrainer))
        made = make(encoder, loss, rows, next_batch, **sizes, **options)
        made.train()
        own = {name: p.detach() for name, p in made.loss.named_parameters() if not name.startswith("model.")}
        return {**parameters(encoder), **own}

    return train


def ours(of=ranking, kind=Loss, **options):
    return lambda model: kind(model, functools.partial(of, **options))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_factors_of_the_table(micro_batches):
    for row, training, trains in (
        ("a loss of `dc.nn`", TRIPLETS, {"": trainer(ours()), "averager": trainer(ours(), averager=True)}),
        (
            "its `MultipleNegativesRankingLoss`, cached or not, `gather_across_devices=True`",
            replace(TRIPLETS, sizes=EQUAL),
            {
                "": trainer(ranking_loss),
                "cached": trainer(cached_loss),
                "averager": trainer(ranking_loss, averager=True),
                "cached, averager": trainer(cached_loss, averager=True),
            },
        ),
    ):
        cell = row_of_the_table(f"[sentence-transformers](sentence-transformers.md), {row}")[micro_batches - 1]
        assert factors(training, trains, micro_batches) == dict.fromkeys(trains, float(cell))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_as_one_process(micro_batches):
    trains = {
        "DDP": trainer(ours()),
        "GradientAverager": trainer(ours(), averager=True),
    }
    assert_as_one_process(TRIPLETS, trains, micro_batches)
    assert_as_one_process(replace(TRIPLETS, model=Cached), trains, micro_batches)
    assert_as_one_process(LABELLED, {"": trainer(ours(by_label))}, micro_batches)


def test_symmetric_as_one_process():
    pairs = replace(
        TRIPLETS,
        rows=lambda rows, generator: triplets(rows, generator)[:2],
        whole=functools.partial(whole, of=symmetric),
        sizes=EQUAL,
    )
    both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    theirs = functools.partial(ranking_loss, **both)
    assert_as_one_process(pairs, {"ours": trainer(ours(symmetric)), "theirs": trainer(theirs)}, 2)


def test_factors_of_mistakes():
    of_equal = {
        "sum": trainer(ours(summed=True)),
        "own rows": trainer(losses.MultipleNegativesRankingLoss),
    }
    found = factors(replace(TRIPLETS, sizes=EQUAL), of_equal, 2)
    assert found == {"sum": 0.333333, "own rows": "wrong"}


@pytest.mark.parametrize("is_averaged", [False, True])
def test_a_parameter_of_the_loss(is_averaged):
    def on_rank(updates):
        return trainer(lambda model: Scaled(model, is_averaged))(Encoder(), updates)

    found = spawn(on_rank, TRIPLETS.batches(2, 2))
    scales = [each["scale"] for each in found]
    assert len({float(scale) for scale in scales}) == (1 if is_averaged else RANKS)
    if is_averaged:
        encoder, scale = Encoder(), nn.Parameter(torch.tensor(2.0, dtype=torch.double))
        optimizer = torch.optim.SGD([*encoder.parameters(), scale], RATE)
        of = functools.partial(Scaled.scaled, type("Held", (), {"scale": scale}))
        for update in zip(*TRIPLETS.batches(2, 2), strict=True):
            optimizer.zero_grad()
            micro = [tuple(map(torch.cat, zip(*ranks, strict=True))) for ranks in zip(*update, strict=True)]
            whole(encoder, micro, of).backward()
            optimizer.step()
        torch.testing.assert_close(scales[0], scale.detach())


@pytest.mark.parametrize("loss", [ranking_loss, cached_loss])
def test_unequal_rows_end_a_rank(loss):
    with pytest.raises(RanksFailedError, match="the process ended with exit code"):
        TRIPLETS.on_ranks(trainer(loss), 1, 1)


def of_rows(rows, each, drops):
    """Return the rows that each rank's loss gets, and the number of steps."""

    def on_rank(_):
        seen = []
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1)).double()

        def collate(items):
            seen.extend(item["row"] for item in items)
            part = x[[item["row"] for item in items]]
            return {"0_sentence_embedding": part, "1_sentence_embedding": part + 1}

        made = make(Encoder(), ours(), rows, collate, drops=drops, per_device_train_batch_size=each)
        made.train()
        return seen, made.state.global_step

    seen, steps = zip(*spawn(on_rank, range(RANKS), timeout=15), strict=True)
    return [len(of_rank) for of_rank in seen], steps[0]


def test_rows_that_do_not_divide():
    def arguments(_):
        return sentence_transformers.SentenceTransformerTrainingArguments(
            "unused", use_cpu=True, report_to=[], dataloader_drop_last=False
        ).dataloader_drop_last

    assert spawn(arguments, range(RANKS)) == [True] * RANKS  # under DDP, whatever it was
    assert of_rows(20, 3, True) == ([6, 6, 6], 2)
    with pytest.raises(RanksFailedError, match="max_steps must be set to a positive value if dataloader does not have"):
        of_rows(8, 3, True)
    assert of_rows(8, 3, False) == ([3, 3, 2], 1)
    with pytest.raises(RanksFailedError, match=r"hung in(.|\n)*in info_nce_loss\n"):
        of_rows(12, 3, False)


@pytest.mark.parametrize("is_ours", [True, False])
def test_verdict_of_the_harness(is_ours):
    model = sentence_transformers.SentenceTransformer(modules=[Encoder()])
    loss = (ours() if is_ours else ranking_loss)(model)

    def on_ranks(model, *columns):
        return loss([{"sentence_embedding": column} for column in columns], None)

    def on_one_process(model, *columns):
        return losses.MultipleNegativesRankingLoss(model)([{"sentence_embedding": x} for x in columns], None)

    batch = triplets(9, torch.Generator().manual_seed(3))
    sizes, on = ([(5, 0, 4)], ["simulated", "gloo"]) if is_ours else (list(EQUAL), ["gloo"])
    assert_matches_single_process(on_ranks, on_one_process, batch, module=model, ranks=sizes, on=on)
