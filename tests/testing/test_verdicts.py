"""Verdicts of the check against one process: right programs pass, wrong ones are caught, and named if it is certain.

Each is made by a function that returns a program of `verdicts`. The wrong ones have the causes that must be named, and
those that must not be, because something else is wrong.
"""

import dataclasses
import os
import threading
import weakref
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from programs import cached_rank
from torch import nn
from torch.distributed.tensor import Partial, Shard
from verdicts import SIMULATED, causes, differs, is_right, is_wrong, matches, numbers, per_rank, ruled

import diffcoll as dc
from diffcoll.testing import UncheckedWarning, assert_matches_single_process, simulate

EVEN, UNEVEN = [(4, 4)], [(4, 4), (5, 3), (5, 0, 3)]


def rows(n, width=3, seed=0, dtype=torch.double):
    return numbers(n, width, seed=seed + n, dtype=dtype)


def layer(*shape, seed=0, kind=nn.Linear, **more):
    torch.manual_seed(seed)
    return kind(*shape, dtype=torch.double, **more)


def count(x):
    """The number of rows of all ranks."""
    return dc.all_reduce(torch.tensor(float(len(x)), dtype=torch.double))


def summed(distributed, single=None, batch=rows, **more):
    return distributed, single or distributed, batch, {"rank_reduction": "sum", **more}


def of_modules(loss, *modules, **more):
    """A loss of modules and of rows."""
    return summed(lambda *batch: loss(*modules, *batch), module=modules if modules[1:] else modules[0], **more)


def squares(module, x):
    return module(x).square().sum()


# ── right programs ───────────────────────────────────────────────────────────────────────────────────────


def _dictionary(kind):
    def loss(x):
        return kind(loss=(x**3).sum(), logits=x.sin(), cache=None, name="a model")

    return loss


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    cache: object = None
    name: str = ""


class ModelOutput(OrderedDict):
    """As Transformers has it."""


def counted():
    def loss(x):
        flags = bool((x > 1).any()), (x > -0.1).all(), 7
        return (x**2).sum(), (x > 0).sum(), int((x < 0).sum()), len(x), *flags

    return summed(loss)


def frozen(module):
    module.weight.requires_grad_(False)
    return module


def a_queue_of_all_rows():
    class Queue(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Parameter(torch.zeros(16, 3, dtype=torch.double), requires_grad=False)
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.double))

    queue = Queue()

    def loss(x):
        every = dc.all_gather(x.detach(), sizes="auto")
        value = (x * queue.weight).sum() + (x @ queue.rows.T.clone()).sum()
        with torch.no_grad():
            queue.rows[: len(every)] = every
        return value

    return summed(loss, module=queue)


def the_launchers_variables():
    """Divides by what torchrun says, as code of Accelerate does."""

    def distributed(x):
        size = int(os.environ["WORLD_SIZE"])
        assert 0 <= int(os.environ["RANK"]) == dc.get_rank() < size == dc.get_world_size()
        return (x**2).sum() * size / count(x)

    return distributed, lambda x: (x**2).sum() / len(x), rows, {}


def a_mask_gathered_without_a_gradient():
    """Floats that are no variables, and need no gradient."""

    def distributed(x, mask):
        return (x**2 * mask).sum() / dc.all_reduce(mask.sum().detach())

    def single(x, mask):
        return (x**2 * mask).sum() / mask.sum()

    return summed(
        distributed, single, lambda n: (rows(n), (rows(n, seed=5) > 0).double()), constant=["mask"], sizes=EVEN
    )


def a_value_that_is_n_times_too_large():
    """The loss of the whole batch on every rank; the gradient is the share of this rank."""
    whole = ruled(dc.all_reduce, lambda g: g)
    return summed(lambda x: whole((x**2).sum()), lambda x: (x**2).sum(), compare=["gradients", "state"])


def lazy():
    module = nn.Sequential(nn.LazyLinear(4), nn.Tanh()).double()
    module(rows(2))
    return module


