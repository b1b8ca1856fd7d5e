# make verify   the correctness matrix, on real gloo processes on this machine
# make test     the whole test suite
# make mutants  the tests on each of the planted defects of tests/mutants; an hour
# make test-frameworks   with Accelerate, Lightning, the HF Trainer and others, in .venv-frameworks
# make test-device   on a device of the tests' own, where missing synchronization is a wrong number; needs a C++ compiler
# make test-gpu      rows for a machine with one GPU, by its own python3 (PYTHON=…), without .venv; NCCL=nccl.so.xz:
#                    several ranks share the GPU, by a file that tests/gpu/thin_nccl.py makes; DRY=1: on the CPU and gloo,
#                    in .venv
# make test-hosts    on hosts made of network namespaces: a cable is pulled, a rank killed; needs root and iproute2
# make docs    the site of the notes and the reference, in build/docs/index.html; a warning is an error
# Each but test-gpu on a GPU builds .venv itself when it is missing or older than what it is made from.
# TORCH=2.15.0 with any of them but test-frameworks: on that release of PyTorch, in .venv-torch, which holds one release at a time.

PYTHON ?= python3
ARGS ?=
TORCH ?=
NCCL ?=
DRY ?=
VENV = $(if $(TORCH),.venv-torch,.venv)
BIN = $(VENV)/bin
READY = $(VENV)/ready$(TORCH)
# Where images set it, every process that a test starts would compile the modules anew: a third of the suite's time.
export PYTHONDONTWRITEBYTECODE =

.PHONY: verify test test-slow test-device test-gpu test-hosts test-frameworks mutants docs lint types format clean

verify: $(READY)
	$(BIN)/python -m diffcoll verify $(ARGS)

# Three on two cores: ranks of processes wait for one another about half of their time.
test: $(READY)
	$(BIN)/python -m pytest -m "not slow" -n 3 --dist worksteal $(ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal --timeout 3600 $(ARGS)

test-device: $(READY)
	$(BIN)/python -m pytest tests/late_device $(ARGS)

test-gpu: export PYTHONPATH = $(CURDIR):$(CURDIR)/tests:$(CURDIR)/tests/nn
test-gpu: $(if $(DRY),$(READY))
	$(if $(DRY),$(BIN)/python,$(PYTHON)) -m gpu $(if $(NCCL),--nccl $(NCCL)) $(if $(DRY),--dry) $(ARGS)

test-hosts: $(READY)
	$(BIN)/python -m pytest tests/hosts $(ARGS)

# Each planted defect of tests/mutants, and the test that notices it; ARGS="-k averaging" selects.
mutants: $(READY)
	PYTHONPATH=tests $(BIN)/python -m mutants.run $(ARGS)

test-frameworks: .venv-frameworks/ready
	.venv-frameworks/bin/python -m pytest tests/frameworks tests/test_package.py::test_a_job $(ARGS)

docs: $(READY)
	$(BIN)/python -m sphinx -q -W -n notes build/docs $(ARGS)
	DIFFCOLL_SITE=build/docs $(BIN)/python -m pytest -q tests/test_site.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy
	$(BIN)/mypy tests/typed_uses.py
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/ready: EXTRA = dev
.venv-frameworks/ready: EXTRA = frameworks
# They ask for torchvision, whose wheel on PyPI loads with a CUDA build of PyTorch alone. Their losses need none.
.venv-frameworks/ready: WITHOUT_DEPENDENCIES = lightly open_clip_torch
.venv/ready .venv-frameworks/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --constraint constraints.txt torch
	$(@D)/bin/pip install --quiet --constraint constraints.txt --editable ".[$(EXTRA)]"
	$(if $(WITHOUT_DEPENDENCIES),$(@D)/bin/pip install --quiet --constraint constraints.txt --no-deps $(WITHOUT_DEPENDENCIES))
	touch $@

# What a release of PyTorch needs of its own is not what the pinned one does: sympy, for one.
.venv-torch/ready%: pyproject.toml constraints.txt
	rm -rf .venv-torch
	$(PYTHON) -m venv .venv-torch
	grep -Ev "^(torch|sympy)==" constraints.txt > .venv-torch/constraints.txt
	$(@D)/bin/pip install --quiet torch==$*
	$(@D)/bin/pip install --quiet --constraint .venv-torch/constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-torch .venv-frameworks build dist notes/reference *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
