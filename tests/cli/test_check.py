"""`diffcoll check`: reports right and wrong functions of the user's, and says what it cannot run."""

import multiprocessing.forkserver
import re
import sys
from html.parser import HTMLParser
from inspect import signature
from pathlib import Path

import pytest

from diffcoll.cli import arguments, check, importing, main
from diffcoll.cli import page as check_page
from diffcoll.testing import processes
from diffcoll.testing.gradients import assert_matches_single_process
from diffcoll.testing.harness.report import Cause, Report, Row, Table
from diffcoll.testing.processes import RankFailure, RanksFailedError, in_words

CODE = """
import torch, torch.distributed as dist, diffcoll as dc

scale = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
layer = torch.nn.Linear(3, 2)
generator = layer.parameters()
number = 3


class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x):
        return dc.all_reduce((x * self.w).sum()) ** 2 * (dc.get_rank() + 1)


holder = Sum()
parameters = [scale]


def batch(rows):
    return torch.randn(rows, 3, dtype=torch.float64)


def total(x):
    return dc.all_reduce((x**2).sum()) ** 2 * scale


def ends(x):
    raise SystemExit(0)


def whole(x):
    return (x**2).sum() ** 2 * scale


def cut(x):  # "<b>"
    blocks = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(blocks, x.contiguous())
    return torch.cat(blocks).sum() ** 2 + (x**2).sum()


def times_rank(x, y):
    return dc.all_reduce((x * y).sum()) ** 2 * (dc.get_rank() + 1)


def pair(rows):
    return batch(rows), batch(rows)


def by_name(rows):
    return {"y": batch(rows), "x": batch(rows)}


def single(rows):
    return torch.randn(rows, 3)


def seeded(rows):
    torch.manual_seed(0)
    return batch(rows)


def layered(x):
    return dc.all_reduce(layer(x).sum()) ** 2


def even_only(x):
    return (dc.all_gather(x) ** 2).mean()


def raises(x):
    y = helper(x)
    return y


def helper(x):
    raise KeyError("<lost>\\nand more")


def on_processes(x):
    if dist.is_initialized() and type(dist.group.WORLD).__name__ == "ProcessGroup":
        raise OSError("real ranks")
    return dc.all_reduce(x.sum()) ** 2


def bad_batch(rows):
    raise RuntimeError("no data")
"""

NAME = "user_losses"


SHARDED = """
import torch, diffcoll as dc
from torch import nn
from torch.distributed.tensor import Replicate, Shard

net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


class Mlp(nn.Module):
    def __init__(self, mesh, f):
        super().__init__()
        self.f = f
        self.add_module("0", nn.Linear(4, 6 // mesh.size()).double())
        self.add_module("2", nn.Linear(6 // mesh.size(), 3).double())

    def forward(self, x):
        up, down = self._modules["0"], self._modules["2"]
        y = torch.tanh(up(dc.sum_gradients(x) if self.f else x)) @ down.weight.T
        return dc.all_reduce(y, grad_placement="replicate") + down.bias


def right(module, mesh):
    return Mlp(mesh, True)


def without_f(module, mesh):
    return Mlp(mesh, False)


def loss(module, x, mask):
    return (module(x) * mask).square().mean()


def batch(rows):
    return torch.randn(rows, 4, dtype=torch.float64), torch.rand(rows, 3, dtype=torch.float64)


placements = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}


def layers(x, w, v, f=dc.sum_gradients):
    return dc.all_reduce(torch.tanh(f(x) @ w) @ v, grad_placement="replicate").square().mean()


def unsummed(x, w, v):
    return layers(x, w, v, lambda x: x)


def pieces(rows):
    return {name: torch.randn(*shape).double() for name, shape in (("w", (4, 3)), ("x", (5, 4)), ("v", (3, 2)))}


def endless(x, w, v):
    while True:
        pass


shared = {"x": Replicate(), "output": Replicate()}
wrong = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current directory, with modules in it."""
    (tmp_path / f"{NAME}.py").write_text(CODE)
    (tmp_path / "sharded.py").write_text(SHARDED)
    monkeypatch.chdir(tmp_path)
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path
    assert sys.path == path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def run(status_of):
    def run(words, *more):
        """Return the exit status and the output, on simulated ranks unless the words say otherwise."""
        return status_of(main, "check", *words.split(), *([] if "--on" in words else ["--on", "simulated"]), *more)

    return run


