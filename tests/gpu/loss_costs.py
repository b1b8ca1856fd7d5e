"""Time and memory of losses with one rank, against plain PyTorch; products of half-precision features."""

import torch
import torch.nn.functional as F

from diffcoll.nn import functional
from gpu.measuring import distance, peak, times
from gpu.row import row

DIM, SCALE = 512, 14.0


def cross_entropies(logits):
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def plain_info_nce(x, y):
    x, y = F.normalize(x), F.normalize(y)
    return F.cross_entropy(x @ y.t() / 0.1, torch.arange(len(x), device=x.device))


def features(rank, rows, dtype, seed=0):
    """Return two views, whose cosine is about 0.3."""
    make = torch.Generator(rank.device).manual_seed(seed)
    x, noise = (torch.randn(rows, DIM, device=rank.device, generator=make) for _ in range(2))
    return [F.normalize(z).to(dtype).requires_grad_() for z in (x, x + 3 * noise)]


@row(seconds=90, alone=True)
def loss_times(rank):
    """Forward and backward of CLIP's loss and InfoNCE."""
    sizes = {8: 50, 256: 50, 2048: 20, 16384: 3} if rank.on_gpu else {64: 1}
    for (rows, calls), dtype in ((size, dtype) for size in sizes.items() for dtype in (torch.float32, torch.bfloat16)):
        x, y = features(rank, rows, dtype)
        scale = torch.tensor(SCALE, device=rank.device, requires_grad=True)
        ways = {
            "clip_loss": lambda x=x, y=y, s=scale: functional.clip_loss(x, y, s),
            "plain": lambda x=x, y=y, s=scale: cross_entropies(s.to(x.dtype) * x @ y.t()),
            "in 2 chunks": lambda x=x, y=y, s=scale: functional.clip_loss(x, y, s, chunk_size=len(x) // 2),
            "info_nce_loss": lambda x=x, y=y: functional.info_nce_loss(x, y),
            "plain InfoNCE": lambda x=x, y=y: plain_info_nce(x, y),
        }
        is_wide = dtype is torch.bfloat16 and rows == 16384
        with rank.part(f"{rows} rows of {str(dtype)[6:]}"):
            steps = {name: step_of(way, x, y) for name, way in ways.items()}
            found = times(rank, steps, calls)
            for name, (wall, host) in found.items():
                memory = peak(rank, steps[name]) / 1e6
                rank.figure(name, f"{wall * 1e3:.2f} ms, host {host * 1e3:.2f}, {memory:.0f} MB")
            if is_wide:
                rank.goal("ratio to plain", found["clip_loss"][0] / found["plain"][0], 2, "logits in float32")
            right, right_info_nce = (
                cross_entropies(scale * x.float() @ y.float().t()),
                plain_info_nce(x.float(), y.float()),
            )
            for name, value in (("clip_loss", right), ("in 2 chunks", right), ("info_nce_loss", right_info_nce)):
                rank.check(f"{name} against plain PyTorch in float32", distance(ways[name](), value), 1e-4)


def step_of(loss, x, y):
    return lambda: torch.autograd.grad(loss(), [x, y])


class WideProduct(torch.autograd.Function):
    """x @ y.T of half-precision matrices in float32, on tensor cores; half-precision gradients."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return wide_mm(x, y.t())

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        g = g.to(x.dtype)
        return wide_mm(g, y).to(x.dtype), wide_mm(g.t(), x).to(y.dtype)


def wide_mm(x, y):
    return torch.mm(x, y, out_dtype=torch.float32) if x.is_cuda else x.float() @ y.float()


@row(seconds=60, alone=True)
def half_products(rank):
    """Cross-entropies of bfloat16 features: error against float64, time and memory of each way to multiply them."""
    ways = {
        "bfloat16 logits": (lambda x, y: SCALE * x @ y.t(), None),
        "float32 features": (lambda x, y: SCALE * x.float() @ y.float().t(), (1e-5, 2**-8)),
        "float32 products": (lambda x, y: SCALE * WideProduct.apply(x, y), (1e-4, 2**-7)),
    }
    x, y = features(rank, 2048 if rank.on_gpu else 64, torch.bfloat16)
    doubles = [z.detach().double().requires_grad_() for z in (x, y)]
    right = cross_entropies(SCALE * doubles[0] @ doubles[1].t())
    right_gradients = torch.autograd.grad(right, doubles)
    large = features(rank, 16384 if rank.on_gpu else 64, torch.bfloat16)
    steps = {name: step_of(lambda way=way: cross_entropies(way(*large)), *large) for name, (way, _) in ways.items()}
    found = times(rank, steps, calls=3)
    for name, (way, bounds) in ways.items():
        with rank.part(name):
            value = cross_entropies(way(x, y))
            errors = [distance(value, right)]
            for g, right_g in zip(torch.autograd.grad(value, [x, y]), right_gradients, strict=True):
                errors.append(distance(g, right_g))
            rank.figure("time", f"{found[name][0] * 1e3:.2f} ms, {peak(rank, steps[name]) / 1e6:.0f} MB")
            rank.figure("errors", " ".join(f"{error:.0e}" for error in errors))
            if bounds is not None:
                rank.check("value", errors[0], bounds[0])
                rank.check("gradient", max(errors[1:]), bounds[1])
    rank.goal("float32 products against bfloat16", found["float32 products"][0] / found["bfloat16 logits"][0], 2)
