"""The small messages between ranks: sizes, and what check mode compares."""

import pytest
import torch
from runs import runs_on
from torch.utils._python_dispatch import TorchDispatchMode

import diffcoll as dc


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "c10d" not in function.namespace and "gather" not in str(function), function
        return function(*args, **(kwargs or {}))


@runs_on("rules", "gloo", "mpi")
def test_modes_and_autograd_do_not_see_them(run):
    def body(r):
        x = torch.ones(r, 2, requires_grad=True)
        with dc.check_mode(), Nothing(), torch.autograd.set_detect_anomaly(True, check_nan=True):
            y = dc.all_gather(x, sizes="auto")
            (y.sum() * (r + 1)).backward()
            with torch.inference_mode():
                dc.all_gather(x, sizes="auto")
        return y.shape[0], x.grad.tolist()

    assert run(body, range(3)) == [(3, [[6, 6]] * r) for r in range(3)]


@runs_on("rules", "gloo", "mpi")
def test_a_difference_is_one_error_on_all_ranks(run):
    """It lists every rank's call and line, and the group works afterwards."""

    def body(r):
        with pytest.raises(dc.CollectiveMismatchError) as caught, dc.check_mode():
            dc.all_reduce(torch.ones(2 + (r == 1)))
        return str(caught.value), dc.all_reduce(torch.tensor(r)).item()

    texts, works = zip(*run(body, range(3)), strict=True)
    assert len({*texts}) == 1 and works == (3, 3, 3)
    assert all(f"rank {r}: " in texts[0] for r in range(3))
    assert texts[0].count("all_reduce(") == texts[0].count("test_control.py:") == 3
