"""Parts of engines: scratch memory, what devices.py asks PyTorch, the warning of a rank that waits."""

import ast
import contextlib
import threading
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from runs import line_of, runs_on, spawned

import diffcoll as dc
from diffcoll.engines import devices, watch
from diffcoll.engines.scratch import KEPT_BYTES, NEW_BYTES, Scratch


def test_scratch_is_kept_and_bounded():
    scratch, like, n = Scratch(), torch.empty(0), NEW_BYTES // 4
    first = scratch.take(2 * n, like)
    at = first.data_ptr()
    scratch.give(first)
    scratch.give(scratch.take(n // 2, like))  # is new memory, and is not kept
    scratch.give(scratch.take(KEPT_BYTES // 4 + 1, like))
    assert scratch.take(n, torch.empty(0, dtype=torch.complex64)).data_ptr() == at
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
    """`torch.cuda`, `is_cuda` and `.cuda()`."""
    root, found = Path(dc.__file__).parent, {}
    for path in root.rglob("*.py"):
        attributes = {
            node.attr for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Attribute)
        }
        found[str(path.relative_to(root))] = attributes & {"cuda", "is_cuda"}
    assert {name: attributes for name, attributes in found.items() if attributes} == NAMED


@pytest.mark.parametrize("backend", ["nccl", "xccl", "cpu:gloo,cuda:nccl", "NCCL", "gloo", "mpi", "ucc", "cuda:gloo"])
def test_backends_of_accelerators(backend, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: chosen.append(index))
    chosen, needs = [], "ccl" in backend.lower()
    assert devices.needs_accelerator(backend) == needs
    assert devices.device_of_backend(backend) == ("xpu" if needs else "cpu")
    devices.select_device(backend, 4)
    assert chosen == [1] * needs


# ── a rank that waits long prints a warning, once per call ───────────────────────────────────────────────


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_rank_that_waits_warns_once(backend, monkeypatch, tmp_path):
    """Rank 1 makes its call once rank 0 has warned, which a file signals; the result is right."""
    monkeypatch.setenv("DIFFCOLL_WARN_AFTER", "0.2")

    def body(r):
        texts, said, calls = [], count(), count()

        def noting(text, **how):
            texts.append(text)
            (tmp_path / str(next(said))).touch()

        def late():
            number = next(calls)
            while r == 1 and not (tmp_path / str(number)).exists():
                threading.Event().wait(0.01)
            threading.Event().wait(0.5 * (r == 1 and number == 0))  # rank 0 would warn twice

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
        return texts, x.grad.tolist(), z.tolist(), lengths

    (said, *found), (silent, *others) = spawned(body, range(2), backend=backend, timeout=90)
    assert found == others == [[5.0, 5.0], [3.0, 10.0], (3,)] and silent == []
    lines = ["forward", "forward", "async", "compared", "compared", "auto"]
    for text, line in zip(said, lines, strict=True):
        assert "rank 0" in text and line_of(__file__, f"# {line}") in text
    assert ["backward" in text.partition(", called at")[0] for text in said] == [False, True, False, False, True, False]


@pytest.mark.parametrize(("after", "threads"), [("", 1), ("7.5", 1), ("0", 0)])
def test_zero_turns_the_warnings_off(after, threads, monkeypatch):
    monkeypatch.setenv("DIFFCOLL_WARN_AFTER", after)

    def body(r):
        dc.all_reduce(torch.ones(1))
        return sum(thread.name == "diffcoll watch" for thread in threading.enumerate())

    assert spawned(body, range(2)) == [threads] * 2


@pytest.mark.parametrize("wrong", ["soon", "-1", "nan"])
def test_what_the_setting_may_be(wrong, monkeypatch):
    monkeypatch.setenv("DIFFCOLL_WARN_AFTER", wrong)
    with pytest.raises(ValueError, match="DIFFCOLL_WARN_AFTER"):
        watch._seconds()
