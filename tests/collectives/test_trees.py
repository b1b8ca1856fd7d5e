"""Trees of tensors come back in their structure, with their gradients, in one message for each dtype."""

from collections import OrderedDict, namedtuple

import pytest
import torch

import diffcoll as dc
from diffcoll.engines.c10d import C10dEngine
from diffcoll.engines.engine import Engine
from diffcoll.testing import cases, simulate, spawn

Pair = namedtuple("Pair", "left right")
N = 3
COLLECTIVES = {
    "all_reduce": lambda x, **more: dc.all_reduce(x, **more),
    "product": lambda x, **more: dc.all_reduce(x, "product", **more),
    "max, first": lambda x, **more: dc.all_reduce(x, "max", ties="first", **more),
    "a function": lambda x, **more: dc.all_reduce(x, cases.largest_whole, **more),
    "broadcast": lambda x, **more: dc.broadcast(x, src=1, **more),
    "all_gather": lambda x, **more: dc.all_gather(x, **more),
    "stack": lambda x, **more: dc.all_gather(x, dim=-1, stack=True, **more),
}


def tree(r, dtype=torch.float64):
    generator = torch.Generator().manual_seed(r)

    def numbers(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    nested = OrderedDict(b=Pair(numbers(2, 3), numbers()), a=[numbers(3, 2).T, (numbers(0, 2),)])
    return {"nested": nested, "single": numbers(4, dtype=torch.float32), "half": numbers(2, dtype=torch.bfloat16)}


def leaves(x):
    return torch.utils._pytree.tree_leaves(x)


def program(collective, r, one_by_one):
    x = tree(r)
    y = torch.utils._pytree.tree_map(collective, x) if one_by_one else collective(x)
    loss = sum(((r + 1 + i) * leaf.sin()).sum().double() for i, leaf in enumerate(leaves(y)))
    return y, torch.autograd.grad(loss, leaves(x))


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("later", [False, True], ids=["now", "async"])
def test_a_tree_is_its_leaves(name, later):
    def collective(x):
        if isinstance(x, torch.Tensor) or not later:
            return COLLECTIVES[name](x)
        return COLLECTIVES[name](x, async_op=True).wait()

    def body(r):
        return [program(collective, r, one_by_one) for one_by_one in (True, False)]

    for (expected, gradients), (got, found) in simulate(body, range(N), rules=True) + spawn(body, range(N)):
        assert type(got["nested"]) is OrderedDict
        assert type(got["nested"]["b"]) is Pair
        assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(expected)
        for a, b in zip(leaves(got) + list(found), leaves(expected) + list(gradients), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            torch.testing.assert_close(a, b)


def test_one_message_for_each_dtype(monkeypatch):
    def body(r):
        calls = []
        for engine in (Engine, C10dEngine):
            for primitive in ("all_reduce", "all_gather", "broadcast"):
                whole = getattr(engine, primitive)

                def counted(self, *arguments, whole=whole, primitive=primitive):
                    calls.append(primitive)
                    return whole(self, *arguments)

                setattr(engine, primitive, counted)
        x = [torch.ones(3), {"a": torch.ones(2, 2), "b": torch.arange(3)}, torch.ones(())]
        for collective in (dc.all_reduce, dc.broadcast, lambda x: dc.all_gather(x, sizes="auto")):
            collective(x)
        return calls

    calls = spawn(body, range(2))[0]
    assert calls.count("all_reduce") == 2  # float32 and int64
    assert calls.count("broadcast") == 2
    assert calls.count("all_gather") == 2 + 1  # and the sizes


def test_uneven_gathers():
    sizes = [2, 0, 3]

    def body(r, how):
        x = {"x": torch.full((sizes[r], 2), float(r), requires_grad=True), "label": torch.full((sizes[r],), r)}
        y = dc.all_gather(x, sizes=how)
        (g,) = torch.autograd.grad((y["x"] * (r + 1)).sum(), x["x"])
        return y["label"].tolist(), y["x"].tolist(), g.tolist()

    expected = [r for r in range(3) for _ in range(sizes[r])]
    for how in (sizes, "auto"):
        for run in (lambda *a: simulate(*a, rules=True), spawn):
            for r, (labels, x, g) in enumerate(run(body, range(3), [how] * 3)):
                assert labels == expected
                assert x == [[float(v)] * 2 for v in expected]
                assert g == [[6, 6]] * sizes[r]


def test_truth_gradients_and_the_replicated_world(gradients):
    def loss(x, w):
        tree = dc.all_reduce({"a": x, "b": [2 * x[:1]]})
        shared = dc.all_reduce((x, x), cotangent="replicated")
        back = dc.sum_gradients([shared[0]])[0]
        return w * (tree["a"].sum() + 10 * tree["b"][0].sum() + back[0]) + 0 * shared[1].sum()

    # Σ w = 6: 6 for each of a, 6·10·2 for b, and 6 through the replicated sum
    assert gradients(loss, [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [1.0, 2.0, 3.0]) == [[6 + 120 + 6, 6]] * 3


def test_leaves_share_no_memory_and_may_be_modified():
    def body(r):
        y = dc.all_reduce([torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)])
        y[0].add_(1)
        return y[0].untyped_storage().data_ptr() != y[1].untyped_storage().data_ptr(), y[1].sum().item()

    assert spawn(body, range(2)) == [(True, 6)] * 2


def test_a_wrong_leaf_is_named():
    for x, where in [
        ({"a": [torch.ones(1), 3]}, r"\['a'\]\[1\]: got int"),
        ((torch.ones(1), None), r"\[1\]: got NoneType"),
    ]:
        with pytest.raises(TypeError, match=rf"all_reduce: x{where}, expected a dense torch.Tensor"):
            dc.all_reduce(x)
    with pytest.raises(TypeError, match="reduce_scatter: x: got list, expected a dense"):
        dc.reduce_scatter([torch.ones(2)])


def test_empty_trees():
    assert dc.all_reduce({}) == {}
    assert dc.all_gather([]) == []


def test_transforms_and_compile_go_through_trees():
    def loss(x):
        y = dc.all_reduce({"a": x, "b": (x.square(),)})
        return y["a"].sin().sum() + y["b"][0].prod()

    def body(r):
        x = torch.tensor([0.5 + r, -1.0], dtype=torch.float64)
        leaf = x.clone().requires_grad_()
        (plain,) = torch.autograd.grad(loss(leaf), leaf)
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        (traced,) = torch.autograd.grad(compiled(leaf), leaf)
        found = [torch.func.grad(loss)(x), torch.func.vmap(torch.func.grad(loss))(x[None])[0], traced]
        return plain, found, torch.func.hessian(loss)(x).sum()

    for plain, found, hessian in spawn(body, range(2), timeout=60):
        assert hessian.isfinite()
        for g in found:
            torch.testing.assert_close(g, plain)
