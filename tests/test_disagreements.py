"""Check mode: where ranks disagree about a call, all of them raise one error, and the group works afterwards."""

import inspect
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import gloo, refusal, rules, runs_on, truth
from torch.distributed.tensor import Partial, Replicate

import diffcoll as dc
from diffcoll.collectives import COLLECTIVES
from diffcoll.core import check_mode
from diffcoll.testing import cases, simulate

N = 3
DTYPES = [torch.float32, torch.float32, torch.int32]
RING = [(0, 1), (1, 2), (2, 0)]


def x_(*shape, dtype=torch.float64):
    return torch.ones(*shape, dtype=dtype, requires_grad=dtype.is_floating_point)


def wait(y):
    return y.wait() if isinstance(y, dc.Pending) else y


class Disagreement(NamedTuple):
    """A call that differs on rank 1, where `odd` is true, and what rank 1's line of the error names."""

    call: Callable[[bool], object]
    argument: str


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


def later_in_backward(odd):
    backward(wait(dc.scan(x_(3))) if odd else dc.all_reduce(x_(3), async_op=True).wait())


def gradient_of_another_shape(odd):
    y, z = dc.all_reduce(x_(3)), dc.all_reduce(x_(4))
    backward(y if odd else z)


DISAGREEMENTS = {
    "operation": Disagreement(lambda odd: (dc.shift if odd else dc.all_reduce)(x_(3)), "shift("),
    "order": Disagreement(lambda odd: [f(x_(3)) for f in (dc.scan, dc.all_reduce)[:: -1 if odd else 1]], "all_reduce("),
    "one is skipped": Disagreement(lambda odd: [dc.all_reduce(x_(n)) for n in ([3] if odd else [2, 3])], "(3,)"),
    "op": Disagreement(lambda odd: dc.all_reduce(x_(3), "max" if odd else "min"), "max"),
    "linear or not": Disagreement(lambda odd: dc.all_reduce(x_(3), "max" if odd else "sum"), "max"),
    "sum or mean": Disagreement(lambda odd: dc.reduce_scatter(x_(3), "avg" if odd else "sum"), "mean"),
    "op of blocks": Disagreement(lambda odd: dc.reduce_scatter(x_(3), "max" if odd else "product"), "max"),
    "op at the root": Disagreement(lambda odd: dc.reduce(x_(3), 1, "logsumexp" if odd else "min"), "logsumexp"),
    "shape": Disagreement(lambda odd: dc.all_reduce(x_(3 + odd)), "(4,)"),
    "shape, of as many numbers": Disagreement(lambda odd: dc.all_reduce(x_(2, 3) if odd else x_(3, 2)), "(2, 3)"),
    "shape of a reduction": Disagreement(lambda odd: dc.all_reduce(x_(2, 3) if odd else x_(3, 2), "max"), "2, 3)"),
    "shape of a reduction at the root": Disagreement(
        lambda odd: dc.reduce(x_(1) if odd else x_(1)[0], 1, "max"), "max"
    ),
    "shape beside sizes": Disagreement(lambda odd: dc.all_gather(x_(2, 3 + odd), sizes=[2, 2, 2]), "(2, 4)"),
    "a stack": Disagreement(lambda odd: dc.all_gather(x_(3) if odd else x_(1, 3), stack=odd), "stacked"),
    "a 0-d tensor": Disagreement(lambda odd: dc.gather(x_(1)[0] if odd else x_(1), sizes=[1] * 3), "stacked"),
    "dtype": Disagreement(lambda odd: dc.broadcast(x_(3, dtype=torch.float32 if odd else torch.float64)), "float32"),
    "dtype of a mean": Disagreement(
        lambda odd: dc.all_reduce(x_(3, dtype=torch.bfloat16 if odd else torch.float16), "mean"), "bfloat16"
    ),
    "dim": Disagreement(lambda odd: dc.all_gather(x_(3, 3), int(odd)), "dim=1"),
    "dim of split": Disagreement(lambda odd: dc.split(x_(3, 3), int(odd)), "dim=1"),
    "sizes": Disagreement(lambda odd: dc.all_gather(x_(2), sizes=[1, 2, 2] if odd else [2, 2, 2]), "(1, 2, 2)"),
    "sizes of blocks": Disagreement(
        lambda odd: dc.reduce_scatter(x_(3), sizes=[0, 1, 2] if odd else None), "(0, 1, 2)"
    ),
    "sizes of gather": Disagreement(lambda odd: dc.gather(x_(2), sizes=[1, 2, 3] if odd else [2, 2, 2]), "(1, 2, 3)"),
    "sizes of scatter": Disagreement(lambda odd: dc.scatter(x_(6), sizes=[1, 2, 3] if odd else [2, 2, 2]), "(1, 2, 3)"),
    "sizes or auto": Disagreement(lambda odd: dc.all_gather(x_(2), sizes="auto" if odd else [2, 2, 2]), "all_gather("),
    "src": Disagreement(lambda odd: dc.broadcast(x_(3), src=2 * odd), "src=2"),
    "src of scatter": Disagreement(lambda odd: dc.scatter(x_(3), src=2 * odd), "src=2"),
    "dst": Disagreement(lambda odd: dc.reduce(x_(3), dst=int(odd)), "dst=1"),
    "dst of gather": Disagreement(lambda odd: dc.gather(x_(3), dst=int(odd)), "dst=1"),
    "pairs": Disagreement(lambda odd: dc.permute(x_(3), RING[:2] if odd else RING), "pairs=((0, 1), (1, 2))"),
    "offset": Disagreement(lambda odd: dc.shift(x_(3), 1 + odd), "pairs=((0, 2)"),
    "reverse": Disagreement(lambda odd: dc.scan(x_(3), reverse=odd), "reverse=True"),
    "exclusive": Disagreement(lambda odd: dc.scan(x_(3), exclusive=odd), "exclusive=True"),
    "grad_placement": Disagreement(
        lambda odd: dc.all_reduce(x_(3), grad_placement="replicate" if odd else "partial"), "replicate"
    ),
    "grad_placement of a reduction": Disagreement(
        lambda odd: dc.all_reduce(x_(3), "max", grad_placement="replicate" if odd else "partial"), "replicate"
    ),
    "split_dim": Disagreement(lambda odd: dc.all_to_all(x_(3, 3), split_dim=int(odd), concat_dim=0), "split_dim=1"),
    "split_sizes": Disagreement(
        lambda odd: dc.all_to_all(x_(3, 2), 0, 1, split_sizes=[0, 1, 2] if odd else [1, 1, 1]), "split_sizes=(0, 1, 2)"
    ),
    "concat_sizes": Disagreement(
        lambda odd: dc.all_to_all(x_(3), split_sizes=[1, 1, 1], concat_sizes=[1, 1, 2] if odd else [1, 1, 1]),
        "concat_sizes=(1, 1, 2)",
    ),
    "blocks of all_to_all": Disagreement(lambda odd: dc.all_to_all(x_(6 if odd else 3)), "split_sizes=(2, 2, 2)"),
    "other dims of all_to_all": Disagreement(lambda odd: dc.all_to_all(x_(3, 2 if odd else 4)), "(3, 2)"),
    "async or not": Disagreement(lambda odd: wait(dc.all_reduce(x_(3), async_op=odd)), "async_op=True"),
    "shape, later": Disagreement(lambda odd: dc.all_reduce(x_(3 + odd), async_op=True).wait(), "(4,)"),
    "batched by vmap": Disagreement(
        lambda odd: torch.vmap(lambda x: dc.all_reduce(x_(3) if odd else x) + x)(x_(2, 3)), "(3,)"
    ),
    "batches of other sizes": Disagreement(
        lambda odd: torch.vmap(torch.func.grad(lambda x: dc.scan(x).sum()))(x_(2 + odd, 3)), "(3, 3)"
    ),
    "sizes of a batch": Disagreement(lambda odd: dc.gather_batch(x_(3), sizes=[2, 3, 2] if odd else [3] * 3), "2"),
    # trees
    "leaves": Disagreement(lambda odd: dc.all_reduce([x_(3)] * (1 + odd)), "x[1]: torch.float64 (3,)"),
    "paths": Disagreement(lambda odd: dc.broadcast({"b": x_(3), "c" if odd else "a": x_(3)}), "x['c']"),
    "shapes of leaves": Disagreement(
        lambda odd: dc.all_reduce({"a": x_(2 + odd), "b": x_(3 - odd)}, "max"), "x['a']: torch.float64 (3,)"
    ),
    "gathered leaves": Disagreement(lambda odd: dc.all_gather([x_(2 + odd), x_(3 - odd)]), "x[0]: torch.float64 (3,)"),
    "shapes of leaves beside sizes": Disagreement(
        lambda odd: dc.all_gather([x_(2, 3, 4) if odd else x_(2, 4, 3)], sizes=[2, 2, 2]), "(-1, 3, 4)"
    ),
    "dim of leaves": Disagreement(lambda odd: dc.all_gather([x_(3, 3)], int(odd)), "along dim 1"),
    "leaves in a stack": Disagreement(lambda odd: dc.all_gather([x_(3, 3)], stack=odd), "(1, 3, 3) along dim 0"),
    "dtypes of leaves": Disagreement(
        lambda odd: dc.sum_gradients([x_(2), x_(2, dtype=torch.float32 if odd else torch.int64)]), "torch.float32"
    ),
    "sizes of leaves": Disagreement(
        lambda odd: dc.all_gather([x_(2), x_(2)], sizes=[1, 2, 2] if odd else [2, 2, 2]), "all_gather("
    ),
    "a tree or a tensor": Disagreement(lambda odd: dc.all_gather(x_(3) if odd else [x_(3)]), "all_gather("),
    "an empty tree": Disagreement(lambda odd: dc.all_gather([x_(3)] if odd else []), "x[0]"),
    # backward
    "backward of one of two": Disagreement(
        lambda odd: backward(*[f(x_(3)) for f in (dc.all_reduce, dc.scan)][: 2 - odd]), "backward of call 2, all_reduce"
    ),
    "backward of another call": Disagreement(uses_another_result, "backward of call 3, all_reduce"),
    "backward of another wait": Disagreement(uses_another_wait, "backward of call 3, all_gather"),
    "forward or backward": Disagreement(forward_or_backward, "call 3: all_reduce("),
    "second order": Disagreement(second_order_of_one, "second-order backward of call 2, all_reduce"),
    "later, in backward": Disagreement(later_in_backward, "scan("),
    "gradient of another shape": Disagreement(gradient_of_another_shape, "backward of call 2, all_reduce"),
}


