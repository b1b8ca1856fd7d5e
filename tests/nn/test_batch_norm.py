"""SyncBatchNorm equals BatchNorm on the whole batch."""

import copy
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from references import data, holds
from runs import gloo, new_group, profiled, rules
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import diffcoll as dc
from diffcoll.nn import SyncBatchNorm
from diffcoll.testing import assert_matches_single_process

SIZES = ((6,), (5, 3), (1, 1), (5, 0, 3))


def norm(c=3, dtype=torch.double, **more):
    torch.manual_seed(7)
    made = SyncBatchNorm(c, dtype=dtype, **more)
    for p in made.parameters():
        nn.init.normal_(p)
    return made


def reference(module, kind=nn.BatchNorm2d):
    """BatchNorm with a copy of the state of the module."""
    single = kind(
        module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats, dtype=torch.double
    )
    single.load_state_dict(module.state_dict())
    return single.train(module.training)


class Both(nn.Module):
    """One module that is synchronized when there are several ranks, and torch's on one process."""

    def __init__(self, **more):
        super().__init__()
        self.inner = norm(**more)

    def single(self, x):
        own = self.inner
        if own.num_batches_tracked is not None:
            own.num_batches_tracked.add_(1)
        factor = 1.0 if own.momentum is None else own.momentum  # of the first batch
        return nn.functional.batch_norm(
            x, own.running_mean, own.running_var, own.weight, own.bias, True, factor, own.eps
        )


