"""Parameters that are left out, that no rank uses, and that have sparse gradients."""

import pytest
import torch
from runs import gloo
from torch import nn
from training import LEFT, RUNS, attach, everywhere, on_two, refused

import diffcoll as dc


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        return self.tied(self.head(self.body(x)))


def made(r):
    torch.manual_seed(r)
    net = Net()
    net.count += r
    return net


HEAD = ["head.weight", "tied.weight", "head.bias", "count"]


@everywhere
@pytest.mark.parametrize("ignore", [HEAD, lambda name, _: name in HEAD], ids=["names", "function"])
def test_ignored_parameters(where, ignore):
    """Neither broadcast nor averaged; they may be replaced and may differ in shape; the others are averaged."""

    def body(r):
        net = made(r)
        if r:
            net.head.bias = nn.Parameter(torch.zeros(1))
        dc.GradientAverager(net, ignore=ignore if callable(ignore) else iter(ignore))
        assert net.count == r
        x = torch.randn(3, 2)
        own = torch.autograd.grad(net(x).sum(), list(net.parameters()))
        net(x).sum().backward()
        mean = dc.all_reduce([own[0], own[1]], "mean")
        torch.testing.assert_close([net.body.weight.grad, net.body.bias.grad], mean)
        assert torch.equal(net.head.weight.grad, own[2])
        net.head.bias = nn.Parameter(torch.ones(2))
        net(x).sum().backward()
        return net.body.weight.detach(), net.head.weight.detach()

    (body0, head0), (body1, head1) = RUNS[where](body, range(2))
    assert torch.equal(body0, body1)
    assert not torch.equal(head0, head1)


def test_two_averagers_of_one_module():
    """Each ignores what the other averages."""

    def body(r):
        net = made(r)
        first = dc.GradientAverager(net, ignore=HEAD)
        dc.GradientAverager(net, reduction="sum", ignore=lambda name, _: name.startswith("body"))
        own = [torch.autograd.grad(net(torch.ones(1, 2) * r).sum(), list(net.parameters())), first][0]
        net(torch.ones(1, 2) * r).sum().backward()
        expected = dc.all_reduce(own[:2], "mean") + dc.all_reduce(own[2:])
        torch.testing.assert_close([p.grad for p in net.parameters()], list(expected))
        return True

    assert gloo(body, range(2)) == [True, True]


@on_two
def test_ignored_on_one_rank(where):
    def body(r, ignore):
        return refused(lambda: dc.GradientAverager(made(r), ignore=ignore), dc.CollectiveMismatchError)

    first = RUNS[where](body, range(2), [None, ["body.bias"]])
    assert first[0] == first[1]
    assert "index 1:\n  rank 0: body.bias (2,) torch.float32\n  rank 1: head.weight (2, 2) torch.float32" in first[0]
    (last, _) = RUNS[where](body, range(2), [["head.bias"], None])
    assert "rank 0: nothing\n  rank 1: head.bias (2,) torch.float32" in last


def test_a_module_that_lists_its_parameters_itself():
    """Without the option `remove_duplicate`, and without some of its parameters: as losses of TorchRL do."""

    class Listing(Net):
        def named_parameters(self, prefix="", recurse=True):
            return (pair for pair in super().named_parameters(prefix, recurse) if not pair[0].startswith("head"))

    def body(r):
        torch.manual_seed(r)
        net = Listing()
        dc.GradientAverager(net)
        net(torch.randn(3, 2)).sum().backward()
        return net.body.weight.grad, net.head.bias.detach()

    (grad0, left0), (grad1, left1) = RUNS["rules"](body, range(2))
    assert torch.equal(grad0, grad1) and not torch.equal(left0, left1)


WRONG = [
    (["body.bais"], ValueError, "got 'body.bais', expected a name such as body.bias"),
    (["head"], ValueError, "got 'head', expected a name such as head.weight, head.bias"),
    ("body.bias", TypeError, "got 'body.bias', expected names of parameters or buffers, or a function (name, tensor)"),
    ([torch.ones(1)], TypeError, "got tensor([1.]), expected names of parameters or buffers"),
    (3, TypeError, "got 3, expected names of parameters or buffers"),
    (
        ["head.weight"],
        ValueError,
        "got head.weight, which is the same parameter as tied.weight, expected all names of a shared parameter, or no",
    ),
    (lambda name, _: name == "tied.weight", ValueError, "got tied.weight, which is the same parameter as head.weight"),
]


@pytest.mark.parametrize(("ignore", "error", "text"), WRONG)
def test_wrong_arguments(ignore, error, text):
    found = refused(lambda: dc.GradientAverager(Net(), ignore=ignore), error)
    assert found.startswith(f"GradientAverager: ignore: {text}")


