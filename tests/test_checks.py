"""Check mode: what ranks disagree on is one error on all of them, and the group works afterwards."""

import os
import re
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

import diffcoll as dc
from diffcoll import checks
from diffcoll.testing import cases, simulate, spawn

N = 3
RUNS = {
    "rules": partial(simulate, rules=True),
    "gloo": spawn,
    "mpi": partial(spawn, backend="mpi"),
}
ring = [(0, 1), (1, 2), (2, 0)]


def x_(*shape, dtype=torch.float64):
    return torch.ones(*shape, dtype=dtype, requires_grad=dtype.is_floating_point)


# What rank 1 does and what the others do; `odd` is true on rank 1. With a word that the error must have.
DISAGREEMENTS = {
    "operation": (lambda odd: dc.all_gather(x_(3)) if odd else dc.all_reduce(x_(3)), r"rank 1: all_gather\("),
    "op": (lambda odd: dc.all_reduce(x_(3), "max" if odd else "sum"), "op='max'"),
    "sum or mean": (lambda odd: dc.reduce_scatter(x_(3), "avg" if odd else "sum"), "op='mean'"),
    "ties": (lambda odd: dc.all_reduce(x_(3), "max", ties="first" if odd else "even"), "ties='first'"),
    "shape": (lambda odd: dc.all_reduce(x_(4 if odd else 3)), r"float64 \(4,\)"),
    "same size, other shape": (lambda odd: dc.all_reduce(x_(2, 3) if odd else x_(3, 2)), r"\(2, 3\)"),
    "dtype": (lambda odd: dc.broadcast(x_(3, dtype=torch.float32 if odd else torch.float64)), "float32"),
    "dim": (lambda odd: dc.all_gather(x_(3, 3), 1 if odd else 0), "dim=1"),
    "sizes": (lambda odd: dc.all_gather(x_(2), sizes=[1, 2, 2] if odd else [2, 2, 2]), r"sizes=\[1, 2, 2\]"),
    "sizes or auto": (lambda odd: dc.all_gather(x_(2), sizes="auto" if odd else [2, 2, 2]), "sizes='auto'"),
    "root": (lambda odd: dc.broadcast(x_(3), src=2 if odd else 0), "src=2"),
    "root of scatter": (lambda odd: dc.scatter(x_(3), src=2 if odd else 0), "src=2"),
    "pairs": (lambda odd: dc.permute(x_(3), ring[:2] if odd else ring), r"pairs=\[\(0, 1\), \(1, 2\)\]"),
    "cotangent": (lambda odd: dc.all_reduce(x_(3), cotangent="replicated" if odd else "partial"), "replicated"),
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
    "leaves": (lambda odd: dc.all_reduce([x_(3)] * (2 if odd else 1)), r"\(6,\)"),
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
    y = dc.all_reduce(x_(3), cotangent="replicated")
    (y.sum() * (2 if odd else 1)).backward()


def not_one_tensor(odd):
    dc.sum_gradients(x_(3) * (2 if odd else 1))


DISAGREEMENTS |= {
    "backward of another": (backward_of_another, r"rank 1: backward of all_reduce at .*: gradient"),
    "gradient of another shape": (gradient_of_another_shape, r"rank 1: backward of all_reduce .*\(3,\)"),
    "cotangent that differs": (
        not_replicated,
        "backward of all_reduce at .*: declared replicated, but it differs by 1",
    ),
    "copies that differ": (not_one_tensor, "sum_gradients at .*: declared replicated, but it differs by 1"),
}


@pytest.mark.parametrize("where", RUNS)
def test_disagreements(where):
    def body(r):
        texts = {}
        with dc.check_mode():
            for name, (call, _) in DISAGREEMENTS.items():
                with pytest.raises(dc.CollectiveMismatchError) as caught:
                    call(r == 1)
                texts[name] = str(caught.value)
                assert dc.all_reduce(torch.tensor([r])).tolist() == [3], name  # it works
        return texts

    got = RUNS[where](body, range(N))
    for name, (_, words) in DISAGREEMENTS.items():
        texts = [of_rank[name] for of_rank in got]
        if "declared replicated" not in words:  # each rank names its own line
            assert texts[0] == texts[1] == texts[2]
            assert texts[0].count(f" at {__file__}:") >= N
            for r in range(N):
                assert f"\n  rank {r}: " in texts[0]
        for text in texts:
            assert re.search(words, text), (name, text)


@pytest.mark.parametrize("where", ["rules", "gloo"])
def test_what_is_right_passes(where):
    """The whole table, forward and backward, to second order: no false alarm, and the same numbers."""

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

    for of_rank in RUNS[where](body, range(N)):
        half = len(of_rank) // 2
        for plain, checked in zip(of_rank[:half], of_rank[half:], strict=True):
            assert torch.equal(plain, checked)


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


def does_not_come_back(r):
    with dc.check_mode():
        y = dc.all_reduce(x_(3))
        with dc.check_mode():
            z = dc.all_reduce(x_(3)) if r != 1 else 0  # noqa: F841
        y.sum().backward()


ENDS = {
    leaves_early: (dc.CollectiveMismatchError, r"rank 1: the end of check mode at .*test_checks\.py:\d+"),
    leaves_by_an_error: (KeyError, r"rank 1: the end of check mode at .*test_checks\.py:\d+ by KeyError: 'its own'"),
    does_not_come_back: (
        dc.CollectiveMismatchError,
        r"rank 1: the end of check mode at|rank 1: backward of all_reduce",
    ),
}


@pytest.mark.parametrize("where", RUNS)
def test_a_rank_that_leaves(where):
    """It makes no further call that could be compared."""

    def body(r):
        texts = []
        for end, (own, _) in ENDS.items():
            with pytest.raises(own if r == 1 else dc.CollectiveMismatchError) as caught:
                end(r)
            dc.all_reduce(torch.ones(1))
            texts.append(str(caught.value))
        return texts

    start = time.monotonic()
    found = RUNS[where](body, range(N))
    assert time.monotonic() - start < 60
    for (own, words), *texts in zip(ENDS.values(), *found, strict=True):
        assert texts[0] == texts[2]
        assert re.search(words, texts[0])
        assert (texts[1] == texts[0]) == (own is dc.CollectiveMismatchError)


def test_all_leave_by_the_same_error():
    def body(r):
        with pytest.raises(KeyError), dc.check_mode():
            dc.all_reduce(x_(2))
            raise KeyError

    spawn(body, range(2))


def test_a_group_that_ended_within():
    def body(r):
        with dc.check_mode():
            group = dist.new_group()
            dc.all_reduce(x_(2), group=group)
            dist.destroy_process_group(group)

    spawn(body, range(2))


def test_each_simulated_rank_has_its_own():
    def body(r):
        with dc.check_mode():
            dc.all_reduce(torch.ones(1))  # hands over
        return checks.is_on()

    assert simulate(body, range(N), rules=True) == [False] * N
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
    code = "from diffcoll import checks; print(checks.is_on())"
    for value, expected in (("1", "True"), ("0", "False")):
        environment = {**os.environ, "DIFFCOLL_CHECK": value, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        assert done.stdout.strip() == expected
