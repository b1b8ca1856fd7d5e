"""DistributedDataParallel takes the mean over ranks; nobody divides by the micro-batches."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from trainings import CLIP, RATE, TOKENS, Training, parameters, row_of_the_table
from variants import assert_as_one_process, factors, loop

import diffcoll as dc
from diffcoll.testing import RanksFailedError, spawn


class Within(nn.Module):
    """The loss in the forward of the module that DDP wraps; its encoders, or all of it, are computed again."""

    def __init__(self, model, again=None, **options):
        super().__init__()
        self.model, self.again, self.options = model, again, options

    def forward(self, *batch):
        if self.again == "all":
            return checkpoint(CLIP.loss, self.model, *batch, use_reentrant=False)
        encoders = self.model
        if self.again == "encoders":
            encoders = lambda *batch: checkpoint(self.model, *batch, use_reentrant=False)  # noqa: E731
        return CLIP.loss(encoders, *batch, **self.options)


def returned(model, *batch):
    return model(*batch)


def ddp(wrap=lambda model: model, loss=CLIP.loss, divides=False, sync="last", hook=None, **options):
    """Return a function that trains with DDP around what `wrap` makes of the model."""

    def train(model, updates):
        wrapped = DistributedDataParallel(wrap(model), **options)
        if hook:
            wrapped.register_comm_hook(None, hook)

        def last_only(is_last):
            skipped = sync == "never" or (sync == "last" and not is_last)
            return wrapped.no_sync() if skipped else contextlib.nullcontext()

        loop(wrapped, updates, loss, last_only=last_only, divides=divides)

    return train


def summing(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda sent: sent.value()[0])


def encoders_of(model):
    """The encoders alone, without the scale, which stays a parameter of the loss."""
    encoders = nn.Module()
    encoders.image, encoders.text = model.image, model.text
    encoders.forward = lambda image, text: (
        F.normalize(encoders.image(image), dim=1),
        F.normalize(encoders.text(text), dim=1),
    )
    return encoders


def scale_outside(averages):
    def train(model, updates):
        wrapped = DistributedDataParallel(encoders_of(model))
        if averages:
            wrapped.averager = dc.GradientAverager([model.scale])

        def loss(wrapped, *batch):
            return dc.nn.functional.clip_loss(*wrapped(*batch), model.scale.exp())

        loop(wrapped, updates, loss, model.parameters(), divides=True)

    return train


def two_modules(model, updates):
    """Each encoder in a DDP of its own: two forwards, one backward."""
    image, text = DistributedDataParallel(model.image), DistributedDataParallel(model.text)
    model.averager = dc.GradientAverager([model.scale])

    def loss(model, *batch):
        features = (F.normalize(f(x), dim=1) for f, x in zip((image, text), batch, strict=True))
        return dc.nn.functional.clip_loss(*features, model.scale.exp())

    loop(model, updates, loss, divides=True)


def resumed(model, updates):
    """Half of the updates, then the rest in a new model that loads the saved one."""
    ddp(divides=True)(model, updates[:10])
    saved, again = model.state_dict(), CLIP.model()
    again.load_state_dict(saved)
    ddp(divides=True)(again, updates[10:])
    return parameters(again)


RIGHT = {
    "plain": ddp(divides=True),
    "unused parameters are looked for": ddp(divides=True, find_unused_parameters=True),
    "views of buckets": ddp(divides=True, gradient_as_bucket_view=True),
    "small buckets": ddp(Within, returned, divides=True, bucket_cap_mb=1e-4),
    "static graph": ddp(divides=True, static_graph=True, sync="always"),
    "each micro-batch is sent": ddp(divides=True, sync="always"),
    "the hook of an all-reduce": ddp(divides=True, hook=default_hooks.allreduce_hook),
    "the loss within": ddp(Within, returned, divides=True),
    "encoders computed again": ddp(lambda model: Within(model, "encoders"), returned, divides=True),
    "the loss computed again": ddp(lambda model: Within(model, "all"), returned, divides=True),
    "scale outside, averaged": scale_outside(averages=True),
    "two modules": two_modules,
    "resumed": resumed,
    "a sum over ranks": ddp(
        lambda model: Within(model, summed=True), returned, divides=True, hook=summing
    ),
}  # fmt: skip


def test_pairs_as_one_process():
    assert_as_one_process(CLIP, {way: RIGHT[way] for way in ("plain", "static graph", "a sum over ranks")}, 1)


def test_pairs_as_one_process_with_micro_batches():
    assert_as_one_process(CLIP, RIGHT, 2)


def test_tokens_as_one_process():
    """The mean over the tokens of all micro-batches: its shares are added, so nothing is divided."""

    def train(model, updates):
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), RATE)
        for update in updates:
            total = dc.all_reduce(sum((labels != -100).sum() for _, labels in update))
            for k, batch in enumerate(update, 1):
                with wrapped.no_sync() if k < len(update) else contextlib.nullcontext():
                    TOKENS.loss(wrapped, *batch, total=total).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_as_one_process(TOKENS, {"DDP": train}, 2)


def test_factors_of_the_table():
    for row, train in {
        "[DDP](ddp.md)": ddp(),
        "[DDP with a hook that sums](ddp.md)": ddp(hook=summing),
    }.items():
        found = [factors(CLIP, {"": train}, micro_batches)[""] for micro_batches in (1, 2)]
        assert found == [float(cell) for cell in row_of_the_table(row)[:2]]


def test_factors_of_mistakes():
    found = factors(
        CLIP,
        {
            "sum": ddp(lambda model: Within(model, summed=True), returned, divides=True),
            "never sent": ddp(sync="never"),
            "scale outside": scale_outside(averages=False),
            "static graph": ddp(static_graph=True),
            "half precision": ddp(divides=True, hook=default_hooks.fp16_compress_hook),
        },
        2,
    )
    encoders = dict.fromkeys(("image.weight", "image.bias", "text.weight", "text.bias"), 1.0)
    assert found["sum"] == 0.333333
    assert found["never sent"] == "differs"
    assert found["scale outside"] == {"scale": "differs", **encoders}
    assert "expect_autograd_hooks_ INTERNAL ASSERT FAILED" in found["static graph"]
    assert "wrong" in found["half precision"].values()  # by rounding: see below


def relative_error(rank, steps, register):
    torch.manual_seed(0)
    wrapped, alone = DistributedDataParallel(nn.Linear(40, 30)), nn.Linear(40, 30)
    alone.load_state_dict(wrapped.module.state_dict())
    register(wrapped)
    x, errors = torch.randn(3, 7, 40), []
    for _ in range(steps):
        wrapped.zero_grad()
        wrapped(x[rank]).square().mean().backward()
        alone.zero_grad()
        alone(x.flatten(0, 1)).square().mean().backward()
        found, right = wrapped.module.weight.grad, alone.weight.grad
        errors.append(float((found - right).norm() / right.norm()))
    return errors


def test_hooks_that_compress_round():
    """Half precision; PowerSGD in rank 1, whose first two steps here are all-reduces."""

    def power_sgd(wrapped):
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def half(wrapped):
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)

    (error, *_), *_ = spawn(lambda rank: relative_error(rank, 1, half), range(3))
    assert 1e-4 < error < 1e-3
    *_, errors = spawn(lambda rank: relative_error(rank, 3, power_sgd), range(3))
    assert max(errors[:2]) < 1e-6 and errors[2] > 0.1


def test_delayed_parameters():
    """They are sent when the hooked parameter's gradient is computed, be theirs complete or not, in float32 alone.

    Nobody waits for the message, so the test does.
    """

    def wait(gradient):
        time.sleep(0.5)

    def gradient(rank, delayed, hooked, dtype=torch.float32):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to(dtype)
        net[0].register_forward_hook(lambda module, inputs, output: output.register_hook(wait) and None)
        wrapped = DistributedDataParallel(
            net,
            delay_all_reduce_named_params=[(delayed, net.get_parameter(delayed))],
            param_to_hook_all_reduce=net.get_parameter(hooked),
        )
        wrapped(torch.full((4, 3), rank + 1.0, dtype=dtype)).mean().backward()
        wait(None)
        return net.get_parameter(delayed).grad

    def mean(rank, name):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        sum(net(torch.full((4, 3), s + 1.0)).mean() for s in range(3)).backward()
        return net.get_parameter(name).grad / 3

    (right,) = spawn(mean, [0], ["1.weight"])
    for found in spawn(lambda rank: gradient(rank, "1.weight", "0.bias"), range(3)):
        torch.testing.assert_close(found, right)
    (right,) = spawn(mean, [0], ["0.weight"])
    for rank, found in enumerate(spawn(lambda rank: gradient(rank, "0.weight", "1.bias"), range(3))):
        torch.testing.assert_close(found, right * (rank + 1) / 2)  # its own: the mean is that of two ones
    with pytest.raises(RanksFailedError, match="assign a gradient with dtype 'float' to a tensor with grad_dtype"):
        spawn(lambda rank: gradient(rank, "1.weight", "0.bias", torch.float64), range(3))


def test_join_with_a_collective_in_the_loss_ends_a_rank():
    """A rank that has run out answers DDP's all-reduces, and gets the loss's collectives."""

    def train(batches):
        wrapped = DistributedDataParallel(nn.Linear(4, 3))
        with wrapped.join():
            for _ in range(batches):
                views = (wrapped(torch.randn(4, 4)) for _ in range(2))
                dc.nn.functional.nt_xent_loss(*views).backward()

    with pytest.raises(RanksFailedError):
        spawn(train, [3, 2, 3], timeout=20)


class Wide(nn.Module):
    """Layers of 0.7 MB each: torch.compile splits the graph where DDP's buckets of 1 MB end."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(300, 300, dtype=torch.double) for _ in range(4)))

    def forward(self, first, second):
        first, second = self.layers(first).tanh(), self.layers(second).tanh()
        return dc.nn.functional.nt_xent_loss(first, second, temperature=0.5)


def views_of(rows, generator):
    return tuple(torch.randn(rows, 300, generator=generator, dtype=torch.double) for _ in range(2))


WIDE = Training(Wide, views_of, returned, lambda model, batches: model(*batches[0]))


def test_compiled_with_the_loss_within():
    """The DDP module is compiled: graphs end where buckets do, and one has the loss's collective."""

    def compiled(model, updates):
        graphs = []

        def backend(graph, inputs):
            graphs.append(" ".join(str(node.target) for node in graph.graph.nodes))
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
        loop(torch.compile(wrapped, backend=backend), updates, returned, model.parameters())
        assert sum("linear" in graph for graph in graphs) == 4  # two layers in each
        assert any("diffcoll" in graph for graph in graphs)
        return parameters(model)

    assert factors(WIDE, {"compiled": compiled}) == {"compiled": 1}
