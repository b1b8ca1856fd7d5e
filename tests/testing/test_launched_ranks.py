"""The checks on ranks that run already, as a launcher starts them: here those of `spawn`."""

import json
import math
import random
import re
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from runs import gloo, refusal
from runs import launched as launched_processes
from sharded_programs import data_and_tensor, mlp, vocabulary
from torch import nn
from torch.distributed.tensor import Shard
from verdicts import numbers

import diffcoll as dc
from diffcoll.testing import (
    GradientMismatchError,
    RanksFailedError,
    assert_matches_single_process,
    check_gradients,
    launched,
    simulate,
)
from diffcoll.testing.harness.cuts import Cuts
from diffcoll.testing.harness.measure import Gradients, Measurement

LAUNCHED = {"on": ["launched"]}


def said(check, *given, **more):
    """What a check says, right or wrong."""
    try:
        return str(check(*given, **more))
    except GradientMismatchError as error:
        return str(error)


def on_ranks(n, check, *given, **more):
    """Call a check on every rank of a group that exists already."""
    return gloo(lambda r: said(check, *given, **LAUNCHED, **more), range(n))


def as_on_gloo(n, check, *given, **more):
    """All ranks say what the check says that starts processes itself."""
    alone = said(check, *given, on=["gloo"], **more).replace("gloo", "launched")
    assert on_ranks(n, check, *given, **more) == [alone] * n
    return alone


# ── verdicts ─────────────────────────────────────────────────────────────────────────────────────────────


SHARDED = [(2, mlp, ""), (2, mlp, "f"), (2, mlp, "g"), (3, vocabulary, ""), (3, vocabulary, "f")]


@pytest.mark.parametrize(("n", "make", "bug"), SHARDED, ids=[f"{make.__name__}-{bug}" for _, make, bug in SHARDED])
def test_sharded_programs(n, make, bug):
    distributed, single, batch, more = make(bug)
    more["mesh"] = {"tp": n}
    report = as_on_gloo(n, assert_matches_single_process, distributed, single, batch, **more)
    assert ("WRONG" in report) == (bug != ""), report


def test_two_axes():
    distributed, single, batch, more = data_and_tensor("not averaged")
    more["mesh"] = {"dp": 2, "tp": 2}
    more["placements"] |= {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}
    report = as_on_gloo(4, assert_matches_single_process, distributed, single, batch, **more)
    assert "that of each rank's data along dp; the mean is right" in report


