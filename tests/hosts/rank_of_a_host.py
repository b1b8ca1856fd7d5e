"""A rank of test_faults.py, `python rank_of_a_host.py WHERE VICTIM FOLDER`: prints how its steps have ended, as JSON.

In its second step rank VICTIM says that it has come to the place WHERE, and waits there until the fault has happened.
"""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import diffcoll as dc

WHERE, VICTIM, FOLDER = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
TIMEOUT = 3.0


def meet(where, step):
    if (where, step, dist.get_rank()) != (WHERE, 1, VICTIM):
        return
    (FOLDER / "here").touch()
    while not (FOLDER / "go").exists():
        time.sleep(0.005)


def train(model, averager, step):
    """The place of the fault is the message that follows."""
    meet("forward", step)
    y = dc.all_gather(model(torch.ones(2, 3)))
    y.register_hook(lambda g: meet("backward", step))
    meet("async_op", step)
    z = dc.all_reduce(y.sum(), async_op=True).wait()
    with averager.reduce():
        meet("averager", step)
        (z + y.square().sum()).backward()
    model.zero_grad()


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    model = nn.Linear(3, 4)
    averager = dc.GradientAverager(model)
    found = None
    try:
        for step in range(4):
            train(model, averager, step)
    except dc.CollectiveFailedError as error:
        found = str(error)
    print(json.dumps({"error": found, "at": time.monotonic()}), flush=True)


main()
