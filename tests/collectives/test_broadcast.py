"""broadcast and reduce, each other's adjoint; permute, shift and scan, adjoint to their own kind."""

import torch
import worked
from runs import gloo, new_group, rules, truth
from worked import Example

import diffcoll as dc

XS = [[1.0, 2.0], [30.0, 40.0], [500.0, 600.0]]
WS = [1.0, 10.0, 100.0]
DIGITS = [[1.0], [2.0], [3.0]]
PRIMES = [5.0, 7.0, 11.0]


def on_the_last_two(x):
    """Ranks in `src` count within the group (pytorch#130515)."""
    group = new_group([1, 2])
    return dc.broadcast(x, src=1, group=group) if dc.get_rank() else x


def shifted(offset, wrap, ys, gxs):
    return Example(lambda x: dc.shift(x, offset, wrap=wrap), DIGITS, [[y] for y in ys], PRIMES, [[g] for g in gxs])


EXAMPLES = {
    "broadcast": Example(
        lambda x: dc.broadcast(x, src=2), XS, [[500, 600]] * 3, WS, [[0, 0], [0, 0], [111, 111]]
    ),
    "broadcast, replicated": Example(
        lambda x: dc.broadcast(x, src=1, grad_placement="replicate"), XS, [[30, 40]] * 3, [7.0] * 3,
        [[0, 0], [7, 7], [0, 0]],
    ),
    "broadcast in a group": Example(
        on_the_last_two, XS, [[1, 2], [500, 600], [500, 600]], WS, [[1, 1], [0, 0], [110, 110]]
    ),
    # the other ranks' y is a constant zero, so their weights have no effect
    "reduce": Example(lambda x: dc.reduce(x, dst=1), XS, [[0, 0], [531, 642], [0, 0]], PRIMES, [[7, 7]] * 3),
    "reduce, mean": Example(
        lambda x: dc.reduce(x, 2, "mean"), XS, [[0, 0], [0, 0], [177, 214]], [3.0, 6.0, 9.0], [[3, 3]] * 3
    ),
    "reduce, infinities": Example(
        lambda x: dc.reduce(x.log()), [[0.0, 1.0]] * 3, [[-torch.inf, 0], [0, 0], [0, 0]], [1.0] * 3,
        [[torch.inf, 1]] * 3,
    ),
    "permute": Example(
        lambda x: dc.permute(x, [(0, 2), (1, 1)]), DIGITS, [[0], [2], [1]], PRIMES, [[11], [7], [0]]
    ),
    "permute without pairs": Example(lambda x: dc.permute(x, []), DIGITS, [[0]] * 3, PRIMES, [[0]] * 3),
    "shift": shifted(1, True, [3, 1, 2], [7, 11, 5]),
    "shift back in a line": shifted(-1, False, [2, 3, 0], [0, 5, 7]),
    "shift by nothing": shifted(0, False, [1, 2, 3], PRIMES),
    "shift by more than N": shifted(5, True, [2, 3, 1], [11, 5, 7]),
    "shift out of the line": shifted(5, False, [0, 0, 0], [0, 0, 0]),
    "shift there and back": Example(lambda x: dc.shift(dc.shift(x, 2), -2), XS, XS, WS, [[w, w] for w in WS]),
    "scan": Example(dc.scan, XS, [[1, 2], [31, 42], [531, 642]], WS, [[111] * 2, [110] * 2, [100] * 2]),
    "scan, exclusive": Example(
        lambda x: dc.scan(x, exclusive=True), XS, [[0, 0], [1, 2], [31, 42]], WS, [[110] * 2, [100] * 2, [0] * 2]
    ),
    "scan, reverse": Example(
        lambda x: dc.scan(x, reverse=True), XS, [[531, 642], [530, 640], [500, 600]], WS, [[1] * 2, [11] * 2, [111] * 2]
    ),
    "scan, reverse and exclusive": Example(
        lambda x: dc.scan(x, reverse=True, exclusive=True), XS, [[530, 640], [500, 600], [0, 0]], WS,
        [[0] * 2, [1] * 2, [11] * 2],
    ),
}  # fmt: skip


@worked.each(EXAMPLES)
def test_values_and_gradients(example, run, gradients):
    worked.check(example, run, gradients)


def test_half_precision_is_added_up_in_single():
    xs = [torch.tensor(v, dtype=torch.float16) for v in (60000.0, 60000.0, -60000.0, 0.0)]
    for run in (truth, rules, gloo):
        assert [y.item() for y in run(dc.scan, xs)] == [60000.0, torch.inf, 60000.0, 60000.0]
