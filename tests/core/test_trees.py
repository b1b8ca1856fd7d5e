"""Trees of tensors: the result has the structure of x, gradients are right, with one message for each dtype."""

import re
from collections import OrderedDict, namedtuple
from functools import partial

import pytest
import torch
import torch.distributed as dist
from releases import compiles, one_graph
from runs import noted, refusal, rules, runs_on, truth
from torch.utils import _pytree

import diffcoll as dc
from diffcoll.engines.c10d import C10dEngine
from diffcoll.testing import cases, simulate, spawn

Pair = namedtuple("Pair", "left right")
N = 3
COLLECTIVES = {
    "all_reduce": lambda x, **more: dc.all_reduce(x, **more),
    "product": lambda x, **more: dc.all_reduce(x, "product", **more),
    "max, first": lambda x, **more: dc.all_reduce(x, "max", ties="first", **more),
    "a function": lambda x, **more: dc.all_reduce(x, cases.largest_whole, **more),
    "elementwise": lambda x, **more: dc.all_reduce(x, cases.median_in_parts, **more),
    "broadcast": lambda x, **more: dc.broadcast(x, src=1, **more),
    "all_gather": lambda x, **more: dc.all_gather(x, **more),
    "stack": lambda x, **more: dc.all_gather(x, dim=-1, stack=True, **more),
    "permute": lambda x, **more: dc.permute(x, [(0, 2), (1, 1)], **more),
    "shift": lambda x, **more: dc.shift(x, **more),
    "reduce": lambda x, **more: dc.reduce(x, 1, "max", **more),
    "reduce, a function": lambda x, **more: dc.reduce(x, 2, cases.largest_whole, **more),
    "gather": lambda x, **more: dc.gather(x, dst=2, dim=-1, **more),
    "scan": lambda x, **more: dc.scan(x, reverse=True, exclusive=True, **more),
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
@pytest.mark.ranks(N, on=["simulated", "gloo"])
def test_a_tree_is_its_leaves(name, later, rank):
    def collective(x):
        if isinstance(x, torch.Tensor) or not later:
            return COLLECTIVES[name](x)
        return COLLECTIVES[name](x, async_op=True).wait()

    expected, gradients = program(collective, rank, one_by_one=True)
    got, found = program(collective, rank, one_by_one=False)
    assert type(got["nested"]) is OrderedDict
    assert type(got["nested"]["b"]) is Pair
    assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(expected)
    for a, b in zip(leaves(got) + list(found), leaves(expected) + list(gradients), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a, b)


def in_another_order(x, r):
    """The same tree, with the keys of its dicts in a different order on every rank."""
    if isinstance(x, dict):
        items = [(key, in_another_order(value, r)) for key, value in x.items()]
        return type(x)(items[r % len(items) :] + items[: r % len(items)])
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(in_another_order(value, r) for value in x))
    return type(x)(in_another_order(value, r) for value in x) if isinstance(x, (list, tuple)) else x


def by_path(x):
    return {_pytree.keystr(path): leaf for path, leaf in _pytree.tree_flatten_with_path(x)[0]}


@pytest.mark.parametrize("later", [False, True], ids=["now", "async"])
@runs_on("rules", "truth", "gloo")
def test_leaves_are_matched_by_their_paths(run, later):
    """Not by the order of insertion. Every leaf has the shape and dtype of another leaf, and different numbers."""
    backward = run is not truth  # one rank alone cannot run backward there

    def body(r):
        whole = {
            **tree(r),
            10: tree(r + 7)["nested"],
            9: tree(r + 9)["nested"],
            (1, "x"): tree(r + 8)["half"],
            None: tree(r + 5)["single"],
        }
        found = []
        for name, collective in COLLECTIVES.items():
            ys = []
            for x in (whole, in_another_order(whole, r)):
                y = collective(x, async_op=True).wait() if later else collective(x)
                assert [*y] == [*x]
                paths = sorted(by_path(y))
                loss = sum(((r + 1 + i) * by_path(y)[path].sin()).sum().double() for i, path in enumerate(paths))
                inputs = [by_path(x)[path] for path in paths]
                gradients = torch.autograd.grad(loss, inputs) if backward else ()
                ys.append([*(by_path(y)[path].detach() for path in paths), *gradients])
            found.append((name, *ys))
        return found

    for of_rank in run(body, range(N)):
        for name, expected, got in of_rank:
            assert len(expected) >= 10
            torch.testing.assert_close(got, expected, msg=name, rtol=0, atol=0)


