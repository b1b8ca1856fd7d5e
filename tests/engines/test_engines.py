"""The seam: defaults written on `exchange` say what the backends' own primitives say; scratch is bounded."""

import pytest
import torch
import torch.distributed as dist

import diffcoll as dc
from diffcoll.core.groups import resolve
from diffcoll.engines import c10d, local
from diffcoll.engines.engine import Engine, add_up
from diffcoll.engines.scratch import KEPT_BYTES, Scratch
from diffcoll.engines.solo import SoloEngine
from diffcoll.testing import simulate, spawn

N = 3


def data(r, numel=7):
    return torch.randn(numel, generator=torch.Generator().manual_seed(r), dtype=torch.float64)


def primitives(engine, kind):
    """Every primitive once, by the engine's choice or by the default."""
    r, n = engine.rank, engine.size

    def do(name, *arguments):
        call = getattr(type(engine) if kind == "own" else Engine, name)
        call(engine, *arguments)()

    total, sent, summed = data(r), data(r), data(r)
    kept = summed.clone()
    do("all_reduce", data(r), total)
    do("broadcast", sent, n - 1)
    do("reduce", summed, 1)
    blocks = [torch.empty(7, dtype=torch.float64) for _ in range(n)]
    do("all_gather", data(r), blocks)
    part = torch.empty(2, dtype=torch.float64)
    do("reduce_scatter", list(data(r, 2 * n).split(2)), part)
    return total, sent, summed if r == 1 else summed - kept, torch.stack(blocks), part


def expected(r):
    xs = [data(s) for s in range(N)]
    parts = sum(data(s, 2 * N) for s in range(N))
    return sum(xs), xs[-1], sum(xs) if r == 1 else 0 * xs[0], torch.stack(xs), parts[2 * r : 2 * r + 2]


@pytest.mark.parametrize("kind", ["own", "default"])
@pytest.mark.parametrize("where", ["gloo", "mpi", "simulated"])
def test_primitives(where, kind):
    def body(r):
        return primitives(resolve(None, "test"), kind)

    got = simulate(body, range(N), rules=True) if where == "simulated" else spawn(body, range(N), backend=where)
    for r in range(N):
        for mine, right in zip(got[r], expected(r), strict=True):
            torch.testing.assert_close(mine, right)


def test_uneven_all_reduce_by_default():
    def body(r):
        y = torch.empty(2)  # fewer numbers than ranks
        Engine.all_reduce(local.engine_of(None), torch.full((2,), 10.0**r), y)()
        return y.tolist()

    assert simulate(body, range(N), rules=True) == [[111, 111]] * N


def test_world_of_one():
    engine = SoloEngine()
    x, y = torch.arange(3.0), torch.empty(3)
    engine.exchange([x], [y])()
    engine.exchange([None], [None])()
    engine.all_reduce(x.clone(), x)()
    engine.broadcast(x, 0)()
    engine.reduce(x, 0)()
    part = torch.empty(3)
    engine.reduce_scatter([x], part)()
    assert x.tolist() == y.tolist() == part.tolist() == [0, 1, 2]


def test_native_collectives_of_gloo_are_those_of_the_table():
    """The table of algorithms decides, by primitive, dtype and shape."""

    def body(r):
        calls = []
        for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce", "all_to_all_single"):
            setattr(dist, name, _noting(calls, name, getattr(dist, name)))
        engine = c10d.engine_of(None)
        primitives(engine, "own")
        engine.all_reduce(x := torch.ones(3, dtype=torch.bfloat16), x.clone())()
        engine.all_reduce(x := torch.ones(3, dtype=torch.int16), x.clone())()
        engine.all_reduce(x := torch.ones(3, dtype=torch.complex64), x.clone())()
        engine.all_reduce(x := torch.ones(0), x.clone())()
        return calls

    def _noting(calls, name, call):
        def noted(*args, **kwargs):
            calls.append(name)
            return call(*args, **kwargs)

        return noted

    expected = ["all_reduce", "broadcast"]  # of primitives(), in its order; all else is messages between two ranks
    assert spawn(body, range(2)) == [[*expected, "all_reduce"]] * 2


def test_the_calls_of_torch_that_are_not_documented():
    """ProcessGroup.send and recv on the group itself, and the tag that keeps our messages from the user's."""

    def body(r):
        engine, mine, theirs = c10d.engine_of(None), torch.tensor([r]), torch.empty(1, dtype=torch.int64)
        users = dist.irecv(theirs, 1 - r, tag=1)
        got = torch.empty(1, dtype=torch.int64)
        engine.exchange([mine, mine], [got if s != r else None for s in range(2)])()
        dist.isend(mine + 10, 1 - r, tag=1).wait()
        users.wait()
        return got.item(), theirs.item()

    assert spawn(body, range(2)) == [(1, 11), (0, 10)]