class Graph(nn.Module):
    """Keeps a sparse matrix, and a tensor of its last call, as attributes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.double))
        self.neighbours = torch.eye(3, dtype=torch.double).to_sparse()
        self.last = torch.zeros(3)

    def forward(self, x):
        self.last = x.detach().sum(0)
        return torch.sparse.mm(self.neighbours, (x * self.weight).T).sin().sum()


def attributes():
    module = Graph()
    return summed(module, module=module)


def anchors_beside_the_rows():
    """A tensor that every rank has whole, and that has other rows than the batch: stated with a mesh."""

    def loss(x, anchors):
        return (x @ anchors.T).sigmoid().sum()

    more = {"mesh": {"dp": 3}, "placements": {"x": {"dp": Shard(0)}}, "rank_reduction": {"dp": "sum"}}
    return loss, loss, (rows(9), rows(4)), more


def outputs_of_all_rows():
    """Every rank returns the rows of all."""

    def distributed(x):
        return dc.all_gather(x.sin(), grad_placement="replicate")

    return distributed, torch.sin, rows(6), {"mesh": {"dp": 2}, "placements": {"x": {"dp": Shard(0)}}}


RIGHT = {
    "a loss of shape (1,)": lambda: summed(lambda x: (x**3).sum(0, keepdim=True).sum(1), order=2),
    "a lazy module": lambda: of_modules(squares, lazy()),
    "attributes": attributes,
    "a mask": a_mask_gathered_without_a_gradient,
    "a value N times too large": a_value_that_is_n_times_too_large,
    "token ids alone": lambda: of_modules(
        lambda table, ids: table(ids).sin().sum(), layer(7, 3, kind=nn.Embedding), batch=lambda n: torch.arange(n) % 7
    ),
    "a dictionary": lambda: summed(_dictionary(dict)),
    "a dataclass": lambda: summed(_dictionary(Output)),
    "an output of a model": lambda: summed(_dictionary(ModelOutput)),
    "two modules": lambda: of_modules(lambda a, b, x: squares(b, a(x).tanh()), layer(3, 4), layer(4, 2, seed=1)),
    "weight norm": lambda: of_modules(squares, nn.utils.parametrizations.weight_norm(layer(3, 4))),
    "orthogonal": lambda: of_modules(squares, nn.utils.parametrizations.orthogonal(layer(3, 4))),
    "spectral norm": lambda: of_modules(squares, nn.utils.parametrizations.spectral_norm(layer(3, 4))),
    "spectral norm of old": lambda: of_modules(squares, nn.utils.spectral_norm(layer(3, 4))),
    "anchors beside the rows": anchors_beside_the_rows,
    "outputs of all rows": outputs_of_all_rows,
    "counts": counted,
    "a frozen table": lambda: of_modules(squares, frozen(layer(3, 4))),
    "a queue of all rows": a_queue_of_all_rows,
    "the launcher's variables": the_launchers_variables,
}


ON = ["simulated", pytest.param("gloo", marks=pytest.mark.slow), pytest.param("mpi", marks=pytest.mark.slow)]


@pytest.mark.filterwarnings("ignore::diffcoll.testing.UncheckedWarning")
@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes(name, on):
    program = RIGHT[name]()
    if on == "mpi" and "mesh" in program[3]:
        pytest.skip("a mesh is one of torch.distributed")
    matches(program, on=[on])


# ── wrong programs ───────────────────────────────────────────────────────────────────────────────────────


def a_queue_of_local_rows():
    _, single, batch, more = a_queue_of_all_rows()
    queue = more["module"]

    def local(x):
        value = (x * queue.weight).sum() + (x @ queue.rows.T.clone()).sum()
        with torch.no_grad():
            queue.rows[: len(x)] = x
        return value

    return local, single, batch, more


def a_wrong_count():
    def distributed(x):
        return (x**2).sum(), len(x) + 1000

    return summed(distributed, lambda x: ((x**2).sum(), len(x)))


def a_count_on_rank_0_alone():
    def distributed(x):
        every = int(count(x))
        return (x**2).sum(), every if dc.get_rank() == 0 else len(x)

    return summed(distributed, lambda x: ((x**2).sum(), len(x)))


def another_loss_whose_gradients_alone_are_compared():
    return summed(
        lambda x: (x**3).sum() + dc.all_reduce(x.sum()), lambda x: (x**3).sum(), compare=["gradients"], sizes=EVEN
    )


def _normalized(running):
    """Batch norm of all rows, with a rule for the running variance."""
    norm = nn.BatchNorm1d(3).double()

    def distributed(x):
        n = count(x)
        mean = dc.all_reduce(x.sum(0)) / n
        variance = dc.all_reduce(((x - mean) ** 2).sum(0)) / n
        with torch.no_grad():
            norm.num_batches_tracked += 1
            norm.running_mean.lerp_(mean, 0.1)
            running(norm.running_var, variance, n)
        return (x - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias

    return summed(distributed, norm, module=norm, sizes=EVEN)


def _biased(running, variance, n):
    running.lerp_(variance, 0.1)


def _on_rank_zero(running, variance, n):
    if dc.get_rank() == 0:
        running.lerp_(variance * n / (n - 1), 0.1)


def _local(transform):
    """A loss of the rows of all ranks, of which the ranks get others."""

    def loss(x, every):
        return (x @ every.T).sin().sum()

    return summed(lambda x: loss(x, transform(dc.all_gather(x, sizes="auto"))), lambda x: loss(x, x), sizes=EVEN)


def _without_the_last_row(every):
    return every[:-1] if dc.get_world_size() > 1 else every


def _sign():
    return -1 if dc.get_world_size() > 1 else 1


def another_value_and_a_detach():
    """The rows of rank 1 count in the value, and have no gradient."""

    def distributed(x):
        return 1.1 * ((x.detach() if dc.get_rank() == 1 else x) ** 2).sum()

    return summed(distributed, lambda x: (x**2).sum(), sizes=EVEN)


def a_penalty_on_every_rank():
    """The squares of the weights count N times; the gradients of the rows are right."""
    return of_modules(lambda module, x: squares(module, x) + module.weight.square().sum(), layer(3, 2), sizes=EVEN)


def a_ring_in_the_other_direction():
    """Each rank gets the rows of the next rank, and not of the one before."""

    def single(x):
        return (x.sin() * x.roll(4, 0)).sum()

    return summed(lambda x: (x.sin() * dc.shift(x, -1)).sum(), single, sizes=[(4, 4, 4)])


def an_offset_of_equal_ranks():
    def distributed(x):
        first = dc.get_rank() * len(x)
        return (x.sum(1) * torch.arange(first, first + len(x))).sum()

    return summed(distributed, lambda x: (x.sum(1) * torch.arange(len(x))).sum())


def tiny_and_twice(factor=1e-3, dtype=torch.double):
    """One gradient is much smaller than the other, and exactly N times too large."""
    large, small = (nn.Parameter(torch.tensor([k, 2 * k], dtype=dtype)) for k in (1.0, 3.0))

    def distributed(x):
        return (x[:, :2] * large).pow(2).sum() * 1e3 + dc.get_world_size() * (factor * (x[:, 1:] * small)).sin().sum()

    def single(x):
        return (x[:, :2] * large).pow(2).sum() * 1e3 + (factor * (x[:, 1:] * small)).sin().sum()

    return summed(distributed, single, lambda n: rows(n, dtype=dtype), module=[large, small], sizes=EVEN)


def a_frozen_number_that_only_ranks_change():
    module = layer(3, 2)
    module.kept = nn.Parameter(torch.zeros(1, dtype=torch.double), requires_grad=False)

    def loss(x):
        with torch.no_grad():
            module.kept += dc.get_world_size() > 1
        return squares(module, x)

    return summed(loss, module=module, sizes=EVEN)


def a_number_with_a_detached_part():
    scale = nn.Parameter(torch.tensor(0.7, dtype=torch.double))

    def loss(x, keep):
        return (scale * x).sin().sum() + keep(scale) * (x**2).sum()

    return summed(lambda x: loss(x, lambda s: s.detach()), lambda x: loss(x, lambda s: s), module=[scale], sizes=EVEN)


def a_target_that_is_not_stopped():
    def loss(x, stop):
        target = stop(dc.all_reduce(x.sum(0)) / count(x))
        return ((x - target) ** 3).sum()

    return summed(lambda x: loss(x, lambda y: y), lambda x: loss(x, lambda y: y.detach()), sizes=EVEN)


#: name: (program, causes that must be named, causes that must not be)
WRONG = {
    "a queue of local rows": (a_queue_of_local_rows, ["local statistics"], []),
    "a count on rank 0 alone": (a_count_on_rank_0_alone, ["another loss"], []),
    "only gradients are compared": (
        another_loss_whose_gradients_alone_are_compared,
        ["another loss"],
        ["another gradient", "stop-gradient"],
    ),
    "a wrong count": (a_wrong_count, ["another loss"], ["local statistics"]),
    "a biased running variance": (lambda: _normalized(_biased), ["another state"], ["local statistics"]),
    "a buffer of rank 0": (lambda: _normalized(_on_rank_zero), ["another state"], ["local statistics"]),
    "a frozen number": (a_frozen_number_that_only_ranks_change, ["another state"], ["another loss"]),
    "a ring in the other direction": (a_ring_in_the_other_direction, [], ["local statistics"]),
    "an offset of equal ranks": (an_offset_of_equal_ranks, ["uneven"], ["local statistics"]),
    "the wrong sign": (lambda: summed(lambda x: _sign() * (x**3).sum(), sizes=EVEN), ["another loss"], ["multiplied"]),
    "another value, and a detach": (another_value_and_a_detach, ["no contribution"], ["left out"]),
    "a penalty on every rank": (a_penalty_on_every_rank, ["another loss"], ["local statistics"]),
    "a row is dropped": (lambda: _local(_without_the_last_row), [], ["local statistics"]),
    "local mean": (lambda: summed(lambda x: ((x - x.mean(0)) ** 2).sum(), sizes=EVEN), ["local statistics"], []),
    "tiny and N times": (tiny_and_twice, ["no reduction"], ["scaled"]),
    "small in float32": (lambda: tiny_and_twice(0.1, torch.float), ["no reduction"], ["scaled"]),
    "part of a number is detached": (a_number_with_a_detached_part, ["graph cut"], ["scaled"]),
    "a target that is not stopped": (a_target_that_is_not_stopped, ["stop-gradient"], ["another loss"]),
}


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_caught(name, on):
    make, named, not_named = WRONG[name]
    report = differs(make(), on=[on])
    assert set(named) <= set(causes(report)) and not set(not_named) & set(causes(report)), str(report)


def with_a_cached_rank():
    """Right on processes; simulated ranks are one process."""
    weights = torch.arange(1.0, 9.0)

    def distributed(x):
        return (x.sum(1).sin() * weights[len(x) * cached_rank() :][: len(x)]).sum()

    return summed(distributed, lambda x: (x.sum(1).sin() * weights).sum(), sizes=EVEN)


@pytest.mark.filterwarnings("ignore::diffcoll.testing.UncheckedWarning")
@pytest.mark.parametrize("seed", [3, 25])
def test_a_bias_before_batch_norm_in_single_precision(seed):
    """Its gradient is zero but for rounding, which differs between ranks and one process by more than the tolerance."""
    torch.manual_seed(seed)
    width = (4, 16, 64)[seed % 3]
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width))
    model.extend([nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 3)])
    model = dc.nn.convert_sync_batchnorm(model)
    x = torch.randn(32, 8) * (1 + seed % 5) + seed % 7

    def loss(x):
        return (model(x) ** 2).sum() / 32

    right = summed(loss, batch=x, module=model, sizes=[(16, 16), (20, 12)])
    allowed = [row.allowed for table in matches(right).tables for row in table.rows if not row.what.endswith(".bias")]
    assert max(allowed) < 3e-4  # of the others no more than before

    def off_by_little(x):
        return loss(x) * (1.002 if dc.get_world_size() > 1 else 1)

    differs((off_by_little, *right[1:]), compare=["gradients"])


class Embedded(nn.Module):
    """Token ids, most of which are rare; a bias before a normalization, whose gradient is zero but for rounding."""

    def __init__(self, seed, width=16):
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.out = nn.Embedding(30, width), nn.Linear(width, width)
        chances = torch.rand(30) ** 4
        self.ids = torch.multinomial(chances, 2 * 24 * 6, replacement=True).view(2, 24, 6)

    def forward(self, ids):
        return self.out(torch.tanh(self.table(ids).mean(1)))


@pytest.mark.filterwarnings("ignore::diffcoll.testing.UncheckedWarning")
@pytest.mark.parametrize("seed", [2, 6, 10, 14])
def test_token_ids_in_single_precision(seed):
    """No input has digits that could be changed: rounding is that of the parameters."""
    model = Embedded(seed)

    def loss(first, second):
        return dc.nn.functional.vicreg_loss(model(first), model(second))

    matches((loss, loss, tuple(model.ids), {"module": model, "sizes": [(12, 12), (16, 0, 8)]}))


def times(row, factor=None):
    """The gradient of one row is multiplied, by N if there is no factor."""

    def rule(g):
        factors = torch.ones_like(g)
        factors[row] = factor or dc.get_world_size()
        return g * factors

    return ruled(torch.clone, rule)


@pytest.mark.parametrize("on", ["simulated", "gloo"])
@pytest.mark.parametrize(("row", "factor", "named"), [(15, 0, "3 = N"), (15, 1.5, "1.5"), (3, 0, "3 = N")])
def test_a_rare_row_is_not_lost_beside_the_others(row, factor, named, on):
    """It is 1e-4 of the largest row, and N times too large on each rank: less than the tolerance of the largest."""
    torch.manual_seed(0)
    table, ids = nn.Embedding(20, 4), torch.randint(10, (64,))
    ids[::16], ids[1::16] = 15, 3
    weights = torch.where((ids == 15) | (ids == 3), 3e-5, 1.0)

    def loss(ids, weights):
        return (table.weight[ids] ** 3).sum(1) @ weights

    def wrong(ids, weights):
        rows = table.weight if dc.get_world_size() == 1 else times(row, factor)(table.weight)
        return (rows[ids] ** 3).sum(1) @ weights

    more = {"module": table, "constant": ("weights",), "rank_reduction": "sum", "sizes": [(30, 14, 20)], "on": [on]}
    matches((loss, loss, (ids, weights), more))
    (cause,) = differs((wrong, loss, (ids, weights), more)).causes
    assert cause.name == "some rows"
    assert cause.seen == f"weight: row {row}: wrong, {named} times the right one; the larger rows are right"


def test_rare_rows_of_one_rank_and_of_a_sharded_program():
    """Rank 1's row 2 of the input, and of the piece that rank 1 has of the table."""
    torch.manual_seed(0)
    x = torch.randn(12, 4)
    weights = torch.ones(12)
    weights[6] = 3e-5  # row 2 of the second of three ranks

    def loss(x, weights):
        return (x**3).sum(1) @ weights

    def wrong(x, weights):
        return loss(times(2, 2.0)(x) if dc.get_rank() == 1 else x, weights)

    placed = {"mesh": {"tp": 3}, "placements": {"x": {"tp": Shard(0)}, "weights": {"tp": Shard(0)}}}
    for more in ({"rank_reduction": "sum", "sizes": [(4, 4, 4)]}, {"rank_reduction": {"tp": "sum"}, **placed}):
        matches((loss, loss, (x, weights), more), constant=("weights",))
        report = differs((wrong, loss, (x, weights), more), constant=("weights",))
        assert causes(report) == ["some rows"]
        assert "mesh" in more or "x: row 2 on rank 1: wrong, 2 times the right one" in str(report)