@pytest.mark.parametrize("later", [False, True], ids=["now", "async"])
def test_another_structure_in_truth_is_an_error_that_names_the_path(later):
    def body(r, other):
        x = {"a": torch.ones(2), "b": torch.ones(2)}
        x |= {"c": torch.ones(2)} if r == 1 and other == "more" else {}
        x["b"] = x["b"].double() if r == 1 and other == "dtype" else x["b"]
        return refusal(dc.CollectiveMismatchError, dc.all_reduce, x, async_op=later)

    for other, where in [("more", r"x\['c'\]: torch.float32"), ("dtype", r"x\['b'\]: torch.float64")]:
        texts = simulate(body, range(N), [other] * N)
        assert len({*texts}) == 1
        assert re.search(rf"\n  rank 1: all_reduce\(dict, .*\n    the first leaf that differs: {where}", texts[0])


def test_keys_that_are_not_the_same_on_all_ranks():
    for key in (object(), torch.ones(2), frozenset("ab"), lambda: 0):
        with pytest.raises(TypeError, match=r"all_reduce: x: got a dict key of type .*, expected strings or numbers"):
            dc.all_reduce({key: torch.ones(1), "a": torch.ones(1)})

    class Named(str):
        def __hash__(self):
            return id(self)

        def __eq__(self, other):
            return self is other

    with pytest.raises(TypeError, match=r"all_reduce: x: \['same'\] is the path of two leaves; use strings as keys"):
        dc.all_reduce({Named("same"): torch.ones(1), Named("same"): torch.ones(1)})


class Box:
    def __init__(self, *content):
        self.content = content


def test_nodes_without_keys():
    _pytree.register_pytree_node(Box, lambda box: (list(box.content), None), lambda found, _: Box(*found))
    try:

        def body(r):
            inner = [("b", torch.tensor([1.0 + r])), ("a", torch.tensor([10.0 + r]))]
            y = dc.all_reduce([Box(dict(inner[:: 1 - 2 * (r % 2)]), torch.tensor([100.0 + r]))])[0]
            return [y.content[0]["a"].item(), y.content[0]["b"].item(), y.content[1].item()]

        for run in (rules, simulate):
            assert run(body, range(N)) == [[33, 6, 303]] * N
        with pytest.raises(TypeError, match=r"x\[0\]\[1\]: got int"):
            dc.all_reduce([Box(torch.ones(1), 3)])
    finally:
        _pytree._deregister_pytree_node(Box) if hasattr(_pytree, "_deregister_pytree_node") else None


@runs_on("rules", "gloo")
def test_one_tensor_at_two_places(run):
    def body(r):
        x = torch.tensor([1.0 + r], requires_grad=True)
        y = dc.all_reduce({"b": x, "a": x})
        (g,) = torch.autograd.grad((y["a"] + 10 * y["b"]) * (r + 1), x)
        return y["a"].item(), y["b"].item(), g.item()

    assert run(body, range(2)) == [(3, 3, 33)] * 2


def test_one_message_for_each_dtype(monkeypatch):
    def body(r):
        calls = noted(C10dEngine, "all_reduce", "all_gather", "broadcast")
        x = [torch.ones(3), {"a": torch.ones(2, 2), "b": torch.arange(3)}, torch.ones(())]
        for collective in (dc.all_reduce, dc.broadcast, lambda x: dc.all_gather(x, sizes="auto")):
            collective(x)
        return calls

    calls = spawn(body, range(2))[0]
    assert calls.count("all_reduce") == 2  # float32 and int64
    assert calls.count("broadcast") == 2
    assert calls.count("all_gather") == 2 + 1  # and one for the sizes


