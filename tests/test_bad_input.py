"""Every wrong argument raises an error that names operation, argument, what it got and what was expected."""

import inspect
import warnings
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import gloo, refusal, rules, runs_on, truth

import diffcoll as dc
from diffcoll.testing import RanksFailedError, simulate, spawn

N = 2
X = torch.arange(12.0).reshape(4, 3)
COLLECTIVES = {
    "all_reduce": dc.all_reduce,
    "all_gather": dc.all_gather,
    "reduce_scatter": dc.reduce_scatter,
    "all_to_all": dc.all_to_all,
    "broadcast": dc.broadcast,
    "reduce": dc.reduce,
    "gather": dc.gather,
    "scatter": dc.scatter,
    "permute": lambda x, **k: dc.permute(x, **{"pairs": [(0, 1)], **k}),
    "shift": dc.shift,
    "scan": dc.scan,
    "sum_gradients": dc.sum_gradients,
    "split": dc.split,
}


def rare(make, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # beta and deprecation warnings
        return make(x)


def quantized(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


# (x, error, text), for every collective
WRONG_X = [
    ("numbers", TypeError, "x: got str, expected a dense torch.Tensor; torch.as_tensor(x) makes one"),
    (np.ones(4), TypeError, "x: got ndarray, expected a dense torch.Tensor; torch.as_tensor(x) makes one"),
    (None, TypeError, "x: got NoneType, expected a dense torch.Tensor"),
    (X.to_sparse(), TypeError, "x: got a torch.sparse_coo tensor, expected a dense torch.Tensor; pass x.to_dense()"),
    (rare(torch.Tensor.to_sparse_csr, X), TypeError, "x: got a torch.sparse_csr tensor, expected a dense torch.Tensor"),
    (rare(quantized, X), TypeError, "x: got a quantized tensor, expected a dense torch.Tensor; pass x.to_dense() or"),
    (X.to("meta"), ValueError, "x: got a tensor on meta, expected tensors with memory, which is what a simulated"),
]

FLAG = [("no", TypeError, "got str, expected True or False"), (1, TypeError, "got int, expected True or False")]
DIM = [
    ("0", TypeError, "got str, expected an integer"),
    (0.0, TypeError, "got float, expected an integer"),
    (True, TypeError, "got bool, expected an integer"),
    (2, ValueError, "got 2, expected a dimension from -2 to 1, since x has shape (4, 3)"),
    (-3, ValueError, "got -3, expected a dimension from -2 to 1"),
]
SIZES = [
    ("equal", ValueError, "got equal, expected a list of 2 sizes"),
    (2, ValueError, "got 2, expected a list of 2 sizes"),
    (3.5, ValueError, "got 3.5, expected a list of 2 sizes"),
    ([2, "2"], TypeError, "got str, expected an integer"),
    ([4, 1.5], TypeError, "got float, expected an integer"),
    ([4], ValueError, "got [4], expected 2 sizes, one per rank"),
    ([1, 2, 1], ValueError, "got [1, 2, 1], expected 2 sizes, one per rank"),
    ([5, -1], ValueError, "got [5, -1], expected sizes of zero or more"),
]
ROOT = [
    ("0", TypeError, "got str, expected an integer"),
    (0.5, TypeError, "got float, expected an integer"),
    (None, TypeError, "got NoneType, expected an integer"),
    (2, ValueError, "got 2, expected a rank within the group, from 0 to 1"),
    (-1, ValueError, "got -1, expected a rank within the group, from 0 to 1"),
]
# argument → (value, error, text), for every collective that has it
WRONG_BY_NAME = {
    "async_op": FLAG,
    "concat_dim": DIM,
    "concat_sizes": [(v, *rest) for v, *rest in SIZES if v != [5, -1]],
    "grad_placement": [(v, ValueError, f'got {v}, expected "partial" or "replicate"') for v in ("same", None, True)],
    "deterministic": FLAG,
    "dim": DIM,
    "dst": ROOT,
    "exclusive": FLAG,
    "group": [
        ("world", TypeError, "got str, expected None, a torch.distributed.ProcessGroup"),
        (0, TypeError, "got int, expected None, a torch.distributed.ProcessGroup"),
    ],
    "offset": [
        ("1", TypeError, "got str, expected an integer"),
        (0.5, TypeError, "got float, expected an integer"),
        (None, TypeError, "got NoneType, expected an integer"),
    ],
    "op": [
        ("mode", ValueError, 'got mode, expected "sum", "mean", "product", "max", "min", "logsumexp", a function'),
        (3, ValueError, 'got 3, expected "sum", "mean", "product"'),
        (None, ValueError, 'got None, expected "sum", "mean", "product"'),
        (dist.ReduceOp.BAND, TypeError, "got the bitwise BAND, expected "),
        ("bxor", TypeError, "got the bitwise BXOR, expected "),
        (torch.add, TypeError, 'got add, a function of two values, expected "sum", "mean"'),
        (torch.maximum, TypeError, "got maximum, a function of two values, expected "),
    ],
    "pairs": [
        (3, TypeError, "got 3, expected a list of pairs"),
        ([(0, 1, 1)], TypeError, "got [(0, 1, 1)], expected a list of pairs (src, dst) of ranks"),
        ([("a", 1)], TypeError, "got str, expected an integer"),
        ([(0, 1), (0, 0)], ValueError, "got [(0, 1), (0, 0)], expected each rank at most once as src (rank 0"),
        (
            [(0, 1), (1, 1)],
            ValueError,
            "got [(0, 1), (1, 1)], expected each rank at most once as dst (rank 1 is listed twice)",
        ),
        ([(0, 2)], ValueError, "got [(0, 2)], expected ranks within the group, from 0 to 1"),
    ],
    "reverse": FLAG,
    "sizes": SIZES,
    "split_dim": DIM,
    "split_sizes": SIZES,
    "src": ROOT,
    "stack": FLAG,
    "ties": [
        ("last", ValueError, 'got last, expected "even" or "first"; they say'),
        (None, ValueError, "got None, expected"),
    ],
    "wrap": FLAG,
}
# what else has to be valid for the argument to be read
NEEDED = {"ties": {"op": "max"}, "concat_sizes": {"split_sizes": [2, 2]}}

GROUP = type("Comm", (), {})()  # a group by position, as in torch.distributed and mpi4py

# (collective, arguments, error, text); x is X unless given
WRONG_ARGUMENTS = [
    ("all_reduce", {"op": "max", "x": X.to(torch.complex64)}, TypeError, 'op: got "max" of torch.complex64, expected numbers that are ordered; reduce x.abs(), or'),
    ("reduce_scatter", {"op": "logsumexp", "x": X.int()}, TypeError, 'op: got "logsumexp" of torch.int32, expected a floating-point'),
    ("reduce", {"op": "mean", "x": X.int()}, TypeError, 'op: got "mean" of torch.int32, expected a floating-point'),
    ("all_reduce", {"op": torch.logaddexp}, TypeError, 'op: got logaddexp, a function of two values, expected "sum", "mean", "product", "max", "min", "logsumexp", a function that reduces dim 0 of a stack, or a ReduceOp; pass op="logsumexp"'),
    ("all_gather", {"dim": GROUP}, TypeError, "dim: got Comm, expected an integer; groups are passed by keyword: group=…"),
    ("all_reduce", {"op": "prod", "x": X > 0}, TypeError, "x: got torch.bool, expected numbers"),
    ("all_reduce", {"x": X > 1}, TypeError, "x: got torch.bool, expected numbers, which can be added; pass x.to(torch.int64)"),
    ("scan", {"x": X > 1}, TypeError, "x: got torch.bool, expected numbers"),
    ("reduce_scatter", {"x": torch.tensor(1.0)}, ValueError, "x: got a 0-d tensor, expected at least one dim"),
    ("split", {"x": torch.tensor(1.0)}, ValueError, "x: got a 0-d tensor, expected at least one dimension; x.reshape(1)"),
    ("reduce_scatter", {"dim": 1}, ValueError, "x: got size 3 along dim 1, expected a multiple of N = 2; pass sizes=[…]"),
    ("all_to_all", {"split_dim": 1}, ValueError, "x: got size 3 along dim 1, expected a multiple of N = 2; pass split_sizes"),
    ("all_gather", {"dim": -4, "stack": True}, ValueError, "dim: got -4, expected a dimension from -3 to 2"),
    ("all_gather", {"sizes": "equal"}, ValueError, 'sizes: got equal, expected a list of 2 sizes, one per rank, "auto" or None'),
    ("all_gather", {"sizes": [4, 4], "stack": True}, ValueError, "sizes: got [4, 4], expected None with stack=True"),
    ("gather", {"sizes": [3, 3]}, ValueError, "sizes: got [3, 3], expected 4 at position 0, the size of this rank's x along dim 0"),
    ("reduce_scatter", {"sizes": "auto"}, ValueError, "sizes: got auto, expected a list of 2 sizes, one per rank or None"),
    ("split", {"sizes": [1, 2]}, ValueError, "sizes: got [1, 2], which sums to 3, expected a sum of 4, the size of x along dim 0"),
    ("all_to_all", {"split_sizes": [1, 3]}, ValueError, 'concat_sizes: got None, expected a list or "auto" where split_sizes'),
    ("all_to_all", {"split_sizes": [1, 3], "concat_sizes": [2, 2]}, ValueError, "concat_sizes: got [2, 2], expected 1 at position 0"),
    *(
        (name, {argument: value, **NEEDED.get(argument, {})}, error, f"{argument}: {text}")
        for name in COLLECTIVES
        for argument in inspect.signature(getattr(dc, name)).parameters
        if argument != "x"
        for value, error, text in WRONG_BY_NAME[argument]
    ),
]  # fmt: skip


def dense(x):
    return x.dequantize() if x.is_quantized else x.to_dense()


def raised(name, arguments):
    """Return the error of a call on this rank; assert that the group still works and x is unchanged."""
    x = arguments.get("x", X)
    before = x.clone() if isinstance(x, torch.Tensor) and not x.is_meta else None
    equal = torch.equal if x is X else lambda a, b: torch.equal(dense(a), dense(b))
    try:
        COLLECTIVES[name](x, **{k: v for k, v in arguments.items() if k != "x"})
    except Exception as error:
        caught = error
    else:
        caught = None
    assert before is None or equal(x, before)
    assert dc.all_reduce(torch.tensor(dc.get_rank())).item() == 1
    return type(caught).__name__, str(caught)


def check(run, wrong):
    """The same errors wherever the ranks run, and no deadlock."""
    calls = [row[:2] for row in wrong]
    found = run(lambda r: [raised(*call) for call in calls], range(N))[0]
    for (name, arguments, error, text), (kind, message) in zip(wrong, found, strict=True):
        assert kind == error.__name__, (name, arguments, message)
        assert message.startswith(f"{name}: {text}"), (name, arguments, message)


@runs_on("rules", "truth", "gloo", "mpi")
def test_wrong_arguments(run):
    check(run, WRONG_ARGUMENTS)


@runs_on("rules", "truth")
def test_wrong_x(run):
    check(run, [(name, {"x": x}, error, text) for name in COLLECTIVES for x, error, text in WRONG_X])


OTHERS = [
    (lambda: dc.get_rank("world"), TypeError, "get_rank: group: got str, expected None"),
    (lambda: dc.get_world_size(0), TypeError, "get_world_size: group: got int, expected None"),
    (lambda: dc.set_default_group([0, 1]), TypeError, "set_default_group: group: got list, expected None"),
    (lambda: dc.check_mode(1), TypeError, "check_mode: on: got int, expected True or False"),
    (lambda: dc.joint_backward()(3.0), TypeError, "joint_backward: loss: got float, expected a floating-point"),
    (lambda: dc.joint_backward()(X.int()), TypeError, "joint_backward: loss: got torch.int32, expected a floating"),
    (lambda: dc.joint_backward()(X), RuntimeError, "joint_backward: loss: got a loss before the region, expected one"),
    (lambda: dc.all_reduce([X, "y"]), TypeError, "all_reduce: x[1]: got str, expected a dense torch.Tensor"),
    (lambda: dc.broadcast({"a": X.to_sparse()}), TypeError, "broadcast: x['a']: got a torch.sparse_coo tensor"),
    (lambda: dc.sum_gradients((X, None)), TypeError, "sum_gradients: x[1]: got NoneType, expected a dense"),
    (lambda: dc.all_gather([X], 5), ValueError, "all_gather: dim: got 5, expected a dimension from -2 to 1"),
    (lambda: simulate(lambda: None), TypeError, "simulate: got no per-rank arguments, expected at least one sequence"),
    (lambda: simulate(id, [1], []), ValueError, "simulate: got sequences of lengths [1, 0], expected N elements"),
    (lambda: spawn(id, []), ValueError, "spawn: got sequences of lengths [0], expected N elements"),
]


@pytest.mark.parametrize(("call", "error", "text"), OTHERS)
def test_everything_else(call, error, text):
    assert refusal(error, call).startswith(text)


def test_a_tensor_on_a_device_that_the_backend_does_not_move():
    text = (
        "all_gather: x: got a tensor on meta, expected a tensor on cpu or cuda, which is what a gloo group of 1 ranks"
    )
    with pytest.raises(RanksFailedError, match=text):
        gloo(lambda r: dc.all_gather(torch.ones(2, device="meta")), range(1))


class Wrapped(torch.Tensor):
    """A wrapper subclass, like AsyncCollectiveTensor, without any op."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


class Named(torch.Tensor):
    """A subclass that behaves like an ordinary tensor."""


NOT_PLAIN = {
    "a nested tensor": lambda: rare(torch.nested.nested_tensor, [torch.ones(2, 2), torch.ones(1, 2)]),
    "a nested tensor, jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged),
}


def refusal_of_x(name, x, r):
    """Return the text of the error; a scatter has an x on its source only."""
    if name == "scatter" and r > 0:
        assert "invalid on rank 0, see the error there" in refusal(dc.CollectiveMismatchError, COLLECTIVES[name], None)
        return []
    return [refusal(TypeError, COLLECTIVES[name], x)]


def of_rank(r):
    return [name for name in COLLECTIVES if r == 0 or name != "scatter"]


@runs_on("rules", "mpi")
def test_tensors_that_stand_for_others(run):
    """They raise before anything is sent, even if the same call was made on a plain tensor before."""

    def body(r):
        texts = []
        for name, call in COLLECTIVES.items():
            call(torch.ones(4, 2))
            for make in NOT_PLAIN.values():
                texts += refusal_of_x(name, make(), r)
        with pytest.raises(RuntimeError):  # from the class, or since simulated ranks cannot trace
            dc.all_reduce(Wrapped(torch.ones(4, 2)))
        named = dc.all_reduce(torch.ones(2).as_subclass(Named)), dc.all_reduce(torch.nn.Parameter(torch.ones(2)))
        zeros = torch._efficientzerotensor(2)  # a ZeroTensor, without memory
        named += dc.all_gather(zeros), dc.all_reduce(zeros) + dc.shift(zeros) + N
        return texts, [y.tolist() for y in named], dc.all_reduce(torch.tensor(r)).item()

    for r, (texts, named, total) in enumerate(run(body, range(N))):
        for (name, got), text in zip(product(of_rank(r), NOT_PLAIN), texts, strict=True):
            assert text.startswith(f"{name}: x: got {got.split(',')[0]}, expected a dense torch.Tensor; pass ")
        assert named == [[N, N], [N, N], [0] * 2 * N, [N, N]]
        assert total == 1


def test_a_dtensor():
    def body(r):
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = dist.device_mesh.init_device_mesh("cpu", (N,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        return [text for name in COLLECTIVES for text in refusal_of_x(name, x, r)], dc.all_gather(x.to_local()).shape[0]

    for r, (texts, size) in enumerate(gloo(body, range(N))):
        for name, text in zip(of_rank(r), texts, strict=True):
            remedy = "expected a dense torch.Tensor; pass this rank's part, x.to_local(grad_placements=…): "
            assert text.startswith(f"{name}: x: got a DTensor, {remedy}")
            assert "without grad_placements DTensor assumes the placements of x" in text
        assert size == 4


def test_what_is_said_of_a_dtensor_is_right():
    """As the error text says: with Partial the gradient of a replicated x is the ranks' sum, without it is not."""

    def body(r):
        from torch.distributed.tensor import DTensor, Partial, Replicate

        mesh = dist.device_mesh.init_device_mesh("cpu", (N,))
        found = []
        for placements in ([Partial()], None):
            x = DTensor.from_local(torch.ones(1), mesh, [Replicate()]).requires_grad_()
            ((r + 1) * dc.shift(x.to_local(grad_placements=placements))).sum().backward()
            found.append(x.grad.full_tensor().item())
        return found

    assert gloo(body, range(N)) == [[N * (N + 1) / 2, (r + 1) % N + 1] for r in range(N)]


def test_integers_carry_no_gradient():
    """PyTorch raises for integers that require a gradient; results of integers do not require one."""

    def body(r):
        found = []
        for name, call in COLLECTIVES.items():
            with pytest.raises(RuntimeError, match="floating point"):
                torch.ones(4, dtype=torch.int64, requires_grad=True)
            shared = name in ("sum_gradients", "split")
            y = call(torch.arange(4) + (0 if shared else r))
            assert y is None or not (y.requires_grad or y.is_floating_point()), name
            found.append(y)
        return found

    torch.testing.assert_close(rules(body, range(N)), truth(body, range(N)), rtol=0, atol=0)
