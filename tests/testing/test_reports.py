"""What reports say, what is refused, and how arguments are taken."""

import pickle
import re
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from field import blocks_of_all, own_block_kept
from planted import clip
from sharded_programs import MLP, ShardedMLP, mlp
from torch import nn
from torch.distributed.tensor import Shard
from verdicts import SIMULATED, differs, is_right, loss, matches, numbers, observed, per_rank, sharded, summed, value

import diffcoll as dc
from diffcoll.testing import GradientMismatchError, RanksFailedError, assert_matches_single_process

X = numbers(8, 2)


# ── what is observed ─────────────────────────────────────────────────────────────────────────────────────


def test_a_report_says_what_differs_where():
    report = differs(clip(own_block_kept), ranks=(4, 4))
    lines = str(report).splitlines()
    assert lines[0] == "assert_matches_single_process: WRONG"
    assert lines[1] == "── simulated, 2 ranks, rows 4, 4: wrong (float64, tolerance 4e-10)"
    assert re.search(r"^✗ gradient of text +0 +\d\.\de[+-]\d\d ", str(report), re.M)
    assert "── observed ──" in lines and "── graph cuts ──" in lines
    assert f"field.py:{blocks_of_all.__code__.co_firstlineno + 6} cuts the graph" in str(report)


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
def test_the_line_of_a_collective_that_torch_wraps():
    """As newer releases wrap what they deprecate, with a function of typing_extensions."""

    def distributed(x):
        y = x.new_empty(8, 3)
        dist.all_gather_into_tensor(y, x)
        return (x @ y.T).sin().sum()

    (cut,) = differs(summed(distributed, lambda x: (x @ x.T).sin().sum()), ranks=(4, 4)).cuts
    assert f"test_reports.py:{distributed.__code__.co_firstlineno + 2} cuts the graph" in cut
    assert not differs(summed(lambda x: (dc.all_gather(x) ** 2).sum()), ranks=(4, 4), on=["gloo"]).cuts


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

    matches(sharded(shard, {"dp": 2}, make(), X))
    assert "first output" not in observed(differs(sharded(shard, {"dp": 2}, make(), X, twice, loss)))


