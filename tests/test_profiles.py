"""Collectives and buckets in torch.profiler: forward and backward, by name, with group and bytes."""

import json

import torch
from runs import gloo

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
