"""The values that `group` accepts; ranks are always ranks within it."""

import os

import pytest
import torch
import torch.distributed as dist
from releases import keeps_orders
from runs import gloo, new_group, python, runs_on

import diffcoll as dc
from diffcoll.core.groups import resolve


def on_subgroup(r, ranks):
    """Return values and gradients of every collective that names ranks, and of one that does not, on a sub-group."""
    group = new_group(ranks)
    if r not in ranks:
        with pytest.raises(ValueError, match="broadcast: group: "):
            dc.broadcast(torch.ones(1), group=group)
        return None
    me, n = dc.get_rank(group), dc.get_world_size(group)
    found = []
    for call in (
        lambda x: dc.broadcast(x, src=n - 1, group=group),
        lambda x: dc.reduce(x, dst=n - 1, group=group),
        lambda x: dc.gather(x, dst=n - 1, group=group),
        lambda x: dc.scatter(x.expand(n), src=n - 1, group=group),
        lambda x: dc.permute(x, [(n - 1, 0)], group=group),
        lambda x: dc.all_gather(x, group=group),
    ):
        x = torch.tensor([10.0 + r], requires_grad=True)
        y = call(x)
        (y.sum() * (me + 1)).backward()
        found.append((y.tolist(), x.grad.item()))
    return me, found


@runs_on("rules", "gloo", "mpi")
def test_ranks_are_ranks_within_the_group(run):
    """pytorch#130515; the backward of torch.distributed.nn.functional.all_gather sends to wrong ranks on sub-groups."""
    found = run(lambda r: (on_subgroup(r, [1, 2]), on_subgroup(r, [1])), range(3))
    assert [pair for pair, _ in found] == [
        None,
        (0, [([12], 0), ([0], 2), ([], 2), ([12], 0), ([12], 0), ([11, 12], 3)]),
        (1, [([12], 3), ([23], 2), ([11, 12], 2), ([12], 3), ([0], 1), ([11, 12], 3)]),
    ]
    assert [alone for _, alone in found] == [None, (0, [([11], 1)] * 6), None]


@runs_on(*[pytest.param(name, marks=keeps_orders) for name in ("rules", "gloo")], "mpi")
def test_the_order_of_ranks_is_that_of_the_list(run):
    """As in MPI; torch.distributed sorts the ranks by default."""

    def body(r):
        found = on_subgroup(r, [2, 1])
        group = new_group([2, 0, 1])
        named = [*resolve(group, "test").global_ranks]
        return found, named, dc.all_gather(torch.tensor(r), group=group).tolist(), dc.get_rank(group)

    found = run(body, range(3))
    assert [pair for pair, *_ in found] == [
        None,
        (1, [([11], 3), ([23], 2), ([12, 11], 2), ([11], 3), ([0], 1), ([12, 11], 3)]),
        (0, [([11], 0), ([0], 2), ([], 2), ([11], 0), ([11], 0), ([12, 11], 3)]),
    ]
    assert [more for _, *more in found] == [[[2, 0, 1], [2, 0, 1], r] for r in (1, 2, 0)]


def test_device_mesh():
    def body(r):
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(ValueError, match="all_reduce: group: "):
            dc.all_reduce(torch.ones(1), group=mesh)
        line = dist.device_mesh.init_device_mesh("cpu", (4,))
        tp = mesh["tp"]
        return [dc.all_gather(torch.tensor(r), group=g).tolist() for g in (tp, mesh["dp"], line)], dc.get_rank(tp)

    whole = [0, 1, 2, 3]
    assert gloo(body, range(4)) == [
        ([[0, 1], [0, 2], whole], 0),
        ([[0, 1], [1, 3], whole], 1),
        ([[2, 3], [0, 2], whole], 0),
        ([[2, 3], [1, 3], whole], 1),
    ]


@runs_on("rules", "truth", "gloo", "mpi")
def test_default_group(run):
    def body(r):
        pairs = [new_group([0, 1]), new_group([2, 3])]
        seen = [dc.get_world_size()]
        with dc.set_default_group(pairs[r // 2]):
            seen.append(dc.all_gather(torch.tensor(r)).tolist())
        with pytest.raises(KeyError), dc.set_default_group(pairs[r // 2]):
            raise KeyError
        seen.append(dc.get_world_size())
        dc.set_default_group(pairs[r // 2])
        seen.append(dc.get_rank())
        with pytest.raises(ValueError, match="set_default_group: group: "):
            dc.set_default_group(pairs[1 - r // 2])
        seen.append(dc.get_world_size())
        dc.set_default_group(None)
        if "OMPI_COMM_WORLD_SIZE" in os.environ:  # None is torch's default group, which does not exist here
            with pytest.raises(RuntimeError, match="get_world_size: "):
                dc.get_world_size()
            return [*seen, 4]
        return [*seen, dc.get_world_size()]

    assert run(body, range(4)) == [[4, [r // 2 * 2, r // 2 * 2 + 1], 4, r % 2, 2, 4] for r in range(4)]


def test_no_group_is_a_world_of_one():
    assert (dc.get_rank(), dc.get_world_size()) == (0, 1)
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    calls = [dc.all_reduce, dc.all_gather, dc.reduce_scatter, dc.all_to_all, dc.broadcast, dc.reduce, dc.gather]
    calls += [dc.scatter, dc.shift, dc.scan, dc.sum_gradients, dc.split, lambda x: dc.permute(x, [(0, 0)])]
    for call in calls:
        y = call(x)
        assert y.tolist() == [3, 4]
        (g,) = torch.autograd.grad((y * torch.tensor([5.0, 7.0])).sum(), x)
        assert g.tolist() == [5, 7]
    assert dc.permute(x, []).tolist() == [0, 0]
    assert dc.all_gather(torch.tensor(2)).tolist() == [2]


LAUNCHED = """
import diffcoll as dc, pytest, torch
with pytest.raises(RuntimeError, match="all_reduce: {0}=2 .*init_process_group.*set_default_group"):
    dc.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_launched_but_not_connected(variable):
    """Not a group of one rank each: an error that names both remedies."""
    python("-c", LAUNCHED.format(variable), environment={variable: "2"})


def test_groups_that_are_no_more():
    def body(r):
        group = dist.group.WORLD
        dc.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group()
        with pytest.raises(ValueError, match="all_reduce: group: "):
            dc.all_reduce(torch.ones(1), group=group)
        return True

    assert gloo(body, range(2)) == [True, True]
