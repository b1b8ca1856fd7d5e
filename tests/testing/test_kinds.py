"""Kinds of programs whose verdict has been wrong once, each both ways: right ones are right, wrong ones are not."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Shard
from torch.nn.parallel import DistributedDataParallel as DDP
from verdicts import differs, loss, matches, numbers, observed, rows, ruled, several, sharded, summed, value

import diffcoll as dc
from diffcoll.testing import assert_matches_single_process

EVEN = (4, 4)
DTYPES = pytest.mark.parametrize("dtype", [torch.double, torch.float, torch.bfloat16], ids=str)


def size():
    return dc.get_world_size()


def layer(*shape):
    torch.manual_seed(0)
    return nn.Linear(*shape)


# ── what the ranks return ────────────────────────────────────────────────────────────────────────────────


def with_metric(metric, of_one=None):
    def distributed(module, x, metric=metric):
        y = module(x)
        return {"loss": y.square().mean(), "metric": metric(y.detach())}

    return distributed, partial(distributed, metric=of_one or metric), rows, {"module": layer(3, 1), "ranks": EVEN}


def accuracy(y):
    return (y > 0).double().mean()


def count(y):
    return (y > 0).sum()


def test_a_metric_is_right_or_combined_with_a_word():
    assert not matches(with_metric(lambda y: dc.all_reduce(accuracy(y), "mean"))).notes
    (note,) = matches(with_metric(accuracy)).notes
    assert "metric" in note and "mean" in note
    (note,) = matches(with_metric(count)).notes
    assert "metric" in note and "sum" in note
    report = differs(with_metric(lambda y: dc.all_reduce(accuracy(y)), accuracy))
    assert [row.what for row in report.tables[0].rows if not row.ok] == ["value['metric']"]
    differs(with_metric(lambda y: 2.0001 * dc.all_reduce(accuracy(y)), accuracy))
    report = differs(with_metric(lambda y: count(y) + 100 * several(), count))
    assert "not" in str(report) and "not finite" not in str(report)
    report = differs(with_metric(lambda y: bool(several()), lambda y: False))
    assert "True, not False" in str(report)


def off_by(factor):
    """The value is off, and the gradient is right."""
    return summed(lambda x: ruled(lambda x: dc.all_reduce(x) * factor, lambda g: g)((x**2).sum()), ranks=EVEN)


def test_a_loss_may_be_off_by_exactly_the_size_of_an_axis():
    right = (off_by(1)[0], lambda x: (x**2).sum(), *off_by(1)[2:])
    assert "N times" in matches(right).notes[0]
    for factor in (1.00005, 0.75, 3.0):
        differs((off_by(factor)[0], *right[1:]))


def test_results_of_other_keys_are_refused():
    def named(key):
        return lambda x: {"loss": value(x), key: x.detach().sum()}

    matches(summed(named("aux"), named("aux"), ranks=EVEN))
    matches(summed(lambda x: {"aux": x.detach().sum(), "loss": value(x)}, named("aux"), ranks=EVEN))
    with pytest.raises(ValueError, match="'z'"):
        matches(summed(named("aux"), named("z"), ranks=EVEN))


def test_a_flag_that_is_divided():
    """Its shape fits several axes."""
    placements = {"x": {"dp": Shard(0)}, "y": {"tp": Shard(0)}}

    def positive(x, y, of=0.0):
        return (value(x) + value(y)) / (2 if several() else 1), x[:, 0] > of

    program = positive, positive, (rows(8), rows(6)), {"ranks": {"tp": 2, "dp": 2}, "placements": placements}
    matches(program, losses="sum")
    differs((lambda x, y: positive(x, y, 0.5 * several()), *program[1:]), losses="sum")


# ── axes ─────────────────────────────────────────────────────────────────────────────────────────────────


def of_rows(*axes):
    return {"x": {axis: Shard(dim) for dim, axis in enumerate(axes)}}


def test_nothing_is_divided_along_an_axis():
    program = loss, loss, rows(8), {"module": layer(3, 2), "ranks": {"dp": 2}}
    with pytest.raises(ValueError, match="along which nothing is divided"):
        matches(program)
    matches(program, placements=of_rows("dp"))
    with pytest.raises(ValueError, match="axis cp along which nothing is divided"):
        matches(program, ranks={"dp": 2, "cp": 2}, placements=of_rows("dp"))

    def own_rows(module, x):  # each rank takes its part of what all have
        return loss(module, x.chunk(size())[dc.get_rank()])

    matches((own_rows, *program[1:]), losses={"dp": "mean"})


def test_each_run_has_its_own_axes():
    placements = {"x": {"dp": Shard(0), "cp": Shard(1)}}
    runs = [{"dp": 2}, {"cp": 2}, {"dp": 2, "cp": 2}]
    program = value, value, (numbers(4, 6, 3),), {"ranks": runs, "placements": placements, "losses": "sum"}
    matches(program)
    differs((lambda x: value(x) * (1 + several()), *program[1:]))


def test_the_size_of_which_axis():
    """What fits all runs is named; where several fit, all are."""

    def shard(module, mesh):
        module.cp = mesh["cp"].size()
        return module

    def divided(module, x):
        return module(x).square().mean() / module.cp

    more = {"module": layer(3, 2), "shard": shard, "placements": of_rows("dp", "cp")}
    program = divided, lambda module, x: module(x).square().mean(), numbers(12, 6, 3), more
    words = observed(differs(program, ranks=[{"dp": 2, "cp": 2}, {"dp": 2, "cp": 3}]))
    assert "1/the size of cp times" in words and "size of dp" not in words
    words = observed(differs(program, ranks={"dp": 2, "cp": 2}))
    assert "1/the size of dp or 1/the size of cp" in words


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.tensor(2.0)), nn.Parameter(numbers(3))

    def forward(self, x):
        return (self.scale * (x @ self.weight)).sin().mean()


@pytest.mark.parametrize("on", [["simulated"]])
def test_one_number_that_nobody_averages(on):
    def step(module, x, names=("weight", "scale")):
        module(x).backward()
        for name in names:
            p = module.get_parameter(name)
            p.grad = dc.all_reduce(p.grad, "mean")

    given = {"module": Scaled(), "ranks": [EVEN, (2, 2, 2, 2)], "on": on}
    matches((step, step, rows(8), given))
    report = differs((partial(step, names=("weight",)), step, rows(8), given))
    assert "scale: right after a mean over the ranks" in observed(report)


def test_data_parallelism_with_a_factor():
    """No other rank's loss depends on a rank's rows, which is no finding."""
    report = differs(summed(lambda x: value(x) * (3 if several() else 1), ranks=EVEN))
    assert "3 times" in observed(report) and "reaches" not in observed(report)
    local = ruled(dc.all_reduce, lambda g: g)
    report = differs(summed(lambda x: local(x.sum(0)).sin().sum() / size(), lambda x: x.sum(0).sin().sum(), ranks=EVEN))
    assert "no other rank's loss reaches it" in observed(report)


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────


def whole_step(module, x, average=True, further=1.0):
    """It leaves no gradient."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    value = module(x).sum(-1).square().mean()
    value.backward()
    for p in module.parameters():
        p.grad = dc.all_reduce(p.grad, "mean") if average else p.grad
    optimizer.param_groups[0]["lr"] *= further if several() else 1
    optimizer.step()
    optimizer.zero_grad()
    return value


