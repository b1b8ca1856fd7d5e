"""MPI communicators: which ones, every dtype, programs that also use MPI or gloo themselves, and how jobs end."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import runs
import torch
import torch.distributed as dist
from mpi_ranks import MPIEXEC, environment
from runs import mpi as on_mpi
from runs import new_group, refusal

import diffcoll as dc
from diffcoll.core.groups import resolve
from diffcoll.engines import mpi

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


def test_whether_mpi_reads_cuda_memory():
    def body(r):
        with pytest.warns(UserWarning, match="DIFFCOLL_MPI_CUDA"):
            assert not mpi.reads_cuda()  # the MPI wheel reports no CUDA support
        mpi.reads_cuda()  # warns once
        mpi.reads_cuda.cache_clear()
        os.environ["DIFFCOLL_MPI_CUDA"] = "1"
        return mpi.reads_cuda()

    assert spawned(body, range(1)) == [True]


# ── programs under mpiexec ───────────────────────────────────────────────────────────────────────────────


START = """
import time
from mpi4py import MPI
import torch, diffcoll as dc
comm = MPI.COMM_WORLD
x = torch.tensor(float(comm.rank + 1), requires_grad=True)
y = dc.all_reduce(x, group=comm)
"""


def launch(program, n=2, interrupt=""):
    """Run a program under mpiexec; `interrupt`: send Ctrl-C when it prints that. Return its status and output."""
    command = [MPIEXEC, "-n", str(n), sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment())
    try:
        said = ""
        while interrupt not in said:
            said += process.stdout.readline()
        if interrupt:
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, said + out, err


def test_a_job_ends():
    code, out, err = launch(START + "y.backward(); print(f'{y.item()} {x.grad.item()}\\n', end='', flush=True)")
    assert (code, err) == (0, "")
    assert out.split() == ["3.0", "2.0"] * 2


def test_an_exception_on_one_rank_ends_the_job():
    code, _, err = launch(START + "if comm.rank == 1: raise KeyError('no such sample')\ny.backward()")
    assert code != 0
    assert "KeyError: 'no such sample'" in err and "diffcoll: rank 1 of 2" in err


def test_ctrl_c_ends_the_job():
    rest = "print('waiting', flush=True)\nif comm.rank == 0: time.sleep(100)\ndc.all_reduce(x, group=comm)"
    code, *_ = launch(START + rest, interrupt="waiting")
    assert code != 0


def test_an_mpi_for_one_thread():
    code, _, err = launch("import mpi4py; mpi4py.rc.thread_level = 'funneled'\n" + START, n=1)
    assert code != 0
    assert "ValueError: all_reduce: group: " in err


FINALIZED = """
MPI.Finalize()
for collective in (dc.all_reduce, dc.all_gather, dc.reduce_scatter):
    try:
        collective(torch.ones(2), group=comm)
    except ValueError:
        print("refused", flush=True)
"""


def test_a_communicator_after_mpi_was_finalized():
    """Also one on which collectives were called before: MPI would end the job without a traceback."""
    code, out, err = launch(START + FINALIZED)
    assert code == 0, err
    assert out.split() == ["refused"] * 6
