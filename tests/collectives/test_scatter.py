from contextlib import nullcontext

import pytest
import torch
from runs import refusal, rules, runs_on
from torch.autograd import forward_ad

import diffcoll as dc


def test_blocks_of_src_alone(run, gradients):
    xs = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
    assert [y.tolist() for y in run(lambda x: dc.scatter(torch.tensor(x), src=1), xs)] == [[4], [5], [6]]
    found = gradients(lambda x, w: w * dc.scatter(x, src=1).sum(), xs, [1.0, 10.0, 100.0])
    assert found == [[0, 0, 0], [1, 10, 100], [0, 0, 0]]


def test_none_off_src(run, gradients):
    xs = [None, None, [1.0, 2.0, 3.0]]

    def call(x):
        return dc.scatter(x, src=2, sizes=[2, 0, 1])

    got = run(lambda x: call(None if x is None else torch.tensor(x)), xs)
    assert [y.tolist() for y in got] == [[1, 2], [], [3]]
    assert gradients(lambda x, w: w * call(x).sum(), xs, [1.0, 10.0, 100.0]) == [None, None, [1, 1, 100]]


def test_only_src_knows_dim_sizes_and_dtype(run):
    def body(r):
        if r == 1:
            return dc.scatter(torch.arange(6, dtype=torch.int16).reshape(2, 3), src=1, dim=1, sizes=[0, 2, 1])
        return dc.scatter(torch.zeros(5) if r else None, src=1)

    a, b, c = run(body, range(3))
    assert (a.tolist(), b.tolist(), c.tolist()) == ([[], []], [[0, 1], [3, 4]], [[2], [5]])
    assert {a.dtype, b.dtype, c.dtype} == {torch.int16}


@runs_on("rules", "gloo")
@pytest.mark.parametrize("x", [torch.ones(4), None, torch.tensor(1.0)])
def test_wrong_arguments_on_src_are_told_to_all(run, x):
    def body(r):
        try:
            dc.scatter(x if r == 0 else None)
        except Exception as error:
            return type(error).__name__, str(error), dc.all_reduce(torch.tensor(r)).item()

    first, *others = run(body, range(3))
    assert first[0] == ("TypeError" if x is None else "ValueError")
    for kind, text, works in (first, *others):
        assert text.startswith("scatter: ")
        assert works == 3  # the group is usable afterwards
        assert kind == first[0] or (kind, text.split(",")[0]) == (
            "CollectiveMismatchError",
            "scatter: an argument is invalid on rank 0",
        )


class _Nameless:
    def __repr__(self):
        return "key"


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(
    ("x", "src", "got"),
    [
        (torch.ones(3), -1, "scatter: src: got -1, expected a rank within the group, from 0 to 2"),
        ([torch.ones(3)], "1", "scatter: src: got str, expected an integer"),
        ({_Nameless(): torch.ones(3), _Nameless(): None}, 1, "scatter: x: [key] is the path of two leaves"),
    ],
    ids=["src", "src of a tree", "tree"],
)
def test_what_one_rank_alone_gets_wrong_before_it_reads_x_is_told_to_all(x, src, got, rank, checked):
    def body(r):
        other = torch.ones(3) if isinstance(x, torch.Tensor) else [torch.ones(3)]
        with dc.check_mode(checked), pytest.raises((TypeError, ValueError, dc.CollectiveMismatchError)) as caught:
            dc.scatter(x if r == rank else other, src if r == rank else 1)
        return str(caught.value), dc.all_reduce(torch.tensor(r)).item()

    told = f"scatter: an argument is invalid on rank {rank}, see the error there"
    for r, (text, works) in enumerate(rules(body, range(3))):
        assert works == 3  # the group is usable afterwards
        assert text.startswith(got if r == rank else told) or (checked and "disagree" in text)


