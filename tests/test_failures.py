"""A rank dies or stops: every other rank raises CollectiveFailedError within the group's timeout, with the line."""

import os
import re
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runs import line_of, python, refusal, rules
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import diffcoll as dc
from diffcoll.core.errors import Origin, user_line
from diffcoll.testing import RanksFailedError, simulate, spawn

N = 3
SIZES = (1, 10_000)
TIMEOUT = 2.0
CALLS = {
    "all_reduce": lambda x, **more: dc.all_reduce(x, **more),
    "product": lambda x, **more: dc.all_reduce(x, "product", **more),
    "all_gather": lambda x, **more: dc.all_gather(x, dim=1, **more),
    "reduce_scatter": lambda x, **more: dc.reduce_scatter(x, **more),
}


def lose(how, where, call, numel=60):
    """Lose rank 1 at a given point of one call; return the other ranks' errors."""

    def body(r):
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        x = torch.ones(N, numel, requires_grad=True)
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

    def until_all_know(r, folder):
        """The last of the others ends what was stopped; spawn would wait for its last words."""
        (folder / f"pid-{r}").write_text(str(os.getpid()))
        try:
            body(r)
        finally:
            (folder / f"knows-{r}").touch()
            if how == signal.SIGSTOP and len(list(folder.glob("knows-*"))) == N - 1:
                os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)

    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, pytest.raises(RanksFailedError) as caught:
        spawn(until_all_know, range(N), [Path(folder)] * N, timeout=30)
    assert time.monotonic() - start < TIMEOUT + 15
    reports = caught.value.reports
    return [reports[r] for r in range(N) if r != 1]


def check(how, where, call):
    direction = "backward" if where == "backward" else "forward"
    for report in lose(how, where, call):
        assert "CollectiveFailedError" in report
        text = report[report.rindex("CollectiveFailedError") :]
        name = "all_reduce" if call == "product" else call
        assert re.search(rf"{direction}.*: failed on rank [02] of a gloo group of 3 ranks, called at ", text), text
        if where != "async":
            line = line_of(__file__, f'"{call}": lambda')
            assert f"{line}:" in text
        if call != "product":
            assert text.startswith(f"CollectiveFailedError: {name}, {direction}")
        assert "look at the other ranks first" in text
        if call != "all_reduce" and (call, where) != ("product", "backward"):  # gloo's own sum, whose error has no rank
            lost = "1" if how == signal.SIGSTOP else "[012]"  # or one that has ended because of it
            assert re.search(rf": message (to|from) rank {lost}: ", text), text
        assert ("diffcoll.joint_backward()" in text) == (direction == "backward")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize(
    ("where", "call"), [("forward", "all_gather"), ("backward", "all_reduce"), ("async", "product")]
)
def test_a_lost_peer(how, where, call):
    check(how, where, call)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_lost_peer_fifty_times():
    turns = [
        (how, where, call)
        for how in (signal.SIGKILL, signal.SIGSTOP)
        for where in ("forward", "backward", "async")
        for call in CALLS
    ]
    for i in range(50):
        check(*turns[i % len(turns)])


def test_a_rank_that_does_not_come():
    """A rank skips a backward, without joint_backward."""

    def body(r):
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        x = torch.ones(2, requires_grad=True)
        y = dc.all_gather(x, group=group)
        if r == 0:
            y.sum().backward()
        time.sleep(TIMEOUT + 1)

    with pytest.raises(RanksFailedError) as caught:
        spawn(body, range(2), timeout=30)
    text = caught.value.reports[0]
    assert "CollectiveFailedError: all_gather, backward (which is reduce_scatter): failed on rank 0 of a gloo" in text
    assert "`with diffcoll.joint_backward()` makes every rank run it" in text


def test_a_rank_that_does_not_come_in_check_mode():
    """The error names the call, not the comparison before it."""

    def body(r):
        group = dist.new_group(timeout=timedelta(seconds=1))

        def call():
            with dc.check_mode():
                dc.all_gather(torch.ones(2), group=group)  # compared

        return refusal(dc.CollectiveFailedError, call) if r == 0 else time.sleep(2)

    text, _ = spawn(body, range(2), timeout=30)
    at = line_of(__file__, "# compared")
    assert text.startswith(f"all_gather, forward: failed on rank 0 of a gloo group of 2 ranks, called at {at}: ")


# Ranks other than 0 skip a call of a backward in different ways; the text names the reason.


def lacks_first_order(r, x, group, async_op):
    y = dc.all_reduce(x, group=group, async_op=async_op)  # first
    y = y.wait() if async_op else y
    (y.square().sum() if r == 0 else x.sum()).backward()


