"""Check mode: if ranks disagree, all of them raise an error, and the group works afterwards."""

import inspect
import re
import time
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import gloo, python, refusal, rules, runs_on, truth

import diffcoll as dc
from diffcoll.core import checks
from diffcoll.core.arguments import TAKE_TREES
from diffcoll.testing import cases, simulate

N = 3
ring = [(0, 1), (1, 2), (2, 0)]


def x_(*shape, dtype=torch.float64):
    return torch.ones(*shape, dtype=dtype, requires_grad=dtype.is_floating_point)


def wait(y):
    return y.wait() if isinstance(y, dc.Pending) else y


# A call that differs on rank 1, where `odd` is true, and a pattern that the error must match.
DISAGREEMENTS = {
    "operation": (lambda odd: dc.all_gather(x_(3)) if odd else dc.all_reduce(x_(3)), r"rank 1: all_gather\("),
    "op": (lambda odd: dc.all_reduce(x_(3), "max" if odd else "sum"), "op='max'"),
    "sum or mean": (lambda odd: dc.reduce_scatter(x_(3), "avg" if odd else "sum"), "op='mean'"),
    "ties": (lambda odd: dc.all_reduce(x_(3), "max", ties="first" if odd else "even"), "ties='first'"),
    "order of the sum": (lambda odd: dc.all_reduce(x_(3), deterministic=odd), "rank 1: .*deterministic=True"),
    "order of the gradient's sum": (
        lambda odd: dc.reduce_scatter(x_(3), "max", deterministic=odd),
        "rank 1: .*deterministic=True",
    ),
    "shape": (lambda odd: dc.all_reduce(x_(4 if odd else 3)), r"float64 \(4,\)"),
    "same size, other shape": (lambda odd: dc.all_reduce(x_(2, 3) if odd else x_(3, 2)), r"\(2, 3\)"),
    "dtype": (lambda odd: dc.broadcast(x_(3, dtype=torch.float32 if odd else torch.float64)), "float32"),
    "dim": (lambda odd: dc.all_gather(x_(3, 3), 1 if odd else 0), "dim=1"),
    "sizes": (lambda odd: dc.all_gather(x_(2), sizes=[1, 2, 2] if odd else [2, 2, 2]), r"sizes=\[1, 2, 2\]"),
    "sizes or auto": (lambda odd: dc.all_gather(x_(2), sizes="auto" if odd else [2, 2, 2]), "sizes='auto'"),
    "root": (lambda odd: dc.broadcast(x_(3), src=2 if odd else 0), "src=2"),
    "root of scatter": (lambda odd: dc.scatter(x_(3), src=2 if odd else 0), "src=2"),
    "pairs": (lambda odd: dc.permute(x_(3), ring[:2] if odd else ring), r"pairs=\[\(0, 1\), \(1, 2\)\]"),
    "grad_placement": (lambda odd: dc.all_reduce(x_(3), grad_placement="replicate" if odd else "partial"), "replicate"),
    "order": (lambda odd: [c(x_(3)) for c in ((dc.scan, dc.shift) if odd else (dc.shift, dc.scan))], r"rank 1: scan\("),
    "one is skipped": (lambda odd: [dc.all_reduce(x_(n)) for n in ([3] if odd else [2, 3])], r"rank 0: .*\(2,\)"),
    "sizes of all_to_all": (
        lambda odd: dc.all_to_all(x_(3), split_sizes=[1, 1, 1], concat_sizes=[1, 1, 2] if odd else [1, 1, 1]),
        r"disagree: rank 2 sends \(1,\) to rank 1, which expects \(2,\)\n.*\n  rank 1: .*concat_sizes=\[1, 1, 2\]",
    ),
    "the other dims of all_to_all": (
        lambda odd: dc.all_to_all(x_(3, 2 if odd else 4)),
        r"disagree: rank 0 sends \(1, 4\) to rank 1, which expects \(1, 2\)\n",
    ),
    "async": (lambda odd: dc.all_reduce(x_(4 if odd else 3), async_op=True).wait(), r"\(4,\)"),
    "async or not": (lambda odd: wait(dc.all_reduce(x_(3), async_op=odd)), r"rank 1: .*, async_op=True\) at"),
    "auto or a list in all_to_all": (
        lambda odd: dc.all_to_all(x_(3), split_sizes=[1, 1, 1], concat_sizes="auto" if odd else [1, 1, 1]),
        "rank 1: .*concat_sizes='auto'",
    ),
    "leaves": (
        lambda odd: dc.all_reduce([x_(3)] * (2 if odd else 1)),
        r"rank 0: .*\n.* differs: missing\n  rank 1: .*\n.* differs: x\[1\]: torch.float64 \(3,\)",
    ),
    "paths of leaves": (
        lambda odd: dc.broadcast({"b": x_(3), "c" if odd else "a": x_(3)}),
        r"differs: x\['a'\]: .*\n  rank 1: .*\n.* differs: x\['b'\]: ",
    ),
    "as many numbers in other leaves": (
        lambda odd: dc.all_reduce({"a": x_(3 if odd else 2), "b": x_(2 if odd else 3)}, "max"),
        r"rank 0: .*\n.* differs: x\['a'\]: torch.float64 \(2,\)\n  rank 1: .*\n.* differs: x\['a'\]: .* \(3,\)",
    ),
    "as many numbers in other leaves, gathered": (
        lambda odd: dc.all_gather([x_(3 if odd else 2), x_(2 if odd else 3)]),
        r"differs: x\[0\]: torch.float64 \(2,\)\n",
    ),
    "dtypes of leaves": (
        lambda odd: dc.sum_gradients([x_(2), x_(2, dtype=torch.float32 if odd else torch.int64)]),
        r"differs: x\[1\]: torch.int64 \(2,\)\n",
    ),
    "other dims of leaves": (
        lambda odd: dc.all_gather({"a": x_(odd + 1, 2), "b": x_(odd + 1, 3 + odd)}, sizes="auto"),
        r"differs: x\['b'\]: torch.float64 \(\(\), 3\)\n",
    ),
    "sizes of leaves": (
        lambda odd: dc.all_gather([x_(2), x_(2)], sizes=[1, 2, 2] if odd else [2, 2, 2]),
        r"differs: x\[0\]: torch.float64 \(2,\)\n.*\n.*differs: x\[0\]: torch.float64 \(\(1, 2, 2\),\)\n",
    ),
    "a tree or a tensor": (lambda odd: dc.all_gather(x_(3) if odd else [x_(3)]), r"rank 1: all_gather\(torch.float64"),
    "an empty tree": (lambda odd: dc.all_gather([x_(3)] if odd else []), r"rank 1: .*\n.* differs: x\[0\]"),
    "batched by vmap": (
        lambda odd: torch.vmap(lambda x: dc.all_reduce(x_(3) if odd else x) + x)(x_(2, 3)),
        r"rank 0: all_reduce\(torch.float64 \(3,\), batched by 2, .*\n  rank 1: all_reduce\(torch.float64 \(3,\), op",
    ),
    "batches of other sizes": (
        lambda odd: torch.vmap(torch.func.grad(lambda x: dc.scan(x).sum()))(x_(2 + odd, 3)),
        r"rank 1: scan\(torch.float64 \(3,\), batched by 3, ",
    ),
    "an average": (lambda odd: dc.average_gradients([x_(3 + odd)], weight=1.0), r"differs: x\[0\]: .*\(3,\)"),
    "a mean": (lambda odd: dc.global_mean(x_(3 + odd)), r"\(2, 4\)"),
}


