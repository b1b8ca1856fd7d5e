"""The messages of a reduction: one for each bucket, the last of which ends with flags and `EXTRA` numbers.

note  notes/training/gradient-averager.md
"""

from __future__ import annotations

import contextlib
import math
from functools import partial

import torch

from diffcoll.averaging.accumulation import Collecting
from diffcoll.averaging.buckets import Bucket
from diffcoll.averaging.messages import ABSENT, communicating
from diffcoll.engines.engine import Engine, done

#: Numbers after the flags: NaN from a rank that failed, infinity from one that skips the step; the weight; whether the
#: rank has taken part.
EXTRA = 3


class Sender:
    """Starts the reductions of buckets, in order, and waits for them."""

    def __init__(self, engine: Engine, *, in_order: bool, has_hook: bool) -> None:
        self._engine, self._in_order, self._has_hook = engine, in_order, has_hook
        #: All buckets, in the order in which they are sent.
        self.buckets: list[Bucket] = []

    def start(self, bucket: Bucket, now: Collecting) -> None:
        """Start the in-place reduction of what is in a bucket; not if a communication hook of the user's does it."""
        engine = self._engine
        now.waits.append(done)
        if engine.size == 1 or (self._has_hook and bucket is not self.buckets[-1]):
            return
        with self._communicating(bucket):
            reduce = partial(Engine.all_reduce, engine) if self._in_order else engine.all_reduce
            now.waits[-1] = reduce(bucket.row, bucket.row, bucket.overlaps)

    def wait(self, now: Collecting) -> None:
        """Wait for all buckets."""
        for bucket, wait in zip(self.buckets, now.waits, strict=True):
            with self._communicating(bucket):
                wait()

    @torch.no_grad()
    def send_mark(self, mark: float, now: Collecting) -> None:
        """Send all unsent buckets without gradients, with a mark in the place of `EXTRA`'s first number; wait."""
        for bucket in self.buckets[len(now.waits) :]:
            bucket.row.fill_(math.nan)
            if bucket is self.buckets[-1]:
                bucket.tail[-3] = mark
            self.start(bucket, now)
        self.wait(now)

    @property
    def mark(self) -> float:
        """NaN if a rank has failed in the last reduction, else infinity if one has skipped it, else 0."""
        return float(self.buckets[-1].tail.real[-3])

    def _communicating(self, bucket: Bucket) -> contextlib.AbstractContextManager[None]:
        at = f"bucket {self.buckets.index(bucket)} of {len(self.buckets)}"
        return communicating(self._engine, at, bucket.row.nbytes, str(bucket), ABSENT)