def lacks_second_order(r, x, group, async_op):
    """The gradient of a loss that is linear in y does not depend on x."""
    y = dc.all_gather(x, group=group, async_op=async_op)  # second
    y = y.wait() if async_op else y
    (g,) = torch.autograd.grad(y.square().sum() if r == 0 else y.sum(), x, create_graph=True)
    (g * x).sum().backward()


def lacks_recomputation(r, x, group, async_op):
    def part(x):
        y = dc.all_reduce(x.sum(), group=group, async_op=async_op)  # again
        y = y.wait() if async_op else y
        return y.square() if r == 0 else y

    y = checkpoint(part, x, use_reentrant=False)
    if r == 0:
        y.backward()


LACKING = [
    (lacks_first_order, "all_reduce", "backward", "first", "its loss does not use the output or its x requires no"),
    (lacks_second_order, "all_gather", "second-order backward", "second", "the gradients in its loss do not depend on"),
    (lacks_recomputation, "all_reduce", "(within a backward)", "again", "a checkpoint computes its part again only on"),
]


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_a_simulated_rank_that_lacks_a_backward(size, async_op):
    for program, name, backward, line, why in LACKING:

        def body(r):
            program(r, torch.full((2,), r + 1.0, requires_grad=True), None, async_op)  # noqa: B023

        with pytest.raises(dc.CollectiveMismatchError) as caught:
            rules(body, range(size))
        waits = async_op and line != "again"  # the wait is on the line after the call
        text, at = str(caught.value), line_of(__file__, f"# {line}", waits)
        if line == "again":
            assert f"rank 0 waits in {name} at {at} {backward}\n" in text
        else:
            assert f"rank 0 waits in {backward} of {name} called at {at}\n" in text
        reasons = f"it called backward() less often, or {why}"
        assert f"\na rank that is elsewhere did not run this backward: {reasons}" in text
        assert "`with diffcoll.joint_backward()` makes every rank run it" in text


def test_a_rank_that_lacks_a_backward():
    def body(r):
        groups = [dist.new_group(timeout=timedelta(seconds=TIMEOUT)) for _ in LACKING]
        said = []
        for (program, *_), group in zip(LACKING, groups, strict=True):
            try:
                program(r, torch.full((2,), r + 1.0, requires_grad=True), group, False)
            except dc.CollectiveFailedError as error:
                said.append(str(error))
            dist.barrier()
        return said

    said, nothing = spawn(body, range(2), timeout=40)
    assert nothing == []
    for text, (_, name, backward, line, why) in zip(said, LACKING, strict=True):
        direction = "forward (within a backward)" if line == "again" else backward
        assert text.startswith(f"{name}, {direction}")
        assert f"failed on rank 0 of a gloo group of 2 ranks, called at {line_of(__file__, f'# {line}')}: " in text
        assert why in text
        assert text.endswith("`with diffcoll.joint_backward()` makes every rank run it")


def test_joint_backward_mends_what_a_rank_lacks():
    """The values equal those of truth."""

    def penalty(r, x, linear):
        with dc.joint_backward() as joint:
            y = dc.all_gather(x * x, sizes=[2, 0, 3])
            logits = torch.stack([x, x.sin()], 1) * y.sum()
            loss = y.sum() if linear and r == 2 else functional.cross_entropy(logits, x.long(), reduction="sum")
            (g,) = torch.autograd.grad(joint(loss), x, create_graph=True)
            return joint(loss + g.square().sum() + dc.all_reduce(g.sum()).sin())

    def inputs():
        return [torch.linspace(0.1, 0.9, n, dtype=torch.float64).requires_grad_() for n in (2, 0, 3)]

    for linear in (False, True):

        def run(r):
            x = inputs()[r]
            penalty(r, x, linear).backward()  # noqa: B023
            return x.grad

        def together(r, x):
            y = dc.all_gather(x * x, sizes=[2, 0, 3])
            logits = torch.stack([x, x.sin()], 1) * y.sum()
            return y.sum() if linear and r == 2 else functional.cross_entropy(logits, x.long(), reduction="sum")  # noqa: B023

        xs = inputs()
        losses = simulate(together, range(N), xs)
        gs = torch.autograd.grad(sum(losses), xs, create_graph=True)
        total = sum(g.sum() for g in gs)
        whole = sum(losses) + sum(g.square().sum() for g in gs) + N * total.sin()
        expected = torch.autograd.grad(whole, xs)
        for got in (rules(run, range(N)), spawn(run, range(N), timeout=30)):
            torch.testing.assert_close(got, list(expected))


