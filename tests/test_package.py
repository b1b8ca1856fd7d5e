"""What users install, and what is said about it."""

import re
import subprocess
import tarfile
import zipfile

import pytest
from runs import ROOT, python

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
    assert found == {name for name in names if name.startswith("diffcoll/")} | {"diffcoll_pytest.py"}
    assert f"Version: {diffcoll.__version__}\n" in metadata
    assert re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)[0].startswith("torch>=")
    assert not re.search(r"^Requires-Dist: [^;]*<", metadata, re.MULTILINE)  # no upper bounds


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {diffcoll.__version__}\n" in text
