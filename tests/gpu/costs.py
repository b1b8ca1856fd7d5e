"""Times and memory: of a collective with its backward against two lines of code, of CLIP's loss against PyTorch."""

from functools import partial
from itertools import product

import torch
import torch.distributed as dist
import torch.nn.functional as F

import diffcoll as dc
from benchmarks.floor import Floor
from diffcoll.core.torch_private.release import COMPILES
from diffcoll.engines import c10d
from diffcoll.nn import functional
from gpu.calls import collectives
from gpu.measuring import distance, peak, times
from gpu.row import row


def all_reduce(x):
    y = x.clone()
    dist.all_reduce(y)
    return y


def all_gather(x):
    y = x.new_empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(y, x)
    return y


def reduce_scatter(x):
    y = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(y, x)
    return y


#: Ours, and two lines in a Function.
WAYS = {
    "all_reduce": {"ours": dc.all_reduce, "two lines": lambda x: Floor.apply(x, all_reduce, all_reduce)},
    "all_gather": {"ours": dc.all_gather, "two lines": lambda x: Floor.apply(x, all_gather, reduce_scatter)},
    "reduce_scatter": {"ours": dc.reduce_scatter, "two lines": lambda x: Floor.apply(x, reduce_scatter, all_gather)},
    "mean": {"ours": lambda x: dc.all_reduce(x, "mean")},
    "max": {"ours": lambda x: dc.all_reduce(x, "max")},
    "product": {"ours": lambda x: dc.all_reduce(x, "product")},
}


