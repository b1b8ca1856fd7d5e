"""What users install, and what is said about it."""

import re
import shutil
import subprocess
import tomllib
import zipfile

import pytest
from runs import ROOT, python
from test_notes import blocks

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
