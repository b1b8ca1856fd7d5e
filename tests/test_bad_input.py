"""Every wrong argument is an error that names operation, argument, what it got and what it expected."""

import re

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

# (x, error, text): for every collective
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
        X.to("meta"),
        ValueError,
        "{name}: x: got a tensor on meta, expected tensors with memory, which is what a simulated",
    ),
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
    ("all_reduce", {"x": X > 1}, TypeError, "all_reduce: x: got torch.bool, expected numbers, which can be added; x.to(torch.int64)"),
    ("scan", {"x": X > 1}, TypeError, "scan: x: got torch.bool, expected numbers"),
    ("reduce", {"x": X.int(), "op": "mean"}, TypeError, 'reduce: op: got "mean" of torch.int32, expected a floating-point'),
    ("all_reduce", {"cotangent": "same"}, ValueError, 'all_reduce: cotangent: got same, expected "partial" or "replicated"'),
    ("all_gather", {"cotangent": None}, ValueError, 'all_gather: cotangent: got None, expected "partial" or "replicated"'),
    ("broadcast", {"cotangent": True}, ValueError, 'broadcast: cotangent: got True, expected "partial" or "replicated"'),
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
    ("permute", {"pairs": [(0, 1), (1, 1)]}, ValueError, "expected each rank at most once as dst (rank 1 is there twice)"),
    ("permute", {"pairs": [(0, 2)]}, ValueError, "permute: pairs: got [(0, 2)], expected ranks within the group, from 0 to 1"),
    ("permute", {"pairs": [(0, 1, 1)]}, TypeError, "permute: pairs: got [(0, 1, 1)], expected a list of pairs (src, dst) of ranks"),
    ("permute", {"pairs": 3}, TypeError, "permute: pairs: got 3, expected a list of pairs"),
    ("permute", {"pairs": [("a", 1)]}, TypeError, "permute: pairs: got str, expected an integer"),
    ("shift", {"offset": 0.5}, TypeError, "shift: offset: got float, expected an integer"),
]  # fmt: skip


def raised(call, name, arguments):
    """The error on rank 0 of two, and whether the group still works and x is as it was."""

    def body(r):
        x = arguments.get("x", X)
        before = x.clone() if isinstance(x, torch.Tensor) and not x.is_meta else None
        try:
            COLLECTIVES[name](x, **{k: v for k, v in arguments.items() if k != "x"})
        except Exception as error:
            caught = error
        else:
            caught = None
        assert before is None or torch.equal(x.to_dense(), before.to_dense())
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


def test_on_real_processes_nothing_hangs_and_the_group_works_afterwards():
    found = spawn(lambda r: [raised(lambda body, _: [body(r)], *w[:2]) for w in WRONG_ARGUMENTS], range(N))
    for (name, _, error, text), of_rank_0 in zip(WRONG_ARGUMENTS, found[0], strict=True):
        assert of_rank_0[0] == error.__name__, name
        assert text in of_rank_0[1]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_wrong_group(name):
    with pytest.raises(TypeError, match=re.escape(f"{name}: group: got str, expected None, a torch.distributed.Proc")):
        COLLECTIVES[name](X, group="world")


def test_a_tensor_on_a_device_that_the_backend_does_not_move():
    text = (
        r"all_gather: x: got a tensor on meta, expected a tensor on cpu or cuda, which is what a gloo group of 1 ranks"
    )
    with pytest.raises(RanksFailedError, match=text):
        spawn(lambda r: dc.all_gather(torch.ones(2, device="meta")), range(1))


def test_a_dtensor():
    def body(r):
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = dist.device_mesh.init_device_mesh("cpu", (N,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        try:
            dc.all_gather(x)
        except TypeError as error:
            return str(error), dc.all_gather(x.to_local()).shape[0]

    for text, size in spawn(body, range(N)):
        assert (
            "all_gather: x: got a DTensor, expected a dense torch.Tensor; pass this rank's part, x.to_local()" in text
        )
        assert size == 4
