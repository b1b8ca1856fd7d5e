"""Every wrong argument raises an error that names operation, argument, what it got and what was expected."""

import inspect
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

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
    ("numbers", TypeError, "{name}: x: got str, expected a dense torch.Tensor; torch.as_tensor(x) makes one"),
    (np.ones(4), TypeError, "{name}: x: got ndarray, expected a dense torch.Tensor; torch.as_tensor(x) makes one"),
    (None, TypeError, "{name}: x: got NoneType, expected a dense torch.Tensor"),
    (
        X.to_sparse(),
        TypeError,
        "{name}: x: got a torch.sparse_coo tensor, expected a dense torch.Tensor; pass x.to_dense()",
    ),
    (
        rare(torch.Tensor.to_sparse_csr, X),
        TypeError,
        "{name}: x: got a torch.sparse_csr tensor, expected a dense torch.Tensor",
    ),
    (
        rare(quantized, X),
        TypeError,
        "{name}: x: got a quantized tensor, expected a dense torch.Tensor; pass x.to_dense() or",
    ),
    (
        X.to("meta"),
        ValueError,
        "{name}: x: got a tensor on meta, expected tensors with memory, which is what a simulated",
    ),
]

FLAG = [("no", TypeError, "got str, expected True or False"), (1, TypeError, "got int, expected True or False")]
DIM = [
    ("0", TypeError, "got str, expected an integer"),
    (0.0, TypeError, "got float, expected an integer"),
    (9, ValueError, "got 9, expected a dimension from -"),
]
SIZES = [
    ("equal", ValueError, "got equal, expected a list of 2 sizes"),
    (3.5, ValueError, "got 3.5, expected a list of 2 sizes"),
    ([2, "2"], TypeError, "got str, expected an integer"),
    ([1, 2, 1], ValueError, "got [1, 2, 1], expected 2 sizes, one per rank"),
    ([5, -1], ValueError, "got [5, -1], expected sizes of zero or more"),
]
ROOT = [
    ("0", TypeError, "got str, expected an integer"),
    (None, TypeError, "got NoneType, expected an integer"),
    (2, ValueError, "got 2, expected a rank within the group, from 0 to 1"),
]
# argument → (value, error, text), for every collective that has it
WRONG_BY_NAME = {
    "async_op": FLAG,
    "concat_dim": DIM,
    "concat_sizes": [(v, *rest) for v, *rest in SIZES if v != [5, -1]],
    "grad_placement": [
        ("same", ValueError, 'got same, expected "partial" or "replicate"'),
        (True, ValueError, 'got True, expected "partial" or "replicate"'),
    ],
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
        (None, TypeError, "got NoneType, expected an integer"),
    ],
    "op": [
        ("mode", ValueError, 'got mode, expected "sum", "mean", "product"'),
        (3, ValueError, 'got 3, expected "sum", "mean", "product"'),
        ("band", TypeError, "got the bitwise BAND"),
    ],
    "pairs": [
        (3, TypeError, "got 3, expected a list of pairs"),
        ([(0, 1), (0, 0)], ValueError, "expected each rank at most once as src"),
        ([(0, 5)], ValueError, "expected ranks within the group, from 0 to 1"),
    ],
    "reverse": FLAG,
    "sizes": SIZES,
    "split_dim": DIM,
    "split_sizes": SIZES,
    "src": ROOT,
    "stack": FLAG,
    "ties": [("last", ValueError, 'got last, expected "even" or "first"'), (None, ValueError, "got None, expected")],
    "wrap": FLAG,
}
WRONG_ONE_BY_ONE = [
    (name, argument, *wrong)
    for name in COLLECTIVES
    for argument in inspect.signature(getattr(dc, name)).parameters
    if argument != "x"
    for wrong in WRONG_BY_NAME[argument]
]