def backward_of_another(odd):
    a, b = dc.all_reduce(x_(3)), dc.all_gather(x_(3))
    (a.sum() if odd else a.sum() + b.sum()).backward()


def gradient_of_another_shape(odd):
    x = x_(3)
    y = dc.all_reduce(x)
    z = dc.all_reduce(x_(4))
    (y if odd else z).sum().backward()


def not_replicated(odd):
    y = dc.all_reduce(x_(3), grad_placement="replicate")
    (y.sum() * (2 if odd else 1)).backward()


def not_one_tensor(odd):
    dc.sum_gradients(x_(3) * (2 if odd else 1))


F = dc.nn.functional
DISAGREEMENTS |= {
    "option of a loss": (
        lambda odd: F.clip_loss(x_(3, 2), x_(3, 2), 2.0, normalize=odd),
        "rank 1: clip_loss.*normalize=True",
    ),
    "number of a loss": (lambda odd: F.barlow_twins_loss(x_(4, 2), -x_(4, 2), lambd=1.0 + odd), "lambd=2.0"),
    "rank_reduction": (
        lambda odd: F.info_nce_loss(x_(3, 2), -x_(3, 2), rank_reduction="sum" if odd else "mean"),
        r"rank 1: info_nce_loss.*rank_reduction='sum'",
    ),
    "another loss": (
        lambda odd: (F.iou_loss if odd else F.dice_loss)(x_(3, 2).abs() / 99, x_(3, 2) * 0),
        r"rank 1: iou_loss\(.*smooth=1.0",
    ),
    "number of a module": (lambda odd: dc.nn.VICRegLoss(eps=1e-4 * (1 + odd))(x_(4, 2), -x_(4, 2)), "eps=0.0002"),
    "eps of a layer": (
        lambda odd: dc.nn.SyncBatchNorm(2, eps=1e-3 if odd else 1e-5).double()(x_(4, 2)),
        r"rank 1: SyncBatchNorm\(eps=0.001, momentum=0.1, weight='tensor', bias='tensor'\)",
    ),
    "dims of moments": (lambda odd: F.moments(x_(3, 3), int(odd)), r"rank 1: moments\(dim=\(1,\), weight=None"),
    "weights of a mean": (
        lambda odd: F.weighted_mean(x_(3), weight=torch.ones(3) if odd else None),
        r"rank 1: weighted_mean\(dim=\(0,\), weight='tensor'\)",
    ),
}

