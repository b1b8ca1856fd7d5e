"""Check mode: where ranks disagree about a call, all of them raise one error, and the group works afterwards."""

import inspect
import re
import time
from collections import OrderedDict
from functools import partial

import numpy as np
import properties
import pytest
import torch
import torch.distributed as dist
from runs import gloo, refusal, runs_on, truth
from torch.distributed.tensor import Partial, Replicate

import diffcoll as dc
from diffcoll.collectives import COLLECTIVES
from diffcoll.core import check_mode
from diffcoll.testing import cases, simulate

N = 3
DTYPES = [torch.float32, torch.float32, torch.int32]


def x_(*shape):
    return torch.ones(*shape, dtype=torch.float64, requires_grad=True)


def wait(y):
    return y.wait() if isinstance(y, dc.Pending) else y


def backward(y, *more):
    return sum([y, *more]).sum().backward()


def uses_another_result(odd):
    """Results of one shape: only the number of the forward call tells their backwards apart."""
    ys = [dc.all_reduce(x_(3)) for _ in range(N)]
    backward(ys[dc.get_rank()])


def uses_another_wait(odd):
    ys = [dc.all_gather(x_(3), async_op=True) for _ in range(2)]
    backward([y.wait() for y in ys][odd])


def forward_or_backward(odd):
    y = dc.all_reduce(x_(3))
    dc.all_reduce(x_(3)) if odd else backward(y)


def second_order_of_one(odd):
    x = x_(3)
    (g,) = torch.autograd.grad(dc.all_reduce(x).square().sum(), x, create_graph=True)
    y = dc.all_reduce(x_(3))
    backward(g if odd else y)


#: Calls of another x on rank 1: collective, the usual x, the odd one, and the other arguments.
INPUTS = [
    # dtypes and shapes; of as many numbers, too
    (dc.all_reduce, x_(3), x_(4), {}),
    (dc.all_reduce, x_(3, 2), x_(2, 3), {}),
    (dc.all_reduce, x_(3, 2), x_(2, 3), {"op": "max"}),
    (dc.reduce, x_(1)[0], x_(1), {"dst": 1, "op": "max"}),
    (dc.all_gather, x_(2, 3), x_(2, 4), {"sizes": [2, 2, 2]}),
    (dc.gather, x_(1), x_(1)[0], {"sizes": [1, 1, 1]}),
    (dc.broadcast, x_(3), x_(3).float(), {}),
    (dc.all_reduce, x_(3).half(), x_(3).bfloat16(), {"op": "mean"}),
    (dc.all_to_all, x_(3), x_(6), {}),
    (dc.all_to_all, x_(3, 4), x_(3, 2), {}),
    # trees
    (dc.all_reduce, [x_(3)], [x_(3), x_(3)], {}),
    (dc.all_gather, [x_(3)], x_(3), {}),
    (dc.broadcast, {"b": x_(3), "a": x_(3)}, {"b": x_(3), "c": x_(3)}, {}),
    (dc.all_reduce, {"a": x_(2), "b": x_(3)}, {"a": x_(3), "b": x_(2)}, {"op": "max"}),
    (dc.all_gather, [x_(2), x_(3)], [x_(3), x_(2)], {}),
    (dc.all_gather, [x_(2, 4, 3)], [x_(2, 3, 4)], {"sizes": [2, 2, 2]}),
    (dc.sum_gradients, [x_(2), x_(2).long()], [x_(2), x_(2).float()], {}),
]
FLAG = (False, True)
RING = [(0, 1), (1, 2), (2, 0)]
#: What arguments are on the other ranks and on rank 1, of every collective that has them.
ARGUMENTS = {
    "async_op": [FLAG],
    "concat_dim": [(0, 1)],
    "dim": [(0, 1)],
    "dst": [(0, 1)],
    "exclusive": [FLAG],
    "grad_placement": [("partial", "replicate")],
    "offset": [(1, 2)],
    "op": [("sum", "max"), ("sum", "avg"), ("product", "max"), ("min", "logsumexp")],
    "pairs": [(RING, RING[:2])],
    "reverse": [FLAG],
    "split_dim": [(0, 1)],
    "src": [(0, 2)],
    "stack": [FLAG],
    "wrap": [FLAG],
}


def calls_of(name):
    f = getattr(dc, name)
    needed = {"pairs": RING} if name == "permute" else {}
    for argument in inspect.signature(f).parameters:
        is_function = (name, argument) == ("scan", "op")  # or the sum, and no other op
        for both in [("sum", torch.mul)] if is_function else ARGUMENTS.get(argument, []):
            yield lambda odd, argument=argument, both=both: f(x_(3, 3), **{**needed, argument: both[odd]})