# (collective, arguments, error, text); x is X unless given
WRONG_ARGUMENTS = [
    ("all_reduce", {"op": "mode"}, ValueError, 'all_reduce: op: got mode, expected "sum", "mean", "product", "max", "min", "logsumexp", a function'),
    ("all_reduce", {"op": dist.ReduceOp.BAND}, TypeError, "all_reduce: op: got the bitwise BAND, expected "),
    ("reduce", {"op": "bxor"}, TypeError, "reduce: op: got the bitwise BXOR, expected"),
    ("all_reduce", {"op": "max", "x": X.to(torch.complex64)}, TypeError, 'all_reduce: op: got "max" of torch.complex64, expected numbers that are ordered; reduce x.abs(), or'),
    ("reduce_scatter", {"op": "logsumexp", "x": X.int()}, TypeError, 'reduce_scatter: op: got "logsumexp" of torch.int32, expected a floating-point'),
    ("all_reduce", {"op": "prod", "x": X > 0}, TypeError, "all_reduce: x: got torch.bool, expected numbers"),
    ("all_reduce", {"op": "max", "ties": "last"}, ValueError, 'all_reduce: ties: got last, expected "even" or "first"; they say'),
    ("reduce", {"op": 3}, ValueError, "reduce: op: got 3, expected"),
    ("reduce_scatter", {"op": None}, ValueError, "reduce_scatter: op: got None, expected"),
    ("all_reduce", {"x": X > 1}, TypeError, "all_reduce: x: got torch.bool, expected numbers, which can be added; pass x.to(torch.int64)"),
    ("scan", {"x": X > 1}, TypeError, "scan: x: got torch.bool, expected numbers"),
    ("reduce", {"x": X.int(), "op": "mean"}, TypeError, 'reduce: op: got "mean" of torch.int32, expected a floating-point'),
    ("all_reduce", {"grad_placement": "same"}, ValueError, 'all_reduce: grad_placement: got same, expected "partial" or "replicate"'),
    ("all_gather", {"grad_placement": None}, ValueError, 'all_gather: grad_placement: got None, expected "partial" or "replicate"'),
    ("broadcast", {"grad_placement": True}, ValueError, 'broadcast: grad_placement: got True, expected "partial" or "replicate"'),
    ("all_gather", {"dim": 2}, ValueError, "all_gather: dim: got 2, expected a dimension from -2 to 1, since x has shape (4, 3)"),
    ("all_gather", {"dim": -4, "stack": True}, ValueError, "all_gather: dim: got -4, expected a dimension from -3 to 2"),
    ("gather", {"dim": 1.0}, TypeError, "gather: dim: got float, expected an integer"),
    ("split", {"dim": True}, TypeError, "split: dim: got bool, expected an integer"),
    ("scatter", {"dim": "0"}, TypeError, "scatter: dim: got str, expected an integer"),
    ("all_to_all", {"split_dim": 5}, ValueError, "all_to_all: split_dim: got 5, expected a dimension from -2 to 1"),
    ("all_to_all", {"concat_dim": -3}, ValueError, "all_to_all: concat_dim: got -3, expected a dimension from -2 to 1"),
    ("reduce_scatter", {"x": torch.tensor(1.0)}, ValueError, "reduce_scatter: x: got a 0-d tensor, expected at least one dim"),
    ("split", {"x": torch.tensor(1.0)}, ValueError, "split: x: got a 0-d tensor, expected at least one dimension; x.reshape(1)"),
    ("reduce_scatter", {"dim": 1}, ValueError, "reduce_scatter: x: got size 3 along dim 1, expected a multiple of N = 2; pass sizes=[…]"),
    ("all_to_all", {"split_dim": 1}, ValueError, "all_to_all: x: got size 3 along dim 1, expected a multiple of N = 2; pass split_sizes"),
    ("split", {"sizes": [1, 2]}, ValueError, "split: sizes: got [1, 2], which sums to 3, expected a sum of 4, the size of x along dim 0"),
    ("scatter", {"sizes": [4]}, ValueError, "scatter: sizes: got [4], expected 2 sizes, one per rank"),
    ("reduce_scatter", {"sizes": [5, -1]}, ValueError, "reduce_scatter: sizes: got [5, -1], expected sizes of zero or more"),
    ("reduce_scatter", {"sizes": "auto"}, ValueError, "reduce_scatter: sizes: got auto, expected a list of 2 sizes, one per rank or None"),
    ("split", {"sizes": 2}, ValueError, "split: sizes: got 2, expected a list of 2 sizes"),
    ("all_gather", {"sizes": [4, 1.5]}, TypeError, "all_gather: sizes: got float, expected an integer"),
    ("all_gather", {"sizes": [4, 4, 4]}, ValueError, "all_gather: sizes: got [4, 4, 4], expected 2 sizes, one per rank"),
    ("gather", {"sizes": [3, 3]}, ValueError, "gather: sizes: got [3, 3], expected 4 at position 0, the size of this rank's x along dim 0"),
    ("all_gather", {"sizes": "equal"}, ValueError, 'all_gather: sizes: got equal, expected a list of 2 sizes, one per rank, "auto" or None'),
    ("all_gather", {"sizes": [4, 4], "stack": True}, ValueError, "all_gather: sizes: got [4, 4], expected None with stack=True"),
    ("all_to_all", {"split_sizes": [1, 3]}, ValueError, 'all_to_all: concat_sizes: got None, expected a list or "auto" where split_sizes'),
    ("all_to_all", {"split_sizes": [1, 3], "concat_sizes": [2, 2]}, ValueError, "all_to_all: concat_sizes: got [2, 2], expected 1 at position 0"),
    ("broadcast", {"src": 2}, ValueError, "broadcast: src: got 2, expected a rank within the group, from 0 to 1"),
    ("scatter", {"src": -1}, ValueError, "scatter: src: got -1, expected a rank within the group, from 0 to 1"),
    ("reduce", {"dst": 7}, ValueError, "reduce: dst: got 7, expected a rank within the group, from 0 to 1"),
    ("gather", {"dst": 0.5}, TypeError, "gather: dst: got float, expected an integer"),
    ("permute", {"pairs": [(0, 1), (0, 0)]}, ValueError, "permute: pairs: got [(0, 1), (0, 0)], expected each rank at most once as src (rank 0"),
    ("permute", {"pairs": [(0, 1), (1, 1)]}, ValueError, "expected each rank at most once as dst (rank 1 is listed twice)"),
    ("permute", {"pairs": [(0, 2)]}, ValueError, "permute: pairs: got [(0, 2)], expected ranks within the group, from 0 to 1"),
    ("permute", {"pairs": [(0, 1, 1)]}, TypeError, "permute: pairs: got [(0, 1, 1)], expected a list of pairs (src, dst) of ranks"),
    ("permute", {"pairs": 3}, TypeError, "permute: pairs: got 3, expected a list of pairs"),
    ("permute", {"pairs": [("a", 1)]}, TypeError, "permute: pairs: got str, expected an integer"),
    ("shift", {"offset": 0.5}, TypeError, "shift: offset: got float, expected an integer"),
]  # fmt: skip


