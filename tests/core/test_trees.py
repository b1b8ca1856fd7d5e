"""Trees of tensors: the result has the structure of x, gradients are right, with one message for each dtype."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Mapping
from functools import partial

import pytest
import torch
from runs import gloo, profiled, rules, runs_on, truth
from torch.overrides import TorchFunctionMode

import diffcoll as dc
from diffcoll.testing import ranks

Pair = namedtuple("Pair", "left right")


class Output(OrderedDict):
    """Refuses `update`, and has its keys as attributes, as Transformers' outputs do."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        setattr(self, key, value)

    def update(self, *args, **kwargs):
        raise TypeError("You cannot use update on an Output instance.")


N = 3
COLLECTIVES = {
    "all_reduce": dc.all_reduce,
    "product": partial(dc.all_reduce, op="product"),
    "max": partial(dc.all_reduce, op="max"),
    "replicated": partial(dc.all_reduce, grad_placement="replicate"),
    "broadcast": partial(dc.broadcast, src=1),
    "all_gather": dc.all_gather,
    "stack": partial(dc.all_gather, dim=-1, stack=True),
    "sum_gradients": dc.sum_gradients,
    "scan": partial(dc.scan, reverse=True),
}
NOW = ("sum_gradients", "scan")  # without async_op
SHARED = ("replicated", "sum_gradients")  # whose x or y is the same on all ranks


def tree(seed):
    """Dicts, lists, tuples and None; leaves of three dtypes, 0-d, empty, not contiguous, of equal shapes, repeated."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape, dtype=torch.float64):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    nested = {"b": Pair(numbers(2, 3), numbers()), "a": [numbers(3, 2).T, (numbers(0, 2), None)]}
    twice = numbers(4)
    more = OrderedDict({10: numbers(4), 9: twice, 8: twice})
    output, encoding = Output(half=numbers(2).bfloat16()), UserDict(single=numbers(4, dtype=torch.float32))
    return {"nested": nested, "more": more, "output": output, "encoding": encoding}


def by_path(x, path=()):
    """The leaves of a tree by their paths, in an order of their own."""
    if isinstance(x, Mapping):
        return {k: leaf for key in x for k, leaf in by_path(x[key], (*path, str(key))).items()}
    if isinstance(x, (list, tuple)):
        return {k: leaf for i, each in enumerate(x) for k, leaf in by_path(each, (*path, str(i))).items()}
    return {} if x is None else {path: x}


def kinds(x):
    """The structure of a tree without its leaves."""
    if isinstance(x, Mapping):
        return [type(x), [(key, kinds(each)) for key, each in x.items()]]
    return [type(x), [kinds(each) for each in x]] if isinstance(x, (list, tuple)) else x is None


def in_another_order(x, r):
    """The same tree, with the keys of its dicts in a different order on every rank."""
    if isinstance(x, Mapping):
        items = [(key, in_another_order(value, r)) for key, value in x.items()]
        return type(x)(items[r % len(items) :] + items[: r % len(items)])
    if isinstance(x, tuple):
        items = [in_another_order(value, r) for value in x]
        return Pair(*items) if isinstance(x, Pair) else tuple(items)
    return [in_another_order(value, r) for value in x] if isinstance(x, list) else x


@pytest.mark.parametrize("later", [False, True], ids=["now", "async"])
@runs_on("truth", "rules", "gloo")
def test_a_tree_is_its_leaves(run, later):
    """Matched by their paths, not by the order of insertion, which differs between ranks here."""

    def body(r):
        found = []
        for name, collective in COLLECTIVES.items():
            x = in_another_order(tree(0 if name in SHARED else r), r)
            y = collective(x, async_op=True).wait() if later and name not in NOW else collective(x)
            assert kinds(y) == kinds(x), name
            xs, ys = by_path(x), by_path(y)
            singly = {path: collective(xs[path]) for path in sorted(xs)}
            gradients = ()
            if run is not truth:  # where a rank by itself cannot run backward
                s = 0 if name == "replicated" else r
                weights = {path: s + 1 + i for i, path in enumerate(sorted(xs))}
                leaves = [xs[path] for path in sorted(xs) if xs[path].is_leaf]
                losses = [
                    sum((w * of[path].sin()).sum().double() for path, w in weights.items()) for of in (ys, singly)
                ]
                gradients = [torch.autograd.grad(loss, leaves) for loss in losses]
            found.append((name, [[of[path].detach() for path in sorted(xs)] for of in (ys, singly)], gradients))
        return found

    for of_rank in run(body, range(N)):
        for name, (together, singly), gradients in of_rank:
            assert len(together) == 9
            torch.testing.assert_close(together, singly, msg=name)
            if gradients:
                torch.testing.assert_close(*gradients, msg=name)


def test_one_message_for_each_dtype():
    def body(r):
        x = [torch.ones(3), {"a": torch.ones(2, 2), "b": torch.arange(3)}, torch.ones(())]
        calls = dc.all_reduce, dc.broadcast, dc.all_gather, lambda x: dc.all_gather(x, sizes="auto")
        return [len(profiled(call, x[:2] if i == 3 else x)) for i, call in enumerate(calls)]

    assert gloo(body, range(2)) == [[2, 2, 2, 2 + 1]] * 2  # float32 and int64, and the sizes


def test_a_single_leaf_of_a_dtype_is_not_copied():
    """Into a row before it is sent, or out of one."""

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            found.append(function.__name__)
            return function(*args, **(kwargs or {}))

    def body(r):
        with Functions():
            dc.all_gather({"features": torch.ones(2, 3), "label": torch.arange(2)})

    found = []
    rules(body, range(2))
    assert not {"cat", "clone", "split_with_sizes"} & {*found}


@runs_on("rules", "gloo")
@pytest.mark.parametrize("given", [[2, 0, 3], "auto"], ids=str)
def test_uneven_gathers(run, given):
    """Along another dimension, too; with each leaf's own sizes, where they are exchanged."""
    sizes = [2, 0, 3]

    def body(r):
        n = sizes[r]
        more = torch.arange(2.0 * n).view(2, n) + 10 * r if given != "auto" else torch.full((2, n + r), float(r))
        x = {"x": torch.full((1, n), float(r), requires_grad=True), "more": [more], "label": torch.full((3, n), r)}
        y = dc.all_gather(x, 1, sizes=given)
        (g,) = torch.autograd.grad((y["x"] * (r + 1) * torch.arange(5)).sum(), x["x"])
        return y["label"].tolist(), y["more"][0].tolist(), g.tolist(), more

    found = run(body, range(3))
    for r, (labels, more, g, _) in enumerate(found):
        assert labels == [[0, 0, 2, 2, 2]] * 3
        assert more == torch.cat([of_rank[3] for of_rank in found], 1).tolist()
        assert g == [[6.0 * i for i in ([0, 1], [], [2, 3, 4])[r]]]