TREE = {"a": x_(3), "b": [x_(3).float()]}
#: Calls that are made of others, or take trees: on rank 1 there is another collective instead.
COMPOSED = [
    *(partial(f, TREE) for f in (dc.all_reduce, dc.all_gather, dc.broadcast, dc.sum_gradients, dc.scan)),
    partial(dc.scan, TREE, lambda before, own: own),
    *(partial(f, x_(3), sizes="auto") for f in (dc.all_gather, dc.gather)),
    partial(dc.all_gather, TREE, sizes="auto"),
    partial(dc.all_to_all, x_(3), split_sizes=[1, 1, 1], concat_sizes="auto"),
    partial(dc.global_mean, x_(3)),
    partial(dc.gather_batch, x_(3)),
    lambda: list(dc.ring(x_(3))),
    partial(dc.halo_exchange, x_(3), 0, 1, 1),
]
#: Calls that differ on rank 1, where `odd` is true.
DISAGREEMENTS = [
    *(lambda odd, call=call: dc.broadcast(x_(7)) if odd else call() for call in COMPOSED),
    *(lambda odd, f=f, xs=xs, more=more: f(xs[odd], **more) for f, *xs, more in INPUTS),
    *(call for name in COLLECTIVES for call in calls_of(name)),
    *(lambda odd, f=f: f(x_(2), sizes=[2, 2, 2 + odd]) for f in (dc.all_gather, dc.gather, dc.gather_batch)),
    *(lambda odd, f=f: f(x_(3), sizes=[1 - odd, 1, 1 + odd]) for f in (dc.reduce_scatter, dc.scatter, dc.split)),
    lambda odd: dc.all_gather(x_(2), sizes="auto" if odd else [2, 2, 2]),
    lambda odd: dc.all_to_all(x_(3, 2), 0, 1, split_sizes=[1 - odd, 1, 1 + odd]),
    lambda odd: dc.all_to_all(x_(3), split_sizes=[1, 1, 1], concat_sizes=[1, 1, 1 + odd]),
    lambda odd: dc.all_reduce(x_(3), "max", grad_placement="replicate" if odd else "partial"),
    lambda odd: dc.all_gather(x_(3) if odd else x_(1, 3), stack=odd),
    lambda odd: torch.vmap(lambda x: dc.all_reduce(x_(3) if odd else x) + x)(x_(2, 3)),
    lambda odd: dc.all_gather([x_(3, 3)], int(odd)),
    lambda odd: dc.all_gather([x_(3, 3)], stack=odd),
    # backward
    lambda odd: backward(*[f(x_(3)) for f in (dc.all_reduce, dc.scan)][: 2 - odd]),
    uses_another_result,
    uses_another_wait,
    forward_or_backward,
    second_order_of_one,
]


def gathers_of_other_sizes(r):
    with dc.check_mode():
        return [
            refusal(dc.CollectiveMismatchError, lambda odd, f=f: f(x_(2 + odd)), r == 1)
            for f in (dc.all_gather, dc.gather)
        ]


@runs_on("rules", "gloo", "mpi")
def test_disagreements(run):
    def body(r):
        texts = []
        with dc.check_mode():
            for i, call in enumerate(DISAGREEMENTS):
                texts.append(refusal(dc.CollectiveMismatchError, lambda odd, call=call: wait(call(odd)), r == 1))
                assert dc.all_reduce(torch.tensor([r])).tolist() == [3], i  # the group works
        return texts

    for texts in zip(*run(body, range(N)), strict=True):
        assert len({*texts}) == 1, texts
        calls = re.findall(rf"^  rank \d: (.*) at {__file__}:\d+(.*)$", texts[0], re.MULTILINE)
        assert len(calls) == N and calls[1] != calls[0], texts[0]
    unequal = [texts for texts in run(gathers_of_other_sizes, range(N))]
    assert all('sizes="auto"' in text and "split_sizes" not in text for texts in unequal for text in texts), unequal


