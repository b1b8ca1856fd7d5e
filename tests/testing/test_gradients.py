"""The checks of gradients: right code passes, and planted bugs are found and named."""

import dataclasses
import pickle
import re
import threading

import planted
import pytest
import torch
import torch.distributed as dist
from field import blocks_of_all, own_block_kept
from planted import PLANTED, RIGHT, CubedSum, clip, one, pair, right_gather
from torch.autograd import Function
from verdicts import SIMULATED, causes, differs, is_right, is_wrong, matches, numbers, per_rank, ruled

import diffcoll as dc
from diffcoll.testing import (
    GradientMismatchError,
    RanksFailedError,
    UncheckedWarning,
    assert_matches_single_process,
    cases,
    check_gradients,
)
from diffcoll.testing.harness.comparison import near
from diffcoll.testing.numbers import relative_errors

N = 3
X = numbers(8, 2)


def summed(distributed, single=None, batch=X, **more):
    return distributed, single or distributed, batch, {"rank_reduction": "sum", **more}


# ── against one process ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", RIGHT)
def test_right_code_passes(name):
    sizes = [(8,), (4, 4), (5, 3), (3, 3, 2), (5, 0, 3)]
    report = matches(RIGHT[name](), order=2, sizes=sizes)
    assert len(report.tables) == len(sizes)
    assert f"{report.tables[0].title}: right" in str(report)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_named(name, n):
    make, sizes, cause, words = PLANTED[name]
    report = differs(make(), sizes=sizes[n])
    assert cause in causes(report), str(report)
    assert re.search(words, str(report)), str(report)


OTHER_SHAPES = {
    (8,): summed(lambda x: x.square().sum(1, keepdim=True), lambda x: x.square().sum(1)),
    (8, 1, 1): summed(lambda x: (x.sum(1, keepdim=True), x.sum()), lambda x: (x.sum(1)[:, None, None], x.sum())),
}


@pytest.mark.parametrize("shape", OTHER_SHAPES)
def test_an_output_of_another_shape(shape):
    """The numbers are the same."""
    report = differs(OTHER_SHAPES[shape], sizes=[(5, 3)])
    (wrong,) = (row for row in report.tables[0].rows if not row.ok)
    assert wrong.error == float("inf") and wrong.words(2)[-1] == "other shape"
    assert report.causes[0].seen == f"{wrong.what}: shape (8, 1), expected {shape}"


def test_how_far_tensors_are_from_each_other():
    inf, nan = float("inf"), float("nan")
    a, b = torch.tensor([1.0, inf, nan, 3.0]), torch.tensor([1.5, inf, nan, 3.0])
    assert relative_errors(a, b, 2.0).tolist() == [0.25, 0, 0, 0]
    assert relative_errors(a, torch.tensor([1.0, -inf, 0.0, nan]), 1.0).tolist() == [0, inf, inf, inf]
    assert relative_errors(a, a[:1], 1.0).tolist() == [inf]
    masked = torch.tensor([[1.0, -inf], [2.0, 3.0]])  # an infinity says nothing of the others
    assert near(masked, masked) and not near(masked, masked + torch.tensor([0.1, 0.0]))
    assert not near(masked, masked[:1]) and not near(torch.tensor([2]), torch.tensor([3]))


def test_the_line_that_cuts_the_graph():
    for on in ("simulated", "gloo"):
        (cut,) = differs(clip(own_block_kept), sizes=[(4, 4)], on=[on]).cuts
        line = blocks_of_all.__code__.co_firstlineno + 6
        assert re.search(rf"all_gather at .*field.py:{line} cuts the graph: it took or filled a tensor", cut)


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
def test_the_line_of_a_collective_that_torch_wraps():
    """As newer releases wrap what they deprecate, with a function of typing_extensions."""

    def distributed(x):
        y = x.new_empty(8, 2)
        dist.all_gather_into_tensor(y, x)
        return (x @ y.T).sin().sum()

    (cut,) = differs(summed(distributed, lambda x: (x @ x.T).sin().sum()), sizes=[(4, 4)]).cuts
    assert f"test_gradients.py:{distributed.__code__.co_firstlineno + 2} cuts the graph" in cut


