"""Wrong arguments of one call: its error names operation and argument, and nothing has been sent.

A row is what the text begins with, the class of the error, and the call, which two ranks make.
"""

import inspect
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import gloo, runs_on

import diffcoll as dc
from diffcoll.collectives import COLLECTIVES
from diffcoll.core.arguments import TAKE_TREES

N = 2
X = torch.arange(12.0).reshape(4, 3)
GROUP = type("Comm", (), {})()  # a group by position, as in torch.distributed and mpi4py
CALLS = {name: getattr(dc, name) for name in COLLECTIVES} | {"permute": partial(dc.permute, pairs=[(0, 1)])}


def rare(make, *arguments, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # beta and deprecation warnings
        return make(*arguments, **more)


def raising(error, *values):
    return [(value, error) for value in values]


# ── x, of every collective ───────────────────────────────────────────────────────────────────────────────

WRONG_X = [
    *raising(TypeError, "numbers", np.ones(4), None, 3.0, X.to_sparse()),
    (rare(torch.Tensor.to_sparse_csr, X), TypeError),
    (rare(torch.quantize_per_tensor, X, 0.1, 0, torch.qint8), TypeError),
    (rare(torch.nested.nested_tensor, [torch.ones(2, 2), torch.ones(1, 2)]), TypeError),
    (rare(torch.nested.nested_tensor, [torch.ones(2), torch.ones(1)], layout=torch.jagged), TypeError),
]


def pending(name):
    waits = dc.all_reduce(X, async_op=True)
    try:
        return CALLS[name](waits)
    finally:
        waits.wait()


TREES = [[X], {"a": X}, (X, [X]), ()]
NOT_OF_TENSORS = [[X, "y"], {"a": [X.to_sparse()]}, (X, 3), {object(): X, 1: X}, {"a": X, 1: X}]
OF_X = [
    *((f"{name}: x", error, lambda f=f, x=x: f(x)) for name, f in CALLS.items() for x, error in WRONG_X),
    *((f"{name}: x", TypeError, lambda name=name: pending(name)) for name in CALLS),
    *(
        (f"{name}: x", TypeError, lambda f=f, tree=tree: f(tree))
        for name, f in CALLS.items()
        for tree in (NOT_OF_TENSORS if name in TAKE_TREES else TREES)
    ),
    ("all_gather: x", TypeError, lambda: dc.all_gather(X.to(torch.float8_e5m2).requires_grad_())),
    ("all_reduce: x", TypeError, lambda: dc.all_reduce(X > 1)),
    ("all_reduce: x", TypeError, lambda: dc.all_reduce(X > 1, "product")),
    ("all_reduce: x", TypeError, lambda: dc.all_reduce(X.to(torch.float8_e5m2))),
    ("scan: x", TypeError, lambda: dc.scan(X > 1)),
    ("reduce_scatter: x", ValueError, lambda: dc.reduce_scatter(torch.tensor(1.0))),
    ("split: x", ValueError, lambda: dc.split(torch.tensor(1.0))),
    ("scatter: x", ValueError, lambda: dc.scatter(torch.tensor(1.0))),
    # not a multiple of N
    ("reduce_scatter: x", ValueError, lambda: dc.reduce_scatter(X, dim=1)),
    ("all_to_all: x", ValueError, lambda: dc.all_to_all(X, split_dim=1)),
    ("scatter: x", ValueError, lambda: dc.scatter(torch.ones(5, 2))),
    ("split: x", ValueError, lambda: dc.split(torch.ones(5, 2))),
]

# ── every argument of every collective that has it ───────────────────────────────────────────────────────

#: The input, where torch.distributed's functions that fill outputs take it; a tensor of one integer is an index, too.
OUTPUTS = raising(TypeError, X, [X], torch.tensor(0), (torch.tensor([0]),))
FLAG = raising(TypeError, "no", 1, None)
DIM = [*raising(TypeError, "0", 0.0, True, GROUP), *raising(ValueError, 2, -3), *OUTPUTS]
ROOT = [*raising(TypeError, "0", 0.5, None, GROUP), *raising(ValueError, 2, -1), *OUTPUTS]
SIZES = [
    *raising(TypeError, [2, "2"], [4, 1.5]),
    *raising(ValueError, "equal", 2, 3.5, [4], [1, 2, 1], [5, -1], [3, 3]),
]
OPS = [
    *raising(ValueError, max, torch.amax, lambda stack: stack.sum(0), torch.add, GROUP, 3, None, ["sum"]),
    *raising(ValueError, "mode", "maximum", "amax", "average", "SUM", "bxor"),
    *raising(ValueError, dist.ReduceOp.BAND, dist._make_nccl_premul_sum(2.0)),
    *OUTPUTS,
]
WRONG_BY_NAME = {
    "async_op": FLAG,
    "concat_dim": DIM,
    "concat_sizes": [*SIZES[:-1], ([2, 2], ValueError)],
    "dim": DIM,
    "dst": ROOT,
    "empty": raising(ValueError, X, [X], "zeros"),  # without a function
    "exclusive": FLAG,
    "grad_placement": raising(ValueError, "same", None, True, ["partial"]),
    "group": raising(TypeError, "world", 0, [0, 1], (0,), X),
    "offset": raising(TypeError, "1", 0.5, None),
    "op": OPS,
    "pairs": [
        *raising(TypeError, 3, "01", [(0, 1, 1)], [("a", 1)]),
        *raising(ValueError, [(0, 1), (0, 0)], [(0, 1), (1, 1)], [(0, 2)], [(-1, 0)]),  # a rank twice, or none of them
    ],
    "reverse": FLAG,
    "sizes": SIZES,
    "split_dim": DIM,
    "split_sizes": SIZES,
    "src": ROOT,
    "stack": FLAG,
    "wrap": FLAG,
}
#: What else has to be valid for the argument to be read.
NEEDED = {"concat_sizes": {"split_sizes": [1, 3]}}


def rows_of(name, f):
    for argument in list(inspect.signature(getattr(dc, name)).parameters)[1:]:
        for value, error in WRONG_BY_NAME[argument]:
            if name == "scan" and callable(value):  # which is right there
                continue
            more = {argument: value, **NEEDED.get(argument, {})}
            yield f"{name}: {argument}", error, lambda more=more: f(X, **more)


TWO = {"a": X, "b": X[0]}
NOT_LIKE_TWO = [X, [X, X[0]], {"a": X}, TWO | {"c": X}, TWO | {"b": X[0, :1]}, TWO | {"b": X[0].double()}, {}]


def prefix_of_two(op=lambda before, own: own, empty=TWO):
    return dc.scan(TWO, op, exclusive=True, empty=empty)


OF_ARGUMENTS = [
    *(row for name, f in CALLS.items() for row in rows_of(name, f)),
    ("all_reduce: op", TypeError, lambda: dc.all_reduce(X.to(torch.complex64), "max")),
    ("reduce_scatter: op", TypeError, lambda: dc.reduce_scatter(X.int(), "logsumexp")),
    ("reduce: op", TypeError, lambda: dc.reduce(X.int(), op="mean")),
    ("all_gather: dim", ValueError, lambda: dc.all_gather(X, -4, stack=True)),
    ("all_gather: sizes", ValueError, lambda: dc.all_gather(X, sizes=[4, 4], stack=True)),
    ("all_gather: sizes", ValueError, lambda: dc.all_gather({"a": X, "b": X[:3]}, sizes=[4, 4])),
    ("reduce_scatter: sizes", ValueError, lambda: dc.reduce_scatter(X, sizes="auto")),
    ("split: sizes", ValueError, lambda: dc.split(X, sizes=[1, 2])),
    ("all_to_all: concat_sizes", ValueError, lambda: dc.all_to_all(X, split_sizes=[1, 3])),
    ("all_reduce()", TypeError, lambda: dc.all_reduce(X, "sum", GROUP)),
    ("permute()", TypeError, lambda: dc.permute(X, [(0, 1)], GROUP)),
    ("permute()", TypeError, lambda: dc.permute(X, [(0, 1)], dim=0)),
    ("scan()", TypeError, lambda: dc.scan(X, async_op=True)),
    *(("scan: x", TypeError, lambda x=x: dc.scan(x, torch.add)) for x in [None, 3.0, X.to_sparse(), *NOT_OF_TENSORS]),
    *(("scan: op", ValueError, lambda op=op: dc.scan(X, op)) for op in ("mean", "max", dist.ReduceOp.SUM)),
    ("scan: empty", ValueError, lambda: dc.scan(X, torch.add, exclusive=True)),
    ("scan: empty", ValueError, lambda: dc.scan(X, torch.add, empty=X)),
    *(("scan: empty", ValueError, lambda empty=empty: prefix_of_two(empty=empty)) for empty in NOT_LIKE_TWO),
    *(("scan: op(before, own)", ValueError, lambda y=y: prefix_of_two(lambda a, b: y)) for y in NOT_LIKE_TWO),
    ("scan: op(before, own)['a']", TypeError, lambda: prefix_of_two(lambda a, b: {"a": 3, "b": b["b"]})),
]

# ── what is composed, and the rest ───────────────────────────────────────────────────────────────────────

OTHERS = [
    ("gather_batch: tree['b']", ValueError, lambda: dc.gather_batch({"a": torch.ones(3), "b": torch.ones(2, 3)})),
    ("gather_batch: tree[1]", ValueError, lambda: dc.gather_batch([torch.ones(2), torch.ones(3)])),
    ("gather_batch: tree[1]", ValueError, lambda: dc.gather_batch([torch.ones(2), torch.tensor(1.0)])),
    ("gather_batch: tree[1]", TypeError, lambda: dc.gather_batch([torch.ones(2), 5])),
    ("gather_batch: tree", ValueError, lambda: dc.gather_batch({})),
    ("gather_batch: tree", TypeError, lambda: dc.gather_batch({object(): X, 1: X})),
    ("gather_batch: sizes", ValueError, lambda: dc.gather_batch(X, sizes="equal")),
    ("gather_batch: sizes", ValueError, lambda: dc.gather_batch(X, sizes=[3, 3])),
    ("gather_batch: sizes", ValueError, lambda: dc.gather_batch(X, sizes=[4])),
    ("gather_batch: sizes", TypeError, lambda: dc.gather_batch(X, sizes=[4, 4.0])),
    ("gather_batch: pad", TypeError, lambda: dc.gather_batch(X, pad="zeros")),
    ("gather_batch: group", TypeError, lambda: dc.gather_batch(X, group=[0, 1])),
    ("ring: tree", TypeError, lambda: dc.ring(3)),
    ("ring: tree[1]", ValueError, lambda: dc.ring([X, torch.tensor(1.0)])),
    ("ring: tree", ValueError, lambda: dc.ring({})),
    ("ring: group", TypeError, lambda: dc.ring(X, group="world")),
    ("halo_exchange: x", TypeError, lambda: dc.halo_exchange([1.0], 0, 1, 1)),
    ("halo_exchange: x", ValueError, lambda: dc.halo_exchange(X, 0, 5, 1)),  # more rows than a block has
    ("halo_exchange: dim", ValueError, lambda: dc.halo_exchange(X, 2, 1, 1)),
    ("halo_exchange: dim", TypeError, lambda: dc.halo_exchange(X, (0, 1), 1, 1)),
    ("halo_exchange: left", ValueError, lambda: dc.halo_exchange(X, 0, -1, 1)),
    ("halo_exchange: right", TypeError, lambda: dc.halo_exchange(X, 0, 1, 1.5)),
    ("halo_exchange: padding_mode", ValueError, lambda: dc.halo_exchange(X, 0, 1, 1, padding_mode="reflect")),
    ("get_rank: group", TypeError, lambda: dc.get_rank("world")),
    ("get_world_size: group", TypeError, lambda: dc.get_world_size(0)),
    ("set_default_group: group", TypeError, lambda: dc.set_default_group([0, 1])),
    ("check_mode: on", TypeError, lambda: dc.check_mode(1)),
    ("joint_backward: loss", TypeError, lambda: dc.joint_backward()(3.0)),
    ("joint_backward: loss", TypeError, lambda: dc.joint_backward()(X.int())),
    ("joint_backward: loss", RuntimeError, lambda: dc.joint_backward()(X)),  # before its region
]


F = dc.nn.functional


def averaged(call):
    return call(dc.GradientAverager(torch.nn.Linear(3, 2).parameters()))


#: (what the text begins with, class, words of the remedy, call)
REMEDIES = [
    ("all_gather: dim", TypeError, "group=", lambda: dc.all_gather(X, GROUP)),
    ("all_reduce: op", ValueError, "group=", lambda: dc.all_reduce(X, GROUP)),
    ("all_reduce: op", ValueError, "dc.all_gather", lambda: dc.all_reduce(X, torch.amax)),
    ("all_reduce: op: got BAND", ValueError, '"min" (all)', lambda: dc.all_reduce(X, dist.ReduceOp.BAND)),
    ("all_reduce: x", TypeError, "x.wait()", lambda: pending("all_reduce")),
    ("broadcast: x", TypeError, "every rank passes x", lambda: dc.broadcast(None)),
    ("scatter: src", TypeError, "y = dc.scatter(x", lambda: dc.scatter(X, None, 0)),
    ("scatter: src", TypeError, "torch.cat(xs)", lambda: dc.scatter(X, [X, X])),
    ("all_gather: sizes", ValueError, '"auto"', lambda: dc.all_gather(X, sizes=[5, 5])),
    ("loss_of_sums: f", TypeError, "loss_of_sums(f, *sums)", lambda: F.loss_of_sums(X.sum(), torch.log)),
    ("token_mean: losses", ValueError, 'reduction="none"', lambda: F.token_mean(X.sum())),
    ("GradientAverager.reduce: count", TypeError, "count=n", lambda: averaged(lambda a: a.reduce(X.sum()))),
    (
        "GradientAverager.backward: loss",
        TypeError,
        "backward(loss)",
        lambda: averaged(lambda a: a.backward(4, X.sum())),
    ),
]


def raised(call):
    """Return the class and the text of a call's error; X is unchanged, and nothing is left that others receive."""
    before = X.clone()
    try:
        call()
    except Exception as error:
        found = type(error), str(error)
    else:
        found = None, "no error"
    assert torch.equal(X, before)
    assert dc.all_reduce(torch.tensor(dc.get_rank())).item() == 1
    return found


@runs_on("rules", "truth", "gloo", "mpi")
@pytest.mark.parametrize("table", [OF_X, OF_ARGUMENTS, OTHERS], ids=["x", "arguments", "others"])
def test_mistakes(run, table):
    """The same on both ranks, wherever they run."""
    for of_rank in run(lambda r: [raised(call) for *_, call in table], range(N)):
        for (text, error, _), (kind, found) in zip(table, of_rank, strict=True):
            assert kind is error, (text, kind, found)
            assert found.startswith(text), (text, found)


@runs_on("rules", "gloo")
def test_remedies(run):
    for of_rank in run(lambda r: [raised(call) for *_, call in REMEDIES], range(N)):
        for (text, error, remedy, _), (kind, found) in zip(REMEDIES, of_rank, strict=True):
            assert kind is error and found.startswith(text) and remedy in found.partition(", expected ")[2], found


def test_a_dtensor():
    """The error names `to_local(grad_placements=…)`, whose result is right."""

    def body(r):
        from torch.distributed.tensor import DTensor, Partial, Replicate

        mesh = dist.device_mesh.init_device_mesh("cpu", (N,))
        x = DTensor.from_local(torch.ones(4), mesh, [Replicate()]).requires_grad_()
        for name, call in CALLS.items():
            with pytest.raises(TypeError, match=rf"^{name}: x: .*to_local\(grad_placements"):
                call(x)
        ((r + 1) * dc.shift(x.to_local(grad_placements=[Partial()]))).sum().backward()
        return x.grad.full_tensor().tolist()

    assert gloo(body, range(N)) == [[N * (N + 1) / 2] * 4] * N


class Named(torch.Tensor):
    """A subclass that behaves like an ordinary tensor."""


@runs_on("rules", "gloo", "mpi")
def test_subclasses_and_tensors_without_memory(run):
    def body(r):
        x = torch.tensor([1.0, 2.0 + r])
        zeros = torch._efficientzerotensor(2)  # as autograd makes them in forward mode
        found = dc.all_reduce(x.as_subclass(Named)), dc.all_reduce(torch.nn.Parameter(x)), dc.all_gather(zeros)
        return [y.tolist() for y in found]

    assert run(body, range(N)) == [[[2, 5], [2, 5], [0] * 4]] * N


@runs_on("gloo")
def test_tensors_on_the_meta_device(run):
    """Only simulated ranks, and a rank alone, take them."""

    def body(r):
        for call in CALLS.values():
            with pytest.raises(ValueError):
                call(X.to("meta"))

    run(body, range(N))


@runs_on("rules", "gloo")
def test_batches_of_gradients_are_an_error(run):
    """`is_grads_batched` and `jacobian(vectorize=True)` use a vmap without rules; torch.func has them."""

    def body(r):
        x = torch.ones(3, requires_grad=True)
        y = dc.all_reduce(x)
        with pytest.raises(RuntimeError, match=r"all_reduce: .*is_grads_batched"):
            torch.autograd.grad(y, x, torch.ones(2, 3), is_grads_batched=True)
        return dc.all_reduce(torch.tensor(r)).item()

    assert run(body, range(N)) == [1] * N
