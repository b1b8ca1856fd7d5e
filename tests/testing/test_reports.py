"""What reports say, what is refused, and how arguments are taken."""

import dataclasses
import pickle
import re

import planted
import pytest
import torch
import torch.distributed as dist
from field import blocks_of_all, own_block_kept
from planted import clip
from sharded_programs import MLP, ShardedMLP, Vocabulary, loss, mlp, sequence, tokens, vocabulary
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from verdicts import SIMULATED, differs, is_right, matches, numbers, observed, per_rank

import diffcoll as dc
from diffcoll.testing import GradientMismatchError, RanksFailedError, assert_matches_single_process

X = numbers(8, 2)
ROWS = {"ranks": {"dp": 2}, "placements": {"x": {"dp": Shard(0)}}}


def value(x):
    return x.sin().sum()


def summed(distributed, single=None, batch=X, **more):
    return distributed, single or distributed, batch, {"rank_reduction": "sum", **more}


# ── what is observed ─────────────────────────────────────────────────────────────────────────────────────


def test_a_report_says_what_differs_where():
    report = differs(clip(own_block_kept), ranks=(4, 4))
    lines = str(report).splitlines()
    assert lines[0] == "assert_matches_single_process: WRONG" and lines[1] == "── simulated, 2 ranks, rows 4, 4: wrong"
    assert re.search(r"^✗ gradient of text +0 +\d\.\de[+-]\d\d ", str(report), re.M)
    assert "── observed ──" in lines and "── graph cuts ──" in lines
    assert f"field.py:{blocks_of_all.__code__.co_firstlineno + 6} cuts the graph" in str(report)


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
def test_the_line_of_a_collective_that_torch_wraps():
    """As newer releases wrap what they deprecate, with a function of typing_extensions."""

    def distributed(x):
        y = x.new_empty(8, 2)
        dist.all_gather_into_tensor(y, x)
        return (x @ y.T).sin().sum()

    (cut,) = differs(summed(distributed, lambda x: (x @ x.T).sin().sum()), ranks=(4, 4)).cuts
    assert f"test_reports.py:{distributed.__code__.co_firstlineno + 2} cuts the graph" in cut
    assert not differs(summed(lambda x: (dc.all_gather(x) ** 2).sum()), ranks=(4, 4), on=["gloo"]).cuts


def without_a_row(x):
    return (x[:-1] if dc.get_world_size() > 1 and dc.get_rank() == 1 else x).sin().sum()


def beside_a_value_within_rounding():
    def single(x, w, factor=1.0):
        return (x @ w).sin().square().mean() * factor

    return lambda x, w: single(x, w * 3 - 2 * w.detach(), 1 + 3e-9), single, (numbers(8, 6), numbers(6)), ROWS


PIECES = {"ranks": {"cp": 3}, "placements": {"x": {"cp": Shard(0)}}}
OBSERVED = {
    "rows left out": (lambda: summed(without_a_row, value, ranks=(4, 4)), "x: zero in row 7 of the whole"),
    "a factor beside a value within rounding": (beside_a_value_within_rounding, "w: 3 times that of one process"),
    "another rank's piece": (
        lambda: (dc.shift, lambda x: x * 1, numbers(6, 2), PIECES),
        "output: rank 0 has rank 2's piece, rank 1 has rank 0's piece",
    ),
    "f": (lambda: mlp("f"), "x: right after a sum over tp"),
    "g": (lambda: mlp("g"), "the first output that differs is that of down, which is right after a sum over tp"),
    "bias": (lambda: mlp("bias"), "that of down, which has its bias 2 times, once for each rank of tp"),
    "norm": (lambda: sequence("norm"), "norm.weight and norm.bias: right after a sum over tp"),
    "log N": (lambda: vocabulary("logits counted N times"), "value: larger by log 3, the logarithm of the size of tp"),
    "padding": (lambda: tokens("padding"), "which is the part of mask that is one"),
    "counts": (lambda: tokens("local counts"), "right if ranks are weighted by their ones of mask"),
}


