"""Verdicts of the check against one process: right programs are right, wrong ones are caught and observed.

Each program is made by a function and is one of `verdicts`.
"""

import re
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import field
import pytest
import torch
import torch.distributed as dist
from planted import PLANTED, clip, right_gather
from planted import RIGHT as RIGHT_LOSSES
from sharded_programs import PROGRAMS, sequence
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from verdicts import (
    cached_rank,
    differs,
    loss,
    matches,
    numbers,
    observed,
    rows,
    ruled,
    several,
    sharded,
    summed,
    value,
    with_more,
)

import diffcoll as dc

EVEN = (4, 4)
BY_ROWS = {"ranks": {"dp": 2}, "placements": {"x": {"dp": Shard(0)}}}
ON = ["simulated", pytest.param("gloo", marks=pytest.mark.slow)]


def layer(*shape, kind=nn.Linear):
    torch.manual_seed(0)
    return kind(*shape, dtype=torch.double)


def squares(module, x):
    return module(x).square().sum()


# ── right programs ───────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Output:
    loss: torch.Tensor
    more: OrderedDict
    name: str = "a model"


class ModelOutput(OrderedDict):
    """As Transformers has it."""


def outputs_of_all_kinds():
    def loss(x):
        flags = bool((x > 1).any()), (x > -0.1).all(), 7
        output = Output((x**3).sum(0, keepdim=True).sum(1), ModelOutput(logits=x.sin(), cache=None))
        return output, (x > 0).sum(), int((x < 0).sum()), len(x), *flags

    return summed(loss, order=2)


def outputs_of_all_rows():
    """Every rank returns the rows of all."""

    def distributed(x):
        return dc.all_gather(x.sin(), grad_placement="replicate")

    return distributed, torch.sin, rows(6), {**BY_ROWS, "losses": {}}


