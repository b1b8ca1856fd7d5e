"""Properties of engines besides their laws (test_laws.py): calls of gloo, sums in order, scratch memory, devices."""

import contextlib
from functools import partial

import laws
import pytest
import torch
import torch.distributed as dist
from runs import noted, runs_on

import diffcoll as dc
from diffcoll.engines import c10d
from diffcoll.engines.engine import add_up
from diffcoll.engines.scratch import KEPT_BYTES, NEW_BYTES, Scratch
from diffcoll.testing import spawn


def test_native_collectives_of_gloo_are_those_of_the_table():
    """The table selects the algorithm by primitive, dtype and shape."""

    def body(r):
        names = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce", "all_to_all_single")
        calls = noted(dist, *names)
        engine = c10d.engine_of(None)
        for primitive in (*laws.MOVES, *laws.SUMS):
            laws.outcome(primitive, engine, laws.Data())
        engine.all_reduce(x := torch.ones(3, dtype=torch.bfloat16), x.clone())()
        engine.all_reduce(x := torch.ones(3, dtype=torch.int16), x.clone())()
        engine.all_reduce(x := torch.ones(3, dtype=torch.complex64), x.clone())()
        engine.all_reduce(x := torch.ones(0), x.clone())()
        return calls

    expected = ["broadcast", "all_reduce", "all_reduce"]  # everything else is messages between two ranks
    assert spawn(body, range(2)) == [expected] * 2


def test_undocumented_calls_of_torch():
    """ProcessGroup.send and recv, and a tag that separates the library's messages from the user's."""

    def body(r):
        engine, mine, theirs = c10d.engine_of(None), torch.tensor([r]), torch.empty(1, dtype=torch.int64)
        users = dist.irecv(theirs, 1 - r, tag=1)
        got = torch.empty(1, dtype=torch.int64)
        engine.exchange([mine, mine], [got if s != r else None for s in range(2)])()
        dist.isend(mine + 10, 1 - r, tag=1).wait()
        users.wait()
        return got.item(), theirs.item()

    assert spawn(body, range(2)) == [(1, 11), (0, 10)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_add_up(n, dtype):
    for into in [None, *range(n)]:
        terms = [torch.arange(4).to(dtype) * (s + 1) for s in range(n)]
        right = [v * n * (n + 1) / 2 for v in range(4)]
        out = torch.empty(4, dtype=dtype) if into is None else terms[into]
        others = [t.clone() for s, t in enumerate(terms) if s != into]
        add_up(terms, out)
        assert out.tolist() == right
        assert all(
            torch.equal(a, b) for a, b in zip(others, [t for s, t in enumerate(terms) if s != into], strict=True)
        )


def test_scratch_is_kept_lent_once_and_bounded():
    scratch, like, n = Scratch(), torch.empty(0), NEW_BYTES // 4
    first = scratch.take(2 * n, like)
    at = first.data_ptr()
    assert scratch.take(2 * n, like).data_ptr() != at  # in use
    scratch.give(first)
    again = scratch.take(n, torch.empty(0, dtype=torch.complex64))
    assert (again.data_ptr(), again.dtype, again.shape) == (at, torch.complex64, (n,))
    assert scratch.take(n, like).data_ptr() != at  # in use again
    scratch.give(again)
    huge = scratch.take(KEPT_BYTES // 4 + 1, like)
    huge_at = huge.data_ptr()
    scratch.give(huge)
    assert scratch.take(n, like).data_ptr() in {at} - {huge_at}
    with torch.inference_mode():
        scratch.give(scratch.take(n, like))
    scratch.take(n, like).zero_()  # not an inference tensor


@pytest.mark.parametrize("numel", [0, 1, NEW_BYTES - 1])
def test_small_scratch_is_new(numel):
    scratch, like = Scratch(), torch.empty(0, dtype=torch.uint8)
    kept = scratch.take(NEW_BYTES, like)
    scratch.give(kept)
    small = scratch.take(numel, like)
    assert small.shape == (numel,) and small.dtype == torch.uint8
    scratch.give(small)
    assert scratch.take(NEW_BYTES, like).data_ptr() == kept.data_ptr() != small.data_ptr()


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("default", ["device", "dtype"])
@runs_on("rules", "gloo")
def test_defaults_of_some_ranks(run, default):
    """The library sets device and dtype of all its own tensors: defaults affect the user's tensors only."""
    calls = {
        "half": lambda x: dc.all_reduce(x.half()),
        "large": lambda x: dc.all_reduce(x.expand(1 << 16, 4).contiguous()),
        "product": lambda x: dc.all_reduce(x, "product"),
        "logsumexp": lambda x: dc.all_reduce(x, "logsumexp"),
        "first": lambda x: dc.all_reduce(x, "max", ties="first"),
        "all_gather": lambda x: dc.all_gather(x[: 1 + dc.get_rank()], sizes="auto"),
        "all_to_all": lambda x: dc.all_to_all(x, split_sizes=[1, 3], concat_sizes="auto"),
        "scatter": lambda x: dc.scatter(x if dc.get_rank() == 0 else None),
        "scan": lambda x: dc.scan(x, exclusive=True),
        "async": lambda x: dc.all_reduce(x, async_op=True).wait(),
    }

    def found(x, defaults):
        results = []
        for call in calls.values():
            for compare in (False, True):
                x.grad = None
                with defaults(), dc.check_mode(compare), dc.joint_backward() as joint:
                    y = call(x)
                    joint(y.float().square().sum()).backward()
                results += [y.detach(), x.grad]
        with defaults():
            m = torch.nn.Linear(4, 1, device="cpu", dtype=torch.float32)
            averager = dc.GradientAverager(m)
            m(x.detach()).backward()
            averager.detach()
        return [*results, m.weight.grad]

    def body(x):
        torch.manual_seed(0)
        of_rank = {"device": partial(torch.device, "meta"), "dtype": partial(default_dtype, torch.float64)}[default]
        there = found(x, of_rank if dc.get_rank() else contextlib.nullcontext)
        torch.manual_seed(0)
        return there, found(x, contextlib.nullcontext)

    xs = [torch.tensor([1.0, 2.0, -1.0, 0.5]) * (r + 1) for r in range(2)]
    for there, here in run(body, [x.clone().requires_grad_() for x in xs]):
        assert len(there) == 4 * len(calls) + 1
        torch.testing.assert_close(there, here, rtol=0, atol=0)