@pytest.mark.parametrize("name", OBSERVED)
def test_an_observation(name):
    make, words = OBSERVED[name]
    text = observed(differs(make()))
    assert words in text and ("weighted" not in text or "weighted" in words)


def test_which_reduction():
    """The value is N times the loss, and the features are exact, under a sum; both are right under a mean."""
    report = differs(clip(planted.right_gather), ranks=(4, 4), rank_reduction="sum")
    assert 'value, image, text and scale: 2 = N times that of one process, exact under "mean"' in observed(report)
    each = [row for row in report.tables[0].rows if row.what == "gradient of image"]
    assert [(row.rank, round(row.ratio, 6), row.ok) for row in each] == [("all", 2, False)]


def test_a_detach_in_shard_is_no_cut():
    def shard(whole, mesh):
        whole.up.weight = nn.Parameter(distribute_tensor(whole.up.weight.detach(), mesh["tp"], [Shard(1)]))
        return whole

    def twice(module, x):
        weight = module.up.weight
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        return (x @ weight.T).sin().mean() * dc.get_world_size()

    assert not differs((twice, twice, numbers(5, 3), {"module": MLP(), "shard": shard, "ranks": {"tp": 2}})).cuts


class Tokens(nn.Module):
    """Sends rows to another rank, and back."""

    group = None

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        if self.group is None:
            return self.layer(x)
        return dc.all_to_all(self.layer(dc.all_to_all(x, group=self.group)), group=self.group)


class EachRow(Tokens):
    def forward(self, x):
        return torch.stack([self.layer(row) for row in x])


@pytest.mark.parametrize("make", [Tokens, EachRow])
def test_right_submodules_are_not_named(make):
    """Rows in another order, and a submodule that is called for each row."""

    def shard(module, mesh):
        module.group = mesh["dp"].get_group()
        return module

    def twice(module, x):
        return loss(module, x) * (1 if module.group is None else 2)

    more = {"module": make(), "shard": shard, **ROWS}
    matches((loss, loss, X, more))
    assert "first output" not in observed(differs((twice, loss, X, more)))


def test_what_is_zero_but_for_rounding():
    def centered(x):
        n = dc.all_reduce(torch.full((1,), float(len(x)), dtype=x.dtype))
        return x - dc.all_reduce(x.sum(0)) / n

    x = X - X.mean(0)
    matches(summed(torch.sum, lambda x: x.mean(0).sum() * 8, x))
    text = observed(differs(summed(lambda x: centered(x).sum() + 1e-12 * (x**2).sum())))
    assert "one process has as large a difference with other last digits" in text


def test_a_computation_of_lower_precision():
    def fn(x):
        return x.float().sin().double().sum() + 0 * dc.all_reduce(x.sum())

    differs(summed(fn, value), ranks=(4, 4))
    matches(summed(fn, value), tolerance=1e-5)


# ── the user's functions and modules ─────────────────────────────────────────────────────────────────────


def test_trees_and_keyword_arguments():
    batch = {"a": {"left": X, "right": [per_rank(8, 3)[1]]}, "labels": torch.arange(8), "factor": 3.0}

    def distributed(a, labels, factor):
        return (a["left"].sum(1) * a["right"][0].prod(1) * labels).sum() * factor

    report = matches(summed(distributed, batch=batch), ranks=(5, 3))
    names = [row.what for row in report.tables[0].rows]
    assert names == ["value", "gradient of a['left']", "gradient of a['right'][0]"]


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


def test_a_function_that_is_differentiable_once():
    def fn(x):
        return OnceDifferentiable.apply(x).sin().sum()

    matches(summed(fn))
    with pytest.raises(RuntimeError, match="differentiate twice"):
        matches(summed(fn), order=2)