@runs_on("rules", "gloo")
@pytest.mark.parametrize("how", [[2, 0, 3], "auto"], ids=str)
def test_uneven_gathers(run, how):
    sizes = [2, 0, 3]

    def body(r):
        x = {"x": torch.full((sizes[r], 2), float(r), requires_grad=True), "label": torch.full((sizes[r],), r)}
        y = dc.all_gather(x, sizes=how)
        columns = dc.all_gather({"x": x["x"].T, "label": x["label"][None]}, dim=-1, sizes=how)
        assert torch.equal(columns["x"].T, y["x"]) and torch.equal(columns["label"][0], y["label"])
        (g,) = torch.autograd.grad((y["x"] * (r + 1)).sum(), x["x"])
        return y["label"].tolist(), y["x"].tolist(), g.tolist()

    expected = [r for r in range(3) for _ in range(sizes[r])]
    for r, (labels, x, g) in enumerate(run(body, range(3))):
        assert labels == expected
        assert x == [[float(v)] * 2 for v in expected]
        assert g == [[6, 6]] * sizes[r]


def test_gradients_of_partial_and_replicated_sums(gradients):
    def loss(x, w):
        tree = dc.all_reduce({"a": x, "b": [2 * x[:1]]})
        shared = dc.all_reduce((x, x), grad_placement="replicate")
        back = dc.sum_gradients([shared[0]])[0]
        return w * (tree["a"].sum() + 10 * tree["b"][0].sum() + back[0]) + 0 * shared[1].sum()

    # Σ w = 6: 6 for each of a, 6·10·2 for b, and 6 through the replicated sum
    assert gradients(loss, [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [1.0, 2.0, 3.0]) == [[6 + 120 + 6, 6]] * 3


@pytest.mark.ranks(2, on="gloo")
def test_leaves_share_no_memory_and_may_be_modified():
    y = dc.all_reduce([torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)])
    y[0].add_(1)
    assert y[0].untyped_storage().data_ptr() != y[1].untyped_storage().data_ptr()
    assert y[1].sum() == 6


def test_a_wrong_leaf_is_named():
    for x, where in [
        ({"a": [torch.ones(1), 3]}, r"\['a'\]\[1\]: got int"),
        ((torch.ones(1), None), r"\[1\]: got NoneType"),
    ]:
        with pytest.raises(TypeError, match=rf"all_reduce: x{where}, expected a dense torch.Tensor"):
            dc.all_reduce(x)
    with pytest.raises(TypeError, match="reduce_scatter: x: got list, expected a dense"):
        dc.reduce_scatter([torch.ones(2)])


def scattered(r, odd):
    """A tree of rank 1, in which other leaves of the other ranks are None; the shapes off src do not matter."""
    x = {"b": torch.arange(12.0).view(6, 2).double(), "a": [torch.arange(6.0).double(), torch.arange(6).int()]}
    x = {"b": x["b"].requires_grad_(), "a": [x["a"][0].requires_grad_(), x["a"][1]]}
    if r == 0:
        x = {"a": [None, torch.ones(5)], "b": torch.full((1, 4), 7.0, requires_grad=True)}
    if r == 2:
        x = odd if odd is not None else {"b": None, "a": [None, None]}
    return x


