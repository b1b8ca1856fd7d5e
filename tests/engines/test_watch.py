"""A rank that waits long for other ranks prints a warning to stderr, once per call; the other ranks print nothing."""

import os
import threading

import pytest
import torch
from runs import line_of, python

import diffcoll as dc
from diffcoll.core.groups import resolve
from diffcoll.core.torch_private.release import COMPILES
from diffcoll.engines import watch
from diffcoll.testing import spawn

AFTER = 0.2


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_rank_that_waits_warns_once(backend, monkeypatch, tmp_path):
    """Rank 1 makes its call once rank 0 has warned, which a file signals; the result is right."""
    monkeypatch.setenv("DIFFCOLL_WARN_AFTER", str(AFTER))

    def body(r):
        texts, said = [], iter(range(100))

        def noting(text, **how):
            texts.append(text)
            (tmp_path / str(next(said))).touch()

        watch.print = noting
        calls = iter(range(100))

        def late():
            number = next(calls)
            while r == 1 and not (tmp_path / str(number)).exists():
                threading.Event().wait(0.01)

        x = torch.tensor([1.0 + r, 5.0], requires_grad=True)
        dc.all_reduce(x)  # no rank is late
        model = torch.nn.Linear(2, 1)
        averager = dc.GradientAverager(model)
        model(x.detach()).sum().backward()  # the first one compares which parameters are frozen
        late()
        y = dc.all_gather(x)  # forward
        late()
        (y * (r + 1)).sum().backward()
        late()
        pending = dc.all_reduce(x, async_op=True)
        z = pending.wait()  # async
        late()
        z.sum().backward()
        late()
        with dc.check_mode():
            dc.all_reduce(x)  # compared
        late()
        lengths = dc.all_gather(x[: 1 + r], sizes="auto").shape  # auto
        late()
        model(x).sum().backward()  # averaged
        late()
        call = torch.compile(dc.all_reduce, backend="aot_eager") if COMPILES else dc.all_reduce
        compiled = call(x)  # compiled
        averager.detach()
        return texts, x.grad.tolist(), z.tolist(), lengths, compiled.tolist()

    (said, *rest), (silent, *others) = spawn(body, range(2), backend=backend, timeout=90)
    group = "a gloo group of 2 ranks" if backend == "gloo" else "an MPI communicator of 2 ranks"
    what = [
        ("all_gather", "forward"),
        ("all_gather, backward (which is reduce_scatter)", "forward"),
        ("all_reduce", "async"),
        ("all_reduce, backward", "async"),
        ("check mode", "compared"),
        ("all_gather", "auto"),
        ("GradientAverager, bucket 0 of 1", "averaged"),
        ("all_reduce", "compiled"),
    ]
    assert silent == []
    assert len(said) == len(what)
    for text, (call, line) in zip(said, what, strict=True):
        assert text.startswith("diffcoll: rank 0 has waited 0.")
        place = line_of(__file__, f"# {line}")
        assert f" s in {call}, called at {place}, for other ranks of {group}: one is busy, " in text
        assert "DIFFCOLL_CHECK=1 makes ranks that disagree an error" in text
        assert "after DIFFCOLL_WARN_AFTER seconds (0: never)" in text
        assert ("its loss does not use the output" in text) == ("backward" in call)
        assert ("`with diffcoll.joint_backward()` makes every rank run it" in text) == ("backward" in call)
    for found in (rest, others):
        assert found[1:] == [[3.0, 10.0], (3,), [3.0, 10.0]]
    assert rest[0] != [0, 0]


def test_the_thread_starts_with_the_first_group_unless_disabled():
    program = """
import os, threading, torch, torch.distributed as dist, diffcoll as dc
from diffcoll.engines import engine, watch
running = lambda: sum(t.name == "diffcoll watch" for t in threading.enumerate())
assert not running()
class Some(engine.Engine):
    def exchange(self, sends, recvs): ...
watch.watch(Some(0, 1))
assert not running()
for after, wanted in ("", 1), ("7.5", 1), ("0", 0):
    if os.fork() == 0:
        break
    assert os.wait()[1] == 0, after
else:
    os._exit(0)
os.environ["DIFFCOLL_WARN_AFTER"] = after
kept = Some(0, 2)
watch.watch(kept)
watch.watch(kept)
assert running() == wanted, (after, running())
kept.turn("all_reduce").__enter__()
if os.fork() == 0:
    assert not running()
    watch.watch(other := Some(1, 2))  # of the child
    assert running() == wanted
    os._exit(0)
assert os.wait()[1] == 0
"""
    assert python("-c", program, environment={"DIFFCOLL_WARN_AFTER": ""}).stderr == ""


def test_what_the_setting_may_be(monkeypatch):
    for wrong in ("soon", "-1", "nan"):
        monkeypatch.setenv("DIFFCOLL_WARN_AFTER", wrong)
        with pytest.raises(ValueError, match=f"DIFFCOLL_WARN_AFTER: got '{wrong}', expected seconds, or 0 for no warn"):
            watch._seconds()


def test_groups_that_are_gone_are_no_longer_watched():
    """Neither a group that was freed nor one that a fork has inherited is watched."""
    engine = resolve(None, "test")
    assert engine.size == 1
    gone, other = watch._Watched(lambda: None, os.getpid()), watch._Watched(lambda: engine, -1)
    watch._watched += [gone, other]
    for watched in (gone, other):
        watch._look(watched, 1.0)
    assert gone not in watch._watched
    assert other not in watch._watched
