"""Strategies: what they draw, that it detects wrong code, that a failure is code that runs, and bad arguments."""

import re
from functools import partial

import calls
import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import diffcoll as dc
from diffcoll.collectives import COLLECTIVES
from diffcoll.testing import simulate, strategies
from diffcoll.testing.layouts import same
from diffcoll.testing.strategies import LAYOUTS, per_rank_tensors, with_layout

QUIET = {"deadline": None, "derandomize": True, "database": None}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def drawn(strategy, count=300):
    found = []

    @settings(max_examples=count, **QUIET)
    @given(strategy)
    def collect(example):
        found.append(example)

    collect()
    return found


# ── wrong code is detected ───────────────────────────────────────────────────────────────────────────────


def own_rows(y, x, sizes):
    """Replace this rank's rows of y by x."""
    start = sum(sizes[: dc.get_rank()])
    return torch.cat([y[:start], x, y[start + len(x) :]])


def right(x):
    return dc.all_gather(x, sizes="auto")


def local_slice(x):
    """Gradients flow through this rank's rows alone."""
    sizes = dc.all_gather(torch.tensor(len(x))).tolist()
    return own_rows(dc.all_gather(x.detach(), sizes=sizes), x, sizes)


def at_least_one_row(x):
    """Rows are padded to the largest number, and an empty rank's padding is kept."""
    sizes = dc.all_gather(torch.tensor(len(x))).tolist()
    padded = torch.cat([x, x.new_zeros(max(sizes) - len(x), *x.shape[1:])])
    rows = dc.all_gather(padded, stack=True)
    return torch.cat([part[: max(k, 1)] for part, k in zip(rows, sizes, strict=True)])


def equal_rows(x):
    """Every rank sends as many rows as the smallest rank has."""
    return dc.all_gather(x[: int(dc.all_reduce(torch.tensor(len(x)), "min"))])


def dense_memory(x):
    """The elements are read in the order of the memory, whatever the strides."""
    return right(x.as_strided(x.shape, torch.empty(x.shape).stride()))


def memory_from_its_start(x):
    return right(x.as_strided(x.shape, x.stride(), 0))


def single_process(gather, xs):
    """Compare the gradients of the ranks' losses, with different weights, with those of the whole batch."""

    def loss(y):
        return (torch.arange(1, 1 + y.numel()).view(y.shape) * y.sin()).sum()

    losses = simulate(lambda r, x: (r + 1) * loss(gather(x)), range(len(xs)), xs)
    whole = loss(torch.cat(xs)) * sum(range(1, 1 + len(xs)))
    torch.testing.assert_close(sum(losses), whole)
    found, expected = (torch.autograd.grad(y, xs, allow_unused=True) for y in (sum(losses), whole))
    torch.testing.assert_close(found, expected)


def hold(check, strategy, phases=(Phase.generate,)):
    @settings(max_examples=50, phases=phases, **QUIET)
    @given(strategy)
    def holds(xs):
        check(xs)

    holds()


BATCHES = partial(per_rank_tensors, shape=(2,), requires_grad=True)


def test_a_right_gather_passes():
    hold(lambda xs: single_process(right, xs), BATCHES())


@pytest.mark.parametrize(
    ("gather", "more"),
    [
        (local_slice, {"rows": "equal", "least": 1, "layouts": ["contiguous"]}),
        (equal_rows, {"least": 1, "layouts": ["contiguous"]}),
        (at_least_one_row, {"layouts": ["contiguous"]}),
        (dense_memory, {"layouts": ["transposed"]}),
        (dense_memory, {"layouts": ["strided"]}),
        (dense_memory, {"layouts": ["expanded"]}),
        (dense_memory, {"layouts": ["channels_last"], "shape": (2, 2, 2)}),
        (memory_from_its_start, {"layouts": ["offset"]}),
        (dense_memory, {}),
        (memory_from_its_start, {}),
    ],
)
def test_a_wrong_gather_is_detected(gather, more):
    with pytest.raises((AssertionError, RuntimeError), match=r"not close|out of bounds"):
        hold(lambda xs: single_process(gather, xs), BATCHES(**more))


def test_a_mean_of_local_means_is_detected():
    def check(mean, xs):
        for y in simulate(mean, xs):
            torch.testing.assert_close(y, torch.cat(xs).mean(0))

    def of_rows(x):
        return dc.all_reduce(x.sum(0)) / dc.all_reduce(torch.tensor(len(x)))

    hold(partial(check, of_rows), BATCHES().filter(lambda xs: sum(map(len, xs))))
    with pytest.raises(AssertionError, match="not close"):
        hold(partial(check, lambda x: dc.all_reduce(x.mean(0), "mean")), BATCHES(least=1))


