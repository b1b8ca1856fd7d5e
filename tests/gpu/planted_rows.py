"""Rows that are wrong, raise, hang and die, for the tests of the runner."""

import os
import time

import torch.distributed as dist

from gpu.row import row


@row(1, 2, seconds=30)
def right(rank):
    with rank.part("a number"):
        rank.check("small", 1e-13, 1e-12)
        rank.figure("ranks", rank.n)


@row(2, seconds=30)
def wrong(rank):
    rank.on_gpu = True  # goals are checked there
    with rank.part("of rank 1"):
        rank.check("error", 2.0 * rank.r, 1.0)
    with rank.part("not a number"):
        rank.check("error", float("nan"), 1.0)
    with rank.part("a time"):
        rank.goal("ratio", 1.2, 1.1)
    with rank.part("refused"), rank.refused(ValueError, "x"):
        raise ValueError("x")
    with rank.part("refused otherwise"), rank.refused(ValueError, "x"):
        raise ValueError("y")
    with rank.part("not refused"), rank.refused(ValueError):
        pass
    raise NotImplementedError("raised")


@row(2, seconds=12)
def hangs(rank):
    with rank.part("before"):
        rank.check("error", 0, 1)
    with rank.part("sleep"):
        if rank.r == 0:
            time.sleep(60)
        dist.barrier()


@row(1, seconds=30)
def dies(rank):
    with rank.part("exit"):
        os._exit(7)


@row(1, seconds=30, dry=False)
def on_a_gpu(rank):
    raise AssertionError
