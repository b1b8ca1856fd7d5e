"""Random right programs pass the check against one process; one wrong backward rule anywhere in one is found.

A program is a list of steps that the rows of a batch go through. On one rank each collective in it is its N = 1 case,
so the program itself is what one process computes. A wrong rule changes the backward alone, and only for N > 1.
"""

import os
import random

import pytest
import torch
from verdicts import ruled

import diffcoll as dc
from diffcoll.testing import GradientMismatchError, assert_matches_single_process, simulate

WIDTH = 3
#: Programs of each kind in the long run.
COUNT = int(os.environ.get("DIFFCOLL_FUZZ", "2000"))
SIZES = ((4, 4), (5, 3), (8, 0), (3, 3, 2), (5, 0, 3), (0, 2, 6), (1, 2, 4, 1))

# ── rules: what a collective's backward does with the gradient ───────────────────────────────────────────


#: name: a rule for the gradient at a tensor; N = 1 is left right.
WRONG = {
    "twice": lambda g: 2 * g,
    "times N": lambda g: g * dc.get_world_size(),
    "divided by N": lambda g: g / dc.get_world_size(),
    "zero": lambda g: 0 * g,
    "zero on rank 0": lambda g: g * float(dc.get_rank() != 0),
    "zero on the last rank": lambda g: g * float(dc.get_rank() != dc.get_world_size() - 1),
    "by rank": lambda g: g * (1 + dc.get_rank()),
    "negative on rank 1": lambda g: g * (-1 if dc.get_rank() == 1 else 1),
    "one element": lambda g: g * (1 + 0.1 * (torch.arange(g.numel()).view(g.shape) == g.numel() - 1)),
    "one column": lambda g: g * (torch.arange(g.shape[-1]) > 0),
    "flipped": lambda g: g.flip(-1),
    "summed": lambda g: g.sum(-1, keepdim=True).expand_as(g),
}
#: Rules for tensors of the same shape on all ranks, in whose place the gradient of another rank can stand.
WRONG_BETWEEN = {
    "reduced again": lambda g: dc.all_reduce(g),
    "maximum": lambda g: dc.all_reduce(g, "max"),
    "mean": lambda g: dc.all_reduce(g, "mean"),
    "of the next rank": lambda g: dc.shift(g, 1),
    "of rank 0": lambda g: dc.broadcast(g),
}


def _own_rows(g, rows):
    sizes = dc.all_gather(torch.tensor([rows]))
    return g[int(sizes[: dc.get_rank()].sum()) :][:rows]


#: The same for the results of a reduction and of a gather, from (the gradient, the number of this rank's rows).
WRONG_REDUCTION = (lambda g, _: g, lambda g, _: dc.all_reduce(g, "max"), lambda g, _: dc.shift(dc.all_reduce(g) + g))
WRONG_GATHER = (_own_rows, lambda g, rows: 0 * _own_rows(g, rows), lambda g, rows: 0 * _own_rows(g, rows) + 1)


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────


class Program:
    """A program drawn from a seed; wrong: the place of a wrong rule, and a number that selects it."""

    def __init__(self, seed, wrong=None):
        self.seed, self.wrong = seed, wrong
        rng = random.Random(seed)
        self.steps = [rng.choice(list(STEPS)) for _ in range(rng.randint(1, 3))]
        self.loss = rng.choice(list(LOSSES))
        self.places = 0

    def weights(self):
        generator = torch.Generator().manual_seed(self.seed)
        each = [torch.randn(WIDTH, WIDTH, dtype=torch.double, generator=generator) / 2 for _ in self.steps]
        return torch.nn.ParameterList(each)

    def __repr__(self):
        return f"Program(seed={self.seed}, wrong={self.wrong}): {', '.join(self.steps)}; {self.loss}"

    def count_places(self, batch):
        """Return the number of places in which a wrong rule may stand."""
        with torch.no_grad():
            self(self.weights(), *batch)
        return self.places

    def __call__(self, module, x, labels):
        self.places = 0
        for step, weight in zip(self.steps, module, strict=True):
            x = STEPS[step](self, self.at(x), self.at(weight, shared=True), labels)
        return LOSSES[self.loss](self, x, labels)

    def at(self, x, shared=False):
        """A place in which a wrong rule may stand."""
        rules = {**WRONG, **(WRONG_BETWEEN if shared else {})}
        return self._place(lambda x: x, x, [lambda g, _, rule=rule: rule(g) for rule in rules.values()])

    def reduced(self, x, op="sum"):
        """A reduction of tensors of the same shape; the sum may have the backward of the identity."""
        return self.at(self._place(lambda x: dc.all_reduce(x, op), x, WRONG_REDUCTION), shared=True)

    def gathered(self, x):
        """All rows; the backward may be this rank's slice, or nothing."""
        return self.at(self._place(lambda x: dc.all_gather(x, sizes="auto"), x, WRONG_GATHER), shared=True)

    def _place(self, call, x, rules):
        """Return call(x), with one of the rules for its gradient if this is the place of the wrong one."""
        place, self.places = self.places, self.places + 1
        if self.wrong is None or self.wrong[0] != place or dc.get_world_size() == 1:
            return call(x)
        rule, rows = rules[self.wrong[1] % len(rules)], len(x)
        return ruled(lambda x: call(x.clone()), lambda g: rule(g, rows))(x)

    def count(self, x):
        """The number of rows of all ranks."""
        return dc.all_reduce(torch.tensor(float(len(x)), dtype=x.dtype))