@DTYPES
def test_a_step_with_zero_grad(dtype):
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [1, 1]])
    torch.manual_seed(0)
    given = {"module": nn.Embedding(6, 3), "ranks": (2, 2), "dtype": dtype}
    matches((whole_step, whole_step, ids, given))
    for more in ({"average": False}, {"further": 2.0}):
        differs((partial(whole_step, **more), whole_step, ids, given))


def test_ddp_within_the_function():
    """The gradients are averaged already, and the condition does not say that nobody does."""

    kept = []  # DDP reduces as long as it exists

    def step(module, x):
        wrapped(module, x).backward()

    def wrapped(module, x):
        kept.append(DDP(module) if several() else module)
        return loss(kept[-1], x)

    given = {"module": layer(3, 2), "ranks": EVEN}
    assert not matches((step, step, rows(8), given)).condition

    assert not matches((wrapped, loss, rows(8), given)).condition
    assert matches((loss, loss, rows(8), given)).condition


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def test_a_layer_that_was_forgotten():
    def shard(whole, mesh):
        fully_shard(whole.first, mesh=mesh)
        return whole

    report = matches(sharded(shard, {"dp": 2}, Two(), rows(8)))
    assert "last.weight" in report.condition and "first.weight" not in report.condition
    report = matches(sharded(lambda whole, mesh: fully_shard(shard(whole, mesh), mesh=mesh), {"dp": 2}, Two(), rows(8)))
    assert not report.condition