def test_a_failure_is_printed_as_code():
    with pytest.raises(AssertionError) as caught:
        hold(lambda xs: single_process(local_slice, xs), BATCHES(2, least=1), [Phase.generate, Phase.shrink])
    (text,) = (note for note in caught.value.__notes__ if "xs=" in note)
    xs = eval(re.search(r"xs=(\[.*\])", text)[1])
    assert [x.shape for x in xs] == [(1, 2)] * 2
    with pytest.raises(AssertionError, match="not close"):
        single_process(local_slice, xs)


# ── what is drawn ────────────────────────────────────────────────────────────────────────────────────────


def test_everything_occurs():
    found = drawn(per_rank_tensors(shape=(2, 1, 2)))
    assert {len(xs) for xs in found} == set(range(1, 7))
    assert {len(x) for xs in found for x in xs} == {0, 1, 2, 3}
    several = [xs for xs in found if len(xs) > 1]
    for condition in (
        lambda xs: len({len(x) for x in xs if len(x)}) > 1,  # uneven
        lambda xs: 0 < sum(len(x) > 0 for x in xs) < len(xs),  # some empty
        lambda xs: any((x == 0).any() for x in xs),
        lambda xs: len(xs[0]) and len(xs[1]) and (xs[0][0] == xs[1][0]).any(),  # a tie
        lambda xs: any((x.frac() != 0).any() for x in xs),
        lambda xs: all(len(x) for x in xs),
    ):
        assert sum(bool(condition(xs)) for xs in several) > 5
    layouts = [set(re.findall(r'"(\w+)"', repr(xs))) for xs in found]
    assert set.union(*layouts) == set(LAYOUTS) - {"contiguous"}
    assert max(map(len, layouts)) > 2
    assert {x.dtype for xs in found for x in xs} == {torch.float64}


@pytest.mark.parametrize("rows", ["uneven", "equal", None, (2, 0, 2, 2)])
def test_no_two_ranks_are_equal(rows):
    found = drawn(per_rank_tensors(shape=(), rows=rows, dtype=[torch.int8, torch.float32]), 100)
    for xs in found:
        for r, x in enumerate(xs):
            assert not any(same(x, other) for other in xs[:r] if x.numel())
        counts = tuple(x.shape[0] if x.dim() else None for x in xs)
        if rows != "uneven":
            assert counts == {"equal": counts[:1] * len(xs), None: (None,) * len(xs)}.get(rows, rows)
    assert {x.dtype for xs in found for x in xs} == {torch.int8, torch.float32}
    labels = per_rank_tensors(3, (), rows=[1, 1, 1], dtype=torch.bool, distinct=False)
    assert len({tuple(x.item() for x in xs) for xs in drawn(labels)}) == 8


def test_shapes_are_drawn():
    found = drawn(per_rank_tensors(st.integers(2, 3)))
    assert {len(xs) for xs in found} == {2, 3}
    assert {x.dim() for xs in found for x in xs} == {1, 2, 3, 4}
    found = drawn(per_rank_tensors(2, st.sampled_from([(), (0, 2)]), rows=None), 50)
    assert {tuple(x.shape) for xs in found for x in xs} == {(), (0, 2)}


def test_large_tensors_repeat_few_values():
    found = drawn(per_rank_tensors(shape=(32, 8), rows=[2], layouts=["contiguous"]), 10)
    assert any(len(x.unique()) > 9 and not torch.equal(x[0], x[1]) for (x,) in found)


@pytest.mark.parametrize("dtype", [*DTYPES, *INTEGERS, torch.bool], ids=str)
def test_the_repr_makes_the_tensors_again(dtype):
    floats = dtype in DTYPES
    strategy = per_rank_tensors(2, st.sampled_from([(), (2,), (2, 2, 2)]), dtype=dtype, extremes=True,
                                nonfinite=floats, requires_grad=floats, distinct=dtype != torch.bool)  # fmt: skip
    found = drawn(strategy, 60)
    for xs in found:
        again = eval(repr(xs))
        for x, y in zip(xs, again, strict=True):
            assert x.is_leaf and x.dtype == dtype and x.requires_grad == y.requires_grad == floats
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
            if x.numel():
                assert (x.stride(), x.storage_offset()) == (y.stride(), y.storage_offset())
    values = torch.cat([x.detach().reshape(-1) for xs in found for x in xs])
    values = values.real if dtype.is_complex else values
    if dtype in INTEGERS:
        assert {torch.iinfo(dtype).min, torch.iinfo(dtype).max} <= set(values.tolist())
    elif floats:
        limits = torch.finfo(values.dtype)
        assert {limits.max, limits.min, limits.tiny * limits.eps, torch.inf, -torch.inf} <= set(values.tolist())
        assert values.isnan().any()


