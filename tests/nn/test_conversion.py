"""Models whose batch norms are converted, also subclasses with their own forward, and back."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from references import data
from releases import compiles, one_graph
from runs import gloo, new_group, refusal, rules
from torch import nn

from diffcoll.nn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm


class WithActivation(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: the forward of batch norm written out, then dropout and an activation."""

    def __init__(self, c, momentum=0.1, **more):
        super().__init__(c, momentum=momentum, **more)
        self.drop, self.act = nn.Identity(), nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x):
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        factor = self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        of_batch, statistics = self.training or self.running_mean is None, (self.running_mean, self.running_var)
        x = F.batch_norm(x, *statistics, self.weight, self.bias, of_batch, factor or 0.0, self.eps)
        return self.act(self.drop(x))


class Conditional(nn.BatchNorm1d):
    """Calls the forward of its base, on a cast of its input, with a second argument."""

    def forward(self, x, *, scale):
        return scale * super().forward(x.double()).sin() + x


class Frozen(nn.BatchNorm2d):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class Adaptive(nn.BatchNorm2d):
    """Normalizes with the batch in evaluation too."""

    def forward(self, x):
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


class Own(nn.BatchNorm2d):
    def forward(self, x):
        return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)


class OfTorch(nn.SyncBatchNorm):
    pass


def network(**more):
    torch.manual_seed(3)
    norms = WithActivation(3, **more), nn.BatchNorm2d(4, **more)
    net = nn.Sequential(nn.Conv2d(2, 3, 1), norms[0], nn.Conv2d(3, 4, 1), norms[1]).double()
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


@pytest.mark.parametrize("more", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str)
@pytest.mark.parametrize("sizes", [(6,), (1, 5), (3, 0, 2)], ids=str)
def test_trains_as_one_process(sizes, more):
    sizes = (3, 1, 2) if "track_running_stats" in more and 0 in sizes else sizes
    x = data(sum(sizes), 2, 2, 3) * 3 + 1
    y, gradients, state, evaluated = steps(network(**more), x)
    ranks = rules(lambda x: steps(convert_sync_batchnorm(network(**more)), x), x.split(sizes))
    ys, gradients_of_ranks, states, of_ranks = zip(*ranks, strict=True)
    torch.testing.assert_close(torch.cat(ys), y)
    torch.testing.assert_close([sum(gs) for gs in zip(*gradients_of_ranks, strict=True)], gradients)
    torch.testing.assert_close(list(states), [state] * len(sizes))
    torch.testing.assert_close(torch.cat(of_ranks), evaluated)


def test_a_forward_that_calls_that_of_its_base_with_more_arguments():
    def body(x, scale):
        layer = convert_sync_batchnorm(Conditional(3).double())
        return layer(x.float(), scale=scale), layer.running_var

    x, whole = data(6, 3).float().double(), Conditional(3).double()
    expected = whole(x.float(), scale=2.0)
    ys, statistics = zip(*rules(body, x.split([1, 5]), [2.0, 2.0]), strict=True)
    torch.testing.assert_close(torch.cat(ys), expected)
    torch.testing.assert_close(list(statistics), [whole.running_var] * 2)


@pytest.mark.parametrize("make", [Adaptive, Frozen])
def test_evaluation(make):
    """A forward may use statistics of the batch, which are of all ranks, in evaluation, or running ones in training."""
    x = data(5, 3, 2, 2)
    found = rules(lambda x: convert_sync_batchnorm(make(3).double()).train(make is Frozen)(x), x.split([2, 3]))
    torch.testing.assert_close(torch.cat(found), make(3).double().train(make is Frozen)(x))


def test_groups():
    def body(x):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        layer = SyncBatchNorm(3, group=mesh["data"]).double()
        twin = copy.deepcopy(layer)
        assert twin.group is layer.group and twin.weight is not layer.weight
        converted = convert_sync_batchnorm(revert_sync_batchnorm(twin), group=mesh["data"])
        everyone = SyncBatchNorm(3, group=new_group([0, 1, 2, 3])).double()
        return layer(x), copy.deepcopy(layer)(x), converted(x), everyone(x)

    x = data(4, 3)
    *of_pairs, of_all = (torch.cat(ys) for ys in zip(*gloo(body, x.split(1)), strict=True))
    torch.testing.assert_close(of_all, F.batch_norm(x, None, None, training=True))
    for ys in of_pairs:
        torch.testing.assert_close(ys[[0, 2]], F.batch_norm(x[[0, 2]], None, None, training=True))