# ── the batch ────────────────────────────────────────────────────────────────────────────────────────────


def halo(x, at):
    """The rows of a rank and one row of each neighbour."""
    n, k = at.mesh["sp"], len(x) // at.mesh["sp"]
    return x[max(at["sp"] * k - 1, 0) : min((at["sp"] + 1) * k + 1, n * k)]


def test_inputs_that_overlap():
    """The gradients of shared positions are parts of a sum."""

    def single(x):
        return (x[1:] * x[:-1].sin()).sum()

    def distributed(x):
        own = slice(0 if dc.get_rank() == 0 else 1, None)  # each pair of rows counts once
        return single(x[own])

    program = distributed, single, rows(8), {"ranks": {"sp": 2}, "losses": "sum"}
    matches(program, placements={"x": {"sp": (halo, Partial())}})
    report = differs(program, placements={"x": {"sp": halo}})
    assert "right after a sum over sp" in observed(report) and "forward that differs" not in observed(report)
    differs((single, *program[1:]), placements={"x": {"sp": (halo, Partial())}})


def test_rows_are_derived_from_the_batch():
    for n in (3, 6, 7, 12):
        report = assert_matches_single_process(value, value, rows(n), losses="sum", on=["simulated"])
        assert len(report.tables) > 1 and any("0, " in table.title for table in report.tables)
    with pytest.raises(ValueError, match=r"torch\.stack"):
        matches((loss, loss, [*rows(8)], {"module": layer(3, 2)}))


def test_data_of_small_seeds():
    """They are not the numbers that the check draws."""
    for seed in range(3):
        matches(summed(lambda x: x.sin(), batch=numbers(8, 3, seed=seed)))


# ── cuts ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("inside", [False, True])
def test_the_lines_that_cut_the_graph(inside):
    """A collective under no_grad is one, of what is computed there, too; a value that is logged is none."""
    logged = []

    def distributed(x):
        own = x.sum(0)
        with torch.no_grad():
            total = dc.all_reduce(torch.stack([x.sum(0)]).squeeze(0) if inside else own)
        loss = (total * x).sum()
        logged.append(loss.detach())
        return loss

    report = differs(summed(distributed, lambda x: (x.sum(0) * x).sum(), ranks=EVEN))
    assert any("all_reduce at" in cut and "no_grad" in cut for cut in report.cuts), report
    assert not any("detach()" in cut for cut in report.cuts)


def test_shared_losses_have_the_same_help():
    """Ranks that have parts of one loss: what backward gives is compared with what moves."""

    def single(x):
        return F.softplus(x.sum(0)).sum()

    def distributed(rule, x):
        return F.softplus(ruled(dc.all_reduce, rule)(x.sum(0))).sum()

    given = {"ranks": {"cp": 2}, "placements": {"x": {"cp": Shard(0)}}, "losses": {}}
    matches((partial(distributed, lambda g: g), single, rows(8), given))
    report = differs((partial(distributed, lambda g: g * torch.tensor([1.0, 2, 3]).to(g)), single, rows(8), given))
    assert "backward does not give the derivative" in observed(report)
    report = differs((lambda x: distributed(lambda g: g, 2 * x), single, rows(8), given))
    assert "it is the forward that differs" in observed(report)


def test_a_group_that_is_not_the_default(on=("simulated",)):
    """A collective of torch.distributed of one axis is one."""

    def shard(module, mesh):
        module.group = mesh["dp"].get_group()
        return module

    def step(module, x):
        loss(module, x).backward()
        for p in module.parameters() if several() else ():
            dist.all_reduce(p.grad, group=module.group)
            p.grad /= dist.get_world_size(module.group)

    program = step, step, rows(8), {"module": layer(3, 2), "shard": shard, "placements": of_rows("dp", "cp")}
    matches(program, ranks={"dp": 2, "cp": 1})
