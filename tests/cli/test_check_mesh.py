"""`diffcoll check` of sharded programs, and of tensors that the ranks share."""

import pytest

CODE = """
import torch, diffcoll as dc
from torch import nn
from torch.distributed.tensor import Replicate, Shard

net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


class Mlp(nn.Module):
    def __init__(self, mesh, f):
        super().__init__()
        self.f = f
        self.add_module("0", nn.Linear(4, 6 // mesh.size()).double())
        self.add_module("2", nn.Linear(6 // mesh.size(), 3).double())

    def forward(self, x):
        up, down = self._modules["0"], self._modules["2"]
        y = torch.tanh(up(dc.sum_gradients(x) if self.f else x)) @ down.weight.T
        return dc.all_reduce(y, grad_placement="replicate") + down.bias


def right(module, mesh):
    return Mlp(mesh, True)


def without_f(module, mesh):
    return Mlp(mesh, False)


def loss(module, x, mask):
    return (module(x) * mask).square().mean()


def batch(rows):
    return torch.randn(rows, 4, dtype=torch.float64), torch.rand(rows, 3, dtype=torch.float64)


placements = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}


def layers(x, w, v, f=dc.sum_gradients):
    return dc.all_reduce(torch.tanh(f(x) @ w) @ v, grad_placement="replicate").square().mean()


def unsummed(x, w, v):
    return layers(x, w, v, lambda x: x)


def pieces(rows):
    return {name: torch.randn(*shape).double() for name, shape in (("w", (4, 3)), ("x", (5, 4)), ("v", (3, 2)))}


shared = {"x": Replicate(), "output": Replicate()}
wrong = 3
"""


@pytest.fixture(autouse=True)
def code(folder):
    (folder / "sharded.py").write_text(CODE)


LOSS = "sharded:loss --against loss --module net"


def test_a_sharded_program(run):
    status, out, err = run(f"{LOSS} --mesh tp=2 tp=3 --shard right --placements placements --constant mask")
    assert (status, err) == (0, "")
    assert "nothing reduced afterwards: right" in out and "mesh tp=2: right" in out and "mesh tp=3: right" in out
    status, out, _ = run(f"{LOSS} --mesh tp=2 --shard without_f --sizes 6", "--html", "page.html")
    assert status == 1
    assert "x: one rank's part of a sum over tp; the sum is right" in out and "mask: " not in out
    with open("page.html") as page:
        assert "mesh tp=2" in page.read()


def test_what_ranks_share(run):
    """Rank 0's numbers are those of the variable that all ranks have."""
    status, out, err = run("sharded:layers --batch pieces --placements shared --sizes 1,1 1,1,1")
    assert (status, err) == (0, "") and "joint graph" not in out
    status, out, _ = run("sharded:unsummed --batch pieces --placements shared --sizes 1,1,1")
    assert status == 1 and "x: one rank's part of a sum over the ranks" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sharded:loss --mesh tp=2", "argument --mesh: got [{'tp': 2}] without --against, expected both"),
        (f"{LOSS} --mesh tp=2 --rank-reduction mean", "got 'mean' with --mesh, expected mean or sum by axis of tp"),
        (f"{LOSS} --mesh tp=0", "argument --mesh: got 'tp=0', expected sizes of axes, such as tp=2"),
        (f"{LOSS} --mesh tp", "argument --mesh: got 'tp', expected sizes of axes, such as tp=2"),
        (f"{LOSS} --shard right", "argument --shard: got 'right' without --mesh, expected both"),
        (f"{LOSS} --placements placements", "argument --placements: got 'placements' without --mesh, expected both"),
        (f"{LOSS} --rank-reduction tp=mean", "argument --rank-reduction: got 'tp=mean', expected mean, sum or any"),
        (f"{LOSS} --mesh tp=2 --shard nothing", "argument --shard: got 'nothing', expected a name in"),
        (f"{LOSS} --mesh tp=2 --placements wrong --shard right", "placements: got 3, expected placements by the name"),
        ("sharded:layers --batch pieces --placements wrong", "placements: got 3, expected placements by the name"),
        ("sharded:layers --batch pieces --timeout 0", "argument --timeout: got '0', expected an integer from 1"),
    ],
)
def test_wrong_arguments(run, words, said):
    status, out, err = run(words)
    assert (status, out) == (2, "") and said in " ".join(err.split())
