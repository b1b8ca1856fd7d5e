"""grad_cache: value and gradients of the plain step, chunk by chunk, with one reduction of gradients per step."""

import contextlib
import types

import pytest
import torch
from runs import gloo, gloo_messages, profiled, refusal, rules
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import diffcoll as dc
from diffcoll.nn import grad_cache
from diffcoll.testing import assert_matches_single_process


class Towers(nn.Module):
    """Two encoders and the scale of their loss."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (
            nn.Sequential(nn.Linear(5, 7), nn.Dropout(dropout), nn.Tanh(), nn.Linear(7, 4)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.double()

    def forward(self, batch):
        return {"text": self.text(batch["text"]), "image": [self.image(batch["image"])]}

    def loss(self, features):
        image, text = features["image"][0], features["text"]
        return dc.nn.functional.clip_loss(image, text, self.scale, normalize=True)


def batch(rows, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {key: torch.randn(rows, 5, generator=g).double() for key in ("image", "text")}


def part(whole, sizes, r):
    return {key: x.split(sizes)[r] for key, x in whole.items()}


def gradients(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def plain(module, x):
    """The step on one process with the whole batch."""
    value = module.loss(module(x))
    value.backward()
    return value.detach(), gradients(module)


SIZES = [(8,), (4, 4), (5, 3), (7, 0, 1), (0, 4, 0)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 3, 8])
def test_it_is_the_plain_step_of_one_process(sizes, chunk_size):
    """Under an averager, with other numbers of chunks on each rank, and on a rank without rows; in two steps."""
    whole = batch(sum(sizes))

    def body(r):
        model = Towers()
        averager = dc.GradientAverager(model)
        mine = part(whole, sizes, r)
        for _ in range(2):
            with averager.reduce():
                value = grad_cache(model, mine, model.loss, chunk_size=chunk_size)
        return value, gradients(model), value.requires_grad

    one = Towers()
    value, right = [plain(one, whole) for _ in range(2)][1]  # gradients of two steps are added
    found = rules(body, range(len(sizes)))
    torch.testing.assert_close(sum(x for x, _, _ in found) / len(sizes), value)
    for _, theirs, requires_grad in found:
        torch.testing.assert_close(theirs, right)
        assert not requires_grad


@pytest.mark.parametrize("on", ["simulated", "gloo"])
def test_gradients_are_those_of_one_process(on):
    """By the harness, which averages gradients itself: the gradients that the step leaves are those of a stand-in."""
    model = Towers()

    def cached(image, text):
        """A loss whose gradients are those that grad_cache leaves in .grad."""
        before = [*model.parameters()]
        x = {"image": image, "text": text}
        value = grad_cache(model, x, model.loss, chunk_size=2)
        left = [p.grad for p in before]
        for p in before:
            p.grad = None
        return value + sum((g * (p - p.detach())).sum() for p, g in zip(before, left, strict=True))

    def single(image, text):
        return model.loss(model({"image": image, "text": text}))

    more = {"sizes": [(5, 3), (5, 0, 3)], "on": [on], "constant": ["image", "text"]}
    assert assert_matches_single_process(cached, single, batch(8), module=model, **more).ok


def steps(r, kind, chunk_size, sizes, whole):
    """The gradients of two steps, and the messages of the second, on gloo."""
    model = Towers()
    mine = part(whole, sizes, r)
    if kind == "averager":
        wrapped, messages, averager = model, profiled, dc.GradientAverager(model)
        block, more = averager.reduce, {}
    else:  # the scale is unused in the last pass
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        messages, block, more = gloo_messages, contextlib.nullcontext, {"no_sync": wrapped.no_sync}

    def step():
        with block():
            if chunk_size is None:
                model.loss(wrapped(mine)).backward()
            else:
                grad_cache(wrapped, mine, model.loss, chunk_size=chunk_size, **more)

    step()
    first = gradients(model)
    model.zero_grad()
    sent = messages(step)
    return first, gradients(model), [(name.partition(" (")[0], size) for name, size in sent]


def on_gloo(kind, chunk_size, sizes):
    whole, n = batch(8), len(sizes)
    found = gloo(steps, range(n), [kind] * n, [chunk_size] * n, [sizes] * n, [whole] * n)
    _, right = plain(Towers(), whole)
    for first, second, _ in found:
        torch.testing.assert_close(first, right)
        torch.testing.assert_close(second, right)
    return [sent for *_, sent in found]


@pytest.mark.parametrize("sizes", [(8,), (7, 1), (7, 0, 1)], ids=str)
def test_messages_are_those_of_the_plain_step(sizes):
    """With up to four chunks, and with none, on a rank."""
    assert on_gloo("averager", 2, sizes) == on_gloo("averager", None, sizes)


@pytest.mark.parametrize("sizes", [(7, 1), (7, 0, 1)], ids=str)
def test_distributed_data_parallel(sizes):
    """All 149 gradients are sent once per step, and flags of the 9 parameters; gloo's threads end in any order."""
    for sent in on_gloo("DDP", 2, sizes):
        assert sorted(each for each in sent if each[0] == "all_reduce") == [("all_reduce", 9), ("all_reduce", 149)]


# ── laws ─────────────────────────────────────────────────────────────────────────────────────────────────