@pytest.mark.parametrize("later", [False, True], ids=["now", "async"])
@runs_on("rules", "truth", "gloo")
def test_scatter_of_a_tree(run, later):
    sizes = [2, 0, 4]

    def body(r):
        x = scattered(r, None)
        y = dc.scatter(x, src=1, sizes=sizes, async_op=later)
        y = y.wait() if later else y
        return y["b"].tolist(), y["a"][0].tolist(), y["a"][1].tolist()

    whole = scattered(1, None)
    for r, (b, a, n) in enumerate(run(body, range(3))):
        rows = slice(sum(sizes[:r]), sum(sizes[: r + 1]))
        assert (b, a, n) == (whole["b"][rows].tolist(), whole["a"][0][rows].tolist(), whole["a"][1][rows].tolist())


def test_gradients_of_a_scattered_tree(gradients):
    def loss(x, w):
        y = dc.scatter(
            {"x": x, "more": [None if x is None else x.square()]}, src=2, sizes=[2, 0, 1], async_op=True
        ).wait()
        return w * (y["x"] + 10 * y["more"][0]).sum()

    assert gradients(loss, [None, [5.0], [1.0, 2.0, 3.0]], [1.0, 10.0, 100.0]) == [None, [0], [21, 41, 6100]]


@runs_on("rules", "truth", "gloo")
def test_another_tree_than_that_of_src_is_an_error_on_all_ranks(run):

    def body(r):
        texts = []
        for odd in (torch.ones(2), [None], {"b": None, "a": [None]}):
            texts.append(refusal(dc.CollectiveMismatchError, dc.scatter, scattered(r, odd), src=1, sizes=[2, 0, 4]))
        return (
            texts,
            refusal((ValueError, dc.CollectiveMismatchError), dc.scatter, scattered(r, None), src=1, sizes=[2, 0, 3]),
            dc.all_reduce(torch.tensor(r)).item(),
        )

    for r, (texts, last, total) in enumerate(run(body, range(3))):
        expected = "expected a tree with the paths of rank 1's; off src the leaves may be None, but not the whole tree"
        assert texts == [f"scatter: x: got another structure on rank 2, {expected}"] * 3
        assert total == 3
        assert last.startswith("scatter: sizes: got" if r == 1 else "scatter: an argument is invalid on rank 1")


def test_a_wrong_leaf_of_scatter_is_named():
    with pytest.raises(TypeError, match=r"scatter: x\['a'\]\[1\]: got NoneType, expected a dense"):
        dc.scatter({"a": [torch.ones(1), None]})


def test_empty_trees():
    assert dc.all_reduce({}) == {}
    assert dc.all_gather([]) == []


@compiles
def test_transforms_and_compile_go_through_trees():
    def loss(x):
        y = dc.all_reduce({"a": x, "b": (x.square(),)})
        return y["a"].sin().sum() + y["b"][0].prod()

    def body(r):
        x = torch.tensor([0.5 + r, -1.0], dtype=torch.float64)
        leaf = x.clone().requires_grad_()
        (plain,) = torch.autograd.grad(loss(leaf), leaf)
        compiled = one_graph(loss)
        (traced,) = torch.autograd.grad(compiled(leaf), leaf)
        found = [torch.func.grad(loss)(x), torch.func.vmap(torch.func.grad(loss))(x[None])[0], traced]
        return plain, found, torch.func.hessian(loss)(x).sum()

    for plain, found, hessian in spawn(body, range(2), timeout=60):
        assert hessian.isfinite()
        for g in found:
            torch.testing.assert_close(g, plain)


@runs_on("rules", "gloo")
def test_parts_of_a_linear_result_have_separate_backwards(run):
    """The nodes save no tensors, so a second backward needs no retain_graph."""
    ops = {"sum": 1, "mean": 0.5, dist._make_nccl_premul_sum(0.5): 0.5}

    def body(r):
        found = []
        for op in ops:
            x, z = (torch.tensor([1.0 + r, 2.0], requires_grad=True) for _ in range(2))
            u, v = dc.all_reduce([x, z], op)
            y = dc.all_reduce(x, op)
            for part in (u, v, y[0], y[1]):
                ((r + 1) * part).sum().backward()
            found.append((x.grad.tolist(), z.grad.tolist()))
        return found

    expected = [([6 * factor] * 2, [3 * factor] * 2) for factor in ops.values()]
    assert run(body, range(2)) == [expected] * 2