#: Declared replicated, with values that differ on rank 1; where `odd` is false on all ranks, nothing is raised.
DIFFERING = [
    lambda odd: backward((1.0 + odd) * dc.all_reduce(x_(3), grad_placement="replicate")),
    lambda odd: backward((1.0 + odd) * dc.all_gather(x_(3), grad_placement="replicate", async_op=True).wait()),
    lambda odd: backward((1.0 + odd) * dc.broadcast(x_(3), grad_placement="replicate")),
    lambda odd: backward((1.0 + odd) * dc.all_reduce(x_(3), "product", grad_placement="replicate")),
    lambda odd: dc.sum_gradients(x_(3) * (1.0 + odd)),
    lambda odd: dc.split(x_(3) * (1 + 0.01 * odd)),
    lambda odd: dc.sum_gradients([x_(2), x_(2) + odd]),
    lambda odd: dc.split(torch.tensor([5, 2**60 + odd, 7])),
    lambda odd: dc.split(torch.tensor([5, 2 + odd, 7]).to(torch.uint16)),
    lambda odd: dc.split(torch.tensor([5, 2 + 6 * odd, 7]).to(torch.float8_e4m3fn)),
    lambda odd: dc.split(torch.tensor([float("nan"), 2.0, float("nan") if odd else 3.0])),
]


@runs_on("rules", "gloo")
def test_replicated_values_are_compared(run):
    def body(r):
        with dc.check_mode():
            for call in DIFFERING:
                call(False)
                refusal(dc.CollectiveMismatchError, call, r == 1)
            dc.split(torch.tensor([1.0, float("nan"), float("inf")]))
            x = torch.full((3,), 1 / 3)
            dc.split(x if r == 1 else x * 3 / 3 * (1 + 1e-7))  # rounding is no difference
        return dc.all_reduce(torch.tensor(r)).item()

    assert run(body, range(N)) == [3] * N


numpy_1 = np.int64(1)
SQUARE = torch.arange(9.0).reshape(3, 3)
#: The same call, spelled differently on every rank.
SPELLINGS = [
    [partial(dc.broadcast, src=1, grad_placement=placement) for placement in ("partial", Partial())],
    [partial(dc.all_gather, grad_placement=placement) for placement in ("replicate", Replicate())],
    [
        lambda x: dc.split(SQUARE, 1, sizes=[1, 1, 1]),
        lambda x: dc.split(SQUARE, -1, sizes=(1, numpy_1, torch.tensor(1))),
    ],
    [lambda x: dc.permute(x, [(0, 1), (2, 0)]), lambda x: dc.permute(x, ((2, 0), [0, numpy_1]))],
    [lambda x: dc.shift(x, 1), lambda x: dc.shift(x, -2), lambda x: dc.shift(x, 4)],
    [lambda x: dc.shift(x, 3, wrap=False), lambda x: dc.shift(x, -5, wrap=False)],
    [lambda x: dc.shift(x, 0), lambda x: dc.shift(x, 0, wrap=False), lambda x: dc.shift(x, 3)],
    [lambda x: dc.all_gather(x, 2, stack=True), lambda x: dc.all_gather(x, -1, stack=True)],
    [lambda x: dc.all_gather([x, x[0]])[1], lambda x: dc.all_gather((x, x[0]), sizes=None)[1]],
    [lambda x: dc.gather(x), lambda x: dc.gather(x, sizes=[3, 3, 3])],
    [lambda x: dc.scatter(x), lambda x: dc.scatter(x, dim=-2, sizes=(1, 1, 1))],
    [lambda x: dc.all_to_all(x), lambda x: dc.all_to_all(x, 0, -2, split_sizes=[1] * 3, concat_sizes=(1, 1, 1))],
    [partial(dc.all_reduce, op=op) for op in ("mean", "avg", dist.ReduceOp.AVG)],
    [partial(dc.all_reduce, op=op) for op in ("sum", dist.ReduceOp(dist.ReduceOp.SUM))],
    [partial(dc.all_reduce, op=op) for op in ("min", dist.ReduceOp.MIN)],
    [partial(dc.reduce, dst=dst, op=op) for dst, op in ((1, "product"), (numpy_1, "prod"), (1, dist.ReduceOp.PRODUCT))],
    [lambda x: dc.reduce_scatter(x, "max", -2), lambda x: dc.reduce_scatter(x, dist.ReduceOp.MAX)],
    [lambda x: dc.all_reduce({"a": x, "b": x[0]})["b"], lambda x: dc.all_reduce(OrderedDict(b=x[0], a=x))["b"]],
]


@runs_on("rules", "gloo", "truth")
def test_another_spelling_is_no_disagreement(run):
    def body(r):
        x = SQUARE.roll(r) * (r + 1)
        expected = [calls[0](x) for calls in SPELLINGS]
        with dc.check_mode(run is not truth):
            return expected, [calls[r % len(calls)](x) for calls in SPELLINGS]

    for expected, found in (simulate if run is truth else run)(body, range(N)):
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            assert torch.equal(a, b), i