def normalized(update, **more):
    """Batch norm of all rows, with a rule for its running variance."""

    def distributed(norm, x):
        _, n = field.rows_of_all(x)
        mean = dc.all_reduce(x.sum(0)) / n
        variance = dc.all_reduce(((x - mean) ** 2).sum(0)) / n
        with torch.no_grad():
            norm.num_batches_tracked += 1
            norm.running_mean.lerp_(mean, 0.1)
            update(norm.running_var, variance, n)
        return (x - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias

    norm = nn.BatchNorm1d(3).double()
    with torch.no_grad():
        norm.weight.copy_(numbers(3))
    return distributed, lambda norm, x: norm(x), rows, {"module": norm, **more}


def _unbiased(running, variance, n):
    running.lerp_(variance * n / (n - 1), 0.1)


def _on_rank_zero(running, variance, n):
    if dc.get_rank() == 0:
        _unbiased(running, variance, n)


class Held(nn.Module):
    """Holds what pickle refuses."""

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(layer(3, 2))
        self.lock, self.again, self.event = threading.Lock(), threading.RLock(), threading.Event()
        self.parent, self.gone = weakref.ref(self), weakref.ref(nn.Linear(1, 1))

    def forward(self, x):
        with self.lock, self.again:
            assert self.parent() is self and self.gone() is None and not self.event.is_set()
            return self.linear(x)


# A step runs its own backward and optimizer; what it leaves is compared.


def averaged(module):
    for p in module.parameters():
        if several():
            dist.all_reduce(p.grad)
            p.grad /= dc.get_world_size()


def step(average=averaged):
    """Two micro-batches, a clipped norm, and two steps of an optimizer; the mean over ranks of equally many rows."""

    def train(module, x):
        steps = torch.optim.Adam(module.parameters(), lr=1e-3)
        for batch in (x, x.flip(1)):
            steps.zero_grad()
            for part in (batch[::2], batch[1::2]):
                (module(part).square().mean() / 2).backward()
            average(module)
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            steps.step()
        return {"norm": norm, "loss": module(x).square().mean()}

    return train, train, rows, {"module": layer(3, 2), "ranks": [(4, 4), (2, 2, 2, 2)]}


def small_and_further(factor):
    """The learning rate is small, so the parameter after the step is nearly right."""

    def train(module, x):
        value = module(x).square().mean()
        value.backward()
        averaged(module)
        with torch.no_grad():
            for p in module.parameters():
                p -= 1e-3 * (factor if several() else 1) * p.grad
        return value

    return train, train, rows, {"module": layer(3, 2), "ranks": EVEN}


def averages_of_weights():
    """A moving average in buffers, and nothing that has a gradient."""

    def update(module, x):
        with torch.no_grad():
            mean = dc.all_reduce(x.sum(0)) / field.rows_of_all(x)[1]
            module.running_mean.lerp_(mean, 0.1)

    return update, update, rows, {"module": nn.BatchNorm1d(3).double()}


def with_a_frozen_number(change):
    """It is `change()` after the call."""
    module = layer(3, 2)
    module.kept = nn.Parameter(torch.zeros(1, dtype=torch.double), requires_grad=False)

    def loss(module, x):
        with torch.no_grad():
            module.kept += change()
        return squares(module, x)

    return summed(loss, module=module, ranks=EVEN)


RIGHT = {
    **{f"{name}, order 2": with_more(make, order=2) for name, make in RIGHT_LOSSES.items()},
    "outputs of all kinds": outputs_of_all_kinds,
    "a module that pickle refuses": lambda: summed(squares, module=Held()),
    "outputs of all rows": outputs_of_all_rows,
    "uneven pieces": lambda: summed(value, batch=rows(5), **BY_ROWS),
    "batch norm, as a mean": lambda: normalized(_unbiased, order=2),
    "batch norm, as a sum": lambda: normalized(_unbiased, order=2, losses="sum"),
    "a step": step,
    "a step whose graph is freed": lambda: small_and_further(1),
    "a moving average": averages_of_weights,
    "a frozen number": lambda: with_a_frozen_number(lambda: 0),
    "zero but for rounding": lambda: summed(torch.sum, lambda x: x.mean(0).sum() * 8, rows(8) - rows(8).mean(0)),
    "in single precision, with a tolerance": lambda: in_single_precision(tolerance=1e-5),
    "somebody sums later": partial(sequence, "said to be partial"),
    **{
        name: with_more(make, ranks=[EVEN, (2, 2, 2)] if "torch.distributed.nn" in name else [(5, 3), (0, 2, 4, 2)])
        for name, make in field.RIGHT.items()
    },
    **{make.__name__: partial(make, "") for make in PROGRAMS},
}


@pytest.mark.filterwarnings("ignore:.*torch.distributed.nn:FutureWarning")
@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_right(name, on):
    matches(RIGHT[name](), on=[on])


# ── wrong programs ───────────────────────────────────────────────────────────────────────────────────────


def a_wrong_count(of_rank):
    return summed(lambda x: ((x**2).sum(), of_rank(x, field.rows_of_all(x)[1])), lambda x: ((x**2).sum(), len(x)))


class Numbers(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor(values, dtype=dtype)) for values in ([1.0, 2.0], [3.0, 6.0]))


def tiny_and_twice(factor=1e-3, dtype=torch.double):
    """One gradient is much smaller than the other, and exactly N times too large."""

    def loss(m, x):
        n = dc.get_world_size()
        return (x[:, :2] * m.a).pow(2).sum() * 1e3 + n * (factor * (x[:, 1:] * m.b)).sin().sum()

    return summed(loss, batch=lambda n: rows(n, dtype=dtype), module=Numbers(dtype), ranks=EVEN, dtype=None)


def a_weight_that_is_an_argument():
    """It has the name of a parameter, on a mesh."""

    def single(module, x, weight):
        return (module(x).square().sum(1) * weight).sum()

    def distributed(module, x, weight):
        return single(module, x, ruled(torch.clone, lambda g: 2 * g)(weight) if several() else weight)

    placements = {key: {"dp": Shard(0)} for key in ("x", "weight")}
    batch, more = (rows(8), numbers(8)), {"module": layer(3, 2), "ranks": {"dp": 2}, "placements": placements}
    return summed(distributed, single, batch, **more)