CASES = {
    "features": ({}, (), SIZES),
    "sequences": ({}, (4,), SIZES),
    "images": ({}, (2, 3), SIZES),
    "volumes": ({}, (2, 1, 3), SIZES),
    "a mean of all batches": ({"momentum": None}, (2,), ((5, 0, 3),)),
    "constant statistics": ({"momentum": 0.0}, (2,), ((5, 0, 3),)),
    "statistics of the last batch": ({"momentum": 1.0}, (2,), ((5, 0, 3),)),
    "no parameters": ({"affine": False}, (2,), ((5, 0, 3),)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", [1, 2])
def test_equals_batch_norm_of_the_whole_batch(case, order):
    more, trailing, sizes = CASES[case]
    module = Both(**more)
    holds(
        lambda x: module.inner(x),
        lambda x: module.single(x),
        lambda n: 3 * data(n, 3, *trailing) + 5,
        module=module,
        sizes=sizes,
        rank_reduction="sum",
        order=order,
    )


def test_mean_of_rank_means_on_gloo():
    """A mean over ranks of the mean losses of equal batches is the gradient of the whole batch's mean loss."""
    module = Both()
    assert_matches_single_process(
        lambda module, x: module.inner(x).pow(3).mean(),
        lambda module, x: module.single(x).pow(3).mean(),
        lambda n: data(n, 3, 2),
        module=module,
        ranks=((4, 4), (2, 2, 2)),
        on=["gloo"],
        order=2,
    )


@pytest.mark.parametrize("sizes", [(6,), (4, 2), (4, 0, 2), (0, 5)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
@pytest.mark.parametrize("affine", [True, False])
def test_the_function_and_operations_agree(sizes, layout, affine, monkeypatch):
    """Values, gradients and gradients of gradients, to the last digits of float64."""
    from diffcoll.nn import batch_norm

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
        return forward, backward, profiled(layer.eval(), x)

    for forward, backward, evaluated in gloo(step, [data(2, 3, seed=r) for r in range(2)]):
        assert [name for name, _ in forward] == ["all_gather"]
        assert [name for name, _ in backward] == ["all_reduce"]
        assert evaluated == []


def test_eval_sends_nothing_and_equals_batch_norm():
    layer = norm().eval()
    layer.running_mean.normal_()
    torch.testing.assert_close(layer(data(2, 3, 4)), reference(layer, nn.BatchNorm1d)(data(2, 3, 4)))
    rules(lambda x: layer(x) if dc.get_rank() else x, [data(2, 3), data(1, 3)])  # one rank alone


def test_without_running_statistics_eval_uses_the_batch_of_all_ranks():
    layer = norm(track_running_stats=False).eval()
    assert layer.running_mean is None
    x = data(4, 3)
    want = nn.functional.batch_norm(x, None, None, layer.weight, layer.bias, True)
    torch.testing.assert_close(torch.cat(rules(layer, x.split([1, 3]))), want)


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
    y = nn.functional.batch_norm(x, None, None, norm().weight, norm().bias, True)
    y[:5].pow(3).sum().backward()
    g0, g1, g2 = rules(joint, x.detach().split([3, 2, 1]))
    assert g1 is None
    torch.testing.assert_close((g0, g2), (x.grad[:3], x.grad[5:]))


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


def test_one_value_for_each_channel():
    """An error in a group of one rank, as in torch; in others the host would wait for the other ranks' counts."""
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        norm()(data(1, 3))
    assert norm().eval()(data(1, 3)).shape == (1, 3)


def test_on_the_meta_device():
    layer = dc.nn.convert_sync_batchnorm(nn.BatchNorm2d(3).to("meta"))
    x = torch.empty(2, 3, 4, 4, device="meta", requires_grad=True)
    y = layer(x)
    assert torch.autograd.grad(y.sum(), x)[0].shape == y.shape == x.shape


# ── what else a layer meets ──────────────────────────────────────────────────────────────────────────────


def test_retained_graphs_reuse_frozen_parameters_and_no_grad():
    def body(x):
        layer = norm()
        layer.weight.requires_grad_(False)
        x = x.clone().requires_grad_()
        y = layer(layer(x)).pow(3).sum()
        first, second = (torch.autograd.grad(y, [x, layer.bias], retain_graph=True) for _ in range(2))
        torch.testing.assert_close(first, second)
        with torch.no_grad():
            assert not layer(x).requires_grad
        layer(x.detach()).sum().backward()  # only the bias requires a gradient: no message in backward
        assert layer.num_batches_tracked == 4
        return first[0]

    x = data(6, 3).requires_grad_()
    single = reference(norm(), nn.BatchNorm1d)
    (want,) = torch.autograd.grad(single(single(x)).pow(3).sum(), [x])
    torch.testing.assert_close(torch.cat(rules(body, x.detach().split([2, 4]))), want)


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
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(g)

    rules(body, data(6, 3, 2).split([4, 2]), data(6, 3, 2, seed=1).split([4, 2]))


def test_a_weight_that_depends_on_x_to_second_order():
    def gradients(layer, x, weight):
        layer.weight = weight
        (g,) = torch.autograd.grad((layer(x) * x.detach().cos()).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad((g * x.detach().sin()).sum(), x)
        return g.detach(), h

    def body(x):
        x = x.clone().requires_grad_()
        layer = norm(3)
        del layer.weight
        return gradients(layer, x, dc.all_reduce(x.square().sum((0, 2, 3))))

    whole = data(9, 3, 2, 2).requires_grad_()
    layer = nn.BatchNorm2d(3, dtype=torch.double)
    del layer.weight
    expected = gradients(layer, whole, whole.square().sum((0, 2, 3)))
    found = rules(body, whole.detach().split([4, 0, 5]))
    for each, of_ranks in zip(expected, zip(*found, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(of_ranks), each)


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
    want = reference(norm(), nn.BatchNorm1d)(exact)
    want.pow(3).sum().backward()
    for name, parts in zip("yg", zip(*rules(body, x.split([60, 4])), strict=True), strict=True):
        expected = want if name == "y" else exact.grad
        error = (torch.cat(parts).double() - expected).abs().max() / expected.abs().max()
        assert error < 0.04, name


def test_checkpoint_updates_running_statistics_twice():
    def body(x, checkpointed):
        layer = norm()
        x = x.clone().requires_grad_()
        y = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        y.pow(3).sum().backward()
        return x.grad, layer.num_batches_tracked

    parts = data(6, 3).split([4, 2])
    for (g, n), (want, one) in zip(rules(body, parts, [True] * 2), rules(body, parts, [False] * 2), strict=True):
        torch.testing.assert_close(g, want)
        assert (n, one) == (2, 1)


def test_transforms_of_torch_func():
    def body(x):
        layer = norm(track_running_stats=False)
        tangent = torch.func.jvp(layer, (x,), (x.cos(),))[1]
        return torch.func.grad(lambda x: layer(x).pow(3).sum())(x), tangent

    x, layer = data(6, 3), norm(track_running_stats=False)

    def single(x):
        return nn.functional.batch_norm(x, None, None, layer.weight, layer.bias, True)

    gradients, tangents = zip(*rules(body, x.split([4, 2])), strict=True)
    torch.testing.assert_close(torch.cat(gradients), torch.func.grad(lambda x: single(x).pow(3).sum())(x))
    torch.testing.assert_close(torch.cat(tangents), torch.func.jvp(single, (x,), (x.cos(),))[1])


def test_groups():
    def body(x):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        layer = norm(group=mesh["data"])
        twin = copy.deepcopy(layer)
        assert twin.group is layer.group and twin.weight is not layer.weight
        converted = dc.nn.convert_sync_batchnorm(dc.nn.revert_sync_batchnorm(twin), group=mesh["data"])
        return layer(x), twin(x), converted(x), norm(group=new_group([0, 1, 2, 3]))(x)

    x = data(4, 3)
    single = partial(nn.functional.batch_norm, running_mean=None, running_var=None, training=True)
    single = partial(single, weight=norm().weight, bias=norm().bias)
    ys = gloo(body, x.split(1))
    for k in range(3):
        torch.testing.assert_close(torch.cat([ys[0][k], ys[2][k]]), single(x[[0, 2]]))
    torch.testing.assert_close(torch.cat([y[3] for y in ys]), single(x))


def test_state_is_that_of_batch_norm():
    layer, single = SyncBatchNorm(3), nn.BatchNorm2d(3)
    assert layer.state_dict().keys() == single.state_dict().keys() and layer._version == single._version
    single.load_state_dict(layer.state_dict())
    assert repr(pickle.loads(pickle.dumps(layer))) == repr(layer)
    assert repr(layer) == repr(single).replace("BatchNorm2d", "SyncBatchNorm")
    assert SyncBatchNorm(3, device="meta", dtype=torch.half).weight.dtype == torch.half


@pytest.mark.parametrize(
    ("x", "error"),
    [(torch.ones(3), ValueError), (torch.ones(2, 4), ValueError), (torch.ones(2, 3).long(), TypeError)],
)
def test_errors(x, error):
    with pytest.raises(error, match="SyncBatchNorm"):
        SyncBatchNorm(3)(x)


# ── conversion ───────────────────────────────────────────────────────────────────────────────────────────


def model():
    shared = nn.BatchNorm2d(4)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), shared, nn.Sequential(shared, nn.BatchNorm1d(2)), nn.SyncBatchNorm(5))
    net[2][1].eval().weight.requires_grad_(False)
    return net


def test_convert_and_revert():
    net = model()
    state, parameters = net.state_dict(), list(net.parameters())
    buffers, calls = list(net.buffers()), []
    handle = net[1].register_forward_hook(lambda *a: calls.append(1))
    converted = dc.nn.convert_sync_batchnorm(net)
    assert converted is net and [type(m) for m in (net[1], net[2][1], net[3])] == [SyncBatchNorm] * 3
    assert net[1] is net[2][0] and net[1].training and not net[2][1].training
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(net.buffers(), buffers, strict=True))
    assert net.state_dict().keys() == state.keys() and not net[2][1].weight.requires_grad
    net[1](torch.randn(2, 4, 3, 3))
    handle.remove()
    net[1](torch.randn(2, 4, 3, 3))
    assert calls == [1]
    assert dc.nn.convert_sync_batchnorm(net)[1] is net[1]

    net = dc.nn.revert_sync_batchnorm(copy.deepcopy(net))
    assert [type(net[1]), type(net[2][1])] == [nn.BatchNorm2d, nn.BatchNorm1d] and net[1] is net[2][0]
    for x in (torch.randn(2, 5), torch.randn(2, 5, 3), torch.randn(2, 5, 2, 2, 2)):
        assert net[3](x).shape == x.shape
    with pytest.raises(ValueError, match="BatchNorm"):
        net[3](torch.randn(5))
    assert type(dc.nn.convert_sync_batchnorm(nn.BatchNorm3d(2))) is SyncBatchNorm
    reverted = dc.nn.revert_sync_batchnorm(SyncBatchNorm(3, momentum=None))
    assert reverted(torch.randn(4, 3)).shape == (4, 3) and not hasattr(reverted, "group")
    assert type(dc.nn.convert_sync_batchnorm(pickle.loads(pickle.dumps(reverted)))) is SyncBatchNorm
