"""`python -m benchmarks`: the fit, the JSON file and the picture; times are not asserted."""

import json
import math

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console

from benchmarks import bench, costs, fit, main, plot, training
from benchmarks.rows import OURS, Row, Times

KIB = 1 << 10


def synthetic(row, engine, n, model, noise=(0.0, 0.0, 0.0, 0.0)):
    """A fit to the times that a model gives."""
    sizes = [64 * KIB, 128 * KIB, 512 * KIB, 4096 * KIB]
    works = [fit.work(row, costs.ENGINES[engine], n, size) for size in sizes]
    seconds = [w.seconds(model) + more for w, more in zip(works, noise, strict=True)]
    solved = fit.solve((works[0], seconds[0]), (works[2], seconds[2]), model.gamma)
    measured = dict(zip(sizes, seconds, strict=True))
    return fit.Fit(row.collective, row.collective, None, engine, n, row, solved, measured)


@pytest.mark.parametrize("row", costs.ROWS, ids=lambda row: f"{row.collective} {row.which}"[:30])
def test_recovers_latency_and_bandwidth(row):
    for n in (2, 3, 8):
        for engine in costs.ENGINES:
            model = fit.Model(30e-6, 0.4e-9, 0.1e-9 if row.stack != "0" else 0.0)
            found = synthetic(row, engine, n, model)
            assert found.model.alpha == pytest.approx(model.alpha, rel=1e-6)
            assert found.model.beta == pytest.approx(model.beta, rel=1e-6)
            assert found.model.clamped == ""
            for size, seconds in found.measured.items():
                assert found.predicted(size) == pytest.approx(seconds, rel=1e-9)


def test_noise_never_makes_a_negative_latency_or_bandwidth():
    row = costs.row("all_gather")
    late = synthetic(row, "torch", 2, fit.Model(1e-6, 1e-9), (0.0, 0.0, 5e-3, 0.0))  # the large one took too long
    assert late.model.clamped == "latency"
    assert (late.model.alpha, late.model.beta > 1e-9) == (0.0, True)
    assert late.predicted(512 * KIB) == pytest.approx(late.measured[512 * KIB])
    assert late.extrapolated() == {}
    assert all(entry["clamped"] == "latency" and entry["extrapolated"] == [] for entry in [late.as_json()])
    early = synthetic(row, "torch", 2, fit.Model(1e-6, 1e-9), (50e-3, 0.0, 0.0, 0.0))  # the small one did
    assert early.model.clamped == "bandwidth"
    assert (early.model.alpha > 1e-6, early.model.beta) == (True, 0.0)
    assert early.predicted(64 * KIB) == pytest.approx(early.measured[64 * KIB])
    none = fit.solve((fit.Work(2, 10, 10), 1.0), (fit.Work(2, 100, 100), 2.0), gamma=1.0)  # the op alone took longer
    assert none[:2] == (0, 0)
    assert none.clamped == "bandwidth"
    none = fit.solve((fit.Work(2, 10, 10), 1.0), (fit.Work(2, 100, 10), 1.5), gamma=1.0)
    assert none[:2] == (0, 0)
    assert none.clamped == "latency"


def test_extrapolation():
    """By hand: the library's messages between all pairs, gloo's ring, and recursive halving and doubling."""
    model, size = fit.Model(10e-6, 1e-9), 512 * KIB
    found = synthetic(costs.row("reduce_scatter"), "torch", 2, model).extrapolated()
    assert list(found) == ["ring = the library (messages)", "tree"]
    last = [seconds[-1] for seconds in found.values()]
    moved = 2 * 65535 / 65536 * size * 1e-9
    assert last == pytest.approx([2 * 65535 * 10e-6 + moved, 2 * 16 * 10e-6 + moved])
    sums = synthetic(costs.row("all_reduce"), "torch", 2, model).extrapolated()
    assert list(sums) == ["ring = the library (gloo's own)", "tree"]
    assert sums["tree"][0] == pytest.approx(2 * 2 * 3 * 10e-6 + 2 * 2 * 7 / 8 * size * 1e-9)
    assert list(synthetic(costs.row("scan"), "mpi", 2, model).extrapolated()) == ["the library (messages)"]
    down = synthetic(costs.row("broadcast"), "torch", 2, model).extrapolated()
    own = down["the library (gloo's own, messages)"]
    assert own[1] == pytest.approx((6 + 63) * (10e-6 + size * 1e-9))
    assert down["ring"][1] == pytest.approx(2 * ((6 + 63) * 10e-6 + 2 * 63 / 64 * size * 1e-9))