def without_a_row(x):
    return value(x[:-1] if dc.get_rank() == 1 else x)


def in_single_precision(**more):
    def fn(x):
        return x.float().sin().double().sum() + 0 * dc.all_reduce(x.sum())

    return summed(fn, value, ranks=EVEN, **more)


def exchanged():
    """Outputs of one shape have the gradient of the other one."""

    def single(x):
        return x.sin(), x.square()

    def distributed(x):
        a, b = single(x)
        return a.detach() + (b - b.detach()), b.detach() + (a - a.detach())

    return distributed, single, rows(4), {"ranks": (3, 1)}


TWICE = '2 = N times that of one process, exact under "mean"'
PIECES = {"ranks": {"cp": 3}, "placements": {"x": {"cp": Shard(0)}}}
#: name: (program, words that are observed)
WRONG = {
    "a count on rank 0 alone": (lambda: a_wrong_count(lambda x, n: len(x) if dc.get_rank() else n), "output"),
    "a wrong count": (lambda: a_wrong_count(lambda x, n: len(x) + 1000), r"output\[1\]: other numbers"),
    "a buffer of rank 0": (lambda: normalized(_on_rank_zero), "buffer running_var"),
    "a frozen number": (lambda: with_a_frozen_number(several), "parameter kept"),
    "the wrong sign": (lambda: summed(lambda x: (-1) ** several() * (x**3).sum()), "-1 times that of one process"),
    "tiny and N times": (tiny_and_twice, f"b: {TWICE}"),
    "small in float32": (lambda: tiny_and_twice(0.1, torch.float), f"b: {TWICE}"),
    "the sum of a mean": (
        with_more(partial(clip, right_gather), losses="sum", ranks=EVEN),
        f"value, image, text and scale: {TWICE}",
    ),
    "a weight that is an argument": (a_weight_that_is_an_argument, "weight: 2 = "),
    "a step that averages nothing": (lambda: step(lambda module: None), "the rank's own part"),
    "a step that sums": (lambda: small_and_further(2), "parameter weight.*: moved 2 = N times as far"),
    "a step three times as far": (lambda: small_and_further(3), "parameter weight.*: moved 3 times as far"),
    "another shape": (
        lambda: summed(lambda x: x.sum(1, keepdim=True), lambda x: x.sum(1), ranks=(5, 3)),
        r"\(5, 1\), \(3, 1\).*\(8,\)",
    ),
    "rows in place of a number": (lambda: summed(lambda x: x.sum(1), value), r"\(4,\), \(4,\) on the ranks, \(\) on"),
    "rows left out": (lambda: summed(without_a_row, value, ranks=EVEN), "x: zero in row 7 of the whole"),
    "another rank's piece": (
        lambda: (dc.shift, lambda x: x * 1, rows(6), PIECES),
        "output: rank 0 has rank 2's piece, rank 1 has rank 0's piece",
    ),
    "exchanged outputs": (exchanged, ""),
    "in single precision": (in_single_precision, ""),
    "random": (lambda: summed(lambda x: (nn.functional.dropout(x, 0.5) ** 2).sum()), "with another seed"),
    "three ranks": (
        lambda: summed(lambda x: value(x) * max(dc.get_world_size() - 1, 1), ranks=[EVEN, (4, 4, 4)]),
        "right on up to 2 ranks, wrong on 3",
    ),
    **{name: (with_more(make, ranks=EVEN), "") for name, make in field.WRONG.items()},
    **{
        f"{name}, {n} ranks": (with_more(make, ranks=ranks[n]), words)
        for name, (make, ranks, words) in PLANTED.items()
        for n in (2, 3)
    },
    **{
        f"{make.__name__}, {bug}": (partial(make, bug), words)
        for make, bugs in PROGRAMS.items()
        for bug, words in bugs.items()
    },
}


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_caught(name, on):
    make, words = WRONG[name]
    report = differs(make(), on=[on], timeout=20)  # ranks whose blocks differ wait on gloo
    assert report.observed and re.search(words, observed(report)), str(report)
    assert "weighted" in words or not words or "weighted" not in observed(report)
    assert "counts once" in words or "counts once" not in observed(report)


