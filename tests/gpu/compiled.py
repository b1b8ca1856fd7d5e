"""Compiled by Inductor, on the CPU for its operators alone: values and gradients of the same code, not compiled."""

import torch
import torch.nn.functional as F

import diffcoll as dc
from diffcoll.core.torch_private import release
from gpu.measuring import distance
from gpu.row import row


@row(2, seconds=120)
def compiled(rank):
    # Before 2.12 the library refuses, because of MPI and simulated ranks. Process groups compile on 2.11, too.
    release.COMPILES = True
    x, z = (torch.randn(16, 16, generator=torch.Generator().manual_seed(rank.r + 50 * i)) for i in range(2))
    x, z = x.to(rank.device).requires_grad_(), z.to(rank.device)
    norm = dc.nn.SyncBatchNorm(16).to(rank.device)
    losses = {
        "two collectives": lambda x, z: (dc.all_reduce(x * dc.all_gather(x).sum(), "max").square() * z).sum(),
        "product": lambda x, z: (dc.all_reduce(x, "product") * z).sum(),
        "async_op": lambda x, z: (dc.all_reduce(x, async_op=True).wait() * z).sum(),
        "SyncBatchNorm": lambda x, z: (norm(x).square() * z).sum(),
        "clip_loss": lambda x, z: dc.nn.functional.clip_loss(F.normalize(x), F.normalize(z), 10.0),
    }
    ways = {"fullgraph": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
    if not rank.on_gpu:
        ways = {"fullgraph": {"backend": "aot_eager"}}
    for way, options in ways.items():
        for name, loss in losses.items():
            if name == "clip_loss" and release.RELEASE < (2, 12):  # Dynamo raises
                continue
            with rank.part(f"{way} {name}"):
                right = loss(x, z)
                right = right, *torch.autograd.grad(right, x)
                function = torch.compile(loss, fullgraph=True, **options)
                for _ in range(3):  # a CUDA graph is captured in the second and replayed in the third
                    found = function(x, z)
                    found = [t.clone() for t in (found, *torch.autograd.grad(found, x))]
                for what, *pair in zip(("value", "gradient"), found, right, strict=True):
                    rank.check(what, distance(*pair), 1e-5)
