"""Cross-entropy over a sharded vocabulary against PyTorch's of the whole one."""

from functools import partial

import pytest
import torch
from references import data, holds, vocabulary_cross_entropy
from runs import gloo, mpi, rules
from torch import nn
from torch.autograd import forward_ad

import diffcoll as dc
from diffcoll.nn.functional import vocab_parallel_cross_entropy

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


H, W, B = numbers()


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


def close(found, expected):
    """Assert that the error is below 1e-12 of the largest element."""
    largest = expected.abs().max().item() if expected.numel() and not expected.isnan().any() else 0
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12 * largest, equal_nan=True)


# ── against one process ──────────────────────────────────────────────────────────────────────────────────


def test_to_second_order():
    """By the law: N copies of hidden, of which one variable is made, and N shares of the loss."""
    hidden, target = (
        nn.ParameterDict({"states": data(5, 4)}),
        torch.tensor([7, 0, -100, 1, 0]),
    )  # a rank in the middle has none of them

    def make(rows):
        return data(rows, 4, seed=1), data(rows, seed=2)

    for options in OPTIONS[1::2]:

        def distributed(w, b, options=options):
            h = dc.all_reduce(hidden.states, "mean", grad_placement="replicate")
            return dc.sum_gradients(ours(h, w, b, target, **options)) / dc.get_world_size()

        def single(w, b, options=options):
            return whole(hidden.states, w, b, target, **options)

        sizes = [(8,), (3, 5), (5, 0, 3), (0, 8, 0), (2, 3, 3)]
        holds(distributed, single, make, module=hidden, sizes=sizes, losses="sum")


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


@pytest.mark.parametrize(
    ("run", "case"), [*((rules, case) for case in CASES), (gloo, "an empty shard"), (mpi, "an empty shard")]
)
def test_it_is_the_loss_of_one_process(run, case):
    sizes, (hidden, weight, bias, *target), options = CASES[case]

    def body(*mine):
        return [gradients(*mine, *target, **o) for o in options]

    ranks = run(body, [hidden] * len(sizes), weight.split(sizes), bias.split(sizes))
    for o, of_ranks in zip(options, zip(*ranks, strict=True), strict=True):
        y, *right = gradients(hidden, weight, bias, *target, loss=whole, **o)
        losses, of_hidden, *of_shards = zip(*of_ranks, strict=True)
        for found, expected in (
            *((loss, y) for loss in losses),
            *((g, right[0]) for g in of_hidden),
            *zip(map(torch.cat, of_shards), right[1:], strict=True),
        ):
            close(found, expected)


def test_integers_of_all_sizes():
    expected = ours(H, W)
    for dtype in (torch.int8, torch.int16, torch.int32):
        assert ours(H, W, target=TARGET.to(dtype)) == expected
    target = torch.where(TARGET < 0, 255, TARGET)
    assert ours(H, W, target=target.to(torch.uint8), ignore_index=255) == expected
    with pytest.raises(ValueError, match="target"):  # what −100 becomes in this dtype
        ours(H, W, target=torch.full((2, 3), 156, dtype=torch.uint8))


# ── magnitudes and dtypes ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_logit_that_is_not_finite_is_seen_in_the_loss_and_its_gradients(value, smoothing):
    """As in PyTorch, also if it is the target's and the loss would otherwise be 0."""
    bias = torch.cat([torch.full((1,), value), B[1:]])

    def body(w, b):
        return gradients(H, w, b, reduction="none", label_smoothing=smoothing)

    keep = TARGET != -100
    for loss, gradient, *_ in rules(body, W.split([4, 5]), bias.split([4, 5])):
        assert not loss[keep].isfinite().any() and loss[0, 0].isnan() and loss[0, 2] == 0
        assert gradient[0, 0].isnan().all()


def test_a_small_loss_keeps_its_digits():
    """Of 1e-7 in float32, where log Z − s would be 0."""
    h, w, target = torch.eye(3), 17 * torch.eye(3), torch.arange(3)
    expected = whole(h.double(), w.double(), target=target)
    for found in rules(lambda w: ours(h, w, target=target).double(), w.split([1, 2])):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype, chunk_size):
    options, (h, w, b) = {"label_smoothing": 0.1, "z_loss": 0.01}, numbers(dtype=dtype)
    loss = torch.autocast("cpu", dtype=torch.bfloat16)(partial(ours, chunk_size=chunk_size, **options))
    expected, *right = gradients(*(x.double() for x in (h, w, b)), loss=whole, **options)
    ranks = rules(lambda w, b: gradients(h, w, b, loss=loss), w.split([4, 5]), b.split([4, 5]))
    values, of_hidden, *of_shards = zip(*ranks, strict=True)
    for value in values:
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)
    for found, g in zip([of_hidden[0], *map(torch.cat, of_shards)], right, strict=True):
        assert found.dtype == dtype
        assert (found.double() - g).norm() < 3 * torch.finfo(dtype).eps / 2 * g.norm()


def test_half_precision_on_tensor_cores(cores):
    test_half_precision_is_computed_in_float32(torch.float16, 3)


# ── transforms ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_tangents_and_batches(chunk_size):
    """Forward mode outside of torch.func, and batches of hidden states and targets."""
    batch = torch.stack([H, 2 * H]), torch.stack([TARGET, TARGET.flip(0)])

    def body(w, b, tangent, loss=ours):
        loss = partial(loss, label_smoothing=0.1, z_loss=0.1, chunk_size=chunk_size)
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(loss(H, forward_ad.make_dual(w, tangent), b)).tangent
        return found, torch.func.vmap(lambda h, t: torch.func.grad(loss)(h, w, b, t))(*batch)

    for found in rules(body, *(x.split([4, 0, 5]) for x in (W, B, W.sin()))):
        torch.testing.assert_close(found, body(W, B, W.sin(), whole))


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bad", [9, -1, 1 << 40])
def test_a_target_outside_the_vocabulary_is_an_error_on_all_ranks(bad):
    def body(w):
        with pytest.raises(ValueError, match="target"):
            ours(H, w, target=TARGET.masked_fill(TARGET == 8, bad))

    rules(body, W.split([4, 5]))


@pytest.mark.parametrize("differs", ["target", "hidden", "reduction"])
def test_ranks_with_different_tokens_in_check_mode(differs):
    """Equal ones pass."""
    hidden, weight, _ = numbers()

    def body(r, weight):
        given = {"hidden": hidden + r * (differs == "hidden"), "target": TARGET.clone()}
        given["target"][0] = r * (differs == "target")
        reduction = "sum" if r and differs == "reduction" else "mean"
        with dc.check_mode():
            ours(hidden, weight)
            with pytest.raises(dc.CollectiveMismatchError, match="vocab_parallel_cross_entropy"):
                ours(given["hidden"], weight, target=given["target"], reduction=reduction)

    rules(body, range(2), weight.split([4, len(weight) - 4]))
