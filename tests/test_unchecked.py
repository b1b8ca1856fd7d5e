"""Ranks that disagree without check mode, on gloo: the table of notes/running/failures.md, cell by cell."""

import re
import resource
import threading
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from runs import ROOT
from torch import nn

import diffcoll as dc
from diffcoll.testing import RanksFailedError, spawn

F = dc.nn.functional
NOTE = ROOT / "notes" / "running" / "failures.md"
#: In which way x differs, in the order of the table's columns: rank → its shape and dtype.
DIFFERENCES = {
    "dtype": [((8, 8), torch.float32), ((8, 8), torch.float64)],
    "dtype of as many bytes": [((8, 8), torch.float32), ((8, 4), torch.float64)],
    "size": [((8, 8), torch.float32), ((8, 4), torch.float32)],
    "shape of as many elements": [((8, 8), torch.float32), ((4, 16), torch.float32)],
}


def in_backward(call):
    def gradient(x, group):
        (g,) = torch.autograd.grad(call(x.requires_grad_(), group=group).sum(), x)
        return g

    return gradient


def batch_norm(x, group):
    return dc.nn.SyncBatchNorm(x.shape[1], group=group).to(x.dtype)(x)


def enqueue(x, group):
    dc.nn.FeatureQueue(8, x.shape[1], group=group).to(x.dtype).enqueue(x)


def scaled(loss):
    return lambda x, group: loss(x, x + 1, torch.tensor(2.0), group=group)


def of_two_views(loss):
    return lambda x, group: loss(x, x.roll(1, 0), group=group)


def of_masks(loss):
    return lambda x, group: loss(x / 9, (x > 3).to(x.dtype), group=group)


def reducing(op):
    return partial(dc.all_reduce, op=op)


#: By the first cell of a row: what is called, by the name that the cell has.
ROWS = {
    "sums": {
        "all_reduce": dc.all_reduce,
        "mean": reducing("mean"),
        "sum_gradients": in_backward(dc.sum_gradients),
        "average_gradients": lambda x, group: dc.average_gradients([x], group=group),
    },
    "broadcast": {"broadcast": dc.broadcast},
    "from the other": {"broadcast": partial(dc.broadcast, src=1)},
    "statistics": {
        "moments": lambda x, group: F.moments(x, 0, group=group),
        "weighted_mean": F.weighted_mean,
        "SyncBatchNorm": batch_norm,
    },
    "decorrelation": {
        "barlow_twins_loss": of_two_views(F.barlow_twins_loss),
        "vicreg_loss": of_two_views(F.vicreg_loss),
    },
    "messages": {
        "max": reducing("max"),
        "product": reducing("product"),
        "logsumexp": reducing("logsumexp"),
        "elementwise": reducing(dc.elementwise(lambda xs: xs.amax(0))),
        "all_gather": dc.all_gather,
        "reduce_scatter": dc.reduce_scatter,
        "all_to_all": dc.all_to_all,
        "reduce": dc.reduce,
        "gather": dc.gather,
        "permute": partial(dc.permute, pairs=[(0, 1), (1, 0)]),
        "shift": dc.shift,
        "scan": dc.scan,
        "split": in_backward(dc.split),
    },
    "agreeing": {
        "gather_batch": lambda x, group: dc.gather_batch(x, group=group),
        "ring": lambda x, group: list(dc.ring(x, group=group)),
        "halo_exchange": lambda x, group: dc.halo_exchange(x, 0, 1, 1, group=group),
        "info_nce_loss": lambda x, group: F.info_nce_loss(x, x + 1, group=group),
        "nt_xent_loss": of_two_views(F.nt_xent_loss),
        "supcon_loss": lambda x, group: F.supcon_loss(x, torch.arange(len(x)) % 2, group=group),
        "clip_loss": scaled(F.clip_loss),
        "siglip_loss": lambda x, group: F.siglip_loss(x, x + 1, torch.tensor(2.0), torch.tensor(0.0), group=group),
        "koleo_loss": F.koleo_loss,
        "sinkhorn": F.sinkhorn,
        "vocab_parallel_cross_entropy": lambda x, group: F.vocab_parallel_cross_entropy(
            torch.ones(3, x.shape[1], dtype=x.dtype), x, torch.tensor([0, 1, 2]), group=group
        ),
        "FeatureQueue": enqueue,
        "GradientAverager": lambda x, group: dc.GradientAverager([nn.Parameter(x)], group=group),
    },
    "independent": {
        "scatter": dc.scatter,
        "global_mean": lambda x, group: dc.global_mean(x.mean(), group=group),
        "share": lambda x, group: F.share(x.mean(), 3, groups=group),
        "token_mean": lambda x, group: F.token_mean(x, groups=group),
        "dice_loss": of_masks(F.dice_loss),
        "iou_loss": of_masks(F.iou_loss),
        "tversky_loss": of_masks(F.tversky_loss),
    },
}