class Rows(nn.Module):
    """Row-parallel: the bias is added after the sum. Backward does not sum over the pieces of x."""

    def __init__(self, whole, group):
        super().__init__()
        self.group, n, r = group, group.size(), group.rank()
        self.layer = nn.Linear(2 // n, 2, bias=False, dtype=torch.double)
        self.layer.weight = nn.Parameter(whole.layer.weight.detach().chunk(n, 1)[r].clone())
        self.bias = nn.Parameter(whole.layer.bias.detach().clone())

    def forward(self, x):
        y = self.layer(x.chunk(self.group.size(), 1)[self.group.rank()])
        return dc.all_reduce(y, group=self.group, grad_placement="replicate") + self.bias


def test_parts_of_a_sum_are_right_where_the_value_is():
    found = observed(differs(sharded(lambda whole, mesh: Rows(whole, mesh["tp"].get_group()), {"tp": 2}, Tokens(), X)))
    assert "x: right after a sum over tp" in found and "first output" not in found


# ── the user's functions and modules ─────────────────────────────────────────────────────────────────────


def test_trees_and_keyword_arguments():
    batch = {"a": {"left": X, "right": [per_rank(8, 3)[1]]}, "labels": torch.arange(8), "factor": 3.0}

    def distributed(a, labels, factor):
        return (a["left"].sum(1) * a["right"][0].prod(1) * labels).sum() * factor

    report = matches(summed(distributed, batch=batch), ranks=(5, 3))
    names = [row.what for row in report.tables[0].rows]
    assert names == ["value", "gradient of a['left']", "gradient of a['right'][0]"]


def test_a_tensor_whose_gradient_nothing_would_check():
    """One that the function uses and that is not in `module`; not one that it makes itself."""
    scale = torch.tensor(2.0, dtype=torch.double, requires_grad=True)
    product = scale * 2

    def fn(x):
        return (scale * x).sum()

    for check, error in (
        (lambda: matches(summed(fn, ranks=(4, 4))), ValueError),
        (lambda: matches(summed(lambda x: (product * x).sum(), ranks=(4, 4))), ValueError),
        (lambda: is_right(fn, per_rank(3)), ValueError),
        (lambda: is_right(fn, per_rank(3, n=2), on=["gloo"]), RanksFailedError),
    ):
        with pytest.raises(error, match=r"of shape \(\) that requires a gradient|cannot be copied"):
            check()

    def makes_one(x):
        torch.manual_seed(0)
        return (nn.Linear(3, 2).double()(x) + torch.zeros(2, requires_grad=True)).sin().sum()

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
    with pytest.raises(ZeroDivisionError):
        matches((value, lambda x: 1 / 0, X, {}))
    assert pickle.loads(pickle.dumps(GradientMismatchError(report))).report == report


def test_modules_that_are_made_anew():
    """What was taken from shapes is said; shapes that leave several ways are asked for."""
    words = "down.weight: taken to be Shard(1) on tp, by its shape; placements= may say otherwise"
    assert words in matches(mlp("")).notes
    more = {"x": {"dp": Shard(0)}, "up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}
    with pytest.raises(ValueError, match=r"up.weight: .*which may be Shard\(0\) on tp or Shard\(0\) on dp"):
        matches(mlp("", {"dp": 2, "tp": 2}))
    matches(mlp("", {"dp": 2, "tp": 2}, placements=more))


# ── wrong arguments ──────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


def hooked():
    layer = nn.Linear(2, 2, dtype=torch.double)
    layer.weight.register_hook(lambda g: 2 * g)
    return layer


def with_a_number_twice(whole, mesh):
    whole.up.weight = nn.Parameter(torch.cat([whole.up.weight.detach()] * 2))
    return whole


DP = {"ranks": {"dp": 2}}
ON_A_MESH = {
    "module": MLP(),
    "shard": lambda m, mesh: ShardedMLP(mesh.get_group(), ""),
    "ranks": {"tp": 2},
    "batch": numbers(5, 4),
}
#: name: (arguments, the argument that the error names, or another word)
WRONG = {
    "equal ranks": ({"batch": torch.ones(8, 2)}, "batch"),
    "rows": ({"batch": (X, X[:7])}, "batch"),
    "0-d": ({"batch": (X, torch.tensor(1.0))}, "batch"),
    "dataclass": ({"batch": (X, Pair(X, X))}, "batch"),
    "a function of a mesh": ({"batch": lambda n: X, **DP}, "batch"),
    "integers": ({"batch": torch.arange(8)}, "batch"),
    "constant": ({"single": lambda x: value(x.detach())}, "single"),
    "nothing": ({"single": lambda x: None, "distributed": lambda x: None}, "single"),
    "not finite": ({"single": lambda x: value(x).log()}, "single"),
    "no gradient": ({"single": lambda x: ((x - x) ** 2).sum().sqrt() + value(x)}, "single"),
    "ranks": ({"ranks": [(4, -4, 8)]}, "ranks"),
    "no ranks": ({"ranks": []}, "ranks"),
    "an empty axis": ({"ranks": {"tp": 0}}, "ranks"),
    "losses": ({"losses": "any"}, "losses"),
    "an unknown axis": ({"losses": {"dp": "mean"}}, "losses"),
    "already_reduced": ({"already_reduced": ["cp"]}, "already_reduced"),
    "order": ({"order": 3}, "order"),
    "order of tensor parallelism": ({"order": 2, "ranks": {"tp": 2}}, "order"),
    "on": ({"on": "simulated"}, "on"),
    "a list as module": ({"module": [torch.ones(2)]}, "module"),
    "unused module": ({"module": nn.Linear(2, 2), "single": lambda m, x: value(x)}, "module"),
    "hooks": ({"module": hooked()}, "module"),
    "not a function": ({"distributed": 3}, "distributed"),
    "numbers of outputs": ({"single": lambda x: (value(x), value(x))}, "distributed"),
    "no tensor": ({"single": lambda x: {1}}, "distributed"),
    "not picklable": ({"distributed": lambda x, each=(i for i in range(3)): value(x)}, "distributed"),
    "placements": ({"placements": [Shard(0)], **DP}, "placements"),
    "no axis": ({"placements": {"x": Shard(0)}, **DP}, "placements"),
    "another axis": ({"placements": {"x": {"tp": Shard(0)}}, **DP}, "placements"),
    "a number as placement": ({"placements": {"x": {"dp": 0}}, **DP}, "placements"),
    "an unknown name": ({"placements": {"y": {"dp": Shard(0)}}, **DP}, "placements"),
    "another dim": ({"placements": {"x": {"dp": Shard(2)}}, **DP}, "placements"),
    "another shape": ({**ON_A_MESH, "placements": {"up.*": {"tp": Shard(1)}}}, "placements"),
    "shard of rows": ({"shard": lambda m, mesh: m, "module": nn.Linear(2, 2)}, "shard"),
    "shard without a module": ({"shard": lambda m, mesh: m, **DP}, "module"),
    "shard to nothing": ({**ON_A_MESH, "shard": lambda m, mesh: None}, "shard"),
    "shard to another module": ({**ON_A_MESH, "shard": lambda m, mesh: nn.Linear(3, 3)}, "shard"),
    "shard to no parameters": ({**ON_A_MESH, "shard": lambda m, mesh: nn.Tanh()}, "shard"),
    "a number as shard": ({**ON_A_MESH, "shard": 3}, "shard"),
    "shard with a number twice": ({**ON_A_MESH, "shard": with_a_number_twice}, "twice"),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument(name):
    given, words = WRONG[name]
    fn = loss if "module" in given else value
    arguments = {"distributed": fn, "single": fn, "batch": X, **SIMULATED, **given}
    with pytest.raises((TypeError, ValueError), match=words):
        assert_matches_single_process(**arguments)