def test_state_that_simulated_ranks_share():
    program, both = with_a_cached_rank(), ["simulated", "gloo"]
    cached_rank.cache_clear()
    report = differs(program, on=both)
    assert causes(report) == ["shared state"], str(report)
    assert [table.ok for table in report.tables] == [False, True]
    matches(program, on=["gloo"])
    cached_rank.cache_clear()
    report = differs((lambda x: program[0](x.flip(0)), *program[1:]), on=both)  # wrong on both
    assert "shared state" not in str(report) and not report.tables[1].ok


# ── without a reference ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("speed", [1e3, 1e4, 1e5])
def test_a_smooth_function_that_varies_fast_has_no_kink(speed):
    is_right(lambda x: (speed * dc.all_reduce(x)).sin().sum() / speed, per_rank(2))


@pytest.mark.parametrize(("at", "offset"), [(0.0, 0.0), (1e-3, 0.0), (-2e-5, 0.0), (0.0, 1e10), (1e-3, 1e8)])
def test_a_kink_and_a_point_beside_one(at, offset):
    xs = [torch.tensor([at if r == 1 else 0.0, r + 1.0], dtype=torch.double) for r in range(3)]

    def fn(x):
        return (dc.all_reduce(x).relu() * torch.tensor([1.0, 2.0])).sum() + offset

    if at:
        is_right(fn, xs)
    else:
        assert "not differentiable here" in str(is_wrong(fn, xs))