#: What a cell says.
ENDS, WRONG, ORDER, RIGHT = "a process ends", "wrong numbers", "order of memory", "right"
FAILED, MISMATCH = "CollectiveFailedError", "CollectiveMismatchError"
EXPECTED = {
    "sums": [ENDS, WRONG, ENDS, ORDER],
    "broadcast": [WRONG, WRONG, ENDS, ORDER],  # rank 0 has fewer bytes, as many, more, as many
    "from the other": [ENDS, WRONG, WRONG, ORDER],
    "statistics": [ENDS, ENDS, ENDS, ENDS],
    "decorrelation": [MISMATCH, ENDS, ENDS, ENDS],
    "messages": [FAILED, FAILED, FAILED, ORDER],
    "agreeing": [MISMATCH, MISMATCH, MISMATCH, MISMATCH],
    "independent": [RIGHT, RIGHT, RIGHT, RIGHT],
}


def x_of(difference, r):
    shape, dtype = DIFFERENCES[difference][r]
    return (torch.arange(torch.Size(shape).numel()) % 7 + 1).to(dtype).view(shape)


def outcome(call, difference, r, group):
    try:
        call(x_of(difference, r), group=group)
    except dc.CollectiveMismatchError:
        return MISMATCH
    except dc.CollectiveFailedError:
        return FAILED
    return "returned"


def together(calls, difference, timeout):
    """Return {name: the set of the ranks' outcomes}; each call has a group, and a thread, of its own."""

    def body(r):
        groups = [dist.new_group(timeout=timedelta(seconds=timeout)) for _ in calls]
        found = {}

        def one(name, call, group):
            found[name] = outcome(call, difference, r, group)

        threads = [
            threading.Thread(target=one, args=(*item, group)) for item, group in zip(calls.items(), groups, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    of_ranks = spawn(body, range(2))
    return {name: {found[name] for found in of_ranks} for name in calls}


def ends(call, difference):
    """Whether a process is ended by gloo."""

    def body(r):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        return outcome(call, difference, r, None)

    try:
        spawn(body, range(2))
    except RanksFailedError as error:
        return any(f is not None and f.kind == "died" and "exit code -6" in f.text for f in error.failures.values())
    return False


CELLS = [(row, d, EXPECTED[row][i]) for row in ROWS for i, d in enumerate(DIFFERENCES)]


@pytest.mark.parametrize(("row", "difference", "expected"), [c for c in CELLS if c[2] != ENDS])
def test_errors_and_values_on_both_ranks(row, difference, expected):
    found = together(ROWS[row], difference, timeout=2 if expected == FAILED else 50)
    assert found == {name: {expected if expected in (FAILED, MISMATCH) else "returned"} for name in ROWS[row]}


@pytest.mark.parametrize(("row", "difference"), [c[:2] for c in CELLS if c[2] == ENDS])
def test_gloo_ends_a_process(row, difference):
    assert [name for name, call in ROWS[row].items() if not ends(call, difference)] == []


def test_the_numbers_of_what_returns():
    """Wrong ones where dtypes differ; those in the same places in memory where shapes do; right ones."""

    def body(r):
        def numbers(call, difference):
            return call(x_of(difference, r), group=None).double().flatten()

        wrong, order = list(DIFFERENCES)[1], list(DIFFERENCES)[3]
        total = 2 * x_of("dtype", 0).double().flatten()
        for call, right in ((dc.all_reduce, total), (dc.broadcast, total / 2)):
            assert not torch.allclose(numbers(call, wrong)[:32], right[:32]) or (r == 0 and call is dc.broadcast)
            assert torch.equal(numbers(call, order), right)
        assert torch.equal(numbers(dc.all_gather, order), torch.cat([total, total]) / 2)
        for difference in DIFFERENCES:
            shared = numbers(ROWS["independent"]["dice_loss"], difference)
            assert torch.allclose(dc.all_gather(shared), shared)
            assert torch.equal(numbers(dc.scatter, difference), total[32 * r :][:32] / 2)

    spawn(body, range(2))


def test_the_note_has_this_table():
    lines = NOTE.read_text().split("| ranks that differ |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    named = {frozenset(re.findall(r'`"?(\w+)"?`', row[0])): row[1:] for row in rows}
    assert set(named) == {frozenset(calls) for calls in ROWS.values()}
    for row, calls in ROWS.items():
        for cell, expected in zip(named[frozenset(calls)], EXPECTED[row], strict=True):
            assert expected in cell, (row, cell)
