"""Random training loops with GradientAverager, each step against one process on all ranks' batches.

A step draws for each rank its micro-batches, before the block and in it, the branches of the model that they use, and
what goes wrong. What a rank finds in `.grad` is compared with sums of gradients that it computes itself, of all ranks.
"""

import contextlib
import random
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import diffcoll as dc


class Net(nn.Module):
    """Small and large, complex, shared and channels-last parameters, and branches that a batch may use."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(3, 4)
        self.branches = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.branches[3].weight = self.branches[0].weight
        self.large = nn.Linear(4, 2100)
        self.filters = nn.Conv2d(2, 3, 2)
        self.double()
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.filters.to(memory_format=torch.channels_last)

    def forward(self, x, branches, reentrant=None):
        """Return the sum over the rows of x."""
        h = self.body(x).tanh()
        for b in branches:
            h = h + (
                self.branches[b](h)
                if reentrant is None
                else checkpoint(self.branches[b], h, use_reentrant=reentrant, preserve_rng_state=False)
            )
        y = h.square().sum()
        if 1 in branches:
            y = y + self.large(h).square().sum() / 2100 + (self.phase * h[:, :3]).abs().square().sum()
        if 2 in branches:
            y = y + self.filters(h.view(-1, 2, 2, 1).expand(-1, -1, -1, 3)).square().sum()
        return y


class Batch(NamedTuple):
    """One micro-batch of a rank: its number of rows, what they are made of, the branches, and a kind of checkpoint."""

    rows: int
    k: int
    branches: tuple
    reentrant: object

    def x(self, r):
        return torch.linspace(-1 - r, 1 + self.k % 5, 3 * self.rows, dtype=torch.double).view(self.rows, 3)


class Step(NamedTuple):
    """zeroed: "none", "zeros", "inside" or "no". fails: where one rank raises. freezes: "one" or "all" ranks, which."""

    before: list
    within: list
    zeroed: str
    has_count: bool
    fails: str
    failing: int
    freezes: tuple
    converts: bool


class Loop(NamedTuple):
    n: int
    reduction: str
    bucket_mb: float
    overlaps: bool
    is_split: bool
    steps: list


def drawn(seed):
    of = random.Random(seed)
    n = of.choice([1, 2, 2, 3, 3])
    reduction = of.choice(["mean", "mean", "sum"])

    def batches(most):
        def one():
            uses = tuple(b for b in range(4) if of.random() < 0.6)
            return Batch(of.choice([0, 1, 2, 3]), of.randrange(100), uses, of.choice([None, None, False, True]))

        return [[one() for _ in range(of.randrange(most + 1))] for _ in range(n)]

    steps = []
    for _ in range(of.randrange(3, 7)):
        has_count = of.random() < 0.4
        changes_nothing = reduction == "mean" and not has_count
        zeroed = of.choice(["none", "none", "zeros", "inside", *["no"] * changes_nothing])
        fails = of.choice(["", "", "", "", "before", "in backward", "after", "stepping"])
        where = of.choice([None, None, None, "one" if zeroed in ("none", "inside") else "all", "all"])
        freezes = where, of.randrange(11)
        before = batches(0 if zeroed == "inside" else of.choice([0, 0, 2]))
        steps.append(Step(before, batches(2), zeroed, has_count, fails, of.randrange(n), freezes, of.random() < 0.2))
    return Loop(n, reduction, of.choice([1e-4, 1e-3, 0.06, 25]), of.random() < 0.7, of.random() < 0.3, steps)


class Left(Exception):
    """What a rank raises that leaves its block."""


def _raise(_):
    raise Left


class OnRank:
    """The loop on one rank."""

    def __init__(self, seed, loop, r):
        self.loop, self.r = loop, r
        self.net, self.twin = Net(seed), Net(seed)
        named = [*self.net.named_parameters()]
        parts = [named[:5], named[5:]] if loop.is_split else [self.net]
        self.averagers = [
            dc.GradientAverager(part, reduction=loop.reduction, bucket_mb=loop.bucket_mb) for part in parts
        ]
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.kept = []

    def run(self):
        for step in self.loop.steps:
            self.step(step)
        return [p.grad for p in self.net.parameters()]

    def step(self, step):
        frozen = self.freeze(step)
        if step.converts:
            for p in self.net.parameters():
                p.data = p.data.clone()
                if p.grad is not None:
                    p.grad.data = p.grad.data.clone()
        if step.zeroed in ("none", "zeros"):
            self.net.zero_grad(set_to_none=step.zeroed == "none")
        before = [None if p.grad is None or step.zeroed == "inside" else p.grad.clone() for p in self.net.parameters()]
        is_failing = step.fails and self.r == step.failing
        for batch in step.before[self.r]:
            self.backward(self.net, batch, self.r, step)
        try:
            self.block(step, is_failing)
        except Left:
            assert is_failing
        except RuntimeError:
            if not step.fails:
                raise
        else:
            assert not step.fails, step
            self.compare(before, step, frozen)
        if step.fails:
            assert all(p.grad is None for p in self.net.parameters() if p.requires_grad)
        if step.zeroed == "none":
            for grad, copy in self.kept:
                assert torch.equal(grad, copy)
        self.kept = [(p.grad, p.grad.clone()) for p in self.net.parameters() if p.grad is not None]
        self.optimizer.step()
        self.twin.load_state_dict(self.net.state_dict())
        for p in self.net.parameters():
            p.requires_grad_(True)

    def freeze(self, step):
        """Freeze a parameter on one rank or on all until the end of the step; return the ranks."""
        where, i = step.freezes
        ranks = {"one": [step.failing], "all": range(self.loop.n)}.get(where, [])
        if self.r in ranks:
            p = [*self.net.parameters()][i]
            p.requires_grad_(False)
            p.grad = None
        return ranks

    def block(self, step, is_failing):
        rows = sum(batch.rows for batch in (*step.before[self.r], *step.within[self.r]))
        count = (rows if self.r % 2 else torch.tensor(rows)) if step.has_count else None
        with contextlib.ExitStack() as blocks:
            for averager in self.averagers:
                blocks.enter_context(averager.reduce(count=count))
            if step.zeroed == "inside":
                self.net.zero_grad()
            if is_failing and step.fails == "before":
                raise Left
            for batch in step.within[self.r]:
                self.backward(self.net, batch, self.r, step, _raise if is_failing else None)
            if is_failing and step.fails == "stepping":
                self.optimizer.step()  # which raises
            elif is_failing:
                raise Left

    def backward(self, net, batch, r, step, hook=None):
        h = batch.x(r)
        loss = net(h, batch.branches, batch.reentrant)
        if not step.has_count:
            loss = loss / max(batch.rows, 1)
        if hook is not None and step.fails == "in backward":
            loss.register_hook(hook)
        loss.backward()

    def compare(self, before, step, frozen):
        """Compare `.grad` with the sums over all ranks, which the twin computes."""
        sums = [None] * len(before)
        for r in range(self.loop.n):
            self.twin.zero_grad()
            for i, p in enumerate(self.twin.parameters()):
                p.requires_grad_(not (r in frozen and i == step.freezes[1]))
            for batch in (*step.before[r], *step.within[r]):
                self.backward(self.twin, batch, r, step)
            for i, p in enumerate(self.twin.parameters()):
                p.requires_grad_(True)
                if p.grad is not None:
                    sums[i] = p.grad if sums[i] is None else sums[i] + p.grad
        rows = sum(batch.rows for r in range(self.loop.n) for batch in (*step.before[r], *step.within[r]))
        divisor = max(rows, 1) if step.has_count else self.loop.n if self.loop.reduction == "mean" else 1
        for i, (p, old, new) in enumerate(zip(self.net.parameters(), before, sums, strict=True)):
            if old is not None and i == step.freezes[1] and len(frozen) == self.loop.n:
                continue
            expected = old if new is None else new / divisor if old is None else old + new / divisor
            assert (p.grad is None) == (expected is None), (step, i)
            if expected is not None:
                assert (p.grad - expected).abs().max() <= 1e-12 * expected.abs().max().clamp(min=1), (step, i)