# ── right and wrong ──────────────────────────────────────────────────────────────────────────────────────


def test_right_without_a_reference(run):
    status, out, err = run(f"{NAME}:total --module parameters --order 2")
    assert (status, err) == (0, "")
    assert out.startswith("check_gradients: right\n── simulated, 2 ranks, rows 4, 4: right; largest error")
    for title in ("simulated, 2 ranks, rows 5, 3", "the joint graph of all ranks, rows 0, 5, 3"):
        assert f"── {title}: right" in out
    assert "gradient of" not in out


def test_right_against_one_process(run):
    """A name without a module is looked up in that of the function; so is the default of --batch."""
    status, out, _ = run(f"{NAME}:total --against whole --rank-reduction mean --module parameters")
    assert status == 0
    assert out.startswith("assert_matches_single_process, gradients averaged over ranks: right\n")
    # the default sizes are those of the function, and of the text of --help
    sizes = signature(assert_matches_single_process).parameters["sizes"].default
    assert re.findall("simulated, . ranks, rows (.*): right", out) == [", ".join(map(str, s)) for s in sizes]
    assert f"default: {' '.join(','.join(map(str, s)) for s in sizes)}" in " ".join(run("--help")[1].split())


def test_wrong(run, folder):
    status, out, err = run(f"{NAME}.py:cut --sizes 2,2", "--html", folder / "page.html")
    assert (status, err) == (1, "")
    assert re.search(r"^✗ gradient of x +0 ", out, re.MULTILINE)
    line = CODE[: CODE.index("dist.all_gather(")].count("\n") + 1
    assert f"all_gather at {folder}/{NAME}.py:{line} cuts the graph" in out
    page = (folder / "page.html").read_text()
    assert "1 of 1 run wrong; 1 not run." in page
    assert f"{NAME}.py:{line} cuts the graph" in page
    assert f"{NAME}.py:cut against finite differences" in page


def test_wrong_against_one_process(run):
    status, out, _ = run(f"{NAME}:total --against whole --rank-reduction sum --module parameters --sizes 2,2")
    assert status == 1
    assert "gradients summed over ranks: WRONG" in out
    assert "── diagnosis ──" in out


def test_raised_after_the_first_run(run):
    """An error with uneven ranks is a result; others are still run."""
    status, out, _ = run(f"{NAME}:even_only --sizes 2,2 2,1 1,1")
    assert status == 1
    assert "── simulated, 2 ranks, rows 2, 2: right" in out
    assert "── simulated, 2 ranks, rows 2, 1: raised\n  diffcoll.core.errors.CollectiveMismatchError: " in out
    assert f"{NAME}.py:{CODE[: CODE.index('(dc.all_gather')].count(chr(10)) + 1}, in even_only: return (dc." in out
    assert "── simulated, 2 ranks, rows 1, 1: right" in out


def test_real_processes(run):
    """What is wrong on simulated ranks is not run again; on processes, an error of one rank is one of the run."""
    status, out, _ = run(f"{NAME}:on_processes --sizes 2,2 --on simulated gloo")
    assert status == 1
    assert "── simulated, 2 ranks, rows 2, 2: right" in out
    assert "── gloo, 2 ranks, rows 2, 2: raised\n  rank 0: OSError: real ranks\n  raised at " in out
    status, out, _ = run(f"{NAME}:cut --sizes 2,2 --on simulated gloo")
    assert (status, out.count("gloo, 2 ranks, rows 2, 2: not run: wrong already on simulated ranks")) == (1, 1)


