"""`diffcoll verify`: says what is right, notices what is not, and runs under a launcher."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import diffcoll
from diffcoll.cli import bench, competitors, main, training, verify
from diffcoll.collectives import COLLECTIVES
from diffcoll.testing import cases
from diffcoll.testing.processes import Launched

ROOT = Path(diffcoll.__file__).parent.parent


def run(tmp_path, *arguments):
    """Exit status, and what is in the files."""
    files = tmp_path / "report.json", tmp_path / "report.html"
    status = main(["verify", *arguments, "--json", str(files[0]), "--html", str(files[1])])
    return status, json.loads(files[0].read_text()), files[1].read_text()


def test_right_beside_wrong(tmp_path, capsys):
    status, found, page = run(tmp_path, "--world-size", "2", "--only", "broadcast,reduce")
    printed = capsys.readouterr().out
    assert status == 0
    assert found["passed"]
    rows = {(row["collective"], row["call"]): row["systems"] for row in found["rows"]}
    kinds = {"jvp, all calls": {"output", "tangent"}, "compiled, all calls": {"output", "gradient"}}
    for (_, call), systems in rows.items():
        assert set(systems) == set(competitors.SYSTEMS)
        assert set(systems["diffcoll"]) == kinds.get(call, {"output", "gradient", "second"})
        assert max(systems["diffcoll"].values()) <= verify.BAR
    # what PyTorch's own really do: a broadcast whose backward is the identity
    theirs = rows["broadcast", "src=1"]["torch.distributed._functional_collectives"]
    assert theirs["output"] == 0
    assert theirs["gradient"] > 0.1
    assert max(rows["broadcast", ""]["torch.distributed.nn.functional"].values()) < 1e-10
    assert rows["reduce", ""]["torch.distributed._functional_collectives"] == "not offered"
    assert rows["reduce", "x: ties and zeros, op='product'"]["torch.distributed.nn.functional"]["gradient"] > 0.1
    theirs = {call: rows["broadcast", call] for call in kinds}
    assert theirs["jvp, all calls"]["torch.distributed._functional_collectives"]["tangent"] > 0.1  # dropped
    assert theirs["jvp, all calls"]["torch.distributed.nn.functional"] == "raises NotImplementedError"
    assert theirs["compiled, all calls"]["torch.distributed.nn.functional"].startswith("raises")
    count = sum(case.name in ("broadcast", "reduce") for case in cases.table(2)) + 2 * len(kinds)
    assert f"{count} of {count} calls are right" in printed
    assert "not offered" in printed
    assert page.startswith("<!doctype html>")
    assert f"{count} of {count} calls of diffcoll are right" in page
    assert not re.search(r'(src|href)="|https?://|<script', page)  # it stands by itself


def test_a_wrong_rule_is_noticed(tmp_path, monkeypatch, capsys):
    right = cases.Case.call

    def wrong(case, x, rank, group=None):
        y = right(case, x, rank, group)
        return y + (y - y.detach()) * 1e-8  # the gradient is off by a little

    monkeypatch.setitem(competitors.SYSTEMS, "diffcoll", lambda case, rank: lambda x: wrong(case, x, rank))
    status, found, page = run(tmp_path, "--world-size", "2", "--only", "shift")
    assert status == 1
    assert not found["passed"]
    assert "over the bar: shift" in capsys.readouterr().out
    assert "0 of 4 calls of diffcoll are right" in page


def test_training_on_real_input(tmp_path, capsys):
    status, found, page = run(tmp_path, "--only", "digits")
    assert status == 0
    training = found["training"]
    assert len(training["one_process"]) == 30
    assert training["one_process"][-1] < training["one_process"][0] / 2
    assert max(training["differences"]["diffcoll.all_gather"]) < 1e-9
    assert min(training["differences"]["the usual detached gather"]) > 0.1
    assert page.count("<polyline") == 3
    assert "diffcoll.all_gather" in capsys.readouterr().out


def test_the_table_has_every_collective():
    for n in (2, 3, 5):
        assert list(dict.fromkeys(case.name for case in cases.table(n))) == list(COLLECTIVES)
        labels = [(case.name, case.label) for case in cases.table(n)]
        assert len(set(labels)) == len(labels)


def test_wrong_options():
    with pytest.raises(SystemExit, match="--only: got 'allreduce', expected names of all_reduce"):
        main(["verify", "--only", "allreduce"])
    with pytest.raises(SystemExit, match="--only: got 'x', expected names of all_reduce"):
        main(["bench", "--only", "x"])


@pytest.mark.parametrize("what", ["permute,scatter", "digits"])
def test_under_torchrun(tmp_path, what):
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["-m", "diffcoll", "verify", "--only", what, "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["passed"]
    assert "2 launched gloo processes" in found["about"]
    if what == "digits":
        assert done.stdout.count("diffcoll.all_gather") == 1  # rank 0 reports
        assert max(found["training"]["differences"]["diffcoll.all_gather"]) < 1e-9
    else:
        count = sum(case.name in ("permute", "scatter") for case in cases.table(2)) + 2 * 2
        assert done.stdout.count(f"{count} of {count} calls are right") == 1
        assert {row["world_size"] for row in found["rows"]} == {2}


def test_under_mpiexec(tmp_path):
    file = tmp_path / "report.json"
    command = [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", sys.executable, "-m", "diffcoll", "verify"]
    command += ["--only", "permute,digits", "--json", str(file)]
    environment = {**os.environ, **Launched.SETTINGS, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["passed"]
    assert "2 processes launched by MPI" in found["about"]
    assert {row["world_size"] for row in found["rows"]} == {2}
    theirs = {row["call"]: row["systems"]["torch.distributed.nn.functional"] for row in found["rows"]}
    assert set(theirs.values()) == {"not offered"}
    assert max(found["training"]["differences"]["diffcoll.all_gather"]) < 1e-9


def test_on_mpi(tmp_path, monkeypatch):
    monkeypatch.delitem(competitors.SYSTEMS, "torch.distributed._functional_collectives")  # one of gloo is enough
    status, found, _ = run(tmp_path, "--engine", "mpi", "--world-size", "2", "--only", "scatter")
    assert status == 0
    assert "mpi processes on this machine" in found["about"]
    assert found["rows"][0]["systems"]["torch.distributed.nn.functional"]["gradient"] < 1e-10  # on gloo


@pytest.mark.parametrize("engine", [[], ["--engine", "mpi"]], ids=["gloo", "mpi"])
def test_bench(capsys, monkeypatch, engine):
    monkeypatch.setattr(bench, "SIZES", {"1 MB": 1 << 18})
    monkeypatch.setattr(training, "MODELS", {"tiny": (lambda: torch.nn.Linear(3, 3), (2, 3))})
    if engine:  # processes of MPI take seconds to start
        whole, ours = training.memory, training.OURS_ON_MPI
        monkeypatch.setattr(training, "memory", lambda model, *of: whole(model, *of) if of[0] == ours else 0.0)
    names = "all_gather,overlap" if engine else "all_gather,trees,overlap"
    assert main(["bench", "averager", *engine, "--only", names, "--rounds", "2"]) == 0
    printed = capsys.readouterr().out
    assert ("diffcoll.all_reduce(list)" in printed) == ("trees" in names)
    assert "async_op=True" in printed
    assert "DDP, bucket views, static" in printed
    assert printed.count("geometric mean") == (2 if engine else 1)
    assert ("diffcoll on MPI" in printed) == ("diffcoll on gloo" in printed) == bool(engine)
    assert "1 MB" in printed
    assert "×" in printed
