"""`python -m benchmarks`: what it prints, and the JSON file; times are not asserted."""

import json
from functools import partial

import pytest
import torch
from rich.console import Console

from benchmarks import __main__ as benchmarks
from benchmarks import collectives, losses, training
from benchmarks.measuring import Bench, Times
from diffcoll.testing import spawn

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional")


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Names of columns in one line."""
    monkeypatch.setattr(benchmarks, "Console", lambda **options: Console(width=400))


def test_collectives(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(collectives, "SIZES", {"4 B": 1, "4 KB": 1 << 10})
    data = tmp_path / "bench.json"
    benchmarks.main(["all_gather", "scan", "--rounds", "1", "--json", str(data)])
    assert "4 B, cold" in capsys.readouterr().out
    rows = json.loads(data.read_text())
    assert [(row["call"], row["nbytes"]) for row in rows] == [(c, n) for c in ("all_gather", "scan") for n in (4, 4096)]
    for row in rows:
        systems = {"diffcoll", collectives.NN, collectives.FLOOR} if row["call"] == "all_gather" else {"diffcoll"}
        assert set(row["systems"]) == systems
        assert all(min(times[key] for key in Times._fields) > 0 for times in row["systems"].values())
        assert row["bytes_sent"] == 2 * row["nbytes"]
        assert set(row["peak_memory"]) == (systems - {collectives.FLOOR} if row["nbytes"] > 4 else set())


CALLS = {"all_reduce": "mean"} | dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter"))


def agree(rank):
    for name, op in CALLS.items():
        steps = collectives.steps(collectives.case_of(name, op, 4, 2), "torch", rank)
        for system in {*steps} - {"diffcoll", collectives.SUM}:
            torch.testing.assert_close(steps[system](), steps["diffcoll"](), msg=f"{name}: {system}")
        assert collectives.NN in steps


def test_all_systems_compute_the_same():
    spawn(agree, range(2))


SMALL = {
    "clip": partial(losses.clip, rows=8, dims=4, chunk=4),
    "grad_cache": partial(losses.grad_cache, rows=8, dims=4, layers=2, chunk=4),
    "vocabulary": partial(losses.vocabulary, tokens=8, words=6, dims=4, chunk=4),
}


def same(rank):
    for make in SMALL.values():
        expected, *others = [step() for step in make(rank).values()]
        for found in others:
            torch.testing.assert_close(found, expected)


def test_all_variants_compute_the_same():
    spawn(same, range(2))


@pytest.mark.parametrize(
    "engine", [pytest.param([], id="gloo"), pytest.param(["--engine", "mpi"], id="mpi", marks=pytest.mark.slow)]
)
def test_ways_to_do_the_same(engine, monkeypatch, capsys):
    monkeypatch.setitem(benchmarks.COMPARED, "averager", {"few": training.MODELS["few large parameters"]})
    monkeypatch.setattr(Bench, "peaks", lambda *_: [0.0])
    benchmarks.main(["averager", "overlap", *engine, "--rounds", "2"])
    printed = capsys.readouterr().out
    assert "async_op=True" in printed and "DDP, bucket views, static" in printed
    assert "ratio to DDP" in printed
    assert ("diffcoll on MPI" in printed) == bool(engine)