def dense(x):
    return x.dequantize() if x.is_quantized else x.to_dense()


def raised(call, name, arguments):
    """Return the error on rank 0 of two; assert that the group still works and x is unchanged."""

    def body(r):
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
        assert dc.all_reduce(torch.tensor(r)).item() == 1
        return type(caught).__name__, str(caught)

    return call(body, range(N))[0]


def simulated(*call):
    return simulate(*call, rules=True)


@pytest.mark.parametrize("call", [simulated, simulate], ids=["rules", "truth"])
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize(("x", "error", "text"), WRONG_X, ids=lambda v: type(v).__name__)
def test_wrong_x(call, name, x, error, text):
    kind, message = raised(call, name, {"x": x})
    assert kind == error.__name__
    assert message.startswith(text.format(name=name))


@pytest.mark.parametrize("call", [simulated, simulate], ids=["rules", "truth"])
@pytest.mark.parametrize(("name", "arguments", "error", "text"), WRONG_ARGUMENTS)
def test_wrong_argument(call, name, arguments, error, text):
    kind, message = raised(call, name, arguments)
    assert kind == error.__name__
    assert text in message
    assert message.startswith(f"{name}: ")


def named(name, argument, value):
    """Return the error for one wrong argument; the others are valid."""
    more = {"op": "max"} if argument == "ties" else {}
    if argument == "concat_sizes":
        more = {"split_sizes": [2, 2]}
    return raised(lambda body, _: [body(dc.get_rank())], name, {argument: value, **more})


