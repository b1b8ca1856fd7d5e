"""Collectives and buckets in torch.profiler: forward and backward, by name, with group and bytes."""

import json
import runpy
import time

import pytest
import torch
from runs import ROOT, gloo

import diffcoll as dc


def test_every_collective_is_named(tmp_path):
    def body(r):
        x = torch.ones(4, 3, requires_grad=True)
        dc.GradientAverager(model := torch.nn.Linear(3, 2))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            pending = dc.broadcast(x, src=1, async_op=True)
            y = dc.all_gather(x) * dc.all_reduce(x, "max").sum()
            (y.sum() + pending.wait().sum()).backward()
            model(x.detach()).sum().backward()
        if r == 0:
            profile.export_chrome_trace(str(tmp_path / "trace.json"))
        dc.all_reduce(x)  # outside of the profile
        return [event.name for event in profile.events() if event.name.startswith("diffcoll.")]

    small = "a gloo group of 2 ranks"
    for names in gloo(body, range(2)):
        assert names[:2] == [f"diffcoll.broadcast: {small}, 48 B", f"diffcoll.all_gather: {small}, 48 B"]
        assert names[2].startswith(f"diffcoll.all_gather: {small}, ")  # of the maximum: a small one is gathered whole
        assert f"diffcoll.all_gather backward: {small}, 96 B" in names
        assert f"diffcoll.broadcast backward: {small}, 48 B" in names
        assert f"diffcoll.sum_gradients backward: {small}, 48 B" in names  # of the maximum
        bucket = f"diffcoll.GradientAverager bucket 0 of 1 (bias … weight, 2 parameters): {small}, 52 B"
        assert names[-2:] == [bucket] * 2  # the start and the wait of 8 numbers, 2 flags and 3 more
        assert len(names) == 10 + 2  # four starts, four adjoints, and a wait each way
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert any(event.get("name", "").startswith("diffcoll.all_gather backward") for event in trace["traceEvents"])


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return runpy.run_path(str(ROOT / "examples" / "profile_trace.py"))


def test_timelines_of_ranks_have_one_zero(example):
    """A file's times are relative to a number in the file, which may differ between ranks."""

    def trace(base, *starts):
        events = [{"ph": "X", "name": "encoder", "ts": start, "dur": 500.0} for start in starts]
        return {"baseTimeNanoseconds": base, "traceEvents": events}

    base = 1_790_857_026_000_000_000
    ranks = [trace(base, 2000.0, 9000.0), trace(base + 5_000_000, 1000.0)]
    first, second = example["with_one_zero"]([example["events_of"](rank) for rank in ranks])
    assert [start for _, start, _ in first] == pytest.approx([0, 7], abs=0.01)
    assert second == [("encoder", pytest.approx(4, abs=0.01), 0.5)]


def test_times_of_a_trace_are_of_the_clock_of_the_host(example, tmp_path):
    """The clock of time.time(), which processes share, to within 20 ms: nobody reads the two at the same time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        before = time.time()
        time.sleep(0.02)
        with torch.profiler.record_function("encoder"):
            time.sleep(0.02)
        after = time.time()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    ((_, start, length),) = example["events_of"](json.loads((tmp_path / "trace.json").read_text()))
    assert before * 1e3 < start < start + length < after * 1e3 + 20