@runs_on("rules", "gloo")
def test_disagreements(run):
    def body(r):
        texts = {}
        with dc.check_mode():
            for name, disagreement in DISAGREEMENTS.items():
                texts[name] = refusal(dc.CollectiveMismatchError, disagreement.call, r == 1)
                assert dc.all_reduce(torch.tensor([r])).tolist() == [3], name  # the group works
        return texts

    of_ranks = run(body, range(N), timeout=100) if run is gloo else run(body, range(N))
    for name, (_, argument) in DISAGREEMENTS.items():
        text = of_ranks[0][name]
        assert {of_rank[name] for of_rank in of_ranks} == {text}
        lines = text.splitlines()[-N:]
        assert [line.split(":")[0] for line in lines] == [f"  rank {r}" for r in range(N)]
        assert all(f" at {__file__}:" in line for line in lines), text
        assert argument in lines[1], (name, text)


#: Declared replicated, with values that differ on rank 1; where `odd` is false on all ranks, nothing is raised.
DIFFERING = {
    "a gradient": lambda odd: backward((1.0 + odd) * dc.all_reduce(x_(3), grad_placement="replicate")),
    "a gradient, later": lambda odd: backward(
        (1.0 + odd) * dc.all_gather(x_(3), grad_placement="replicate", async_op=True).wait()
    ),
    "a gradient of broadcast": lambda odd: backward((1.0 + odd) * dc.broadcast(x_(3), grad_placement="replicate")),
    "a product's": lambda odd: backward((1.0 + odd) * dc.all_reduce(x_(3), "product", grad_placement="replicate")),
    "x of sum_gradients": lambda odd: dc.sum_gradients(x_(3) * (1.0 + odd)),
    "x of split": lambda odd: dc.split(x_(3) * (1 + 0.01 * odd)),
    "a leaf": lambda odd: dc.sum_gradients([x_(2), x_(2) + odd]),
    "integers": lambda odd: dc.split(torch.tensor([5, 2**60 + odd, 7])),
    "NaN": lambda odd: dc.split(torch.tensor([float("nan"), 2.0, float("nan") if odd else 3.0])),
}


