"""share and token_mean: the mean over the items of all ranks, micro-batches and axes, as on one process."""

from math import inf, nan

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from references import data, holds, mean_of_tokens
from releases import compiles
from runs import gloo, gloo_messages, refusal, rules, runs_on

import diffcoll as dc
from diffcoll.nn.functional import share, token_mean
from diffcoll.testing import new_group, spawn

SIZES = ((6,), (4, 4), (5, 0, 3), (0, 4, 1))


def tokens(n):
    """Losses (n, 3), and weights, of which some are zero."""
    weight = data(n, 3, seed=1).square() * (data(n, 3, seed=2) > -0.5)
    return data(n, 3), weight


def loss_of(losses):
    """Some function of tokens with a second derivative."""
    return (losses.sin() + losses.square()).exp()


@pytest.mark.parametrize("rank_reduction", ["mean", "sum"])
def test_token_mean_is_that_of_one_process(rank_reduction):
    def ours(x, w):
        return token_mean(loss_of(x), w, rank_reduction=rank_reduction) + token_mean(
            x.cos(), w[:, :1], rank_reduction=rank_reduction
        )

    def whole(x, w):
        return mean_of_tokens(loss_of(x), w) + mean_of_tokens(x.cos(), w[:, :1])

    on = ["simulated", "gloo"] if rank_reduction == "mean" else ["simulated"]
    holds(ours, whole, tokens, constant=["w"], sizes=SIZES, rank_reduction=rank_reduction, on=on)


def test_share_is_that_of_one_process():
    def ours(x, w):
        return share(loss_of(x).mean(), len(x)) + share((loss_of(x) * w).sum() / w.sum(), w.sum())

    def whole(x, w):
        return loss_of(x).mean() + mean_of_tokens(loss_of(x), w)

    holds(ours, whole, tokens, constant=["w"], sizes=((6,), (5, 3), (1, 2, 4)), on=["simulated", "gloo"])


@pytest.mark.parametrize("kind", ["bool", "int", "half", "none", "number"])
def test_kinds_of_weights(kind):
    """A bool mask, counts, weights in half precision, none, and one weight for all."""
    weights = {
        "bool": lambda w: w > 0.5,
        "int": lambda w: (3 * w).int(),
        "half": lambda w: w.bfloat16(),
        "none": lambda w: None,
        "number": lambda w: torch.tensor(0.25),
    }[kind]
    x, w = tokens(7)
    one = weights(w)
    want = mean_of_tokens(x, torch.ones(()) if one is None else one.double())
    parts = rules(lambda x, w: token_mean(x, weights(w), rank_reduction="sum"), x.split([4, 0, 3]), w.split([4, 0, 3]))
    torch.testing.assert_close(sum(parts), want)


