"""The ranks of `test_faults.py`: a server on each host, which has imported everything, forks one for every round.

A rank makes steps of one kind and checks each result. In step `step`, rank `victim` says that it has come to the place
of the fault: before a call or after it (for what has several parts: within it), where it waits until the fault has
begun. If the place is "running", it goes on, so that the fault comes anywhere in this step or a later one.
"""

import json
import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import diffcoll as dc
from diffcoll.engines import c10d
from diffcoll.engines.c10d_twins import twin_of

STEPS = 4


class Rank:
    """This rank of a round."""

    def __init__(self, rank, size, victim, folder, step, place):
        self.rank, self.size, self.folder = rank, size, Path(folder)
        self.place, self.fault = (place, step) if rank == victim or place == "running" else (None, None)
        self.is_victim, self.has_met = rank == victim, False
        self.step = 0
        self.grads = None  # before the step

    def steps(self):
        """Yield until the last step; if running, that is when the file `last` says."""
        while self.step < self.last():
            yield
            self.step += 1

    def last(self):
        if self.place != "running":
            return STEPS
        (self.folder / f"step-{self.rank}").write_text(f"{self.step:6}")
        time.sleep(0.005)
        self.meet("running")
        last = self.folder / "last"
        return int(last.read_text()) if last.exists() else self.step + 1

    def meet(self, place, *_):
        """Maybe meet the fault here."""
        if not self.is_victim or self.has_met or (place, self.step) != (self.place, self.fault):
            return
        self.has_met = True
        (self.folder / "here").touch()
        while place != "running" and not (self.folder / "go").exists():
            time.sleep(0.005)

    def x(self):
        return torch.full((2, 3), self.rank + 1.0 + self.step, dtype=torch.double, requires_grad=True)

    def rows(self):
        return torch.cat([torch.full((2, 3), r + 1.0 + self.step, dtype=torch.double) for r in range(self.size)])


def right(x, y):
    torch.testing.assert_close(x, y, rtol=1e-12, atol=0)


def forward(me, model):
    me.meet("before")
    right(dc.all_gather(me.x().detach()), me.rows())
    me.meet("after")


def backward(me, model):
    x = me.x()
    x.register_hook(partial(me.meet, "after"))
    y = dc.all_gather(x)
    y.register_hook(partial(me.meet, "before"))
    (y * (me.rank + 1)).sum().backward()
    right(x.grad, torch.full_like(x, me.size * (me.size + 1) / 2))


def async_op(me, model):
    x = me.x()
    me.meet("before")
    pending = dc.all_reduce(x, async_op=True)
    me.meet("after")
    right(pending.wait(), me.rows().view(me.size, 2, 3).sum(0))


def ring(me, model):
    total = torch.zeros(2, 3, dtype=torch.double)
    me.meet("before")
    for _, block in dc.ring(me.x().detach()):
        total += block
        me.meet("after")
    right(total, me.rows().view(me.size, 2, 3).sum(0))


def checked(me, model):
    with dc.check_mode():
        forward(me, model)


def averager(me, model):
    """Four buckets: the fault comes before the first or the third. Every second step adds to the gradients."""
    if me.step % 2 == 0:
        model.zero_grad()
    me.grads = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    hidden = model[0](me.x())
    hidden.register_hook(partial(me.meet, "after"))
    loss = model[1](hidden).sum()
    loss.register_hook(partial(me.meet, "before"))
    loss.backward()
    alone = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    alone.load_state_dict(model.state_dict())
    alone(me.rows()).sum().backward()
    for p, q, before in zip(model.parameters(), alone.parameters(), me.grads, strict=True):
        right(p.grad, q.grad if before is None else before + q.grad)


def is_as_before(me, model):
    """Whether each `.grad` is what it was before the step."""
    pairs = [] if me.grads is None else zip(me.grads, (p.grad for p in model.parameters()), strict=True)
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs)


def making_a_group(me, model):
    """The fault comes when the ranks have agreed to make the group of an averager, or gloo has connected them."""

    def met(*args, **more):
        me.meet("before")
        group = twin_of(*args, **more)
        me.meet("after")
        return group

    c10d.twin_of = met
    dc.GradientAverager(model).close()


KINDS = {f.__name__: f for f in (making_a_group, forward, backward, async_op, ring, checked, averager)}


def play(kind, rank, size, port, timeout, **fault):
    """Run one round on this rank; its outcome is a file."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_PORT=str(port))
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    if kind == "averager":
        dc.GradientAverager(model, reduction="sum", bucket_mb=1e-6)
    me, outcome = Rank(rank, size, **fault), {"error": None}
    values = [p.detach().clone() for p in model.parameters()]
    try:
        for _ in me.steps():
            KINDS[kind](me, model)
    except dc.CollectiveFailedError as error:
        outcome = {"error": str(error), "raised": time.monotonic()}
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}", "raised": time.monotonic(), "other": True}
    outcome["steps"] = me.step
    outcome["kept"] = all(map(torch.equal, values, model.parameters()))
    outcome["grad"] = outcome["error"] is None or is_as_before(me, model)
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
