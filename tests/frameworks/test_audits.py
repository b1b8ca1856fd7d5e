"""The audits find what their docstrings say, of the packages that are installed here."""

import ast

import pytest
from runs import ROOT, python

AUDITS = ["audit_collectives", "audit_published_losses"]


@pytest.mark.parametrize("name", AUDITS)
def test_what_it_found(name):
    file = ROOT / "examples" / f"{name}.py"
    told = {line.strip() for line in ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))).splitlines()}
    losses, _, _ = python(file).stdout.partition("features, parameters:")  # the layers are told of in other files
    table = [line.strip() for line in losses.splitlines() if ": skipped: " not in line]
    assert len(table) > 10
    assert not [line for line in table if line not in told]
