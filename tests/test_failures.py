"""A peer that dies or stops: every survivor raises CollectiveFailedError, within the group's timeout, with the line."""

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import diffcoll as dc
from diffcoll.errors import Origin, user_line
from diffcoll.testing import RanksFailedError, spawn

N = 3
TIMEOUT = 2.0
CALLS = {
    "all_reduce": lambda x, **more: dc.all_reduce(x, **more),
    "product": lambda x, **more: dc.all_reduce(x, "product", **more),
    "all_gather": lambda x, **more: dc.all_gather(x, dim=1, **more),
    "reduce_scatter": lambda x, **more: dc.reduce_scatter(x, **more),
}


def lose(how, where, call, numel=60):
    """Rank 1 is lost at some point of one call; what the others raise."""

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

    start = time.monotonic()
    with pytest.raises(RanksFailedError) as caught:
        spawn(body, range(N), timeout=30)
    assert time.monotonic() - start < TIMEOUT + 15
    reports = caught.value.reports
    return [reports[r] for r in range(N) if r != 1]


def line_of(words):
    with open(__file__, encoding="utf-8") as file:
        return next(i for i, line in enumerate(file, 1) if words in line)


def check(how, where, call):
    direction = "backward" if where == "backward" else "forward"
    for report in lose(how, where, call):
        assert "CollectiveFailedError" in report
        text = report[report.rindex("CollectiveFailedError") :]
        name = "all_reduce" if call == "product" else call
        assert re.search(rf"{direction}.*: failed on rank [02] of a gloo group of 3 ranks, called at ", text), text
        if where != "async":
            line = line_of('"' + call + '": lambda')
            assert f"{__file__}:{line}:" in text
        if call != "product":
            assert text.startswith(f"CollectiveFailedError: {name}, {direction}")
        assert "look at the other ranks first" in text
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
    """What joint_backward is for, when it was not used."""

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


def test_origins():
    """The line of the user, also from a note of it that is read later."""

    def note():
        return Origin("x")

    origin = note()  # not this line: the innermost
    here = line_of('return Origin("x")')
    assert origin.line == f"{__file__}:{here}"
    assert user_line().startswith(f"{__file__}:")
    x = torch.ones(1, requires_grad=True)
    y = dc.all_reduce(x)  # noted here
    assert y.grad_fn.origin.line == f"{__file__}:{line_of('# noted here')}"
    (g,) = torch.autograd.grad(y * y, x, create_graph=True)
    node = g.grad_fn
    while not hasattr(node, "origin"):
        node = node.next_functions[0][0]
    assert node.origin.line == y.grad_fn.origin.line  # of any order


UNEVEN = {
    "all_gather": lambda r, n: dc.all_gather(torch.ones(n * (3 + 2 * r))),
    "an empty block": lambda r, n: dc.all_gather(torch.ones(n * 3 * (1 - r))),
    "a dtype": lambda r, n: dc.all_gather(torch.ones(n, dtype=(torch.float32, torch.float64)[r])),
    "later": lambda r, n: dc.all_gather(torch.ones(n * (3 + 2 * r)), async_op=True).wait(),
    "all_to_all": lambda r, n: dc.all_to_all(torch.ones(n * (2 + 2 * r))),
    "reduce_scatter": lambda r, n: dc.reduce_scatter(torch.ones(n * (2 + 2 * r))),
    "shift": lambda r, n: dc.shift(torch.ones(n * (3 + 2 * r))),
    "product": lambda r, n: dc.all_reduce(torch.ones(n * (3 + 2 * r)), "product"),
}


def test_messages_of_another_size_are_an_error_at_once():
    """On gloo they would end the receiving process, or count as the whole, without a word."""

    def body(r):
        texts = []
        for n in (1, 10_000):
            for name, call in UNEVEN.items():
                dist.barrier()
                group = dist.new_group(timeout=timedelta(seconds=20))
                with dc.set_default_group(group):
                    with pytest.raises(dc.CollectiveMismatchError) as caught:
                        call(r, n)
                    with pytest.raises(dc.CollectiveMismatchError, match="the group cannot be used any more"):
                        dc.all_gather(torch.ones(n))
                texts.append((name, str(caught.value)))
        return texts

    for r, texts in enumerate(spawn(body, range(2), timeout=60)):
        assert len(texts) == 2 * len(UNEVEN)
        for name, text in texts:
            where = rf"\w+: rank {r} of a gloo group of 2 ranks expects \d+ B from rank {1 - r}, which sends \d+ B; "
            assert re.match(where + r'.*sizes="auto".*DIFFCOLL_CHECK=1', text), (name, text)
