"""What users install, and what is said about it."""

import re
import shutil
import subprocess
import tarfile
import zipfile

import pytest
from runs import ROOT, python
from test_notes import FENCE, blocks, prose

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


@pytest.mark.slow
def test_tests_of_the_source_distribution_run(built, tmp_path):
    """Those of a collective, its note, and the site, on what was unpacked."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (top,) = tmp_path.iterdir()
    some = "tests/collectives/test_broadcast.py", "tests/test_notes.py", "tests/test_site.py"
    run = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *some, cwd=top, environment={"PYTHONPATH": str(top)})
    assert "failed" not in run.stdout and f"{top}" not in run.stderr


def test_the_wheel_has_the_library_alone(tree, built):
    _, names = tree
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode()
    assert found == {name for name in names if name.startswith("diffcoll/")}
    assert f"Version: {diffcoll.__version__}\n" in metadata
    assert re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)[0].startswith("torch>=")
    assert not re.search(r"^Requires-Dist: [^;]*<", metadata, re.MULTILINE)  # no upper bounds


def test_the_readme_of_a_package_index(tree, built):
    """It is README.md, with names in place of links, which have nowhere to lead there; the names are files."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode()
    head, _, shown = metadata.partition("\n\n")
    assert "\nDescription-Content-Type: text/markdown\n" in head
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert FENCE.findall(shown) == FENCE.findall(text)
    linked = set(re.findall(r"\]\(([^)#]*)", prose(text)))
    assert len(linked) > 10 and not re.search(r"\]\(|<img", prose(shown))
    named = set(re.findall(r"`([\w./-]+\.(?:md|svg))`", prose(shown)))
    assert named == {name for name in linked if name.endswith(".md")} and named <= {*tree[1]}
    assert "Gradients of a gathered tensor on two ranks: 11 and 11;" in shown


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


def test_the_wheel_passes_the_check_of_its_contents(built):
    """No file of tests, no bytecode, no folder that is no package; and the record agrees with the files."""
    pytest.importorskip("check_wheel_contents")
    wheel = next(built.glob("*.whl"))
    done = python("-m", "check_wheel_contents", "--config", ROOT / "pyproject.toml", wheel)
    assert done.stdout == f"{wheel}: OK\n"


def test_the_check_of_contents_can_fail(built, tmp_path):
    """On a wheel that would install `tests`."""
    pytest.importorskip("check_wheel_contents")
    right = next(built.glob("*.whl"))
    wheel = tmp_path / right.name
    with zipfile.ZipFile(right) as of, zipfile.ZipFile(wheel, "w") as to:
        for name in of.namelist():
            more = b"tests/test_more.py,,\n" if name.endswith("/RECORD") else b""
            to.writestr(name, of.read(name) + more)
        to.writestr("tests/test_more.py", "x = 1\n")
    done = python("-m", "check_wheel_contents", "--config", ROOT / "pyproject.toml", wheel, returns=1)
    assert re.findall(r": (W\d+): ", done.stdout) == ["W005", "W202"], done.stdout


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ("", ""),
        ('"Typing :: Typed"', '"Typing :: Tpyed"'),
        ('license = "BSD-3-Clause"', 'license = "BSD"'),
        ('requires-python = ">=3.10"', 'requires-python = "from 3.10"'),
    ],
)
def test_pyproject_is_valid(now, said, tmp_path):
    """Names of classifiers, licenses and versions too; with a mistake it is not."""
    pytest.importorskip("validate_pyproject")
    pytest.importorskip("trove_classifiers")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert now in text
    (tmp_path / "pyproject.toml").write_text(text.replace(now, said) if now else text, encoding="utf-8")
    offline = {"VALIDATE_PYPROJECT_NO_NETWORK": "1"}
    command = "-m", "validate_pyproject", tmp_path / "pyproject.toml"
    done = python(*command, returns=int(bool(now)), environment=offline)
    assert ("Valid" in done.stdout) == (not now), done.stdout + done.stderr


def test_breaks_of_the_api_are_found(tmp_path):
    """Of what is exported, wherever it is defined, since a commit; not what is private, moved, or an addition."""
    pytest.importorskip("griffe")
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=lambda _, names: {*names} - {"api_breaks.py"})
    shutil.copytree(ROOT / "diffcoll", tmp_path / "diffcoll", ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    for command in ["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]:
        subprocess.run([*git, *command], cwd=tmp_path, check=True, timeout=60)
    compare = tmp_path / "tests" / "api_breaks.py", "HEAD"
    assert python(*compare).stdout.startswith("nothing of the public API has changed since HEAD")
    assert "no tag to compare with" in python(compare[0], returns=2).stderr

    def edit(name, old, new):
        file = tmp_path / "diffcoll" / name
        text = file.read_text(encoding="utf-8")
        assert old in text, (name, old)
        file.write_text(text.replace(old, new), encoding="utf-8")

    edit("collectives/all_gather.py", "stack: ", "stacked: ")
    edit("nn/functional.py", '    "koleo_loss",\n', "")
    edit("averaging/averager.py", "def close(", "def close_it(")
    edit("truth.py", "def scan(", "def prefix(")
    edit("core/errors.py", "def user_line(", "def line_of_user(")  # not exported
    edit("testing/spawn.py", "seed: int = 0,", "seed: int = 0,\n    more: int = 0,")
    (tmp_path / "diffcoll/collectives/shift.py").rename(tmp_path / "diffcoll/composed/shift.py")
    edit("__init__.py", "from diffcoll.collectives.shift ", "from diffcoll.composed.shift ")
    assert python(*compare, returns=1).stdout.splitlines() == [
        "diffcoll.GradientAverager.close: Public object was removed",
        "diffcoll.all_gather(stack): Parameter was removed",
        "diffcoll.nn.functional.koleo_loss: Public object was removed",
        "diffcoll.truth.scan: Public object was removed",
    ]


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {diffcoll.__version__}\n" in text
