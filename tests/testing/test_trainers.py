"""Training steps over lists of micro-batches: right ones, and wrong ones whose weights are named.

A step is `step(model, parts, loss)`, where `loss(parts)` says what the step divides by.
"""

import contextlib
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from verdicts import differs, matches, numbers, observed

import diffcoll as dc

ON = ["simulated", pytest.param("gloo", marks=pytest.mark.slow)]
#: Rows of each micro-batch of each rank; and those that a step which needs a micro-batch on each rank can take.
EVERYWHERE = [((2, 2), (4,)), ((1, 3), (2, 0, 2))]
SPLITS = [*EVERYWHERE, ((8,), ()), ((1, 0, 3), 4)]
MESH = {"ranks": {"dp": 2}, "micro_batches": (1, 3), "placements": {"x": {"dp": Shard(0)}, "labels": {"dp": Shard(0)}}}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Softplus()).double()


def batch():
    labels = torch.tensor(
        [[0, 1, 2], [3, 4, -100], [0, -100, -100], [2, 2, 1], [4, 0, 0], [1, -100, 3], [2, 3, 4], [0, 0, 1]]
    )
    return {"x": numbers(8, 3, 3), "labels": labels}


def nll(model, part):
    return F.cross_entropy(model(part["x"]).flatten(0, 1), part["labels"].flatten(), reduction="sum")


def tokens(*parts):
    return torch.tensor(sum(int((part["labels"] != -100).sum()) for part in parts), dtype=torch.double)


# ── what a step divides by: the factor on the sum of a micro-batch, under a mean over ranks ──────────────


def by_all(parts):
    total = dc.all_reduce(tokens(*parts))
    return [dc.get_world_size() / total for _ in parts]


def by_own(parts):
    return [1 / tokens(*parts) for _ in parts]


def mean_of_means(parts):
    return [1 / (len(parts) * tokens(part)) for part in parts]


def sum_of_means(parts):
    return [1 / tokens(part) for part in parts]


WRONG = {
    mean_of_means: r"\(equally( on each rank)?\)",
    sum_of_means: r"1/2 each \(a mean over ranks, a sum over micro-batches\)",
    by_own: r"\(by their labels other than −100 of labels, on each rank\)",
}
BY_LABELS = r"one process weighs them .*/20 \(by their labels other than −100 of labels\)"


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def of_one(model, parts):
    optimizer = sgd(model)
    (sum(nll(model, part) for part in parts) / tokens(*parts)).backward()
    optimizer.step()


def by_hand(factors, model, parts):
    optimizer = sgd(model)
    for factor, part in zip(factors(parts), parts, strict=True):
        (factor * nll(model, part)).backward()
    for p in model.parameters():
        p.grad = dc.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad, "mean")
    optimizer.step()


def without_gradients(factors, model, parts):
    """As a Trainer leaves it."""
    by_hand(factors, model, parts)
    model.zero_grad()


def by_closure(factors, model, parts):
    """As Lightning does it: backward runs within the optimizer's step."""

    def closure():
        loss = sum((factor * nll(model, part) for factor, part in zip(factors(parts), parts, strict=True)), zero)
        loss.backward()
        for p in model.parameters():
            p.grad = dc.all_reduce(p.grad, "mean")

    zero = sum(0 * p.sum() for p in model.parameters())
    optimizer = sgd(model)
    optimizer.step(closure)
    optimizer.zero_grad()


def ddp(factors, model, parts):
    wrapped, optimizer = DistributedDataParallel(model), sgd(model)
    for k, (factor, part) in enumerate(zip(factors(parts), parts, strict=True)):
        with contextlib.nullcontext() if k == len(parts) - 1 else wrapped.no_sync():
            (factor * nll(wrapped, part)).backward()
    optimizer.step()


def averager(factors, model, parts):
    averager, optimizer = dc.GradientAverager(model), sgd(model)
    with averager.reduce():
        for factor, part in zip(factors(parts), parts, strict=True):
            (factor * nll(model, part)).backward()
    optimizer.step()


def counted(model, parts):
    averager, optimizer = dc.GradientAverager(model), sgd(model)
    with averager.reduce(count=tokens(*parts)):
        for part in parts:
            nll(model, part).backward()
    optimizer.step()


def fsdp(factors, model, parts):
    optimizer = sgd(model)
    for k, (factor, part) in enumerate(zip(factors(parts), parts, strict=True)):
        model.set_requires_gradient_sync(k == len(parts) - 1)
        (factor * nll(model, part)).backward()
    optimizer.step()


def sharded(model, mesh):
    return fully_shard(model, mesh=mesh["dp"])


STEPS = {
    "by hand": (by_hand, {"ranks": SPLITS}),
    "gradients are gone": (without_gradients, {"ranks": SPLITS}),
    "a closure": (by_closure, {"ranks": SPLITS}),
    "DDP": (ddp, {"ranks": EVERYWHERE}),
    "averager": (averager, {"ranks": SPLITS}),
    "FSDP2": (fsdp, {**MESH, "shard": sharded}),
}


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("name", STEPS)
def test_right_steps(name, on):
    step, more = STEPS[name]
    matches((partial(step, by_all), of_one, batch(), {"module": model(), **more}), on=[on])


@pytest.mark.parametrize("factors", WRONG)
@pytest.mark.parametrize("name", STEPS)
def test_the_denominator_is_named(name, factors):
    step, more = STEPS[name]
    report = differs((partial(step, factors), of_one, batch(), {"module": model(), **more}))
    found = observed(report)
    assert re.search(f"the gradient weighs the micro-batches .*{WRONG[factors]}; {BY_LABELS}", found), found
    assert "broadcast" not in " ".join(report.cuts)  # of parameters, by an averager


