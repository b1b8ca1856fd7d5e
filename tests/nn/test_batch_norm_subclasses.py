"""Subclasses of batch norm with their own forward, converted."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from references import data
from releases import compiles, one_graph
from runs import gloo, rules
from torch import nn

import diffcoll as dc
from diffcoll.nn import SyncBatchNorm


class WithActivation(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: the forward of batch norm written out, then dropout and an activation."""

    def __init__(self, c, momentum=0.1, **more):
        super().__init__(c, momentum=momentum, **more)
        self.drop, self.act = nn.Identity(), nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x):
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if self.momentum is None:
                    factor = 1.0 / float(self.num_batches_tracked)
        if self.training:
            from_batch = True
        else:
            from_batch = (self.running_mean is None) and (self.running_var is None)
        tracked = not self.training or self.track_running_stats
        x = F.batch_norm(
            x,
            self.running_mean if tracked else None,
            self.running_var if tracked else None,
            self.weight,
            self.bias,
            from_batch,
            factor,
            self.eps,
        )
        return self.act(self.drop(x))


class Conditional(nn.BatchNorm1d):
    """Calls the forward of its base, on a cast of its input, with a second argument."""

    def forward(self, x, *, scale):
        return scale * super().forward(x.double()).sin() + x


class Frozen(nn.BatchNorm2d):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


def network(**more):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(2, 3, 1), WithActivation(3, **more), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).double()
    for p in net.parameters():
        nn.init.normal_(p)
    return net


def steps(net, x):
    """Two steps' output, gradients and running statistics, then eval."""
    for _ in range(2):
        y = net(x)
        (y * (1 + x[:, :1])).pow(2).sum().backward()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    return y.detach(), [p.grad for p in net.parameters()], state, net.eval()(x).detach()


def compare(ranks, whole):
    ys, gradients, states, evaluated = zip(*ranks, strict=True)
    torch.testing.assert_close(torch.cat(ys), whole[0])
    torch.testing.assert_close([sum(g) for g in zip(*gradients, strict=True)], whole[1])
    for state in states:
        torch.testing.assert_close(state, whole[2])
    torch.testing.assert_close(torch.cat(evaluated), whole[3])


@pytest.mark.parametrize("more", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str)
@pytest.mark.parametrize("sizes", [(6,), (1, 5), (3, 0, 2)], ids=str)
def test_trains_as_one_process(sizes, more):
    if "track_running_stats" in more and 0 in sizes:
        sizes = (3, 1, 2)
    x = data(sum(sizes), 2, 2, 3) * 3 + 1
    whole = steps(network(**more), x)
    compare(rules(lambda x: steps(dc.nn.convert_sync_batchnorm(network(**more)), x), x.split(sizes)), whole)


def test_a_forward_that_calls_that_of_its_base_with_more_arguments():
    def body(x, scale):
        layer = dc.nn.convert_sync_batchnorm(Conditional(3).double())
        return layer(x.float(), scale=scale), layer.running_var

    x = data(6, 3).float().double()
    whole = Conditional(3).double()
    want = whole(x.float(), scale=2.0)
    (y0, v0), (y1, v1) = rules(body, x.split([1, 5]), [2.0, 2.0])
    torch.testing.assert_close(torch.cat([y0, y1]), want)
    assert torch.equal(v0, v1)
    torch.testing.assert_close(v0, whole.running_var)


def test_a_converted_model_pickles():
    net = dc.nn.convert_sync_batchnorm(network())
    twin = pickle.loads(pickle.dumps(net))
    torch.testing.assert_close(twin(data(2, 2, 3, 3)), net(data(2, 2, 3, 3)))
    assert type(twin[1]) is type(net[1]) and type(dc.nn.revert_sync_batchnorm(twin)[1]) is WithActivation


def test_a_converted_module_keeps_class_tensors_hooks_and_reverts():
    net, calls = network(), []
    state, parameters = net.state_dict(), list(net.parameters())
    net[1].register_forward_hook(lambda *a: calls.append(1))
    old = net[1]
    dc.nn.convert_sync_batchnorm(net)
    assert isinstance(net[1], WithActivation) and net[1] is old and type(net[3]) is SyncBatchNorm
    assert net.state_dict().keys() == state.keys() and net[1].group is None
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert repr(net[1]).startswith("SyncWithActivation(\n  3, eps=")
    net(data(2, 2, 3, 3))
    assert calls == [1]
    converted = net[1]
    assert dc.nn.convert_sync_batchnorm(net)[1] is converted
    torch.testing.assert_close(copy.deepcopy(net)(data(2, 2, 3, 3)), net(data(2, 2, 3, 3)))
    dc.nn.revert_sync_batchnorm(net)
    assert type(net[1]) is WithActivation
    assert not {"group", "converted_from"} & set(net[1].__dict__)


def test_statistics_of_the_batch_in_eval_are_of_all_ranks():
    """Without running statistics, and where a forward asks for them, as in adaptive batch norm."""

    class Adaptive(nn.BatchNorm2d):
        def forward(self, x):
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)

    x = data(5, 3, 2, 2)
    for make in (partial(WithActivation, track_running_stats=False), Adaptive):
        want = make(3).double().eval()(x)
        found = rules(lambda x, make=make: dc.nn.convert_sync_batchnorm(make(3).double()).eval()(x), x.split([2, 3]))
        torch.testing.assert_close(torch.cat(found), want)


def test_frozen_statistics_send_nothing():
    layer = dc.nn.convert_sync_batchnorm(Frozen(3))
    rules(lambda x: layer(x) if dc.get_rank() else x, [data(2, 3, 1, 1).float()] * 2)  # one rank alone


# ── what cannot be converted ─────────────────────────────────────────────────────────────────────────────


class Own(nn.BatchNorm2d):
    def forward(self, x):
        return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)


class OfTorch(nn.SyncBatchNorm):
    pass


def test_a_forward_that_is_no_batch_norm_is_an_error_in_training():
    layer = dc.nn.convert_sync_batchnorm(Own(3).double())
    with pytest.raises(TypeError, match="convert_sync_batchnorm"):
        layer(data(4, 3, 2, 2))


def test_what_is_refused():
    replaced = nn.BatchNorm2d(2)
    replaced.forward = lambda x: x
    for refused in (OfTorch(2), nn.LazyBatchNorm2d(), replaced):
        net = nn.Sequential(WithActivation(2), refused)
        with pytest.raises(TypeError, match=f"convert_sync_batchnorm: module: .*{type(refused).__name__} at 1"):
            dc.nn.convert_sync_batchnorm(net)
        assert type(net[0]) is WithActivation


@compiles
@pytest.mark.timeout(300)
def test_compiled():
    def body(x):
        found = []
        for compiled in (False, True):
            net, own = dc.nn.convert_sync_batchnorm(network()), x.clone().requires_grad_()
            f = one_graph(net) if compiled else net
            y = f(own)
            y.pow(3).sum().backward()
            found.append((y.detach(), own.grad, [p.grad for p in net.parameters()], dict(net.named_buffers())))
        torch.testing.assert_close(*found)

    gloo(body, data(6, 2, 2, 2).split([4, 2]), timeout=200)