DISAGREEMENTS |= {
    "backward of another": (backward_of_another, r"rank 1: backward of all_reduce at .*: gradient"),
    "gradient of another shape": (gradient_of_another_shape, r"rank 1: backward of all_reduce .*\(3,\)"),
    "gradient that differs": (not_replicated, "backward of all_reduce at .*: declared replicated, but it differs by 1"),
    "copies that differ": (not_one_tensor, "sum_gradients at .*: declared replicated, but it differs by 1"),
}


@runs_on("rules", "gloo", "mpi")
def test_disagreements(run):
    def body(r):
        texts = {}
        with dc.check_mode():
            for name, (call, _) in DISAGREEMENTS.items():
                texts[name] = refusal(dc.CollectiveMismatchError, call, r == 1)
                assert dc.all_reduce(torch.tensor([r])).tolist() == [3], name  # the group works
        return texts

    got = run(body, range(N))
    for name, (_, words) in DISAGREEMENTS.items():
        texts = [of_rank[name] for of_rank in got]
        if "declared replicated" not in words:  # there each rank names its own line
            assert texts[0] == texts[1] == texts[2]
            assert texts[0].count(f" at {__file__}:") >= N
            for r in range(N):
                assert f"\n  rank {r}: " in texts[0]
        for text in texts:
            assert re.search(words, text), (name, text)


TENSORS = {name: getattr(dc, name) for name in sorted({case.name for case in cases.table(N)})} | {
    "permute": lambda x, **more: dc.permute(x, ring, **more)
}
LATER = {
    name: partial(call, async_op=True)
    for name, call in TENSORS.items()
    if "async_op" in inspect.signature(getattr(dc, name)).parameters
}
TREES = {
    f"{name} of a tree": lambda x, call=call, **more: call({"a": x, "b": [x.float()]}, **more)
    for name, call in TENSORS.items()
    if name in TAKE_TREES
}
MORE = {
    "sizes": lambda x: dc.all_gather(x, sizes="auto"),
    "sizes of a tree": lambda x: dc.all_gather([x], sizes="auto"),
    "sizes of gather": lambda x: dc.gather(x, sizes="auto"),
    "sizes of blocks": lambda x: dc.all_to_all(x, split_sizes=[1, 1, 1], concat_sizes="auto"),
    "average_gradients": lambda x: dc.average_gradients([x]),
    "global_mean": dc.global_mean,
    "product": lambda x: dc.all_reduce(x, "product"),
    "product of blocks": lambda x: dc.reduce_scatter(x, "product"),
    "mean, later": lambda x: dc.all_reduce([x], "mean", async_op=True),
    "gathered, later": lambda x: dc.all_gather([x], async_op=True),
}


