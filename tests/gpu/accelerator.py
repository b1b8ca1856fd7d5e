"""Every collective to second order, dtypes, transforms, the averager in half precision, streams.

The tests of tests/late_device judge the same on the test device.
"""

import contextlib
import dataclasses
from functools import partial

import torch
from properties import LaidOut, on_rank
from torch import nn

import diffcoll as dc
from diffcoll.testing import cases, simulate, true_gradients
from diffcoll.testing.numbers import real_inner
from gpu.measuring import distance
from gpu.row import MIXED, row
from gpu.streams import CALLS, WHERE, awaited_elsewhere, collective, differing, moved

SEED = 1
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.int16, torch.int64, torch.uint8)


@row(2, seconds=180, backend="gloo")
def accelerator_gloo(rank):
    """Tensors of the GPU on gloo. The table of collectives is in `make verify` for the CPU, and takes long."""
    judge(rank, with_table=rank.on_gpu)


@row(2, 3, seconds=180, dry=False)
@row(1, seconds=180)
def accelerator_nccl(rank):
    judge(rank)


@row(1, 2, seconds=180, dry=False, backend=MIXED)
def accelerator_mixed(rank):
    """A group of NCCL for the GPU and gloo for the CPU."""
    judge(rank)


def judge(rank, with_table=True):
    if with_table:
        table(rank)
    dtypes(rank)
    if rank.n == 2:
        transforms(rank)
    half_precision(rank)
    if rank.device != "cpu" and rank.n < 3:
        streams(rank)


@dataclasses.dataclass(frozen=True)
class OnDevice(LaidOut):
    """A case whose tensors arrive late on the device."""

    device: str = ""

    def x(self, rank, seed):
        return moved(super().x(rank, seed), self.device)

    def w(self, y, rank, seed):
        return moved(super().w(y, rank, seed), self.device)

    def v(self, g, rank, seed):
        return moved(super().v(g, rank, seed), self.device)


def table(rank):
    """Values and gradients to second order: uneven and empty blocks, async_op, ties; also of transposed memory."""
    for case in cases_on_device(rank.device, rank.n):
        with rank.part(case.name):
            check_case(rank, case, {rank.r: on_rank(case, rank.r, SEED)})


def cases_on_device(device, n):
    rows = [OnDevice(**vars(case), device=device) for case in cases.table(n)]
    rows += [dataclasses.replace(c, layout="transposed") for c in rows if any(s and len(s) > 1 for s in c.shapes)]
    assert len(rows) > 100
    return rows


def check_case(rank, case, measured):
    """Check what ranks have measured."""
    expected = cases.in_truth(dataclasses.replace(case, device="cpu"), SEED)
    for r, of_rank in measured.items():
        assert {t.device.type for t in of_rank.values()} == {rank.device}
        found = {name: t.cpu() for name, t in of_rank.items()}
        rank.wait()  # a rank may have no result to wait for, and messages to send
        for what, error in cases.errors(found, expected, r).items():
            rank.check(f"{case}: {what}", error, 1e-12)


@row(1, starts_ranks=True)
def simulated_table(rank):
    """Three ranks simulated on the device in this process; and their gradients in one graph."""
    n = 3
    for case in cases_on_device(rank.device, n):
        with rank.part(case.name):
            measured = simulate(lambda r, case=case: on_rank(case, r, SEED), range(n))
            check_case(rank, case, dict(enumerate(measured)))

            def loss(x, r, case=case):
                y = case.call(x, r)
                return real_inner(case.w(y, r, SEED), y.sin())

            xs = [case.x(r, SEED).requires_grad_() for r in range(n)]
            for (g,), of_rank in zip(true_gradients(loss, xs, range(n)), measured, strict=True):
                rank.check(f"{case}: in one graph", distance(g, of_rank["gradient"]) if g.numel() else 0, 1e-12)


def dtypes(rank):
    """Small integers, whose sums are exact in every dtype."""

    def data(case, s):
        return (case.x(s, 3) * 3).round().clamp(-4, 4).abs()

    for case in cases.table(rank.n):
        if case.arguments.get("op", "sum") != "sum":
            continue
        with rank.part(f"dtypes of {case.name}"):
            moves = case.name in ("all_gather", "all_to_all", "broadcast", "gather", "permute", "shift")
            for dtype in (*DTYPES, *([torch.bool] if moves else [])):
                xs = [data(case, s) for s in range(rank.n)]
                xs = [x > 2 if dtype is torch.bool else x.to(dtype) for x in xs]
                y = case.call(moved(xs[rank.r], rank.device), rank.r)
                assert (y.dtype, y.device.type) == (dtype, rank.device)
                assert torch.equal(y.cpu(), case.truth(xs)[rank.r]), f"{case} {dtype}"


def transforms(rank):
    """Forward mode, vmap, and losses that ignore outputs on some ranks; the graph has nodes of both devices."""
    x = torch.tensor([1.0 + rank.r, 2.0], dtype=torch.float64, device=rank.device)
    with rank.part("transforms"):
        jvp = torch.func.jvp(lambda x: dc.all_reduce(x, "product"), (x,), (torch.ones_like(x),))[1]
        assert jvp.tolist() == [3.0, 4.0]
        assert torch.func.vmap(dc.all_reduce)(torch.stack([x, 2 * x])).tolist() == [[3.0, 4.0], [6.0, 8.0]]
    with rank.part("joint_backward"):
        x.requires_grad_()
        with dc.joint_backward() as joint:
            y, z = dc.all_reduce(x), dc.all_gather(x * x)
            loss = joint(3 * y.sum() if rank.r == 0 else z.sum())
        loss.backward()
        assert x.grad.tolist() == [3 + 2 * (1.0 + rank.r), 3 + 4.0]
    with rank.part("a second backward in a thread of autograd's own"):
        (g,) = torch.autograd.grad(dc.all_reduce(x).pow(3).sum(), x, create_graph=True)
        refused = rank.refused(RuntimeError, "set_multithreading_enabled")
        with contextlib.nullcontext() if rank.device == "cpu" else refused:
            g.sum().backward()


def half_precision(rank):
    """float32 gradients sent in bfloat16; bfloat16 parameters with counts, whose sum is not a bfloat16."""
    n, r = rank.n, rank.r
    with rank.part("averager in half precision"):
        p = nn.Parameter(torch.zeros(4, device=rank.device))
        dc.GradientAverager([p], comm_dtype=torch.bfloat16).backward((p * (r + 1.0)).sum())
        assert p.grad.tolist() == [(n + 1) / 2] * 4
        q = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16, device=rank.device))
        count = 1 if r else torch.tensor(257.0, device=rank.device)  # of the host on some ranks
        dc.GradientAverager([q]).backward((q * r).sum(), count=count)
        assert torch.equal(q.grad.cpu(), torch.full((4,), sum(range(n)) / (256 + n)).bfloat16())


def streams(rank):
    """Inputs that are not there yet; the input, the collective or the use of its result on another stream."""
    programs = [partial(collective, where=where) for where in WHERE]
    for name, call in CALLS.items():
        with rank.part(f"streams of {name}"):
            for program in (*programs, awaited_elsewhere):
                pairs = program(call, device=rank.device, r=rank.r, n=rank.n)
                rank.wait()  # a rank may have no result to wait for, and messages to send
                assert not differing(pairs), (program, differing(pairs))