def test_contiguous_tensors_of_odd_strides():
    """One element with stride 0, as the gradient of a sum has it; on every path."""

    def body(r):
        engine, one = c10d.engine_of(None), torch.tensor(float(r)).expand(1)
        assert one.stride() == (0,)
        blocks = [torch.empty(1) for _ in range(N)]
        engine.all_gather(one, blocks)()
        got, part = torch.empty(N), torch.empty(1)
        engine.exchange([one] * N, list(got.split(1)))()
        engine.reduce_scatter([one] * N, part)()
        total = torch.empty(1)
        engine.all_reduce(one, total)()
        return torch.cat(blocks).tolist(), got.tolist(), part.item(), total.item()

    assert spawn(body, range(N)) == [([0, 1, 2], [0, 1, 2], 3, 3)] * N


def test_a_sum_in_halves():
    """Odd numbers of elements, complex ones, and an x that does not lie in order."""

    def body(r):
        c10d.HALVED["gloo"] = 64
        xs = [torch.randn(n, generator=torch.Generator().manual_seed(r + n), dtype=torch.complex64) for n in (7, 8, 33)]
        xs.append(torch.stack([xs[0], xs[0]], 1)[:, 1])
        ys = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs]
        for x, y in zip(xs, ys, strict=True):
            c10d.engine_of(None).all_reduce(x, y)()
        return xs, ys

    got = spawn(body, range(N))
    for i in range(4):
        for _, ys in got:
            torch.testing.assert_close(ys[i], sum(xs[i] for xs, _ in got))


def test_many_exchanges_under_way_at_once():
    def body(r):
        engine = c10d.engine_of(None)
        rounds = []
        for i in range(20):
            got = [torch.empty(i % 5) if s != r else None for s in range(N)]
            wait = engine.exchange(
                [torch.full((i % 5,), 100.0 * r + 10 * s + i) if s != r else None for s in range(N)], got
            )
            rounds.append((wait, got))
        for wait, _ in reversed(rounds):
            wait()
        return [[None if t is None else t.tolist() for t in got] for _, got in rounds]

    for r, rounds in enumerate(spawn(body, range(N))):
        for i, got in enumerate(rounds):
            assert got == [None if s == r else [100.0 * s + 10 * r + i] * (i % 5) for s in range(N)]


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
    scratch, like = Scratch(), torch.empty(0)
    first = scratch.take(100, like)
    at = first.data_ptr()
    assert scratch.take(100, like).data_ptr() != at  # lent to one at a time
    scratch.give(first)
    again = scratch.take(50, torch.empty(0, dtype=torch.complex64))
    assert (again.data_ptr(), again.dtype, again.shape) == (at, torch.complex64, (50,))
    scratch.give(again)
    huge = scratch.take(KEPT_BYTES // 4 + 1, like)
    huge_at = huge.data_ptr()
    scratch.give(huge)
    assert scratch.take(100, like).data_ptr() in {at} - {huge_at}
    assert scratch.take(0, like).shape == (0,)
    with torch.inference_mode():
        scratch.give(scratch.take(10, like))
    scratch.take(10, like).zero_()  # not an inference tensor


def test_a_default_device():
    """The library says of every tensor of its own where it is: `with torch.device(…)` is about the user's."""
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

    def found(x, device):
        results = []
        for call in calls.values():
            for compare in (False, True):
                x.grad = None
                with torch.device(device), dc.check_mode(compare), dc.joint_backward() as joint:
                    y = call(x)
                    joint(y.float().square().sum()).backward()
                results += [y.detach(), x.grad]
        with torch.device(device):
            m = torch.nn.Linear(4, 1, device="cpu")
            averager = dc.GradientAverager(m)
            m(x.detach()).backward()
            averager.detach()
        return [*results, m.weight.grad]

    def body(x):
        torch.manual_seed(0)
        there = found(x, "meta")
        torch.manual_seed(0)
        return there, found(x, "cpu")

    xs = [torch.tensor([1.0, 2.0, -1.0, 0.5]) * (r + 1) for r in range(2)]
    for run in (spawn, lambda *call: simulate(*call, rules=True)):
        for there, here in run(body, [x.clone().requires_grad_() for x in xs]):
            assert len(there) == len(here) == 4 * len(calls) + 1
            for a, b in zip(there, here, strict=True):
                assert (a is b is None) or torch.equal(a, b)
