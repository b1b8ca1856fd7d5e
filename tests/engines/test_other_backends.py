"""The code for backends other than gloo, which have native collectives for all primitives, run on gloo.

For NCCL this tests which calls are made, not their results on a GPU.
"""

import torch
import torch.distributed as dist
from runs import noted

import diffcoll as dc
from diffcoll.collectives.permute import Permute
from diffcoll.core.groups import resolve
from diffcoll.core.moves import move
from diffcoll.testing import cases, spawn

SEED = 1


def under_another_name(**backends):
    """The default group's engine, with another name for its backend."""
    engine = resolve(None, "test")
    engine.backends = backends or {"cpu": "other"}
    return engine


def test_the_table():
    """Values and gradients; messages are sent by torch.distributed.batch_isend_irecv."""
    n = 3

    def body(r):
        under_another_name()
        batches = []
        send = dist.batch_isend_irecv

        def noting(ops):
            assert all(op.tensor.numel() for op in ops)
            batches.append(len(ops))
            return send(ops)

        dist.batch_isend_irecv = noting
        for case in cases.table(n):
            found = cases.on_rank(case, r, SEED, orders=1)
            for name, error in cases.errors(found, cases.in_truth(case, SEED, orders=1), r).items():
                assert error < 1e-12, f"{case}: {name}"
        return len(batches)

    assert min(spawn(body, range(n), timeout=100)) > 50


def test_ranks_are_ranks_within_the_group():
    def body(r):
        group = dist.new_group([1, 2])
        if r == 0:
            return None
        resolve(group, "test").backends = {"cpu": "other"}
        x = torch.tensor([10.0 + r])
        calls = dc.broadcast(x, src=1, group=group), dc.reduce(x, dst=1, group=group), dc.all_gather(x, group=group)
        return [y.tolist() for y in (*calls, dc.permute(x, [(1, 0)], group=group))]

    assert spawn(body, range(3)) == [None, [[12], [0], [11, 12], [12]], [[12], [23], [11, 12], [0]]]


def test_empty_blocks_are_sent_on_gloo_only():
    """A group may use gloo for the CPU and another backend for other devices."""

    def body(r):
        blocks = [torch.zeros(2), torch.zeros(0), torch.zeros(3)]
        found = []
        for names in ({"cpu": "gloo"}, {"cpu": "other"}, {"cpu": "other", "cuda": "gloo"}):
            found.append([s for s, _ in under_another_name(**names)._to_others(blocks)])
        return found

    others = [[1, 2], [0, 2], [0, 1]]
    for r, (gloo, *elsewhere) in enumerate(spawn(body, range(3))):
        assert gloo == others[r]
        assert elsewhere == [[s for s in others[r] if s != 1]] * 2


def test_all_ranks_connect_before_the_first_message():
    """NCCL would wait for ranks that do not take part in the first point-to-point message of a group."""

    def body(r):
        calls = noted(dist, "all_reduce", "batch_isend_irecv")
        engine = under_another_name()

        class Elsewhere(torch.Tensor):
            """CPU memory that claims to be elsewhere."""

            is_cpu = False

        for _ in range(2):
            x = torch.full((2,), 1.0 + r).as_subclass(Elsewhere)
            y = move(x, Permute(engine, ((2, 0),)))
            assert y.tolist() == ([3.0, 3.0] if r == 0 else [0.0, 0.0])
        return calls

    for r, calls in enumerate(spawn(body, range(3))):
        assert calls == ["all_reduce", *["batch_isend_irecv"] * (2 * (r != 1))]


def test_gloo_needs_no_such_call():
    def body(r):
        calls = noted(dist, "all_reduce")
        engine = resolve(None, "test")
        engine.connect(torch.device("cpu"))
        return len(calls), dc.get_world_size()

    assert spawn(body, range(2)) == [(0, 2)] * 2
