"""Cost of CLIP's loss on two gloo processes: time of a step, and peak memory above the features.

    python examples/contrastive_cost.py                    # 1024 pairs per rank, 512 dimensions
    python examples/contrastive_cost.py 4096 256 512       # pairs per rank, dimensions, chunk_size

The baseline is the usual code: both modalities gathered by torch.distributed.nn.functional, and two matrices of logits.
Steps of the variants alternate; the time is their median. Memory is measured in processes of its own.
"""

import ctypes
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.nn import functional as distributed

from diffcoll.nn.functional import clip_loss
from diffcoll.testing import spawn

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def two_matrices(image, text, scale):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        images, texts = torch.cat(distributed.all_gather(image)), torch.cat(distributed.all_gather(text))
    targets = torch.arange(len(image)) + dist.get_rank() * len(image)
    to_texts, to_images = scale * image @ texts.T, scale * text @ images.T
    return (F.cross_entropy(to_texts, targets) + F.cross_entropy(to_images, targets)) / 2


def variants(chunk):
    options = [{}, {"chunk_size": chunk}, {"exchange": "ring"}, {"exchange": "ring", "chunk_size": chunk}]
    ours = {", ".join(f"{k}={v}" for k, v in o.items()) or "clip_loss": o for o in options}
    losses = {name: lambda *x, o=o: clip_loss(*x, **o) for name, o in ours.items()}
    return {"two matrices": two_matrices} | losses


def features(rows, dims):
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    image, text = (F.normalize(torch.randn(rows, dims)).requires_grad_() for _ in range(2))
    return image, text, torch.tensor(20.0, requires_grad=True)


def times(rows, dims, chunk, repeats):
    xs = features(rows, dims)
    found = {name: [] for name in variants(chunk)}
    for step in range(repeats + 1):
        for name, loss in variants(chunk).items():
            dist.barrier()
            start = time.perf_counter()
            torch.autograd.grad(loss(*xs), xs)
            dist.barrier()
            if step:  # the first one is for warming up
                found[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(each) for name, each in found.items()}


def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def memory(name, rows, dims, chunk):
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # freed tensors do not stay in the process
    small, loss = features(8, dims), variants(chunk)[name]
    torch.autograd.grad(loss(*small), small)  # allocates what is needed once
    xs = features(rows, dims)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    torch.autograd.grad(loss(*xs), xs)
    return status("VmHWM") - before


def main(rows=1024, dims=512, chunk=256, repeats=3):
    took = spawn(times, [rows] * 2, [dims] * 2, [chunk] * 2, [repeats] * 2, timeout=600)[0]
    print(f"{rows} pairs per rank, {dims} dimensions\n{'':36}     ms   MB")
    for name, ms in took.items():
        peak = max(spawn(memory, [name] * 2, [rows] * 2, [dims] * 2, [chunk] * 2, timeout=600))
        print(f"{name:36}{ms:7.0f}{peak:5.0f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
