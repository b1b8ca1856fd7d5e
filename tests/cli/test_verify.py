"""`diffcoll verify`: reports right and wrong calls, and runs under launchers."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from releases import compiles
from runs import ROOT, python

from diffcoll.cli import checks, competitors, main, ranks, tally
from diffcoll.cli import verify as report
from diffcoll.cli.arguments import checked
from diffcoll.collectives import COLLECTIVES
from diffcoll.core.torch_private.release import COMPILES
from diffcoll.testing import RanksFailedError, cases
from diffcoll.testing.mpi_job import MpiJob
from diffcoll.testing.pool import Pool
from diffcoll.testing.processes import RankFailure


@pytest.fixture
def ours(monkeypatch):
    """The library alone: each of the others costs seconds, and more of them compiled."""
    for system in list(competitors.SYSTEMS)[1:]:
        monkeypatch.delitem(competitors.SYSTEMS, system)


@pytest.fixture
def alone(monkeypatch, ours):
    """The library alone, and nothing compiled."""
    monkeypatch.setattr(checks, "COMPILES", False)


def run(tmp_path, *arguments):
    """Return the exit status and the contents of the files."""
    files = tmp_path / "report.json", tmp_path / "report.html"
    status = main(["verify", *arguments, "--json", str(files[0]), "--html", str(files[1])])
    return status, json.loads(files[0].read_text()), files[1].read_text()


@compiles  # compiled calls have a row of their own
def test_right_beside_wrong(tmp_path, capsys, monkeypatch):
    status, found, page = run(tmp_path, "--world-size", "2", "--only", "broadcast")
    printed = capsys.readouterr().out
    monkeypatch.setattr(checks, "COMPILES", False)  # compiling all calls of reduce takes long
    other, more, _ = run(tmp_path, "--world-size", "2", "--only", "reduce")
    assert (status, other) == (0, 0)
    assert found["passed"] and more["passed"]
    rows = {(row["collective"], row["call"]): row["systems"] for row in found["rows"] + more["rows"]}
    kinds = {"jvp, all calls": {"output", "tangent"}, "compiled, all calls": {"output", "gradient"}}
    for (_, call), systems in rows.items():
        assert set(systems) == set(competitors.SYSTEMS)
        assert set(systems["diffcoll"]) == kinds.get(call, {"output", "gradient", "second"})
        assert max(systems["diffcoll"].values()) <= tally.TOLERANCE
    # PyTorch's own broadcast has the identity as backward
    theirs = rows["broadcast", "src=1"]["torch.distributed._functional_collectives"]
    assert theirs["output"] == 0
    assert theirs["gradient"] > 0.1
    assert max(rows["broadcast", ""]["torch.distributed.nn.functional"].values()) < 1e-10
    assert rows["reduce", ""]["torch.distributed._functional_collectives"] == "not offered"
    assert rows["reduce", "x: ties and zeros, op='product'"]["torch.distributed.nn.functional"]["gradient"] > 0.1
    theirs = {call: rows["broadcast", call] for call in kinds}
    assert theirs["jvp, all calls"]["torch.distributed._functional_collectives"]["tangent"] > 0.1  # dropped
    assert theirs["jvp, all calls"]["torch.distributed.nn.functional"] == "raises NotImplementedError"
    assert theirs["compiled, all calls"]["torch.distributed.nn.functional"].startswith("raises")
    count = sum(case.name == "broadcast" for case in cases.table(2)) + len(kinds)
    assert f"{count} of {count} calls are right" in printed
    assert "not offered" in printed
    # the columns of PyTorch's own name the release; the terminal's may wrap
    assert found["torch"] == torch.__version__
    assert f"of torch {torch.__version__}" in " ".join(printed.replace("│", " ").replace("┃", " ").split())
    for system in ("nn.functional", "_functional_collectives"):
        assert f"<th>{system} of torch {torch.__version__}" in page
    assert page.startswith("<!doctype html>")
    systems = list(found["counts"])
    assert systems == list(competitors.SYSTEMS)
    headline = f"diffcoll {count} of {count} calls are right"
    for system in systems[1:]:
        offered = [row["systems"][system] for row in found["rows"] if row["systems"][system] != "not offered"]
        right = sum(isinstance(o, dict) and max(o.values()) <= tally.WRONG for o in offered)
        assert right < len(offered)
        headline += f", {system} {right} of {len(offered)}"
    assert f"✓ {headline}" in " ".join(printed.split()) and f"✓ {headline}." in page
    assert not re.search(r'(src|href)="|https?://|<script', page)  # no reference to other files


def test_a_wrong_rule_is_noticed(tmp_path, monkeypatch, capsys, alone):
    right = cases.Case.call

    def wrong(case, x, rank, group=None):
        y = right(case, x, rank, group)
        return y + (y - y.detach()) * 1e-8  # a small error in the gradient

    monkeypatch.setitem(competitors.SYSTEMS, "diffcoll", lambda case, rank: lambda x: wrong(case, x, rank))
    status, found, page = run(tmp_path, "--world-size", "2", "--only", "scan")
    assert status == 1
    assert not found["passed"]
    assert "error above tolerance: scan" in capsys.readouterr().out
    calls = sum(case.name == "scan" for case in cases.table(2)) + 1  # jvp
    assert f"diffcoll 0 of {calls} calls are right" in page
    table = page[page.rindex("<table>") :]
    assert "✓" not in table and table.count("✗") == calls


def test_the_table_has_every_collective():
    for n in (2, 3, 5):
        assert list(dict.fromkeys(case.name for case in cases.table(n))) == list(COLLECTIVES)
        labels = [(case.name, case.label) for case in cases.table(n)]
        assert len(set(labels)) == len(labels)


def test_a_call_that_a_system_offers_at_one_size_alone(capsys):
    """Several world sizes are one line, with the largest error of those that have one."""
    right, more = {"output": 0.0, "gradient": 1e-16}, {"output": 1e-17, "gradient": 0.0}
    rows = [
        report.CheckedCall("shift", "wrap=False", 2, {"diffcoll": right, "other": "not offered"}),
        report.CheckedCall("shift", "wrap=False", 3, {"diffcoll": more, "other": {"output": 0.0, "gradient": 0.5}}),
        report.CheckedCall("scan", "<b>", 3, {"diffcoll": right, "other": "not offered"}),
        report.CheckedCall("split", "", 2, {"diffcoll": right, "other": right}),
        report.CheckedCall("split", "", 3, {"diffcoll": right, "other": "raises ValueError"}),
    ]
    report.show(rows, "about")
    printed, page = capsys.readouterr().out, report.page(rows, "about <i>")
    assert "2 3 │ ✓ 1e-17 1e-16" in printed and "✗ 0e+00 5e-01" in printed and "5 of 5 calls" in printed
    assert '<td class="n">2 3<td class="n right">✓ 1e-17 1e-16<td class="n wrong">✗ 0e+00 5e-01' in page
    assert '<td class="n">2 3<td class="n right">✓ 0e+00 1e-16<td class="n wrong">✗ raises ValueError' in page
    assert '<td class="call">&lt;b&gt;<td class="n">3' in page and '<td class="n none">not offered' in page
    assert "<i>" not in page


ALONE = {"output": 0.0, "gradient": 1e-16}
HEADLINE = "diffcoll 3 of 4 calls are right, torch.distributed.nn.functional 1 of 3"


@pytest.fixture
def told(capsys):
    """What is printed and the page, of four calls: one is wrong by less than what is called wrong of others."""
    near, far = {"output": 0.0, "gradient": 1e-9}, {"output": 0.0, "gradient": 0.5}
    theirs = [near, far, "raises NotImplementedError", "not offered"]
    rows = [
        report.CheckedCall(
            ["scan", "scan", "split", "split"][i],
            ["", "x=1", "", "x=1"][i],
            2,
            {
                "diffcoll": near if i == 1 else ALONE,
                "torch.distributed.nn.functional": theirs[i],
                "torch.distributed._functional_collectives": "not offered",
            },
        )
        for i in range(4)
    ]
    report.show(rows, "about")
    return capsys.readouterr().out, report.page(rows, "about"), rows


def test_the_headline_counts_the_calls_of_each_system(told):
    """Of those that it offers, with what it is judged by: a system that offers none is not 0 of 0."""
    printed, page, rows = told
    last = printed.rstrip().splitlines()[-3:]
    assert last == [
        f"✗ {HEADLINE}",
        "  torch.distributed.nn.functional: 1 right, 1 wrong, 1 raises, 1 not offered",
        "  torch.distributed._functional_collectives: 4 not offered",
    ]
    assert f'<p class="wrong"><strong>✗ {HEADLINE}.</strong>' in page
    assert report.counts(rows)["torch.distributed.nn.functional"] == {
        "right": 1, "wrong": 1, "raises": 1, "not offered": 1
    }  # fmt: skip
    assert sum(report.counts(rows)["diffcoll"].values()) == 4


def test_the_ticks_are_those_that_are_counted(told):
    printed, page, _ = told
    table = page[page.rindex("<table>") :]
    assert (table.count("✓"), table.count("✗")) == (3 + 1, 1 + 2)
    grid = printed[: printed.index("└")]
    assert (grid.count("✓"), grid.count("✗")) == (3 + 1, 1 + 2)
    for text in grid, table:
        assert text.count("defaults") == 2  # the call without arguments


def test_nothing_is_blank(told):
    """No cell of a table, and no part of a picture, is empty."""
    page = told[1]
    assert not re.search(r"<t[dh](?: [^>]*)?>\s*(?=<t|</t|$)", page)
    assert page.count('<th rowspan="2">') == 2  # a collective, next to all its calls
    pictures = re.findall(r"<svg.*?</svg>", page)
    assert len(pictures) == 3  # one for each system
    for picture in pictures:
        assert all(float(width) > 0 for width in re.findall(r'<rect[^>]* width="([^"]*)"', picture))
    assert [picture.count("<rect") for picture in pictures] == [2, 4, 1]
    assert 'aria-label="torch.distributed.nn.functional: 1 right, 1 wrong, 1 raises, 1 not offered"' in pictures[1]


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_call_that_raises(tmp_path, monkeypatch, capsys, alone):
    """On one rank, while the other waits for it."""

    def planted(case, x, rank):
        if case.label == "offset=-1, wrap=False" and rank == 1:
            raise ValueError("planted [here]\nand more of it")
        return case.call(x, rank)

    monkeypatch.setitem(competitors.SYSTEMS, "diffcoll", lambda case, rank: lambda x: planted(case, x, rank))
    status, found, page = run(tmp_path, "--world-size", "2", "--only", "shift,scan")
    assert status == 1
    assert not found["passed"]
    rows = {(row["collective"], row["call"]): row["systems"]["diffcoll"] for row in found["rows"]}
    assert rows.pop(("shift", "offset=-1, wrap=False")) == "raises ValueError: planted [here]"
    assert rows.pop(("shift", "jvp, all calls")) == "raises ValueError: planted [here]"
    assert {name for name, _ in rows} == {"shift", "scan"}
    for errors in rows.values():
        assert max(errors.values()) <= tally.TOLERANCE
    printed = capsys.readouterr().out
    assert "raises ValueError: planted [here]: shift(offset=-1, wrap=False), N = 2" in printed
    assert f"{len(rows)} of {len(rows) + 2} calls are right" in printed
    assert '<td class="n wrong">✗ raises ValueError: planted [here]' in page


def test_no_processes_to_be_had(tmp_path, monkeypatch, capsys, alone):
    """Starting them does not return: verify waits once, not once per call, and still reports."""
    waits = []

    def call(*_, **__):
        waits.append(1)
        threading.Event().wait()

    monkeypatch.setattr(Pool, "call", call)
    monkeypatch.setattr(ranks, "LATE", 0.1)
    monkeypatch.setattr(checks, "TIMEOUT", 0.1)
    status, found, page = run(tmp_path, "--world-size", "2", "--only", "shift,scan")
    assert status == 1
    assert len(waits) == 2
    why = "not run, since 2 processes cannot be started: raises TimeoutError: the processes have not ended after 0.2 s"
    assert len(found["rows"]) == sum(case.name in ("shift", "scan") for case in cases.table(2)) + 2
    assert {row["systems"]["diffcoll"] for row in found["rows"]} == {why}
    assert "0 of" in capsys.readouterr().out
    assert page.count(why) == len(found["rows"])


def test_a_rank_that_dies(tmp_path, monkeypatch, alone):
    """Outcomes from before it are kept, and the checks after it run on new processes."""

    def planted(case, x, rank):
        if case.label == "exclusive=True" and rank == 1:
            os._exit(3)
        return case.call(x, rank)

    monkeypatch.setitem(competitors.SYSTEMS, "diffcoll", lambda case, rank: lambda x: planted(case, x, rank))
    status, found, _ = run(tmp_path, "--world-size", "2", "--only", "scan")
    assert status == 1
    rows = {row["call"]: row["systems"]["diffcoll"] for row in found["rows"]}
    assert [call for call, errors in rows.items() if isinstance(errors, str)] == ["exclusive=True", "jvp, all calls"]
    assert "exit code 3" in rows["exclusive=True"]


WRONG = RankFailure("raised", "", "ValueError", "x: got 1\n    expected 2")
ECHO = RankFailure("raised", "", "d.CollectiveFailedError", "y")
HUNG = RankFailure("hung", "hung in\nThread\n")
DEAD = RankFailure("died", "the process ended with exit code -6\n")


@pytest.mark.parametrize(
    ("failures", "word"),
    [
        ([WRONG, HUNG], "raises ValueError: x: got 1"),
        ([RankFailure("raised", "", "a.B", "c"), None], "raises a.B: c"),
        ([ECHO, RankFailure("raised", "", "KeyError", "'z'")], "raises KeyError: 'z'"),
        ([ECHO, None], "raises d.CollectiveFailedError: y"),
        ([ECHO, DEAD], "the process ended with exit code -6"),
        ([HUNG, HUNG], "spawn: no end after 30 s"),
    ],
)
def test_the_first_line_of_a_failure(failures, word):
    error = RanksFailedError("spawn: no end after 30 s\n── rank 0 of 2 ──", dict(enumerate(failures)))
    assert ranks._reason(error) == word


FAILS_UNDER_TORCHRUN = """
import sys, threading
from diffcoll.cli.arguments import checked
from diffcoll.cli import checks, competitors, main, ranks

