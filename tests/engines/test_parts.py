"""Parts of engines: scratch memory, what devices.py asks PyTorch, the warning of a rank that waits."""

import ast
import contextlib
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import line_of, python, runs_on, spawned

import diffcoll as dc
from diffcoll.core.torch_private.release import COMPILES
from diffcoll.engines import devices, watch
from diffcoll.engines.engine import add_up
from diffcoll.engines.scratch import KEPT_BYTES, NEW_BYTES, Scratch

# ── sums and scratch memory ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_add_up(n, dtype):
    """Into other memory or into a term; the other terms are as before."""
    for into in [None, *range(n)]:
        terms = [torch.arange(4).to(dtype) * (s + 1) for s in range(n)]
        before = [t.clone() for t in terms]
        out = torch.empty(4, dtype=dtype) if into is None else terms[into]
        add_up(terms, out)
        assert out.tolist() == [v * n * (n + 1) / 2 for v in range(4)]
        assert all(torch.equal(t, b) for s, (t, b) in enumerate(zip(terms, before, strict=True)) if s != into)


def test_scratch_is_kept_lent_once_and_bounded():
    scratch, like, n = Scratch(), torch.empty(0), NEW_BYTES // 4
    first = scratch.take(2 * n, like)
    at = first.data_ptr()
    assert scratch.take(2 * n, like).data_ptr() != at  # in use
    scratch.give(first)
    again = scratch.take(n, torch.empty(0, dtype=torch.complex64))
    assert (again.data_ptr(), again.dtype, again.shape) == (at, torch.complex64, (n,))
    assert scratch.take(n, like).data_ptr() != at
    scratch.give(again)
    small = scratch.take(n // 2, like)  # is new memory, and is not kept
    scratch.give(small)
    scratch.give(scratch.take(KEPT_BYTES // 4 + 1, like))
    assert scratch.take(n, like).data_ptr() == at != small.data_ptr()
    with torch.inference_mode():
        scratch.give(scratch.take(n, like))
    scratch.take(n, like).zero_()  # not an inference tensor


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {"device": partial(torch.device, "meta"), "dtype": partial(default_dtype, torch.float64)}
UNDER_DEFAULTS = {
    "half": lambda x: dc.all_reduce(x.half()),
    "large": lambda x: dc.all_reduce(x.expand(1 << 16, 4).contiguous()),
    "product": lambda x: dc.all_reduce(x, "product"),
    "max": lambda x: dc.all_reduce(x, "max"),
    "all_gather": lambda x: dc.all_gather(x[: 1 + dc.get_rank()], sizes="auto"),
    "all_to_all": lambda x: dc.all_to_all(x, split_sizes=[1, 3], concat_sizes="auto"),
    "scatter": lambda x: dc.scatter(x),
    "scan": lambda x: dc.scan(x, exclusive=True),
    "async": lambda x: dc.all_reduce(x, async_op=True).wait(),
}


@pytest.mark.parametrize("default", DEFAULTS)
@runs_on("rules", "gloo")
def test_defaults_of_some_ranks(run, default):
    """The library sets device and dtype of all its own tensors: defaults affect the user's tensors only."""

    def found(x, defaults):
        results = []
        for call in UNDER_DEFAULTS.values():
            for compare in (False, True):
                x.grad = None
                with defaults(), dc.check_mode(compare), dc.joint_backward() as joint:
                    y = call(x)
                    joint(y.float().square().sum()).backward()
                results += [y.detach(), x.grad]
        return results

    def body(x):
        of_rank = DEFAULTS[default] if dc.get_rank() else contextlib.nullcontext
        return found(x, of_rank), found(x, contextlib.nullcontext)

    xs = [torch.tensor([1.0, 2.0, -1.0, 0.5]) * (r + 1) for r in range(2)]
    for there, here in run(body, [x.clone().requires_grad_() for x in xs]):
        torch.testing.assert_close(there, here, rtol=0, atol=0)


# ── devices other than the CPU, without one ──────────────────────────────────────────────────────────────

#: Files that may name CUDA as an attribute, and what they name.
NAMED = {
    "engines/mpi.py": {"is_cuda"},
    "engines/devices.py": {"cuda"},
    **{f"nn/{name}.py": {"is_cuda"} for name in ("batch_norm", "contrastive")},
}


def test_nothing_else_names_cuda():
    """`torch.cuda`, `is_cuda` and `.cuda()`; a planted one is found."""
    root = Path(dc.__file__).parent

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


def test_streams(fake, monkeypatch):
    """Of the accelerator; of a device beside it, such as CUDA's where that is a PrivateUse1 device; without one."""
    fake("xpu")
    device, other = torch.device("xpu", 1), torch.device("cuda", 0)
    assert devices.current_stream(device) == ("accelerator", device)
    assert devices.current_stream(torch.device("cpu")) is devices.current_stream(torch.device("meta")) is None
    fake("privateuseone")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("module", device))
    assert devices.current_stream(other) == ("module", other)
    assert devices.current_stream(torch.device("xla", 0)) is None  # no module, no streams
    fake(None)
    assert devices.accelerator_type() is None
    assert not devices.is_capturing()


@pytest.mark.parametrize("has_allocator", [True, False])
def test_pinned_memory_is_that_of_the_accelerator(has_allocator, fake, monkeypatch):
    fake("xpu")
    asked = []

    def empty(size, **more):
        asked.append(more)
        if not has_allocator:
            raise RuntimeError("no allocator")
        return SimpleNamespace(is_pinned=lambda: True)

    monkeypatch.setattr(torch, "empty", empty)
    assert not devices.can_pin("cpu") and not devices.can_pin("cuda") and not asked
    assert [devices.can_pin("xpu") for _ in range(2)] == [has_allocator] * 2
    assert asked == [{"device": "cpu", "pin_memory": True}]


@pytest.mark.parametrize("backend", ["nccl", "xccl", "cpu:gloo,cuda:nccl", "NCCL", "gloo", "mpi", "ucc", "cuda:gloo"])
def test_backends_of_accelerators(backend, fake, monkeypatch):
    fake("xpu")
    chosen, needs = [], "ccl" in backend.lower()
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    assert devices.needs_accelerator(backend) == needs
    assert devices.device_of_backend(backend) == ("xpu" if needs else "cpu")
    devices.select_device(backend, 4)
    assert chosen == [1] * needs


@runs_on("rules", "gloo")
def test_zeros_without_memory(run):
    """Forward mode has zero tensors without memory; they are sent like other tensors."""

    def body(r):
        x = torch.full((4,), 2.0 + r)
        x = torch._efficientzerotensor((4,)) if r == 0 else x
        calls = [dc.all_reduce, dc.all_gather, dc.shift, dc.reduce_scatter, partial(dc.broadcast, src=1), dc.scan]
        return [call(x).tolist() for call in calls]

    for r, found in enumerate(run(body, range(2))):
        kept = [[3.0] * 2, [3.0] * 4, [3.0 * r] * 4]
        assert found == [[3.0] * 4, [0.0] * 4 + [3.0] * 4, [3.0 * (1 - r)] * 4, *kept]


# ── a rank that waits long prints a warning, once per call ───────────────────────────────────────────────


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_rank_that_waits_warns_once(backend, monkeypatch, tmp_path):
    """Rank 1 makes its call once rank 0 has warned, which a file signals; the result is right."""
    monkeypatch.setenv("DIFFCOLL_WARN_AFTER", "0.2")

    def body(r):
        texts, said, calls = [], iter(range(100)), iter(range(100))

        def noting(text, **how):
            texts.append(text)
            (tmp_path / str(next(said))).touch()

        def late():
            number = next(calls)
            while r == 1 and not (tmp_path / str(number)).exists():
                threading.Event().wait(0.01)

        watch.print = noting
        x = torch.tensor([1.0 + r, 5.0], requires_grad=True)
        late()
        y = dc.all_gather(x)  # forward
        late()
        (y * (r + 1)).sum().backward()
        late()
        pending = dc.all_reduce(x, async_op=True)
        z = pending.wait()  # async
        with dc.check_mode():
            late()
            y = dc.all_reduce(x)  # compared
            late()
            y.sum().backward()
        late()
        lengths = dc.all_gather(x[: 1 + r], sizes="auto").shape  # auto
        late()
        call = torch.compile(dc.all_reduce, backend="aot_eager") if COMPILES else dc.all_reduce
        return texts, x.grad.tolist(), z.tolist(), lengths, call(x).tolist()  # compiled

    (said, *found), (silent, *others) = spawned(body, range(2), backend=backend, timeout=90)
    what = [
        ("all_gather, forward", "forward"),
        ("all_gather, backward (which is reduce_scatter)", "forward"),
        ("all_reduce, forward", "async"),
        ("check mode, forward", "compared"),
        ("all_reduce, backward (which is check mode)", "compared"),
        ("all_gather, forward", "auto"),
        ("all_reduce, forward", "compiled"),
    ]
    assert silent == [] and len(said) == len(what)
    for text, (call, line) in zip(said, what, strict=True):
        assert text.startswith("diffcoll: rank 0 has waited 0.")
        assert f" s in {call}, called at {line_of(__file__, f'# {line}')}, for other ranks of " in text
        assert ("diffcoll.joint_backward()" in text) == ("backward" in call)
        assert ("DIFFCOLL_CHECK=1" in text) == ("backward" not in call and line != "compared")
    for grad, *rest in (found, others):
        assert rest == [[3.0, 10.0], (3,), [3.0, 10.0]] and grad[0] == 5.0


def test_the_thread_starts_with_the_first_group_unless_disabled():
    program = """
import os, threading, torch, torch.distributed as dist, diffcoll as dc
from diffcoll.engines import engine, turn, watch
running = lambda: sum(t.name == "diffcoll watch" for t in threading.enumerate())
assert not running()
class Some(engine.Engine):
    def exchange(self, sends, recvs, later=False): ...
watch.watch(Some(0, 1))
assert not running()
for after, wanted in ("", 1), ("7.5", 1), ("0", 0):
    if os.fork() == 0:
        break
    assert os.wait()[1] == 0, after
else:
    os._exit(0)
os.environ["DIFFCOLL_WARN_AFTER"] = after
kept = Some(0, 2)
watch.watch(kept)
watch.watch(kept)
assert running() == wanted, (after, running())
turn.Turn(kept, "all_reduce").__enter__()
if os.fork() == 0:
    assert not running()
    watch.watch(other := Some(1, 2))  # of the child
    assert running() == wanted
    os._exit(0)
assert os.wait()[1] == 0
"""
    assert python("-c", program, environment={"DIFFCOLL_WARN_AFTER": ""}).stderr == ""


def test_what_the_setting_may_be(monkeypatch):
    for wrong in ("soon", "-1", "nan"):
        monkeypatch.setenv("DIFFCOLL_WARN_AFTER", wrong)
        with pytest.raises(ValueError, match=f"DIFFCOLL_WARN_AFTER: got '{wrong}'"):
            watch._seconds()
