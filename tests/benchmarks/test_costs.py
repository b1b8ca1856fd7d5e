"""What notes/running/costs.md says of bytes, rounds and memory is what is counted."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import diffcoll as dc
from benchmarks.collectives import peak_memory
from benchmarks.counting import traffic
from benchmarks.measuring import Bench
from diffcoll.collectives import COLLECTIVES
from diffcoll.core.reductions import REDUCTIONS
from diffcoll.engines import c10d, mpi
from diffcoll.engines.engine import even_sizes
from diffcoll.testing.cases import Case

NOTE = (Path(__file__).parents[2] / "notes" / "running" / "costs.md").read_text(encoding="utf-8")
#: The note's table: calls → formulas of the bytes of forward and backward; of rounds, and of the messages in each.
FORMULAS = {
    call: (cells[:2], cells[2:])
    for calls, *cells in re.findall(r"^\| (`.*) \| (0|.*[Bb]) \| (.*[Bb]) \| (.*) \| (.*) \|$", NOTE, re.MULTILINE)
    for call in calls.split("; ")
}

OPS = tuple(REDUCTIONS)
CALLS = [
    *((name, {"op": op}) for name in ("all_reduce", "reduce_scatter", "reduce") for op in OPS),
    *(("all_reduce", {"op": op, "grad_placement": "replicate"}) for op in ("sum", "product")),
    *((name, {"grad_placement": "replicate"}) for name in ("all_gather", "broadcast")),
    ("scan", {"exclusive": True}),
    ("scan", {"op": torch.logaddexp}),
    *((name, {}) for name in COLLECTIVES if name not in ("all_reduce", "reduce_scatter", "reduce")),
]
BLOCKS = ("reduce_scatter", "all_to_all", "scatter", "split")


def label(value):
    return ", ".join(getattr(v, "__name__", str(v)) for v in value.values()) if isinstance(value, dict) else value


def row(name, op="sum", small=False, exclusive=False, **more):
    """Return what the table calls this call."""
    words = f"`{name}`" + ": exclusive=True" * exclusive
    if name in ("all_reduce", "reduce_scatter", "reduce"):
        words += ": sum, mean" if op in ("sum", "mean") else ": other ops" + ", small x" * small
    return words


def formulas(name, op="sum", grad_placement="partial", **more):
    """Return those of the bytes of a call."""
    forward, backward = FORMULAS[row(name, op, **more)][0]
    if grad_placement == "replicate":
        backward = "0" if op in ("sum", "mean") else "(N − 1)·b"
    return forward, backward


def value(formula, n, x=0, block=0):
    code = formula.replace("⌈log₂ N⌉", "ceil(log2(N))").replace("·", "*").replace("−", "-")
    return eval(code, {"ceil": math.ceil, "log2": math.log2, "N": n, "B": x, "b": block})


def expected(name, arguments, n, x, block=None, **more):
    """Return the bytes of forward and backward; block: that of equal blocks, if None."""
    block = x / n if block is None else block
    return [value(formula, n, x, block) for formula in formulas(name, **arguments, **more)]


def rounds(name, n, **arguments):
    """Return how many forward and backward take, and the messages of the busiest rank in each."""
    both, messages = FORMULAS[row(name, **arguments)][1]
    return [value(formula, n) for formula in (both.split("; ") * 2)[:2]], value(messages, n)


def call(name, shapes, arguments):
    more = {"pairs": [(r, (r + 1) % len(shapes)) for r in range(len(shapes))]} if name == "permute" else {}
    return Case(name, tuple(shapes), {**arguments, **more}, dtype=torch.float32)


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=label)
def test_equal_blocks(name, arguments):
    for n in (2, 3, 4, 8):
        expected_rounds, messages = rounds(name, n, **arguments)
        for numel in (n, 40 * n):
            found = traffic(call(name, [(numel,)] * n, arguments))
            assert [direction.nbytes for direction in found] == expected(name, arguments, n, 4 * numel)
            tabled = 1 if arguments.get("grad_placement") == "replicate" else 2  # directions
            assert [direction.rounds for direction in found[:tabled]] == expected_rounds[:tabled]
            assert all(direction.messages == direction.rounds * messages for direction in found)


@pytest.mark.parametrize(
    ("name", "arguments"), [c for c in CALLS if c[0] not in ("all_to_all", "shift", "permute")], ids=label
)
def test_unequal_blocks(name, arguments):
    """B is the largest x, b the largest block. Where a rank without messages has the largest, they are a bound."""
    for n in (2, 3, 4, 8):
        sizes = [(2 * r + 3) % 5 for r in range(n)]  # 3, 0, 2, 4, 1, …
        total, largest, more = sum(sizes), max(sizes), dict(arguments)
        if name in ("all_gather", "gather"):
            shapes, x, block = [(size,) for size in sizes], largest, None
            more["sizes"] = sizes
        elif name in BLOCKS:
            shapes, x, block = [(total,)] * n, total, largest
            more["sizes"] = sizes
        else:
            shapes, x, block = [(7 * n + 1,)] * n, 7 * n + 1, even_sizes(7 * n + 1, n)[0]
        model = expected(name, arguments, n, 4 * x, block and 4 * block)
        rooted = name in ("gather", "scatter") or (name == "reduce" and arguments["op"] not in ("sum", "mean"))
        for found, most in zip(traffic(call(name, shapes, more)), model, strict=True):
            assert found.nbytes <= most if rooted else found.nbytes == most


def test_unequal_blocks_of_all_to_all():
    n = 3
    matrix = [[(3 * r + 2 * s + 1) % 4 for s in range(n)] for r in range(n)]
    received = [[matrix[s][r] for s in range(n)] for r in range(n)]
    shapes = tuple((sum(row),) for row in matrix)
    case = Case("all_to_all", shapes, {}, {"split_sizes": matrix, "concat_sizes": received}, dtype=torch.float32)
    for found, most in zip(traffic(case), expected("all_to_all", {}, n, 0, 4 * 3), strict=True):
        assert found.rounds == 1
        assert 0 < found.nbytes <= most


@pytest.mark.parametrize("name", ["all_reduce", "reduce"])
@pytest.mark.parametrize("op", ["max", "product"])
def test_small_tensors_are_gathered_whole(name, op):
    for n in (2, 3):
        small = traffic(call(name, [(4,)] * n, {"op": op}), small=16)
        forward, backward = expected(name, {"op": op}, n, 16, small=True)
        if name == "all_reduce":  # its backward is a small sum, which the library gathers and adds up
            backward, _ = expected("all_gather", {}, n, 16)
        assert [direction.nbytes for direction in small] == [forward, backward]
        assert [direction.rounds for direction in small] == [1, 1]
        large = traffic(call(name, [(5 * n,)] * n, {"op": op}), small=16)
        assert [direction.nbytes for direction in large] == expected(name, {"op": op}, n, 20 * n)


@pytest.mark.parametrize("n", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_rounds_and_messages_of_many_ranks(n):
    """Of one call in each row of the table."""
    cases = {row(name, **more): (name, more) for name, more in CALLS if "grad_placement" not in more}
    assert cases.keys() == {words for words in FORMULAS if "small" not in words}
    for name, arguments in cases.values():
        found = traffic(call(name, [(n,)] * n, arguments))
        expected_rounds, messages = rounds(name, n, **arguments)
        assert [direction[:2] for direction in found] == [(k, k * messages) for k in expected_rounds]
        assert max(expected_rounds) <= math.ceil(math.log2(n)) + 1


@dataclass(frozen=True)
class Composed(Case):
    """A call of a function that is made of collectives."""

    def call(self, x, rank):
        if self.name == "gather_batch":
            return dc.gather_batch(x).tree
        return dc.halo_exchange(x, 0, 1, 1) if self.name == "halo_exchange" else torch.stack([b for _, b in dc.ring(x)])


def test_rounds_of_what_is_made_of_collectives():
    for n in (2, 3, 8):
        for name, expected_rounds in {"ring": [n, n - 1], "gather_batch": [2, 1], "halo_exchange": [2, 2]}.items():
            assert [direction.rounds for direction in traffic(Composed(name, ((2,),) * n))] == expected_rounds


def test_what_is_small():
    assert {**c10d.SMALL, "mpi": mpi.TOGETHER} == {"gloo": 128 << 10, "mpi": 128 << 10, "nccl": 256 << 10}  # as noted


def test_every_collective_is_in_the_table():
    assert {call.split("`")[1] for call in FORMULAS} == {*COLLECTIVES}


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "gather"])
def test_the_memory_in_the_note(name):
    (noted,) = re.findall(rf"^\| `{name}`(?:: sum)? \| (\d\.\d) \|", NOTE, re.MULTILINE)
    numel = 1 << 22
    found = peak_memory(Bench("torch", 2, 1), call(name, [(numel,)] * 2, {})) / (4 * numel)
    assert found == pytest.approx(float(noted), abs=0.35)