@pytest.mark.parametrize("name", ["all_gather", "shift"])
def test_second_order_where_all_leaves_of_a_rank_are_empty(name):
    """Rank 0 has leaves of shape (0,), which torch.cat omits from the graph; the other ranks must not wait for it."""

    def body(r, one_by_one):
        x, z = (torch.linspace(k, 2, r, dtype=torch.float64, requires_grad=True) for k in (1, 3))
        call = partial(getattr(dc, name), sizes=[0, 1, 2])
        y = [call(x), call(z)] if one_by_one else call([x, z])
        gs = torch.autograd.grad((r + 1) * sum(t.pow(3).sum() for t in y), [x, z], create_graph=True)
        return torch.autograd.grad((r + 2) * sum(g.square().sum() for g in gs), [x, z])

    for got, expected in zip(rules(body, range(N), [False] * N), rules(body, range(N), [True] * N), strict=True):
        torch.testing.assert_close(got, expected)


SECOND_ORDER = {
    "all_gather": lambda t: dc.all_gather(t, sizes="auto"),
    "gather": lambda t: dc.gather(t, 1, sizes="auto"),
    "gather async": lambda t: dc.gather(t, 1, sizes="auto", async_op=True).wait(),
    "gather equal": lambda t: dc.gather(t, 1),
    "permute": lambda t: dc.permute(t, [(0, 1), (1, 0)], sizes="auto"),
    "shift": lambda t: dc.shift(t, 1, wrap=False, sizes="auto"),
    "scatter": lambda t: dc.scatter(t, 1),
    "reduce": lambda t: dc.reduce(t, 1, dc.elementwise(lambda s: s.square().sum(0))),
    "all_reduce": lambda t: dc.all_reduce(t, "max"),
    "ring": lambda t: [block for _, block in dc.ring(t)],
}


@pytest.mark.parametrize("call", SECOND_ORDER)
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float64), (torch.float64, torch.complex128)], ids=str)
def test_second_order_of_leaves_that_are_empty_on_all_ranks(call, dtypes):
    """Every rank runs the second-order backward of every message, also of one without numbers."""

    def loss(tree, r):
        ys = _pytree.tree_leaves(SECOND_ORDER[call](tree))
        return sum(((y + 1 + r).abs() ** 3).sum() for y in ys)

    def second(losses, leaves):
        gs = torch.autograd.grad(losses, leaves, create_graph=True)
        total = sum((g * g.conj()).real.sum() + (g * x.conj()).real.sum() for g, x in zip(gs, leaves, strict=True))
        return torch.autograd.grad(total, leaves)

    for shapes in (((0,), (0,)), ((0,), (3,)), ((0, 2), (0,)), ((3, 0), (0, 3))):
        if call == "all_reduce" and "complex128" in str(dtypes):
            continue  # complex numbers have no maximum
        trees = [
            {k: torch.randn(s, dtype=t).requires_grad_() for k, s, t in zip("ab", shapes, dtypes, strict=True)}
            for _ in range(3)
        ]
        found = rules(lambda t, r: second(loss(t, r), list(t.values())), trees, range(3))
        expected = second(sum(simulate(loss, trees, range(3))), [leaf for t in trees for leaf in t.values()])
        torch.testing.assert_close([h for of_rank in found for h in of_rank], list(expected))


def test_a_sparse_gradient_of_a_leaf_is_an_error_of_pytorch():
    def body(r):
        w = torch.ones(3, 2).mul(r + 1).requires_grad_()
        loss = torch.nn.functional.embedding(torch.tensor([0, r]), dc.all_reduce([w])[0], sparse=True).sum()
        with pytest.raises(RuntimeError, match=r"(?i)sparse"):
            loss.backward()

    rules(body, range(3))