def _linear(program, x, weight, labels):
    return (x @ weight).tanh()


def _normalized(program, x, weight, labels):
    n = program.count(x)
    centered = x - program.reduced(x.sum(0)) / n
    variance = program.reduced((centered**2).sum(0)) / n
    return centered / (variance + 0.1).sqrt() @ weight


def _attention(program, x, weight, labels):
    keys = program.gathered(x @ weight)
    return (x @ keys.T).softmax(1) @ keys


def _of_the_same_label(program, x, weight, labels):
    same = labels[:, None] == dc.all_gather(labels, sizes="auto")
    rows = program.gathered(x)
    return x + (same.to(x.dtype) / same.sum(1, keepdim=True)) @ rows @ weight


def _maximum(program, x, weight, labels):
    low = torch.full((1, WIDTH), -1e3, dtype=x.dtype)
    return x * program.reduced(torch.cat([x @ weight, low]).amax(0), "max").sin()


def _logsumexp(program, x, weight, labels):
    low = torch.full((1, WIDTH), -1e3, dtype=x.dtype)
    return x + program.reduced(torch.cat([x @ weight, low]).logsumexp(0), "logsumexp")


def _product(program, x, weight, labels):
    return x + program.reduced((1 + (x @ weight).tanh() / 4).prod(0), "product").sin()


def _scatter(program, x, weight, labels):
    outer = program.reduced(x.T @ x) / program.count(x)
    return x @ (outer + weight).tanh()


STEPS = {
    "linear": _linear,
    "normalized": _normalized,
    "attention": _attention,
    "same label": _of_the_same_label,
    "maximum": _maximum,
    "logsumexp": _logsumexp,
    "product": _product,
    "scatter matrix": _scatter,
}


def _mean_square(program, x, labels):
    return (program.at(x) ** 3).sum() / program.count(x)


def _contrastive(program, x, labels):
    n, first = program.count(x), int(dc.scan(torch.tensor([len(x)]), exclusive=True))
    logits = x @ program.gathered(x.sin()).T
    return torch.nn.functional.cross_entropy(logits, first + torch.arange(len(x)), reduction="sum") / n


def _global_mean(program, x, labels):
    n = dc.global_mean(float(len(x))) * dc.get_world_size()
    return (program.at(x).exp() * (1 + labels[:, None])).sum() / n


def _of_statistics(program, x, labels):
    mean = program.reduced((x**2).sum(0)) / program.count(x)
    return (x * mean.sin()).sum() + (mean**2).sum() / dc.get_world_size()


LOSSES = {
    "cubes": _mean_square,
    "contrastive": _contrastive,
    "global mean": _global_mean,
    "of statistics": _of_statistics,
}

# ── verdicts ─────────────────────────────────────────────────────────────────────────────────────────────


def batch(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, WIDTH, dtype=torch.double, generator=generator), torch.arange(n) % 3


def passes(distributed, single, sizes):
    """Whether the check passes; it observes something of what is wrong."""
    whole = batch(sum(sizes), single.seed)
    more = {"module": single.weights(), "ranks": sizes, "rank_reduction": "sum", "on": ["simulated"]}
    try:
        return assert_matches_single_process(distributed, single, whole, **more).ok
    except GradientMismatchError as error:
        assert error.report.observed, f"{distributed}, {sizes}\n{error}"
        return False


def gradients(program, sizes):
    """The gradients of every rank, without the check's code."""

    def on_rank(x, labels):
        x = x.clone().requires_grad_()
        weights = program.weights()
        of_rank = Program(program.seed, program.wrong)
        loss = of_rank(weights, x, labels)
        return torch.autograd.grad(loss, [x, *weights], allow_unused=True, materialize_grads=True)

    x, labels = batch(sum(sizes), program.seed)
    found = simulate(on_rank, x.split(sizes), labels.split(sizes))
    return [of_rank[0] for of_rank in found] + [torch.stack(gs).sum(0) for gs in list(zip(*found, strict=True))[1:]]


def differ(a, b):
    """Whether gradients differ by more than rounding, each relative to the largest."""
    largest = max(float(x.abs().max()) for x in b if x.numel())
    return any(x.numel() and float((x - y).abs().max()) > 1e-9 * largest for x, y in zip(a, b, strict=True))


def run(seeds):
    """Check a right and a wrong program for each seed, and return how many of the wrong ones had a wrong gradient."""
    found = 0
    for seed in seeds:
        rng = random.Random(seed)
        sizes = SIZES[seed % len(SIZES)]
        right = Program(seed)
        assert passes(right, right, sizes), f"is flagged: {right}, {sizes}"
        wrong = Program(seed, (rng.randrange(right.count_places(batch(8, seed))), rng.randrange(60)))
        if passes(wrong, right, sizes):
            assert not differ(gradients(wrong, sizes), gradients(right, sizes)), f"passes: {wrong}, {sizes}"
        else:
            found += 1
    return found


def test_some_programs():
    assert run(range(20)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_programs(part):
    each = COUNT // 10
    assert run(range(part * each, (part + 1) * each)) > 0.7 * each