def test_the_librarys_own_messages_are_no_cuts():
    assert not differs(summed(lambda x: (dc.all_gather(x) ** 2).sum()), sizes=[(4, 4)], on=["gloo"]).cuts


def test_on_real_processes():
    report = matches(RIGHT["clip"](), sizes=[(5, 3)], on=["gloo", "mpi"])
    assert [table.title for table in report.tables] == ["gloo, 2 ranks, rows 5, 3", "mpi, 2 ranks, rows 5, 3"]
    distributed, single, _, more = clip(
        lambda x: (own_block_kept if threading.current_thread() is threading.main_thread() else right_gather)(x)
    )
    report = differs((distributed, single, pair(8), more), sizes=[(4, 4)], on=["simulated", "gloo"])
    assert "on processes" in causes(report)
    assert "right on simulated ranks, wrong on gloo" in str(report)


def test_a_run_that_is_wrong_is_not_repeated_on_processes():
    distributed, single, _, more = clip(own_block_kept)
    report = differs((distributed, single, pair(8), more), sizes=[(4, 4)], on=["simulated", "gloo"])
    assert report.tables[1].skipped == "wrong already on simulated ranks"
    assert "── gloo, 2 ranks, rows 4, 4: not run: wrong already on simulated ranks" in str(report)


def test_the_reduction_that_is_shown():
    """With "any", the one under which the fewest gradients are wrong."""

    def squares(x):
        return CubedSum.apply(x.sum(0)).sum() / dc.get_world_size()

    def single(x):
        return (x.sum(0) ** 3).sum()

    report = differs((squares, single, one, {"rank_reduction": "any"}), order=2, sizes=[(4, 4)])
    assert report.rank_reduction == "sum" and causes(report) == ["second order"]
    report = differs(clip(dc.all_gather), rank_reduction="any")
    assert report.rank_reduction == "mean" and causes(report) == ["raised"]
    words = "assert_matches_single_process, gradients averaged over ranks: raised an error in some"
    assert str(report).startswith(words)


def test_a_module_as_the_function():
    layer = torch.nn.Linear(2, 2, dtype=torch.double)
    report = matches((layer, layer, (X,), {"module": layer}))
    assert "gradient of input" in {row.what for row in report.tables[0].rows}


def test_which_reduction():
    """The value is N times the loss, and the features are exact, under a sum; both are right under a mean."""
    for reduction in ("mean", "any"):
        matches(clip(right_gather), rank_reduction=reduction)
    report = differs(clip(right_gather), sizes=[(4, 4)], rank_reduction="sum")
    assert causes(report) == ["value scaled", "scaled"]
    assert 'value: under "sum" 2 = N times the loss of one process, exact under "mean"' in str(report)
    assert 'image, text and scale: under "sum" 2 = N times the right gradient, exact under "mean"' in str(report)
    rows = [row for row in report.tables[0].rows if row.what == "gradient of image"]
    assert [(row.rank, round(row.ratio, 6), row.ok) for row in rows] == [(0, 2, False), (1, 2, False)]


MODEL = torch.nn.Linear(3, 2, dtype=torch.double)


def of_global_model(x):
    return MODEL(x).sin().sum()


def test_a_model_that_is_a_global():
    """It is the same object in the function and in `module`, on every rank."""
    MODEL.weight.grad = None
    before = [p.clone() for p in MODEL.parameters()]
    for on in (["simulated"], ["gloo"]):
        report = matches(summed(of_global_model, batch=torch.randn(8, 3).double(), module=MODEL), on=on)
        assert {"gradient of weight", "gradient of bias"} <= {row.what for row in report.tables[0].rows}
    assert MODEL.weight.grad is None and all(torch.equal(a, b) for a, b in zip(before, MODEL.parameters(), strict=True))