def test_gradients_that_ddp_has_averaged_are_named():
    model, kept = layer(3, 2), []

    def fn(x):
        kept.append(nn.parallel.DistributedDataParallel(model))
        return kept[-1](x).sin().sum()

    report = is_wrong(fn, per_rank(2, 3, n=2), module=model, on=["gloo"])
    assert causes(report) == ["averaged"], str(report)


noise = ruled(dc.all_reduce, lambda g: torch.ones_like(g) * torch.tensor([3.0, -1.0])[: len(g)])


def causes_alone(fn, *of_ranks, **more):
    return causes(is_wrong(fn, *of_ranks, **more))


@pytest.mark.parametrize("width", [1, 2])
def test_equal_gradients_are_neither_swapped_nor_averaged(width):
    def fn(x, r):
        return ((r + 1) * noise(x).sin() * x).sum()

    assert causes_alone(fn, per_rank(width), range(3)) == ["wrong in direction"]


def test_equal_numbers_on_all_ranks_are_no_average():
    constant = causes_alone(lambda x: ruled(lambda x: x**3, lambda g: 3 * g)(x).sum(), per_rank(1))
    assert constant == ["wrong in direction"]


def test_ranks_with_equal_gradients_are_not_told_apart():
    """3 x² of two ranks is equal, so it is not known whose the third one has."""
    xs = [torch.tensor([a, 2.0], dtype=torch.double) for a in (0.5, -0.5, 1.5)]

    def fn(x):
        rule = lambda g: g * 3 * dc.permute(x, [(2, 0), (0, 2), (1, 1)]).square()  # noqa: E731
        return ruled(lambda x: x**3, rule)(x).sum()

    assert causes_alone(fn, xs) == ["wrong in direction"]