def model():
    shared = nn.BatchNorm2d(4)
    layers = nn.Sequential(shared, nn.BatchNorm1d(2))
    net = nn.Sequential(nn.Conv2d(3, 4, 1), shared, layers, nn.SyncBatchNorm(5), WithActivation(4), nn.BatchNorm3d(2))
    layers[1].eval().weight.requires_grad_(False)
    return net


def test_convert_and_revert():
    """In place: modules keep parameters, buffers, hooks, mode and what they share; copies and pickles are converted."""
    net, calls, x = model(), [], torch.randn(2, 4, 3, 3)
    kinds, tensors = [type(m) for m in net.modules()], [*net.parameters(), *net.buffers()]
    keys, version = net.state_dict().keys(), net[1]._version
    hooks = [layer.register_forward_hook(lambda *_: calls.append(1)) for layer in (net[1], net[4])]
    for _ in range(2):  # the second time changes nothing
        assert convert_sync_batchnorm(net) is net
        synchronized = [net[1], net[2][0], net[2][1], net[3], net[5]]
        assert {type(layer) for layer in synchronized} == {SyncBatchNorm} and net[1] is net[2][0]
        assert isinstance(net[4], WithActivation) and type(net[4]) is not WithActivation and net[4].group is None
        assert net[1].training and not net[2][1].training and not net[2][1].weight.requires_grad
        assert all(a is b for a, b in zip([*net.parameters(), *net.buffers()], tensors, strict=True))
        assert net.state_dict().keys() == keys and net[1]._version == version
    assert net[4](net[1](x)).shape == x.shape and calls == [1, 1]
    for hook, layer in zip(hooks, (net[1], net[4]), strict=True):
        hook.remove()
        twin = pickle.loads(pickle.dumps(layer))
        assert type(twin) is type(layer)
        torch.testing.assert_close(copy.deepcopy(layer)(x), twin(x))

    reverted = revert_sync_batchnorm(copy.deepcopy(net))
    other = type(reverted[3])  # of what was torch's: batch norm for x of any number of dimensions
    assert [other if kind is nn.SyncBatchNorm else kind for kind in kinds] == [type(m) for m in reverted.modules()]
    assert reverted[1] is reverted[2][0] and not {"group", "converted_from"} & {*vars(reverted[1]), *vars(reverted[4])}
    for x in (torch.randn(2, 5), torch.randn(2, 5, 3), torch.randn(2, 5, 2, 2, 2)):
        assert reverted[3](x).shape == x.shape
    refusal(ValueError, reverted[3], torch.randn(5))
    assert type(convert_sync_batchnorm(pickle.loads(pickle.dumps(reverted[3])))) is SyncBatchNorm


def test_what_is_refused():
    replaced = nn.BatchNorm2d(2)
    replaced.forward = lambda x: x
    for refused in (OfTorch(2), nn.LazyBatchNorm2d(), replaced):
        net = nn.Sequential(WithActivation(2), refused)
        text = refusal(TypeError, convert_sync_batchnorm, net)
        assert text.startswith("convert_sync_batchnorm: module: ") and f"{type(refused).__name__} at 1" in text
        assert type(net[0]) is WithActivation
    layer = convert_sync_batchnorm(Own(3).double())  # whose forward is no batch norm
    assert refusal(TypeError, layer, data(4, 3, 2, 2)).startswith("convert_sync_batchnorm: module: ")


@compiles
@pytest.mark.timeout(300)
def test_compiled():
    def body(x):
        found = []
        for compiled in (False, True):
            net, own = convert_sync_batchnorm(network()), x.clone().requires_grad_()
            y = (one_graph(net) if compiled else net)(own)
            y.pow(3).sum().backward()
            found.append((y.detach(), own.grad, [p.grad for p in net.parameters()], dict(net.named_buffers())))
        torch.testing.assert_close(*found)

    gloo(body, data(6, 2, 2, 2).split([4, 2]), timeout=200)