def test_the_server_of_processes_starts_before_anything_else(run, monkeypatch):
    """It takes as long as the import of PyTorch, which is most of the time of a small check."""
    started = []
    monkeypatch.setattr(check, "start_server", lambda: started.append(NAME in sys.modules))
    run(f"{NAME}:zzz --on gloo simulated")
    run(f"{NAME}:zzz --on simulated")
    assert started == [False]
    processes.start_server()
    assert multiprocessing.forkserver._forkserver._forkserver_pid is not None


# ── the user's data and modules ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "compared"),
    [
        ("times_rank --batch pair", ["x", "y"]),
        ("times_rank --batch by_name", ["x", "y"]),
        ("times_rank --batch by_name --against times_rank", ["x", "y"]),
        ("holder", ["x", "w"]),
        ("holder.forward --module holder", ["x", "w"]),
        ("total --batch single --double --module parameters", ["x", "module[0]"]),
        ("layered --double --module generator", ["x", "module[0]", "module[1]"]),
        ("layered --double --module layer", ["x", "weight", "bias"]),
    ],
)
def test_data(run, monkeypatch, words, compared):
    """The forms of a batch, and modules: all tensors get a row."""
    found = []
    monkeypatch.setattr(check, "_show", found.append)
    status, _, err = run(f"{NAME}:{words} --sizes 2,1")
    assert (status, err) == ("--against" in words, "")  # on one process there is rank 0 alone
    rows = [row for row in found[0].tables[0].rows if row.what.startswith("gradient")]
    assert {row.what for row in rows} == {f"gradient of {name}" for name in compared}
    assert {row.rank for row in rows} == {0, 1}


def test_a_file_in_a_package(run, folder):
    package = folder / "elsewhere" / "losses_of_user"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "data.py").write_text("import torch\ndef batch(rows): return torch.randn(rows).double()\n")
    (package / "main.py").write_text("from .data import batch\ndef f(x): return (x**2).sum()\n")
    assert run(f"{package}/main.py:f --sizes 2,1")[0] == 0


def test_the_seed(run, monkeypatch):
    shown = []
    monkeypatch.setattr(check, "_show", lambda report: shown.append(report.tables[0].rows))
    for seed in ("", "", "--seed 1"):
        assert run(f"{NAME}:total --sizes 2,2 --module parameters {seed}")[0] == 0
    assert shown[0] == shown[1] != shown[2]


