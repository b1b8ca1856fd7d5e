"""What a forward and backward of a collective costs, beside torch.distributed.nn.functional and a two-line Function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

import diffcoll
from benchmarks.counting import bytes_sent
from benchmarks.floor import floor
from benchmarks.measuring import OURS, Bench, Steps, Times
from diffcoll.testing.cases import Case

NN = "torch.distributed.nn.functional"
FLOOR = "a two-line Function"
#: The library's own sum, beside its other reductions.
SUM = f"{OURS}'s sum"
SIZES = {"4 B": 1, "1 MB": 1 << 18, "16 MB": 1 << 22}
OPS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("sum", "mean", "product", "max", "logsumexp"),
    "reduce_scatter": ("sum", "product", "max"),
}
Call = Callable[[Tensor], Tensor]


@dataclass
class Row:
    """A call of a collective at one size."""

    #: The collective, with its op if that is not the sum.
    call: str
    #: The size of x in words, and in bytes.
    size: str
    nbytes: int
    #: The library first, then the others that offer the call.
    systems: dict[str, Times]
    #: In forward and backward, if all stages are the library's messages.
    bytes_sent: int
    #: Above x and y, in bytes, of the library and torch.distributed.nn; empty: not measured at this size.
    peak_memory: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return the row for `--json`; benchmarks/README.md has its schema."""
        systems = {name: taken._asdict() for name, taken in self.systems.items()}
        return {**vars(self), "systems": systems, "torch": torch.__version__}


def costs(bench: Bench, names: Sequence[str]) -> list[Row]:
    """Measure a row for each collective, op and size."""
    found = []
    calls = [(name, op) for name in names for op in OPS.get(name, (None,))]
    for name, op in calls:
        for size, numel in SIZES.items():
            case = case_of(name, op, numel, bench.n)
            rounds = bench.rounds * (10 if numel == 1 else 1)
            times = bench.times(partial(steps, case, bench.engine), rounds)
            measured = (OURS, NN) if numel == max(SIZES.values()) else ()
            memory = {system: peak_memory(bench, case, system) for system in measured if system in times}
            label = name if op in (None, "sum") else f"{name} {op}"
            found.append(Row(label, size, 4 * case.shapes[0][0], times, bytes_sent(case), memory))
    return found


