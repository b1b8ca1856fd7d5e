"""Trainings with diffcoll within frameworks, against one process, and the table of factors in notes/with/README.md."""

import importlib
import re

import pytest
from test_pages import PAGES
from variants import assert_as_one_process, factors

NAMES = (
    "ddp fsdp dtensor pipeline lightning fabric accelerate trainer sentence_transformers open_clip lightly "
    "metric_learning torchmetrics torchrl"
)
FRAMEWORKS = {name: importlib.import_module(f"in_{name}") for name in NAMES.split()}
RIGHT = [
    pytest.param(framework, k, id=f"{name}-{k}")
    for name, framework in FRAMEWORKS.items()
    for k in sorted({k for way in framework.RIGHT.values() for k in way.micro_batches})
]
LINES = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \| .* \|$", (PAGES / "README.md").read_text("utf-8"), re.MULTILINE)
#: The factors of a loss that is passed as it is, with one micro-batch and with two, by the row of the table.
TABLE = {
    re.sub(r"\[(.*?)\]\(.*?\)", r"\1", row): {1: one, 2: two}
    for row, one, two in LINES
    if re.fullmatch(r"\d|wrong", one)
}


def together(ways):
    """Return the ways in groups that one start of ranks can run."""
    groups = {}
    for name, way in ways.items():
        groups.setdefault((way.training, way.copies), {})[name] = way
    return groups.values()


@pytest.mark.parametrize(("framework", "micro_batches"), RIGHT)
def test_as_one_process(framework, micro_batches):
    for ways in together({name: way for name, way in framework.RIGHT.items() if micro_batches in way.micro_batches}):
        assert_as_one_process(ways, micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_factors(name, micro_batches):
    told = {i: (row, TABLE[row][micro_batches]) for i, (row, _) in enumerate(FRAMEWORKS[name].FACTORS)}
    ways = {i: way for i, (_, way) in enumerate(FRAMEWORKS[name].FACTORS) if told[i][1] != "–"}
    for group in together(ways):
        found = factors(group, micro_batches)
        assert {i: (told[i][0], factor) for i, factor in found.items()} == {i: told[i] for i in found}


def test_every_row_of_the_table_is_measured():
    assert {row for framework in FRAMEWORKS.values() for row, _ in framework.FACTORS} == TABLE.keys()
