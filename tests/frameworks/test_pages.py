"""Every program of notes/with runs as its first line says, and the versions in the table are those that ran."""

import importlib.metadata
import re

import pytest
from runs import ROOT, python
from test_notes import blocks

PAGES = ROOT / "notes" / "with"
LAUNCH = re.compile(r"# (torchrun --nproc-per-node 3|python) \w+\.py\n")
PROGRAMS = [(page.name, line, code) for page in sorted(PAGES.glob("*.md")) for line, code in blocks(page.read_text())]


@pytest.mark.parametrize(("page", "line", "code"), [pytest.param(*p, id=f"{p[0]}:{p[1]}") for p in PROGRAMS])
def test_programs_run(page, line, code, tmp_path):
    first = LAUNCH.match(code)
    assert first, f"{page}:{line}: the first line of a program says how it is run"
    file = tmp_path / "program.py"
    file.write_text("\n" * (line - 2) + code)  # the lines of the page
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    python(*(launcher if "torchrun" in first[1] else ()), file, cwd=tmp_path)


def test_versions_of_the_table_are_installed():
    versions = re.findall(r"\b([a-zA-Z_-]+) (\d+\.\d+\.\d+)\b", (PAGES / "README.md").read_text())
    assert versions
    for package, version in versions:
        assert importlib.metadata.version(package).split("+")[0] == version, package