where, *arguments = sys.argv[1:]

def planted(case, x, rank):
    if case.label == "offset=-1, wrap=False" and str(rank) in where:
        raise ValueError(f"planted on rank {rank}")
    if case.name == "split" and rank == 1 and where == "1":
        threading.Event().wait()
    return case.call(x, rank)

for system in list(competitors.SYSTEMS)[1:]:
    del competitors.SYSTEMS[system]
competitors.SYSTEMS["diffcoll"] = lambda case, rank: lambda x: planted(case, x, rank)
checks.COMPILES = False
ranks.TIMEOUT_COMPILED = 10
sys.exit(main(arguments))
"""


def torchrun(*command, returns=0):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    launcher += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return python(*launcher, *command, returns=returns, environment={"GLOO_SOCKET_IFNAME": "lo"}, timeout=110)


def fail_under_torchrun(tmp_path, ranks, names):
    script, file = tmp_path / "script.py", tmp_path / "report.json"
    script.write_text(FAILS_UNDER_TORCHRUN)
    torchrun(script, ranks, "verify", "--only", names, "--json", file, returns=1)
    rows = json.loads(file.read_text())["rows"]
    assert {row["collective"] for row in rows} == set(names.split(","))
    rows = {(row["collective"], row["call"]): row["systems"]["diffcoll"] for row in rows}
    failed = rows.pop(("shift", "offset=-1, wrap=False")), rows.pop(("shift", "jvp, all calls"))
    for key in [key for key in rows if key[0] in ("shift", "scan")]:
        assert max(rows.pop(key).values()) <= tally.TOLERANCE, key
    return failed, rows


def test_a_call_that_raises_under_torchrun(tmp_path):
    failed, others = fail_under_torchrun(tmp_path, "0 and 1", "shift,scan")
    assert failed == ("raises ValueError: planted on rank 0",) * 2
    assert not others


@pytest.mark.slow
def test_a_rank_that_fails_alone_under_torchrun(tmp_path):
    """One rank raises, so the other times out; later the first one hangs."""
    failed, others = fail_under_torchrun(tmp_path, "1", "shift,scan,split,broadcast")
    for word in failed:
        assert word.startswith("raises diffcoll.core.errors.CollectiveFailedError: shift, forward")
    assert {name for name, _ in others} == {"split", "broadcast"}
    first = others.pop(("split", ""))
    assert first.startswith("raises diffcoll.core.errors.CollectiveFailedError: split, backward"), first
    for word in others.values():
        assert word.startswith("not run: rank 0 waited for a rank that failed"), word


def test_a_file_that_can_no_longer_be_written(tmp_path, monkeypatch, capsys, alone):
    folder = tmp_path / "reports"
    folder.mkdir()
    show = report.show

    def removed(rows, about):
        folder.rmdir()  # it was empty: the check for writability left no file
        show(rows, about)

    monkeypatch.setattr(report, "show", removed)
    arguments = ["--world-size", "1", "--only", "sum_gradients", "--json", str(folder / "report.json")]
    assert main(["verify", *arguments]) == 1
    printed = capsys.readouterr()
    assert "of 2 calls are right" in printed.out
    assert "diffcoll verify: [Errno 2] No such file or directory" in printed.err


def test_compiled_calls_run_on_the_largest_number_of_ranks():
    for sizes in ([2, 3], [4, 2]):
        rows = [(check.collective, check.world_size) for job, _ in checks.jobs(sizes, ["scan", "split"])
                for check in job if check.call == "compiled, all calls"]  # fmt: skip
        assert rows == [(name, max(sizes)) for name in ("scan", "split")] * COMPILES
        assert {check.world_size for job, _ in checks.jobs(sizes, ["scan"]) for check in job} == set(sizes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("verify --only allreduce", "argument --only: got 'allreduce', expected names of all_reduce, all_gather"),
        ("verify --only all_reduce,x", "argument --only: got 'x', expected names of"),
        ("verify --world-size 0", "argument --world-size: got '0', expected an integer from 1"),
        ("verify --world-size 2 -1", "argument --world-size: got '-1', expected an integer from 1"),
        ("verify --world-size two", "argument --world-size: got 'two', expected an integer from 1"),
        ("verify --seed -1", "argument --seed: got '-1', expected an integer from 0"),
        ("verify --backend foo", "argument --backend: got 'foo', expected one that PyTorch has here: gloo"),
        ("verify --backend undefined", "argument --backend: got 'undefined', expected one"),
        ("verify --backend cpu:gloo,cuda:foo", "argument --backend: got 'cpu:gloo,cuda:foo', expected one"),
        ("verify --json missing/report.json", "argument --json: 'missing/report.json' cannot be written: No such file"),
        ("verify --html .", "argument --html: '.' cannot be written: Is a directory"),
        ("verify --engine gloo", "argument --engine: invalid choice: 'gloo'"),
        ("", "the following arguments are required: command"),
    ],
)
def test_wrong_arguments(arguments, said, status_of, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    status, _, printed = status_of(main, *arguments.split())
    assert status == 2
    assert f"error: {said}" in printed
    assert not list(tmp_path.iterdir())


def test_a_size_that_the_launcher_has_set(monkeypatch, status_of):
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, printed = status_of(main, "verify", "--world-size", "2")
    assert status == 2
    assert "argument --world-size: the launcher has set it already; leave it out" in printed


#: Of `diffcoll`, as a program; compiling takes long.
WITHOUT_COMPILED_CALLS = (
    "import sys; from diffcoll.cli import checks, main; checks.COMPILES = False; sys.exit(main(sys.argv[1:]))"
)


def test_under_torchrun(tmp_path):
    file = tmp_path / "report.json"
    program = tmp_path / "without_compiled_calls.py"
    program.write_text(WITHOUT_COMPILED_CALLS, encoding="utf-8")
    done = torchrun(program, "verify", "--only", "split", "--json", file)
    found = json.loads(file.read_text())
    assert found["passed"]
    assert "2 launched gloo processes" in found["about"]
    count = sum(case.name == "split" for case in cases.table(2)) + 1
    assert done.stdout.count(f"{count} of {count} calls are right") == 1  # rank 0 reports
    assert {row["world_size"] for row in found["rows"]} == {2}


def test_under_mpiexec(tmp_path):
    file = tmp_path / "report.json"
    command = [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", sys.executable, "-c", WITHOUT_COMPILED_CALLS]
    command += ["verify", "--only", "split", "--json", str(file)]
    environment = {**os.environ, **MpiJob.SETTINGS, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["passed"]
    assert "2 processes launched by MPI" in found["about"]
    assert {row["world_size"] for row in found["rows"]} == {2}
    theirs = {row["call"]: row["systems"]["torch.distributed.nn.functional"] for row in found["rows"]}
    assert set(theirs.values()) == {"not offered"}


def test_on_mpi(tmp_path, monkeypatch):
    monkeypatch.delitem(competitors.SYSTEMS, "torch.distributed._functional_collectives")  # one on gloo is enough
    monkeypatch.setattr(checks, "COMPILES", False)
    status, found, _ = run(tmp_path, "--engine", "mpi", "--world-size", "2", "--only", "scatter")
    assert status == 0
    assert "mpi processes on this machine" in found["about"]
    assert found["rows"][0]["systems"]["torch.distributed.nn.functional"]["gradient"] < 1e-10  # on gloo


# ── while it runs ────────────────────────────────────────────────────────────────────────────────────────


def test_progress_in_a_pipe(tmp_path, capsys, alone):
    """A line for each collective and size before it is checked; nothing of it in the report."""
    run(tmp_path, "--world-size", "2", "--only", "shift,split")
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "diffcoll verify: shift, 2 processes (1 of 2)",
        "diffcoll verify: split, 2 processes (2 of 2)",
    ]
    assert "(1 of 2)" not in printed.out


def test_interrupted():
    """Ctrl-C, where the ranks' processes run: one line, and the status of a shell's commands."""
    command = [sys.executable, "-m", "diffcoll", "verify", "--only", "all_reduce"]
    around = {**os.environ, "PYTHONPATH": str(ROOT)}
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what runs in a shell's background ignores Ctrl-C
    streams = {"stdout": -1, "stderr": -1, "text": True}
    with subprocess.Popen(command, **streams, env=around, start_new_session=True, preexec_fn=heeds) as process:
        first = process.stderr.readline()
        time.sleep(2)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert first == "diffcoll verify: all_reduce, 2 processes (1 of 9)\n"
    assert (process.returncode, out, err) == (130, "", "diffcoll verify: interrupted\n")


def test_the_examples_of_the_help(capsys, monkeypatch, tmp_path):
    """Their arguments are accepted."""
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    examples = re.findall(r"^  .*?\bdiffcoll verify(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(examples) == 5
    monkeypatch.chdir(tmp_path)
    for example in examples:
        assert checked(["verify", *example.split()]).command == "verify"
