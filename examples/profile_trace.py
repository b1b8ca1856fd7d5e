"""Profile a step: collectives in a trace of torch.profiler, forward and backward, and where a rank waits.

Two processes gather features; rank 1 is late. Writes a trace for https://ui.perfetto.dev and a picture.

    python examples/profile_trace.py [FOLDER]

A trace has times of the host's clock (CLOCK_REALTIME), which the processes of one host share, so the picture has one
zero for both ranks. Ranks of several hosts need synchronized clocks for that.
"""

import json
import sys
import time
from pathlib import Path

import torch
from pictures import pyplot

import diffcoll as dc
from diffcoll.testing import spawn

Event = tuple[str, float, float]


def step(rank: int, folder: str) -> list[Event]:
    """Profile one step, write its trace, and return the events of `events_of`."""
    w = torch.randn(256, 256, requires_grad=True)
    x = torch.randn(512, 256)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass  # the first profile loads libraries
    dc.all_gather(x @ w).sum().backward()  # the first collective connects the ranks and synchronizes them
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with torch.profiler.record_function("encoder"):
            z = torch.tanh(x @ w)
        if rank == 1:
            with torch.profiler.record_function("late"):
                time.sleep(0.1)
        features = dc.all_gather(z)
        loss = (z @ features.T).logsumexp(1).sum()
        loss.backward()
    path = Path(folder, f"trace-{rank}.json")
    profile.export_chrome_trace(str(path))
    return events_of(json.loads(path.read_text()))


def events_of(trace: dict) -> list[Event]:
    """Return the step's own events as (name, start, duration) in milliseconds, on the clock of the host."""
    base = trace["baseTimeNanoseconds"] / 1e6  # what all times of the file are relative to
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    mine = [e for e in events if e["name"].startswith("diffcoll.") or e["name"] in ("encoder", "late")]
    return [(e["name"], base + e["ts"] / 1e3, e["dur"] / 1e3) for e in mine]


def with_one_zero(ranks: list[list[Event]]) -> list[list[Event]]:
    """Return the ranks' events with times since the first event of all ranks."""
    zero = min(start for events in ranks for _, start, _ in events)
    return [[(name, start - zero, length) for name, start, length in events] for events in ranks]


def main(folder: str) -> None:
    plt = pyplot()
    ranks = with_one_zero(spawn(step, range(2), [folder] * 2))
    colors = {"encoder": "tab:gray", "late": "tab:red", "forward": "tab:blue", "backward": "tab:orange"}
    figure, axes = plt.subplots(figsize=(9, 2.5), layout="constrained")
    for rank, events in enumerate(ranks):
        for name, start, length in events:
            kind = name if name in colors else "backward" if "backward" in name else "forward"
            axes.barh(rank, length, left=start, color=colors[kind])
            print(f"rank {rank} at {start:6.2f} ms for {length:6.2f} ms: {name}")
    for kind, color in colors.items():
        axes.bar(0, 0, color=color, label=f"all_gather, {kind}" if kind.endswith("ward") else kind)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set(
        xlabel="ms since the first event of both ranks",
        yticks=[0, 1],
        yticklabels=["rank 0", "rank 1"],
        title="A step in which rank 1 is late",
    )
    axes.invert_yaxis()  # rank 0 above
    picture = Path(folder, "profile_trace.png")
    figure.savefig(picture, dpi=150)

    gathers = [next(e for e in events if e[0].startswith("diffcoll.all_gather:")) for events in ranks]
    assert gathers[0][2] > gathers[1][2]  # rank 0 waits for rank 1, which is late
    assert min(start + length for _, start, length in gathers) > max(start for _, start, _ in gathers)
    assert all(any("all_gather backward" in name for name, *_ in events) for events in ranks)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
