"""Collectives in torch.profiler: forward and backward, by name, with group and bytes."""

import torch
from runs import gloo

import diffcoll as dc


def test_every_collective_is_named():
    def body(r):
        x = torch.ones(4, 3, requires_grad=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            pending = dc.broadcast(x, src=1, async_op=True)
            y = dc.all_gather(x) * dc.all_reduce(x, "max").sum()
            (y.sum() + pending.wait().sum()).backward()
        dc.all_reduce(x)  # outside of the profile
        return [event.name for event in profile.events() if event.name.startswith("diffcoll.")]

    small = "a gloo group of 2 ranks"
    for names in gloo(body, range(2)):
        assert names[:2] == [f"diffcoll.broadcast: {small}, 48 B", f"diffcoll.all_gather: {small}, 48 B"]
        assert f"diffcoll.all_gather backward: {small}, 96 B" in names
        assert f"diffcoll.broadcast backward: {small}, 48 B" in names
        assert {f"diffcoll.broadcast: {small}", f"diffcoll.broadcast backward: {small}"} < {*names}  # the waits