# ── what reduces gradients ───────────────────────────────────────────────────────────────────────────────


def replicated(whole, mesh):
    whole.weight = nn.Parameter(distribute_tensor(whole.weight.detach(), mesh["dp"], [Replicate()]))
    return whole


def of_local_weight(module, x):
    weight = module.weight.to_local() if several() else module.weight
    return (x @ weight.T + module.bias).sin().mean()


def test_who_has_reduced():
    def program(shard, fn=loss, **more):
        return sharded(shard, {"dp": 2}, layer(3, 2), rows(6), fn, **more)

    words = "if you average gradients over dp (wrap the model in DDP, or pass already_reduced)"
    assert matches(program(lambda whole, mesh: DDP(whole, process_group=mesh["dp"].get_group()))).condition == ""
    report = matches(program(lambda whole, mesh: whole))
    assert report.condition == words and words in str(report).splitlines()[0]
    report = differs(program(lambda whole, mesh: whole, already_reduced=["dp"]))
    assert "right after a mean over dp" in observed(report)
    with pytest.raises(ValueError, match="group is ranks"):
        matches(program(lambda whole, mesh: DDP(whole, process_group=dist.new_subgroups(group_size=1)[0])))
    differs(program(replicated, of_local_weight))
    of_rows = loss, loss, rows(8), {"module": layer(3, 2), "ranks": EVEN}
    assert matches(of_rows).condition
    differs(of_rows, already_reduced=["ranks"])


def test_a_value_that_is_off_while_gradients_are_right():
    """It is noted; a value that is off by another factor is wrong."""

    def program(factor):  # the loss of the whole batch on every rank; the gradient is this rank's share
        whole = ruled(lambda x: dc.all_reduce(x) * factor, lambda g: g)
        return summed(lambda x: whole((x**2).sum()), lambda x: (x**2).sum(), ranks=EVEN)

    assert matches(program(1)).notes == ("value: N times that of one process; all gradients are right (rows 4, 4)",)
    differs(program(0.75))


# ── precision ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", [3, 25])
def test_a_bias_before_batch_norm_in_single_precision(seed):
    """Its gradient is zero but for rounding, which differs between ranks and one process by more than the tolerance."""
    torch.manual_seed(seed)
    width = (4, 16, 64)[seed % 3]
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width))
    model.extend([nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 3)])
    model = dc.nn.convert_sync_batchnorm(model)
    x = torch.randn(32, 8) * (1 + seed % 5) + seed % 7

    def loss(model, x):
        return (model(x) ** 2).sum() / 32

    right = summed(loss, batch=x, module=model, ranks=[(16, 16), (20, 12)], dtype=None)
    allowed = [row.allowed for table in matches(right).tables for row in table.rows if not row.what.endswith(".bias")]
    assert max(allowed) < 3e-4  # of the others no more than before

    def off_by_little(model, x):
        y = loss(model, x)
        return y + (0.002 if several() else 0) * (y - y.detach())

    differs((off_by_little, *right[1:]))
    matches(right, dtype=torch.double)


