"""Memory layouts may differ from rank to rank: neither the messages nor the results depend on them."""

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from runs import gloo, rules, runs_on

import diffcoll as dc
from diffcoll.averaging.buckets import Bucket
from diffcoll.averaging.gradient import Parameter
from diffcoll.core.groups import resolve
from diffcoll.engines import c10d, mpi
from diffcoll.engines.engine import Engine
from diffcoll.testing import cases, spawn
from diffcoll.testing.layouts import with_layout

RUNS = {"rules": rules, "gloo": spawn, "mpi": partial(spawn, backend="mpi")}  # ranks move thresholds


# ── the same numbers in other layouts ────────────────────────────────────────────────────────────────────


def permuted(x, own):
    """With another order of dims in memory, as transposed and channels_last tensors have."""
    order = own.sample(range(x.dim()), x.dim())
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])


def strided_or_offset(x, own):
    return with_layout(x, own.choice(["strided", "offset"]))


def lazy(x, own):
    """With a lazy conjugate or a lazy negation."""
    if x.is_complex():
        return x.conj().resolve_conj().conj()
    if x.dtype not in (torch.float32, torch.float64):
        return x
    return torch.complex(x, -x).conj().imag


def without_strides(x, own):
    """Dims of size 1 with stride 0, as expand makes them."""
    return x.as_strided(x.shape, [0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)])


LAYOUTS = [lambda x, own: x, permuted, strided_or_offset, lazy, without_strides]


def expanded(x):
    """One number in all positions, with strides of 0, as the gradient of a sum."""
    return x.reshape(-1)[:1].reshape(()).expand(x.shape) if x.numel() else x


def laid_out(x, own):
    y = own.choice(LAYOUTS)(x.contiguous(), own)
    assert torch.equal(y, x)
    return y


# ── every collective ─────────────────────────────────────────────────────────────────────────────────────