@runs_on("rules", "gloo")
def test_every_call_is_compared(run):
    """Compared with another collective on rank 1, before any data is sent."""
    calls = TENSORS | {f"{name}, later": call for name, call in LATER.items()} | TREES | MORE

    def body(r):
        sums = []
        with dc.check_mode():
            for name, call in calls.items():
                another = dc.scan if name != "scan" else dc.shift
                with pytest.raises(dc.CollectiveMismatchError, match=r" disagree:\n  rank 0: "):
                    wait((another if r == 1 else call)(x_(3)))
                y = dc.all_reduce(torch.tensor([r]))
                sums.append(y.item())
        return sums

    assert run(body, range(N)) == [[3] * len(calls)] * N


numpy_1 = np.int64(1)
SAME = torch.arange(9.0).reshape(3, 3)
# The same call, spelled differently on every rank.
SPELLINGS = {
    "an integer of NumPy": [lambda x: dc.broadcast(x, 1), lambda x: dc.broadcast(x, numpy_1)],
    "dim of NumPy": [
        lambda x: dc.split(SAME, 1),
        lambda x: dc.split(SAME, numpy_1),
        lambda x: dc.split(SAME, -1, sizes=(1, 1, 1)),
    ],
    "pairs": [
        lambda x: dc.permute(x, [(0, 1), (2, 0)]),
        lambda x: dc.permute(x, ((2, 0), (0, 1))),
        lambda x: dc.permute(x, [[0, numpy_1], [2, 0]]),
    ],
    "offset": [lambda x: dc.shift(x, 1), lambda x: dc.shift(x, -2), lambda x: dc.shift(x, 4)],
    "offset, on a line": [lambda x: dc.shift(x, 3, wrap=False), lambda x: dc.shift(x, -5, wrap=False)],
    "offset 0": [lambda x: dc.shift(x, 0), lambda x: dc.shift(x, 0, wrap=False), lambda x: dc.shift(x, 3)],
    "sizes": [
        lambda x: dc.all_gather(x),
        lambda x: dc.all_gather(x, sizes=[3, 3, 3]),
        lambda x: dc.all_gather(x, -2, sizes=(3, 3, np.int64(3))),
    ],
    "sizes of a tree": [
        lambda x: dc.all_gather([x, x[0]])[1],
        lambda x: dc.all_gather((x, x[0]), sizes=[3, 3, 3])[1],
        lambda x: dc.all_gather([x, x[0]], sizes=(3, 3, 3))[1],
    ],
    "sizes of gather": [lambda x: dc.gather(x), lambda x: dc.gather(x, sizes=[3, 3, 3])],
    "sizes of blocks": [lambda x: dc.reduce_scatter(x), lambda x: dc.reduce_scatter(x, sizes=(1, 1, 1))],
    "sizes of scatter": [
        lambda x: dc.scatter(x),
        lambda x: dc.scatter(None),
        lambda x: dc.scatter(x, dim=1, sizes=[9]),
    ],
    "sizes of all_to_all": [
        lambda x: dc.all_to_all(x),
        lambda x: dc.all_to_all(x, 0, -2, split_sizes=[1, 1, 1], concat_sizes=(1, 1, 1)),
    ],
    "mean": [
        lambda x: dc.all_reduce(x, "mean"),
        lambda x: dc.all_reduce(x, "AVG"),
        lambda x: dc.all_reduce(x, dist.ReduceOp.AVG),
    ],
    "sum": [
        lambda x: dc.all_reduce(x),
        lambda x: dc.all_reduce(x, dist.ReduceOp.SUM, ties="first"),
        lambda x: dc.all_reduce(x, "SUM"),
    ],
    "product": [lambda x: dc.reduce(x, 1, "prod"), lambda x: dc.reduce(x, numpy_1, dist.ReduceOp.PRODUCT)],
    "max": [lambda x: dc.reduce_scatter(x, "amax", -2), lambda x: dc.reduce_scatter(x, "max", ties="even")],
    "a function": [lambda x: dc.all_reduce(x, lambda s: s.median(0).values), lambda x: dc.all_reduce(x, cases.median)],
    "a stack": [lambda x: dc.all_gather(x, 2, stack=True), lambda x: dc.all_gather(x, -1, stack=True)],
    "order of keys": [
        lambda x: dc.all_reduce({"a": x, "b": x[0]})["b"],
        lambda x: dc.all_reduce({"b": x[0], "a": x})["b"],
    ],
    "kinds of dicts": [
        lambda x: dc.all_reduce({1: x, "b": (x, x[0])})["b"][1],
        lambda x: dc.all_reduce(OrderedDict([("b", [x, x[0]]), (1, x)]))["b"][1],
    ],
}