def case_of(name: str, op: str | None, numel: int, n: int) -> Case:
    """Return the call on float32 rows: of `numel` numbers, or of as many for each rank if x has a block for each."""
    blocks = n if name in ("reduce_scatter", "all_to_all", "scatter", "split") else 1
    arguments: dict[str, Any] = {} if op in (None, "sum") else {"op": op}
    if name == "permute":
        arguments["pairs"] = [(r, (r + 1) % n) for r in range(n)]
    return Case(name, ((max(numel // blocks, 1) * blocks,),) * n, arguments, dtype=torch.float32)


def steps(case: Case, engine: str, rank: int, of_sum: bool = False) -> Steps:
    """Return a forward and backward of each system that offers the call; `of_sum`: the backward of `y.sum()`."""
    x = case.x(rank, 0).requires_grad_()
    y = results(case)[rank]
    gy = torch.ones(()).expand(y.shape) if of_sum else torch.randn(y.shape)
    ours = partial(getattr(diffcoll, case.name), **case.arguments)
    calls: dict[str, Call | None] = {OURS: ours, NN: nn_functional(case.name, case.arguments.get("op", "sum"))}
    if "op" in case.arguments:
        calls[SUM] = getattr(diffcoll, case.name)
    if not case.arguments:
        calls[FLOOR] = floor(case.name, "torch")
        if engine == "mpi":
            calls[f"{OURS}: its calls of MPI in {FLOOR}"] = floor(case.name, "mpi")
    return {name: partial(_step, call, x, gy) for name, call in calls.items() if call is not None}


def _step(call: Call, x: Tensor, gy: Tensor) -> object:
    y = call(x)  # kept, as by a program that uses it
    return torch.autograd.grad(y, x, gy)


def results(case: Case) -> list[Tensor]:
    """Return what each rank gets, without memory and without a call, which would leave scratch."""
    return case.truth([torch.empty(shape, dtype=case.dtype, device="meta") for shape in case.shapes])


def nn_functional(name: str, op: str) -> Call | None:
    """Return the call of torch.distributed.nn.functional; None: it has none that is defined on all ranks."""
    nn: Any = import_module(NN)
    n = dist.get_world_size()
    reduction: Any = getattr(dist.ReduceOp, {"mean": "AVG"}.get(op, op.upper()), None)
    calls: dict[str, Call] = {
        "all_reduce": lambda x: nn.all_reduce(x, reduction),
        "all_gather": lambda x: torch.cat(nn.all_gather(x)),
        "reduce_scatter": lambda x: nn.reduce_scatter(torch.empty_like(x[: len(x) // n]), [*x.chunk(n)], reduction),
        "all_to_all": lambda x: nn.all_to_all_single(torch.empty_like(x), x),
        "broadcast": lambda x: nn.broadcast(x, 0),
        "scatter": lambda x: nn.scatter([*x.chunk(n)], 0),
    }
    return None if reduction is None else calls.get(name)


def peak_memory(bench: Bench, case: Case, system: str = OURS) -> float:
    """Return the peak memory of a forward and the backward of `y.sum()` above x and y, in bytes, of the worst rank."""
    small = replace(case, shapes=((bench.n,),) * bench.n)

    def both(rank: int) -> Steps:
        cases = {"small": small, "large": case}
        return {name: steps(each, bench.engine, rank, of_sum=True)[system] for name, each in cases.items()}

    peaks = bench.peaks(both, "large", warm="small")
    return max(peak - y.nbytes for peak, y in zip(peaks, results(case), strict=True))


def table(bench: Bench, rows: Sequence[Row]) -> Table:
    """Return a line for each row, with a column for each system; two lines for the smallest size."""
    others = [*dict.fromkeys(name for row in rows for name in row.systems if name != OURS)]
    grid = Table(
        *("collective", "x", OURS, *others, "sent", "memory", f"{NN}'s"),
        title=f"{bench.title}, float32: median ms (diffcoll's as a ratio to it);\n"
        "bytes that the busiest rank sends or receives, and peak memory above x and y, in bytes of x",
    )
    for row in rows:
        if row.nbytes <= 4 * bench.n:
            cold = {name: taken.cold for name, taken in row.systems.items()}
            grid.add_row(row.call, f"{row.size}, cold", *_cells(cold, others), "", "", "")
        warm = {name: taken.warm for name, taken in row.systems.items()}
        sent = f"{row.bytes_sent / row.nbytes:.2f}"
        memory = [f"{row.peak_memory[s] / row.nbytes:.2f}" if s in row.peak_memory else "" for s in (OURS, NN)]
        grid.add_row(row.call, row.size, *_cells(warm, others), sent, *memory)
    return grid


def _cells(times: dict[str, float], others: Sequence[str]) -> list[str]:
    ours = times[OURS]
    return [f"{ours:.3f}", *(f"{times[s]:.3f} ({ours / times[s]:.2f}×)" if s in times else "" for s in others)]


def trees(rank: int) -> Steps:
    """200 tensors in one call, and what users write instead."""
    xs = [torch.randn(327, requires_grad=True) for _ in range(200)]
    gs = [torch.randn(327) for _ in xs]

    def by_hand() -> object:
        y = diffcoll.all_reduce(torch.cat(xs))
        return torch.autograd.grad([piece.clone() for piece in torch.split(y, 327)], xs, gs)

    return {
        "diffcoll.all_reduce(list)": lambda: torch.autograd.grad(diffcoll.all_reduce(xs), xs, gs),
        "diffcoll: one tensor, cat and split by hand": by_hand,
        "diffcoll: 200 calls": lambda: torch.autograd.grad([diffcoll.all_reduce(x) for x in xs], xs, gs),
    }


def overlap(rank: int) -> Steps:
    """A collective and work that needs it only later."""
    x, w = torch.randn(1 << 22, requires_grad=True), torch.randn(500, 500, requires_grad=True)
    gy = torch.randn(1 << 22)

    def work() -> Tensor:
        y = w
        for _ in range(4):
            y = torch.tanh(y @ w)
        return y.sum()

    def later() -> object:
        pending = diffcoll.all_reduce(x, async_op=True)
        z = work()
        return torch.autograd.grad([pending.wait(), z], [x, w], [gy, torch.ones(())])

    def one_after_the_other() -> object:
        y = diffcoll.all_reduce(x)
        return torch.autograd.grad([y, work()], [x, w], [gy, torch.ones(())])

    return {
        "diffcoll, async_op=True": later,
        "diffcoll, one after the other": one_after_the_other,
        "diffcoll, the collective alone": lambda: torch.autograd.grad(diffcoll.all_reduce(x), x, gy),
        "the work alone": lambda: torch.autograd.grad(work(), w),
    }