def test_a_list_of_parameters():
    scale = torch.tensor(2.0, dtype=torch.double, requires_grad=True)

    def distributed(x):
        return (scale * x).sin().sum() * (1 + (dc.get_world_size() > 1))

    report = differs(summed(distributed, module=[scale]))
    assert 'x and module[0]: under "sum" 2 = N times the right gradient' in str(report)


def test_outputs_with_rows_and_buffers():
    """A layer: its outputs get other cotangents on every rank."""

    def batch_norm(synchronized):
        layer = torch.nn.BatchNorm1d(3).double()

        def distributed(x):
            if not synchronized:
                return layer(x)
            ones = torch.ones(len(x), 1, dtype=x.dtype)
            n, total, squares = dc.all_reduce((ones.sum(0), x.sum(0), (x**2).sum(0)))
            mean, variance = total / n, squares / n - (total / n) ** 2
            with torch.no_grad():
                layer.num_batches_tracked += 1
                layer.running_mean.lerp_(mean, 0.1)
                layer.running_var.lerp_(variance * n / (n - 1), 0.1)
            return (x - mean) / (variance + layer.eps).sqrt() * layer.weight + layer.bias

        return distributed, layer, layer

    x = numbers(8, 3)
    for reduction in ("mean", "sum", "any"):
        distributed, single, module = batch_norm(True)
        report = matches((distributed, single, x, {"module": module}), order=2, rank_reduction=reduction)
        assert {"output", "buffer running_var", "second order of weight"} <= {r.what for r in report.tables[2].rows}
    distributed, single, module = batch_norm(False)
    report = differs((distributed, single, x, {"module": module}), sizes=[(5, 3)])
    assert causes(report)[0] == "local statistics"
    assert "each rank returns what one process returns for the rank's own rows" in report.causes[0].seen
    report = differs((lambda x: single(x), single, x, {"module": module}))
    assert not any(row.ok for row in report.tables[0].rows if row.what == "buffer running_mean")


def test_trees_and_keyword_arguments():
    batch = {"a": {"left": X, "right": [per_rank(8, 3)[1]]}, "labels": torch.arange(8), "factor": 3.0}

    def loss(a, labels, factor):
        return (a["left"].sum(1) * a["right"][0].prod(1) * labels).sum() * factor

    report = matches(summed(loss, batch=batch), sizes=[(5, 3)])
    names = [row.what for row in report.tables[0].rows if row.rank != 1]
    assert names == ["value", "gradient of a['left']", "gradient of a['right'][0]"]


def test_a_function_may_modify_its_arguments():
    def loss(x):
        return x.mul_(2).sin().sum()

    x = X.clone()
    before, state = x.clone(), torch.get_rng_state()
    matches(summed(loss, batch=x))
    assert torch.equal(x, before) and x.grad is None and not x.requires_grad
    assert torch.equal(torch.get_rng_state(), state)


class OnceDifferentiable(Function):
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
    with pytest.raises(RuntimeError, match="differentiate twice a function that was marked with @once_differentiable"):
        matches(summed(fn), order=2)


def test_ranks_that_differ_in_integers_alone():
    def fn(mask, ids):
        return (mask * ids).sum()

    ones = torch.ones(8, dtype=torch.double)
    matches(summed(fn, batch=(ones, torch.arange(8))))


def test_in_a_mode_of_the_caller():
    with torch.no_grad():
        matches(summed(loss))
    with torch.inference_mode():
        is_right(loss, per_rank(3))


