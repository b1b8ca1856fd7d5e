"""Cross-entropy over a sharded vocabulary against PyTorch's of the whole one."""

import copy
import pickle
from functools import partial

import pytest
import torch
from references import data, holds, vocabulary_cross_entropy
from runs import gloo, gloo_messages, mpi, rules
from torch import nn
from torch.distributed.tensor import Shard

import diffcoll as dc
import diffcoll.nn as nn_
from diffcoll.nn.functional import vocab_parallel_cross_entropy
from diffcoll.testing import assert_matches_single_process

TARGET = torch.tensor([[0, 8, -100], [5, 5, 3]])
OPTIONS = [
    {},
    {"label_smoothing": 0.3, "z_loss": 0.01, "reduction": "sum"},
    {"label_smoothing": 1.0, "ignore_index": 5, "reduction": "none"},
    {"label_smoothing": 0.1, "z_loss": 0.2, "chunk_size": 2},
]


def numbers(rows=9, dims=4, dtype=torch.double):
    """Hidden states of six tokens, weight and bias of a vocabulary."""
    return tuple(
        data(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate([(2, 3, dims), (rows, dims), (rows,)])
    )


def ours(hidden, weight, bias=None, target=TARGET, **options):
    target = target.masked_fill(target == -100, options.get("ignore_index", -100))
    return vocab_parallel_cross_entropy(hidden, weight, target, bias_shard=bias, **options)


def whole(hidden, weight, bias=None, target=TARGET, chunk_size=None, sizes=None, **options):
    target = target.masked_fill(target == -100, options.get("ignore_index", -100))
    return vocabulary_cross_entropy(hidden, weight, target, bias, **options)


def gradients(hidden, weight, bias, target=TARGET, loss=ours, **options):
    """Loss, and the gradients of hidden, weight and bias."""
    xs = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    y = loss(*xs, target, **options)
    return y.detach(), *torch.autograd.grad(y.sum(), xs)


def held(run, sizes, hidden, weight, bias, target=TARGET, options=({},)):
    """Assert that ranks with these numbers of rows compute what one process computes, for each of the options."""
    n = len(sizes)

    def body(*mine):
        return [gradients(*mine, target, **o) for o in options]

    ranks = run(body, [hidden] * n, weight.split(sizes), bias.split(sizes))
    for i, o in enumerate(options):
        y, *gs = gradients(hidden, weight, bias, target, whole, **o)
        for found, to_hidden, *_ in (each[i] for each in ranks):
            close(found, y)
            close(to_hidden, gs[0])
        for k in (1, 2):
            close(torch.cat([each[i][k + 1] for each in ranks]), gs[k])


def close(found, expected):
    """Assert that the error is below 1e-12 of the largest element."""
    largest = expected.abs().max().item() if expected.numel() and not expected.isnan().any() else 0
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12 * largest, equal_nan=True)


# ── against one process ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("on", ["simulated", pytest.param("gloo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_check_of_sharded_programs(options, on):
    """Value and hidden's gradient are the same on all ranks, those of weight and bias are split as they are."""
    assert assert_matches_single_process(
        lambda h, w, b: ours(h, w, b, **options),
        lambda h, w, b: whole(h, w, b, **options),
        numbers(),
        ranks=[{"tp": 3}] if on == "simulated" else [{"tp": 3}, {"tp": 9}],
        placements={"w": {"tp": Shard(0)}, "b": {"tp": Shard(0)}},
        rank_reduction={},
        on=[on],
    ).ok


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.states = nn.Parameter(data(5, 4))


@pytest.mark.parametrize("on", ["simulated", pytest.param("gloo", marks=pytest.mark.slow)])
def test_to_second_order(on):
    """By the law: N copies of hidden, of which one variable is made, and N shares of the loss."""
    hidden, target = Hidden(), torch.tensor([7, 0, -100, 1, 0])  # a rank in the middle has none of them

    def distributed(w, b, **options):
        h = dc.all_reduce(hidden.states, "mean", grad_placement="replicate")
        return dc.sum_gradients(ours(h, w, b, target, **options)) / dc.get_world_size()

    def single(w, b, **options):
        return whole(hidden.states, w, b, target, **options)

    def make(rows):
        return data(rows, 4, seed=1), data(rows, seed=2)

    more = {"module": hidden, "sizes": [(8,), (3, 5), (5, 0, 3), (0, 8, 0), (2, 3, 3)], "on": [on]}
    for options in OPTIONS[1::2]:
        functions = (partial(f, **options) for f in (distributed, single))
        holds(*functions, make, rank_reduction="sum", **more)


