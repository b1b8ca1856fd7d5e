"""Relative errors, times and peaks of memory."""

import statistics
import time

import torch


def distance(found, right):
    """Return |found − right| / |right|; inf if the shapes differ or a value is not finite."""
    found, right = found.detach().double(), right.detach().to(found.device).double()
    if found.shape != right.shape:
        return float("inf")
    error = ((found - right).norm() / right.norm().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


def flat(tensors):
    """Return tensors as one vector; those that are sharded, whole."""
    wholes = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors)
    return torch.cat([t.detach().flatten() for t in wholes])


def times(rank, ways, calls, rounds=5):
    """Return for each way (seconds of a call, seconds for which it holds the host): medians over the rounds.

    The ways take turns, so that a change of the clock rate or of other load affects all of them.
    """
    if not rank.on_gpu:
        calls, rounds = 1, 2
    for way in ways.values():
        for _ in range(3):
            way()
    found = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            rank.wait()
            begin = time.perf_counter()
            for _ in range(calls):
                way()
            queued = time.perf_counter()
            rank.wait()
            found[name].append(((time.perf_counter() - begin) / calls, (queued - begin) / calls))
    return {name: tuple(statistics.median(t) for t in zip(*each, strict=True)) for name, each in found.items()}


def peak(rank, call):
    """Return how many bytes of the GPU a call needs beyond those that are in use, its result included."""
    call()
    if not rank.on_gpu:
        return 0
    rank.wait()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    rank.wait()
    del kept
    return torch.cuda.max_memory_allocated() - before


def kernels(rank, call, runs=10):
    """Return the seconds of all kernels but NCCL's in a call, the shortest of some runs, and their number."""
    kind = torch.profiler.ProfilerActivity.CUDA if rank.on_gpu else torch.profiler.ProfilerActivity.CPU
    found = []
    for _ in range(3):
        call()
    rank.wait()
    for _ in range(runs):
        with torch.profiler.profile(activities=[kind]) as profile:
            call()
            rank.wait()
        events = [event for event in profile.key_averages() if "nccl" not in event.key.lower()]
        each = [event.self_device_time_total if rank.on_gpu else event.self_cpu_time_total for event in events]
        found.append((sum(each) / 1e6, sum(e.count for e, time in zip(events, each, strict=True) if time)))
    return min(found)
