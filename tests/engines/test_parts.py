"""Parts of engines: scratch memory, what devices.py asks PyTorch, the warning of a rank that waits."""

import threading
from itertools import count

import pytest
import torch
from runs import line_of, refusal, runs_on, spawned

import diffcoll as dc
from diffcoll.engines import devices, watch
from diffcoll.engines.scratch import KEPT_BYTES, NEW_BYTES, Scratch


def test_scratch_is_kept_and_bounded():
    scratch, like, n = Scratch(), torch.empty(0), NEW_BYTES // 4
    at = scratch.take(2 * n, like).data_ptr()
    scratch.take(n // 2, like)  # is new memory, and is not kept
    scratch.take(KEPT_BYTES // 4 + 1, like)
    lent = scratch.take(n, torch.empty(0, dtype=torch.complex64))
    assert lent.data_ptr() == at
    part = lent[:1]
    del lent
    assert scratch.take(n, like).data_ptr() != at
    del part
    assert scratch.take(n, like).data_ptr() == at
    with torch.inference_mode():
        scratch.take(4 * n, like)
    scratch.take(n, like).zero_()  # not an inference tensor


@runs_on("rules", "gloo")
def test_a_default_device_of_some_ranks(run):
    """It affects the user's tensors only; of half precision and of a size for which memory is kept."""

    def body(r):
        x = torch.ones(1 << 16, 4, dtype=torch.float16, requires_grad=True)
        with torch.device("meta" if r else "cpu"), dc.joint_backward() as joint:
            y = dc.all_reduce(x)
            joint(y.float().square().sum()).backward()
        return y.unique().tolist(), x.grad.unique().tolist()

    assert run(body, range(2)) == [([2], [8])] * 2


# ── devices other than the CPU, without one ──────────────────────────────────────────────────────────────


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


@pytest.mark.parametrize("after", ["", "7.5", "0", "soon", "-1", "nan"])
def test_what_the_setting_may_be(after, monkeypatch):
    """Seconds, where zero turns the warnings off and nothing is the default."""
    monkeypatch.setenv("DIFFCOLL_WARN_AFTER", after)

    def body(r):
        if after in ("soon", "-1", "nan"):
            return "DIFFCOLL_WARN_AFTER" in refusal(ValueError, dc.all_reduce, torch.ones(1))
        dc.all_reduce(torch.ones(1))
        return any(thread.name == "diffcoll watch" for thread in threading.enumerate()) == (after != "0")

    assert spawned(body, range(2)) == [True] * 2
