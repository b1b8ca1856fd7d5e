"""Ranks that the library starts itself on the GPU."""

import os
import subprocess
import sys

import torch

import diffcoll as dc
from diffcoll.testing import spawn
from gpu.row import row


@row(ranks=(2,), seconds=120, starts_ranks=True)
def starting(rank):
    """`spawn` and `diffcoll verify` in the environment of users, who do not set PYTORCH_NVML_BASED_CUDA_CHECK."""
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    backend = "nccl" if rank.on_gpu else "gloo"
    device, n = rank.device, rank.n

    def gradient(x, w):
        x = x.to(device).requires_grad_()
        (w * dc.all_reduce(x)).backward()
        return x.grad

    with rank.part("spawn"):
        xs = [torch.tensor(1.0 + r) for r in range(n)]
        found = spawn(gradient, xs, [10.0**r for r in range(n)], backend=backend, timeout=50)
        assert [g.item() for g in found] == [sum(10.0**r for r in range(n))] * n, found
    if not rank.on_gpu:
        return  # `make verify` is this
    with rank.part("verify"):
        options = ("--backend", backend, "--world-size", f"{n}", "--only", "broadcast")
        command = [sys.executable, "-m", "diffcoll", "verify", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        assert done.returncode == 0, output[-400:]
        (counts,) = (line for line in done.stdout.splitlines() if "calls are right" in line)
        rank.figure("broadcast", counts.strip("✓ "))