@runs_on("rules", "gloo", "mpi", "truth")
def test_another_spelling_is_no_disagreement(run):
    def body(r):
        x = torch.arange(9.0).reshape(3, 3).roll(r) * (r + 1)
        expected = [calls[0](x) for calls in SPELLINGS.values()]
        with dc.check_mode(run is not truth):
            return expected, [calls[r % len(calls)](x) for calls in SPELLINGS.values()]

    for expected, found in (simulate if run is truth else run)(body, range(N)):
        for name, a, b in zip(SPELLINGS, expected, found, strict=True):
            assert torch.equal(a, b), name


@runs_on("rules", "gloo")
def test_valid_programs_pass(run):
    """All cases, forward and backward, to second order: no error, and the same values as without check mode."""

    def body(r):
        found = []
        for on in (False, True):
            with dc.check_mode(on):
                for case in cases.table(N):
                    x = case.x(r, 4)
                    if x is None or None in case.shapes:
                        found.append(case.call(x, r))
                        continue
                    x.requires_grad_()
                    y = case.call(x, r)
                    (g,) = torch.autograd.grad((case.w(y, r, 4) * y.sin()).sum(), x, create_graph=True)
                    (h,) = torch.autograd.grad((g * g).sum() + x.sum() * 0, x)
                    found += [y.detach(), g.detach(), h]
        return found

    for of_rank in run(body, range(N)):
        half = len(of_rank) // 2
        for plain, checked in zip(of_rank[:half], of_rank[half:], strict=True):
            assert torch.equal(plain, checked)


#: Within these a new tensor has no memory of its own; the messages of check mode need one.
TRANSFORMED = {
    "grad": lambda x: torch.func.grad(lambda x: dc.scan(x).square().sum())(x),
    "jvp": lambda x: torch.func.jvp(lambda x: dc.all_reduce(x, "max").sin(), (x,), (x.cos(),))[1],
    "hessian": lambda x: torch.func.hessian(lambda x: dc.all_reduce(x, "logsumexp").square().sum())(x),
    "vmap of grad": lambda x: torch.vmap(torch.func.grad(lambda x: dc.scatter(x, sizes=[1, 2, 0]).sum()))(x),
    "grad of a tree": lambda x: torch.func.grad(lambda x: dc.all_gather([x, x.sin()], sizes="auto")[1].sum())(x),
    "grad of what is replicated": lambda x: torch.func.grad(lambda x: dc.split(x.detach() * 0 + x * 0, 1).sum())(x),
}


@runs_on("rules", "gloo", "mpi")
def test_within_transforms(run):
    def body(r):
        x = x_(2, 3).detach() / (r + 1)
        found = []
        for on in (False, True):
            with dc.check_mode(on):
                found.append([call(x) for call in TRANSFORMED.values()])
        return found

    for plain, checked in run(body, range(N)):
        assert all(map(torch.equal, plain, checked))


def leaves_early(r):
    with dc.check_mode():
        dc.all_reduce(x_(2))
        if r != 1:
            dc.all_gather(x_(3))


def leaves_by_an_error(r):
    with dc.check_mode():
        dc.all_reduce(x_(2))
        if r == 1:
            raise KeyError("its own")
        dc.all_gather(x_(3))