@row(1, seconds=90, alone=True)
def collective_times(rank):
    """Microseconds of a call with its backward, and of the host alone."""
    sizes = {"4 B": (1, 50), "1 MB": (1 << 18, 20), "134 MB": (1 << 25, 5)} if rank.on_gpu else {"4 B": (1, 1)}
    for size, (elements, calls) in sizes.items():
        x = torch.randn(max(elements // 16, 1), min(elements, 16), device=rank.device, requires_grad=True)
        for name, each in WAYS.items():
            with rank.part(f"{name} of {size}"):
                steps = {
                    way: lambda call=call, x=x: torch.autograd.grad(call(x), x, 2 * x.detach())
                    for way, call in each.items()
                }
                for way, step in steps.items():
                    rank.check(way, distance(step()[0], 2 * x), 1e-6)
                found = times(rank, steps, calls)
                for way, (wall, host) in found.items():
                    rank.figure(way, f"{wall * 1e6:.0f} µs, host {host * 1e6:.0f}")
                if len(each) > 1:
                    rank.goal("host against two lines", found["ours"][1] / found["two lines"][1], 1.5)


@row(3, seconds=90, alone=True)
def small_reductions(rank):
    """Reductions of up to 16 times what is small, with their backward: gathered whole, and in blocks."""
    backend = "nccl" if rank.on_gpu else "gloo"
    most = c10d.SMALL[backend]
    for nbytes, op in product((most // 16, most // 4, most, 4 * most, 16 * most), ("max", "product", "logsumexp")):
        x = torch.randn(nbytes // 4 // rank.n, device=rank.device, requires_grad=True)

        def step(at_most, x=x, op=op):
            c10d.SMALL[backend] = at_most
            return torch.autograd.grad(dc.all_reduce(x, op), x, x.detach())[0]

        ways = {"gathered": partial(step, nbytes), "in blocks": partial(step, 0)}
        with rank.part(f"{op} of {nbytes >> 10} KB on all ranks"):
            rank.check("of both ways", distance(*(way() for way in ways.values())), 1e-6)
            for way, (wall, host) in times(rank, ways, calls=20).items():
                rank.figure(way, f"{wall * 1e6:.0f} µs, host {host * 1e6:.0f}")
        c10d.SMALL[backend] = most


#: What forward and backward of two ranks need at most, in units of this rank's input, if that is decided.
MEMORY = {
    "all_gather": (2, 1),
    "all_gather stack": (2, 1),
    "all_gather dim=1": (4, None),
    "reduce_scatter": (0.5, None),
}


@row(2)
def collective_memory(rank):
    """Peaks of forward, its output included, and of backward."""
    elements = 1 << 24 if rank.on_gpu else 1 << 8
    rows = [elements // 16, elements // 32]
    x, shorter = (torch.randn(n, 16, device=rank.device, requires_grad=True) for n in (rows[0], rows[rank.r]))
    calls = {name: (x, call) for name, call in collectives(x, rank.n).items()} | {
        f"all_gather of other sizes, {name}": (shorter, lambda sizes=sizes: dc.all_gather(shorter, sizes=sizes))
        for name, sizes in {"sizes=[…]": rows, "sizes='auto'": "auto"}.items()
    }
    for name, (leaf, call) in calls.items():
        with rank.part(name):
            y = call()
            g = torch.randn_like(y)
            steps = call, lambda y=y, g=g, leaf=leaf: torch.autograd.grad(y, leaf, g, retain_graph=True)
            inputs = [peak(rank, f) / (leaf.numel() * leaf.element_size()) for f in steps]
            for what, found, goal in zip(("forward", "backward"), inputs, MEMORY.get(name, (None, None)), strict=True):
                if goal is None:
                    rank.figure(what, found)
                else:
                    rank.goal(what, found, 1.02 * goal)


DIM, SCALE = 512, 14.0


def plain_clip(x, y, scale):
    logits = scale.to(x.dtype) * x @ y.t()
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def features(rank, rows, dtype):
    """Return two views, whose cosine is about 0.3."""
    make = torch.Generator(rank.device).manual_seed(0)
    x, noise = (torch.randn(rows, DIM, device=rank.device, generator=make) for _ in range(2))
    return [F.normalize(z).to(dtype).requires_grad_() for z in (x, x + 3 * noise)]


@row(1, seconds=90, alone=True)
def loss_times(rank):
    """Forward and backward of CLIP's loss; bfloat16 features are multiplied into float32 logits."""
    sizes = {8: 50, 256: 50, 2048: 20, 16384: 3, 32768: 2} if rank.on_gpu else {64: 1}
    for (rows, calls), dtype in ((size, dtype) for size in sizes.items() for dtype in (torch.float32, torch.bfloat16)):
        x, y = features(rank, rows, dtype)
        s = torch.tensor(SCALE, device=rank.device, requires_grad=True)
        ways = {
            "ours": lambda x=x, y=y, s=s: functional.clip_loss(x, y, s),
            "plain": lambda x=x, y=y, s=s: plain_clip(x, y, s),
            "in 2 chunks": lambda x=x, y=y, s=s: functional.clip_loss(x, y, s, chunk_size=len(x) // 2),
        }
        with rank.part(f"{rows} rows of {str(dtype)[6:]}"):
            steps = {name: lambda way=way, x=x, y=y: torch.autograd.grad(way(), [x, y]) for name, way in ways.items()}
            found = times(rank, steps, calls)
            for name, (wall, host) in found.items():
                memory = peak(rank, steps[name]) / 1e6
                rank.figure(name, f"{wall * 1e3:.2f} ms, host {host * 1e3:.2f}, {memory:.0f} MB")
            if dtype is torch.bfloat16 and rows == 16384:
                rank.goal("ratio to plain", found["ours"][0] / found["plain"][0], 1.7)
            for name in ("ours", "in 2 chunks"):
                rank.check(name, distance(ways[name](), plain_clip(x.float(), y.float(), s)), 1e-4)


@row(1, seconds=90, alone=True)
def half_precision_times(rank):
    """Losses of bfloat16 that are normalized, compiled and of a vocabulary, and clip_loss in many chunks."""
    rows, words, calls = (16384, 32768, 3) if rank.on_gpu else (64, 128, 1)
    x, y = features(rank, rows, torch.bfloat16)
    s, target = torch.tensor(SCALE, device=rank.device), torch.arange(rows, device=rank.device)
    w = (torch.randn(words, DIM, device=rank.device) / 20).bfloat16().requires_grad_()
    ways = {
        "normalized": (
            lambda x, y, clip=functional.clip_loss: clip(x, y, s, normalize=True),
            lambda x, y: plain_clip(F.normalize(x), F.normalize(y), s),
        ),
        "InfoNCE": (
            functional.info_nce_loss,
            lambda x, y: F.cross_entropy(10 * F.normalize(x) @ F.normalize(y).t(), target),
        ),
        "a vocabulary": (
            lambda x, w: functional.vocab_parallel_cross_entropy(x, w, target),
            lambda x, w: F.cross_entropy(x @ w.t(), target),
        ),
    }
    if COMPILES:
        ours, plain = ways["normalized"]
        backend = "inductor" if rank.on_gpu else "aot_eager"
        ways["compiled"] = torch.compile(ours, fullgraph=True, backend=backend), plain
    for name, (ours, plain) in ways.items():
        leaves = [x, w if name == "a vocabulary" else y]
        with rank.part(name):
            steps = {
                who: lambda way=way, leaves=leaves: torch.autograd.grad(way(*leaves), leaves)
                for who, way in (("ours", ours), ("plain", plain))
            }
            found = times(rank, steps, calls)
            for who, (wall, host) in found.items():
                rank.figure(who, f"{wall * 1e3:.2f} ms, host {host * 1e3:.2f}, {peak(rank, steps[who]) / 1e6:.0f} MB")
            rank.figure("ratio to plain", found["ours"][0] / found["plain"][0])
            rank.check("of float32", distance(ours(*leaves), plain(*(t.float() for t in leaves))), 1e-4)
    for dtype, chunks in product((torch.float32, torch.bfloat16), (8, 16)):
        x, y = features(rank, 2 * rows, dtype)
        with rank.part(f"{2 * rows} rows of {str(dtype)[6:]} in {chunks} chunks"):

            def step(x=x, y=y, size=2 * rows // chunks):
                return torch.autograd.grad(functional.clip_loss(x, y, s, chunk_size=size), [x, y])

            ((wall, host),) = times(rank, {"ours": step}, calls).values()
            rank.figure("ours", f"{wall * 1e3:.2f} ms, host {host * 1e3:.2f}, {peak(rank, step) / 1e6:.0f} MB")