@runs_on("rules", "gloo")
def test_replicated_values_are_compared(run):
    def body(r):
        with dc.check_mode():
            for call in DIFFERING.values():
                call(False)
                refusal(dc.CollectiveMismatchError, call, r == 1)
            dc.split(torch.tensor([1.0, float("nan"), float("inf")]))
            x = torch.full((3,), 1 / 3)
            dc.split(x if r == 1 else x * 3 / 3 * (1 + 1e-7))  # rounding is no difference
        return dc.all_reduce(torch.tensor(r)).item()

    assert run(body, range(N)) == [3] * N


def one_call_of_each():
    """Every collective, now and later, on a tensor of three numbers and on a tree; what asks for sizes; every op."""
    calls = {name: getattr(dc, name) for name in COLLECTIVES} | {"permute": lambda x, **k: dc.permute(x, RING, **k)}
    later = {f"{name}, later": partial(call, async_op=True) for name, call in calls.items() if takes(name, "async_op")}
    trees = {
        f"{name} of a tree": lambda x, call=calls[name]: call({"a": x, "b": [x.float()]})
        for name in ("all_reduce", "all_gather", "broadcast", "sum_gradients")
    }
    ops = {
        f"{f.__name__} {op}": partial(f, op=op)
        for f in (dc.all_reduce, dc.reduce_scatter, dc.reduce)
        for op in ("mean", "product", "max", "min", "logsumexp")
    }
    return {
        **(calls | later | trees | ops),
        "sizes": lambda x: dc.all_gather(x, sizes="auto"),
        "sizes of a tree": lambda x: dc.all_gather([x], sizes="auto"),
        "sizes of gather": lambda x: dc.gather(x, sizes="auto"),
        "sizes of all_to_all": lambda x: dc.all_to_all(x, split_sizes=[1, 1, 1], concat_sizes="auto"),
        "global_mean": dc.global_mean,
        "gather_batch": dc.gather_batch,
        "ring": lambda x: list(dc.ring(x)),
        "halo_exchange": lambda x: dc.halo_exchange(x, 0, 1, 1),
    }