def skips_a_backward(r):
    with dc.check_mode():
        y = dc.all_reduce(x_(3))
        with dc.check_mode():
            z = dc.all_reduce(x_(3)) if r != 1 else 0  # noqa: F841
        y.sum().backward()


ENDS = {
    leaves_early: (dc.CollectiveMismatchError, r"rank 1: the end of check mode at .*test_checks\.py:\d+"),
    leaves_by_an_error: (KeyError, r"rank 1: the end of check mode at .*test_checks\.py:\d+ by KeyError: 'its own'"),
    skips_a_backward: (dc.CollectiveMismatchError, r"rank 1: the end of check mode at|rank 1: backward of all_reduce"),
}


@runs_on("rules", "gloo", "mpi")
def test_a_rank_that_leaves(run):
    """The rank makes no further call that could be compared."""

    def body(r):
        texts = []
        for end, (own, _) in ENDS.items():
            with pytest.raises(own if r == 1 else dc.CollectiveMismatchError) as caught:
                end(r)
            dc.all_reduce(torch.ones(1))
            texts.append(str(caught.value))
        return texts

    start = time.monotonic()
    found = run(body, range(N))
    assert time.monotonic() - start < 60
    for (own, words), *texts in zip(ENDS.values(), *found, strict=True):
        assert texts[0] == texts[2]
        assert re.search(words, texts[0])
        assert (texts[1] == texts[0]) == (own is dc.CollectiveMismatchError)


def test_a_rank_that_leaves_blocks_with_two_groups():
    """Nobody waits in one group for a rank that has raised in the other; both groups still work afterwards."""

    def leaves(r, group, call):
        with dc.check_mode():
            dc.all_reduce(x_(2))
            with dc.check_mode():
                dc.all_reduce(x_(2))
                dc.all_reduce(x_(2), group=group)
                if r == 0:
                    raise KeyError("its own")
                call()

    def body(r):
        group, found = dist.new_group(), []
        for call in (lambda: None, lambda: dc.all_reduce(x_(3))):
            with pytest.raises(dc.CollectiveMismatchError if r else KeyError) as caught:
                leaves(r, group, call)
            sums = [dc.all_reduce(torch.ones(1), group=g).item() for g in (None, group)]
            found.append((str(caught.value), sums))
        with pytest.raises(dc.CollectiveMismatchError if r else ValueError), dc.check_mode():
            dc.all_reduce(x_(2))
            dc.scatter(x_(4) if r == 0 else None)  # the error on rank 0 is told to the others
        return found

    for r, of_rank in enumerate(gloo(body, range(3), timeout=30)):
        for text, sums in of_rank:
            assert sums == [3.0, 3.0]
            assert r == 0 or re.search("rank 0: the end of check mode at .* by KeyError: 'its own'", text)


def test_all_leave_by_the_same_error():
    def body(r):
        with pytest.raises(KeyError), dc.check_mode():
            dc.all_reduce(x_(2))
            raise KeyError

    gloo(body, range(2))


def test_a_group_that_ended_within():
    def body(r):
        with dc.check_mode():
            group = dist.new_group()
            dc.all_reduce(x_(2), group=group)
            dist.destroy_process_group(group)

    gloo(body, range(2))


def test_each_simulated_rank_has_its_own():
    def body(r):
        with dc.check_mode():
            dc.all_reduce(torch.ones(1))  # runs the other ranks meanwhile
        return checks.is_on()

    assert rules(body, range(N)) == [False] * N
    assert not checks.is_on()


def test_the_switch():
    assert not checks.is_on()
    before = dc.check_mode()
    assert checks.is_on()
    with dc.check_mode(False):
        assert not checks.is_on()
    assert checks.is_on()
    with pytest.raises(KeyError), before:
        raise KeyError
    assert not checks.is_on()
    with pytest.raises(TypeError, match="check_mode: on: got str, expected True or False"):
        dc.check_mode("off")
    code = """
import os, torch
for value in "10":
    if os.fork() == 0:
        os.environ["DIFFCOLL_CHECK"] = value
        from diffcoll.core import checks  # reads the variable
        print(value, checks.is_on(), flush=True)
        os._exit(0)
    os.wait()
"""
    assert python("-c", code).stdout.splitlines() == ["1 True", "0 False"]
