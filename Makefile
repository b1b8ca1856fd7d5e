# make verify   the correctness matrix, on real gloo processes on this machine
# make test     the whole test suite
# Each builds .venv itself when it is missing or older than what it is made from.

PYTHON ?= python3
ARGS ?=
BIN = .venv/bin

.PHONY: verify test test-slow lint types format clean

verify: .venv/ready
	$(BIN)/python -m diffcoll verify $(ARGS)

test: .venv/ready
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal $(ARGS)

test-slow: .venv/ready
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal --timeout 3600 $(ARGS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
