"""Only the tests here are collected: rows are run by `make test-gpu`."""

from pathlib import Path

collect_ignore = [file.name for file in Path(__file__).parent.glob("*.py") if not file.name.startswith("test_")]