class Recording(nn.Module):
    """Dropout that notes what it has drawn."""

    def __init__(self):
        super().__init__()
        self.weight, self.drawn = nn.Parameter(torch.ones(5, 3)), []

    def forward(self, x):
        self.drawn.append(torch.rand(len(x), 3))
        return (x @ self.weight) * self.drawn[-1]


def test_random_numbers_are_repeated():
    """The second pass draws those of the first; what is drawn afterwards is drawn as if there were no second pass."""
    model, x = Recording(), batch(7)["image"].float()
    torch.manual_seed(3)
    value = grad_cache(model, x, lambda z: z.square().sum() + torch.rand(()), chunk_size=3)
    after = torch.rand(2)
    assert [len(x) for x in model.drawn] == [3, 3, 1] * 2
    assert all(map(torch.equal, model.drawn[:3], model.drawn[3:]))
    torch.manual_seed(3)
    z = (x @ model.weight) * torch.cat([torch.rand(n, 3) for n in (3, 3, 1)])
    right = z.square().sum() + torch.rand(())
    torch.testing.assert_close(value, right.detach())
    torch.testing.assert_close(model.weight.grad, torch.autograd.grad(right, model.weight)[0])
    assert after.equal(torch.rand(2))


@pytest.mark.parametrize("rows", [7, 0])
def test_what_the_loss_does_not_use(rows):
    """A tower whose features it ignores has no gradient; if it ignores all, gradients are zero, as ranks may wait."""
    model, x = Towers(), batch(rows)
    grad_cache(model, x, lambda features: features["text"].square().sum() * model.scale, chunk_size=3)
    assert all(p.grad is None for p in model.image.parameters())
    assert all(p.grad is not None for p in [model.scale, *model.text.parameters()])
    model.zero_grad()
    grad_cache(model, x, lambda features: model.scale * 2, chunk_size=3)
    assert model.scale.grad == 2
    assert all(not p.grad.any() for tower in (model.image, model.text) for p in tower.parameters())


def test_features_without_a_gradient():
    """A frozen tower, and labels that are encoded with the features."""
    model, x, labels = Towers(), batch(7), torch.arange(7) % 3
    model.text.requires_grad_(False)

    def encode(chunk):
        return *model(chunk[0])["image"], chunk[0]["text"] @ torch.ones(5, 4).double(), chunk[1] + 1

    def loss(features):
        assert features[2].equal(labels + 1)
        return dc.nn.functional.info_nce_loss(*features[:2], labels=features[2]) * model.scale

    value = grad_cache(encode, (x, labels), loss, chunk_size=3)
    found = gradients(model)
    model.zero_grad()
    right = loss(encode((x, labels)))
    right.backward()
    torch.testing.assert_close([value, found], [right.detach(), gradients(model)])


def test_under_autocast():
    """Weights that were cast without a graph in the first pass have gradients in the second."""
    model, x = nn.Linear(5, 3), batch(6)["image"].float()

    def loss(z):
        return z.float().square().sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        grad_cache(model, x, loss, chunk_size=6)
        found = gradients(model)
        model.zero_grad()
        loss(model(x)).backward()
    torch.testing.assert_close(found, gradients(model))


def towers_call(**more):
    model = Towers()
    given = {"encode": model, "batch": batch(4), "loss": model.loss, "chunk_size": 2} | more
    return lambda: grad_cache(given.pop("encode"), given.pop("batch"), given.pop("loss"), **given)


WRONG = [
    (towers_call(chunk_size=0), ValueError, "grad_cache: chunk_size: got 0, expected an integer of at least 1"),
    (towers_call(chunk_size=None), TypeError, "grad_cache: chunk_size: got None, expected an integer of at least 1"),
    (
        lambda: towers_call(no_sync=types.SimpleNamespace(no_sync=contextlib.nullcontext))(),
        TypeError,
        "grad_cache: no_sync: got SimpleNamespace, expected a function that returns a context; pass its",
    ),
    (
        torch.no_grad()(towers_call()),
        RuntimeError,
        "grad_cache: grad mode: got off, expected on, since it runs backward; use loss(encode(batch))",
    ),
    (
        towers_call(batch={"image": torch.zeros(4, 5), "text": torch.zeros(3, 5)}),
        ValueError,
        "grad_cache: batch['text']: got 3 rows, expected 4 rows, as batch['image'] has",
    ),
    (towers_call(batch=["a cat"]), TypeError, "grad_cache: batch[0]: got str, expected a tensor"),
    (
        towers_call(encode=lambda x: torch.cat([x["image"]] * 2)),
        ValueError,
        "grad_cache: features: got 4 rows, expected 2, as the chunk of the batch has; return one row for each sample",
    ),
    (
        towers_call(encode=lambda x: (x["image"], torch.tensor(2.0))),
        ValueError,
        "grad_cache: features[1]: got a 0-d tensor, expected at least one dimension",
    ),
    (towers_call(loss=lambda z: None), TypeError, "grad_cache: loss: got NoneType, expected a function that returns a"),
    (towers_call(loss=lambda z: z["text"]), TypeError, "grad_cache: loss: got shape (4, 4), expected a function that"),
    (
        towers_call(encode=lambda x: x["image"], loss=torch.sum),
        RuntimeError,
        "grad_cache: features: got none that requires a gradient, expected at least one; use loss(encode(batch))",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), WRONG)
def test_wrong_arguments(call, error, text):
    assert text in refusal(error, call)