def takes(name, argument):
    return argument in inspect.signature(getattr(dc, name)).parameters


@runs_on("rules", "gloo")
def test_every_call_is_compared(run):
    """With another collective on rank 1, before any data is sent."""
    calls = one_call_of_each()

    def body(r):
        with dc.check_mode():
            for name, call in calls.items():
                another = dc.scan if name != "scan" else dc.shift
                refusal(dc.CollectiveMismatchError, lambda f: wait(f(x_(3))), another if r == 1 else call)
                assert dc.all_reduce(torch.tensor([r])).tolist() == [3], name

    run(body, range(N))


numpy_1 = np.int64(1)
SQUARE = torch.arange(9.0).reshape(3, 3)
#: The same call, spelled differently on every rank.
SPELLINGS = [
    [lambda x: dc.broadcast(x, 1), lambda x: dc.broadcast(x, numpy_1)],
    [lambda x: dc.split(SQUARE, 1), lambda x: dc.split(SQUARE, numpy_1)],
    [lambda x: dc.split(SQUARE, 1, sizes=[1, 1, 1]), lambda x: dc.split(SQUARE, -1, sizes=(1, numpy_1, 1))],
    [lambda x: dc.permute(x, [(0, 1), (2, 0)]), lambda x: dc.permute(x, ((2, 0), [0, numpy_1]))],
    [lambda x: dc.shift(x, 1), lambda x: dc.shift(x, -2), lambda x: dc.shift(x, 4)],
    [lambda x: dc.shift(x, 3, wrap=False), lambda x: dc.shift(x, -5, wrap=False)],
    [lambda x: dc.shift(x, 0), lambda x: dc.shift(x, 0, wrap=False), lambda x: dc.shift(x, 3)],
    [lambda x: dc.all_gather(x, 0, sizes=[3, 3, 3]), lambda x: dc.all_gather(x, -2, sizes=(3, 3, np.int64(3)))],
    [lambda x: dc.all_gather(x, 2, stack=True), lambda x: dc.all_gather(x, -1, stack=True)],
    [lambda x: dc.all_gather([x, x[0]])[1], lambda x: dc.all_gather((x, x[0]))[1]],
    [lambda x: dc.gather(x), lambda x: dc.gather(x, sizes=[3, 3, 3])],
    [lambda x: dc.scatter(x), lambda x: dc.scatter(x, dim=-2, sizes=(1, 1, 1))],
    [lambda x: dc.all_to_all(x), lambda x: dc.all_to_all(x, 0, -2, split_sizes=[1] * 3, concat_sizes=(1, 1, 1))],
    [partial(dc.all_reduce, op=op) for op in ("mean", "avg", dist.ReduceOp.AVG)],
    [partial(dc.all_reduce, op=op) for op in ("sum", dist.ReduceOp(dist.ReduceOp.SUM))],
    [partial(dc.all_reduce, op=op) for op in ("min", dist.ReduceOp.MIN)],
    [partial(dc.all_reduce, op=op) for op in ("product", "prod", dist.ReduceOp.PRODUCT)],
    [lambda x: dc.all_reduce(x, grad_placement="replicate"), lambda x: dc.all_reduce(x, grad_placement=Replicate())],
    [lambda x: dc.all_gather(x, grad_placement=Replicate()), lambda x: dc.all_gather(x, grad_placement="replicate")],
    [lambda x: dc.broadcast(x, grad_placement="partial"), lambda x: dc.broadcast(x, grad_placement=Partial())],
    [lambda x: dc.reduce(x, 1, "prod"), lambda x: dc.reduce(x, numpy_1, dist.ReduceOp.PRODUCT)],
    [lambda x: dc.reduce_scatter(x, "max", -2), lambda x: dc.reduce_scatter(x, dist.ReduceOp.MAX)],
    [lambda x: dc.all_reduce({"a": x, "b": x[0]})["b"], lambda x: dc.all_reduce(OrderedDict(b=x[0], a=x))["b"]],
]


