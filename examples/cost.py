"""Costs of a step on two gloo processes, of variants that compute the same: collectives, time and peak memory.

What contrastive_cost.py, grad_cache_cost.py and vocab_parallel_cost.py share; batch_norm_cost.py uses `alternating`.
A script has a function steps(rows, …) → {variant: step}, which each process calls. A step takes no arguments, and
returns tensors that are equal for all variants.
"""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from diffcoll.testing import spawn

Step = Callable[[], object]
Steps = Callable[..., dict[str, Step]]
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def alternating(variants: dict[str, Step], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Return the wall and the CPU time of each step, in ms. Each variant runs once before, to warm up."""
    found = {name: [] for name in variants}
    for i in range(repeats + 1):
        for name, step in variants.items():
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            step()
            used = time.process_time() - start_cpu
            dist.barrier()
            if i:
                found[name].append((1e3 * (time.perf_counter() - start), 1e3 * used))
    return found


def collectives(step: Step) -> int:
    """Return how many collectives and messages between two ranks a step starts on gloo, as PyTorch's profiler has them.

    Those of the library and of DistributedDataParallel alike; a message that is received counts once, with its sender.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        step()
        dist.barrier()  # DistributedDataParallel's events end in other threads
    started = [e.name for e in profile.events() if e.name.startswith("gloo:") and e.input_shapes]
    return sum(name not in ("gloo:recv", "gloo:barrier") for name in started)


def times(steps: Steps, sizes: tuple[int, ...], repeats: int) -> dict[str, tuple[float, int]]:
    """Return each variant's median time of a step in ms, and its number of collectives; on this process."""
    torch.set_num_threads(1)
    variants = steps(*sizes)
    expected, *others = [step() for step in variants.values()]
    for found in others:
        torch.testing.assert_close(found, expected)
    took = alternating(variants, repeats)
    return {
        name: (statistics.median(wall for wall, _ in took[name]), collectives(step)) for name, step in variants.items()
    }


def memory(steps: Steps, name: str, sizes: tuple[int, ...]) -> float:
    """Return the peak of memory in a variant's step above that before it, in MB; on this process."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # freed tensors do not stay in the process
    steps(8, *sizes[1:])[name]()  # allocates what is needed once
    step = steps(*sizes)[name]
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def table(title: str, steps: Steps, sizes: tuple[int, ...], repeats: int) -> None:
    """Print the costs of each variant: collectives of a step, ms, their ratio to the first variant's, and MB."""
    took = spawn(times, [steps] * 2, [sizes] * 2, [repeats] * 2, timeout=600)[0]
    baseline, _ = next(iter(took.values()))
    print(f"{title}\n{'':36}collectives     ms  ratio   MB")
    for name, (ms, count) in took.items():
        peak = max(spawn(memory, [steps] * 2, [name] * 2, [sizes] * 2, timeout=600))
        print(f"{name:36}{count:11}{ms:7.0f}{ms / baseline:7.2f}{peak:5.0f}")
