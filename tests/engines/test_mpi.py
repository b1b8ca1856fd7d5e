"""MPI communicators: which ones, every dtype, programs that also use MPI or gloo themselves, and how jobs end."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import laws
import pytest
import runs
import torch
import torch.distributed as dist
from mpi_ranks import SETTINGS
from runs import ROOT, new_group, refusal
from runs import mpi as on_mpi

import diffcoll as dc
from diffcoll.core.groups import resolve
from diffcoll.engines import messages, mpi

spawned = partial(runs.spawned, backend="mpi")  # where a test changes a module or its surroundings
N = 3


@pytest.mark.slow  # 8 GB
def test_more_than_mpi_can_count():
    """2^31 + 5 bytes, more than a C int can count."""

    def body(r):
        numel = 2**31 + 5
        x = torch.zeros(numel, dtype=torch.uint8)
        x[-1], x[0] = 3 + r, 7
        y = dc.shift(x)
        return y[0].item(), y[-1].item(), y.numel() == numel

    assert on_mpi(body, range(2), timeout=100) == [(7, 4, True), (7, 3, True)]


def test_which_communicators():
    """Split, duplicated and freed ones; two handles of one communicator are one group; others raise an error."""

    def body(r):
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        x = torch.tensor(float(r + 1), requires_grad=True)
        halves = world.Split(r % 2, -r)  # ranks in the opposite order
        found = [dc.get_rank(halves), dc.all_gather(x, group=halves).tolist()]
        copy = world.Dup()
        found.append(dc.all_reduce(x, group=copy).item())
        assert resolve(copy, "test") is resolve(MPI.Comm(copy), "test") is not resolve(world, "test")
        before = resolve(copy, "test")
        copy.Free()
        again = world.Dup()  # MPI may give it the handle of the one that was freed
        assert resolve(again, "test") is not before
        assert before._duplicate is None  # the library's duplicate was freed too
        found.append(dc.all_reduce(x, "max", group=again).item())
        (g,) = torch.autograd.grad(dc.all_reduce(x, group=again) * (r + 1), x)
        found.append(g.item())

        def refused(group, kind=ValueError):
            return refusal(kind, dc.all_reduce, x, group=group)

        texts = [refused(copy), refused(world.Get_group(), TypeError)]
        inter = MPI.COMM_SELF.Create_intercomm(0, world, 1 - r, 7) if r < 2 else world
        texts += [refused(inter)] if r < 2 else []
        with dc.set_default_group(halves):
            found.append(dc.get_world_size())
        return found, texts

    for r, (found, texts) in enumerate(on_mpi(body, range(3))):
        assert found == [[1, 0, 0][r], [[3, 1], [2], [3, 1]][r], 6, 3, 6, [2, 1, 2][r]]
        assert all(text.startswith("all_reduce: group: got ") for text in texts)


def test_the_first_call_on_a_communicator_may_have_ranks_without_messages():
    """All ranks make the library's duplicate of the communicator, which is collective."""
    rows = [0, 2, 1]  # of rank 0 none
    calls = [
        lambda x, group: dc.permute(x, [(1, 2)], group=group),
        lambda x, group: dc.gather(x[: rows[dc.get_rank()]], 1, group=group, sizes=rows),
        lambda x, group: dc.scatter(x, 1, group=group),
    ]

    def body(r):
        for call in calls:
            call(torch.ones(3) * r, new_group(range(3)))
            new_group(range(3))  # fails to end if a rank still waits for the duplicate
        return True

    assert on_mpi(body, range(3), timeout=30) == [True] * 3


def test_with_the_users_messages_and_gloo_in_the_same_program(tmp_path):
    def body(r):
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        dc.all_reduce(torch.ones(1), group=world)  # connects
        mine = torch.tensor([r])
        tag = mine.nbytes  # any that a user may choose
        sent = world.isend(f"from {r}", 1 - r, tag=tag)  # before the library's messages, which arrive elsewhere
        pending = dc.shift(mine, group=world, async_op=True)
        whole = world.allreduce(r + 1)  # on the same communicator, between start and wait
        got = pending.wait().tolist()
        theirs = world.recv(source=1 - r, tag=tag)
        sent.wait()

        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/there", rank=r, world_size=2)
        x = torch.tensor([3.0, 5.0][r], requires_grad=True)
        y = dc.all_reduce(x, group=dist.group.WORLD) * dc.all_reduce(x, "max")  # default: MPI
        (g,) = torch.autograd.grad(y * (1 + 9 * r), x)
        return got, whole, theirs, y.item(), g.item()

    # L = 11 (a + b) max(a, b)
    assert on_mpi(body, range(2)) == [([1], 3, "from 1", 40, 55), ([0], 3, "from 0", 40, 11 * 13)]