@runs_on("rules", "gloo", "truth")
def test_another_spelling_is_no_disagreement(run):
    def body(r):
        x = torch.arange(9.0).reshape(3, 3).roll(r) * (r + 1)
        expected = [calls[0](x) for calls in SPELLINGS]
        with dc.check_mode(run is not truth):
            return expected, [calls[r % len(calls)](x) for calls in SPELLINGS]

    for expected, found in (simulate if run is truth else run)(body, range(N)):
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            assert torch.equal(a, b), i


@runs_on("rules", "gloo")
def test_valid_programs_pass(run):
    """All calls, to second order, and under transforms: no error, and the same values as without check mode."""
    few = cases.table(N)[:: 3 if run is gloo else 1]
    transformed = [
        lambda x: torch.func.grad(lambda x: dc.scan(x).square().sum())(x),
        lambda x: torch.func.jvp(lambda x: dc.all_reduce(x, "max").sin(), (x,), (x.cos(),))[1],
        lambda x: torch.func.hessian(lambda x: dc.all_reduce(x, "logsumexp").square().sum())(x),
        lambda x: torch.vmap(torch.func.grad(lambda x: dc.scatter(x, sizes=[1, 2, 0]).sum()))(x),
        lambda x: torch.func.grad(lambda x: dc.all_gather([x, x.sin()], sizes="auto")[1].sum())(x),
        lambda x: torch.func.grad(lambda x: dc.split(x.detach() * 0 + x * 0, 1).sum())(x),
    ]

    def body(r):
        found = []
        for on in (False, True):
            with dc.check_mode(on):
                for case in few:
                    m = cases.on_rank(case, r, 4)
                    found += [m.output, m.gradient, m.second]
                found += [call(torch.ones(2, 3, dtype=torch.float64) / (r + 1)) for call in transformed]
        return found

    for of_rank in run(body, range(N)):
        half = len(of_rank) // 2
        assert all(map(torch.equal, of_rank[:half], of_rank[half:]))