def test_second_order_where_all_leaves_of_a_rank_are_empty():
    """Rank 0 has leaves of shape (0,), which torch.cat omits from the graph; the other ranks must not wait for it."""

    def body(r, one_by_one):
        x, z = (torch.linspace(k, 2, r, dtype=torch.float64, requires_grad=True) for k in (1, 3))
        y = [dc.all_gather(t, sizes=[0, 1, 2]) for t in (x, z)] if one_by_one else dc.all_gather([x, z], sizes="auto")
        gs = torch.autograd.grad((r + 1) * sum(t.pow(3).sum() for t in y), [x, z], create_graph=True)
        return torch.autograd.grad((r + 2) * sum(g.square().sum() for g in gs), [x, z])

    torch.testing.assert_close(*(rules(body, range(N), [one_by_one] * N) for one_by_one in (False, True)))


@ranks(2, on="gloo")
def test_leaves_share_no_memory_and_may_be_modified():
    y = dc.all_reduce([torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)])
    y[0].add_(1)
    assert y[0].untyped_storage().data_ptr() != y[1].untyped_storage().data_ptr()
    assert y[1].sum() == 6


def test_trees_without_leaves():
    assert dc.all_reduce({}) == {}
    assert dc.all_gather([None, (), {"a": []}]) == [None, (), {"a": []}]


@runs_on("rules", "gloo")
def test_transforms_go_through_trees(run):
    def loss(x):
        y = dc.all_reduce({"a": x, "b": (x.square(),)})
        return y["a"].sin().sum() + y["b"][0].prod()

    def body(r):
        x = torch.tensor([0.5 + r, -1.0], dtype=torch.float64)
        mapped = torch.func.vmap(torch.func.grad(loss))(x[None])[0]
        along = torch.func.jvp(torch.func.grad(loss), (x,), (torch.ones_like(x),))[1]
        leaf = x.requires_grad_()
        (g,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        return (mapped, along), (g.detach(), *torch.autograd.grad(g.sum(), leaf))

    for found, expected in run(body, range(2)):
        torch.testing.assert_close(found, expected)