@pytest.mark.filterwarnings("ignore::diffcoll.testing.UncheckedWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128], ids=str)
def test_other_dtypes(dtype):
    def distributed(x):
        return (dc.all_reduce(x.sum(0)).abs() ** 2).sum() / dc.get_world_size()

    program = distributed, lambda x: (x.sum(0).abs() ** 2).sum(), numbers(8, 4, dtype=dtype), {}
    matches(program, rank_reduction="sum")
    wrong = differs(program, sizes=[(5, 3)])
    assert re.search(r"x: under .mean. 0\.\d+ = 1/N times the right gradient, exact under .sum.; right in", str(wrong))


def of_a_parameter_elsewhere(x):
    return (planted.SCALE * x).sin().sum()


def test_a_tensor_whose_gradient_nothing_would_check():
    """One that the function uses and that is not in `module`; not one that it makes itself."""
    scale = torch.tensor(2.0, dtype=torch.double, requires_grad=True)
    product, planted.SCALE.grad = scale * 2, torch.ones((), dtype=torch.double)
    for fn in (lambda x: (scale * x).sum(), lambda x: (product * x).sum(), of_a_parameter_elsewhere):
        for check, *given in ((matches, summed(fn, sizes=[(4, 4)])), (is_right, fn, per_rank(3))):
            with pytest.raises(ValueError, match=r"of shape \(\) that requires a gradient"):
                check(*given)
    with pytest.raises(RanksFailedError, match=r"of shape \(\) that requires a gradient"):
        is_right(lambda x: (scale * x).sum(), per_rank(3, n=2), on=["gloo"])
    assert planted.SCALE.grad == 1 and scale.grad is None

    def makes_one(x):
        torch.manual_seed(0)
        return (torch.nn.Linear(2, 2).double()(x) + torch.zeros(2, requires_grad=True)).sin().sum()

    matches(summed(makes_one), order=2)


def test_numbers_and_infinities_in_outputs():
    def fn(x):
        loss = (x**2).sum()
        return loss, loss.item() / 3, len(x), torch.where(x > 0, 1e8 * x, -torch.inf)

    report = matches(summed(fn))
    assert max(row.error for row in report.tables[0].rows) < 1e-14


# ── wrong arguments ──────────────────────────────────────────────────────────────────────────────────────


def loss(x):
    return x.sin().sum()


@dataclasses.dataclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


def hooked(register):
    layer = torch.nn.Linear(2, 2, dtype=torch.double)
    layer.hooks = register(layer if register is dc.GradientAverager else layer.weight)
    return layer


WRONG = {
    "equal ranks": (dict(batch=torch.ones(8, 2)), "batch: got the same numbers on ranks 0 and 1, expected different"),
    "equal first rows": (dict(batch=X[:4].repeat(2, 1), sizes=[(4, 4)]), "the same numbers on ranks 0 and 1"),
    "rows": (
        dict(batch=X[:7]),
        r"got a tensor with 7 rows, expected tensors with 8 rows, .* pass other sizes, or the batch",
    ),
    "0-d": (dict(batch=(X, torch.tensor(1.0))), "batch: got a 0-d tensor, expected .* pass parameters by module="),
    "dataclass": (
        dict(batch=(X, Pair(X, X))),
        "batch: got a Pair with tensors inside, expected a tree of tuples, lists, dicts and namedtuples; use dict",
    ),
    "constant": (
        dict(single=lambda x: loss(x.detach())),
        "single: got gradients that are all zero, expected a result with a gradient to compare with; remove detach",
    ),
    "integers": (dict(batch=torch.arange(8)), "batch: got 1 tensors, none with floating-point numbers"),
    "sizes": (dict(sizes=[(4, -4, 8)]), "sizes: got .* expected for each run the rows of each rank"),
    "no sizes": (dict(sizes=[]), "sizes: got .* expected for each run the rows of each rank"),
    "all empty": (dict(sizes=[(0, 0)]), "not all zero"),
    "flat sizes": (dict(sizes=(4, 4)), "sizes: got .* expected for each run the rows of each rank"),
    "rank_reduction": (dict(rank_reduction="avg"), 'rank_reduction: got \'avg\', expected "mean", "sum" or "any"'),
    "order": (dict(order=3), "order: got 3, expected 1 or 2"),
    "on": (dict(on="simulated"), "on: got 'simulated', expected a sequence"),
    "module": (
        dict(module=[torch.ones(2)]),
        r"module\[0\]: got a tensor that requires no gradient, expected an nn.Module",
    ),
    "unused module": (
        dict(module=torch.nn.Linear(2, 2)),
        "module: got parameters of which none has a gradient, expected the module, or the parameters, that single uses",
    ),
    "any": (
        dict(distributed=lambda x: (loss(x), x), single=lambda x: (loss(x), x), rank_reduction="any"),
        'rank_reduction: got "any"',
    ),
    "hooks": (
        dict(module=hooked(lambda p: p.register_hook(lambda g: 2 * g))),
        "parameter weight with hooks on its gradient, expected none, since copies have no such hooks; register them",
    ),
    "averager": (dict(module=hooked(dc.GradientAverager)), "or pass the module before a GradientAverager is attached"),
    "not finite": (dict(single=lambda x: loss(x).log()), r"single: got NaN or infinity in value\[0\], .* other data"),
    "no gradient": (
        dict(single=lambda x: ((x - x) ** 2).sum().sqrt() + loss(x)),
        "single: got NaN or infinity in gradient of x",
    ),
    "module's type": (dict(module=3), "module: got int, expected an nn.Module"),
    "not a function": (dict(distributed=3), "distributed: got int, expected a function"),
    "single's outputs": (dict(single=lambda x: (loss(x), loss(x))), "distributed returned 1 outputs, single 2"),
    "kinds of outputs": (
        dict(single=lambda x: x),
        "output 0: distributed returned a 0-d loss on all ranks together, single 8 rows",
    ),
    "no tensor": (dict(single=lambda x: {1}), "returned set, expected a loss"),
    "no result": (dict(single=lambda x: "loss"), "distributed returned 1 outputs, single 0"),
    "numbers of outputs": (dict(distributed=lambda x: [loss(x)] * (1 + dc.get_rank())), r"returned \[1, 2\] outputs"),
    "not picklable": (
        dict(distributed=lambda x, each=(i for i in range(3)): loss(x)),
        "distributed: cannot be copied for each rank .* create what cannot be pickled",
    ),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument(name):
    given, words = WRONG[name]
    arguments = {"distributed": loss, "single": loss, "batch": X, **SIMULATED, **given}
    with pytest.raises((TypeError, ValueError), match=words):
        assert_matches_single_process(**arguments)


def test_a_function_that_raises():
    """In the first run the error is the user's; later, it is a finding."""

    def distributed(x):
        if len(x) == 3:
            raise KeyError("three")
        return loss(x)

    with pytest.raises(KeyError, match="three"):
        matches(summed(distributed, loss), sizes=[(5, 3)])
    report = differs(summed(distributed, loss))
    assert "KeyError: 'three'" in report.tables[1].raised and report.tables[0].ok
    assert causes(report) == ["raised"]
    with pytest.raises(ZeroDivisionError):
        matches((loss, lambda x: 1 / 0, X, {}))


# ── finite differences ───────────────────────────────────────────────────────────────────────────────────

CALLS = [case for case in cases.table(N) if not any(case.shared) and "async_op" not in case.arguments and not case.few]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: f"{case.name}({case.label})")
def test_the_gradients_of_every_collective(case):
    def fn(x, r):
        return (case.call(x, r).sin() * (r + 1)).sum().abs()

    xs = [case.x(r, 5) for r in range(N)]
    report = is_right(fn, xs, range(N))
    (joint,) = report.tables[1:]
    assert joint.title == "the joint graph of all ranks" and not joint.skipped
    assert joint.rows
    assert not report.notes


def test_the_joint_graph_of_code_that_calls_torch_distributed():
    def fn(x):
        return x.sin().sum() * (dist.get_rank() + 1)

    report = is_right(fn, per_rank(4), strict=True)
    assert str(report).splitlines()[2] == (
        "── the joint graph of all ranks: not run: fn calls torch.distributed, and this graph has diffcoll's "
        "collectives alone"
    )


def wrong_sum(x, rule=lambda g: g):
    """A sum whose backward is another one."""
    return ruled(dc.all_reduce, rule)(x)


RULES = {
    "N times": (lambda g: 3 * dc.all_reduce(g), "scaled", "x: it is 3 = N times the derivative of the losses"),
    "1/N": (lambda g: dc.all_reduce(g, "mean"), "scaled", "x: it is 0.3333 = 1/N times the derivative"),
    "identity": (lambda g: g, "not reduced", "x: it is the derivative of the rank's own loss alone"),
    "own loss N times": (lambda g: 3 * g, "not reduced", "own loss alone, times 3 = N"),
    "rank 1 missing": (
        lambda g: dc.all_reduce(g * (dc.get_rank() != 1)),
        "rank missing",
        "x: it lacks the loss of rank 1",
    ),
    "maximum": (lambda g: dc.all_reduce(g, "max"), "wrong in direction", "x: no multiple of the derivative"),
    "off by little": (lambda g: (1 + 3e-6) * dc.all_reduce(g), "nearly right", "x: off by 3.0e-06"),
    "zero": (lambda g: 0 * g, "no contribution", "x: the gradient is zero on every rank"),
    "zero on rank 2": (lambda g: dc.all_reduce(g) * (dc.get_rank() != 2), "no contribution", "zero on rank 2"),
    "by rank": (
        lambda g: dc.all_reduce(g) * (1 + dc.get_rank()),
        "scaled differently",
        "x: right in direction on each rank, off by 1 on rank 0, 2 on rank 1, 3 on rank 2",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_wrong_rule_is_named(name):
    rule, cause, words = RULES[name]
    report = is_wrong(lambda x, w: (w * wrong_sum(x, rule)).sin().sum(), per_rank(4), per_rank(4, seed=9))
    assert causes(report) == [cause] and words in str(report), str(report)
    assert all(row.ok for row in report.tables[0].rows if row.what == "gradient of w")


def test_many_elements_are_checked_along_random_directions():
    def fn(x, w):
        return (w * wrong_sum(x)).sin().sum()

    report = is_wrong(fn, per_rank(40, 3), per_rank(40, 3, seed=9))
    assert causes(report) == ["not reduced"]
    is_right(lambda x: dc.all_reduce(x, "product").sin().sum(), per_rank(40, 3), order=2)


def test_parameters_and_second_order():
    layer = torch.nn.Linear(3, 2, dtype=torch.double)

    def fn(x, wrong=False):
        y = layer(x)
        y = dc.all_reduce(y.detach() + 0 * y if wrong and dc.get_rank() == 0 else y, "logsumexp")
        return (y**2).sum() * (1 + dc.get_rank())

    report = is_right(fn, per_rank(2, 3), module=layer, order=2)
    assert {"gradient of weight", "second order of bias"} <= {row.what for row in report.tables[0].rows}
    assert [row.rank for row in report.tables[0].rows if row.what == "gradient of bias"] == [0, 1, 2]
    report = is_wrong(lambda x: fn(x, wrong=True), per_rank(2, 3), module=layer)
    assert causes(report) == ["detached"]
    assert "backward agrees with the joint graph of all ranks, and not with finite differences" in str(report)
    assert "detach() at" in report.cuts[0] and "looks like a lost gradient" in report.notes[-1]
    assert causes(is_wrong(lambda x: CubedSum.apply(x).sum(), per_rank(2), order=2)) == ["second order"]


def test_a_point_without_a_gradient():
    xs = [torch.tensor([0.0, r + 1.0]).double() for r in range(N)]
    report = is_wrong(lambda x: dc.all_reduce(x, "max").sum() + x.relu().sum(), xs)
    assert causes(report) == ["kink"] and "not differentiable here" in str(report)
    assert re.search(r"gradient of x +0 .* kink\n", str(report))


class Counting:
    """Keeps a number and a tensor between calls."""

    def __init__(self):
        self.calls, self.seen = 0, torch.zeros(0, 3)

    def __call__(self, x):
        self.calls, self.seen = self.calls + 1, torch.cat([self.seen, torch.ones(1, 3)])
        return (x * self.calls * self.seen.sum(0)).sin().sum()


def test_a_function_with_state():
    is_right(Counting(), per_rank(3), order=2)


def test_tensors_of_different_sizes():
    def fn(x, y):
        return (dc.all_reduce(x) * 1e-4).sin().sum() + (1e4 * dc.all_reduce(y)).sin().sum()

    xs, ys = [1e4 * x for x in per_rank(3)], [1e-4 * y for y in per_rank(3, seed=9)]
    is_right(fn, xs, ys, order=2)
    for wrong in (lambda x, y: fn(wrong_sum(x) / 3, y), lambda x, y: fn(x, wrong_sum(y))):
        is_wrong(wrong, xs, ys)
    little = RULES["off by little"][0]
    for size in (1e-6, 1e6):
        is_wrong(lambda x, size=size: (wrong_sum(x, little) / size).sin().sum(), [size * x for x in per_rank(3)])


def test_a_complex_gradient_without_its_conjugate():
    """Its real part is right."""

    def fn(z, rule=dc.all_reduce):
        return ((1 + dc.get_rank()) * wrong_sum(z, rule) ** 2).sum().real

    zs = per_rank(3, dtype=torch.complex128)
    is_right(fn, zs)
    is_wrong(lambda z: fn(z, lambda g: dc.all_reduce(g).conj()), zs)


def test_a_loss_that_hides_its_gradient():
    with pytest.raises(ValueError, match=r"a loss that is too large, or varies too fast, .* subtract constants"):
        is_right(lambda x: 1e12 + wrong_sum(x).sin().sum(), per_rank(3))


def test_a_loss_without_a_gradient():
    with pytest.raises(ValueError, match="check_gradients: fn: got results that depend on no tensor, expected a loss"):
        is_right(lambda x: 3.0 + dc.get_rank(), per_rank(3))
    report = is_wrong(lambda x: dc.all_reduce(x).sum().item() * (1 + dc.get_rank()), per_rank(3))
    assert "no contribution" in causes(report)


def test_a_large_loss_with_a_small_gradient():
    is_right(lambda x: 1e9 + dc.all_reduce(x, "product").sin().sum(), per_rank(3))


def test_the_error_can_be_sent_to_another_process():
    with pytest.raises(GradientMismatchError) as error:
        check_gradients(lambda x: x.detach() * 2 + 0 * x, per_rank(2), **SIMULATED)
    copy = pickle.loads(pickle.dumps(error.value))
    assert copy.report == error.value.report and str(copy) == str(error.value)


def test_random_numbers_are_the_same_in_every_evaluation():
    def fn(x):
        return (torch.nn.functional.dropout(x, 0.5) * torch.rand(4)).sin().sum()

    is_right(fn, per_rank(4), seed=3)


def test_a_detach_for_logging_is_not_blamed():
    def distributed(x):
        dc.all_reduce(x.sum().detach())
        return (1 + dc.get_rank()) * planted.max_like_sum(x.amax(0)).sin().sum()

    def single(x):
        return 3 * x.amax(0).sin().sum()

    report = differs(summed(distributed, single), sizes=[(4, 4)])
    assert causes(report) == ["wrong in direction"] and "detach()" in report.cuts[0]


def test_what_the_precision_hides_is_noted():
    small, idle = (torch.nn.Parameter(torch.tensor(1.0)) for _ in range(2))

    def fn(x):
        return (x.double() ** 2).sum() * 1e3 + (small.double() * x.sum()) * 1e-5 + 0 * idle

    arguments = {"module": [small, idle], "rank_reduction": "sum", **SIMULATED}
    with pytest.warns(UncheckedWarning) as warned:
        report = assert_matches_single_process(fn, fn, X.float(), **arguments)
    words = "gradient of module[0]: too small beside the others to be checked in this precision"
    assert f"{words}: pass float64" in report.notes

    def in_double(x):
        return (x**2).sum() + tiny * x.sum() * 1e-14

    tiny = torch.ones((), dtype=torch.double, requires_grad=True)
    with pytest.warns(UncheckedWarning, match=r"module\[0\]: too small .*: choose other data"):
        matches(summed(in_double, module=[tiny]))
    assert "gradient of module[1]: zero in every run" in report.notes
    assert [str(w.message) for w in warned] == [f"assert_matches_single_process: {note}" for note in report.notes]
    assert {w.filename for w in warned} == {__file__}
    with pytest.warns(UncheckedWarning) as warned:
        assert_matches_single_process(fn, fn, X.bfloat16(), **arguments)
    words = "errors below 0.06 pass, because of the precision of the tensors: pass float64"
    assert str(warned[0].message) == f"assert_matches_single_process: {words}"
    report = differs((fn, fn, X.float(), arguments), strict=True)
    assert str(report).startswith(
        "assert_matches_single_process, gradients summed over ranks: right, but strict=True fails with the notes below"
    )
    assert "── notes ──\n  gradient of module[0]: too small beside" in str(report)
    assert pickle.loads(pickle.dumps(GradientMismatchError(report))).report == report
    matches(summed(lambda x: (x**2).sum()), strict=True)


def test_random_numbers_that_differ_on_one_process():
    def fn(x):
        return (torch.nn.functional.dropout(x, 0.5) ** 2).sum()

    assert causes(differs(summed(fn))) == ["random"]


def test_what_is_zero_but_for_rounding():
    def centered(x):
        n = dc.all_reduce(torch.full((1,), float(len(x)), dtype=x.dtype))
        return x - dc.all_reduce(x.sum(0)) / n

    def noise(x):
        return centered(x).sum() + 1e-12 * (x**2).sum()

    x = X - X.mean(0)
    matches(summed(torch.sum, lambda x: x.mean(0).sum() * 8, x))
    assert "rounding" in causes(differs(summed(noise)))


def test_a_computation_of_lower_precision():
    def fn(x):
        return x.float().sin().double().sum() + 0 * dc.all_reduce(x.sum())

    def precise(x):
        return x.sin().sum()

    assert "nearly right" in causes(differs(summed(fn, precise), sizes=[(4, 4)]))
    matches(summed(fn, precise), tolerance=1e-5)


def test_other_peoples_collectives():
    def fn(x, w):
        y = x.clone()
        dist.all_reduce(y)
        return (w * y * x).sum()

    for on in (["simulated"], ["gloo"]):
        report = is_wrong(fn, per_rank(4, n=2), per_rank(4, n=2, seed=9), on=on)
        assert any("all_reduce at" in cut and "cuts the graph" in cut for cut in report.cuts)
        assert causes(report) == ["not reduced"]


BAD = {
    "float32": (([X[:2].float(), X[2:4].float()],), {}, "per_rank: got torch.float32, expected float64 .* x.double()"),
    "equal": (([X, X],), {}, "per_rank: got the same numbers on ranks 0 and 1"),
    "no tensors": (([1, 2],), {}, "per_rank: got no floating-point tensor"),
    "lengths": (([X, 2 * X], [1]), {}, "sequences of lengths"),
    "structures": (([X, (X, 2 * X)],), {}, "expected the same tensors on every rank"),
    "order": (([X, 2 * X],), {"order": 0}, "order: got 0"),
    "strict": (([X, 2 * X],), {"strict": "yes"}, "strict: got 'yes', expected False or True"),
    "unused module": (
        ([X, 2 * X],),
        {"module": torch.nn.Linear(2, 2).double()},
        "that fn uses; a model that is a global",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_argument_of_check_gradients(name):
    given, more, words = BAD[name]
    with pytest.raises((TypeError, ValueError), match=words) as raised:
        check_gradients(lambda x, *_: x.sum(), *given, **SIMULATED, **more)
    assert str(raised.value).startswith("check_gradients: ")