def test_lists_and_everything_ignored():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    dc.GradientAverager([("a", a), ("b", b)], ignore=["b"])
    dc.GradientAverager([b], ignore=[])  # not taken over
    with pytest.raises(ValueError, match="module_or_params: got nothing, expected at least one parameter"):
        dc.GradientAverager([a, b], ignore=["0", "1"])


# ── unused ───────────────────────────────────────────────────────────────────────────────────────────────


@everywhere
def test_unused_on_all_ranks_is_an_error_on_all(where):
    """Also after zero_grad(set_to_none=False), and not if a rank or a micro-batch has used the parameter."""

    def body(r):
        layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
        averager = dc.GradientAverager(layers, unused="error", bucket_mb=1e-5, reduction="sum")
        x, texts = torch.ones(1, 2), []
        with averager.no_sync():
            sum(layer(x) for layer in (layers[2:] if r == 1 else layers[2:3])).sum().backward()
        layers[r](x).sum().backward()
        for set_to_none in (True, False):
            layers.zero_grad(set_to_none=set_to_none)
            texts.append(refused(layers[2 * r](x).sum().backward))
            assert layers[0].weight.grad.tolist() == [[1.0, 1.0]] * 2
            sum(layer(x) for layer in layers).sum().backward()
        layers.zero_grad()
        for layer in layers:
            layer.weight.grad = torch.ones(2, 2) * r
        averager.synchronize()
        assert layers[0].weight.grad.tolist() == [[1.0, 1.0]] * 2
        layers[1].requires_grad_(False)
        layers[3].requires_grad_(False)
        layers.zero_grad()
        layers[2 * r](x).sum().backward()
        return texts

    expected = (
        "GradientAverager: unused: got 2 of 4 parameters that no rank's loss has used since the last reduction, "
        'expected none with unused="error": 3.weight, 1.weight; use them, freeze them by requires_grad_(False), or '
        "leave them out by ignore=[…]"
    )
    assert RUNS[where](body, range(2)) == [[expected] * 2] * 2


def test_unused_alone_and_wrong():
    net = Net()
    dc.GradientAverager(net, unused="error")
    with pytest.raises(RuntimeError, match=r"got 2 of 4 parameters .*: head.bias, head.weight; use them"):
        net.body(torch.ones(1, 2)).sum().backward()
    text = refused(lambda: dc.GradientAverager(net, unused=True), ValueError)
    assert text == 'GradientAverager: unused: got True, expected "allow" or "error"'


# ── sparse gradients ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("where", "reduction"), [*((where, "mean") for where in RUNS), ("rules", "weighted")])
def test_sparse_gradients_on_one_rank(where, reduction):
    """An error on all ranks at the end of backward, also while ranks wait for each other in the loss."""

    def body(r):
        embedding, linear = nn.Embedding(4, 2, sparse=r == 1), nn.Linear(2, 2)
        with torch.no_grad():
            embedding.weight.fill_(1.0)
        _, backward = attach([*linear.parameters(), embedding.weight], reduction, bucket_mb=1e-5)
        loss = embedding(dc.all_reduce(linear(embedding(torch.tensor([r])))).long() * 0).sum()
        loss = loss + dc.all_reduce(linear(embedding(torch.tensor([r, 1])))).square().sum()
        return refused(lambda: backward(loss, torch.tensor(2.0)), TypeError if r == 1 else RuntimeError)

    texts = RUNS[where](body, range(2))
    assert texts[1] == (
        "GradientAverager: 2: got sparse gradients, expected dense ones; use sparse=False in nn.Embedding, or leave it "
        "out by ignore=…"
    )
    assert LEFT in texts[0]


def test_an_ignored_sparse_embedding():
    net = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"module_or_params: 0: got sparse gradients.* or leave it out by ignore="):
        dc.GradientAverager(net)
    dc.GradientAverager(net, ignore=["0.weight"])
    net(torch.tensor([1, 2])).sum().backward()
    assert net[0].weight.grad.is_sparse
    bare = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(TypeError, match="module_or_params: Embedding: got sparse gradients"):
        dc.GradientAverager(bare)


def test_a_gradient_that_is_added_to_is_used():
    net = Net()
    dc.GradientAverager(net, unused="error")
    for _ in range(2):  # without zero_grad
        net(torch.ones(1, 2)).sum().backward()
    text = refused(net.body(torch.ones(1, 2)).sum().backward)
    assert "got 2 of 4 parameters" in text and ": head.bias, head.weight; use them" in text