def test_every_argument_one_by_one():
    """On simulated ranks, gloo and MPI: the same errors, no deadlock, the groups work afterwards."""
    calls = [wrong[:3] for wrong in WRONG_ONE_BY_ONE]

    def body(r):
        return [named(*call) for call in calls]

    worlds = {
        "rules": simulated(body, range(N)),
        "truth": simulate(body, range(N)),
        "gloo": spawn(body, range(N)),
        "mpi": spawn(body, range(N), backend="mpi"),
    }
    for world, found in worlds.items():
        for (name, argument, value, error, text), got in zip(WRONG_ONE_BY_ONE, found[0], strict=True):
            where = world, name, argument, value
            assert got[0] == error.__name__, (where, got)
            assert got[1].startswith(f"{name}: {argument}: "), (where, got)
            assert text in got[1], (where, got)


def test_on_real_processes_nothing_hangs_and_the_group_works_afterwards():
    found = spawn(lambda r: [raised(lambda body, _: [body(r)], *w[:2]) for w in WRONG_ARGUMENTS], range(N))
    for (name, _, error, text), of_rank_0 in zip(WRONG_ARGUMENTS, found[0], strict=True):
        assert of_rank_0[0] == error.__name__, name
        assert text in of_rank_0[1]


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
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith(text)


def test_a_tensor_on_a_device_that_the_backend_does_not_move():
    text = (
        r"all_gather: x: got a tensor on meta, expected a tensor on cpu or cuda, which is what a gloo group of 1 ranks"
    )
    with pytest.raises(RanksFailedError, match=text):
        spawn(lambda r: dc.all_gather(torch.ones(2, device="meta")), range(1))


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


@pytest.mark.parametrize("run", [simulated, partial(spawn, backend="mpi")], ids=["rules", "mpi"])
def test_tensors_that_stand_for_others(run):
    """They raise before anything is sent, even if the same call was made on a plain tensor before."""

    def body(r):
        texts = []
        for name, call in COLLECTIVES.items():
            call(torch.ones(4, 2))
            for make in NOT_PLAIN.values():
                if name == "scatter" and r > 0:
                    with pytest.raises(dc.CollectiveMismatchError, match="invalid on rank 0, see the error there"):
                        call(None)
                    continue
                with pytest.raises(TypeError) as caught:
                    call(make())
                texts.append((name, str(caught.value)))
        with pytest.raises(RuntimeError):  # from the class, or since simulated ranks cannot trace
            dc.all_reduce(Wrapped(torch.ones(4, 2)))
        named = dc.all_reduce(torch.ones(2).as_subclass(Named)), dc.all_reduce(torch.nn.Parameter(torch.ones(2)))
        zeros = torch._efficientzerotensor(2)  # a ZeroTensor, without memory
        named += dc.all_gather(zeros), dc.all_reduce(zeros) + dc.shift(zeros) + N
        return texts, [y.tolist() for y in named], dc.all_reduce(torch.tensor(r)).item()

    for r, (texts, named, total) in enumerate(run(body, range(N))):
        expected = [(name, got) for name in COLLECTIVES for got in NOT_PLAIN if r == 0 or name != "scatter"]
        for (name, text), (collective, got) in zip(texts, expected, strict=True):
            assert name == collective
            assert text.startswith(f"{name}: x: got {got.split(',')[0]}, expected a dense torch.Tensor; pass ")
        assert named == [[N, N], [N, N], [0] * 2 * N, [N, N]]
        assert total == 1


def test_a_dtensor():
    def body(r):
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = dist.device_mesh.init_device_mesh("cpu", (N,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        texts = []
        for name, call in COLLECTIVES.items():
            if name == "scatter" and r > 0:  # only the source has an x
                with pytest.raises(dc.CollectiveMismatchError, match="invalid on rank 0, see the error there"):
                    call(None)
                continue
            with pytest.raises(TypeError) as caught:
                call(x)
            texts.append(str(caught.value))
        return texts, dc.all_gather(x.to_local()).shape[0]

    for r, (texts, size) in enumerate(spawn(body, range(N))):
        names = [name for name in COLLECTIVES if r == 0 or name != "scatter"]
        for name, text in zip(names, texts, strict=True):
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

    assert spawn(body, range(N)) == [[N * (N + 1) / 2, (r + 1) % N + 1] for r in range(N)]


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

    for rules, truth in zip(simulated(body, range(N)), simulate(body, range(N)), strict=True):
        for a, b in zip(rules, truth, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