def test_origins():
    """An Origin has the user's line, also if it is read later."""

    def note():
        return Origin("x")

    origin = note()  # not this line but the innermost call
    assert origin.line == line_of(__file__, 'return Origin("x")')
    assert user_line().startswith(f"{__file__}:")
    x = torch.ones(1, requires_grad=True)
    y = dc.all_reduce(x)  # noted here
    assert y.grad_fn.origin.line == line_of(__file__, "# noted here")
    (g,) = torch.autograd.grad(y * y, x, create_graph=True)
    node = g.grad_fn
    while not hasattr(node, "origin"):
        node = node.next_functions[0][0]
    assert node.origin.line == y.grad_fn.origin.line  # at any order


EXITS = """
import os, sys, time, torch, torch.distributed as dist
import diffcoll as dc
folder = sys.argv[1]
r = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=r, world_size=2)
dc.all_reduce(torch.ones(1))
if r == 1:
    while not os.path.exists(f"{folder}/polled"):
        time.sleep(0.02)
    time.sleep(0.5)  # the other process is at its end
pending = dc.all_gather(torch.ones(3), async_op=True)
if r == 1:
    pending.wait()
    time.sleep(1)  # or the connection would break before rank 0 has received everything
    os._exit(0)
assert not pending.done()
open(f"{folder}/polled", "w").close()
pending.abandon()
"""


def test_a_process_ends_while_a_polled_message_is_in_flight(tmp_path):
    """The thread that waits for it would end the process by std::terminate."""
    python("-c", EXITS, tmp_path, environment={"GLOO_SOCKET_IFNAME": "lo"})


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


UNEVEN = {
    "all_gather": lambda r, n, g: dc.all_gather(torch.ones(n * (3 + 2 * r)), group=g),
    "an empty block": lambda r, n, g: dc.all_gather(torch.ones(n * 3 * (1 - r)), group=g),
    "a dtype": lambda r, n, g: dc.all_gather(torch.ones(n, dtype=(torch.float32, torch.float64)[r]), group=g),
    "later": lambda r, n, g: dc.all_gather(torch.ones(n * (3 + 2 * r)), group=g, async_op=True).wait(),
    "all_to_all": lambda r, n, g: dc.all_to_all(torch.ones(n * (2 + 2 * r)), group=g),
    "reduce_scatter": lambda r, n, g: dc.reduce_scatter(torch.ones(n * (2 + 2 * r)), group=g),
    "shift": lambda r, n, g: dc.shift(torch.ones(n * (3 + 2 * r)), group=g),
    "product": lambda r, n, g: dc.all_reduce(torch.ones(n * (3 + 2 * r)), "product", group=g),
}


def test_messages_of_another_size_do_not_meet():
    """gloo would abort the receiving process, or accept a shorter message."""

    def body(r):
        texts = {}

        def fails(key, call, group):
            texts[key] = refusal(dc.CollectiveFailedError, call, r, key[1], group)

        timeout = timedelta(seconds=TIMEOUT)
        programs = {(name, n): (call, dist.new_group(timeout=timeout)) for name, call in UNEVEN.items() for n in SIZES}
        for _, group in programs.values():
            dc.all_reduce(torch.ones(1), group=group)  # connects
        with ThreadPoolExecutor(len(programs)) as threads:
            list(threads.map(fails, programs, *zip(*programs.values(), strict=True)))
        return texts

    for r, texts in enumerate(spawn(body, range(2), timeout=60)):
        assert len(texts) == len(SIZES) * len(UNEVEN)
        for key, text in texts.items():
            assert f"failed on rank {r} of a gloo group of 2 ranks" in text, key
            assert re.search(r'of another shape .*sizes="auto".*DIFFCOLL_CHECK=1', text), (key, text)


@pytest.mark.parametrize("later", [False, True])
def test_the_message_that_failed_is_named(later):
    """Rank 0 gets the block of rank 1, and waits for that of rank 2, which has another size."""

    def body(r):
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        dc.all_reduce(torch.ones(1), group=group)  # connects

        def call():
            y = dc.gather(torch.ones(1 + r // 2), group=group, async_op=later)
            return y.wait() if later else y

        if r == 1:
            return call().numel()
        return refusal(dc.CollectiveFailedError, call)

    at_dst, _, sent = spawn(body, range(3), timeout=60)
    assert "message from rank 2: " in at_dst
    assert "message to rank 0: " in sent