def test_rare_rows_of_one_rank_and_of_a_sharded_program():
    """Row 2 of rank 1 is 1e-4 of the largest one, and twice too large: less than the tolerance of the largest."""
    torch.manual_seed(0)
    x = torch.randn(12, 4).requires_grad_()
    weights = torch.ones(12)
    weights[6] = 3e-5  # row 2 of the second of three ranks

    def loss(x, weights):
        return (x**3).sum(1) @ weights

    def twice(g):
        return g * (1 + (torch.arange(len(g)) == 2))[:, None]

    def wrong(x, weights):
        return loss(ruled(torch.clone, twice)(x) if dc.get_rank() == 1 else x, weights)

    placed = {"ranks": {"tp": 3}, "placements": {key: {"tp": Shard(0)} for key in ("x", "weights")}}
    for more in ({"ranks": (4, 4, 4)}, placed):
        matches(summed(loss, batch=(x, weights), dtype=None, **more))
        differs(summed(wrong, loss, (x, weights), dtype=None, **more))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128], ids=str)
def test_other_dtypes(dtype):
    def distributed(x):
        return (dc.all_reduce(x.sum(0)).abs() ** 2).sum() / dc.get_world_size()

    program = distributed, lambda x: (x.sum(0).abs() ** 2).sum(), numbers(8, 4, dtype=dtype), {"dtype": None}
    matches(program, losses="sum")
    differs(program, ranks=(5, 3))


# ── what simulated ranks share, and what copies have ─────────────────────────────────────────────────────

BOTH = ["simulated", "gloo"]


def test_state_that_simulated_ranks_share():
    weights = torch.arange(1.0, 9.0)

    def distributed(x):
        return (x.sum(1).sin() * weights[len(x) * cached_rank() :][: len(x)]).sum()

    program = summed(distributed, lambda x: (x.sum(1).sin() * weights).sum(), ranks=EVEN)
    cached_rank.cache_clear()
    report = differs(program, on=BOTH)
    assert "wrong on simulated ranks, right on gloo" in observed(report)
    assert [table.ok for table in report.tables] == [False, True]


def test_right_on_simulated_ranks_and_wrong_on_processes():
    def distributed(x):
        on_process = threading.current_thread() is threading.main_thread() and several()
        return (x**2).sum() * (2 if on_process else 1)

    report = differs(summed(distributed, lambda x: (x**2).sum()), ranks=EVEN, on=BOTH)
    assert "right on simulated ranks, wrong on gloo" in observed(report)


def test_nothing_of_the_users_is_modified():
    module, x = layer(3, 2), rows(8)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    kept, state = x.clone(), torch.get_rng_state()

    def modifies(module, x):
        return squares(module, x.mul_(2))

    matches(summed(modifies, batch=x, module=module), on=BOTH)
    matches(summed(squares, batch=x, module=layer(3, 2).float()))
    assert torch.equal(x, kept) and x.grad is None and all(p.grad is None for p in module.parameters())
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_within_inference_mode():
    """Its tensors can have no gradient outside of it."""
    with torch.inference_mode():
        matches(summed(value, batch=rows(8), ranks=EVEN, order=2))


def test_rows_in_another_order_hide_local_statistics():
    """Moments of permuted rows are equal, and those of mirrored ones to second order."""
    half = rows(4)

    def local(x, *_):
        return ((x - x.mean(0)) ** 2).mean(0).sum() * len(x)

    for other in (half, half.flip(0), -half, -half.roll(1, 0)):
        for batch in (torch.cat([half, other]), (torch.cat([half, other]), torch.arange(8) % 4 // 4)):
            with pytest.raises(ValueError, match=r"the same .* on ranks 0 and 1"):
                matches(summed(local, batch=batch, ranks=EVEN))

    # labels that are permuted beside other rows, or equal weights of permuted token ids, hide nothing
    def loss(table, ids, weights):
        return table(ids).sin().sum(1) @ weights

    ids, ones = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0]), torch.ones(8, dtype=torch.double)
    matches(summed(loss, batch=(ids, ones), module=layer(4, 3, kind=nn.Embedding), ranks=EVEN))
    signs = torch.tensor([1.0, 1, -1, -1, 1, -1, -1, -1], dtype=torch.double)
    matches(summed(lambda x: (x**3).sum(), batch=signs, ranks=EVEN))
