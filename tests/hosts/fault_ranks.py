"""The ranks of `test_faults.py`: a server on each host, which has imported everything, forks one for every round.

A rank makes STEPS steps of one kind and checks each result. In step FAULT, rank `victim` says that it has come to the
place of the fault, and goes on when it is told to.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import diffcoll as dc
from diffcoll.engines import c10d
from diffcoll.engines.c10d_groups import new_group

STEPS, FAULT = 4, 2


class Rank:
    """This rank of a round; `meet` is the place of the fault."""

    def __init__(self, rank, size, victim, folder):
        self.rank, self.size, self.victim, self.folder = rank, size, victim, Path(folder)
        self.step = 0

    def meet(self, *_):
        if self.rank != self.victim or self.step != FAULT:
            return
        self.step += 0.5  # once
        (self.folder / "here").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.005)

    def x(self):
        return torch.full((2, 3), self.rank + 1.0 + self.step // 1, dtype=torch.double, requires_grad=True)

    def rows(self):
        return torch.cat([torch.full((2, 3), r + 1.0 + self.step // 1, dtype=torch.double) for r in range(self.size)])


def right(x, y):
    torch.testing.assert_close(x, y, rtol=1e-12, atol=0)


def forward(me, model):
    me.meet()
    right(dc.all_gather(me.x().detach()), me.rows())


def backward(me, model):
    x = me.x()
    y = dc.all_gather(x)
    y.register_hook(me.meet)
    (y * (me.rank + 1)).sum().backward()
    right(x.grad, torch.full_like(x, me.size * (me.size + 1) / 2))


def async_op(me, model):
    x = me.x()
    me.meet()
    y = dc.all_reduce(x, async_op=True).wait()
    right(y, me.rows().view(me.size, 2, 3).sum(0))


def ring(me, model):
    total = torch.zeros(2, 3, dtype=torch.double)
    for _, block in dc.ring(me.x().detach()):
        total += block
        me.meet()
    right(total, me.rows().view(me.size, 2, 3).sum(0))


def checked(me, model):
    with dc.check_mode():
        forward(me, model)


def averager(me, model):
    """Two buckets: the fault comes between them."""
    model.zero_grad()
    loss = model(me.x()).sum()
    loss.register_hook(me.meet)
    loss.backward()
    x = me.rows()
    mean = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    mean.load_state_dict(model.state_dict())
    (mean(x).sum() / me.size).backward()
    for p, q in zip(model.parameters(), mean.parameters(), strict=True):
        right(p.grad, q.grad)


def making_a_group(me, model):
    """The fault comes when the ranks have agreed to make the group of an averager."""

    def met(*args, **more):
        me.meet()
        return new_group(*args, **more)

    c10d.new_group = met
    dc.GradientAverager(model).detach()


KINDS = {f.__name__: f for f in (making_a_group, forward, backward, async_op, ring, checked, averager)}


def play(kind, rank, size, victim, folder, port, timeout):
    """Run one round on this rank; its outcome is a file."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_PORT=str(port))
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    if kind == "averager":
        dc.GradientAverager(model, bucket_mb=1e-6)
    me, outcome = Rank(rank, size, victim, folder), {"error": None}
    values = [p.detach().clone() for p in model.parameters()]
    try:
        for me.step in range(STEPS):
            KINDS[kind](me, model)
            if me.step < FAULT:
                (me.folder / f"step-{me.step}-{rank}").touch()
    except dc.CollectiveFailedError as error:
        outcome = {"error": str(error), "raised": time.monotonic()}
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}", "raised": time.monotonic(), "other": True}
    outcome["steps"] = int(me.step) + (outcome["error"] is None)
    outcome["kept"] = all(map(torch.equal, values, model.parameters()))
    outcome["grad"] = [p.grad is not None for p in model.parameters()]
    (me.folder / f"outcome-{rank}").write_text(json.dumps(outcome))


def serve():
    """Fork a rank for each line of the standard input; print how it ended."""
    print("ready", flush=True)
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            play(**json.loads(line))
            return
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"code": code, "ended": time.monotonic()}), flush=True)


if __name__ == "__main__":
    serve()