def test_a_tensor_whose_gradient_nothing_would_check():
    """One that the function uses and that is not in `module`; not one that it makes itself."""
    scale = torch.tensor(2.0, dtype=torch.double, requires_grad=True)
    product = scale * 2
    for fn in (lambda x: (scale * x).sum(), lambda x: (product * x).sum()):
        with pytest.raises(ValueError, match=r"of shape \(\) that requires a gradient|cannot be copied"):
            matches(summed(fn, ranks=(4, 4)))
    with pytest.raises(ValueError, match=r"of shape \(\) that requires a gradient"):
        is_right(lambda x: (scale * x).sum(), per_rank(3))
    with pytest.raises(RanksFailedError, match=r"of shape \(\) that requires a gradient"):
        is_right(lambda x: (scale * x).sum(), per_rank(3, n=2), on=["gloo"])

    def makes_one(x):
        torch.manual_seed(0)
        return (nn.Linear(2, 2).double()(x) + torch.zeros(2, requires_grad=True)).sin().sum()

    matches(summed(makes_one), order=2)


def test_a_function_that_raises():
    """In the first run the error is the user's; later, it is a finding."""

    def distributed(x):
        if len(x) == 3:
            raise KeyError("three")
        return value(x)

    with pytest.raises(KeyError, match="three"):
        matches(summed(distributed, value), ranks=(5, 3))
    report = differs(summed(distributed, value))
    assert "KeyError: 'three'" in report.tables[1].raised and report.tables[0].ok
    assert str(report).startswith("assert_matches_single_process: raised an error in some runs")
    with pytest.raises(ZeroDivisionError):
        matches((value, lambda x: 1 / 0, X, {}))
    assert pickle.loads(pickle.dumps(GradientMismatchError(report))).report == report


# ── modules that are made anew ───────────────────────────────────────────────────────────────────────────


def test_what_was_taken_from_shapes_is_said():
    words = "down.weight: taken to be Shard(1) on tp, by its shape; placements= may say otherwise"
    assert words in matches(mlp("")).notes


def test_shapes_that_leave_several_ways_are_asked_for():
    more = {"module": MLP(), "shard": lambda whole, mesh: ShardedMLP(mesh, ""), "ranks": {"dp": 2, "tp": 2}}
    with pytest.raises(ValueError, match=r"up.weight: .*which may be Shard\(0\) on tp or Shard\(0\) on dp"):
        matches((loss, loss, numbers(6, 3), more))
    tp = {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}
    matches((loss, loss, numbers(6, 3), {**more, "placements": {"x": {"dp": Shard(0)}, **tp}}))


def test_numbers_that_shard_computes_with_are_taken_by_name():
    """They carry no position, and are overwritten."""

    def shard(whole, mesh):
        with torch.no_grad():
            whole.embed.mul_(0.5).add_(0.1)
        return whole

    def squares(module, x):
        return (x @ module.embed).square().sum()

    more = {"module": Vocabulary(), "shard": shard, "rank_reduction": "sum", **ROWS}
    more["module"].head.requires_grad_(False)
    report = matches((squares, squares, numbers(4, 6), more))
    assert "gradient of embed" in {row.what for row in report.tables[0].rows}


# ── wrong arguments ──────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


def hooked():
    layer = nn.Linear(2, 2, dtype=torch.double)
    layer.weight.register_hook(lambda g: 2 * g)
    return layer