H, W, B = numbers()
IGNORED = torch.full_like(TARGET, -100)
EXCLUDED = torch.cat([torch.full((4,), -torch.inf), B[4:]])
#: name → sizes of shards, arguments, options.
CASES = {
    "one rank": ([9], (H, W, B), OPTIONS),
    "uneven": ([1, 8], (H, W, B), OPTIONS),
    "an empty shard": ([4, 0, 5], (H, W, B), OPTIONS),
    "the first shard is empty": ([0, 9], (H, W, B), OPTIONS),
    "a vocabulary of one row": ([0, 1, 0], (*numbers(1), torch.tensor([[0, 0, -100], [-100, 0, 0]])), OPTIONS),
    "one token": ([4, 5], (H[0, 0], W, B, torch.tensor(7)), OPTIONS),
    "no token": ([4, 5], (H[:0], W, B, TARGET[:0]), OPTIONS),
    "all tokens are ignored": ([4, 5], (H, W, B, IGNORED), [{**o, "ignore_index": -100} for o in OPTIONS]),
    "a shard of words that a bias excludes": (
        [4, 5],
        (H, W, EXCLUDED, TARGET.masked_fill(TARGET < 4, 6)),
        [{}, {"chunk_size": 3}],
    ),
    "small logits": ([4, 0, 5], (1e-8 * H, W, 1e-8 * B), OPTIONS[:2]),
    "large logits": ([4, 0, 5], (1e15 * H, W, 1e15 * B), OPTIONS[:2]),
    "known sizes": ([4, 5], (H, W, B), [{"sizes": [4, 5]}]),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_loss_of_one_process(case):
    sizes, numbers, options = CASES[case]
    held(rules, sizes, *numbers, options=options)


@pytest.mark.parametrize("run", [gloo, mpi])
def test_on_processes(run):
    held(run, [4, 0, 5], H, W, B, options=OPTIONS)


def test_integers_of_all_sizes():
    h, w, _ = numbers()
    expected = ours(h, w)
    for dtype in (torch.int8, torch.int16, torch.int32):
        assert ours(h, w, target=TARGET.to(dtype)) == expected
    target = torch.where(TARGET < 0, 255, TARGET)
    assert ours(h, w, target=target.to(torch.uint8), ignore_index=255) == expected
    with pytest.raises(ValueError, match="target"):  # what −100 becomes in this dtype
        vocab_parallel_cross_entropy(h, w, torch.full((2, 3), 156, dtype=torch.uint8))


# ── magnitudes and dtypes ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_logit_that_is_not_finite_is_seen_in_the_loss_and_its_gradients(value, smoothing):
    """As in PyTorch, also if it is the target's and the loss would otherwise be 0."""
    h, w, b = numbers()
    b[0] = value

    def body(w, b):
        leaf = h.clone().requires_grad_()
        loss = ours(leaf, w, b, reduction="none", label_smoothing=smoothing)
        return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]

    keep = TARGET != -100
    for loss, gradient in rules(body, w.split([4, 5]), b.split([4, 5])):
        assert not loss[keep].isfinite().any() and loss[0, 0].isnan() and loss[0, 2] == 0
        assert gradient[0, 0].isnan().all()


def test_a_small_loss_keeps_its_digits():
    """Of 1e-7 in float32, where log Z − s would be 0."""
    h, w = torch.eye(3), torch.diag(torch.tensor([17.0, 17.0, 17.0]))
    found = rules(lambda w: ours(h, w, target=torch.arange(3)), w.split([1, 2]))
    torch.testing.assert_close(
        found[0].double(), whole(h.double(), w.double(), target=torch.arange(3)), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_half_precision_is_computed_in_float32(chunk_size):
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    loss = autocast(partial(ours, chunk_size=chunk_size, **options))
    for dtype in (torch.bfloat16, torch.float16):
        h, w, b = numbers(dtype=dtype)
        expected, *right = gradients(*(x.double() for x in (h, w, b)), loss=whole, **options)

        def body(w, b, h=h):
            return gradients(h, w, b, loss=loss)

        ranks = rules(body, w.split([4, 5]), b.split([4, 5]))
        for value, *found in ranks:
            assert value.dtype == torch.float32 and {g.dtype for g in found} == {dtype}
            torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)
        found = ranks[0][1], *(torch.cat([rank[i] for rank in ranks]) for i in (2, 3))
        for g, r in zip(found, right, strict=True):
            assert (g.double() - r).norm() < 3 * torch.finfo(dtype).eps / 2 * r.norm()


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3}], ids=str)
def test_what_is_sent(options):
    """Two numbers, then two for each token, or three; backward one all-reduce of hidden's gradient, if it needs one."""

    def body(r, shard):
        found, alone = [], [torch.distributed.new_group([rank]) for rank in range(2)]
        for group, weight in ((None, shard), (alone[r], W)):
            for needed in (True, False):
                xs, values = [H.clone().requires_grad_(needed), weight.clone().requires_grad_()], []
                forward = gloo_messages(lambda: values.append(ours(*xs, group=group, **options)))  # noqa: B023
                found.append(([n for name, n in forward if name == "send"], gloo_messages(values[0].backward)))
        return found

    each = 2 * 6 + 6 * len(options)
    for found in gloo(body, range(2), W.split([4, 5])):
        assert found[:2] == [([2, each], [("all_reduce", 6 * 4)]), ([2, each], [])]
        assert found[2:] == [([], []), ([], [])]  # one rank alone


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_module(options):
    """Options are its attributes, and what is set last is used; on ranks it is the function, also with a bias."""
    module = nn_.VocabParallelCrossEntropy(**{**options, "z_loss": 0.5})
    module.z_loss = options.get("z_loss", 0.0)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    assert repr(copied) == repr(module) and not list(module.parameters())
    target = TARGET.masked_fill(TARGET == -100, module.ignore_index)
    for found in rules(lambda w, b: copied(H, w, target, bias_shard=b), W.split([4, 5]), B.split([4, 5])):
        close(found, whole(H, W, B, **options))