def move_thresholds(common, nbytes, n):
    """Set every threshold just below, at or above the message size, equally on all ranks."""

    def near(parts=1):
        return max(1, nbytes // parts + common.choice([-1, 0, 1]))

    c10d.SMALL["gloo"] = mpi.TOGETHER = n * near(common.choice([1, 2, 3]))
    mpi.SMALL, mpi.ADDED = near(), 8 * near(16)
    mpi.PIECE = 16 * near(common.choice([16, 32, 48]))  # a whole number of elements


def data(case, r, seed, kind):
    """x of rank r, which every rank can compute."""
    x = case.x(r, seed)
    if x is not None and kind == "expanded" and not case.shared[0] and r % 2 == 0:
        x = expanded(x)
    return x


def one_case(case, r, n, seed):
    """Compare value and gradient on this rank with truth."""
    common, own = random.Random(seed), random.Random(f"{seed} {r}")
    xs = [data(case, s, seed, kind := common.choice(["expanded", "as drawn"])) for s in range(n)]
    del kind
    move_thresholds(common, max(x.nbytes for x in xs if x is not None), n)
    leaves = [x.contiguous().clone().requires_grad_() for x in xs]
    ys = case.truth(leaves)
    sums = [not case.shared[1] and common.random() < 0.5 for _ in ys]  # ranks whose loss is the sum of y
    ws = [expanded(case.w(y, s, seed)) if sums[s] else case.w(y, s, seed) for s, y in enumerate(ys)]
    right = torch.autograd.grad(ys, leaves, ws, allow_unused=True)[r]
    x = laid_out(xs[r], own).detach().requires_grad_()
    y = case.call(x, r)
    torch.testing.assert_close(y, ys[r].detach(), msg=lambda m: f"{case}: {m}")
    w = ws[r] if sums[r] else laid_out(ws[r], own)
    (g,) = torch.autograd.grad(y, x, w)
    torch.testing.assert_close(g, right, msg=lambda m: f"{case}: gradient: {m}")


@pytest.mark.parametrize("where", RUNS)
@pytest.mark.parametrize("n", [2, 3])
def test_layouts_that_differ_from_rank_to_rank(where, n):
    if (where, n) == ("mpi", 3):
        pytest.skip("two ranks suffice")

    def body(r):
        torch.set_num_threads(1)
        chosen = [c for c in cases.table(n) if None not in c.shapes and c.dtype.itemsize >= 8]
        for i, case in enumerate(chosen):
            one_case(case, r, n, seed=i)
        return len(chosen)

    assert min(RUNS[where](body, range(n))) > 60


def test_sums_of_four_megabytes():
    """Transposed on rank 1, channels_last on rank 2, whose gradient is expanded."""

    def body(r):
        x = torch.randn(2, 8, 256, 256, generator=torch.Generator().manual_seed(r))
        right = sum(torch.randn(x.shape, generator=torch.Generator().manual_seed(s)) for s in range(3))
        mine = [x, x.transpose(2, 3).contiguous().transpose(2, 3), x.to(memory_format=torch.channels_last)][r]
        mine = mine.detach().requires_grad_()
        y = dc.all_reduce(mine)
        torch.testing.assert_close(y, right)
        (y.sum() if r == 2 else (r + 2) * y.square().sum()).backward()
        torch.testing.assert_close(mine.grad, 1 + (2 * 2 + 2 * 3) * right)
        return True

    assert gloo(body, range(3)) == [True] * 3


@runs_on("rules", "gloo")
def test_zeros_without_memory(run):
    """Forward mode has zero tensors without memory; they are sent like other tensors."""

    def body(r):
        x = torch.full((4,), 2.0 + r)
        x = torch._efficientzerotensor((4,)) if r == 0 else x
        calls = [dc.all_reduce, dc.all_gather, dc.shift, dc.reduce_scatter, partial(dc.broadcast, src=1), dc.scan]
        return [call(x).tolist() for call in calls]

    for r, found in enumerate(run(body, range(2))):
        kept = [[3.0] * 2, [3.0] * 4, [3.0 * r] * 4]
        assert found == [[3.0] * 4, [0.0] * 4 + [3.0] * 4, [3.0 * (1 - r)] * 4, *kept]


# ── decisions of engines ─────────────────────────────────────────────────────────────────────────────────


def test_mpi_calls_the_same_collectives_for_all_layouts():
    """Also whether in place, which in MPI all ranks must pass, or none."""

    def body(r):
        engine, calls = resolve(None, "test"), []
        do = mpi.MpiEngine._do

        def noting(self, name, arguments, memory):
            calls.append((name, [a[0] is self._mpi.IN_PLACE for a in arguments]))
            return do(self, name, arguments, memory)

        mpi.MpiEngine._do = noting
        mpi.SMALL = 0
        for later in (False, True):
            x = torch.arange(12.0).view(3, 4) + r
            mine = x.t().contiguous().t() if r else x
            y = torch.empty(3, 4)
            with engine.turn("test", later=later):
                engine.all_reduce(mine, y)()
            assert torch.equal(y, 2 * torch.arange(12.0).view(3, 4) + 1)
            z = dc.all_gather(mine, 1, async_op=later)
            assert torch.equal(z.wait() if later else z, torch.cat([x - r, x - r + 1], 1))
        return calls

    names = ["Allreduce", "Allgather"]
    expected = [(name, [later]) for later in (False, True) for name in names]
    assert spawn(body, range(2), backend="mpi") == [expected] * 2


def test_places_in_a_bucket_are_the_same_on_all_ranks():
    """They do not depend on the strides of the parameters."""

    def places(transposed):
        tensors = [torch.zeros(2, 3), torch.zeros(4, 5), torch.zeros(200, 200)]
        if transposed:
            tensors[0] = tensors[0].t().contiguous().t()
        parameters = [Parameter(i, str(i), t) for i, t in enumerate(tensors)]
        engine: Engine = resolve(None, "test")
        Bucket(parameters, torch.float32, torch.device("cpu"), engine)
        return [p.place.memory.storage_offset() for p in parameters]

    assert places(True) == places(False)


def embedded(weights, r, sparse):
    """Look rows of gathered and other weights up, and return the gradient of this rank's weight."""
    w = torch.arange(6.0).view(3, 2).add(r).requires_grad_()
    rows = torch.tensor([1, r, r])
    sum((r + 1) * F.embedding(rows, y, sparse=sparse).square().sum() for y in weights(w)).backward()
    return w.grad.to_dense()


#: Weights of an embedding, whose gradient may be sparse.
WEIGHTS = {
    "at once": lambda w: [dc.all_gather(w), dc.broadcast(w, 1), dc.all_reduce(w), dc.scan(w), dc.shift(w)],
    "later": lambda w: [y.wait() for y in [dc.all_gather(w, async_op=True), dc.all_reduce(w, async_op=True)]],
}


@runs_on("rules", "gloo")
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("of_ranks", [(0, 1, 2), (1,)], ids=["all", "one rank"])
def test_sparse_gradients(run, weights, of_ranks):
    def body(r):
        return [embedded(WEIGHTS[weights], r, sparse) for sparse in (False, r in of_ranks)]

    for dense, sparse in run(body, range(3)):
        torch.testing.assert_close(dense, sparse)