#: name: (arguments, the argument that the error names)
WRONG = {
    "equal ranks": ({"batch": torch.ones(8, 2)}, "batch"),
    "rows": ({"batch": X[:7]}, "batch"),
    "0-d": ({"batch": (X, torch.tensor(1.0))}, "batch"),
    "dataclass": ({"batch": (X, Pair(X, X))}, "batch"),
    "a function of a mesh": ({"batch": lambda n: X, **ROWS}, "batch"),
    "integers": ({"batch": torch.arange(8)}, "batch"),
    "constant": ({"single": lambda x: value(x.detach())}, "single"),
    "nothing": ({"single": lambda x: None, "distributed": lambda x: None}, "single"),
    "ranks": ({"ranks": [(4, -4, 8)]}, "ranks"),
    "no ranks": ({"ranks": []}, "ranks"),
    "an empty axis": ({"ranks": {"tp": 0}}, "ranks"),
    "rank_reduction": ({"rank_reduction": "any"}, "rank_reduction"),
    "an unknown axis": ({"rank_reduction": {"dp": "mean"}}, "rank_reduction"),
    "reduced": ({"reduced": ["cp"]}, "reduced"),
    "order": ({"order": 3}, "order"),
    "order of tensor parallelism": ({"order": 2, "ranks": {"tp": 2}}, "order"),
    "on": ({"on": "simulated"}, "on"),
    "a list as module": ({"module": [torch.ones(2)]}, "module"),
    "unused module": ({"module": nn.Linear(2, 2), "single": lambda m, x: value(x)}, "module"),
    "hooks": ({"module": hooked()}, "module"),
    "not finite": ({"single": lambda x: value(x).log()}, "single"),
    "no gradient": ({"single": lambda x: ((x - x) ** 2).sum().sqrt() + value(x)}, "single"),
    "not a function": ({"distributed": 3}, "distributed"),
    "numbers of outputs": ({"single": lambda x: (value(x), value(x))}, "distributed"),
    "no tensor": ({"single": lambda x: {1}}, "distributed"),
    "not picklable": ({"distributed": lambda x, each=(i for i in range(3)): value(x)}, "distributed"),
    "placements": ({"placements": [Shard(0)], "ranks": {"dp": 2}}, "placements"),
    "no axis": ({"placements": {"x": Shard(0)}, "ranks": {"dp": 2}}, "placements"),
    "another axis": ({"placements": {"x": {"tp": Shard(0)}}, "ranks": {"dp": 2}}, "placements"),
    "a number as placement": ({"placements": {"x": {"dp": 0}}, "ranks": {"dp": 2}}, "placements"),
    "an unknown name": ({"placements": {"y": {"dp": Shard(0)}}, "ranks": {"dp": 2}}, "placements"),
    "another dim": ({"placements": {"x": {"dp": Shard(2)}}, "ranks": {"dp": 2}}, "placements"),
    "shard of rows": ({"shard": lambda m, mesh: m, "module": nn.Linear(2, 2)}, "shard"),
    "shard without a module": ({"shard": lambda m, mesh: m, "ranks": {"dp": 2}}, "module"),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument(name):
    given, argument = WRONG[name]
    fn = value if "module" not in given else lambda m, x: m(x).sin().sum()
    arguments = {"distributed": fn, "single": fn, "batch": X, **SIMULATED, **given}
    with pytest.raises((TypeError, ValueError), match=argument):
        assert_matches_single_process(**arguments)


def repeated(whole, mesh):
    whole.up.weight = nn.Parameter(torch.cat([whole.up.weight.detach()] * 2))
    return whole


SHARDS = {
    "nothing": (lambda whole, mesh: None, "shard"),
    "another module": (lambda whole, mesh: nn.Linear(3, 3), "shard"),
    "no parameters": (lambda whole, mesh: nn.Tanh(), "shard"),
    "a number": (3, "shard"),
    "a number twice": (repeated, "twice"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_a_wrong_shard(name):
    shard, words = SHARDS[name]
    with pytest.raises((TypeError, ValueError), match=words):
        matches((loss, loss, numbers(5, 3), {"module": MLP(), "shard": shard, "ranks": {"tp": 2}}))


def test_a_placement_of_another_shape():
    more = {"module": MLP(), "shard": lambda whole, mesh: ShardedMLP(mesh, ""), "ranks": {"tp": 2}}
    with pytest.raises(ValueError, match="placements"):
        matches((loss, loss, numbers(5, 3), {**more, "placements": {"up.*": {"tp": Shard(1)}}}))
