"""halo_exchange: this rank's rows with those next to them, as torch.nn.functional.pad has them of the whole tensor."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from releases import compiles, one_graph
from runs import gloo, profiled, refusal, rules, runs_on, truth

import diffcoll as dc
from diffcoll.testing import new_group, spawn

MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular", None: None}
SIZES = [[9], [4, 5], [3, 0, 6], [1, 1, 1, 1, 5], [0, 9, 0]]
HALOS = [(0, 0), (1, 0), (2, 3), (5, 8)]


def numbers(*shape, seed=0, dtype=torch.double):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double).to(dtype)


def expected(whole, sizes, left, right, mode):
    """What each rank receives, along the last dimension, from the whole tensor."""
    if mode is None:
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        spans = [(max(a - left, 0), b + right) for a, b in pairwise(ends)]
        return [whole[..., a:b] for a, b in spans]
    padded = F.pad(whole, (left, right), mode=MODES[mode]) if left or right else whole
    firsts = torch.tensor([0, *sizes[:-1]]).cumsum(0).tolist()
    return [padded[..., a : a + left + n + right] for a, n in zip(firsts, sizes, strict=True)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("run", [truth, rules], ids=["truth", "rules"])
def test_it_is_padding_of_the_whole(run, mode):
    x = numbers(2, 3, 9)
    for sizes in SIZES:
        for left, right in HALOS:
            found = run(lambda b: dc.halo_exchange(b, -1, left, right, padding_mode=mode), x.split(sizes, 2))  # noqa: B023
            for a, b in zip(found, expected(x, sizes, left, right, mode), strict=True):
                assert torch.equal(a, b), (sizes, left, right)


@runs_on("truth", "rules", "gloo")
def test_on_a_subgroup(run):
    def body(r):
        pair, x = new_group([1, 2]), torch.tensor([r, 10 * r])
        return dc.halo_exchange(x, 0, 1, 1, group=pair).tolist() if r else None

    assert run(body, range(3)) == [None, [0, 1, 10, 2], [10, 2, 20, 0]]


def weighted(y, r):
    return (y.sin() * numbers(*y.shape, seed=r + 5)).sum()


@runs_on("rules", "gloo", "mpi")
def test_derivatives_to_second_order(run):
    """A row that several ranks have has the sum of their gradients; blocks are shorter than the halo, or empty."""
    sizes, cases = [2, 0, 4], [(mode, (3, 4)) for mode in MODES] + [("zeros", (1, 0))]
    parts = [part.contiguous() for part in numbers(6, 2).split(sizes)]

    def body(x, r):
        found = []
        for mode, halo in cases:
            leaf = x.t().contiguous().t().requires_grad_()  # not contiguous
            loss = weighted(dc.halo_exchange(leaf, 0, *halo, padding_mode=mode), r)
            (g,) = torch.autograd.grad(loss, leaf, create_graph=True)
            found.append((g.detach(), *torch.autograd.grad((g * g.sin()).sum(), leaf)))
        return found

    got = run(body, parts, range(3))
    for i, (mode, halo) in enumerate(cases):
        xs = [part.clone().requires_grad_() for part in parts]
        ys = expected(torch.cat(xs).t(), sizes, *halo, mode)
        gs = torch.autograd.grad(sum(weighted(y.t(), r) for r, y in enumerate(ys)), xs, create_graph=True)
        second = torch.autograd.grad(sum((g * g.sin()).sum() for g in gs), xs)
        for r in range(3):
            torch.testing.assert_close(got[r][i], (gs[r], second[r]))


@pytest.mark.parametrize(
    "dtype", [torch.long, torch.bool, torch.complex128, torch.bfloat16, torch.uint16, torch.uint64]
)
def test_dtypes(dtype):
    x = (3 * numbers(7)).abs().to(dtype)
    found = rules(lambda b: dc.halo_exchange(b, 0, 2, 1), x.split([1, 4, 2]))
    whole = torch.cat([x.new_zeros(2), x, x.new_zeros(1)])
    for y, at, n in zip(found, (0, 1, 5), (1, 4, 2), strict=True):
        assert y.dtype == dtype and torch.equal(y, whole[at : at + n + 3])


def test_in_transforms():
    """Forward mode, vmap and grad; ranks may be in torch.func together."""
    x, v = numbers(6), numbers(6, seed=1)

    def program(x, v, r):
        f = lambda x: weighted(dc.halo_exchange(x, 0, 2, 1, padding_mode="circular"), r)  # noqa: E731
        mapped = torch.func.vmap(lambda x: dc.halo_exchange(x, 0, 2, 1))(torch.stack([x, v], 0))
        return torch.func.grad(f)(x), torch.func.jvp(f, (x,), (v,))[1], mapped

    found = rules(program, x.split([1, 5]), v.split([1, 5]), range(2))
    leaf = x.clone().requires_grad_()
    total = sum(weighted(y, r) for r, y in enumerate(expected(leaf[None], [1, 5], 2, 1, "circular")) for y in y)
    (right,) = torch.autograd.grad(total, leaf)
    torch.testing.assert_close(torch.cat([g for g, *_ in found]), right)
    torch.testing.assert_close(sum(t for _, t, _ in found), right @ v)
    for (*_, mapped), a, b in zip(found, *(expected(t, [1, 5], 2, 1, "zeros") for t in (x, v)), strict=True):
        torch.testing.assert_close(mapped, torch.stack([a, b]))


def test_messages():
    """The sizes, and one all_to_all; nothing on one rank. The result is a tensor of its own."""

    def body(r):
        x = torch.ones(3, requires_grad=True)
        found = []
        forward = profiled(lambda: found.append(dc.halo_exchange(x, 0, 1, 1)))
        found[0].data.fill_(7)
        return [name for name, _ in forward], profiled(found[0].sum().backward), x.tolist()

    for forward, backward, x in spawn(body, range(2)):
        assert [name for name in forward if "all_to_all" in name] and len(forward) == 2
        assert len(backward) == 1 and x == [1, 1, 1]
    assert not any(size for _, size in profiled(dc.halo_exchange, torch.ones(3), 0, 1, 1))


@pytest.mark.parametrize("mode", ["replicate", "circular"])
def test_a_row_is_sent_once(mode):
    """However often it is in the halo."""

    def body(r):
        call = partial(dc.halo_exchange, torch.ones(2, 5), 0, padding_mode=mode)
        return [dict(profiled(call, n, n))["all_to_all"] for n in (4, 9)]

    for few, many in gloo(body, range(2)):
        assert few == many


@compiles
def test_it_breaks_a_graph():
    f = lambda x: dc.halo_exchange(x.sin(), 0, 1, 2).cos()  # noqa: E731
    x = numbers(3)
    with pytest.raises(Exception, match="which rows are sent depends on the sizes of all ranks"):
        one_graph(f)(x)
    assert torch.equal(torch.compile(f, backend="aot_eager")(x), f(x))


@runs_on("rules", "gloo")
def test_ranks_that_differ(run):
    """In a halo, in the mode, in the dimension, in the dtype or in another dimension."""
    x = torch.ones(3, 3)
    usual = {"x": x, "dim": 0, "left": 1, "right": 1, "padding_mode": "zeros"}
    odd = [{"left": 2}, {"right": 0}, {"padding_mode": None}, {"dim": 1}, {"x": x.double()}, {"x": x[:, :2]}]

    def body(r):
        calls = [{**usual, **(other if r else {})} for other in odd]
        return [refusal(dc.CollectiveMismatchError, dc.halo_exchange, **call) for call in calls]

    for texts in run(body, range(2)):
        what = "arguments, or in dtype or another dimension of x; halo_exchange: tree: rank 1 differs from rank 0"
        assert all(text.startswith(f"halo_exchange: the ranks differ in {what}") for text in texts)


X = torch.ones(2, 3)
WRONG = [
    (([1.0], 0, 1, 1), {}, TypeError, "x: got list, expected a tensor"),
    ((X, 2, 1, 1), {}, ValueError, "dim: got 2, expected different dimensions from -2 to 1"),
    ((X, (0, 1), 1, 1), {}, TypeError, "dim: got (0, 1), expected an integer"),
    ((X, 0, -1, 1), {}, ValueError, "left: got -1, expected an integer of at least 0"),
    ((X, 0, 1, 1.5), {}, TypeError, "right: got 1.5, expected an integer of at least 0"),
    ((X, 0, 1, 1), {"padding_mode": "constant"}, ValueError, 'padding_mode: got \'constant\', expected "zeros", "refl'),
    ((X, 0, 2, 1), {"padding_mode": "reflect"}, ValueError, "padding_mode: got 'reflect' with 2 rows on all"),
    ((X[:0], 0, 2, 1), {"padding_mode": "circular"}, ValueError, "padding_mode: got 'circular' with 0 rows on all"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "options", "error", "text"), WRONG)
def test_invalid_arguments(arguments, options, error, text):
    assert refusal(error, dc.halo_exchange, *arguments, **options).startswith(f"halo_exchange: {text}")


def test_too_few_rows_is_an_error_on_all_ranks():
    blocks = [X[:1], X[:0]]
    texts = rules(lambda x: refusal(ValueError, dc.halo_exchange, x, 0, 1, 1, padding_mode="reflect"), blocks)
    assert len(set(texts)) == 1 and "with 1 rows on all ranks together, expected at least 2 rows" in texts[0]