def test_memory_that_mpi_cannot_read_is_copied_to_the_cpu():
    """The code path of CUDA tensors, on CPU tensors: messages of copies, and no collectives of MPI."""

    def body(r):
        engine, landed, on_cpu = resolve(None, "test"), [], messages._on_cpu
        mpi.MpiEngine.reaches = lambda self, x: False
        mpi.MpiEngine._call = lambda self, *call: pytest.fail(f"{call[0]} of memory that MPI cannot reach")
        messages._on_cpu = lambda t: landed.append(t) or on_cpu(t)
        for primitive in (*laws.MOVES, *laws.SUMS):
            for got, expected in laws.outcome(primitive, engine, laws.Data(numel=1 << 14)):
                assert torch.equal(got, expected)
        return len(landed) > 0

    assert spawned(body, range(2)) == [True] * 2


def test_a_package_may_register_its_device_after_the_first_call():
    def body(r):
        dc.all_reduce(torch.ones(1))
        engine = resolve(None, "test")
        before = engine.devices
        torch.accelerator.current_accelerator = lambda: torch.device("xpu")
        return before, engine.devices

    assert spawned(body, range(2)) == [(("cpu", "cuda"), ("cpu", "cuda", "xpu"))] * 2


def test_whether_mpi_reads_cuda_memory(monkeypatch):
    def body(r):
        text = r"diffcoll: this MPI library does not report that it reads CUDA memory, .* set DIFFCOLL_MPI_CUDA=1"
        with pytest.warns(UserWarning, match=text):
            assert not mpi.reads_cuda()  # the MPI wheel reports no CUDA support
        mpi.reads_cuda()  # warns once
        mpi.reads_cuda.cache_clear()
        os.environ["DIFFCOLL_MPI_CUDA"] = "1"
        return mpi.reads_cuda()

    assert spawned(body, range(1)) == [True]


# ── programs under mpiexec ───────────────────────────────────────────────────────────────────────────────


def launch(program, n=2, timeout=60, interrupt=""):
    """Run a program under mpiexec; `interrupt`: send Ctrl-C when it prints that."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [str(mpiexec), "-n", str(n), sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        said = ""
        if interrupt:
            while interrupt not in said:
                said += process.stdout.readline()
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, said + out, err


START = """
import time
from mpi4py import MPI
import torch, diffcoll as dc
comm = MPI.COMM_WORLD
x = torch.tensor(float(comm.rank + 1), requires_grad=True)
y = dc.all_reduce(x, group=comm)
"""


def test_a_job_ends():
    code, out, err = launch(START + "y.backward(); print(f'{y.item()} {x.grad.item()}\\n', end='', flush=True)")
    assert (code, err) == (0, "")
    assert out.split() == ["3.0", "2.0"] * 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_on_one_rank_ends_the_job(where):
    raising = "if comm.rank == 1: raise KeyError('no such sample')\n"
    rest = {"forward": raising + "dc.all_reduce(x, group=comm)", "backward": raising + "y.backward()"}[where]
    start = time.monotonic()
    code, _, err = launch(START + rest)
    assert code != 0
    assert time.monotonic() - start < 30
    assert "KeyError: 'no such sample'" in err
    assert "diffcoll: rank 1 of 2: the other ranks may wait for this one, so it ends the job (MPI_Abort)" in err


def test_ctrl_c_ends_the_job():
    rest = "print('waiting', flush=True)\nif comm.rank == 0: time.sleep(100)\ndc.all_reduce(x, group=comm)"
    start = time.monotonic()
    code, _, _ = launch(START + rest, interrupt="waiting")
    assert code != 0
    assert time.monotonic() - start < 30


def test_launched_without_a_group():
    code, _, err = launch("import torch, diffcoll as dc\ndc.all_reduce(torch.ones(1))")
    assert code != 0
    assert "_SIZE=2 says that 2 processes were launched, but no group connects them" in err
    assert "init_process_group()" in err
    assert "MPI.COMM_WORLD" in err


def test_an_mpi_for_one_thread():
    program = "import mpi4py; mpi4py.rc.thread_level = 'funneled'\n" + START
    code, _, err = launch(program, n=1)
    assert code != 0
    assert "ValueError: all_reduce: group: got a communicator of an MPI that was set up for one thread" in err
    assert "mpi4py.rc.thread_level = 'multiple'" in err


def test_a_communicator_after_mpi_was_finalized():
    """Also one on which collectives were called before: MPI would end the job without a traceback."""
    program = (
        START
        + """
del x, y
MPI.Finalize()
for collective in (dc.all_reduce, dc.all_gather, dc.reduce_scatter):
    try:
        collective(torch.ones(2), group=comm)
    except ValueError as error:
        print(error, flush=True)
"""
    )
    code, out, err = launch(program, n=2)
    assert code == 0, err
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        text = f"{name}: group: got a communicator after MPI_Finalize(); use it before"
        assert out.count(text) == 2
