"""Devices other than the CPU, without one: what `engines/devices.py` asks PyTorch, and that nothing else names CUDA."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import diffcoll
from diffcoll.engines import devices

#: Files that may name CUDA as an attribute, and what they name.
NAMED = {"engines/mpi.py": {"is_cuda"}}


def test_nothing_else_names_cuda():
    """`torch.cuda`, `is_cuda` and `.cuda()`; a planted one is found."""
    root = Path(diffcoll.__file__).parent

    def named(text):
        attributes = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
        return attributes & {"cuda", "is_cuda"}

    found = {str(path.relative_to(root)): named(path.read_text(encoding="utf-8")) for path in root.rglob("*.py")}
    assert {name: attributes for name, attributes in found.items() if attributes} == NAMED
    assert named("x.cuda(); torch.cuda.current_stream(); y.is_cuda") == {"cuda", "is_cuda"}


@pytest.fixture
def fake(monkeypatch):
    """Says that the accelerator of this process is of a type, with the stream ("accelerator", device)."""

    def fake(kind):
        accelerator = None if kind is None else SimpleNamespace(type=kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: ("accelerator", device))

    devices.can_pin.cache_clear()
    yield fake
    devices.can_pin.cache_clear()


def test_streams_of_the_accelerator(fake):
    fake("xpu")
    device = torch.device("xpu", 1)
    assert devices.accelerator_type() == "xpu"
    assert devices.current_stream(device) == ("accelerator", device)
    assert devices.current_stream(torch.device("cpu")) is None
    assert devices.current_stream(torch.device("meta")) is None


def test_streams_of_a_device_beside_the_accelerator(fake, monkeypatch):
    """Where a PrivateUse1 device is the accelerator, CUDA's streams are those of torch.cuda."""
    fake("privateuseone")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("module", device))
    assert devices.current_stream(torch.device("cuda", 0)) == ("module", torch.device("cuda", 0))
    assert devices.current_stream(torch.device("xla", 0)) is None  # no module, no streams


def test_without_accelerator(fake):
    fake(None)
    assert devices.accelerator_type() is None
    assert devices.current_stream(torch.device("cpu")) is None
    assert not devices.can_pin("cuda")
    assert devices.device_of_backend("gloo") == devices.device_of_backend("nccl") == "cpu"


def test_pinned_memory_is_that_of_the_accelerator(fake, monkeypatch):
    fake("xpu")
    asked = []

    def empty(size, **more):
        asked.append(more)
        return SimpleNamespace(is_pinned=lambda: True)

    monkeypatch.setattr(torch, "empty", empty)
    assert not devices.can_pin("cpu")
    assert not devices.can_pin("cuda")
    assert asked == []
    assert devices.can_pin("xpu")
    assert devices.can_pin("xpu")
    assert asked == [{"device": "cpu", "pin_memory": True}]


def test_a_device_without_pinned_memory(fake, monkeypatch):
    fake("privateuseone")

    def empty(size, **more):
        raise RuntimeError("no allocator")

    monkeypatch.setattr(torch, "empty", empty)
    assert not devices.can_pin("privateuseone")


def test_numbers_of_types():
    for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "privateuseone"):
        assert devices.type_numbered(devices.number_of(torch.device(kind))) == kind
    assert devices.number_of(torch.device("cpu")) == 0
    with pytest.raises(ValueError, match="meta"):
        devices.number_of(torch.device("meta"))


@pytest.mark.parametrize("backend", ["nccl", "xccl", "cpu:gloo,cuda:nccl", "NCCL"])
def test_backends_of_accelerators(backend, fake, monkeypatch):
    fake("xpu")
    chosen = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    assert devices.needs_accelerator(backend)
    assert devices.device_of_backend(backend) == "xpu"
    devices.select_device(backend, 4)
    assert chosen == [1]


@pytest.mark.parametrize("backend", ["gloo", "mpi", "ucc", "simulated", "cuda:gloo"])
def test_backends_that_move_cpu_tensors(backend, fake, monkeypatch):
    fake("xpu")
    monkeypatch.setattr(torch.accelerator, "set_device_index", pytest.fail)
    assert not devices.needs_accelerator(backend)
    assert devices.device_of_backend(backend) == "cpu"
    devices.select_device(backend, 4)


def test_random_numbers_are_restored():
    x = torch.zeros(1)
    before = torch.get_rng_state()
    with devices.forked_rng(x):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_numbers_of_the_device_are_restored(monkeypatch):
    states, device = ["before"], torch.device("xpu", 2)
    monkeypatch.setattr(torch.xpu, "get_rng_state", lambda device: (states[-1], device))
    monkeypatch.setattr(torch.xpu, "set_rng_state", lambda state, device: states.append((state, device)))
    with devices.forked_rng(SimpleNamespace(is_cpu=False, device=device)):
        states.append("used")
    assert states[-1] == (("before", device), device)