@runs_on("rules", "gloo")
def test_valid_programs_pass(run):
    """Values and derivatives are those of truth in check mode, too, also in transforms and other modes."""

    def checked(body, ranks):
        def in_check_mode(r):
            with dc.check_mode():
                return body(r)

        return run(in_check_mode, ranks)

    some = properties.every_transform_gives_the_gradients_of_truth, properties.modes_change_nothing
    every = properties.value_and_gradients_to_third_order_are_those_of_truth, *some
    properties.hold([pair for pair in properties.pairs(cases.table(N)) if pair[0] in every], N, checked)


@runs_on("rules", "gloo")
@pytest.mark.parametrize("checked", [False, True])
def test_dimensions_beside_that_of_auto_sizes(run, checked):
    """Compared with the sizes, also without check mode: (1, 3, 4) has as many numbers as (2, 3, 2)."""
    calls = [
        dc.all_gather,
        lambda x, **k: dc.all_gather({"b": x[:1], "a": [x]}, **k),
        lambda x, **k: dc.gather(x, 2, **k),
        lambda x, **k: dc.gather_batch([x], **k),
    ]

    def body(r):
        with dc.check_mode(checked):
            for call in calls:
                for x in (torch.ones(1 + (r == 1), 3, 4 - 2 * (r == 1)), torch.ones(1, 3).to(DTYPES[r])):
                    refusal(dc.CollectiveMismatchError, call, x, sizes="auto")
                call(torch.ones(r, 3), sizes="auto")
        return dc.all_reduce(torch.tensor(r)).item()

    assert run(body, range(N)) == [3] * N


# ── the end of a block ───────────────────────────────────────────────────────────────────────────────────


def early(r):
    if r != 1:
        dc.all_gather(x_(3))


def by_an_error(r):
    if r == 1:
        raise KeyError
    dc.all_gather(x_(3))


def without_a_backward(r):
    y = dc.all_reduce(x_(3))
    with dc.check_mode():
        z = dc.all_reduce(x_(3)) if r != 1 else 0  # noqa: F841
    backward(y)


@runs_on("rules", "gloo")
@pytest.mark.parametrize("leaves", [early, by_an_error, without_a_backward])
def test_a_rank_that_leaves(run, leaves):
    """The rank makes no further call that could be compared; the others do not wait for it."""

    def body(r):
        start = time.monotonic()
        own = KeyError if r == 1 and leaves is by_an_error else dc.CollectiveMismatchError
        with pytest.raises(own), dc.check_mode():
            dc.all_reduce(x_(2))
            leaves(r)
        return dc.all_reduce(torch.ones(1)).item(), time.monotonic() - start < 30

    assert run(body, range(N)) == [(3, True)] * N


def test_a_rank_that_leaves_blocks_with_two_groups():
    """No rank waits in one group for a rank that has raised in the other; both groups work afterwards."""

    def body(r):
        group, sums = dist.new_group(), []
        for makes_another_call in (False, True):
            with pytest.raises(dc.CollectiveMismatchError if r else KeyError), dc.check_mode():
                dc.all_reduce(x_(2))
                with dc.check_mode():
                    dc.all_reduce(x_(2))
                    dc.all_reduce(x_(2), group=group)
                    if r == 0:
                        raise KeyError
                    if makes_another_call:
                        dc.all_reduce(x_(3))
            sums += [dc.all_reduce(torch.ones(1), group=g).item() for g in (None, group)]
        with pytest.raises(KeyError), dc.check_mode():  # all ranks leave alike
            dc.all_reduce(x_(2))
            raise KeyError
        with dc.check_mode():
            dc.all_reduce(x_(2), group=group)
            dist.destroy_process_group(group)  # it is not compared at the end
        return sums

    assert gloo(body, range(N), timeout=30) == [[3.0] * 4] * N


# ── the switch ───────────────────────────────────────────────────────────────────────────────────────────


@runs_on("rules", "gloo")
def test_the_switch(run):
    """Simulated ranks find a disagreement without it, too; each of them has its own."""

    def body(r):
        found = [check_mode.is_on()]
        before = dc.check_mode()
        dc.all_reduce(torch.ones(1))  # runs the other simulated ranks meanwhile
        found.append(check_mode.is_on())
        with dc.check_mode(False):
            found.append(check_mode.is_on())
        found.append(check_mode.is_on())
        with pytest.raises(KeyError), before:
            raise KeyError
        return [*found, check_mode.is_on()]

    assert run(body, range(N)) == [[False, True, False, True, False]] * N
    assert not check_mode.is_on()
