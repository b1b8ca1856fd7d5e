"""Calls with async_op in groups that overlap, started in another order on each rank: no start waits for other ranks."""

import torch
from runs import rules, runs_on

import diffcoll as dc
from diffcoll.testing import new_group, spawn

N = 3
CALLS = {
    "all_reduce": lambda x, group: dc.all_reduce(x, group=group, async_op=True),
    "large all_reduce": lambda x, group: dc.all_reduce(x.expand(50_000), group=group, async_op=True),
    "all_gather": lambda x, group: dc.all_gather(x, group=group, async_op=True),
    "max": lambda x, group: dc.all_reduce(x, "max", group=group, async_op=True),
    "broadcast": lambda x, group: dc.broadcast(x, 1, group=group, async_op=True),
    "permute": lambda x, group: dc.permute(x, [(1, 0)], group=group, async_op=True),  # rank 1 receives nothing
}
EXPECTED = {
    "all_reduce": lambda a, b, r: [a + b],
    "large all_reduce": lambda a, b, r: [a + b] * 50_000,
    "all_gather": lambda a, b, r: [a, b],
    "max": lambda a, b, r: [max(a, b)],
    "broadcast": lambda a, b, r: [b],
    "permute": lambda a, b, r: [b if r == a else 0.0],
}


def crosswise(r, name):
    """Rank r starts in the group with its successor, then in that with its predecessor, as the others do."""
    groups = {pair: new_group(pair) for pair in ((0, 1), (1, 2), (2, 0))}  # (2, 0): its rank 0 is rank 2
    x = torch.tensor([float(r)])
    order = [(r, (r + 1) % N), ((r - 1) % N, r)]
    pending = {pair: [CALLS[name](x * k, groups[pair]) for k in (1, 10)] for pair in order}
    found = {}
    for pair in reversed(order):
        found[pair] = [p.wait().tolist() for p in reversed(pending[pair])][::-1]
    whole = [dc.all_reduce(x, group=groups[pair]).item() for pair in sorted(order)]  # a blocking call afterwards
    return found, whole


@runs_on("gloo", "mpi", "rules")
def test_groups_that_overlap_in_another_order_on_each_rank(run):
    # On simulated ranks, as for large tensors on processes, a maximum takes two rounds, and the start is the first.
    names = [name for name in CALLS if name != "max" or run is not rules]
    for r, of_rank in enumerate(run(lambda r: {name: crosswise(r, name) for name in names}, range(N))):
        for name, (found, whole) in of_rank.items():
            for (a, b), values in found.items():
                assert values == [EXPECTED[name](k * a, k * b, k * r) for k in (1, 10)], (name, r)
            assert whole == [a + b for a, b in sorted(found)]


def test_the_rest_of_the_first_call_needs_no_call_of_the_library():
    """A rank waits in a call of MPI itself for what another one sends after the first collective."""

    def body(r):
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        group = world.Dup()
        pending = [dc.all_reduce(torch.tensor(r + k), group=group, async_op=True) for k in (1, 2)]
        users = world.Iallreduce(sent := torch.ones(1).numpy(), got := torch.zeros(1).numpy())
        if r == 0:
            assert world.recv(source=1) == "done"
        values = [p.wait().item() for p in pending]
        if r == 1:
            world.send("done", 0)
        users.Wait()
        assert sent[0] == 1
        return values, got[0].item()

    assert spawn(body, range(2), backend="mpi", timeout=30) == [([3, 5], 2.0)] * 2


def test_mpi_without_threads_at_once_waits_in_the_first_call():
    """Calls in the same order on all ranks."""

    def body(r):
        from mpi4py import MPI

        from diffcoll.engines import mpi_requests

        mpi_requests.Duplicate.has_threads = staticmethod(lambda: False)
        groups = [MPI.COMM_WORLD.Dup() for _ in range(2)]
        pending = [dc.all_reduce(torch.tensor(r + 1), group=group, async_op=True) for group in groups]
        return [p.wait().item() for p in pending]

    assert spawn(body, range(2), backend="mpi", timeout=30) == [[3, 3]] * 2


@runs_on("rules", "mpi")
def test_an_order_of_waits_that_differs_too(run):
    """Three groups of all ranks, whose first calls are started and awaited in other orders on each rank."""

    def body(r):
        groups = [new_group(range(N)) for _ in range(N)]
        turn = [(r + i) % N for i in range(N)]
        pending = {g: dc.all_gather(torch.tensor([10 * g + r]), group=groups[g], async_op=True) for g in turn}
        return [pending[g].wait().tolist() for g in sorted(turn, key=lambda g: (g * (r + 1)) % N)], turn

    for r, (values, turn) in enumerate(run(body, range(N))):
        order = sorted(turn, key=lambda g: (g * (r + 1)) % N)
        assert values == [[10 * g + s for s in range(N)] for g in order]
