"""Trainings with diffcoll within frameworks, against one process; and the pages of notes/with: factors, programs."""

import importlib
import importlib.metadata
import re
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from runs import ROOT, python
from test_notes import blocks
from trainings import UPDATES, parameters

import diffcoll as dc
from diffcoll.testing import spawn

PAGES = ROOT / "notes" / "with"
TEXT = (PAGES / "README.md").read_text("utf-8")
NAMES = "ddp fsdp dtensor pipeline lightning accelerate trainer sentence_transformers losses torchmetrics torchrl"
#: Of each framework, rows of the table, or None if a loss is passed as it is, and ways to train.
ROWS = {name: importlib.import_module(f"in_{name}").ROWS for name in NAMES.split()}
#: The factors of a loss that is passed as it is, with one micro-batch and with two, by the row of the table.
TABLE = {
    re.sub(r"\[(.*?)\]\(.*?\)", r"\1", row): {1: one, 2: two}
    for row, one, two in re.findall(r"^\| (.*?) \| (\d|wrong) \| (.*?) \| .* \|$", TEXT, re.MULTILINE)
}


def measured(rows, micro_batches):
    """Yield each row with its way, and the factor that the table says."""
    for row, way in rows:
        factor = TABLE[row][micro_batches] if row else "1"
        if micro_batches in way.micro_batches and factor != "–":
            yield row, way, factor


def on_ranks(trainings, micro_batches, updates):
    """Return every rank's parameters of each (way, factor): a fresh model is trained on the loss / factor.

    Ways of one training share a start of ranks.
    """

    def on_rank(together, mine):
        found = []
        for way, factor in together:

            def loss(model, batch, update, way=way, factor=factor):
                return way.training.loss(model, batch, update) / factor

            loss.factor = factor
            model = way.training.model()
            found.append(way.train(model, mine, loss) or parameters(model))
            dc.set_default_group(None)
        return found

    groups, found = defaultdict(list), {}
    for i, (way, _) in enumerate(trainings):
        groups[way.training, way.copies].append(i)
    for (training, copies), chosen in groups.items():
        batches = [mine for mine in training.batches(micro_batches, updates) for _ in range(copies)]
        ranks = spawn(on_rank, [[trainings[i] for i in chosen]] * len(batches), batches, timeout=100)
        found |= dict(zip(chosen, zip(*ranks, strict=True), strict=True))
    return [found[i] for i in range(len(trainings))]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", ROWS)
def test_as_one_process(name, micro_batches):
    """What is passed is the loss, divided by the factor of the table."""
    rows = [row for row in measured(ROWS[name], micro_batches) if row[2] != "wrong"]
    found = on_ranks([(way, float(factor)) for _, way, factor in rows], micro_batches, UPDATES)
    for i, (row, way, _) in enumerate(rows):
        expected = way.training.on_one_process(micro_batches)
        for rank in found[i]:
            torch.testing.assert_close(rank, expected, rtol=1e-9, atol=1e-11, msg=f"{i}, {row}: {{}}".format)
            torch.testing.assert_close(rank, found[i][0], rtol=0, atol=0, msg=f"{i}, {row}, ranks: {{}}".format)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_wrong_directions(micro_batches):
    """Of the first update."""
    rows = [row for ways in ROWS.values() for row in measured(ways, micro_batches) if row[2] == "wrong"]
    assert rows
    found = on_ranks([(way, 1) for _, way, _ in rows], micro_batches, 1)
    for (row, way, _), ranks in zip(rows, found, strict=True):
        right, before = way.training.on_one_process(micro_batches, 1), parameters(way.training.model())
        steps = [torch.cat([(after[name] - p).flatten() for name, p in before.items()]) for after in (ranks[0], right)]
        assert F.cosine_similarity(*steps, dim=0) < 0.9999, row


def test_every_row_of_the_table_is_measured():
    assert {row for rows in ROWS.values() for row, _ in rows} - {None} == TABLE.keys()


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
