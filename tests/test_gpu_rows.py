"""The runner of `make test-gpu`, by planted rows; `.ci/run` runs all rows on the CPU."""

import json
import os

import pytest
from runs import ROOT, python

PATH = os.pathsep.join(str(ROOT / folder) for folder in (".", "tests", "tests/nn"))


@pytest.fixture
def table(tmp_path):
    """Runs rows; returns what was printed, and the JSON file's rows by name."""

    def table(*arguments, returns=0, rows=None):
        environment = {"PYTHONPATH": PATH, **({} if rows is None else {"GPU_ROWS": rows})}
        arguments = "--dry", "--json", tmp_path / "rows.json", *arguments
        done = python("-m", "gpu", *arguments, returns=returns, environment=environment, cwd=tmp_path)
        found = json.loads((tmp_path / "rows.json").read_text())["rows"]
        return done.stdout, {f"{result['row']}-{result['ranks']}": result for result in found}

    return table


def test_each_row_is_reported_whatever_it_does(table):
    printed, found = table(rows="planted_rows", returns=1)
    assert "2 of 5 rows right" in printed and "skipped: on_a_gpu-1" in printed
    assert found.keys() == {"right-1", "right-2", "wrong-2", "hangs-2", "dies-1"}
    wrong = {name: {part: text for part, text in result["wrong"]} for name, result in found.items()}
    assert {name for name, parts in wrong.items() if parts} == found.keys() - {"right-1", "right-2"}
    assert wrong["wrong-2"].keys() == {"of rank 1", "not a number", "a time", "refused otherwise", "not refused", ""}
    assert "rank 1: error: 2.00e+00, expected at most 1.0e+00" in wrong["wrong-2"]["of rank 1"]
    assert "NotImplementedError: raised (at planted_rows.py:" in wrong["wrong-2"][""]
    assert "killed after 12 s" in wrong["hangs-2"][""]  # on a busy machine its processes may still be starting then
    assert "ended with status 7 in or after exit" in wrong["dies-1"][""]
    assert found["right-2"]["figures"] == [["a number", "ranks 2"]]
