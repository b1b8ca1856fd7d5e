"""Small messages between ranks, and a group's turn, in which all messages are sent."""

import pytest
import torch
from runs import refusal, rules, runs_on
from torch.utils._python_dispatch import TorchDispatchMode

import diffcoll as dc
from diffcoll.core.control import Control
from diffcoll.core.groups import resolve
from diffcoll.engines.turn import IDLE


@runs_on("rules", "gloo")
def test_each_rank_learns_the_numbers_of_all(run):
    def body(r):
        control = Control(resolve(None, "test"), "test")
        control.agree(("equal", 1), "not shown")
        control.agree_on_each(["a", "b"], "facts")
        rows = control.gather(torch.full((r,), float(r)), [0, 1, 2])
        return (control.numbers([r, 2**60]), control.numbers_of_first([r + 5]), torch.cat(rows).tolist())

    found = [[0, 2**60], [1, 2**60], [2, 2**60]], [5], [1.0, 2.0, 2.0]
    assert run(body, range(3)) == [found] * 3


@runs_on("rules", "gloo")
def test_a_difference_is_one_error_on_all_ranks(run):
    def body(r):
        control = Control(resolve(None, "test"), "test")
        said = []
        for compare in (
            lambda: control.agree(r == 1, f"this is {r}"),
            lambda: control.agree("x", f"this is {r}", ["a", "b" if r == 1 else "c"]),
            lambda: control.agree_on_each(["a"] * (1 + (r != 1)), "facts"),
        ):
            said.append(refusal(dc.CollectiveMismatchError, compare))
        return said

    found = run(body, range(3))
    assert found[0] == found[1] == found[2]
    call, leaf, fact = found[0]
    assert "ranks disagree:\n  rank 0: this is 0\n  rank 1: this is 1\n  rank 2: this is 2" in call
    assert "rank 1: this is 1\n    the first leaf that differs: b\n" in leaf
    assert fact.startswith("test: the ranks' facts differ; the first difference is at index 1:\n  rank 0: a\n")
    assert "  rank 1: nothing\n" in fact


def test_modes_do_not_see_them():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise AssertionError(function)

    def body(r):
        control = Control(resolve(None, "test"))
        with Mode():
            return control.numbers([r]), control.numbers_of_first([r])

    assert rules(body, range(2)) == [([[0], [1]], [0])] * 2


def test_a_turn_ends_also_with_an_error_of_the_backend_which_it_names():
    def body(r):
        engine = resolve(None, "test")
        before = engine.now
        with pytest.raises(dc.CollectiveFailedError, match=r"^test, forward: failed on rank \d of .*: a cable broke"):
            with engine.turn("test", later=True) as _:
                assert (engine.now.name, engine.now.later, engine.now.polls) == ("test", True, None)
                raise RuntimeError("a cable broke")
        others = KeyError("not of the backend"), dc.CollectiveMismatchError("names its call")
        for error in (*others, torch.OutOfMemoryError("of this rank")):
            with pytest.raises(type(error)) as raised, engine.turn("test"):
                raise error
            assert raised.value is error
        return before is engine.now is IDLE, dc.all_reduce(torch.ones(1)).item()

    assert rules(body, range(2)) == [(True, 2.0)] * 2
    assert body(0) == (True, 1.0)