def test_joint_backward_and_check_mode():
    def body(h, w, b, r):
        xs = [x.clone().requires_grad_() for x in (h, w, b)]
        with dc.check_mode(), dc.joint_backward() as joint:
            loss = ours(*xs)
            joint(loss if r == 0 else loss.clone()).backward()
        return loss.detach(), *(x.grad for x in xs)

    h, w, b = numbers()
    found = rules(body, [h] * 2, w.split([4, 5]), b.split([4, 5]), range(2))
    torch.testing.assert_close(found[0][:2], gradients(h, w, b, loss=whole)[:2])


# ── transforms ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_transforms(chunk_size):
    """Gradient, tangent, and a batch of hidden states, of targets or of weights."""
    h, w, b = numbers()
    batch = torch.stack([h, 2 * h]), torch.stack([TARGET, TARGET.flip(0)])

    def body(w, b, t_w, t_b, loss=ours):
        loss = partial(loss, label_smoothing=0.1, z_loss=0.1, chunk_size=chunk_size)
        gs = torch.func.grad(loss, argnums=(0, 1, 2))(h, w, b)
        tangent = torch.func.jvp(loss, (h, w, b), (h.cos(), t_w, t_b))
        of_hidden = torch.func.vmap(lambda h, t: torch.func.grad(loss)(h, w, b, t))(*batch)
        of_weight = torch.func.vmap(lambda c: loss(h, c * w, b))(torch.tensor([0.5, 2.0]))
        of_both = torch.func.jacrev(lambda h: loss(h, w, b, reduction="none"))(h)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(w, t_w)
            outer = torch.autograd.forward_ad.unpack_dual(loss(h, dual, b)).tangent
        return (gs[0], *tangent, of_hidden, of_weight, of_both, outer), gs[1:]

    sizes = [4, 0, 5]
    found = rules(body, *(x.split(sizes) for x in (w, b, w.sin(), b.sin())))
    shared, own = body(w, b, w.sin(), b.sin(), whole)
    for mine, _ in found:
        torch.testing.assert_close(mine, shared)
    torch.testing.assert_close([torch.cat(pieces) for pieces in zip(*(gs for _, gs in found), strict=True)], list(own))


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bad", [9, -1, 1 << 40])
def test_a_target_outside_the_vocabulary_is_an_error_on_all_ranks(bad):
    def body(w):
        with pytest.raises(ValueError, match="target"):
            ours(numbers()[0], w, target=TARGET.masked_fill(TARGET == 8, bad))

    rules(body, numbers()[1].split([4, 5]))


def test_ranks_whose_shards_have_different_sizes():
    def body(h, w):
        with pytest.raises(dc.CollectiveMismatchError, match="rank 0 has D = 4, rank 1 has 3"):
            ours(h, w)

    h, w, _ = numbers()
    rules(body, [h, h[..., :3]], [w[:4], w[4:, :3]])


BAD = [
    ((H.long(), W, TARGET), {}, TypeError),
    (([1.0], W, TARGET), {}, TypeError),
    ((H, W[:, :3], TARGET), {}, ValueError),
    ((H, W[0, 0], TARGET), {}, ValueError),
    ((H, W, TARGET), {"bias_shard": B[:3]}, ValueError),
    ((H, W, TARGET[:1]), {}, ValueError),
    ((H, W, TARGET.double()), {}, TypeError),
    ((H, W, 3), {}, TypeError),
    ((H, W, TARGET), {"label_smoothing": 1.5}, ValueError),
    ((H, W, TARGET), {"z_loss": -1.0}, ValueError),
    ((H, W, TARGET), {"reduction": "max"}, ValueError),
    ((H, W, TARGET), {"ignore_index": 0.5}, TypeError),
    ((H, W, TARGET), {"chunk_size": 0}, ValueError),
]


@pytest.mark.parametrize(("arguments", "options", "error"), BAD)
def test_errors(arguments, options, error):
    with pytest.raises(error, match="vocab_parallel_cross_entropy"):
        vocab_parallel_cross_entropy(*arguments, **options)
