"""What users install, and what is said about it."""

import re
import subprocess
import tarfile
import zipfile

import pytest
from runs import ROOT, python
from test_notes import blocks

import diffcoll

BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])('dist')"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what git tracks."""
    tree = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    return tree, names


@pytest.fixture(scope="module")
def built(tree):
    """The source distribution and the wheel."""
    pytest.importorskip("setuptools", minversion="77")
    folder, _ = tree
    (folder / "dist").mkdir()
    for kind in "build_sdist", "build_wheel":
        python("-W", "ignore", "-c", BUILD, kind, cwd=folder)
    return folder / "dist"


def test_the_source_distribution_has_all_that_git_has(tree, built):
    _, names = tree
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    private = re.compile(r"\.|.*/\.")  # .ci, .gitignore
    assert {name for name in names if not private.match(name)} <= found


def test_the_wheel_has_the_library_alone(tree, built):
    _, names = tree
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode()
    assert found == {name for name in names if name.startswith("diffcoll/")}
    assert f"Version: {diffcoll.__version__}\n" in metadata
    assert re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)[0].startswith("torch>=")
    assert not re.search(r"^Requires-Dist: [^;]*<", metadata, re.MULTILINE)  # no upper bounds


def test_a_newcomer(built, tmp_path):
    """Installs the wheel, and runs README and the three tutorials as they stand, one after the other."""
    installed = tmp_path / "installed"
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(installed)
    pages = [ROOT / "README.md", *(ROOT / "notes" / "start").glob("*-*.md")]
    assert len(pages) == 4
    programs = {}
    for page in pages:
        programs[page.stem] = [code for _, code in blocks(page.read_text(encoding="utf-8"))]
    programs["README"] = programs["README"][1:]  # the first four lines are of a user's training
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


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {diffcoll.__version__}\n" in text