def test_fit_on_processes(capsys, monkeypatch, tmp_path):
    sizes = {"4 KB": 1024, "8 KB": 2048, "64 KB": 1 << 14, "128 KB": 1 << 15}
    monkeypatch.setattr(fit, "SIZES", sizes)
    monkeypatch.setattr(bench, "OPS", {"reduce_scatter": ("sum", "max")})
    file = tmp_path / "fit.json"
    names = "reduce_scatter,scan"
    assert main(["--fit", "--only", names, "--rounds", "2", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "t = m·α + v·β + s·γ, fitted to 4 KB and 64 KB" in printed
    assert "EXTRAPOLATED, not measured: forward + backward of 64 KB" in printed
    assert "N = 65,536" in printed
    content = json.loads(file.read_text())
    assert content["rows"] == []
    labels = [(found["collective"], found["op"]) for found in content["fits"]]
    assert labels == [("reduce_scatter", "sum"), ("reduce_scatter", "max"), ("scan", None)]
    for found in content["fits"]:
        assert found["world_size"] == 2
        assert [m["bytes"] for m in found["measured"]] == [4 * numel for numel in sizes.values()]
        assert (found["gamma_s_per_byte"] > 0) == (found["op"] == "max")
        for number in [m[key] for m in found["measured"] for key in ("seconds", "predicted_seconds")]:
            assert math.isfinite(number)
            assert number > 0
        extrapolated = found["extrapolated"]
        assert {e["world_size"] for e in extrapolated} == (set() if found["clamped"] else set(fit.RANKS))
        rows = 1 if found["clamped"] or found["collective"] == "scan" else 2
        assert len(extrapolated) == (0 if found["clamped"] else rows * len(fit.RANKS))
        assert all(math.isfinite(e["seconds"]) and e["seconds"] > 0 for e in extrapolated)


# ── the files ────────────────────────────────────────────────────────────────────────────────────────────


def test_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "SIZES", {"4 B": 1, "4 KB": 1 << 10})
    data, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = ["--rounds", "1", "--json", str(data), "--plot", str(picture)]
    assert main(["all_gather", "scan", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "4 B, cold" in printed
    content = json.loads(data.read_text())
    assert set(content) == {"schema", "diffcoll", "rows", "fits"}
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
    assert imread(picture).std() > 0


def rows(*of):
    return [
        Row(name, op, size, nbytes, 2, "torch", "2.13.0", {n: Times(1.0, ms) for n, ms in systems.items()}, 8, None)
        for name, op, systems in of
        for size, nbytes in {"4 B": 4, "1 MB": 1 << 20}.items()
    ]


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_formats_of_the_picture(tmp_path, suffix, start):
    file = tmp_path / f"picture.{suffix}"
    plot.save(rows(("all_reduce", "sum", {OURS: 1.0, "other": 2.0}), ("scan", None, {OURS: 1.0})), file)
    assert file.read_bytes().startswith(start)


def test_what_the_picture_shows(tmp_path):
    systems = {OURS: 2.0, "one": 1.0, "another": 40.0}
    few = {name: systems[name] for name in (OURS, "another")}
    measured = rows(("all_reduce", "sum", systems), ("all_reduce", "max", few), ("scan", None, {OURS: 1.0}))
    figure = plot.drawn(measured)
    assert [axes.get_title() for axes in figure.axes] == ["all_reduce", "all_reduce max"]
    assert "no other system offers scan" in figure.get_suptitle()
    (legend,) = figure.legends
    assert [entry.get_text() for entry in legend.get_texts()] == ["one", "another"]
    first, second = figure.axes
    at_one, *lines = first.lines
    assert list(at_one.get_ydata()) == [1, 1]
    assert [list(line.get_ydata()) for line in lines] == [[2, 2], [0.05, 0.05]]
    assert lines[1].get_color() == second.lines[1].get_color() != lines[0].get_color()
    low, high = first.get_ylim()
    assert low < 0.05 < 2 < high
    plot.save(rows(("scan", None, {OURS: 1.0})), tmp_path / "nothing_to_compare_with.png")


def test_a_file_that_cannot_be_written_in_the_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench._Bench, "costs", lambda self, names: (tmp_path / "made").rmdir() or [])
    (tmp_path / "made").mkdir()
    assert main(["scan", "--json", str(tmp_path / "made" / "bench.json")]) == 1
    assert "benchmarks: [Errno 2]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--plot x.txt", "argument --plot: got 'x.txt', expected a file name that ends in .png, .svg or .pdf"),
        ("x", "argument NAME: got 'x', expected names of all_reduce"),
        ("all_reduce --only averager,x", "argument --only: got 'x', expected names of all_reduce"),
        ("--world-size 0", "argument --world-size: got '0', expected an integer from 1"),
        ("--rounds 0", "argument --rounds: got '0', expected an integer from 1"),
        ("--plot missing/x.png", "argument --plot: 'missing/x.png' cannot be written: No such file"),
        ("--json missing/x.json", "argument --json: 'missing/x.json' cannot be written: No such file"),
        ("trees overlap --json x.json", "argument --json: got only trees, overlap, expected a collective among"),
        ("averager --plot x.png", "argument --plot: got only averager, expected a collective among the names"),
        ("--fit all_reduce trees", "argument --fit: got trees too, expected collectives only"),
        ("--fit --world-size 1", "argument --fit: got --world-size 1, expected at least 2: one rank sends no messages"),
        ("--fit --plot x.png", "argument --plot: got --fit too, expected one of them"),
        ("--json x.png --plot ./x.png", "argument --plot: got 'x.png', the file of --json too; pass another file"),
    ],
)
def test_wrong_arguments(arguments, said, status_of, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    status, _, printed = status_of(main, *arguments.split())
    assert status == 2
    assert f"error: {said}" in printed
    assert not list(tmp_path.iterdir())


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
