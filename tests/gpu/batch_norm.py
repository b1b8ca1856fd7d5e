"""SyncBatchNorm against torch.nn's: numbers, layouts, the time of its kernels, memory."""

import itertools

import torch
import torch.distributed as dist
from torch import nn

import diffcoll as dc
from gpu.measuring import distance, kernels, peak
from gpu.row import row

LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
#: Bounds of outputs and gradients against float64 from inputs of the dtype, which half precision rounds once more.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
CHANNELS = 24


NAMES = ("output", "gradient", "of the weight", "of the bias", "running mean", "running var")


def results(module, x, w):
    """Return what `NAMES` says, of this rank's rows."""
    with torch.no_grad():
        module.weight.copy_(torch.linspace(0.5, 2, CHANNELS))
        module.bias.copy_(torch.linspace(-1, 1, CHANNELS))
    x = x.detach().requires_grad_()
    y = module(x)
    gradients = torch.autograd.grad((y * w).sum(), [x, module.weight, module.bias])
    return y, *gradients, module.running_mean, module.running_var


def on_ranks(module, x, w, right):
    """Return the results, those of weights summed over the ranks, and their errors."""
    found = results(module, x, w)
    for g in found[2:4]:
        dist.all_reduce(g)
    return found, [distance(*pair) for pair in zip(found, right, strict=True)]


@row(2)
def batch_norm(rank):
    """Against one process that has the whole batch, in float64 on the CPU, and against torch.nn's."""
    for dtype, (layout, memory), sizes in itertools.product(BOUNDS, LAYOUTS.items(), ([8, 8], [11, 5])):
        rows = slice(0, sizes[0]) if rank.r == 0 else slice(sizes[0], 16)
        make = torch.Generator().manual_seed(1)
        x, w = (torch.randn(16, CHANNELS, 14, 14, generator=make, dtype=torch.float64) for _ in range(2))
        x, w = (2 * x + 3).to(dtype), w.to(dtype)
        y, gx, *others = results(nn.BatchNorm2d(CHANNELS).double(), x.double(), w.double())
        right = y[rows], gx[rows], *others
        mine = [t[rows].to(rank.device).contiguous(memory_format=memory) for t in (x, w)]
        what = f"{str(dtype)[6:]} {layout} {sizes}"
        with rank.part(what):
            (y, gx, *_), ours = on_ranks(dc.nn.SyncBatchNorm(CHANNELS).to(rank.device), *mine, right)
            for name, error in zip(NAMES, ours, strict=True):
                # In a contiguous layout CUDA's kernel rounds parts of a weight's sum to the dtype of x.
                rank.check(name, error, BOUNDS[dtype] * (2 if name.startswith("of the") else 1))
            if rank.on_gpu:  # torch.nn's raises for tensors of the CPU
                _, theirs = on_ranks(nn.SyncBatchNorm(CHANNELS).to(rank.device), *mine, right)
                for name, error, other in zip(NAMES, ours, theirs, strict=True):
                    rank.check(f"{name} against torch.nn's", error, 3 * other + 1e-6)
        for name, t in (("output", y), ("gradient", gx)):
            with rank.part(f"{what}: layout of the {name}"):
                assert t.is_contiguous(memory_format=memory)


@row(2, alone=True)
def batch_norm_kernels(rank):
    """Kernels other than NCCL's in a forward and backward, and memory in inputs, against torch.nn's."""
    shapes = ((64, 256, 56, 56), (32, 64, 28, 28), (2, 512, 7, 7)) if rank.on_gpu else ((4, 8, 6, 6),)
    for shape, dtype, layout in itertools.product(shapes, (torch.float32, torch.bfloat16), LAYOUTS):
        make = torch.Generator(rank.device).manual_seed(1)
        x, g = (torch.randn(shape, device=rank.device, generator=make).to(dtype) for _ in range(2))
        x, g = (t.contiguous(memory_format=LAYOUTS[layout]) for t in (x, g))
        x.requires_grad_()
        found = {}
        other = nn.SyncBatchNorm if rank.on_gpu else nn.BatchNorm2d
        for name, make_module in {"ours": dc.nn.SyncBatchNorm, "torch.nn": other}.items():
            module = make_module(shape[1]).to(rank.device)

            def step(module=module, x=x, g=g):
                return torch.autograd.grad(module(x), x, g)

            inputs = peak(rank, step) / (x.numel() * x.element_size())
            found[name] = (*kernels(rank, step), inputs)
        with rank.part(f"{shape} {str(dtype)[6:]} {layout}"):
            (ours, n, inputs), (theirs, n_theirs, inputs_theirs) = found.values()
            rank.figure("ours", f"{ours * 1e6:.0f} µs in {n} kernels")
            rank.figure("torch.nn", f"{theirs * 1e6:.0f} µs in {n_theirs}, peak {inputs_theirs:.1f} inputs")
            rank.goal("ratio", ours / theirs, 1.1)
            rank.goal("peak in inputs", inputs, max(2.05, inputs_theirs))