def test_a_gradient_with_the_wrong_sign_is_not_another_ranks():
    """On two ranks the part that comes from the other one is missing, and that of this rank is there with a minus."""

    def fn(x):
        return (ruled(dc.all_reduce, lambda g: 0 * g)(x) * x).sin().sum()

    assert causes_alone(fn, per_rank(2, n=2)) == ["wrong in direction"]


def test_an_identity_behind_a_broadcast_is_no_swap():
    """On two ranks the second has the number that the first lacks, by coincidence."""
    weights = torch.tensor([1.0, 10.0], dtype=torch.double)

    def fn(x, weight):
        return (weight * ruled(dc.broadcast, lambda g: g)(x)).sum()

    assert causes_alone(fn, per_rank(1, n=2), list(weights)) == ["wrong in direction"]


def test_a_detach_is_blamed_if_the_gradient_is_right_without_it():
    def logs(x):
        dc.all_reduce(x.detach())
        return ((dc.get_rank() + 1) * noise(x).sin() * x).sum()

    def loses(x):
        total = dc.all_reduce(x)
        return ((x + (total - x).detach()).sin() * (dc.get_rank() + 1)).sum()

    assert causes_alone(logs, per_rank(2)) == ["wrong in direction"]
    assert causes_alone(loses, per_rank(2, n=2), on=["gloo"]) == ["graph cut"]


