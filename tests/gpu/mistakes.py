"""Check mode and PyTorch's, destroyed groups, a rank that does not come, ranks that the library starts itself."""

import gc
import os
import subprocess
import sys
import time
import weakref

import torch
import torch.distributed as dist
from torch import nn

import diffcoll as dc
from diffcoll.testing import spawn
from gpu.calls import collectives, exchanging
from gpu.measuring import distance, flat, times
from gpu.rank import Rank
from gpu.row import row


@row(2)
def check_mode(rank):
    """Calls that differ between the ranks raise on all of them, and name the operation and what differs."""
    x, r = torch.ones(4, device=rank.device, requires_grad=True), rank.r
    calls = {
        "shape": (lambda: dc.all_reduce(torch.ones(3 + r, device=rank.device)), ("all_reduce", "(3,)", "(4,)")),
        "op": (lambda: dc.all_reduce(x, "sum" if r else "max"), ("all_reduce", "max")),
        "name": (lambda: dc.all_reduce(x) if r else dc.all_gather(x), ("all_reduce", "all_gather")),
        "dtype": (lambda: dc.all_reduce(x.half() if r else x), ("all_reduce", "float16")),
        "root": (lambda: dc.broadcast(x, src=r), ("broadcast", "src")),
    }
    for name, (call, words) in calls.items():
        with rank.part(name), dc.check_mode(), rank.refused(dc.CollectiveMismatchError, *words):
            call()
    with dc.check_mode():
        checked = times(rank, {"checked": lambda: dc.all_reduce(x)}, calls=20)["checked"]
    plain = times(rank, {"plain": lambda: dc.all_reduce(x)}, calls=20)["plain"]
    rank.figure("all_reduce of 16 B", f"{plain[0] * 1e6:.0f} µs, in check mode {checked[0] * 1e6:.0f}")


@row(3, seconds=90)
def debug_mode(rank):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL, which wraps a group's backend: calls as without it, and an averager."""
    x = torch.randn(2 * rank.n, rank.n, device=rank.device, requires_grad=True)
    calls = {**collectives(x, rank.n), **exchanging(x)}

    def results():
        ys = {name: call() for name, call in calls.items()}
        return {name: flat([y, *torch.autograd.grad(y.sin().sum(), x)]) for name, y in ys.items()}

    plain = results()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group()
    dc.set_default_group(group)
    for name, found in results().items():
        with rank.part(name):
            rank.check("in debug mode", distance(found, plain[name]), 1e-6)
    with rank.part("averager"):
        assert "Wrapper" in type(group._get_backend(torch.device(rank.device))).__name__
        p = nn.Parameter(torch.zeros(4, device=rank.device))
        dc.GradientAverager([p]).backward((p * (rank.r + 1.0)).sum())
        assert p.grad.tolist() == [(rank.n + 1) / 2] * 4


@row(1, 2)
def destroyed_group(rank):
    """A group in which sizes were exchanged and gradients averaged is freed once it is destroyed."""
    group = dist.new_group()
    p = nn.Parameter(torch.zeros(2 + rank.r, device=rank.device))
    dc.all_gather(p, group=group, sizes="auto").sum().backward()
    q = nn.Parameter(torch.zeros(4, device=rank.device))
    averager = dc.GradientAverager([q], group=group)
    averager.backward(q.sum())
    rank.wait()
    averager.close()
    dist.destroy_process_group(group)
    freed = weakref.ref(group)
    del group, averager
    gc.collect()
    assert freed() is None


@row(2, seconds=130, starts_ranks=True)
def absent_rank(rank):
    """Rank 1 does not come to the second call. Rank 0 must not go on: its call raises, or PyTorch ends its process."""
    code = "import sys; from gpu.mistakes import one_of_two; one_of_two(*sys.argv[1:])"
    around = {**os.environ, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
    command = [sys.executable, "-c", code]
    begin = time.monotonic()
    absent = subprocess.Popen([*command, "1", rank.folder, rank.device], env=around)
    try:
        waiting = subprocess.run(
            [*command, "0", rank.folder, rank.device], env=around, capture_output=True, text=True, timeout=110
        )
    finally:
        absent.kill()
        absent.wait()
    rank.figure("ended after", f"{time.monotonic() - begin:.0f} s with status {waiting.returncode}")
    said = waiting.stdout + waiting.stderr
    assert "went on" not in said and waiting.returncode != 0, said[-300:]
    words = "timeout" if rank.on_gpu else "CollectiveFailedError"
    assert words in said, said[-300:]


def one_of_two(r, folder, device):
    """Make two calls on rank 0, and one on rank 1, which then sleeps until it is killed."""
    rank = Rank(int(r), 2, folder, device)
    rank.join(timeout=8 if rank.on_gpu else 4)
    x = torch.ones(4, device=device, requires_grad=True)
    dc.all_reduce(x)
    rank.wait()
    if rank.r == 1:
        time.sleep(120)
    dc.all_reduce(x)
    rank.wait()
    print("went on")


@row(2, seconds=120, starts_ranks=True)
def starting(rank):
    """`spawn` and `diffcoll verify` in the environment of users, who do not set PYTORCH_NVML_BASED_CUDA_CHECK."""
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    backend, device, n = "nccl" if rank.on_gpu else "gloo", rank.device, rank.n

    def gradient(x, w):
        x = x.to(device).requires_grad_()
        (w * dc.all_reduce(x)).backward()
        return x.grad

    with rank.part("spawn"):
        xs = [torch.tensor(1.0 + r) for r in range(n)]
        found = spawn(gradient, xs, [10.0**r for r in range(n)], backend=backend, timeout=50)
        assert [g.item() for g in found] == [sum(10.0**r for r in range(n))] * n, found
    if rank.on_gpu:  # else `make verify` is this
        with rank.part("verify"):
            options = ("--backend", backend, "--world-size", f"{n}", "--only", "broadcast")
            command = [sys.executable, "-m", "diffcoll", "verify", *options]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (done.stdout + done.stderr)[-400:]