# ── what cannot be run ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("total", "argument TARGET: got 'total', expected package.module:name or path/to/file.py:name"),
        (f"{NAME}:", f"argument TARGET: got '{NAME}:', expected package.module:name or path/to/file.py:name"),
        (":total", "argument TARGET: got ':total', expected package.module:name"),
        (".:total", "argument TARGET: got '.:total', expected package.module:name"),
        ("..mine:total", "argument TARGET: got '..mine:total', expected package.module:name"),
        ("builtins:sum", "argument --batch: got nothing, expected a function `batch` in builtins, of a number of rows"),
        ("builtins:summ", "argument TARGET: got 'summ', expected a name in builtins; "),
        ("nowhere:f", "argument TARGET: got 'nowhere', expected a module that can be imported in /"),
        ("nowhere.py:f", "nowhere.py, expected a file of Python code; there is none"),
        (f"{NAME}:totl", f"got 'totl', expected a name in FOLDER/{NAME}.py; did you mean total?"),
        (f"{NAME}:zzz", "; it has scale, layer, generator, number, Sum, holder, parameters, batch, total, "),
        (f"{NAME}:number", f"argument TARGET: got '{NAME}:number', of type int, expected a function"),
        (f"{NAME}:Sum", f"argument TARGET: got the class '{NAME}:Sum', expected a function; name an instance"),
        (f"{NAME}:total --against whole2", "argument --against: got 'whole2', expected a name in"),
        (f"{NAME}:total --batch other:f", "argument --batch: got 'other', expected a module"),
        (f"{NAME}:total --batch number", "argument --batch: got 'number', of type int, expected a function"),
        (f"{NAME}:total --batch pair", "argument --batch: got (Tensor, Tensor) from pair(4), expected the arguments of "
            "total(x); too many positional arguments; return a tuple"),
        (f"{NAME}:holder --batch pair", "expected the arguments of Sum(x); too many positional arguments"),
        (f"{NAME}:total --batch seeded", "argument --batch: got the same numbers on two ranks, expected different"),
        (f"{NAME}:total --batch single", "argument --batch: got torch.float32, expected float64 or complex128, the "
            "precision that finite differences need; pass --double"),
        (f"{NAME}:total --module layer", "argument --module: got torch.float32, expected float64"),
        (f"{NAME}:total --module number", "module: got int, expected an nn.Module, or a list of modules and of leaf"),
        (f"{NAME}:holder --against whole", "argument --module: got nothing, for a TARGET with parameters, expected"),
        (f"{NAME}:total --batch bad_batch", "error: RuntimeError: no data\nraised at "),
        (f"{NAME}:raises", "KeyError: '<lost>\\nand more'\nraised on simulated rank 0 of 2; rank 1 raised KeyError\n"
            f"raised at FOLDER/{NAME}.py:{CODE[: CODE.index('raise KeyError')].count(chr(10)) + 1}, in helper: raise"),
        (f"{NAME}:raises --against whole", "error: KeyError: '<lost>"),
        (f"{NAME}:ends", "error: SystemExit: 0\nraised on simulated rank 0 of 2; rank 1 raised SystemExit"),
        (f"{NAME}:total --sizes 4,x", "argument --sizes: got '4,x', expected the rows of each rank, such as 4,4 or"),
        (f"{NAME}:total --sizes 0,0", "argument --sizes: got '0,0', expected the rows of each rank"),
        (f"{NAME}:total --sizes=-1,2", "argument --sizes: got '-1,2', expected the rows of each rank"),
        (f"{NAME}:total --on nowhere", "argument --on: got 'nowhere', expected one that PyTorch has here: gloo"),
        (f"{NAME}:total --against whole --rank-reduction max", "argument --rank-reduction: got 'max', expected mean"),
        (f"{NAME}:total --rank-reduction sum", "argument --rank-reduction: got 'sum' without --against, expected both"),
        (f"{NAME}:total --html /nowhere/page.html", "'/nowhere/page.html' cannot be written"),
    ],
)  # fmt: skip
def test_what_cannot_be_run(run, folder, words, said):
    status, out, err = run(words)
    assert (status, out) == (2, "")
    assert said.replace("FOLDER", str(folder)) in err
    assert "diffcoll check: error: " in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def f(x): return x.sum()", "argument --batch: got nothing, expected a function `batch` in "),
        ("def f(:", "SyntaxError: "),
        ("import not_installed_anywhere", "ModuleNotFoundError: No module named 'not_installed_anywhere'\nraised at "),
        ("1 / 0", "ZeroDivisionError: division by zero\nraised at "),
        ("import sys; sys.exit(3)", "argument TARGET: got a module that ends the program when it is imported (3)"),
    ],
)
def test_a_module_that_cannot_be_used(run, folder, code, said):
    (folder / "broken_losses.py").write_text(code)
    status, _, err = run("broken_losses:f")
    assert status == 2
    assert said in err
    assert "Traceback" not in err


#: Statements of a program without a guard, what is said of it, and which lines are to be moved.
PROGRAMS = {
    "while True:\n  sum(\n  range(9))": ("had not ended after 1 s", "lines 3 to 5", "while True:"),
    "while True:\n  try: 3\n  except Exception: pass": ("had not ended after 1 s", "lines 3 to 5", "while True:"),
    "name = input('name: ')": ("reads the standard input when it is imported", "line 3", "name = input('name: ')"),
    "rank = os.environ['RANK']": ("needs a launcher when it is imported (KeyError: 'RANK')", "line 3", "rank = os"),
    "dist.init_process_group()": ("needs a launcher when it is imported (ValueError: ", "line 3", "dist.init"),
    "dist.barrier()": ("needs a launcher when it is imported (ValueError: Default process gr", "line 3", "dist.ba"),
    "def main():\n  sys.exit(3)\nmain()": ("ends the program when it is imported (3)", "line 5", "main()"),
    "parser.add_argument('--lr', required=True)\nparser.parse_args()": ("(2)", "line 4", "parser.parse_args()"),
}


