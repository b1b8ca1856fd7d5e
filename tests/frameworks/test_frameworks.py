"""Trainings with diffcoll within frameworks, against one process; and the pages of notes/with: factors, programs."""

import importlib
import importlib.metadata
import re

import pytest
import torch
from runs import ROOT, python
from test_notes import blocks
from trainings import UPDATES, as_it_is, parameters

import diffcoll as dc
from diffcoll.testing import spawn

PAGES = ROOT / "notes" / "with"
TEXT = (PAGES / "README.md").read_text("utf-8")
NAMES = "ddp fsdp dtensor pipeline lightning accelerate trainer sentence_transformers losses torchmetrics torchrl"
FRAMEWORKS = {name: importlib.import_module(f"in_{name}") for name in NAMES.split()}
RIGHT = [
    pytest.param(framework, k, id=f"{name}-{k}")
    for name, framework in FRAMEWORKS.items()
    for k in sorted({k for way in framework.RIGHT.values() for k in way.micro_batches})
]
LINES = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \| .* \|$", TEXT, re.MULTILINE)
#: The factors of a loss that is passed as it is, with one micro-batch and with two, by the row of the table.
TABLE = {
    re.sub(r"\[(.*?)\]\(.*?\)", r"\1", row): {1: one, 2: two}
    for row, one, two in LINES
    if re.fullmatch(r"\d|wrong", one)
}


def on_ranks(ways, micro_batches, updates):
    """Return {name: each rank's parameters}, each on a fresh model; ways of one training share a start of ranks."""

    def on_rank(together, mine):
        found = {}
        for name, way in together.items():

            def loss(model, batch, update, way=way):
                return way.passed(way.training.loss(model, batch, update), update)

            model = way.training.model()
            try:
                found[name] = way.train(model, mine, loss) or parameters(model)
            except Exception as error:
                raise AssertionError(f"{name} raises") from error
            dc.set_default_group(None)
        return found

    found = {}
    for training, copies in {(way.training, way.copies) for way in ways.values()}:
        together = {name: way for name, way in ways.items() if (way.training, way.copies) == (training, copies)}
        batches = [mine for mine in training.batches(micro_batches, updates) for _ in range(copies)]
        ranks = spawn(on_rank, [together] * len(batches), batches, timeout=100)
        found |= {name: [rank[name] for rank in ranks] for name in together}
    return found


@pytest.mark.parametrize(("framework", "micro_batches"), RIGHT)
def test_as_one_process(framework, micro_batches):
    ways = {name: way for name, way in framework.RIGHT.items() if micro_batches in way.micro_batches}
    for name, ranks in on_ranks(ways, micro_batches, UPDATES).items():
        expected = ways[name].training.on_one_process(micro_batches)
        for found in ranks:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=f"{name}: {{}}".format)
            torch.testing.assert_close(found, ranks[0], rtol=0, atol=0, msg=f"{name} between ranks: {{}}".format)


def factor(training, ranks, micro_batches):
    """Return what the gradients of one process are multiplied by, as the table says it; the scale's, if it is another.

    "wrong": another direction, "differs": not one value on all ranks.
    """
    start, expected = parameters(training.model()), training.on_one_process(micro_batches, 1)

    def of(name):
        if not all(torch.equal(ranks[0][name], rank[name]) for rank in ranks):
            return "differs"
        found, right = ranks[0][name] - start[name], expected[name] - start[name]
        ratio = float((found * right).sum() / right.square().sum())
        return f"{ratio:.6g}" if torch.allclose(found, ratio * right, rtol=1e-7, atol=1e-11) else "wrong"

    factors = {name: of(name) for name in expected}
    others = ", ".join(sorted({value for name, value in factors.items() if name != "scale"}))
    scale = factors.get("scale", others)
    return others if scale == others else f"{others} / {scale}: encoders / scale"


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_factors(name, micro_batches):
    rows = [(row, way) for row, way in FRAMEWORKS[name].FACTORS if TABLE[row][micro_batches] != "–"]
    ways = {i: way._replace(passed=as_it_is) for i, (_, way) in enumerate(rows)}
    found = on_ranks(ways, micro_batches, 1)
    for i, (row, way) in enumerate(rows):
        assert (row, factor(way.training, found[i], micro_batches)) == (row, TABLE[row][micro_batches])


def test_every_row_of_the_table_is_measured():
    assert {row for framework in FRAMEWORKS.values() for row, _ in framework.FACTORS} == TABLE.keys()


# ── the pages ────────────────────────────────────────────────────────────────────────────────────────────

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
    versions = re.findall(r"\b([a-zA-Z_-]+) (\d+\.\d+\.\d+)\b", TEXT)
    assert versions
    for package, version in versions:
        assert importlib.metadata.version(package).split("+")[0] == version, package
