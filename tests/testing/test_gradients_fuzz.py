"""Random right programs pass the check against one process; one wrong backward rule anywhere in one is found.

A program is a list of steps that the rows of a batch go through, and a loss of `field`. On one rank each collective in
it is its N = 1 case, so the program itself is what one process computes. A wrong rule changes the backward alone, and
only for N > 1.
"""

import os
import random
from functools import partial

import pytest
import torch
from field import OF_PAIRS, OF_STATISTICS, WIDTH, batch, of_pairs, of_statistics, own_rows, right_gather
from verdicts import numbers, ruled

import diffcoll as dc
from diffcoll.testing import GradientMismatchError, assert_matches_single_process, simulate

#: Programs of each kind in the long run.
COUNT = int(os.environ.get("DIFFCOLL_FUZZ", "2000"))
SIZES = ((4, 4), (5, 3), (8, 0), (3, 3, 2), (5, 0, 3), (0, 2, 6), (1, 2, 4, 1))

# ── rules: what a collective's backward does with the gradient ───────────────────────────────────────────

#: Of any tensor.
WRONG = (
    lambda g: g * dc.get_world_size(),
    lambda g: g / dc.get_world_size(),
    lambda g: 0 * g,
    lambda g: g * float(dc.get_rank() != 0),
    lambda g: g * float(dc.get_rank() != dc.get_world_size() - 1),
    lambda g: g * (1 + dc.get_rank()),
    lambda g: g * (-1 if dc.get_rank() == 1 else 1),
    lambda g: g * (1 + 0.1 * (torch.arange(g.numel()).view(g.shape) == g.numel() - 1)),
    lambda g: g * (torch.arange(g.shape[-1]) > 0),
    lambda g: g.flip(-1),
    lambda g: g.sum(-1, keepdim=True).expand_as(g),
)
#: Of a tensor of the same shape on all ranks.
WRONG_BETWEEN = (
    *WRONG,
    dc.all_reduce,
    lambda g: dc.all_reduce(g, "max"),
    lambda g: dc.all_reduce(g, "mean"),
    lambda g: dc.shift(g, 1),
    dc.broadcast,
)
#: Of the result of a reduction, and of a gather of x.
WRONG_REDUCTION = (lambda g: g, lambda g: dc.all_reduce(g, "max"), lambda g: dc.shift(dc.all_reduce(g) + g))
WRONG_GATHER = (own_rows, lambda g, x: 0 * own_rows(g, x), lambda g, x: 0 * own_rows(g, x) + 1)


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────


class Program:
    """A program drawn from a seed; wrong: the place of a wrong rule, and a number that selects it."""

    def __init__(self, seed, wrong=None):
        self.seed, self.wrong = seed, wrong
        rng = random.Random(seed)
        self.steps = [rng.choice(STEPS) for _ in range(rng.randint(1, 3))]
        self.make, self.loss = rng.choice(LOSSES)
        self.places = 0

    def weights(self):
        shapes = [(3, WIDTH)] + [(WIDTH, WIDTH)] * len(self.steps)
        return torch.nn.ParameterList(numbers(*shape, seed=10 * self.seed + i) / 2 for i, shape in enumerate(shapes))

    def __repr__(self):
        return f"Program(seed={self.seed}, wrong={self.wrong}): {self.steps}, {self.loss}"

    def count_places(self):
        """Return the number of places in which a wrong rule may stand."""
        with torch.no_grad():
            self(self.weights(), *batch(8))
        return self.places

    def __call__(self, module, x, y, k):
        self.places = 0

        def rows(x):
            first, *others = module
            x = x @ self.at(first, WRONG_BETWEEN)
            for step, weight in zip(self.steps, others, strict=True):
                x = step(self, self.at(x, WRONG), self.at(weight, WRONG_BETWEEN))
            return x

        way = self.gathered if self.make is of_pairs else self.reduced
        return self.make(self.loss, way)(rows, x, y, k)

    def at(self, x, rules):
        """A place in which a wrong rule may stand."""
        return self.place(torch.clone, x, rules)

    def reduced(self, x, op="sum"):
        """A reduction of tensors of the same shape; the sum may have the backward of the identity."""
        return self.at(self.place(lambda x: dc.all_reduce(x, op), x, WRONG_REDUCTION), WRONG_BETWEEN)

    def gathered(self, x):
        """All rows; the backward may be this rank's slice, or nothing."""
        rules = [lambda g, rule=rule: rule(g, x) for rule in WRONG_GATHER]
        return self.at(self.place(right_gather, x, rules), WRONG_BETWEEN)

    def place(self, call, x, rules):
        """Return call(x), with one of the rules for its gradient if this is the place of the wrong one."""
        place, self.places = self.places, self.places + 1
        if self.wrong is None or self.wrong[0] != place or dc.get_world_size() == 1:
            return call(x)
        return ruled(call, rules[self.wrong[1] % len(rules)])(x)


def linear(program, x, weight):
    return (x @ weight).tanh()


def normalized(program, x, weight):
    n = dc.all_reduce(torch.tensor(float(len(x)), dtype=x.dtype))
    centered = x - program.reduced(x.sum(0)) / n
    variance = program.reduced((centered**2).sum(0)) / n
    return centered / (variance + 0.1).sqrt() @ weight


def attended(program, x, weight):
    keys = program.gathered(x @ weight)
    return (x @ keys.T).softmax(1) @ keys


def with_a_low_row(x):
    """Ranks may have no rows."""
    return torch.cat([x, torch.full((1, WIDTH), -1e3, dtype=x.dtype)])


OPS = {
    "max": lambda x: with_a_low_row(x).amax(0),
    "logsumexp": lambda x: with_a_low_row(x).logsumexp(0),
    "product": lambda x: (1 + x.tanh() / 4).prod(0),
}


def reduction(program, x, weight, op):
    return x + program.reduced(OPS[op](x @ weight), op).sin()


STEPS = (linear, normalized, attended, *(partial(reduction, op=op) for op in OPS))
LOSSES = [(of_pairs, f) for f in OF_PAIRS.values()] + [(of_statistics, f) for f in OF_STATISTICS.values()]

# ── verdicts ─────────────────────────────────────────────────────────────────────────────────────────────


def passes(distributed, single, sizes):
    """Whether the check passes; it observes something of what is wrong."""
    more = {"module": single.weights(), "ranks": sizes, "losses": "sum", "on": ["simulated"]}
    try:
        return assert_matches_single_process(distributed, single, batch(sum(sizes)), **more).ok
    except GradientMismatchError as error:
        assert error.report.observed, f"{distributed}, {sizes}\n{error}"
        return False


def gradients(program, sizes):
    """The gradients of every rank, without the check's code."""

    def on_rank(x, y, k):
        x, weights = x.clone().requires_grad_(), program.weights()
        loss = Program(program.seed, program.wrong)(weights, x, y, k)
        return torch.autograd.grad(loss, [x, *weights], allow_unused=True, materialize_grads=True)

    found = simulate(on_rank, *(each.detach().split(sizes) for each in batch(sum(sizes))))
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
        wrong = Program(seed, (rng.randrange(right.count_places()), rng.randrange(60)))
        if passes(wrong, right, sizes):
            assert not differ(gradients(wrong, sizes), gradients(right, sizes)), f"passes: {wrong}, {sizes}"
        else:
            found += 1
    return found


def test_some_programs():
    assert run(range(5)) > 2


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_programs(part):
    each = COUNT // 10
    assert run(range(part * each, (part + 1) * each)) > 0.7 * each
