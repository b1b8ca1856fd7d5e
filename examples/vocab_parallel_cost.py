"""Cost of a cross-entropy over a vocabulary that two gloo processes share: collectives, time, peak memory.

    python examples/vocab_parallel_cost.py                      # 1024 tokens, a vocabulary of 8192, 256 dimensions
    python examples/vocab_parallel_cost.py 4096 32768 256 512  # tokens, vocabulary, dimensions, chunk_size

The baseline is the usual code by hand, as in Megatron-LM: the logits of this rank's rows, a maximum over the ranks, and
sums of the exponentials and of the logits of the targets. Steps of the variants alternate; the time is their median.
Memory, above that of hidden and the weight, is measured in processes of its own.
"""

import sys
from functools import partial

import torch
import torch.distributed as dist
from cost import table

from diffcoll.nn.functional import vocab_parallel_cross_entropy


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


def step(loss, hidden, weight, target):
    return torch.autograd.grad(loss(hidden, weight, target), (hidden, weight))


def steps(tokens, vocabulary, dims, chunk):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, dims, generator=g).requires_grad_()
    weight = (torch.randn(vocabulary, dims, generator=g) / dims**0.5).chunk(dist.get_world_size())[dist.get_rank()]
    xs = hidden, weight.clone().requires_grad_(), torch.randint(vocabulary, (tokens,), generator=g)
    chunked = partial(vocab_parallel_cross_entropy, chunk_size=chunk)
    losses = {"by hand": by_hand, "all logits": vocab_parallel_cross_entropy, f"chunk_size={chunk}": chunked}
    return {name: partial(step, loss, *xs) for name, loss in losses.items()}


def main(tokens=1024, vocabulary=8192, dims=256, chunk=256, repeats=9):
    title = f"{tokens} tokens, {vocabulary} words on two ranks, {dims} dimensions"
    table(title, steps, (tokens, vocabulary, dims, chunk), repeats)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
