"""`benchmarks --fit`: latency and bandwidth of a collective, and what they predict for other sizes and ranks.

The model is that of Hockney, 1994, with what Thakur, Rabenseifner and Gropp, 2005, add for reductions. For a forward
and backward of x of B bytes on N ranks it is

    t = m(N)·α + v(N, B)·β + s(N, B)·γ

α  seconds for each of the m messages that a rank sends one after the other
β  seconds for each of the v bytes; with the local copies and sums, since they are proportional to v
γ  seconds for each of the s bytes of the stack that an op reduces locally; measured by itself

m, v and s are those of `costs`. α and β are solved for from the times of two sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.table import Table

import diffcoll
from benchmarks import costs
from diffcoll.core.reductions import REDUCTIONS, users
from diffcoll.testing.cases import Case

#: In numbers of float32. α and β are those of the first and the third size; the others are predicted. The first is more
#: than gloo gathers whole, so that all sizes are sent in the same way. The third fits caches, the last may not.
SIZES = {"128 KB": 1 << 15, "512 KB": 1 << 17, "2 MB": 1 << 19, "16 MB": 1 << 22}
#: The numbers of ranks to extrapolate to.
RANKS = (8, 64, 1024, 65536)
LOCAL = "op"


class Model(NamedTuple):
    """α, β and γ in seconds, and what could not be solved for."""

    alpha: float
    beta: float
    gamma: float = 0.0
    #: "latency" or "bandwidth", if it came out negative and was set to 0; empty: neither.
    clamped: str = ""


class Work(NamedTuple):
    """m, v and s of a forward and backward."""

    messages: float
    nbytes: float
    stack: float

    def seconds(self, model: Model) -> float:
        """Return the time that a model predicts."""
        return self.messages * model.alpha + self.nbytes * model.beta + self.stack * model.gamma


def work(row: costs.Row, ways: Any, n: int, x: float) -> Work:
    """Return the work of a call on n ranks, with an x of so many bytes, whose stages are carried out in these ways."""
    sums = [costs.total(stages, ways) for stages in (row.forward, row.backward)]
    messages, nbytes = (sum(costs.value(cost[i], n, x) for cost in sums) for i in (1, 2))
    return Work(messages, nbytes, {"0": 0.0, "1": x, "N": n * x}[row.stack])


def solve(small: tuple[Work, float], large: tuple[Work, float], gamma: float = 0.0) -> Model:
    """Return the model on which two measured times lie.

    Noise may make α or β negative. Then it is set to 0, and the other is fitted to the time that determines it: β to
    the large one, α to the small one.

    Args:
        small: work and seconds of the smaller size.
        large: of the larger one.
        gamma: seconds for each byte of the stack.
    """
    (w, t), (v, u) = small, large
    t, u = t - gamma * w.stack, u - gamma * v.stack
    beta = (u - t) / (v.nbytes - w.nbytes)
    alpha = (t - beta * w.nbytes) / w.messages
    if beta < 0:
        return Model(max(t, 0.0) / w.messages, 0.0, gamma, "bandwidth")
    if alpha < 0:
        return Model(0.0, max(u, 0.0) / v.nbytes, gamma, "latency")
    return Model(alpha, beta, gamma)


Steps = dict[str, Callable[[], object]]
#: Returns the median milliseconds of each step; every rank makes its own steps.
Times = Callable[[Callable[[int], Steps]], dict[str, float]]


@dataclass(frozen=True)
class Fit:
    """A collective whose time was measured at each of `SIZES`."""

    label: str
    collective: str
    op: str | None
    engine: str
    world_size: int
    row: costs.Row
    model: Model
    #: The size of x in bytes → measured seconds.
    measured: dict[int, float]

    def predicted(self, nbytes: int) -> float:
        """Return the seconds that the model gives for the ranks that were measured."""
        return work(self.row, costs.ENGINES[self.engine], self.world_size, nbytes).seconds(self.model)

    @property
    def large(self) -> int:
        """The larger of the two sizes that α and β are those of, in bytes."""
        return sorted(self.measured)[2]

    def extrapolated(self) -> dict[str, list[float]]:
        """Return the seconds for each of `RANKS`, by algorithm, for the larger of the two sizes.

        Empty if α or β could not be solved for: a number without latency would be wrong by orders of magnitude.
        """
        if self.model.clamped:
            return {}
        own = f"the library ({self._own_ways()})"
        stages = {name for name, _ in (*self.row.forward, *self.row.backward)}
        ways: dict[str, Any] = {way: way for way in ("ring", "tree") if stages & costs.WAYS[way].keys()}
        ways[own] = costs.ENGINES[self.engine]
        names: dict[tuple[Work, ...], list[str]] = {}
        for name, way in ways.items():
            names.setdefault(tuple(work(self.row, way, n, self.large) for n in RANKS), []).append(name)
        return {" = ".join(equal): [w.seconds(self.model) for w in works] for works, equal in names.items()}

    def _own_ways(self) -> str:
        stages = [name for name, _ in (*self.row.forward, *self.row.backward)]
        ways = [costs.ENGINES[self.engine].get(stage, "messages") for stage in stages]
        backend = "MPI's own" if self.engine == "mpi" else "gloo's own"
        return ", ".join(dict.fromkeys("messages" if way == "messages" else backend for way in ways))

    def as_json(self) -> dict[str, Any]:
        """Return the fit for `--json`; benchmarks/README.md has its schema."""
        return {
            "collective": self.collective,
            "op": self.op,
            "world_size": self.world_size,
            "engine": self.engine,
            "torch": torch.__version__,
            "alpha_s": self.model.alpha,
            "beta_s_per_byte": self.model.beta,
            "gamma_s_per_byte": self.model.gamma,
            "clamped": self.model.clamped or None,
            "measured": [
                {"bytes": size, "seconds": seconds, "predicted_seconds": self.predicted(size)}
                for size, seconds in self.measured.items()
            ],
            "extrapolated": [
                {"algorithm": name, "bytes": self.large, "world_size": n, "seconds": t}
                for name, seconds in self.extrapolated().items()
                for n, t in zip(RANKS, seconds, strict=True)
            ],
        }


# ── measured ─────────────────────────────────────────────────────────────────────────────────────────────


def measure(cases: Sequence[Case], engine: str, times: Times) -> Fit:
    """Measure one call at four sizes, which take turns, and fit the model to the first and the third.

    Args:
        cases: the call at these sizes, ascending.
        engine: "torch" or "mpi".
        times: measures.
    """
    first, op = cases[0], cases[0].arguments.get("op", "sum")
    row = costs.row(first.name, op)
    sizes = [_nbytes(case) for case in cases]
    found = times(lambda rank: _steps(cases, rank))
    seconds = [found[_step(size)] / 1e3 for size in sizes]
    stack = {"0": 1.0, "1": 1.0, "N": float(first.size)}[row.stack] * sizes[2]
    gamma = found[LOCAL] / 1e3 / stack if LOCAL in found else 0.0
    works = [work(row, costs.ENGINES[engine], first.size, size) for size in sizes]
    model = solve((works[0], seconds[0]), (works[2], seconds[2]), gamma)
    spelled = op if isinstance(op, str) else repr(op)
    label = first.name if spelled == "sum" else f"{first.name} {spelled}"
    has_op = first.name in ("all_reduce", "reduce_scatter", "reduce")
    measured = dict(zip(sizes, seconds, strict=True))
    return Fit(label, first.name, spelled if has_op else None, engine, first.size, row, model, measured)


def _steps(cases: Sequence[Case], rank: int) -> Steps:
    """Return a step for each size, and one for the local reduction of the stack of the third, if the op has one."""
    steps = {_step(_nbytes(case)): _forward_and_backward(case, rank) for case in cases}
    large, op = cases[2], cases[2].arguments.get("op", "sum")
    reduction = REDUCTIONS["even"][op] if isinstance(op, str) else users(op)
    if reduction.over is not None:
        n, numel = large.size, _nbytes(large) // 4
        stack = torch.randn(n, numel if reduction.whole else numel // n, requires_grad=True)
        gy = torch.randn(stack.shape[1:])
        steps[LOCAL] = lambda: torch.autograd.grad(reduction.of(stack), stack, gy)
    return steps


def _forward_and_backward(case: Case, rank: int) -> Callable[[], object]:
    x, call = case.x(rank, 0).requires_grad_(), partial(getattr(diffcoll, case.name), **case.arguments)
    with torch.no_grad():
        gy = torch.randn(call(x).shape)
    return lambda: torch.autograd.grad(call(x), x, gy)


def _step(nbytes: int) -> str:
    return f"diffcoll, {nbytes} bytes"  # errors of steps that begin with the library's name are raised


def _nbytes(case: Case) -> int:
    assert case.shapes[0] is not None
    return 4 * case.shapes[0][0]


# ── shown ────────────────────────────────────────────────────────────────────────────────────────────────


def tables(fits: Sequence[Fit]) -> list[Table]:
    """Return what was measured and predicted, and the extrapolation to more ranks."""
    first = fits[0]
    on = f"{'MPI' if first.engine == 'mpi' else 'gloo'}, N = {first.world_size}"
    small, between, large, beyond = SIZES
    title = f"forward + backward, {on}, float32: t = m·α + v·β + s·γ, fitted to {small} and {large}; median ms"
    failed = "* came out negative: the times do not fit the model (noise, or caches). Set to 0, and not extrapolated"
    grid = Table(
        title=title, caption=failed if any(fit.model.clamped for fit in fits) else None, caption_justify="left"
    )
    for column in ("collective", "α, µs", "β, ns/B", "γ, ns/B", small, large, f"{between}: predicted", "error"):
        grid.add_column(column)
    for column in (f"{beyond}: predicted", "error"):
        grid.add_column(column)
    for fit in fits:
        low, mid, high, far = sorted(fit.measured)
        model = fit.model
        grid.add_row(
            fit.label,
            f"{1e6 * model.alpha:.1f}" if model.clamped != "latency" else "0 *",
            f"{1e9 * model.beta:.3f}" if model.clamped != "bandwidth" else "0 *",
            f"{1e9 * model.gamma:.3f}" if model.gamma else "",
            f"{1e3 * fit.measured[low]:.3f}",
            f"{1e3 * fit.measured[high]:.3f}",
            *_compared(fit, mid),
            *_compared(fit, far),
        )
    return [grid, _extrapolation(fits, large)]


def _compared(fit: Fit, size: int) -> tuple[str, str]:
    """Return the predicted and the measured time, and the error of the prediction."""
    got, said = fit.measured[size], fit.predicted(size)
    return f"{1e3 * said:.3f}, measured {1e3 * got:.3f}", f"{100 * (said / got - 1):+.0f} %"


def _extrapolation(fits: Sequence[Fit], size: str) -> Table:
    title = f"EXTRAPOLATED, not measured: forward + backward of {size}"
    caption = (
        "Assumed: α, β and γ are those above for any N; every rank has its own core, and its own link in both "
        "directions; no contention.\n"
        "ring, tree: ranks pass blocks on, in N − 1 or ⌈log₂ N⌉ steps (Thakur, Rabenseifner, Gropp 2005).\n"
        "messages: between all pairs of ranks, N − 1 for each rank and stage; each counts α."
    )
    if any(fit.row.forward == (("all_gather", "B"),) or fit.collective == "gather" for fit in fits):
        gathered = RANKS[-1] * fits[0].large / 2**30
        caption += f"\nWhat all_gather and gather return has N·B bytes: {gathered:,.0f} GiB on {RANKS[-1]:,} ranks."
    grid = Table(title=title, caption=caption, caption_justify="left")
    for column in ("collective", "algorithm", *(f"N = {n:,}" for n in RANKS)):
        grid.add_column(column, no_wrap=True)
    for fit in fits:
        label = fit.label
        if fit.model.clamped:
            grid.add_row(label, f"none: no {fit.model.clamped} was found", *("–" for _ in RANKS))
        for name, seconds in fit.extrapolated().items():
            grid.add_row(label, name, *map(_spelled, seconds))
            label = ""
    return grid


def _spelled(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds < 1 else f"{seconds:,.1f} s"
