"""scan by a function: what a left fold over the ranks has; a recurrence over a split sequence is that of the whole."""

from functools import partial, reduce
from itertools import accumulate, product
from typing import NamedTuple

import nests
import pytest
import torch
from runs import gloo, profiled, rules, runs_on, truth

import diffcoll as dc

FLAGS = [{"reverse": reverse, "exclusive": exclusive} for reverse, exclusive in product([False, True], repeat=2)]


class Step(NamedTuple):
    """From h to a h + b."""

    a: torch.Tensor
    b: torch.Tensor


def both(before, own):
    (a, b), (c, d) = before["step"], own["step"]
    (y, z), (u, v) = before["more"], own["more"]
    return {"more": [y + u + y * u, v + z], "step": Step(c * a, c * b + d), "empty": own["empty"]}


def tree_of(x):
    """A 0-d complex tensor, an integer, an empty tensor, and two of one dtype, one of which is not contiguous."""
    step = Step(x[:2].cos(), x.view(2, 2).T[:, :1].sin().mT[0])
    return {"step": step, "more": [torch.complex(x[0], x[1]), x[2].long()], "empty": x[:0]}


def numbers_of(tree):
    return torch.cat(
        [
            *tree["step"],
            torch.stack([tree["more"][0].real, tree["more"][0].imag]),
            tree["more"][1].view(1),
            tree["empty"],
        ]
    )


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


@runs_on("rules")
@pytest.mark.parametrize("n", [1, 2, 5])
def test_it_is_a_left_fold(run, n):
    """Values, gradients of second order, forward mode and vmap; what the first rank gets has its gradient, too."""

    def empty_of(x, exclusive):
        return tree_of(x.exp()) if exclusive else None

    for flags in FLAGS:

        def of_rank(x, flags=flags):
            return numbers_of(dc.scan(tree_of(x), both, **flags, empty=empty_of(x, flags["exclusive"])))

        def of_all(xs, flags=flags):
            empty = empty_of(xs[-1 if flags["reverse"] else 0], flags["exclusive"])
            return [*map(numbers_of, dc.truth.scan([*map(tree_of, xs)], both, **flags, empty=empty))]

        nests.check(run, nests.SOME, lambda r: of_rank, of_all, [*numbers(n, 4)], what=flags)


def after(step, then):
    return Step(step[0] * then[0], then[0] * step[1] + then[1])


def recurrence(x, group=None):
    """h_t = a_t h_{t−1} + b_t, as Mamba has it; of this rank's steps, perhaps none."""
    a, b = x
    nothing = Step(a[:0].prod(0), b[:0].sum(0))
    before = dc.scan(reduce(after, zip(a, b, strict=True), nothing), after, exclusive=True, empty=nothing)
    return torch.stack([h for _, h in accumulate(zip(a, b, strict=True), after, initial=before)])[1:]


@runs_on("rules", "gloo")
@pytest.mark.parametrize("sizes", [[3, 1, 0], [0, 2, 0]], ids=str)
def test_a_recurrence_over_a_split_sequence(run, sizes):
    """Equals one process; a rank without steps passes the state on."""

    def whole(xs):
        h, found = torch.zeros(2, dtype=torch.double), []
        for a, b in torch.cat(xs, 1).unbind(1):
            h = a * h + b
            found.append(h)
        return torch.stack(found).split(sizes)

    xs = numbers(2, sum(sizes), 2, seed=1).split(sizes, 1)
    nests.check(run, nests.SOME, lambda r: recurrence, whole, xs)


@runs_on("rules", "gloo")
@pytest.mark.parametrize("needed", [True, False])
def test_what_the_function_captures(run, needed):
    """Its gradient on a rank is that of the rank's own calls, to second order; also where no x needs a gradient.

    And no rank calls the function with the zeros that it has received from nobody, of which the logarithm is infinite.
    """

    def inputs(r):
        x, w = numbers(2, 3, seed=r).abs(), torch.tensor(0.5, dtype=torch.double)
        return [x.requires_grad_(needed), w.requires_grad_()]

    def twisted(w, before, own):
        return torch.stack([(before[0].log() + own[0].log()).exp(), own[0] ** w * before[1] + own[1]])

    def loss_of(r, y):
        return (y * torch.arange(1 + r, 7 + r).view(2, 3)).sin().sum()

    def loss(r, x, w):
        return loss_of(r, dc.scan(x, partial(twisted, w)))

    def gradients(total, leaves):
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        gs = torch.autograd.grad(total, leaves, create_graph=True)
        return [*gs, *torch.autograd.grad(sum(g.square().sum() for g in gs), leaves)]

    def of_rank(r):
        leaves = inputs(r)
        return gradients(loss(r, *leaves), leaves)

    found = run(of_rank, range(3))
    (xs, ws) = zip(*map(inputs, range(3)), strict=True)
    of_all = gradients(sum(truth(loss, range(3), xs, ws)), [*xs, *ws])
    k = 2 if needed else 1
    in_order = [of_one[i] for i in range(2 * k) for of_one in found]
    torch.testing.assert_close(in_order, of_all)
    ys = dc.truth.scan([*xs], partial(twisted, ws[0]))  # one variable for all ranks
    (total,) = torch.autograd.grad(sum(map(loss_of, range(3), ys)), ws[0])
    torch.testing.assert_close(sum(of_one[k - 1] for of_one in found), total)


def test_messages():
    """One for each dtype in a round, and as many back."""

    def add(before, own):
        return [a + b for a, b in zip(before, own, strict=True)]

    def call():
        x = [torch.ones(3, requires_grad=True), torch.ones(2), torch.arange(4)]
        y = dc.scan(x, add, exclusive=True, empty=[torch.zeros_like(leaf) for leaf in x])
        y[0].sum().backward()

    sent = [("shift", 20), ("shift", 32)] * 3 + [("shift backward", 20)] * 3
    assert gloo(lambda r: profiled(call), range(3)) == [sent] * 3


def test_functions_that_return_or_modify_their_arguments():
    """No x is modified, nor is a state of another round; results are contiguous tensors of their own."""

    def in_place(before, own):
        own.mul_(before.mul_(10))
        return own

    def body(r):
        functions = [lambda before, own: before, lambda before, own: own, in_place, lambda before, own: before.t().t()]
        functions += [lambda before, own: (before @ own).mT.contiguous().mT]
        x = torch.full((2, 2), r + 2.0)
        ys = [dc.scan(x, f) for f in functions]
        assert x.unique() == r + 2
        assert all(y.is_contiguous() for y in ys)
        [y.fill_(7) for y in ys]
        assert x.unique() == r + 2
        return [dc.scan(x, f).unique().item() for f in functions]

    first, second, third = rules(body, range(3))
    assert first == [2.0] * 5
    assert second == [2, 3, 60, 2, 12]
    assert third == [2, 4, 2400, 2, 96]
