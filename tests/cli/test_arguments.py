"""The command line without the extras that only its commands need."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import python

import benchmarks
import diffcoll
from diffcoll.cli import main
from diffcoll.cli.arguments import checked

EXTRAS = ["cloudpickle", "hypothesis", "matplotlib", "mpi4py", "numpy", "pytest", "rich", "scipy", "sklearn"]

PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({[e for e in EXTRAS if e != "numpy"]}))  # cannot be imported
import diffcoll
before = set(sys.modules)
from diffcoll.cli import main
helps = [[command, "--help"] for command in ("verify", "check")]
for arguments in (["--version"], ["--help"], *helps, ["verify", "--only", "scan"]):
    try:
        main(arguments)
    except SystemExit as end:
        print("status", end.code)
print("imported", sorted(name for name in set(sys.modules) - before if name.startswith(("torch", "numpy", "diffcoll"))))
"""


def test_help_needs_torch_alone():
    done = python("-c", PROGRAM)
    assert done.stdout.startswith(f"diffcoll {diffcoll.__version__}\n")
    assert [line for line in done.stdout.splitlines() if line.startswith("status")] == ["status 0"] * 4 + ["status 2"]
    assert done.stderr == (
        "diffcoll verify: error: the module rich is missing; from a checkout of diffcoll: pip install '.[test]'\n"
    )
    # Arguments are checked before a command is imported.
    imported = eval(done.stdout.splitlines()[-1].partition(" ")[2])
    ours = [name for name in imported if name.startswith("diffcoll")]
    assert ours == ["diffcoll.cli", "diffcoll.cli.arguments", "diffcoll.cli.launch"]
    assert "numpy" not in imported


def test_the_examples_of_the_help(capsys, monkeypatch, tmp_path):
    """Both commands, with what each is for; their arguments are accepted."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    examples = re.findall(r"^  diffcoll (.*?)  +(\S.*)$", capsys.readouterr().out, re.MULTILINE)
    assert {arguments.split()[0] for arguments, _ in examples} == {"verify", "check"}
    assert len(examples) >= 4
    for arguments, _ in examples:
        if not arguments.endswith("--help"):
            assert checked(arguments.split()).command == arguments.split()[0]
    helps = [arguments for arguments, _ in examples if arguments.endswith("--help")]
    assert helps == ["check --help"]


def test_the_version_of_what_is_installed():
    """By both names of the command."""
    both = [Path(sys.executable).with_name("diffcoll")], [sys.executable, "-m", "diffcoll"]
    for command in both:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == f"diffcoll {diffcoll.__version__}\n"


@pytest.mark.parametrize(
    ("command", "arguments", "module", "extra"),
    [
        (main, "verify", "rich", "test"),
        (main, "verify --only scan", "cloudpickle", "test"),
        (main, "verify --engine mpi --only scan", "mpi4py", "mpi"),
        (main, "check a:b", "rich", "test"),
        (main, "check a:b", "cloudpickle", "test"),
        (main, "check a:b --on mpi", "mpi4py", "mpi"),
        (benchmarks.main, "", "rich", "test"),
        (benchmarks.main, "", "cloudpickle", "test"),
        (benchmarks.main, "--engine mpi", "mpi4py", "mpi"),
    ],
)
def test_an_extra_that_is_missing(command, arguments, module, extra, monkeypatch, status_of, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    status, _, printed = status_of(command, *arguments.split())
    assert status == 2
    said = f"the module {module} is missing; from a checkout of diffcoll: pip install '.[{extra}]'\n"
    assert printed.endswith(said)
