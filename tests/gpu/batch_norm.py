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


def whole_batch(x, w):
    """Return output, gradients and running statistics of one process in float64, on the CPU, and the module."""
    module = nn.BatchNorm2d(CHANNELS).double()
    with torch.no_grad():
        module.weight.copy_(torch.linspace(0.5, 2, CHANNELS))
        module.bias.copy_(torch.linspace(-1, 1, CHANNELS))
    x = x.double().requires_grad_()
    y = module(x)
    return module, (y, *torch.autograd.grad((y * w).sum(), [x, module.weight, module.bias]))


def on_rank(module, whole, x, w):
    """Return output and gradients of this rank's rows, and the gradients of weights summed over the ranks."""
    module.load_state_dict(whole.state_dict())
    module.reset_running_stats()
    x = x.detach().requires_grad_()
    y = module(x)
    gx, *of_weights = torch.autograd.grad((y * w).sum(), [x, module.weight, module.bias])
    for g in of_weights:
        dist.all_reduce(g)
    return y, gx, *of_weights


@row(2)
def batch_norm(rank):
    for dtype, (layout, memory), sizes in itertools.product(BOUNDS, LAYOUTS.items(), ([8, 8], [11, 5])):
        rows = slice(0, sizes[0]) if rank.r == 0 else slice(sizes[0], 16)
        make = torch.Generator().manual_seed(1)
        x, w = (torch.randn(16, CHANNELS, 14, 14, generator=make, dtype=torch.float64) for _ in range(2))
        x = (2 * x + 3).to(dtype)
        whole, (y, gx, *of_weights) = whole_batch(x, w.to(dtype).double())
        right = (y[rows], gx[rows], *of_weights, whole.running_mean, whole.running_var)
        mine, mine_w = (t[rows].to(rank.device, dtype).contiguous(memory_format=memory) for t in (x, w))

        def errors(module, mine=mine, mine_w=mine_w, whole=whole, right=right):
            found = on_rank(module, whole, mine, mine_w)
            running = module.running_mean, module.running_var
            return found, [distance(*pair) for pair in zip((*found, *running), right, strict=True)]

        what = f"{str(dtype)[6:]} {layout} {sizes}"
        with rank.part(what):
            (y, gx, *_), ours = errors(dc.nn.SyncBatchNorm(CHANNELS).to(rank.device))
            names = ("output", "gradient", "of the weight", "of the bias", "running mean", "running var")
            for name, error in zip(names, ours, strict=True):
                rank.check(name, error, BOUNDS[dtype])
            if rank.on_gpu:  # torch.nn's raises for tensors of the CPU
                _, theirs = errors(nn.SyncBatchNorm(CHANNELS).to(rank.device))
                for name, error, other in zip(names, ours, theirs, strict=True):
                    rank.check(f"{name} against torch.nn's", error, 3 * other + 1e-6)
        with rank.part(f"{what}: layout of the output"):
            assert y.is_contiguous(memory_format=memory)
        with rank.part(f"{what}: layout of the gradient"):
            assert gx.is_contiguous(memory_format=memory)


@row(2, alone=True)
def batch_norm_kernels(rank):
    """Kernels other than NCCL's in a forward and backward, and memory in inputs, against torch.nn's."""
    shapes = ((64, 256, 56, 56), (32, 64, 28, 28)) if rank.on_gpu else ((4, 8, 6, 6),)
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
