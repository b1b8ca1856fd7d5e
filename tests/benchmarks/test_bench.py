"""`python -m benchmarks`: what it prints, and the JSON file; times are not asserted."""

import json

import pytest
import torch
from rich.console import Console

from benchmarks import bench, main, training
from benchmarks.rows import OURS


def test_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "SIZES", {"4 B": 1, "4 KB": 1 << 10})
    data = tmp_path / "bench.json"
    assert main(["all_gather", "scan", "--rounds", "1", "--json", str(data)]) == 0
    printed = capsys.readouterr().out
    assert "4 B, cold" in printed
    content = json.loads(data.read_text())
    assert set(content) == {"schema", "diffcoll", "rows"}
    assert content["schema"] == 1
    assert [(row["collective"], row["bytes"]) for row in content["rows"]] == [
        *(("all_gather", size) for size in (4, 4096)),
        *(("scan", size) for size in (4, 4096)),
    ]
    for row in content["rows"]:
        keys = ["collective", "op", "bytes", "world_size", "engine", "torch", "systems", "bytes_sent"]
        assert list(row) == [*keys, "peak_memory_bytes"]
        assert (row["world_size"], row["engine"], row["op"]) == (2, "torch", None)
        assert row["bytes_sent"] == row["bytes"] * (2 if row["collective"] == "all_gather" else 1)
        assert (row["peak_memory_bytes"] is None) == (row["bytes"] == 4)
        assert row["systems"][OURS]["ratio"] == 1
        for name, system in row["systems"].items():
            assert set(system) == {"cold_ms", "warm_ms", "ratio"}
            assert system["ratio"] == pytest.approx(row["systems"][OURS]["warm_ms"] / system["warm_ms"]), name
        others = (
            {"torch.distributed.nn.functional", "a two-line Function"} if row["collective"] == "all_gather" else set()
        )
        assert {OURS, *others} <= set(row["systems"])


@pytest.mark.parametrize(
    "engine", [pytest.param([], id="gloo"), pytest.param(["--engine", "mpi"], id="mpi", marks=pytest.mark.slow)]
)
def test_bench(capsys, monkeypatch, engine):
    monkeypatch.setattr(bench, "SIZES", {"1 MB": 1 << 18})
    monkeypatch.setattr(training, "MODELS", {"tiny": (lambda: torch.nn.Linear(3, 3), (2, 3))})
    whole, ours = training.memory, training.OURS_ON_MPI if engine else training.OURS  # each starts processes
    monkeypatch.setattr(training, "memory", lambda model, *of: whole(model, *of) if of[0] == ours else 0.0)
    monkeypatch.setattr(bench, "wide_console", lambda: Console(width=400))  # names of columns in one line
    names = "all_gather,overlap" if engine else "all_gather,trees,overlap"
    assert main(["averager", *engine, "--only", names, "--rounds", "2"]) == 0
    printed = capsys.readouterr().out
    assert ("diffcoll.all_reduce(list)" in printed) == ("trees" in names)
    assert "async_op=True" in printed
    assert "DDP, bucket views, static" in printed
    assert printed.count("geometric mean") == (2 if engine else 1)
    assert ("diffcoll on MPI" in printed) == ("diffcoll on gloo" in printed) == bool(engine)
    assert "1 MB" in printed
    assert "×" in printed
