"""Sinkhorn's assignment on ranks against one process with all rows, as published and in the log domain."""

import numpy
import pytest
import torch
import torch.nn.functional as F
from references import data
from releases import compiles, one_graph
from runs import gloo, gloo_messages, refusal, rules, runs_on, truth

import diffcoll as dc
from diffcoll.nn.functional import sinkhorn
from diffcoll.testing import GradientMismatchError, assert_matches_single_process, new_group

SIZES = ((6,), (4, 4), (5, 0, 3), (0, 1, 0))


def published(scores, epsilon=0.05, iterations=3):
    """Caron et al. 2020, algorithm 1 of the supplement, on one process: prototypes in rows."""
    q = torch.exp(scores / epsilon).T
    k, b = q.shape
    q = q / q.sum()
    for _ in range(iterations):
        q = q / q.sum(1, keepdim=True) / k
        q = q / q.sum(0, keepdim=True) / b
    return (q * b).T


def in_log_domain(scores, epsilon, iterations):
    """The same, in float64, without an exponential until the end."""
    x = scores.double() / epsilon
    for _ in range(iterations):
        x = x - x.logsumexp(0, keepdim=True)
        x = x - x.logsumexp(1, keepdim=True)
    return x.exp()


def on_ranks(run, scores, sizes, **options):
    return torch.cat(run(lambda x: sinkhorn(x, **options), scores.split(list(sizes))))


