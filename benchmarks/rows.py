"""What `benchmarks` has measured of collectives, as data for the table and the JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.table import Table

OURS = "diffcoll"


class Times(NamedTuple):
    """Median milliseconds of a step."""

    #: After a step of another system.
    cold: float
    #: After a step of its own.
    warm: float


@dataclass(frozen=True)
class Row:
    """A call of a collective at one size."""

    collective: str
    #: None: the collective has no `op`.
    op: str | None
    #: The size of x in words.
    size: str
    #: The size of x in bytes.
    nbytes: int
    world_size: int
    engine: str
    torch: str
    #: The library first, then the systems that offer the call.
    systems: dict[str, Times]
    bytes_sent: int
    #: Above x and y, in bytes; None: not measured at this size.
    peak_memory: float | None

    @property
    def label(self) -> str:
        """The collective, with its op if that is not the sum."""
        return self.collective if self.op in (None, "sum") else f"{self.collective} {self.op}"

    @property
    def smallest(self) -> bool:
        """Whether x is one number, or one for each rank: then the steps with cold caches are shown as well."""
        return self.nbytes <= 4 * self.world_size

    def ratio(self, system: str) -> float:
        """The library's time as a ratio to that of a system, warm; below 1 the library is faster."""
        return self.systems[OURS].warm / self.systems[system].warm

    def as_json(self) -> dict[str, Any]:
        """Return the row for `--json`; benchmarks/README.md has its schema."""
        systems = {
            name: {"cold_ms": times.cold, "warm_ms": times.warm, "ratio": self.ratio(name)}
            for name, times in self.systems.items()
        }
        return {
            "collective": self.collective,
            "op": self.op,
            "bytes": self.nbytes,
            "world_size": self.world_size,
            "engine": self.engine,
            "torch": self.torch,
            "systems": systems,
            "bytes_sent": self.bytes_sent,
            "peak_memory_bytes": self.peak_memory,
        }


def table(rows: Sequence[Row], others: Sequence[str], title: str) -> Table:
    """Return a line for each row, with a column for each of the other systems; two lines for the smallest size."""
    grid = Table(
        title=f"{title}, float32: median ms (diffcoll's as a ratio to it);\n"
        "bytes a rank sends, and its peak memory above x and y, in bytes of x"
    )
    names = (system.removeprefix("torch.distributed.") for system in others)
    for column in ("collective", "x", OURS, *names, "sent", "memory"):
        grid.add_column(column)
    for row in rows:
        largest = row.peak_memory is not None
        sent = f"{row.bytes_sent / row.nbytes:.2f}" if largest else ""
        memory = f"{row.peak_memory / row.nbytes:.2f}" if row.peak_memory is not None else ""
        if row.smallest:
            cold = {name: times.cold for name, times in row.systems.items()}
            grid.add_row(row.label, f"{row.size}, cold", *_cells(cold, others), "", "")
        warm = {name: times.warm for name, times in row.systems.items()}
        grid.add_row(row.label, row.size, *_cells(warm, others), sent, memory)
    return grid


def _cells(times: dict[str, float], others: Sequence[str]) -> list[str]:
    ours = times[OURS]
    return [f"{ours:.3f}", *(f"{times[s]:.3f} ({ours / times[s]:.2f}×)" if s in times else "" for s in others)]