def test_a_loss_without_a_number():
    xs = [-torch.ones(2, dtype=torch.double), torch.rand(2, dtype=torch.double)]
    with pytest.raises(ValueError, match=r"fn: got NaN or infinity in the results of rank 0, expected a finite loss"):
        is_right(lambda x: x.log().sum(), xs)
    with pytest.raises(ValueError, match="fn: got results that depend on no tensor"):
        is_right(lambda x: dc.all_reduce(x).sum(), [x[:0] for x in xs])


def test_constants_and_what_is_compared():
    """The same programs are wrong without; check_gradients has constants too."""
    program = a_mask_gathered_without_a_gradient()
    differs(program, constant=())
    program = a_value_that_is_n_times_too_large()
    differs((*program[:3], {"rank_reduction": "sum"}))

    def fn(x, mask):
        return (dc.all_reduce(x * mask).sin() * mask.detach()).sum()

    xs, masks = per_rank(4), [torch.tensor([1.0, r, 0.5, 1.0]) for r in range(3)]  # float32 is no matter
    report = is_right(fn, xs, masks, constant=["mask"])
    assert {row.what for row in report.tables[0].rows} == {"gradient of x"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"module": nn.LazyBatchNorm1d(affine=False)}, "module: got a lazy module, whose running_mean has no numbers"),
        (
            {"module": nn.LazyLinear(2)},
            r"module: got a lazy module, whose weight has no numbers yet, .* call the module once",
        ),
        ({"constant": "x"}, r"constant: got 'x', expected names of arguments"),
        ({"constant": ["w"]}, r"constant: got 'w', expected arguments with floating-point tensors: x"),
        ({"constant": None}, r"constant: got None, expected names of arguments"),
        ({"compare": ["state"]}, r"compare: got only state, of which there is nothing, expected something to compare"),
        ({"compare": "values"}, r"compare: got 'values', expected a sequence of values, gradients, state"),
        ({"compare": ["value"]}, r"compare: got 'value', expected \"values\", \"gradients\" or \"state\""),
    ],
)
def test_wrong_arguments(more, words):
    with pytest.raises((TypeError, ValueError), match=words):
        assert_matches_single_process(lambda x: x.sum(), lambda x: x.sum(), rows(8), **SIMULATED, **more)


def test_an_attribute_that_changed_is_noted():
    words = "last: an attribute that the call changed is not compared: register it as a buffer"
    with pytest.warns(UncheckedWarning, match=words):
        report = matches(attributes())
    assert words in report.notes


# ── more steps, more ranks ───────────────────────────────────────────────────────────────────────────────


def queue_of_two_steps(kept):
    """A queue with the rows of the last call, as negatives; what of them the ranks keep."""
    queue = nn.Module()
    queue.register_buffer("rows", torch.zeros(8, 3, dtype=torch.double))

    def loss(x):
        value = (x @ queue.rows.T.clone()).exp().sum()
        with torch.no_grad():
            every = dc.all_gather(x, sizes="auto") if dc.get_world_size() > 1 else x
            queue.rows[: len(every)] = kept(every) if dc.get_world_size() > 1 else every
        return value

    return summed(loss, batch=lambda n: rows(n) / 3, module=queue, steps=2)


def cached_first_gather():
    """Rows of all ranks, gathered in the first call and never again: a cache that a reader took for a constant."""

    module = layer(3, 3)
    module.every = None

    def distributed(x):
        if module.every is None:
            module.every = dc.all_gather(x.detach(), sizes="auto").tolist()
        return (module(x) @ torch.tensor(module.every, dtype=x.dtype).T).sin().sum()

    return summed(distributed, lambda x: (module(x) @ x.detach().T).sin().sum(), module=module, steps=2)


@pytest.mark.parametrize("on", ["simulated", "gloo"])
def test_what_a_call_keeps_shows_in_the_next(on):
    report = matches(queue_of_two_steps(lambda every: every), sizes=[(5, 3)], on=[on])
    assert [t.title for t in report.tables] == [f"{on}, 2 ranks, rows 5, 3", f"{on}, 2 ranks, rows 5, 3, step 2"]
    matches(cached_first_gather(), steps=1, sizes=EVEN, on=[on])
    report = differs(cached_first_gather(), sizes=EVEN, on=[on])
    assert [table.ok for table in report.tables] == [True, False]
    assert causes(report)[-1] == "later step" and report.causes[-1].seen.endswith("wrong in step 2")


