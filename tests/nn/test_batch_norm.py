"""SyncBatchNorm equals BatchNorm on the whole batch."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from references import data, holds
from runs import gloo, profiled, rules
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import diffcoll as dc
from diffcoll.nn import SyncBatchNorm, batch_norm


def norm(c=3, dtype=torch.double, **more):
    torch.manual_seed(7)
    made = SyncBatchNorm(c, dtype=dtype, **more)
    for p in made.parameters():
        nn.init.normal_(p)
    return made


def on_one(norm, x):
    """torch's batch norm with the parameters and statistics of a norm, whose third derivatives by torch are wrong."""
    norm.num_batches_tracked.add_(1)
    more = norm.weight, norm.bias, True, norm.momentum, norm.eps
    with torch.no_grad():
        by_torch = F.batch_norm(x, norm.running_mean, norm.running_var, *more)
    dims, shape = [d for d in range(x.dim()) if d != 1], [1, -1] + [1] * (x.dim() - 2)
    mean, scale = x.mean(dims, keepdim=True), (x.var(dims, correction=0, keepdim=True) + norm.eps).rsqrt()
    y = (x - mean) * scale * norm.weight.view(shape) + norm.bias.view(shape)
    torch.testing.assert_close(y.detach(), by_torch)
    return y


@pytest.mark.parametrize("trailing", [(), (4,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0])
@pytest.mark.parametrize("order", [1, 2])
def test_equals_batch_norm_of_the_whole_batch(trailing, momentum, order):
    """Of features, sequences, images and volumes."""
    layer = norm(momentum=momentum)
    holds(
        lambda x: layer(x),
        lambda x: on_one(layer, x),
        lambda n: 3 * data(n, 3, *trailing) + 5,
        module=layer,
        sizes=((6,), (5, 3), (1, 1), (5, 0, 3)),
        losses="sum",
        order=order,
    )


@pytest.mark.parametrize("sizes", [(6,), (4, 2), (4, 0, 2), (0, 5)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
@pytest.mark.parametrize("affine", [True, False])
def test_the_function_and_operations_agree(sizes, layout, affine, monkeypatch):
    """Values, gradients and gradients of gradients, to the last digits of float64."""

    def step(x, g):
        layer = norm(momentum=0.3, affine=affine)
        x = x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x.clone()
        x = x.mT if layout == "strided" else x
        xs = [x.requires_grad_(), *layer.parameters()]
        y = layer(x)
        assert layout == "strided" or y.stride() == x.stride()
        first = torch.autograd.grad(y.pow(2).sum(), xs, retain_graph=True)
        again = torch.autograd.grad(y, xs, g, create_graph=True)
        second = torch.autograd.grad(sum((t * t.cos()).sum() for t in again), xs[:2])  # bias has none
        return y.detach(), layer.running_mean, layer.running_var, *first, *second

    def found():
        x, g = data(6, 3, 4, 4)[: sum(sizes)] * 2 + 3, data(6, 3, 4, 4, seed=1)[: sum(sizes)]
        return rules(step, x.split(sizes), g.split(sizes))

    by_function = found()
    monkeypatch.setattr(batch_norm, "_KERNELS", {})
    torch.testing.assert_close(by_function, found(), rtol=1e-9, atol=1e-10)


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────


def test_one_message_in_each_direction():
    def step(x):
        layer = norm()
        x.requires_grad_()
        values = []
        forward = profiled(lambda: values.append(layer(x)))
        backward = profiled(values[0].pow(3).sum().backward)
        of_bias = profiled(layer(x.detach()).sum().backward)
        return forward, backward, of_bias, profiled(layer.eval(), x)

    for forward, backward, *others in gloo(step, [data(2, 3, seed=r) for r in range(2)]):
        assert [name for name, _ in forward] == ["all_gather"]
        assert [name for name, _ in backward] == ["all_reduce"]
        assert others == [[], []]


def test_x_without_gradient_and_a_loss_that_ignores_the_output():
    """Under joint_backward every rank takes part."""

    def joint(x):
        layer, r = norm(), dc.get_rank()
        x = x.clone().requires_grad_(r != 1)
        with dc.joint_backward() as joint:
            y = layer(x)
            joint(torch.zeros(()) if r == 2 else y.pow(3).sum()).backward()
        return x.grad

    x = data(6, 3).requires_grad_()
    on_one(norm(), x)[:5].pow(3).sum().backward()
    first, nothing, last = rules(joint, x.detach().split([3, 2, 1]))
    assert nothing is None
    torch.testing.assert_close((first, last), (x.grad[:3], x.grad[5:]))


@pytest.mark.parametrize("needed", [True, False])
def test_a_rank_that_observes_its_operations_sends_the_same_messages(needed):
    """A dispatch mode disables the Function on its rank alone; x requires a gradient on all ranks or on none."""

    def body(x, observed):
        layer, x = norm(), x.clone().requires_grad_(needed)
        with FlopCounterMode(display=False) if observed else nullcontext():
            y = layer(x)
            y.pow(3).sum().backward()
        return y.detach(), x.grad, layer.weight.grad, layer.running_var

    parts = data(6, 3, 2).split([4, 2])
    torch.testing.assert_close(rules(body, parts, [True, False]), rules(body, parts, [False, False]))


# ── statistics ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("many", [2, 100])
def test_precision_at_a_large_mean(many):
    def body(x):
        layer = SyncBatchNorm(5, momentum=1.0)
        layer(x)
        return layer.running_var.double()

    xs = [(1000 + r + data(many, 5, seed=r)).float() for r in range(3)]
    exact = torch.cat(xs).double().var(0)
    for found in rules(body, xs):
        assert ((found - exact) / exact).abs().max() < 5e-4  # a rounding of a mean of 1000, squared and merged


def test_an_empty_whole_batch_changes_nothing():
    def body(x):
        layer = norm(momentum=None if dc.get_rank() else 0.1)
        before = copy.deepcopy(layer.state_dict())
        y = layer(x.requires_grad_())
        y.sum().backward()
        assert y.shape == x.shape and all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
        return (layer.weight.grad == 0).all() and x.grad.shape == x.shape

    assert all(rules(body, [data(0, 3, 2)] * 3))


def test_the_statistics_of_one_value():
    """One rank has it: as of a constant channel, not by a division by 0."""

    def body(x):
        layer = norm(momentum=1.0)
        layer(x)
        return layer.running_mean.tolist(), layer.running_var.tolist()

    assert (
        rules(body, [data(0, 3), torch.tensor([[1.0, 2.0, 3.0]]).double(), data(0, 3)]) == [([1, 2, 3], [0, 0, 0])] * 3
    )


def test_launches():
    """Of forward, kernels on a GPU; a small layer takes as long as they do."""

    class Launches(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            self.number += not f.is_view
            return f(*args, **(kwargs or {}))

    def body(x):
        layer = norm()
        with Launches() as launches:
            layer(x.requires_grad_())
        return launches.number

    assert rules(body, [data(2, 3, 4), data(3, 3, 4)]) == [23] * 2


def test_on_the_meta_device():
    x = torch.empty(2, 3, 4, 4, device="meta", requires_grad=True)
    for layer in dc.nn.convert_sync_batchnorm(nn.BatchNorm2d(3).to("meta")), SyncBatchNorm(3, device="meta"):
        y = layer(x)
        assert torch.autograd.grad(y.sum(), x)[0].shape == y.shape == x.shape


# ── what else a layer meets ──────────────────────────────────────────────────────────────────────────────


def test_retained_graphs_reuse_frozen_parameters_and_checkpoints():
    """Each backward updates the running statistics of a checkpoint again."""

    def body(x):
        layer = norm()
        layer.weight.requires_grad_(False)
        x = x.clone().requires_grad_()
        y = layer(checkpoint(layer, x, use_reentrant=False))
        first, second = (torch.autograd.grad(y.pow(3).sum(), [x, layer.bias], retain_graph=True) for _ in range(2))
        torch.testing.assert_close(first, second)
        with torch.no_grad():
            assert not layer(x).requires_grad
        assert layer.num_batches_tracked == 5
        return first[0]

    x, layer = data(6, 3).requires_grad_(), norm()
    (expected,) = torch.autograd.grad(on_one(layer, on_one(layer, x)).pow(3).sum(), x)
    torch.testing.assert_close(torch.cat(rules(body, x.detach().split([2, 4]))), expected)


def test_tensors_of_the_user_are_neither_written_nor_read_after_a_change():
    def body(x, g):
        layer, seen = norm(), []
        x = x.clone().requires_grad_()
        x.register_hook(seen.append)
        z, before = x * 1, g.clone()
        y = layer(z)
        y.backward(g, retain_graph=True)
        assert len(seen) == 1 and torch.equal(g, before) and torch.equal(z, x)
        z.add_(1)
        with pytest.raises(RuntimeError):
            y.backward(g)

    rules(body, data(6, 3, 2).split([4, 2]), data(6, 3, 2, seed=1).split([4, 2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("own", [True, False])
def test_half_precision(dtype, own):
    def body(x):
        layer = norm(dtype=dtype if own else torch.float)
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        y.float().pow(3).sum().backward()
        assert y.dtype == x.grad.dtype == dtype and layer.weight.grad.dtype == layer.weight.dtype
        return y, x.grad

    x = (data(64, 3) + 2).to(dtype)
    exact = x.double().requires_grad_()
    y = on_one(norm(), exact)
    y.pow(3).sum().backward()
    for parts, expected in zip(zip(*rules(body, x.split([60, 4])), strict=True), (y, exact.grad), strict=True):
        assert (torch.cat(parts).double() - expected).abs().max() < 0.04 * expected.abs().max()
