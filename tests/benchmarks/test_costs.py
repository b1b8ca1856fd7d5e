"""The cost model agrees with counted messages, and with tables of two pages, which this file as a program writes."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks import costs
from benchmarks.collectives import peak_memory
from benchmarks.counting import bytes_sent, traffic
from benchmarks.measuring import Bench
from diffcoll.collectives import COLLECTIVES
from diffcoll.core.reductions import REDUCTIONS
from diffcoll.engines import c10d, mpi
from diffcoll.engines.engine import even_sizes
from diffcoll.testing.cases import Case

ROOT = Path(__file__).parents[2]
NOTE = ROOT / "notes" / "running" / "costs.md"
CALLS_HEAD = "| bytes sent | forward | backward |\n|---|---|---|\n"

OPS = tuple(REDUCTIONS)
CALLS = [
    *((name, {"op": op}) for name in ("all_reduce", "reduce_scatter", "reduce") for op in OPS),
    *(("all_reduce", {"op": op, "grad_placement": "replicate"}) for op in ("sum", "product")),
    *((name, {"grad_placement": "replicate"}) for name in ("all_gather", "broadcast")),
    ("scan", {"exclusive": True}),
    *((name, {}) for name in COLLECTIVES if name not in ("all_reduce", "reduce_scatter", "reduce")),
]
BLOCKS = ("reduce_scatter", "all_to_all", "scatter", "split")


def label(value):
    return ", ".join(getattr(v, "__name__", str(v)) for v in value.values()) if isinstance(value, dict) else value


def expected(name, arguments, n, x, block=None, whole=False):
    row = costs.row(name, arguments.get("op", "sum"), whole=whole, exclusive="exclusive" in arguments)
    backward = row.replicated if arguments.get("grad_placement") == "replicate" else row.backward
    return [tuple(costs.value(terms, n, x, block) for terms in costs.total(s)) for s in (row.forward, backward)]


def call(name, shapes, arguments):
    more = {"pairs": [(r, (r + 1) % len(shapes)) for r in range(len(shapes))]} if name == "permute" else {}
    return Case(name, tuple(shapes), {**arguments, **more}, dtype=torch.float32)


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=label)
def test_equal_blocks(name, arguments):
    for n in (2, 3, 4, 8):
        for numel in (n, 40 * n):
            found = traffic(call(name, [(numel,)] * n, arguments))
            assert [*found] == expected(name, arguments, n, 4 * numel)


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
        model = expected(name, more, n, 4 * x, block and 4 * block)
        rooted = name in ("gather", "scatter") or (name == "reduce" and costs.row(name, arguments["op"]).stack == "1")
        for found, of_model in zip(traffic(call(name, shapes, more)), model, strict=True):
            assert all(a <= b for a, b in zip(found, of_model, strict=True))
            if not rooted:
                assert (found.rounds, found.nbytes) == (of_model[0], of_model[2])


def test_unequal_blocks_of_all_to_all():
    n = 3
    matrix = [[(3 * r + 2 * s + 1) % 4 for s in range(n)] for r in range(n)]
    received = [[matrix[s][r] for s in range(n)] for r in range(n)]
    shapes = tuple((sum(row),) for row in matrix)
    case = Case("all_to_all", shapes, {}, {"split_sizes": matrix, "concat_sizes": received}, dtype=torch.float32)
    model = expected("all_to_all", {}, n, 0, 4 * 3)
    for found, most in zip(traffic(case), model, strict=True):
        assert found.rounds == 1
        assert 0 < found.nbytes <= most[2]


@pytest.mark.parametrize("op", ["max", "product"])
def test_small_tensors_are_gathered_whole(op):
    for n in (2, 3):
        small = traffic(call("all_reduce", [(4,)] * n, {"op": op}), small=16)
        forward, _ = expected("all_reduce", {"op": op}, n, 16, whole=True)
        sum_of_small, _ = expected("all_gather", {}, n, 16)  # which the library gathers and adds up
        assert [*small] == [forward, sum_of_small]
        large = traffic(call("all_reduce", [(5 * n,)] * n, {"op": op}), small=16)
        assert [*large] == expected("all_reduce", {"op": op}, n, 20 * n)


def test_what_a_rank_sends_is_at_most_what_the_busiest_sends_or_receives():
    for n in (2, 3):
        for name in ("all_reduce", "reduce", "gather", "scan"):
            case = call(name, [(6 * n,)] * n, {})
            assert 0 < bytes_sent(case) <= sum(t.nbytes for t in traffic(case))


def test_what_is_small():
    assert c10d.SMALL["gloo"] == mpi.TOGETHER == 128 << 10  # as the note says


def test_every_collective_has_a_row_and_every_stage_a_cost():
    assert list(dict.fromkeys(row.collective for row in costs.ROWS)) == list(COLLECTIVES)
    for row in costs.ROWS:
        assert {name for name, _ in (*row.forward, *row.backward, *(row.replicated or ()))} <= {*costs.MESSAGES}


# ── the note ─────────────────────────────────────────────────────────────────────────────────────────────


def table_of_calls():
    """The calls that send the same share a row."""
    calls = {}
    for row in costs.ROWS:
        name = f"`{row.collective}`" + (f": {row.which}" if row.which else "")
        sent = [costs.text(costs.total(stages).nbytes) for stages in (row.forward, row.backward)]
        calls.setdefault(" | ".join(sent), []).append(name)
    return CALLS_HEAD + "".join(f"| {'; '.join(names)} | {sent} |\n" for sent, names in calls.items())


def test_the_table_of_the_note():
    found = re.search(re.escape(CALLS_HEAD) + r"(\|.*\n)+", NOTE.read_text(encoding="utf-8"))
    assert found and found[0] == table_of_calls(), f"run python {Path(__file__).relative_to(ROOT)}"


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "gather"])
def test_the_memory_in_the_note(name):
    (noted,) = re.findall(rf"^\| `{name}` \| (\d\.\d) \|", NOTE.read_text(encoding="utf-8"), re.MULTILINE)
    numel = 1 << 22
    found = peak_memory(Bench("torch", 2, 1), call(name, [(numel,)] * 2, {})) / (4 * numel)
    assert found == pytest.approx(float(noted), abs=0.35)


def main():
    old = NOTE.read_text(encoding="utf-8")
    pattern = re.compile(re.escape(CALLS_HEAD) + r"(\|.*\n)*")
    assert pattern.search(old)
    NOTE.write_text(pattern.sub(lambda _: table_of_calls(), old), encoding="utf-8")


if __name__ == "__main__":
    main()