@pytest.mark.filterwarnings("ignore::diffcoll.testing.UncheckedWarning")
def test_what_only_later_calls_use():
    """A recurrent state; no parameter has a gradient in the first call."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.state = nn.Parameter(torch.eye(3, dtype=torch.double)), None

        def forward(self, x):
            total = dc.all_reduce(x.sum(0))
            before, self.state = self.state, total.detach()
            return (total if before is None else total + before @ self.weight).sin().sum() / dc.get_world_size()

    module = Recurrent()
    program = summed(module, module=module, sizes=[(5, 3)])
    matches(program, steps=2)
    with pytest.raises(ValueError, match="module: got parameters of which none has a gradient"):
        matches(program)


def test_a_value_that_is_as_at_the_start_again():
    """A frozen parameter that every rank changes in the first call, and rank 1 back in the second."""
    module = nn.Module()
    module.kept = nn.Parameter(torch.zeros(1, dtype=torch.double), requires_grad=False)
    module.calls = []

    def loss(x):
        module.calls.append(1)
        back = len(module.calls) == 2 and dc.get_rank() == 1
        with torch.no_grad():
            module.kept.fill_(0.0 if back else 1.0)
        return (x**2).sum()

    assert causes(differs(summed(loss, module=module, steps=2, sizes=EVEN))) == ["another state", "later step"]


def test_a_wrong_step_is_not_followed_by_another():
    program = queue_of_two_steps(lambda every: every.flip(0))
    report = differs(program, steps=3, sizes=[(5, 3)], on=["simulated", "gloo"])
    words = ["", "wrong already in the step before", "wrong already in the step before"]
    assert [table.skipped for table in report.tables[:3]] == words
    assert causes(report) == ["another state"]


def test_steps_take_rows_and_finite_differences():
    """A batch of a fixed number of rows has those of every step; the diagnosis runs the steps before, too."""
    x = rows(16)

    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.double))

        def forward(self, x):
            with torch.no_grad():
                self.calls += 1
            n, r = dc.get_world_size(), dc.get_rank()
            wrong = self.calls > 1 and n > 1
            total = ruled(dc.all_reduce, lambda g: g)(x.sum(0)) if wrong else dc.all_reduce(x.sum(0))
            return (total**2).sum() * self.calls * (r + 1) * 2 / (n * (n + 1))

    module = Counter()
    program = summed(module, lambda x: module(x), x, module=module, sizes=[(4, 4), (5, 3)])
    report = differs(program, steps=2)
    assert causes(report) == ["not reduced", "later step"], str(report)
    assert report.causes[0].seen == "x: it is the derivative of the rank's own loss alone"
    for batch, steps, words in (
        (x, 1, "16 rows, expected tensors with 8 rows, the sum of sizes"),
        (x[:8], 2, r"8 rows, expected tensors with 16 rows, .* for each of 2 steps"),
        (x[:8].repeat(2, 1), 2, "the same numbers on steps 1 and 2, expected different ones on every step"),
        (x, 0, "steps: got 0, expected"),
        (x, 1.5, "steps: got 1.5, expected"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            matches((*program[:2], batch, program[3]), steps=steps)
    with pytest.raises(ValueError, match="steps: got 2 with mesh="):
        assert_matches_single_process(module, module, x, steps=2, module=module, mesh={"dp": 2})


def test_a_partner_that_is_right_for_two_and_three_ranks():
    """The rows of the previous rank: for two ranks, of the other; for three, of the one after the next."""

    def distributed(x):
        n = dc.get_world_size()
        pairs = [(r, (r + 1) % n) for r in range(n)] if n < 4 else [(r, r ^ 1) for r in range(n)]
        return (x.sum() * dc.permute(x.sum(), pairs)).sin()

    def single(x):
        n = {8: 2, 12: 3, 16: 4}[len(x)]
        sums = x.view(n, 4, 3).sum((1, 2))
        return (sums * sums.roll(1)).sin().sum()

    matches(summed(distributed, single), sizes=[(4, 4), (4, 4, 4)])
    cause = differs(summed(distributed, single), sizes=[(4, 4), (4, 4, 4), (4,) * 4]).causes[-1]
    assert cause.name == "more ranks" and cause.seen == "right with equal ranks up to 3, wrong with rows (4, 4, 4, 4)"


def test_chunks_that_only_more_rows_fill():
    """The last chunk of each rank is left out, if there are several."""

    def loss(x, chunk=16):
        chunks = (x**2).split(chunk) if len(x) else [x]
        lost = len(chunks) > 1 and dc.get_world_size() > 1
        return sum(c.sum() for c in (chunks[:-1] if lost else chunks))

    matches(summed(loss))
    report = differs(summed(loss), sizes=16)
    assert "── simulated, 4 ranks, rows 32, 32, 32, 32: wrong" in str(report) and causes(report)[0] == "left out"
    for sizes in (0, -1, True, 1.5):
        with pytest.raises((TypeError, ValueError), match=r"sizes: got (0|-1|True|1.5), expected"):
            matches(summed(loss), sizes=sizes)


def test_rows_in_another_order_hide_local_statistics():
    """Moments of permuted rows are equal, and those of mirrored ones to second order."""
    half = rows(4)

    def local(x, *_):
        return ((x - x.mean(0)) ** 2).mean(0).sum() * len(x)

    for other in (half.flip(0), -half, -half.roll(1, 0)):
        for batch in (torch.cat([half, other]), (torch.cat([half, other]), torch.arange(8) % 4 // 4)):
            with pytest.raises(ValueError, match="the same rows, in another order or mirrored, on ranks 0 and 1"):
                assert_matches_single_process(local, local, batch, sizes=EVEN)
    # labels that are permuted beside other rows, or equal weights of permuted token ids, hide nothing
    table = layer(4, 3, kind=nn.Embedding)

    def loss(ids, weights):
        return table(ids).sin().sum(1) @ weights

    ids, ones = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0]), torch.ones(8, dtype=torch.double)
    matches(summed(loss, batch=(ids, ones), module=table, sizes=EVEN))
    signs = torch.tensor([1.0, 1, -1, -1, 1, -1, -1, -1], dtype=torch.double)
    matches(summed(lambda x: (x**3).sum(), batch=signs, sizes=EVEN))


# ── what simulated ranks cannot run, and what is stated otherwise ────────────────────────────────────────


def test_a_collective_in_a_thread_that_a_rank_starts():
    """Its error would be lost, and the check would find a wrong number; on processes the program is right."""

    def distributed(x):
        total = [x.detach().sum(0)]
        thread = threading.Thread(target=lambda: dist.all_reduce(total[0]))
        thread.start()
        thread.join()
        return (x * total[0]).sum()

    def single(x):
        return (x * x.detach().sum(0)).sum()

    program = summed(distributed, single, sizes=EVEN)
    with pytest.raises(RuntimeError, match=r"from a thread that is not one of its ranks; .*on=\[\"gloo\"\]"):
        matches(program)
    matches(program, on=["gloo"])

    def library(x):
        thread = threading.Thread(target=lambda: dc.all_reduce(x))
        thread.start()
        thread.join()

    before = threading.excepthook
    with pytest.raises(RuntimeError, match=r"all_reduce: called while simulated ranks run, from a thread that is not"):
        simulate(library, [torch.ones(2), torch.ones(2)], rules=True)
    assert threading.excepthook is before


def test_the_error_of_another_thread_is_printed_as_ever(monkeypatch):
    """What ends a thread for another reason is the affair of whoever looks at it."""
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))

    def fn(x):
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        return dc.all_reduce(x)

    assert [float(y) for y in simulate(fn, [torch.tensor(1.0), torch.tensor(2.0)])] == [3.0, 3.0]
    assert [type(error) for error in seen] == [ZeroDivisionError] * 2


class Held(nn.Module):
    """Holds what pickle refuses."""

    def __init__(self):
        super().__init__()
        self.linear = layer(3, 2)
        self.lock, self.again, self.event = threading.Lock(), threading.RLock(), threading.Event()
        self.parent, self.gone = weakref.ref(self), weakref.ref(nn.Linear(1, 1))

    def forward(self, x):
        with self.lock, self.again:
            assert self.parent() is self and self.gone() is None and not self.event.is_set()
            return self.linear(x)


@pytest.mark.parametrize("on", ["simulated", "gloo"])
@pytest.mark.parametrize("make", [Held, lambda: torch.jit.script(layer(3, 2))], ids=["locks", "script"])
def test_modules_that_pickle_refuses(make, on):
    module = make()

    def loss(x):
        return module(x).sin().sum()

    report = matches(summed(loss, module=module, sizes=[(5, 3)]), on=[on])
    assert any(row.what.endswith("weight") for row in report.tables[0].rows)


def test_programs_that_a_mesh_states():
    """Outputs that every rank has whole, tensors that no rank has a part of, and one loss on all ranks."""
    with pytest.raises(ValueError, match="16 rows on all ranks together, single 8 rows; if every rank returns"):
        matches((lambda x: dc.all_gather(x, sizes="auto"), lambda x: x * 1, rows, {"sizes": EVEN}))
    with pytest.raises(ValueError, match=r"a tensor with 3 rows, .* or, with mesh=, in placements="):
        assert_matches_single_process(*[lambda x, w: (x @ w).sum()] * 2, (rows(8), rows(3)), sizes=EVEN)
    first, second = layer(3, 4), layer(4, 3, bias=False)

    def parallel(x):
        """Half of the hidden units on each rank; what its ranks sum belongs to the same rows."""
        n, r = dc.get_world_size(), dc.get_rank()
        w, b, v = first.weight.chunk(n)[r], first.bias.chunk(n)[r], second.weight.chunk(n, 1)[r]
        return dc.all_reduce((x @ w.T + b).tanh() @ v.T, grad_placement="replicate").square().sum()

    def whole(x):
        return second(first(x).tanh()).square().sum()

    more = {"module": (first, second)}
    report = differs((parallel, whole, rows, more), sizes=EVEN)
    assert "as in tensor parallelism, state it with mesh=" in " ".join(str(report).split())
    sums = {"x": {"tp": Partial()}, **{f"module[{i}].*": {"tp": Partial()} for i in range(2)}}
    matches((parallel, whole, rows(8), more), mesh={"tp": 2}, placements=sums)
