"""Registers rows and lists them."""

import os
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

#: The files of rows, in the order of the table. GPU_ROWS names others, as the tests of the runner do.
FILES = "accelerator losses sharded batch_norm averager clip_training cuda_graphs compiled host_waits mistakes costs"
MIXED = "cpu:gloo,cuda:nccl"


class Row(NamedTuple):
    """A function that is run on some number of ranks."""

    body: Callable
    ranks: int
    #: Limit, after which its processes are killed.
    seconds: float = 60
    #: Whether nothing else runs meanwhile: it measures times.
    alone: bool = False
    #: Whether it starts its ranks itself: it is run in one process, without a group.
    starts_ranks: bool = False
    #: That of the default group; on the CPU it is gloo.
    backend: str = "nccl"
    #: Whether it is run on the CPU, too.
    dry: bool = True

    @property
    def name(self):
        return f"{self.body.__name__}-{self.ranks}"

    @property
    def file(self):
        return self.body.__module__.removeprefix("gpu.")


_rows = {}


def row(*ranks: int, **options):
    """Register a function of a `Rank` as a row for each number of ranks; the options are described in `Row`."""

    def register(body):
        for n in ranks:
            found = Row(body, n, **options)
            _rows[found.name] = found
        return body

    return register


def rows(files: str | None = None) -> dict[str, Row]:
    """Return the rows of these files, by default of all, by name."""
    for file in (files or os.environ.get("GPU_ROWS", FILES)).split():
        import_module(f"gpu.{file}")
    return _rows