@pytest.mark.parametrize("transform", ["vmap", "grad"])
@pytest.mark.parametrize("tree", [False, True])
def test_none_in_a_transform_is_an_error_on_all_ranks(transform, tree):
    def scattered(x, r):
        x = x if r == 1 else None
        return dc.scatter([x], src=1)[0] if tree else dc.scatter(x, src=1)

    def body(r):
        call = torch.vmap(lambda x: scattered(x, r)) if transform == "vmap" else None
        call = call or torch.func.grad(lambda x: scattered(x[0], r).sum())
        return refusal((ValueError, dc.CollectiveMismatchError), call, torch.ones(2, 3)), dc.all_reduce(
            torch.tensor(r)
        ).item()

    path = "[0]" * tree
    expected = f"scatter: x{path}: got None, expected a tensor on every rank in a torch.func transform; pass a tensor"
    for r, (text, works) in enumerate(rules(body, range(3))):
        assert text.startswith("scatter: an argument is invalid on rank 0" if r == 1 else expected)
        assert works == 3


def along(r, src, pass_, later):
    """Return y² and its tangent, and what they must be; off src the ranks pass_ something else."""
    xs = [torch.tensor([1.0, 2.0, 3.0]) + 10 * s for s in range(3)]
    with forward_ad.dual_level():
        x = xs[r] if r == src else pass_(xs[r])
        x = forward_ad.make_dual(x, x.cos()) if r == src and pass_ is not without else x
        y = dc.scatter(x, src, async_op=later)
        y = forward_ad.unpack_dual((y.wait() if later else y).square())
        found = y.primal, torch.zeros(1) if pass_ is without else y.tangent
    x = xs[src][r : r + 1]
    return found, (x**2, torch.zeros(1) if pass_ is without else 2 * x * x.cos())


def without(x):
    """Return a tensor with a tangent, where rank src has none."""
    return forward_ad.make_dual(x, x.sin())


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("pass_", [lambda x: None, lambda x: x, without], ids=["None", "no tangent", "a tangent"])
def test_the_tangent_of_src_alone(run, pass_, later):
    for found, right in run(lambda r: along(r, 1, pass_, later), range(3)):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("tree", [False, True])
def test_a_rank_outside_of_the_level_of_a_tangent(tree):
    def body(r):
        with forward_ad.dual_level() if r < 2 else nullcontext():
            x = torch.ones(3)
            x = forward_ad.make_dual(x, x) if r == 0 else None
            with pytest.raises(dc.CollectiveMismatchError, match=r"tangent on rank 0, expected .*, also on rank 2"):
                dc.scatter([x] if tree else x)
        return dc.all_reduce(torch.tensor(r)).item()

    assert rules(body, range(3)) == [3] * 3


def test_gradient_only_where_src_asks_for_it(run):
    def body(r):
        y = dc.scatter(torch.ones(3, requires_grad=r == 1) * (r + 1), src=0)
        z = dc.scatter(torch.ones(3, requires_grad=r == 0) * (r + 1), src=0)
        return y.requires_grad, z.requires_grad

    assert {needs for _, needs in run(body, range(3))} == {True}


X = torch.ones(3)


@pytest.mark.parametrize(
    ("of_rank", "text"),
    [
        (lambda r: dc.scatter(torch.arange(3.0), src=int(r == 2)), "src: got 0, 0, 1 on the ranks in order, expected"),
        (lambda r: dc.scatter([X] if r else X), "x: got a tree on rank 1, 2, expected a tensor"),
        (lambda r: dc.scatter("ones" if r == 1 else torch.ones(3)), "an argument is invalid on rank 1, see the error"),
    ],
)
def test_ranks_that_differ_are_told_so_on_every_rank(of_rank, text):
    def body(r):
        return refusal((TypeError, dc.CollectiveMismatchError), of_rank, r), dc.all_reduce(torch.tensor(r)).item()

    for r, (found, works) in enumerate(rules(body, range(3))):
        own = r == 1 and "invalid" in text
        assert found.startswith("scatter: x: got str" if own else f"scatter: {text}")
        assert works == 3