@pytest.mark.parametrize("statements", PROGRAMS)
def test_a_program_without_a_guard(run, folder, statements):
    head = "import argparse, os, sys, torch.distributed as dist\nparser = argparse.ArgumentParser()\n"
    (folder / "train.py").write_text(head + statements)
    status, _, err = run("train.py:loss --timeout 1")
    got, lines, text = PROGRAMS[statements]
    assert status == 2 and "Traceback" not in err
    assert re.search(f"argument TARGET: got a module .*{re.escape(got)}.*, expected one that defines functions; ", err)
    assert f"move {lines} of {folder}/train.py, `{text}" in err
    assert err.endswith(", and what else only the program needs, below `if __name__ == '__main__':`\n")


def test_a_program_that_a_module_of_the_user_imports(run, folder):
    (folder / "settings_of_user.py").write_text("import sys\nsys.exit()")
    (folder / "train.py").write_text("import settings_of_user")
    assert f"move line 2 of {folder}/settings_of_user.py, `sys.exit()`" in run("train.py:loss")[2]


def test_a_program_without_arguments_is_imported(run, folder):
    (folder / "train.py").write_text(
        "import argparse\nargparse.ArgumentParser().parse_args()\n"
        "import torch\ndef f(x): return (x**2).sum()\ndef batch(rows): return torch.randn(rows).double()\n"
    )
    assert run("train.py:f --sizes 1,1")[0] == 0


def test_a_program_that_waits_for_a_peer(run, folder, monkeypatch, capsys):
    """A signal does not interrupt it: the process is ended, which a flag stands for here."""
    (folder / "train.py").write_text(
        "import torch.distributed as dist\nfrom datetime import timedelta\n"
        "store = dist.TCPStore('localhost', 0, 2, True, timedelta(seconds=2))"
    )
    ended = []
    monkeypatch.setattr(importing, "_GRACE", 0.1)
    monkeypatch.setattr(importing.os, "_exit", ended.append)
    _, _, err = run("train.py:f --timeout 1")
    assert ended == [2]
    assert f"had not ended after 1 s, expected one that defines functions; move line 3 of {folder}/train.py, `st" in err


def test_a_file_whose_name_is_taken(run, folder):
    (folder / "json.py").write_text("def f(x): return x.sum()")
    status, _, err = run("json.py:f")
    assert status == 2
    assert re.search(
        r"got 'json.py', expected another name: Python has the module 'json' from .*; rename the file", err
    )


def test_a_failure_on_processes(run):
    status, _, err = run(f"{NAME}:raises --sizes 2,1 --on gloo")
    assert status == 2
    assert re.match(r"diffcoll check: error: rank 0: KeyError: '<lost>.*\nraised at \S+\.py:\d+\nrank 1: KeyError", err)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            RankFailure("hung", "hung in mine.py:3, in f: g()\nThread 0x1:\n", line="mine.py:3"),
            "hung in mine.py:3, in f: g()",
        ),
        (RankFailure("died", "the process ended with exit code -6\n"), "the process ended with exit code -6"),
    ],
)
def test_a_rank_without_traceback(failure, words):
    assert in_words(RanksFailedError("", {0: failure, 1: None})) == f"rank 0: {words}"