@pytest.mark.parametrize("lost", [False, True])
def test_ranks_with_rows(lost):
    """Wrong: the mean is no part of the graph on ranks."""
    net = nn.Linear(3, 2, dtype=torch.double)

    def skewness(total, x):
        y = net(x)
        sums = total(torch.cat((y.sum(0), y.new_tensor([len(y)]))))
        return ((y - sums[:-1] / sums[-1]) ** 3 + y**2).sum()

    def outside_of_the_graph(x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    distributed = partial(skewness, outside_of_the_graph if lost else dc.all_reduce)
    more = {"module": net, "sizes": [(4, 4), (5, 3)], "rank_reduction": "sum"}
    single = partial(skewness, lambda sums: sums)
    report = as_on_gloo(2, assert_matches_single_process, distributed, single, numbers(8, 3), **more)
    assert ("WRONG" in report) == lost


def test_sizes_that_are_not_said_are_those_of_the_ranks():
    def loss(x):
        return dc.all_reduce(x.square().sum())

    def batch(rows):
        return numbers(rows, 2)

    for n in 1, 2, 3:
        report = on_ranks(n, assert_matches_single_process, loss, loss, batch, rank_reduction="mean")
        assert len(set(report)) == 1 and "WRONG" not in report[0] and f"launched, {n} rank" in report[0]


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_finite_differences(factor):
    def fn(x, w):
        return w * (factor * dc.all_reduce(x) - (factor - 1) * dc.all_reduce(x).detach()).square().sum()

    report = as_on_gloo(2, check_gradients, fn, [numbers(2), numbers(3)[1:]], [1.0, 10.0])
    assert ("WRONG" in report) == (factor != 1)


def test_after_simulated_ranks():
    def loss(x):
        return dc.all_reduce(x.square().sum())

    def check(rank):
        return str(
            assert_matches_single_process(
                loss, loss, numbers(5, 2), sizes=[(2, 3)], on=["simulated", "launched"], rank_reduction="mean"
            )
        )

    first, second = gloo(check, range(2))
    assert first == second and first.index("simulated, 2 ranks") < first.index("launched, 2 ranks")


def test_the_callers_random_numbers_and_group_are_as_before():
    def check(rank):
        torch.manual_seed(rank)
        random.seed(rank)
        pair = dist.new_group([0, 1])
        dc.set_default_group(pair)
        before = torch.get_rng_state(), random.getstate()
        assert_matches_single_process(*mlp("")[:3], **{**mlp("")[3], "mesh": {"tp": 2}}, **LAUNCHED)
        assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
        return dc.all_reduce(torch.tensor(rank + 1.0), group=pair).item()

    assert gloo(check, range(2)) == [3.0, 3.0]


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────


def failing(ranks, x):
    if dist.get_rank() in ranks:
        raise KeyError("mine")
    return dc.all_reduce(x.square().sum())


def sum_of_squares(x):
    return dc.all_reduce(x.square().sum())


SUM = {"sizes": [(2, 3)], "rank_reduction": "mean", **LAUNCHED}


def test_an_error_on_every_rank_is_everybodys_and_the_next_check_runs():
    def check(rank):
        call = assert_matches_single_process, partial(failing, (0, 1)), sum_of_squares, numbers(5, 3)
        text = refusal(RanksFailedError, *call, **SUM)
        assert text.startswith("launched ranks: KeyError on every rank, at "), text
        assert text.count("KeyError: 'mine'") == 2 and "── rank 1 of 2 ──" in text
        return said(assert_matches_single_process, sum_of_squares, sum_of_squares, numbers(5, 3), **SUM)

    assert all("WRONG" not in text for text in gloo(check, range(2)))


ONE_FAILS = """
import sys, time
import torch.distributed as dist
from datetime import timedelta
from functools import partial
sys.path[:0] = sys.argv[1:]
from test_launched_ranks import SUM, assert_matches_single_process, failing, numbers, sum_of_squares
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
begin = time.monotonic()
for fails in (1,), ():
    try:
        assert_matches_single_process(partial(failing, fails), sum_of_squares, numbers(5, 3), timeout=3.5, **SUM)
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
print(f"{time.monotonic() - begin < 30}", flush=True)
"""


def test_an_error_on_one_rank_is_said_and_the_group_is_not_used_again():
    """The other rank waits in a collective, until this one has ended."""
    with launched_processes(2, ONE_FAILS, *sys.path) as (ranks, _):
        (other, _), (out, err) = [ranks[r].communicate(timeout=60) for r in (1, 0)][::-1]
    assert "launched ranks: rank 1 of 2 waits for the others, and failed:\nTraceback" in err, err
    first, *more = out.split("RuntimeError: ")
    assert first.startswith("RanksFailedError: launched ranks: KeyError on rank 1 of 2, at "), out
    assert "── rank 0 of 2 ──\nnot known: a rank was not ready within 3.5 s, or has ended" in first
    again = "launched ranks: a rank failed before, and others may wait for it; start the program again\nTrue\n"
    assert more == [again] and other.endswith(f"RuntimeError: {again}"), (out, other)
    assert "CollectiveFailedError" in other


@pytest.mark.parametrize("what", ["batch", "module"])
def test_ranks_that_have_other_data(what):
    def check(rank):
        torch.manual_seed(rank if what == "module" else 0)
        net, x = nn.Linear(3, 2, dtype=torch.double), numbers(5, 3, seed=rank if what == "batch" else 0)

        def loss(x):
            return dc.all_reduce(net(x).square().sum())

        return refusal(dc.CollectiveMismatchError, assert_matches_single_process, loss, loss, x, module=net, **SUM)

    first, second = gloo(check, range(2))
    assert first == second
    assert "the ranks' arguments (to be made with one seed, or broadcast) differ; the first difference is" in first
    assert re.search(rf"\n  rank 0: a tensor of the {what}: torch.float64 .*, digest \w+\n  rank 1: a tensor", first)


def test_wrong_numbers_of_ranks():
    def check(rank):
        call = assert_matches_single_process, sum_of_squares, sum_of_squares, numbers(6, 3)
        mesh = refusal(ValueError, *call, mesh=[{"tp": 2}, {"tp": 3}], **LAUNCHED)
        sizes = refusal(ValueError, *call, sizes=[(3, 3), (2, 2, 2)], **LAUNCHED)
        of_few = check_gradients, sum_of_squares, [numbers(2), numbers(2, seed=1)]
        timeout = refusal(ValueError, *of_few, timeout=0, **LAUNCHED)
        return mesh, sizes, refusal(ValueError, *of_few[:2], [numbers(2)] * 3, **LAUNCHED), timeout

    mesh, sizes, per_rank, timeout = gloo(check, range(2))[1]
    assert mesh == "assert_matches_single_process: mesh: got a run on 3 ranks, expected 2, as many as were launched"
    assert sizes == mesh.replace("mesh", "sizes")
    assert timeout == "launched ranks: timeout: got 0, expected a number of seconds above 0, at most a million"
    assert per_rank == "check_gradients: per_rank: got a run on 3 ranks, expected 2, as many as were launched"


def test_without_a_launcher():
    text = refusal(RuntimeError, check_gradients, sum_of_squares, [numbers(2)], **LAUNCHED)
    assert text == (
        'check_gradients: on: got "launched" without a process group, expected ranks that a launcher has started and a '
        "group connects; call torch.distributed.init_process_group() on each first, under torchrun, or name "
        '"gloo"'
    )


@pytest.mark.parametrize("torch_distributed", [False, True])
def test_on_simulated_ranks(torch_distributed):
    def check(rank):
        return refusal(RuntimeError, check_gradients, sum_of_squares, [numbers(2)] * 2, **LAUNCHED)

    for text in simulate(check, range(2), torch_distributed=torch_distributed):
        assert 'on: got "launched" on a simulated rank, expected a process of a launcher' in text


# ── what travels ─────────────────────────────────────────────────────────────────────────────────────────

DTYPES = [torch.float8_e5m2, torch.uint16, torch.bfloat16, torch.complex64, torch.double, torch.bool, torch.int64]


def test_results_travel_whole():
    tensors = [torch.arange(6).view(2, 3).to(dtype).T for dtype in DTYPES]
    tensors += [
        torch.zeros(0, 3),
        torch.tensor(math.inf),
        torch.randn(2, dtype=torch.cdouble).conj(),
        torch.ones(1).expand(4),
    ]
    gradients = Gradients(tensors, [])
    given = [
        {"a": (1, None, True), 2: [math.nan, -math.inf]},
        Measurement([], gradients, None, {"b": tensors[4]}, ("c",), 1.5),
    ]
    text, sent = launched.packed([given, Cuts(("x",))])
    data = torch.cat([launched._bytes(x) for x in sent])
    (first, measured), cuts = launched.unpacked(text, data)
    assert str(first) == str(given[0]) and cuts == Cuts(("x",))
    assert measured.attributes == ("c",) and measured.second is None and type(measured.first) is Gradients
    for got, wanted in zip(measured.first.inputs, tensors, strict=True):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        assert torch.equal(got.to(torch.cdouble), wanted.to_dense().to(torch.cdouble))
    assert torch.equal(measured.state["b"], tensors[4])


def test_what_is_no_result_does_not_travel():
    with pytest.raises(TypeError, match="launched ranks: a result holds object, which does not travel between them"):
        launched.packed([object()])


@pytest.mark.parametrize("name", [["processes", "Member"], ["worker", "os"], ["pickling", "load"], ["nowhere", "Any"]])
def test_nothing_but_results_is_made(name):
    text = json.dumps({"class": name, "fields": {}})
    with pytest.raises((TypeError, KeyError)):
        launched.unpacked(text, torch.empty(0, dtype=torch.uint8))
