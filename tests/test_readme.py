"""README, notes and examples run and are consistent with the code."""

import contextlib
import io
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_ranks import SETTINGS
from runs import python
from test_notes import ROOT, blocks, prose, run_blocks

import diffcoll
from diffcoll.collectives import COLLECTIVES

README = ROOT / "README.md"


def test_every_block_runs():
    """And prints what stands below it."""
    text = README.read_text(encoding="utf-8")
    assert len(list(blocks(text))) == 1
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_blocks(README)
    assert f"```\n\n```text\n{printed.getvalue()}```\n" in text


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", prose(README.read_text(encoding="utf-8"))):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_index_says_what_the_rule_says(name):
    """The table in notes/collectives/README.md has the formulas of the modules' headers."""
    header = (ROOT / "diffcoll" / "collectives" / f"{name}.py").read_text(encoding="utf-8").split('"""')[1]
    lines = [re.search(rf"^{label} +(.*)$", header, re.MULTILINE)[1] for label in ("forward", "adjoint")]
    formulas = [re.sub(r" +=", " =", line).split("  ")[0] for line in lines]
    row = next(
        line
        for line in (ROOT / "notes" / "collectives" / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith(f"| [{name}](")
    )
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:] == formulas


def test_the_public_api_is_one_list():
    assert set(COLLECTIVES) <= set(diffcoll.__all__)
    for name in diffcoll.__all__:
        value = getattr(diffcoll, name)
        assert value.__doc__, name
        if name in COLLECTIVES:
            for part in (">>>", "Args:", "Returns:", "Raises:", "Source: notes/collectives/"):
                assert part in value.__doc__, (name, part)


@pytest.mark.slow  # diffcoll verify is started by both launchers in the fast suite
@pytest.mark.parametrize(
    ("name", "arguments", "same"),
    [("digits_launched.py", [], ": (.*)"), ("simclr.py", ["--steps", "4"], ": (score .*);")],
    ids=["digits_launched", "simclr"],
)
def test_one_example_under_two_launchers(name, arguments, same):
    """`same` is what both print."""
    program = [str(ROOT / "examples" / name), *arguments]
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    environment["OMP_NUM_THREADS"] = "1"  # torchrun sets it
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
    mpiexec = [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", sys.executable, *program]
    printed = {}
    for engine, command in ("gloo", torchrun), ("MPI", mpiexec):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        printed[engine] = [line.strip() for line in re.findall(f"2 ranks on {engine}{same}", done.stdout)]
    assert printed["gloo"] == printed["MPI"]
    assert len(printed["MPI"]) == 1


#: Trainings, and the score that they exceed; of raw pixels, nearest neighbours have 71 %.
SCORES = {"simclr": 75, "clip": 71, "supcon": 80, "barlow_twins": 75, "segmentation": 60, "retrieval": 60}
#: This one has a test of its own.
MEASURED = "digits_contrastive"
#: Arguments of examples that take long by default; `make test-slow` runs trainings whole.
SMALLER = {
    **{f"{name}.py": ["--steps", "3"] for name in SCORES},
    "contrastive_cost.py": ["128", "32", "32"],
    "grad_cache_cost.py": ["64", "32", "2", "32"],
    "vocab_parallel_cost.py": ["64", "512", "16", "64"],
    "batch_norm_cost.py": ["2", "--steps", "2"],
}


# Each of the others would import PyTorch twice more: here, and in a server of its own that forks its ranks.
@pytest.mark.parametrize(
    "path",
    sorted(p for p in (ROOT / "examples").glob("*.py") if "__main__" in p.read_text() and p.stem != MEASURED),
    ids=lambda path: path.name,
)
def test_examples(path, tmp_path, monkeypatch, capsys):
    if path.name == "digits_launched.py":  # as users start it: it sets up MPI, which lasts until its process ends
        printed = python(path, cwd=tmp_path).stdout
    else:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(path), *SMALLER.get(path.name, [])])
        monkeypatch.syspath_prepend(str(path.parent))  # as Python does for a script
        runpy.run_path(str(path), run_name="__main__")
        printed = capsys.readouterr().out
    assert printed
    for file in re.findall(r"wrote (\S+)", printed):
        assert Path(tmp_path, file).exists()


@pytest.mark.slow
def test_the_wrong_gather_ends_worse(tmp_path):
    """What the picture shows is what was measured: the curves lie on each other, or end far apart."""
    printed = python(ROOT / "examples" / f"{MEASURED}.py", cwd=tmp_path, timeout=100).stdout
    ends = dict(re.findall(r"^(.+): loss ends at (\d+\.\d+)", printed, re.MULTILINE))
    one, right, wrong = (float(ends[name]) for name in ("one process", "diffcoll.all_gather", "detached gather"))
    assert right == one < wrong - 0.5
    chance = math.log(96)  # a loss that knows nothing: every column is as likely as the right one
    assert one < 0.5 * chance and wrong < chance
    assert (tmp_path / "digits_contrastive.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORES)
def test_a_training_in_full(name, tmp_path):
    printed = python(ROOT / "examples" / f"{name}.py", cwd=tmp_path, timeout=100).stdout
    on_ranks, on_one_process = map(float, re.findall(r"(\d+\.\d) %", printed))
    assert on_ranks == on_one_process > SCORES[name]