@runs_on("truth", "rules", "gloo", "mpi")
@pytest.mark.parametrize("options", [{}, {"epsilon": 0.3, "iterations": 1}, {"iterations": 7}], ids=str)
def test_equals_one_process(run, options):
    for sizes in SIZES if run in (truth, rules) else [(5, 0, 3)]:
        scores = data(sum(sizes), 5, seed=len(sizes))
        found = on_ranks(run, scores, sizes, **options)
        torch.testing.assert_close(found, published(scores, **options), rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(found.sum(1), torch.ones(len(scores)).double())
    whole = sinkhorn(scores, **options)  # the group of one rank
    torch.testing.assert_close(whole, published(scores, **options), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("largest", [1e-3, 1.0, 200.0, 1e4])
def test_large_scores_in_float32(largest):
    """The published code overflows in float32 where scores/epsilon > 88. Here: as exact as rounded scores."""
    scores = data(64, 16, seed=3, dtype=torch.float32).clamp(-1, 1) * largest
    found = on_ranks(rules, scores, (4, 0, 60), epsilon=1.0)
    right = in_log_domain(scores, 1.0, 3)
    bound = 10 * max(largest, 1) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.double(), right, rtol=bound, atol=1e-37)
    assert published(scores, 1.0).isnan().all() == (largest >= 200)


@pytest.mark.parametrize("epsilon", [1e-39, 1e-46, 1e-300])
def test_an_epsilon_so_small_that_quotients_overflow_in_float32(epsilon):
    """On one rank only, of which a pair is not assigned: all ranks compute in float64."""
    scores = data(8, 4, seed=2, dtype=torch.float32)
    scores[5:] *= torch.finfo(torch.float32).tiny if epsilon > 1e-200 else 0
    scores[1, 2] = -torch.inf
    right = in_log_domain(scores, epsilon, 3).float()
    for run in (rules, gloo):
        found = on_ranks(run, scores, (5, 0, 3), epsilon=epsilon)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sinkhorn(scores, epsilon=epsilon), right, rtol=1e-4, atol=1e-6)
    large = scores * 1e30  # with an ordinary epsilon; the first rank overflows, or the last one
    for x, sizes in ((large, (5, 3)), (large.flip(0), (3, 0, 5)), (large.flip(0), (0, 3, 5))):
        torch.testing.assert_close(on_ranks(rules, x, sizes, epsilon=1e-9), in_log_domain(x, 1e-9, 3).float())
    torch.testing.assert_close(sinkhorn(torch.zeros(3, 2), epsilon=epsilon), torch.full((3, 2), 0.5))
    stack = torch.stack([scores, scores.flip(1)])
    found = torch.cat(rules(torch.vmap(lambda x: sinkhorn(x, epsilon=epsilon)), stack.split([5, 3], 1)), 1)
    torch.testing.assert_close(found, torch.stack([right, right.flip(1)]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quotients_that_overflow_in_float64_are_an_error_on_all_ranks(dtype):
    def body(x):
        return refusal(ValueError, sinkhorn, x, epsilon=1e-310)

    expected = (
        "sinkhorn: epsilon: got 1e-310; scores / epsilon overflows on rank 1, expected quotients below 1e308; "
        "pass a larger epsilon"
    )
    for run in (rules, gloo):
        assert run(body, [torch.zeros(2, 3, dtype=dtype), torch.ones(1, 3, dtype=dtype)]) == [expected] * 2


def test_a_prototype_far_from_all_samples():
    """Its exponentials are all 0 in float64, and a row of which all are 0: each has its share all the same."""
    scores = data(8, 4)
    scores[:, 1] -= 5000
    scores[2] -= 9000
    found = on_ranks(rules, scores, (5, 3), epsilon=1.0)
    torch.testing.assert_close(found, in_log_domain(scores, 1.0, 3), rtol=1e-10, atol=1e-300)
    assert found.sum(0).min() > 0.5
    assert published(scores, 1.0).isnan().any()


def test_rows_of_a_queue():
    """Each rank passes its share of a queue with its own rows; the order of rows has no influence."""
    prototypes, scores, old = data(3, 4, seed=5), data(8, 4), data(7, 3, seed=6)

    def body(scores, old):
        queue = dc.nn.FeatureQueue(6, 3, dtype=torch.double)
        queue.enqueue(old)
        kept = queue.features(share=True) @ prototypes
        return sinkhorn(torch.cat([kept, scores]))[len(kept) :]

    found = torch.cat(rules(body, scores.split([5, 0, 3]), old.split([1, 2, 4])))
    torch.testing.assert_close(found, published(torch.cat([old[1:] @ prototypes, scores]))[6:])


def test_columns_are_equal_after_many_iterations():
    found = on_ranks(rules, data(12, 4), (5, 0, 7), epsilon=1.0, iterations=200)
    torch.testing.assert_close(found.sum(0), torch.full((4,), 3.0).double())


def test_half_precision_is_computed_in_float32():
    scores = data(12, 4)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = scores.to(dtype)
        found = on_ranks(rules, x, (5, 7))
        assert found.dtype == torch.float32
        assert found.equal(on_ranks(rules, x.float(), (5, 7)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert sinkhorn(x).equal(sinkhorn(x.float()))
    mixed = rules(sinkhorn, [scores[:5].bfloat16(), scores[5:].bfloat16().float()])
    torch.testing.assert_close(torch.cat(mixed), on_ranks(rules, scores.bfloat16(), (5, 7)))


def test_any_layout_and_no_change_of_the_scores():
    scores = data(4, 8).T
    before = scores.clone()
    parts = list(scores.split([5, 3]))
    found = torch.cat(gloo(sinkhorn, parts))
    torch.testing.assert_close(found, published(scores.contiguous()))
    assert scores.equal(before)
    torch.testing.assert_close(sinkhorn(scores[:1]), torch.full((1, 4), 0.25).double())  # one row, equal shares


def test_not_finite_scores():
    """A pair is excluded by −inf. What no number can be said of is NaN on all ranks."""
    scores = data(6, 3)
    scores[4, 1] = -torch.inf
    found = on_ranks(gloo, scores, (4, 2))
    torch.testing.assert_close(found, published(scores))
    assert found[4, 1] == 0
    for value in (torch.nan, torch.inf):
        scores[4, 1] = value
        assert on_ranks(gloo, scores, (4, 2))[:, 1].isnan().all()


def test_it_has_no_gradient():
    """The scores may require one on some ranks only, and grad mode may be off on some."""

    def body(x, trained, context):
        x = x.clone().requires_grad_(trained)
        with context():
            q = sinkhorn(x)
        assert not q.requires_grad
        assert torch.is_grad_enabled()
        return q

    parts, want = data(6, 3).split([4, 0, 2]), published(data(6, 3))
    contexts = [torch.enable_grad, torch.no_grad, torch.inference_mode]
    for run in (truth, rules, gloo):
        torch.testing.assert_close(torch.cat(run(body, parts, [True, False, True], contexts)), want)


@runs_on("rules", "gloo")
def test_torch_func(run):
    def body(x, stack):
        def loss(x):
            return (sinkhorn(x) * x).sum()

        assert torch.equal(torch.func.grad(loss)(x), sinkhorn(x))
        q, tangent = torch.func.jvp(sinkhorn, (x,), (torch.ones_like(x),))
        assert not tangent.any()
        return q, torch.vmap(sinkhorn)(stack), torch.vmap(torch.func.grad(loss))(stack)

    scores, stack = data(8, 3), data(2, 8, 3, seed=1)
    found = run(body, scores.split([5, 3]), stack.split([5, 3], 1))
    torch.testing.assert_close(torch.cat([q for q, *_ in found]), published(scores))
    for i in (1, 2):
        right = torch.stack([published(x) for x in stack])
        torch.testing.assert_close(torch.cat([each[i] for each in found], 1), right)


def test_joint_backward():
    def body(x):
        x = x.clone().requires_grad_()
        with dc.joint_backward() as joint:
            joint((sinkhorn(x) * x).sum()).backward()
        return x.grad

    torch.testing.assert_close(torch.cat(rules(body, data(8, 3).split([5, 3]))), published(data(8, 3)))


def test_what_is_sent():
    """Two numbers, then K in each iteration: gathered from the other ranks for logsumexp, then in an all_reduce."""

    def body(x):
        pair = new_group([0, 1])
        alone = [new_group([r]) for r in range(2)][dc.get_rank()]
        own = gloo_messages(lambda: sinkhorn(x, group=alone))
        assert not own  # a group of one
        torch.testing.assert_close(sinkhorn(x, group=alone), published(x))
        return gloo_messages(lambda: sinkhorn(x, iterations=4, group=pair))

    for messages in gloo(body, data(7, 5).split([3, 4])):
        assert [(name, n) for name, n in messages if name != "recv"] == [("send", 2), ("send", 5)] + 3 * [
            ("all_reduce", 5)
        ]


@runs_on("rules", "gloo")
def test_a_part_of_the_ranks(run):
    """Rank 1 takes no part, and its own group is another one."""

    def body(x):
        pair, other = new_group([0, 2]), new_group([1])
        return sinkhorn(x, group=other if dc.get_rank() == 1 else pair)

    scores = data(9, 4)
    first, alone, last = run(body, scores.split([4, 2, 3]))
    torch.testing.assert_close(alone, published(scores[4:6]))
    torch.testing.assert_close(torch.cat([first, last]), published(torch.cat([scores[:4], scores[6:]])))


@compiles
def test_compiles_to_one_graph():
    """Also with another temperature, as of a schedule, and for an empty batch."""
    compiled = one_graph(sinkhorn)
    for rows, epsilon in ((6, 0.05), (7, 0.06), (0, 0.07)):
        scores = data(rows, 4)
        torch.testing.assert_close(compiled(scores, epsilon=epsilon), published(scores, epsilon))


@compiles
@pytest.mark.slow
def test_a_compiled_rank_sends_the_messages_of_an_eager_one():
    def body(x, compiled):
        return (one_graph(sinkhorn) if compiled else sinkhorn)(x, epsilon=0.1)

    for compiled in ([True, True], [True, False]):
        found = torch.cat(gloo(body, data(7, 4).split([4, 3]), compiled))
        torch.testing.assert_close(found, published(data(7, 4), 0.1))
    large = data(7, 4, dtype=torch.float32).clamp(-1, 1) * 3e38  # a graph cannot change its dtype, so no rank does
    assert torch.cat(gloo(body, large.split([4, 3]), compiled)).isnan().any()


# ── SwAV ─────────────────────────────────────────────────────────────────────────────────────────────────


class SwAV(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(4, 3, bias=False, dtype=torch.double)
        self.prototypes = torch.nn.Parameter(data(3, 5, seed=7))

    def forward(self, x):
        return F.normalize(self.encoder(x)) @ F.normalize(self.prototypes, dim=0)


def swapped(assign, scores1, scores2):
    """Each view's prediction of the other's assignment, summed over the rows."""
    q1, q2 = assign(scores1.detach()), assign(scores2.detach())
    return -(q1 * (scores2 / 0.1).log_softmax(1) + q2 * (scores1 / 0.1).log_softmax(1)).sum() / 2


@pytest.mark.parametrize("on", ["simulated", "gloo", "mpi"])
def test_gradient_of_swav(on):
    model = SwAV()

    def loss(assign):
        def program(x1, x2):
            total = dc.all_reduce(torch.tensor(len(x1)))
            return swapped(assign, model(x1), model(x2)) * dc.get_world_size() / total

        return program

    assert_matches_single_process(
        loss(sinkhorn),
        lambda x1, x2: swapped(published, model(x1), model(x2)) / len(x1),
        lambda n: (data(n, 4), data(n, 4, seed=1)),
        module=model,
        sizes=[(5, 0, 3)] if on != "simulated" else [(4, 4), (5, 0, 3)],
        order=2,
        on=[on],
        tolerance=1e-10,
    )


def test_assignments_of_own_rows_are_found_out():
    """What a forgotten collective gives."""
    model = SwAV()

    def own(x1, x2):
        return swapped(published, model(x1), model(x2)) / len(x1)

    with pytest.raises(GradientMismatchError):
        assert_matches_single_process(
            own, own, lambda n: (data(n, 4), data(n, 4, seed=1)), module=model, sizes=[(4, 4)], on=["simulated"]
        )


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────


def test_no_row_on_any_rank_is_an_error_on_every_rank():
    expected = "sinkhorn: batch: got 0 rows on all ranks together, expected at least 1; skip this step on all ranks"
    for ranks in (1, 3):
        found = rules(lambda x: refusal(ValueError, sinkhorn, x), [torch.empty(0, 3)] * ranks)
        assert found == [expected] * ranks


DIFFERENT = [
    ([torch.ones(2, 3), torch.ones(2, 4)], [{}, {}]),
    ([torch.ones(2, 3), torch.ones(0, 4)], [{}, {}]),
    ([torch.ones(2, 3), torch.ones(2, 3).double()], [{}, {}]),
    ([torch.ones(2, 3)] * 2, [{}, {"epsilon": 0.1}]),
    ([torch.ones(2, 3)] * 2, [{}, {"iterations": 4}]),
]


@pytest.mark.parametrize(("scores", "options"), DIFFERENT)
def test_ranks_that_differ(scores, options):
    def body(x, options, checked=False):
        with dc.check_mode(checked):
            text = refusal(dc.CollectiveMismatchError, sinkhorn, x, **options)
        return text, dc.all_reduce(torch.ones(1)).item()

    for run in (rules, gloo):
        for text, after in run(body, scores, options):
            assert text.startswith(
                "sinkhorn: the ranks differ in K, dtype, epsilon or iterations; sinkhorn: tree: rank 1"
            )
            assert after == 2
    for text, _ in rules(lambda x, options: body(x, options, True), scores, options):
        if options[1]:
            assert "sinkhorn(epsilon=0.05, iterations=3) at" in text
        else:
            assert "the ranks differ in K" in text or "disagree" in text


def test_equal_numbers_of_different_types():
    found = rules(lambda x, epsilon: sinkhorn(x, epsilon=epsilon), [torch.ones(2, 3)] * 2, [1, 1.0])
    assert torch.equal(*found)


def test_check_mode_passes_what_is_equal():
    def body(x):
        with dc.check_mode():
            return sinkhorn(x, epsilon=numpy.float64(0.05), iterations=numpy.int64(3))

    torch.testing.assert_close(torch.cat(gloo(body, data(6, 3).split([6, 0]))), published(data(6, 3)))


X = torch.ones(4, 3)
BAD = [
    (X[0], {}, r"scores: got shape \(3,\), expected \(b, K\): a number for each sample and prototype; scores of one s"),
    (X[:, :0], {}, r"scores: got shape \(4, 0\), expected \(b, K\)"),
    (X[None], {}, r"scores: got shape \(1, 4, 3\), expected \(b, K\)"),
    (X.long(), {}, r"scores: got torch.int64, expected a floating-point tensor; pass x.float\(\)"),
    ([[1.0]], {}, "scores: got list, expected a tensor"),
    (X, {"epsilon": 0.0}, "epsilon: got 0.0, expected a finite number above 0; scores are divided by it"),
    (X, {"epsilon": -1}, "epsilon: got -1, expected a finite number above 0"),
    (X, {"epsilon": torch.inf}, "epsilon: got inf, expected a finite number above 0"),
    (X, {"epsilon": torch.nan}, "epsilon: got nan, expected a finite number above 0"),
    (X, {"epsilon": "0.05"}, "epsilon: got str, expected a number"),
    (X, {"iterations": 0}, "iterations: got 0, expected an integer of at least 1"),
    (X, {"iterations": 2.0}, "iterations: got 2.0, expected an integer of at least 1"),
    (X, {"iterations": True}, "iterations: got True, expected an integer of at least 1"),
]


@pytest.mark.parametrize(("scores", "options", "text"), BAD)
def test_errors(scores, options, text):
    with pytest.raises((TypeError, ValueError), match=f"^sinkhorn: {text}"):
        sinkhorn(scores, **options)
