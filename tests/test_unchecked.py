"""Ranks that disagree without check mode: the tables of notes/running/failures.md, for gloo and MPI, cell by cell."""

import itertools
import os
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
from diffcoll.engines.messages import KINDS
from diffcoll.engines.mpi_requests import TAGS
from diffcoll.testing import RanksFailedError, spawn

F = dc.nn.functional
NOTE = ROOT / "notes" / "running" / "failures.md"
#: In which way x differs, in the order of the table's columns: rank → its shape and dtype.
DIFFERENCES = {
    "dtype": [((12, 8), torch.float32), ((12, 8), torch.float64)],
    "dtype of as many bytes": [((12, 8), torch.float32), ((12, 4), torch.float64)],
    "size": [((12, 8), torch.float32), ((12, 4), torch.float32)],
    "shape of as many elements": [((12, 8), torch.float32), ((6, 16), torch.float32)],
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
        "deterministic": partial(dc.all_reduce, deterministic=True),
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


def called(*names):
    return {name: call for row in ROWS.values() for name, call in row.items() if name in names}


#: The same on MPI. An error is raised on at least one rank; other ranks may return wrong numbers, or wait for it.
ROWS_ON_MPI = {
    "own collectives": ROWS["sums"]
    | called("max", "product", "logsumexp", "elementwise", "deterministic", "all_gather", "split", "reduce_scatter"),
    "broadcast": {"broadcast": dc.broadcast},
    "reduce": {"reduce": dc.reduce},
    "messages": called("all_to_all", "gather", "permute", "shift", "scan"),
    **{row: ROWS[row] for row in ("statistics", "decorrelation", "agreeing", "independent")},
}
EXPECTED_ON_MPI = {
    "own collectives": [FAILED, WRONG, FAILED, ORDER],
    "broadcast": [WRONG, WRONG, FAILED, ORDER],  # rank 0, which sends, has fewer bytes, as many, more, as many
    "reduce": [FAILED, WRONG, WRONG, ORDER],  # the same rank receives
    "messages": [FAILED, FAILED, FAILED, ORDER],
    "statistics": [FAILED, FAILED, FAILED, FAILED],
    "decorrelation": [MISMATCH, FAILED, FAILED, FAILED],
    "agreeing": [MISMATCH, MISMATCH, MISMATCH, MISMATCH],
    "independent": [RIGHT, RIGHT, RIGHT, RIGHT],
}


def x_of(difference, r):
    shape, dtype = DIFFERENCES.get(difference, [((12, 8), torch.float32)] * 2)[min(r, 1)]
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
    """Return {name: the set of the ranks' outcomes}; each call has a group, and a thread, of its own.

    What is called is a function, or a pair of them, one for each rank.
    """

    def body(r):
        groups = [dist.new_group(timeout=timedelta(seconds=timeout)) for _ in calls]
        found = {}

        def one(name, call, group):
            found[name] = outcome(call[r] if isinstance(call, tuple) else call, difference, r, group)

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


def in_turn(calls, difference, n=2):
    """The same on MPI; each call has a communicator of its own. No rank may wait for one that has failed."""

    def body(r):
        from mpi4py import MPI

        worlds = {name: MPI.COMM_WORLD.Dup() for name in calls}
        return {
            name: outcome(call[r] if isinstance(call, tuple) else call, difference, r, worlds[name])
            for name, call in calls.items()
        }

    of_ranks = spawn(body, range(n), backend="mpi")
    return {name: {found[name] for found in of_ranks} for name in calls}


def ends_the_job(call, difference):
    """Whether a rank on MPI raises CollectiveFailedError, and ends the others, which may wait for it."""

    def body(r):
        if outcome(call, difference, r, None) == FAILED:
            os._exit(3)

    with pytest.raises(RanksFailedError) as caught:
        spawn(body, range(2), backend="mpi")
    return any("ended with exit code 3" in report for report in caught.value.reports.values())


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


def cells(rows, expected):
    return [(row, d, expected[row][i]) for row in rows for i, d in enumerate(DIFFERENCES)]


CELLS, CELLS_ON_MPI = cells(ROWS, EXPECTED), cells(ROWS_ON_MPI, EXPECTED_ON_MPI)


@pytest.mark.parametrize(("row", "difference", "expected"), [c for c in CELLS if c[2] != ENDS])
def test_errors_and_values_on_both_ranks(row, difference, expected):
    found = together(ROWS[row], difference, timeout=2 if expected == FAILED else 50)
    assert found == {name: {expected if expected in (FAILED, MISMATCH) else "returned"} for name in ROWS[row]}


@pytest.mark.parametrize(("row", "difference"), [c[:2] for c in CELLS if c[2] == ENDS])
def test_gloo_ends_a_process(row, difference):
    assert [name for name, call in ROWS[row].items() if not ends(call, difference)] == []


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_errors_and_values_on_mpi(difference):
    rows = {row: e for row, d, e in CELLS_ON_MPI if d == difference and (row, e) != ("decorrelation", FAILED)}
    calls = {name: call for row in rows for name, call in ROWS_ON_MPI[row].items()}
    found = in_turn(calls, difference)
    for row, expected in rows.items():
        for name in ROWS_ON_MPI[row]:
            if expected == FAILED:
                assert FAILED in found[name], name
            else:
                assert found[name] == {expected if expected == MISMATCH else "returned"}, name


@pytest.mark.parametrize("difference", list(DIFFERENCES)[1:])
def test_a_rank_on_mpi_fails_and_the_other_waits(difference):
    assert all(ends_the_job(call, difference) for call in ROWS["decorrelation"].values())


def test_messages_of_three_ranks_on_mpi():
    """The last two differ from the first; a rank that waits for one that has failed is not asked."""
    calls = {name: call for name, call in ROWS_ON_MPI["messages"].items() if name != "scan"}
    for difference in list(DIFFERENCES)[:3]:
        assert all(FAILED in ranks for ranks in in_turn(calls, difference, n=3).values())


def test_other_collectives_on_another_rank():
    """On gloo all pairs; on MPI, which has no timeout, those in which each rank gets a message."""
    names = ("max", "product", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "permute")
    calls = called("all_reduce", *names, "scan")
    pairs = {(a, b): (calls[a], calls[b]) for a, b in itertools.permutations(calls, 2)}
    right = {pair for pair in pairs if set(pair) == {"max", "product"}}  # each rank has all x, and its own op of them
    found = together(pairs, "same", timeout=3)
    assert found == {pair: {"returned" if pair in right else FAILED} for pair in pairs}
    calls = called("all_to_all", "permute", "shift")
    pairs = {(a, b): (calls[a], calls[b]) for a, b in itertools.permutations(calls, 2)}
    assert in_turn(pairs, "same") == {pair: {FAILED} for pair in pairs}


def test_an_error_on_mpi_says_which_message_arrived():
    def body(r):
        from mpi4py import MPI

        texts = []
        for mine, theirs in (
            ([dc.shift, "dtype of as many bytes"], [dc.shift, "dtype of as many bytes"]),
            ([dc.shift, "size"], [dc.shift, "size"]),
            ([dc.shift, "same"], [ROWS["messages"]["permute"], "same"]),
        ):
            call, difference = (mine, theirs)[r]
            try:
                call(x_of(difference, r), group=MPI.COMM_WORLD.Dup())
            except dc.CollectiveFailedError as error:
                texts.append(re.search("got a message[^;]*", str(error))[0])
        return texts

    first, second = spawn(body, range(2), backend="mpi")
    assert first == [
        "got a message of torch.float64 from rank 1, expected torch.float32",
        "got a message of 192 bytes from rank 1, expected 384",
        "got a message of another collective from rank 1, expected torch.float32",
    ]
    assert second[:2] == [
        "got a message of torch.float32 from rank 0, expected torch.float64",
        "got a message of more than 192 bytes from rank 0",
    ]


def test_no_two_dtypes_have_one_tag():
    assert len({kind & TAGS for kind in KINDS.values()}) == len(KINDS)


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_the_numbers_of_what_returns(backend):
    """Wrong ones where dtypes differ; those in the same places in memory where shapes do; right ones."""

    def body(r):
        def numbers(call, difference):
            return call(x_of(difference, r), group=None).double().flatten()

        wrong, order = list(DIFFERENCES)[1], list(DIFFERENCES)[3]
        total = 2 * x_of("dtype", 0).double().flatten()
        for call, right in ((dc.all_reduce, total), (dc.broadcast, total / 2)):
            assert not torch.allclose(numbers(call, wrong)[:48], right[:48]) or (r == 0 and call is dc.broadcast)
            assert torch.equal(numbers(call, order), right)
        assert torch.equal(numbers(dc.all_gather, order), torch.cat([total, total]) / 2)
        for difference in DIFFERENCES:
            shared = numbers(ROWS["independent"]["dice_loss"], difference)
            assert torch.allclose(dc.all_gather(shared), shared)
            assert torch.equal(numbers(dc.scatter, difference), total[48 * r :][:48] / 2)
        of_one_op = numbers(dc.all_reduce if r == 0 else reducing("mean"), "same")
        assert torch.equal(of_one_op, total * 3 / 4)  # of x_0 + x_1 / 2

    spawn(body, range(2), backend=backend)


@pytest.mark.parametrize(
    ("head", "rows", "expected"),
    [("| ranks that differ |", ROWS, EXPECTED), ("| ranks that differ, on MPI |", ROWS_ON_MPI, EXPECTED_ON_MPI)],
)
def test_the_note_has_this_table(head, rows, expected):
    lines = NOTE.read_text().split(head)[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    named = {frozenset(re.findall(r'`"?(\w+)"?`', row[0])): row[1:] for row in cells}
    if rows is ROWS_ON_MPI:  # without those that are as on gloo
        rows = {row: c for row, c in rows.items() if (c, expected[row]) != (ROWS.get(row), EXPECTED.get(row))}
    assert set(named) == {frozenset(calls) for calls in rows.values()}
    for row, calls in rows.items():
        for cell, text in zip(named[frozenset(calls)], expected[row], strict=True):
            assert text in cell, (row, cell)
