"""broadcast_buffers="once", the default: all ranks start with rank 0's buffers; "never": each with its own."""

import pytest
import torch
from runs import gloo, rules
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import RUNS, on_two, refused

import diffcoll as dc


class Features(nn.Module):
    """Random features, expanded positions, and batch norm."""

    def __init__(self, r):
        super().__init__()
        torch.manual_seed(r)
        self.out = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_var.mul_(r + 2)
        self.register_buffer("directions", torch.randn(4, 3).t())
        self.register_buffer("positions", torch.arange(4).mul(r + 1).expand(3, 4))
        self.register_buffer("offset", torch.tensor([2.0 * r]).expand(5), persistent=False)
        self.register_buffer("seen", torch.tensor([r == 0, r == 1]))


def buffers(net):
    return {name: b.tolist() for name, b in net.named_buffers()}


@on_two
def test_by_default_all_ranks_start_with_the_buffers_of_rank_0(where):
    def body(r):
        nets = [Features(r) for _ in range(4)]
        before = buffers(nets[0])
        dc.GradientAverager(nets[0])
        dc.GradientAverager(nets[1], broadcast_buffers="never")
        dc.GradientAverager(nets[2], ignore=["directions"])
        dc.GradientAverager(nets[3].parameters())
        return before, *map(buffers, nets)

    found = RUNS[where](body, range(3))
    first = found[0][0]
    for before, once, never, ignored, parameters in found:
        assert once == first
        assert never == parameters == before
        assert ignored == first | {"directions": before["directions"]}
    assert found[1][0] != first != found[2][0]


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
@pytest.mark.parametrize("forward", [False, True])
def test_as_with_torchs_own(forward):
    """The same buffers at the start and in forward as with DDP's argument of the same meaning."""

    def body(r):
        nets = [nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)) for _ in range(2)]
        for net in nets:
            net[0].running_mean.fill_(r)
        dc.GradientAverager(nets[0], broadcast_buffers="each forward" if forward else "never")
        seen = []
        wrapped = [nets[0], DistributedDataParallel(nets[1], broadcast_buffers=forward)]
        for net, inner in zip(wrapped, nets, strict=True):
            for k in range(3):
                net(torch.full((2, 3), r * 3.0 + k) * torch.tensor([[1.0], [2.0]])).sum().backward()
                net.zero_grad()
            seen.append(buffers(inner))
        return seen

    found = gloo(body, range(2))
    for own, torchs in found:
        assert own == torchs
    assert found[0][0] != found[1][0]


@pytest.mark.parametrize(
    ("kind", "words"), [("sparse", "torch.sparse_coo"), ("meta", "on the meta device"), ("nested", "nested")]
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_buffers_without_dense_memory(kind, words):
    def body(r):
        net = nn.Linear(2, 2)
        made = {
            "sparse": lambda: torch.eye(3).mul(r + 1).to_sparse(),
            "meta": lambda: torch.ones(2, device="meta"),
            "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(r + 1)]),
        }
        net.register_buffer("odd", made[kind]())
        text = refused(lambda: dc.GradientAverager(net), TypeError)
        dc.GradientAverager(net, ignore=["odd"])
        dc.GradientAverager(net, broadcast_buffers="never")
        net(torch.ones(1, 2) * r).sum().backward()
        return text, net.weight.grad.tolist()

    text = (
        f"GradientAverager: broadcast_buffers: got buffer odd, which is {words}, expected dense tensors with values; "
        "leave it out by ignore=['odd'], or say broadcast_buffers=\"never\""
    )
    assert rules(body, range(3)) == [(text, [[1.0, 1.0]] * 2)] * 3


def test_a_buffer_without_dense_memory_on_one_rank():
    def body(r):
        net = nn.Linear(2, 2)
        net.register_buffer("odd", torch.eye(3).to_sparse() if r == 1 else torch.eye(3))
        with pytest.raises(dc.CollectiveMismatchError, match=r"rank 1: buffer odd torch\.sparse_coo"):
            dc.GradientAverager(net)

    rules(body, range(3))