# ── what one process divides by ──────────────────────────────────────────────────────────────────────────


def rows_of(*parts):
    return torch.tensor(float(sum(len(part["x"]) for part in parts)), dtype=torch.double)


def next_tokens(*parts):
    return tokens(*({"labels": part["labels"][:, 1:]} for part in parts))


def ones(*parts):
    return torch.tensor(float(sum(part["mask"].detach().sum() for part in parts)), dtype=torch.double)


COUNTS = {
    rows_of: "rows",
    tokens: "labels other than −100 of labels",
    next_tokens: "labels other than −100 of labels but their first column",
    ones: "ones of mask",
}


@pytest.mark.parametrize("count", COUNTS)
def test_what_one_process_divides_by_is_named(count):
    def single(model, parts):
        (sum(nll(model, part) for part in parts) / count(*parts)).backward()
        sgd(model).step()

    def step(model, parts):
        factor = dc.get_world_size() / dc.all_reduce(other(*parts))
        by_hand(lambda parts: [factor for _ in parts], model, parts)

    other = ones if count is rows_of else rows_of
    given = {**batch(), "mask": (numbers(8, 3, seed=5) > 0).double()}
    found = observed(differs((step, single, given, {"module": model(), "ranks": SPLITS})))
    name = re.escape(COUNTS[count])
    assert re.search(rf"\(by their {name} over the total of {COUNTS[other]}\); .* \(by their {name}\)", found), found


def by_step(parts):
    return [dc.get_world_size() / (len(parts) * dc.all_reduce(tokens(part))) for part in parts]


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        (by_step, "in each step"),
        (lambda parts: [f * dc.get_world_size() for f in by_all(parts)], "times N"),
        (lambda parts: [f / dc.get_world_size() for f in by_all(parts)], "divided by N"),
    ],
)
def test_more_wrong_denominators_are_named(factors, words):
    found = observed(differs((partial(by_hand, factors), of_one, batch(), {"module": model(), **MESH})))
    assert re.search(rf"\(by their labels other than −100 of labels, {words}\); {BY_LABELS}", found), found


def test_weights_that_are_right():
    def twice(model, parts):
        by_hand(by_all, model, parts)
        sgd(model).step()

    assert "the weights of the micro-batches are right" in observed(
        differs((twice, of_one, batch(), {"module": model(), "ranks": SPLITS}))
    )


def test_weights_are_not_named_where_more_than_weights_differs():
    def step(model, parts):
        for factor, part in zip(mean_of_means(parts), parts, strict=True):
            (factor * nll(model, part)).backward()
        model.more.grad = torch.ones(3, dtype=torch.double)
        for p in model.parameters():
            p.grad = dc.all_reduce(p.grad, "mean")
        sgd(model).step()

    module = model()
    module.register_parameter("more", nn.Parameter(torch.ones(3, dtype=torch.double)))
    found = observed(differs((step, of_one, batch(), {"module": module, "ranks": EVERYWHERE})))
    assert "the gradient weighs" not in found


def test_weights_that_adam_hides_are_not_named():
    def step(factors, model, parts):
        for factor, part in zip(factors(parts), parts, strict=True):
            (factor * nll(model, part)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        sgd(model).step()

    def single(model, parts):
        step(lambda parts: [1 / tokens(*parts) for _ in parts], model, parts)

    def clipped(model, parts):
        by_hand(lambda parts: [3 * f for f in by_all(parts)], model, parts)

    found = observed(differs((clipped, single, batch(), {"module": model(), "ranks": SPLITS})))
    assert "the gradient weighs" not in found


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────


def sums(parts):
    return sum((part["x"].sin().sum() for part in parts), torch.zeros(()))


def test_a_loss_of_parts():
    """Without a step of its own: inputs have gradients, to second order."""
    given = {"losses": "sum", "order": 2, "ranks": SPLITS}
    report = matches((sums, sums, {"x": numbers(8, 3)}, given))
    assert [table.title.partition("rows ")[2] for table in report.tables] == [
        "2 + 2, 4",
        "1 + 3, 2 + 0 + 2",
        "8, none",
        "1 + 0 + 3, 4",
    ]
    matches((lambda parts: sum(x.sum() for x in parts), lambda parts: parts[0].sum(), numbers(8, 3), given))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"ranks": ((2, 2), (4,))}, "micro-batches"),
        ({"ranks": [((2, 2), (-1,))]}, "ranks"),
        ({"ranks": [((2, "2"), (4,))]}, "ranks"),
        ({"ranks": (4, 4), "micro_batches": (2, 2)}, "micro_batches"),
        ({**MESH, "micro_batches": (1, 2)}, "micro_batches"),
        ({**MESH, "micro_batches": (5, -1)}, "micro_batches"),
        ({**MESH, "micro_batches": (1.5, 2.5)}, "micro_batches"),
        ({**MESH, "micro_batches": ()}, "micro_batches: "),
    ],
)
def test_refused(more, words):
    with pytest.raises((TypeError, ValueError), match=words):
        matches((partial(by_hand, by_all), of_one, batch(), {"module": model(), **more}))


def test_dropout_is_named():
    def dropping():
        found = nn.Sequential(model(), nn.Dropout(0.5))
        found[0].p = 1  # which is no dropout
        return found

    found = observed(differs((partial(by_hand, by_all), of_one, batch(), {"module": dropping(), "ranks": SPLITS})))
    assert "one process itself has other numbers with another seed: random numbers, such as dropout in 1" in found