@runs_on("rules", "gloo")
@pytest.mark.parametrize("checked", [False, True])
def test_dimensions_beside_that_of_auto_sizes(run, checked):
    """Compared with the sizes, also without check mode: (1, 3, 4) has as many numbers as (2, 3, 2)."""
    calls = [
        lambda x, **k: dc.all_gather(x, **k),
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


def leaves_early(r):
    with dc.check_mode():
        dc.all_reduce(x_(2))
        if r != 1:
            dc.all_gather(x_(3))


def leaves_by_an_error(r):
    with dc.check_mode():
        dc.all_reduce(x_(2))
        if r == 1:
            raise KeyError
        dc.all_gather(x_(3))


def skips_a_backward(r):
    with dc.check_mode():
        y = dc.all_reduce(x_(3))
        with dc.check_mode():
            z = dc.all_reduce(x_(3)) if r != 1 else 0  # noqa: F841
        backward(y)


@runs_on("rules", "gloo")
@pytest.mark.parametrize(
    ("leaves", "own"),
    [
        (leaves_early, dc.CollectiveMismatchError),
        (leaves_by_an_error, KeyError),
        (skips_a_backward, dc.CollectiveMismatchError),
    ],
)
def test_a_rank_that_leaves(run, leaves, own):
    """The rank makes no further call that could be compared; the others do not wait for it."""

    def body(r):
        start = time.monotonic()
        with pytest.raises(own if r == 1 else dc.CollectiveMismatchError):
            leaves(r)
        return dc.all_reduce(torch.ones(1)).item(), time.monotonic() - start < 30

    assert run(body, range(N)) == [(3, True)] * N


def test_a_rank_that_leaves_blocks_with_two_groups():
    """No rank waits in one group for a rank that has raised in the other; both groups work afterwards."""

    def leaves(r, group, call):
        with dc.check_mode():
            dc.all_reduce(x_(2))
            with dc.check_mode():
                dc.all_reduce(x_(2))
                dc.all_reduce(x_(2), group=group)
                if r == 0:
                    raise KeyError
                call()

    def body(r):
        group, sums = dist.new_group(), []
        for call in (lambda: None, lambda: dc.all_reduce(x_(3))):
            with pytest.raises(dc.CollectiveMismatchError if r else KeyError):
                leaves(r, group, call)
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


def is_on(r):
    return check_mode.is_on()  # simulated ranks find a disagreement without it, too


@runs_on("rules", "gloo")
def test_the_switch(run):
    def body(r):
        found = [is_on(r)]
        before = dc.check_mode()
        found.append(is_on(r))
        with dc.check_mode(False):
            found.append(is_on(r))
        found.append(is_on(r))
        with pytest.raises(KeyError), before:
            raise KeyError
        return [*found, is_on(r)]

    assert run(body, range(N)) == [[False, True, False, True, False]] * N


def test_each_simulated_rank_has_its_own():
    def body(r):
        with dc.check_mode():
            dc.all_reduce(torch.ones(1))  # runs the other ranks meanwhile
        return is_on(r)

    assert rules(body, range(N)) == rules(is_on, range(N)) == [False] * N
