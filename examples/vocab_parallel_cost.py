"""Cost of a cross-entropy over a vocabulary that two gloo processes share: time of a step, and peak memory.

    python examples/vocab_parallel_cost.py                      # 1024 tokens, a vocabulary of 8192, 256 dimensions
    python examples/vocab_parallel_cost.py 4096 32768 256 2048  # tokens, vocabulary, dimensions, chunk_size

The baseline is the usual code by hand, as in Megatron-LM: the logits of this rank's rows, a maximum over the ranks, and
sums of the exponentials and of the logits of the targets. Steps of the variants alternate; the time is their median.
Memory, above that of hidden and the weight, is measured in processes of its own.
"""

import ctypes
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from diffcoll.nn.functional import vocab_parallel_cross_entropy
from diffcoll.testing import spawn

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


class CopyToRanks(torch.autograd.Function):
    """Megatron's f: the gradients of hidden are added."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g


class CrossEntropy(torch.autograd.Function):
    """Of this rank's logits, which it overwrites; the gradient is computed from the softmax."""

    @staticmethod
    def forward(ctx, logits, target):
        first = dist.get_rank() * logits.shape[1]
        largest = logits.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        logits -= largest[:, None]
        here = (target >= first) & (target < first + logits.shape[1])
        index = torch.where(here, target - first, 0)
        predicted = logits.gather(1, index[:, None]).squeeze(1) * here
        exponentials = logits.exp_()
        sums = torch.stack([predicted, exponentials.sum(1)])
        dist.all_reduce(sums)
        ctx.save_for_backward(exponentials.div_(sums[1][:, None]), index, here)
        return sums[1].log() - sums[0]

    @staticmethod
    def backward(ctx, g):
        softmax, index, here = ctx.saved_tensors
        softmax[torch.arange(len(index)), index] -= here.to(g.dtype)
        return softmax.mul_(g[:, None]), None


def by_hand(hidden, weight, target):
    return CrossEntropy.apply(CopyToRanks.apply(hidden) @ weight.T, target).mean()


def variants(chunk):
    chunked = partial(vocab_parallel_cross_entropy, chunk_size=chunk)
    return {"by hand": by_hand, "all logits": vocab_parallel_cross_entropy, f"chunk_size={chunk}": chunked}


def inputs(tokens, vocabulary, dims):
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, dims, generator=g)
    weight = (torch.randn(vocabulary, dims, generator=g) / dims**0.5).chunk(dist.get_world_size())[dist.get_rank()]
    return hidden.requires_grad_(), weight.clone().requires_grad_(), torch.randint(vocabulary, (tokens,), generator=g)


def step(loss, hidden, weight, target):
    return torch.autograd.grad(loss(hidden, weight, target), (hidden, weight))


def times(tokens, vocabulary, dims, chunk, repeats):
    xs = inputs(tokens, vocabulary, dims)
    found = {name: [] for name in variants(chunk)}
    for i in range(repeats + 1):
        for name, loss in variants(chunk).items():
            dist.barrier()
            start = time.perf_counter()
            gradients = step(loss, *xs)
            dist.barrier()
            if i:
                found[name].append(1e3 * (time.perf_counter() - start))
            else:  # the first one is for warming up, and checked
                torch.testing.assert_close(gradients, step(by_hand, *xs))
    return {name: statistics.median(each) for name, each in found.items()}


def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def memory(name, tokens, vocabulary, dims, chunk):
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # freed tensors do not stay in the process
    loss = variants(chunk)[name]
    step(loss, *inputs(8, vocabulary, dims))  # allocates what is needed once
    xs = inputs(tokens, vocabulary, dims)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    step(loss, *xs)
    return status("VmHWM") - before


def main(tokens=1024, vocabulary=8192, dims=256, chunk=1024, repeats=9):
    sizes = tokens, vocabulary, dims, chunk
    took = spawn(times, *([size] * 2 for size in (*sizes, repeats)), timeout=600)[0]
    print(f"{tokens} tokens, {vocabulary} words on two ranks, {dims} dimensions\n{'':20}     ms  ratio   MB")
    for name, ms in took.items():
        peak = max(spawn(memory, [name] * 2, *([size] * 2 for size in sizes), timeout=600))
        print(f"{name:20}{ms:7.0f}{ms / took['by hand']:7.2f}{peak:5.0f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
