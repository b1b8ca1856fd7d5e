"""What users install, and what is said about it."""

import importlib.util
import os
import re
import shutil
import subprocess
import tomllib
import venv
import zipfile
from pathlib import Path

import mpi_ranks
import pytest
import torch
from releases import compiles
from runs import ROOT, python
from test_notes import AFTER_THE_FIRST, NOTES, STEPS, blocks

import diffcoll


def build(kind, tree):
    """Build an sdist or a wheel of a folder, and return its path."""
    (tree / "dist").mkdir()
    python("-W", "ignore", "-c", f"from setuptools import build_meta; build_meta.build_{kind}('dist')", cwd=tree)
    (path,) = (tree / "dist").iterdir()
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, built of the sdist, and the names of what git tracks, of which that is built."""
    pytest.importorskip("setuptools", minversion="77")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    tree = tmp_path_factory.mktemp("tree")
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    shutil.unpack_archive(build("sdist", tree), tree / "unpacked", filter="data")
    (unpacked,) = (tree / "unpacked").iterdir()
    left_out = {name for name in names if not (unpacked / name).is_file()}
    assert left_out == {name for name in names if name.startswith((".ci/", ".gitignore"))}
    return build("wheel", unpacked), names


def test_the_wheel_has_the_library_alone(built):
    path, names = built
    with zipfile.ZipFile(path) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode()
    assert found == {name for name in names if name.startswith("diffcoll/")}
    assert f"Version: {diffcoll.__version__}\n" in metadata
    assert re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)[0].startswith("torch>=")
    assert not re.search(r"^Requires-Dist: [^;]*<", metadata, re.MULTILINE)  # no upper bounds


def test_a_newcomer(built, tmp_path):
    """Installs the wheel, and runs README and the three tutorials as they stand, one after the other."""
    installed = tmp_path / "installed"
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(installed)
    pages = [ROOT / "README.md", *(ROOT / "notes" / "start").glob("*-*.md")]
    assert len(pages) == 4
    programs = {}
    for page in pages:
        programs[page.stem] = [code for _, code in blocks(page.read_text(encoding="utf-8"))]
    programs["README"] = programs["README"][1:]  # the first lines are of a user's training
    for page in pages:
        (tmp_path / f"{page.stem.replace('-', '_')}.py").write_text("\n".join(programs[page.stem]), encoding="utf-8")
    run = "runpy.run_path(f'{name}.py', run_name='__main__')"
    every = f"import runpy, sys, diffcoll\nfor name in sys.argv[1:]: {run}\nprint(diffcoll.__file__)"
    found = {"cwd": tmp_path, "environment": {"PYTHONPATH": str(installed)}}
    names = "README", "first_gradient", "whole_batch_loss", "test_your_loss"
    assert python("-c", every, *names, **found).stdout.endswith(f"{installed}/diffcoll/__init__.py\n")

    (tmp_path / "train.py").write_text(programs["first-gradient"][-1], encoding="utf-8")
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    printed = python(*launcher, "train.py", **found).stdout
    for rank in range(2):
        assert f"rank {rank} of 2: y = [2.0, 2.0], gradient [2.0, 2.0]" in printed
    verify = "-m", "diffcoll", "verify", "--only", "split", "--world-size", "1"
    assert "calls are right" in python(*verify, **found).stdout


# ── in a fresh environment, from an empty folder ─────────────────────────────────────────────────────────

#: What newcomers come for, and the programs that do it: of a page, or of a section of it.
JOBS = {
    "CLIP under DDP": "how-to/clip-under-ddp.md",
    "batch norm of unequal batches": "training/batch-norm.md",
    "unequal micro-batches": "training/averaging.md",
    "a loss of one's own": "start/test-your-loss.md",
    "a hang": "how-to/find-a-hang.md",
    "a test in CI": "how-to/testing.md#I want a test in CI",
    "tensor parallelism": "how-to/tensor-parallelism.md",
    "a sharded model": "how-to/testing.md#I have a sharded model",
    "HF Trainer": "with/trainer.md",
    "FSDP2": "with/fsdp.md",
    "Lightning": "with/lightning.md",
    "a graph": "running/compile.md",
    "gradient penalty": "how-to/gradient-penalty.md",
    "MPI": "running/engines.md",
}
MAX_IN_A_GRAPH = """# torchrun --nproc-per-node 2 program.py
import torch, torch.distributed as dist, diffcoll as dc

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.tensor([3.0, 5.0][rank], requires_grad=True)
y = torch.compile(lambda x: dc.all_reduce(x, "max"), fullgraph=True, backend="aot_eager")(x)
([1.0, 10.0][rank] * y).backward()
assert (y.item(), x.grad.item()) == (5, [0, 11][rank])
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def fresh(built, tmp_path_factory):
    """The programs of an environment that pip has installed the wheel in, with all other packages of this one."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=True, symlinks=True)
    run_command(
        folder / "bin", "python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", built[0], cwd=folder
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(f"{Path(torch.__file__).parents[1]}\n", encoding="utf-8")
    return folder / "bin"


def run_command(programs, *command, cwd):
    """Run a command with the programs of this folder; return what it prints."""
    environment = {**mpi_ranks.environment(), "PATH": os.pathsep.join((str(programs), os.environ["PATH"]))}
    del environment["PYTHONPATH"]
    meanings = {"mpiexec": [mpi_ranks.MPIEXEC], "torchrun": ["python", "-m", "torch.distributed.run", "--standalone"]}
    command = [*meanings.get(command[0], command[:1]), *command[1:]]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_program(programs, code, folder):
    """Run a program as its first line says, as tests if it has any, or by itself."""
    for package in re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE):
        if not importlib.util.find_spec(package):
            pytest.skip(f"{package} is not installed")
    (folder / "program.py").write_text(code, encoding="utf-8")
    said = re.match(r"# ((?:mpiexec|python|torchrun) .*)\b\w+\.py\n", code)
    by_itself = ["python", "-m", "pytest"] if "\ndef test_" in code else ["python"]
    return run_command(programs, *(said[1].split() if said else by_itself), "program.py", cwd=folder)


def programs_of(job):
    """Return the programs of a job's page or section, each with what it needs of the page."""
    page, _, heading = JOBS[job].partition("#")
    text = (NOTES / page).read_text(encoding="utf-8")
    section = re.search(rf"^## {heading}\n.*?(?=^## )", text, re.MULTILINE | re.DOTALL)[0] if heading else text
    codes = [code for _, code in blocks(section)]
    if page in AFTER_THE_FIRST:
        return [next(blocks(text))[1] + code for code in codes]
    return ["\n".join(codes)] if page in STEPS else codes


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", [pytest.param(job, marks=compiles if job == "a graph" else ()) for job in JOBS])
def test_a_job(job, fresh, tmp_path):
    codes = programs_of(job)
    assert codes
    for code in codes:
        run_program(fresh, code, tmp_path)


@compiles
@pytest.mark.slow
def test_a_maximum_in_a_graph_of_two_ranks(fresh, tmp_path):
    run_program(fresh, MAX_IN_A_GRAPH, tmp_path)


@pytest.mark.slow
def test_the_command(fresh, tmp_path):
    where = run_command(fresh, "python", "-c", "import diffcoll; print(diffcoll.__file__)", cwd=tmp_path)
    assert Path(where).is_relative_to(fresh.parent)
    assert "calls are right" in run_command(
        fresh, "diffcoll", "verify", "--only", "split", "--world-size", "2", cwd=tmp_path
    )


# ── what is said of it ───────────────────────────────────────────────────────────────────────────────────


def test_ci_runs_what_the_package_accepts():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = [name.rpartition(" ")[2] for name in project["classifiers"] if re.search(r":: 3\.\d+$", name)]
    (torch_,) = project["dependencies"]
    matrix = f"""
        python: ["{'", "'.join(pythons)}"]
        torch: ["{torch_.replace(">", "=")}.*", "torch"]
"""
    assert matrix in (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    assert project["requires-python"] == f">={pythons[0]}"


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {diffcoll.__version__}\n" in text
