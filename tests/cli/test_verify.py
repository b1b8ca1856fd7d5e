"""`diffcoll verify`: a line for each call, the exit status, and the processes of launchers."""

import subprocess
import sys
from pathlib import Path

import mpi_ranks
import pytest
from releases import compiles
from runs import ROOT, python, rules

from diffcoll.cli import main, verify
from diffcoll.collectives import COLLECTIVES
from diffcoll.core.torch_private.release import COMPILES
from diffcoll.testing import cases


def calls_of(names, sizes):
    """How many lines these collectives have."""
    rows = sum(case.name in names for n in sizes for case in cases.table(n))
    return rows + len(names) * (len(sizes) + COMPILES)  # forward mode, and compiled on the largest number of ranks


@compiles
def test_on_processes_of_this_machine():
    command = "-m", "diffcoll", "verify", "--only", "split, shift", "--world-size", "1", "2"
    *lines, last = python(*command).stdout.splitlines()
    n = calls_of(["split", "shift"], [1, 2])
    assert len(lines) == n and all(line.startswith("✓ ") for line in lines)
    assert last.startswith(f"{n} of {n} calls are right: gloo processes of this machine, torch ")
    assert [line for line in lines if "compiled" in line] == [line for line in lines if "compiled) on 2 ranks" in line]


def test_the_table_has_every_collective():
    for n in (1, 2, 3):
        assert {case.name for case in cases.table(n)} == set(COLLECTIVES)


@pytest.fixture
def planted(monkeypatch):
    """Return a function that makes simulated ranks of the command use another `Case.call`."""
    right = cases.Case.call

    def plant(call):
        monkeypatch.setattr(cases.Case, "call", lambda *arguments: call(right, *arguments))
        monkeypatch.setattr(verify, "spawn", lambda fn, ranks, **_: rules(fn, ranks))
        monkeypatch.setattr(verify, "COMPILES", False)

    return plant


def test_a_wrong_gradient(planted, capsys):
    """A small error of one call, on one rank."""

    def call(right, case, x, rank):
        y = right(case, x, rank)
        return y + (y - y.detach()) * 1e-8 * (rank == 1 and case.label == "reverse=True")

    planted(call)
    assert main(["verify", "--only", "scan,shift", "--world-size", "2"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    wrong = [line for line in lines if line.startswith("✗ ")]
    assert [line.split(" on ")[0] for line in wrong] == ["✗ scan(reverse=True)", "✗ scan(all calls, forward mode)"]
    assert last.startswith(f"{len(lines) - 2} of {len(lines)} calls are right")


def test_every_number_of_ranks_counts(planted, capsys):
    planted(lambda right, case, x, rank: right(case, x, rank) * (2 if case.size == 2 else 1))
    assert main(["verify", "--only", "split", "--world-size", "2", "3"]) == 1
    *lines, _ = capsys.readouterr().out.splitlines()
    assert {line.split(": ")[0][-7:] for line in lines if line[0] == "✗"} == {"2 ranks"}
    assert {line.split(": ")[0][-7:] for line in lines if line[0] == "✓"} == {"3 ranks"}


# ── launchers ────────────────────────────────────────────────────────────────────────────────────────────

#: The command as a program, without compiled calls; rank 1 raises in a call if the first argument says so.
PROGRAM = """
import sys
from diffcoll.cli import main, verify
from diffcoll.testing import cases

def call(case, x, rank, right=cases.Case.call):
    if sys.argv[1] == "raises" and rank == 1:
        raise ValueError("planted")
    return right(case, x, rank)

cases.Case.call = call
verify.COMPILES, verify.PATIENCE = False, 5
sys.exit(main(["verify", *sys.argv[2:]]))
"""


def torchrun(tmp_path, *arguments, returns=0):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    launcher += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", program]
    return python(*launcher, *arguments, returns=returns, environment={"GLOO_SOCKET_IFNAME": "lo"}, timeout=110)


def test_under_torchrun(tmp_path):
    done = torchrun(tmp_path, "right", "--only", "split")
    n = calls_of(["split"], [2]) - COMPILES
    assert done.stdout.count("✓ split(") == n  # rank 0 reports
    assert done.stdout.count(f"{n} of {n} calls are right: 2 launched gloo processes") == 1


def test_a_call_that_raises_under_torchrun(tmp_path):
    done = torchrun(tmp_path, "raises", "--only", "split", returns=1)
    assert "✗ split() raises on rank 1 of 2" in done.stderr
    assert "ValueError: planted" in done.stderr
    assert "calls are right" not in done.stdout


def test_under_mpiexec():
    program = "import sys; from diffcoll.cli import main, verify; verify.COMPILES = False; sys.exit(main(sys.argv[1:]))"
    command = [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", sys.executable, "-c", program]
    environment = {**mpi_ranks.environment(), "PYTHONPATH": str(ROOT)}
    command += ["verify", "--only", "split"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    n = calls_of(["split"], [2]) - COMPILES
    assert done.stdout.count(f"{n} of {n} calls are right: 2 processes of MPI") == 1


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────


def test_alone(capsys):
    assert main([]) == 0
    assert "verify" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    ["check", "verify --backend foo", "verify --only allreduce", "verify --only all_reduce,x",
     "verify --world-size 2 0", "verify --world-size two", "verify --seed x", "verify --engine mpi"],
)  # fmt: skip
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    assert "error: " in capsys.readouterr().err


def test_a_size_that_the_launcher_has_set(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "--world-size", "2"])
    assert "--world-size" in capsys.readouterr().err