def test_gradients_of_every_layout():
    for xs in drawn(per_rank_tensors(2, (2, 2, 2), rows="equal", requires_grad=True), 50):
        gs = torch.autograd.grad(sum((x * x).sum() for x in xs), xs)
        for x, g in zip(xs, gs, strict=True):
            assert torch.equal(g, 2 * x)


# ── calls, numbers ───────────────────────────────────────────────────────────────────────────────────────


def test_calls_of_all_collectives():
    found = drawn(calls.cases())
    assert {case.name for case in found} == set(COLLECTIVES)
    assert {case.layout for case in found} == {"contiguous", "transposed", "strided", "offset"}
    assert {case.name for case in drawn(calls.cases(["scan", "shift"], size=4), 20)} == {"scan", "shift"}
    assert {case.size for case in drawn(calls.cases("scan", most=2), 20)} == {1, 2}


def test_ranges():
    assert set(drawn(strategies.worlds(4, least=2), 50)) == {2, 3, 4}
    found = drawn(strategies.sizes(2, 5, least=4), 50)
    assert {tuple(each) for each in found} == {(4, 4), (4, 5), (5, 4), (5, 5)}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: strategies.worlds(2, least=3), "worlds: least: got 3, expected at most 2, the value of most"),
        (lambda: strategies.worlds(0), "worlds: most: got 0, expected an integer of at least 1"),
        (lambda: strategies.worlds(2.5), "worlds: most: got 2.5, expected an integer of at least 1"),
        (lambda: strategies.sizes(0), "sizes: n: got 0, expected an integer of at least 1"),
        (lambda: strategies.sizes(2, least=-1), "sizes: least: got -1, expected an integer of at least 0"),
        (lambda: strategies.pairs("3"), "pairs: n: got '3', expected an integer of at least 1"),
        (lambda: calls.cases("allgather"), "cases: names: got 'allgather', expected names among all_reduce, "),
        (lambda: calls.cases([]), "cases: names: got [], expected names among all_reduce"),
        (lambda: calls.cases(size=0), "cases: size: got 0, expected an integer of at least 1"),
        (lambda: per_rank_tensors(0), "per_rank_tensors: n: got 0, expected an integer of at least 1"),
        (lambda: per_rank_tensors(least=4), "per_rank_tensors: least: got 4, expected at most 3, the value of most"),
        (lambda: per_rank_tensors(shape=3), "shape: got 3, expected a sequence of sizes of at least 0"),
        (lambda: per_rank_tensors(shape=(-1,)), "per_rank_tensors: shape: got -1, expected an integer of at least 0"),
        (lambda: per_rank_tensors(rows="even"), 'rows: got \'even\', expected "uneven", "equal", None, or a list'),
        (lambda: per_rank_tensors(rows=3), 'rows: got 3, expected "uneven", "equal", None, or a list'),
        (lambda: per_rank_tensors(rows=[]), "rows: got [], expected one number per rank"),
        (lambda: per_rank_tensors(2, rows=[1, 2, 3]), "rows: got [1, 2, 3], expected one number for each of n=2 ranks"),
        (lambda: per_rank_tensors(rows=[1, -2]), "per_rank_tensors: rows: got -2, expected an integer of at least 0"),
        (lambda: per_rank_tensors(layouts="strided"), "layouts: got 'strided', expected names among contiguous, tr"),
        (lambda: per_rank_tensors(layouts=["dense"]), "layouts: got ['dense'], expected names among contiguous, tr"),
        (lambda: per_rank_tensors(dtype=[]), "per_rank_tensors: dtype: got [], expected at least one dtype"),
        (lambda: per_rank_tensors(dtype=float), "dtype: got <class 'float'>, expected a torch.dtype, or several"),
        (
            lambda: per_rank_tensors(dtype=torch.int64, requires_grad=True),
            "dtype: got torch.int64, expected floating-point or complex dtypes, because requires_grad=True",
        ),
        (lambda: per_rank_tensors(elements=2.0), "elements: got 2.0, expected a strategy of hypothesis"),
        (
            lambda: per_rank_tensors(elements=st.just(1), extremes=True),
            "elements: got just(1), expected None with extremes=True or nonfinite=True",
        ),
        (
            lambda: find(per_rank_tensors(shape=(2,), layouts=["channels_last"]), bool),
            "layouts: got ['channels_last'], expected one that 2-D tensors can have: contiguous, transposed, strided, ",
        ),
        (lambda: with_layout(torch.ones(2), "dense"), "with_layout: layout: got 'dense', expected one of 'contig"),
        (lambda: with_layout(torch.ones(2), "channels_last"), 'got 1-D for "channels_last", expected 4-D or 5-D'),
        (lambda: with_layout(torch.arange(2), "expanded"), 'got slices x[i] that differ, for "expanded", expected eq'),
    ],
)
def test_bad_arguments(call, text):
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert text in str(caught.value)
