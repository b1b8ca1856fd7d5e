"""The workflow of the repository: it tests what pyproject.toml promises, and the wheel instead of the sources."""

import re

import pytest
from runs import ROOT

yaml = pytest.importorskip("yaml")
tomllib = pytest.importorskip("tomllib")
FILE = ROOT / ".github" / "workflows" / "tests.yml"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="a source distribution has no workflows")


@pytest.fixture
def job():
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))["jobs"]["tests"]


@pytest.fixture
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_python_that_is_named(job, project):
    """From the oldest that is allowed on, without a gap. YAML would read 3.10 without quotes as 3.1."""
    pythons = job["strategy"]["matrix"]["python"]
    prefix = "Programming Language :: Python :: 3."
    assert pythons == [f"3.{c.removeprefix(prefix)}" for c in project["classifiers"] if c.startswith(prefix)]
    assert project["requires-python"] == f">={pythons[0]}"
    minors = [int(version.removeprefix("3.")) for version in pythons]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert any(step.get("with", {}).get("python-version") == "${{ matrix.python }}" for step in job["steps"])


def test_the_oldest_torch_and_the_newest(job, project):
    """The newest is whatever there is, since pyproject.toml has no upper bound."""
    (declared,) = (d for d in project["dependencies"] if d.startswith("torch"))
    oldest = re.fullmatch(r"torch>=(\d+\.\d+)", declared)[1]
    assert job["strategy"]["matrix"]["torch"] == [f"torch=={oldest}.*", "torch"]
    first, second = next(step["run"] for step in job["steps"] if step.get("name") == "Install").splitlines()
    assert first.endswith('install "${{ matrix.torch }}"')
    extras = re.search(r"dist/\*\.whl\)\[(.*?)\]", second)[1].split(",")
    assert "test" in extras and set(extras) <= set(project["optional-dependencies"])