def test_an_axis_of_rows_and_one_of_positions():
    """(dp 2) × (cp 2), with uneven rows and positions; and a group in a list is a group."""
    x, w = tokens(5)
    want = torch.func.grad(lambda x: mean_of_tokens(loss_of(x), w))(x)

    def body(r, x, w):
        dp = [new_group([cp, 2 + cp]) for cp in range(2)][r % 2]
        cp = [new_group([2 * dp, 2 * dp + 1]) for dp in range(2)][r // 2]
        whole = token_mean(x, w, groups=[None], rank_reduction="sum"), token_mean(x, w, rank_reduction="sum")
        assert torch.equal(*whole)
        found = [
            torch.func.grad(lambda x, g=groups: token_mean(loss_of(x), w, groups=g))(x)
            for groups in ([dp, cp], (cp, dp))
        ]
        torch.testing.assert_close(*found)
        alone = token_mean(x, w + 1, groups=[])
        torch.testing.assert_close(alone, mean_of_tokens(x, w + 1))
        total = (w.sum() + 1).item()
        torch.testing.assert_close(share(x.sum(), 2, total=total, groups=dp), 2 * x.sum() * 2 / total)
        return found[0], refusal(ValueError, token_mean, x, groups=[dp, None])

    def cut(t):
        return [part for rows in t.split([4, 1]) for part in rows.split([1, 2], 1)]

    for run in (rules, gloo):
        found, texts = zip(*run(body, range(4), cut(x), cut(w)), strict=True)
        torch.testing.assert_close([4 * g for g in cut(want)], list(found))
        ranks = [[0, 2], [1, 3], [0, 2], [1, 3]]
        assert all(
            text == f"token_mean: groups: got two groups with the ranks {of}, expected groups that have only this rank "
            "in common; name each axis of the mesh once"
            for text, of in zip(texts, ranks, strict=True)
        )


@runs_on("rules", "gloo", "mpi")
def test_micro_batches_of_different_numbers(run):
    """With a total nothing is sent, also in check mode; a rank has no micro-batch."""
    x, w = tokens(8)
    total = w.sum().item()

    def body(x, w):
        x, found = x.clone().requires_grad_(), torch.zeros(())
        with dc.check_mode():
            for each, weight in zip(x.split(2), w.split(2), strict=True):
                if len(each):
                    found = found + token_mean(loss_of(each), weight, total=total)
                    found = found + share(each.mean(), each.numel(), total=torch.tensor([24]))
        return torch.autograd.grad(found, x, materialize_grads=True)[0] if len(x) else x.detach()

    want = torch.func.grad(lambda x: mean_of_tokens(loss_of(x), w) + x.mean())(x)
    found = run(body, x.split([5, 0, 3]), w.split([5, 0, 3]))
    torch.testing.assert_close(torch.cat(found) / 3, want)


def test_what_is_sent():
    """One number for each group, none backward and none with a total; one rank sends nothing."""

    def body(x):
        values = []
        forward = gloo_messages(lambda: values.append(token_mean(x.requires_grad_(), torch.ones(3))))
        more = [lambda: share(x.sum(), 3, total=9), values[0].backward, lambda: share(x.sum(), 1, groups=[])]
        return forward, [gloo_messages(call) for call in more]

    for forward, others in gloo(body, data(6).split(3)):
        assert {n for _, n in forward} == {1} and others == [[], [], []]


def test_a_loss_of_weight_zero_may_be_nan():
    """An empty mean on one rank, and losses that are not finite; their gradients are zero."""

    def body(x, target):
        x = x.clone().requires_grad_()
        counts = target >= 0
        losses = torch.where(counts, F.cross_entropy(x, target, reduction="none"), nan)
        shares = share(F.cross_entropy(x, target), counts.sum()), token_mean(losses, counts)
        return torch.stack(shares).detach(), *(torch.autograd.grad(s, x, retain_graph=True)[0] for s in shares)

    x, target = data(7, 4), torch.tensor([1, 3, 0, -100, -100, 2, -100])
    want = torch.func.grad(lambda x: F.cross_entropy(x, target))(x)
    values, *gradients = zip(*rules(body, x.split([3, 2, 2]), target.split([3, 2, 2])), strict=True)
    torch.testing.assert_close(sum(values) / 3, F.cross_entropy(x, target).expand(2))
    for found in gradients:
        torch.testing.assert_close(torch.cat(found) / 3, want)
    for bad in (inf, -inf, nan):
        losses = torch.tensor([bad, 3.0])
        assert share(losses[0], 0) == 0 and torch.func.grad(share)(losses[0], 0) == 0
        assert torch.func.grad(token_mean)(losses, torch.tensor([0.0, 2.0])).tolist() == [0, 1]
        assert not token_mean(losses).isfinite()  # where it counts, it counts


@pytest.mark.parametrize("total", [None, 0, torch.tensor(0)], ids=str)
def test_all_weights_zero_give_zeros(total):
    def body(x):
        x = x.clone().requires_grad_()
        loss = token_mean(x, torch.zeros(x.shape), total=total) + share(x.sum(), 0, total=total)
        loss.backward()
        return loss.item(), x.grad.tolist()

    assert rules(lambda x: token_mean(x, total=total), [torch.empty(0)] * 2) == [0, 0]
    assert rules(body, [torch.tensor([nan, 2.0]), torch.tensor([1.0])]) == [(0, [0, 0]), (0, [0])]


def test_counts_that_float32_rounds():
    def of_one(n, dtype):
        return share(torch.ones((), dtype=dtype), n, rank_reduction="sum")

    many = 2**24
    assert rules(of_one, [many, 1, 1], [torch.float32] * 3)[1] == torch.tensor(1 / (many + 2))
    assert torch.tensor(1 / (many + 2)) != torch.tensor(1 / many)
    found = rules(of_one, [2**40, 1, torch.tensor(2**40)], [torch.float64] * 3)
    assert found[1] == 1 / (2**41 + 1)


@pytest.mark.parametrize("scale", [1e-60, 1e60])
def test_weights_that_float32_does_not_represent(scale):
    x, w = tokens(6)
    parts = rules(lambda x, w: token_mean(x.float(), scale * w), x.split([4, 2]), w.split([4, 2]))
    torch.testing.assert_close(sum(parts).double() / 2, mean_of_tokens(x, w), rtol=1e-6, atol=0)


def test_half_precision_is_computed_in_float32():
    x = (data(3000) + 3).bfloat16()
    for dtype in (torch.bfloat16, torch.float16):
        parts = x.to(dtype).split([2000, 1000])
        plain = rules(token_mean, parts)
        with torch.autocast("cpu", dtype=dtype):
            torch.testing.assert_close([2 * token_mean(part, total=3000) for part in parts], plain)
        assert plain[0].dtype == torch.float32
        torch.testing.assert_close(sum(plain).double() / 2, x.to(dtype).double().mean(), rtol=1e-6, atol=0)
        assert share(x[0].to(dtype), 1).dtype == torch.float32


def test_a_rank_that_trains_nothing_or_under_no_grad_sends_the_same():
    def body(x, r):
        x = x.clone().requires_grad_(r != 0)
        with torch.set_grad_enabled(r != 1):
            value = token_mean(x, torch.ones(len(x), requires_grad=r == 1)) + share(x.mean(), len(x))
        if r == 2:
            value.backward()
            return x.grad
        assert not value.requires_grad
        return None

    for run in (rules, gloo):
        *_, g = run(body, data(8).split([3, 4, 1]), range(3))
        torch.testing.assert_close(g, torch.full((1,), 2 * 3 / 8, dtype=torch.double))


def test_tensors_of_inference_mode_and_a_joint_backward():
    def body(x, r):
        with torch.inference_mode():
            w, total = torch.ones(len(x), dtype=torch.double), torch.tensor(8)
        x = x.clone().requires_grad_(r == 0)
        with dc.joint_backward() as joint:
            value = token_mean(x, w) + share(x.mean(), w.sum()) + token_mean(x, w, total=total)
            joint(value).backward()
        return x.grad

    g, *others = rules(body, data(8).split([3, 4, 1]), range(3))
    torch.testing.assert_close(g, torch.full((3,), 3 * 3 / 8, dtype=torch.double))
    assert others == [None, None]


# ── transforms ───────────────────────────────────────────────────────────────────────────────────────────


def test_transforms():
    x, w = tokens(6)

    def f(x, w):
        return token_mean(loss_of(x), w)

    def found(x, w):
        each = torch.func.vmap(f)(torch.stack([x, 2 * x]), torch.stack([w, w.flip(1)]))
        per_row = torch.func.vmap(lambda x: share(x.sum(), len(x)), 1)(x)
        forward = torch.func.jvp(lambda x: f(x, w), (x,), (x.cos(),))[1]
        of_weights = torch.func.jvp(lambda w: f(x, w), (w,), (w.cos(),))[1]
        nested = torch.func.grad(lambda x: torch.func.grad(lambda y: f(y, x.square()))(x).sin().sum())(x)
        return torch.func.grad(f)(x, w), each, per_row, forward, of_weights, nested

    def whole(x, w):
        return (loss_of(x) * w).sum() / w.sum()

    rows = rules(found, x.split([4, 2]), w.split([4, 2]))
    gradient, each, per_row, forward, of_weights, nested = zip(*rows, strict=True)
    torch.testing.assert_close(torch.cat(gradient) / 2, torch.func.grad(whole)(x, w))
    torch.testing.assert_close(sum(each) / 2, torch.stack([whole(x, w), whole(2 * x, w.flip(1))]))
    torch.testing.assert_close(sum(per_row) / 2, (x[:4].sum(0) * 4 + x[4:].sum(0) * 2) / 6)
    torch.testing.assert_close(sum(forward) / 2, (torch.func.grad(whole)(x, w) * x.cos()).sum())
    torch.testing.assert_close(sum(of_weights) / 2, (torch.func.grad(whole, 1)(x, w) * w.cos()).sum())
    # A rank's inner loss is N times its part, and the outer derivative of all ranks' weights goes through the total.
    want = torch.func.grad(lambda x: (2 * torch.func.grad(lambda y: whole(y, x.square()))(x)).sin().sum())(x)
    torch.testing.assert_close(torch.cat(nested), want)


def test_batched_weights_that_are_invalid_give_nan():
    def body(x, w):
        return [
            torch.func.vmap(lambda w, t=total: token_mean(x, w, total=t))(w).isnan().tolist() for total in (None, 2)
        ]

    weights = torch.tensor([[1.0, 2.0], [1.0, -1.0], [nan, 0.0]])
    summed, given = zip(*rules(body, [torch.ones(2)] * 2, [weights, torch.ones(3, 2)]), strict=True)
    assert summed == ([False, True, True],) * 2
    assert given == ([False, True, True], [False] * 3)


def compiled(x, y):
    """In one graph; the masks, like the numbers of rows, are of this rank."""
    rows = share(y.mean(), len(y)) + share(x.sum(), 2, total=torch.tensor(7), rank_reduction="sum")
    return rows + token_mean(x * y, x > 0) + token_mean(x.exp(), total=30) + token_mean(y.bfloat16(), groups=[None])


@compiles
def test_in_two_graphs_for_all_sizes():
    """A rank sends the same compiled and not; weights on one rank that are invalid are an error of the graph."""

    def body(r):
        torch._dynamo.reset()
        graphs, pairs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager"), []
        in_graphs = torch.compile(compiled, fullgraph=True, backend=graphs)
        for rows in (3 + r, 5, 6 - 2 * r):
            x, y = (data(rows, 4, seed=9 * r + k).requires_grad_() for k in range(2))
            pairs.append([(f(x, y).detach(), *torch.autograd.grad(f(x, y), (x, y))) for f in (compiled, in_graphs)])
        negative = torch.compile(lambda x, w: token_mean(x, w), backend="aot_eager")
        return graphs.frame_count, pairs, refusal(RuntimeError, negative, x, torch.tensor(-1.0 if r else 1.0))

    for graphs, pairs, text in spawn(body, range(2), timeout=100):
        assert graphs == 2
        assert "token_mean: weight or total: got invalid numbers, expected finite non-negative weights" in text
        for eager, in_graph in pairs:
            torch.testing.assert_close(in_graph, eager)