def test_under_a_launcher(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = run(f"{NAME}:total")
    assert status == 2
    assert "got the environment of a launcher, such as WORLD_SIZE, expected none: the ranks are those of --on" in err


# ── the page and the help ────────────────────────────────────────────────────────────────────────────────


class Balanced(HTMLParser):
    """Collects the text; the tags that must be closed are."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "b", "link", "img")
        if tag in ("table", "svg", "ul", "dl", "h1", "h2", "pre", "span", "strong", "style"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_has_everything_and_is_escaped():
    rows = (
        Row("gradient of <b>x</b>", 0, 3e-3, 0.5, False, 1e-9),
        Row("value", None, float("inf"), None, False, 1e-9),
        Row("buffer & more", 1, 0.0, None, True, 1e-9),
        Row("second order of x", 1, 1e-9, 1.0, True, 1e-6),
        Row("gradient of y", 0, 1.0, 2.0, False, 1e-9),
        Row("gradient of z", 0, 1.0, 0.0, False, 1e-9),
        Row("at a kink", 0, 1.0, None, False, None),
    )
    tables = (
        Table("simulated, 2 ranks, rows <4>", 2, rows),
        Table("gloo", 2, raised="<b>Error"),
        Table("mpi", 2, skipped="<b>wrong already"),
    )
    causes = (Cause("scaled", "<b>seen", "<b>usually", "<b>fix"),)
    report = Report("title <b>", tables, causes, ("cut at <b>:3",), ("note <b>",))
    page = check_page.page(report, "a.py:<b>", "about <b>")
    assert not re.search(r'(src|href)="|https?://|<b>', page)
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    text = " ".join("".join(parser.text).split())
    for word in (
        *(
            "gradient of <b>x</b>",
            "buffer & more",
            "✗ 3.0e-03",
            "✗ inf",
            "✓ 0.0e+00",
            "0.5 = 1/N",
            "not finite",
            "kink",
            "2 = N",
            "all",
        ),
        *("simulated, 2 ranks, rows <4>: ✗ wrong", "gloo: ✗ raised", "<b>Error", "mpi: not run", "<b>wrong already"),
        *("scaled", "<b>seen.", "Usual cause: <b>usually.", "Fix: <b>fix.", "cut at <b>:3", "note <b>", "about <b>"),
        *("diffcoll check a.py:<b>", "title <b>.", "✗ 2 of 2 runs wrong; 1 not run."),
    ):
        assert word in text, word
    widths = [float(width) for width in re.findall(r'<rect class="\w+" y="2" width="([\d.]+)"', page)]
    assert widths[1] == 320 > widths[0] > widths[3] > widths[2] == 0
    assert "The dashed line" in text and "is the allowed error" in text
    assert page.count('class="allowed"') == 1 + 6  # of the text, and of the rows that have one
    # from the middle, where got is wanted: to 1/N, to N, and to 0
    assert re.findall(r'class="wrong" x="([\d.]+)" y="2" width="([\d.]+)"', page) == [
        ("30.0", "20.0"),
        ("50.0", "20.0"),
        ("0.0", "50.0"),
    ]
    # on a phone the tables scroll, and not the page
    assert page.count("<table>") == page.count('<div class="wide"><table>') == 1


def test_the_page_of_a_right_check():
    tables = Table("simulated", 2, (Row("value", 0, 0.0, 1.0, True, 1e-9),)), Table("joint", 2, skipped="because")
    page = check_page.page(Report("title", tables), "a.py:f", "about")
    assert "✓ 1 run, all right; 1 not run." in page and 'simulated: <span class="right">✓ right' in page
    assert 'class="ratio"' not in page


def test_color_is_for_terminals_only(run, monkeypatch):
    assert "\x1b" not in run(f"{NAME}:cut --sizes 2,2")[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    plain = re.sub(r"\x1b\[[\d;]*m", "", colored := run(f"{NAME}:cut --sizes 2,2")[1])
    monkeypatch.delenv("FORCE_COLOR")
    assert "\x1b[31m✗" in colored and plain == run(f"{NAME}:cut --sizes 2,2")[1]


def test_the_example_of_the_help(run, folder):
    text = arguments._CHECK_EXAMPLE
    code = text.partition("loss.py:\n")[2].partition("  diffcoll check")[0]
    (folder / "loss.py").write_text("\n".join(line.removeprefix("  ") for line in code.splitlines()))
    commands = re.findall("^  diffcoll check (.*)$", text, re.MULTILINE)
    assert [run(words)[0] for words in commands] == [0, 0]
    assert Path("report.html").exists()
    assert text.strip() in run("--help")[1]


# ── sharded programs, and tensors that the ranks share ───────────────────────────────────────────────────


LOSS = "sharded:loss --against loss --module net"


def test_a_sharded_program(run):
    status, out, err = run(f"{LOSS} --mesh tp=2 tp=3 --shard right --placements placements --constant mask")
    assert (status, err) == (0, "")
    assert "nothing reduced afterwards: right" in out and "mesh tp=2: right" in out and "mesh tp=3: right" in out
    status, out, _ = run(f"{LOSS} --mesh tp=2 --shard without_f --sizes 6", "--html", "page.html")
    assert status == 1
    assert "x: one rank's part of a sum over tp; the sum is right" in out and "mask: " not in out
    with open("page.html") as page:
        assert "mesh tp=2" in page.read()


def test_what_ranks_share(run):
    """Rank 0's numbers are those of the variable that all ranks have."""
    status, out, err = run("sharded:layers --batch pieces --placements shared --sizes 1,1 1,1,1")
    assert (status, err) == (0, "") and "joint graph" not in out
    status, out, _ = run("sharded:unsummed --batch pieces --placements shared --sizes 1,1,1")
    assert status == 1 and "x: one rank's part of a sum over the ranks" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sharded:loss --mesh tp=2", "argument --mesh: got [{'tp': 2}] without --against, expected both"),
        (f"{LOSS} --mesh tp=2 --rank-reduction mean", "got 'mean' with --mesh, expected mean or sum once by axis"),
        (f"{LOSS} --mesh tp=0", "argument --mesh: got 'tp=0', expected the size of each axis once"),
        (f"{LOSS} --mesh tp", "argument --mesh: got 'tp', expected the size of each axis once, such as tp=2"),
        (f"{LOSS} --mesh tp=2,tp=3", "argument --mesh: got 'tp=2,tp=3', expected the size of each axis once"),
        (f"{LOSS} --mesh tp=2 --rank-reduction tp=sum,tp=mean", "expected mean or sum once by axis of tp"),
        (f"{LOSS} --mesh tp=2 --sizes 4,4 5,3", "argument --sizes: got several runs with --mesh, expected the rows"),
        (f"{LOSS} --mesh tp=2 --shard right --order 2", "order: got 2 with mesh=, expected 1"),
        ("sharded:layers --batch pieces --placements shared --order 2", "order: got 2 with placements=, expected 1"),
        ("sharded:endless --batch pieces --timeout 2", "TimeoutError: simulated ranks had not ended after 2 s"),
        (f"{LOSS} --shard right", "argument --shard: got 'right' without --mesh, expected both"),
        (f"{LOSS} --placements placements", "argument --placements: got 'placements' without --mesh, expected both"),
        (f"{LOSS} --rank-reduction tp=mean", "argument --rank-reduction: got 'tp=mean', expected mean, sum or any"),
        (f"{LOSS} --mesh tp=2 --shard nothing", "argument --shard: got 'nothing', expected a name in"),
        (f"{LOSS} --mesh tp=2 --placements wrong --shard right", "placements: got 3, expected placements by the name"),
        ("sharded:layers --batch pieces --placements wrong", "placements: got 3, expected placements by the name"),
        ("sharded:layers --batch pieces --timeout 0", "argument --timeout: got '0', expected an integer from 1"),
    ],
)
def test_wrong_arguments_of_sharded_programs(run, words, said):
    status, out, err = run(words)
    assert (status, out) == (2, "") and said in " ".join(err.split())
