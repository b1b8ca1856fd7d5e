"""A rank dies, stops or does not come: every other rank raises within the group's timeout, and names call and line."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product

import pytest
import torch
import torch.distributed as dist
from runs import line_of, python, refusal, rules
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from diffcoll.testing import RanksFailedError, spawn

N = 3
TIMEOUT = 2.0
CALLS = {
    "all_reduce": lambda x, **more: dc.all_reduce(x, **more),
    "product": lambda x, **more: dc.all_reduce(x, "product", **more),
    "all_gather": lambda x, **more: dc.all_gather(x, dim=1, **more),
    "reduce_scatter": lambda x, **more: dc.reduce_scatter(x, **more),
}
#: Where rank 1 is lost, in which call.
LOST = [("forward", "all_gather"), ("backward", "all_reduce"), ("async", "product"), ("backward", "reduce_scatter")]


def short_group():
    return dist.new_group(timeout=timedelta(seconds=TIMEOUT))


# ── a rank is lost ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize(("where", "call"), LOST)
def test_a_lost_peer(how, where, call):
    """Rank 1 is lost at a given point of one call."""

    def body(r):
        group = short_group()
        x = torch.ones(N, 60, requires_grad=True)
        dc.all_reduce(x, group=group)  # connects

        def lost(here):
            if r == 1 and here == where:
                os.kill(os.getpid(), how)

        lost("forward")
        if where == "async":
            pending = CALLS[call](x, group=group, async_op=True) if r != 1 else None
            lost("async")
            y = pending.wait()
        else:
            y = CALLS[call](x, group=group)
        lost("backward")
        y.sum().backward()

    with pytest.raises(RanksFailedError) as caught:
        spawn(body, range(N), timeout=30)  # a rank that waits longer has no CollectiveFailedError
    direction = "backward" if where == "backward" else "forward"
    for r in (0, 2):
        text = caught.value.failures[r].text
        text = text[text.rindex("CollectiveFailedError") :]
        assert direction in text
        if where != "async":  # of a wait the line is that of the wait
            assert line_of(__file__, f'"{call}": lambda') in text
        if call != "product":  # which is made of others
            assert f"{call}, {direction}" in text


# ── ranks other than 0 do not run a backward ─────────────────────────────────────────────────────────────


def lacks_first_order(r, x, group):
    y = dc.all_reduce(x, group=group)  # first
    (y.square().sum() if r == 0 else x.sum()).backward()


def lacks_second_order(r, x, group):
    """The gradient of a loss that is linear in y does not depend on x."""
    y = dc.all_gather(x, group=group)  # second
    (g,) = torch.autograd.grad(y.square().sum() if r == 0 else y.sum(), x, create_graph=True)
    (g * x).sum().backward()


def lacks_recomputation(r, x, group):
    def part(x):
        y = dc.all_reduce(x.sum(), group=group)  # again
        return y.square() if r == 0 else y

    y = checkpoint(part, x, use_reentrant=False)
    if r == 0:
        y.backward()


#: The program, and what its error names: the collective, the direction, and the line of the forward call.
LACKING = [
    (lacks_first_order, "all_reduce", "backward", "first"),
    (lacks_second_order, "all_gather", "second-order backward", "second"),
    (lacks_recomputation, "all_reduce", "(within a backward)", "again"),
]


@pytest.mark.parametrize(("program", "name", "direction", "line"), LACKING)
def test_a_simulated_rank_that_lacks_a_backward(program, name, direction, line):
    def body(r):
        program(r, torch.full((2,), r + 1.0, requires_grad=True), None)

    text = refusal(dc.CollectiveMismatchError, rules, body, range(N))
    assert "rank 0 waits in " + (name if line == "again" else f"{direction} of {name}") in text
    assert line_of(__file__, f"# {line}") in text and "joint_backward" in text


def lacks_a_tree(r, x, group):
    if r == 0:
        dc.all_reduce([x], group=group)


@pytest.mark.parametrize("checked", [False, True])
def test_a_rank_that_lacks_a_backward(checked):
    """In check mode the error names the call, not the comparison before it."""

    def body(r):
        dc.check_mode(checked)
        programs = [*(program for program, *_ in LACKING), lacks_a_tree]
        groups = [short_group() for _ in programs]
        texts = []
        for program, group in zip(programs, groups, strict=True):
            try:
                program(r, torch.full((2,), r + 1.0, requires_grad=True), group)
            except dc.CollectiveFailedError as error:
                texts.append(str(error))
            dist.barrier()
        return texts

    texts, nothing = spawn(body, range(2), timeout=40)
    assert nothing == []
    assert texts.pop().startswith("all_reduce, forward")
    for text, (_, name, direction, line) in zip(texts, LACKING, strict=True):
        assert text.startswith(name) and direction in text
        assert line_of(__file__, f"# {line}") in text and "joint_backward" in text


def test_messages_of_another_size_do_not_end_the_process():
    """gloo would abort the receiving process, or accept a shorter message."""
    calls = list(product((dc.all_gather, dc.all_to_all, dc.shift), (1, 10_000)))

    def body(r):
        groups = [short_group() for _ in calls]
        for group in groups:
            dc.all_reduce(torch.ones(1), group=group)  # connects

        def fails(call, group):
            collective, n = call
            try:
                collective(torch.ones(n * (2 + 2 * r)), group=group)
            except dc.CollectiveFailedError:
                return True
            return False

        with ThreadPoolExecutor(len(calls)) as threads:
            return list(threads.map(fails, calls, groups))

    assert all(map(any, zip(*spawn(body, range(2), timeout=60), strict=True)))


ENDS = """
import os, sys, tempfile
import torch, torch.distributed as dist
import diffcoll as dc

sys.setswitchinterval(1)  # seconds for which a thread that asks for the interpreter's lock may wait
codes = []
for run in range(12):
    store, ranks = f"{tempfile.mkdtemp()}/store", []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
            for _ in range(3):
                dc.all_reduce(torch.ones(1000))
            sys.exit()
        ranks.append(pid)
    codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
assert not any(codes), codes
"""


@pytest.mark.slow
def test_processes_end_while_gloo_frees_what_was_sent(tmp_path):
    """Its thread asks for the lock to free a tensor; without time for that, about one process in ten ended with -6."""
    python("-c", ENDS, environment={"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path)}, timeout=200)
