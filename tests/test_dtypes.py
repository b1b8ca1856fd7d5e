"""Every dtype and memory layout, on gloo and simulated."""

import re

import calls
import pytest
import torch
from runs import mpi, rules, runs_on

import diffcoll as dc
from diffcoll.core import arguments
from diffcoll.core.reductions import REDUCTIONS
from diffcoll.testing import cases
from diffcoll.testing.cases import Case

N = 3
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
ADDS = ("all_reduce", "reduce_scatter", "reduce", "scan")


def numbers(case, rank, dtype):
    """Return the case's values in another dtype, small enough for exact sums in all of them."""
    x = case.x(rank, seed=3)
    scaled = (x * 4).round().clamp(-12, 12)
    return (scaled.abs() if dtype == torch.uint8 else scaled).to(dtype)


@runs_on("rules", "gloo", "mpi")
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_every_collective(run, dtype):
    table = [
        case
        for case in cases.table(N)
        if not (dtype == torch.bool and (case.name in ADDS or "op" in case.arguments))
        and not (dtype in INTEGERS and case.arguments.get("op") in ("mean", "logsumexp"))
        and not (dtype.is_complex and case.arguments.get("op") in calls._ORDERED)
    ]
    assert len(table) > 20

    def body(r):
        return [case.call(numbers(case, r, dtype), r) for case in table]

    got = run(body, range(N))
    for i, case in enumerate(table):
        expected = case.truth([numbers(case, r, dtype) for r in range(N)])
        for r in range(N):
            assert got[r][i].dtype == dtype, case
            torch.testing.assert_close(got[r][i], expected[r], msg=f"{case}, rank {r}")
            assert not got[r][i].requires_grad


@runs_on("rules", "gloo")
def test_half_precisions_are_added_up_in_single(run):
    def body(r):
        # each rank's numbers at another place, so that some element shows it whatever the order of the sum
        big = torch.tensor([60000.0, 60000.0, -60000.0], dtype=torch.float16).roll(r)
        # 256 + 1 is 256 in bfloat16: successive sums in bfloat16 would lose the ones
        small = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16).roll(r)
        mean = torch.full((1,), 65504.0 - 32 * r, dtype=torch.float16)
        return dc.all_reduce(big).tolist(), dc.all_reduce(small).tolist(), dc.all_reduce(mean, "mean").item()

    assert run(body, range(N)) == [([60000] * N, [258] * N, 65472)] * N


@runs_on("rules", "gloo")
def test_layouts_that_differ_from_rank_to_rank(run):
    """Ranks may use different layouts of the same shape: values are sent, not memory."""

    def body(r):
        x = torch.arange(24.0).reshape(1, 2, 3, 4) + 100 * r
        x = (x, x.to(memory_format=torch.channels_last), torch.stack([x, -x], -1)[..., 0])[r]
        assert x.shape == (1, 2, 3, 4)
        before = x.clone()
        ys = dc.all_reduce(x), dc.broadcast(x, 1), dc.shift(x), dc.all_to_all(x, 2, 1), dc.scan(x)
        assert torch.equal(x, before)
        return ys

    got = run(body, range(N))
    base = torch.arange(24.0).reshape(1, 2, 3, 4)
    for r in range(N):
        total, sent, shifted, moved, running = got[r]
        assert torch.equal(total, 3 * base + 300)
        assert torch.equal(sent, base + 100)
        assert torch.equal(shifted, base + 100 * ((r - 1) % N))
        assert torch.equal(moved, torch.cat([base[:, :, r : r + 1] + 100 * s for s in range(N)], 1))
        assert torch.equal(running, (r + 1) * base + 100 * sum(range(r + 1)))


@runs_on("rules", "gloo", "mpi")
def test_lazy_conjugates(run):
    """x.conj() and the imaginary part of a conjugate are lazy views; the values must be sent."""

    def body(r):
        z = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128) * (r + 1)
        z.requires_grad_()
        y = dc.all_gather(z.conj(), stack=True)
        negative = dc.all_reduce(z.detach()[:1].conj().imag)  # contiguous
        weights = torch.tensor([[1j], [2.0], [3 + 1j]], dtype=torch.complex128) * (r + 1)
        (weights * y).sum().real.backward()
        return y.detach().resolve_conj(), negative.resolve_neg(), z.grad.resolve_conj()

    for r, (y, negative, g) in enumerate(run(body, range(N))):
        assert torch.equal(y[1], torch.tensor([2 - 4j, 6 + 2j], dtype=torch.complex128))
        assert negative.tolist() == [-12]
        # ℓ = Re Σ w conj(z): in PyTorch's convention the gradient is w summed over ranks, (1 + 2 + 3) w
        assert torch.equal(g, torch.full((2,), 6 * [1j, 2, 3 + 1j][r], dtype=torch.complex128))


UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
ONLY_MOVED = [dtype for name, dtype in vars(torch).items() if name.startswith("float8_") or name == "bcomplex32"]
#: What PyTorch itself cannot copy or concatenate.
OPAQUE = [
    dtype
    for name, dtype in sorted(vars(torch).items())
    if isinstance(dtype, torch.dtype) and re.match(r"u?int[1-7]$|bits|float4_", name)
]
OPS = [Case(name, ((3, 2),) * N, {"op": op}) for name in ADDS[:3] for op in REDUCTIONS]


def test_no_dtype_is_forgotten():
    known = {*FLOATS, *INTEGERS, torch.bool, *UNSIGNED, *ONLY_MOVED, *OPAQUE, torch.complex32}
    quantized = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
    assert {d for d in vars(torch).values() if isinstance(d, torch.dtype)} == known | quantized
    assert arguments.MOVED == known - {*OPAQUE}
    assert arguments.ADDED == known - {*OPAQUE, *UNSIGNED, *ONLY_MOVED, torch.bool}


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
@runs_on("rules", "gloo", "mpi")
def test_a_rare_dtype_works_or_is_an_error_of_its_own_rank(run):
    """The same error on all engines, before anything is sent, without a text about other ranks."""
    dtypes = [*UNSIGNED, *ONLY_MOVED, *OPAQUE, torch.complex32]
    dtypes = [torch.uint16, torch.float8_e5m2, torch.int4, torch.complex32] if run is mpi else dtypes
    table = [case for case in [*cases.table(N), *OPS] if not case.few]

    def wide(case, r, dtype):
        kind = torch.complex64 if dtype.is_complex else torch.float32
        x = numbers(case, r, kind)
        return x if dtype.is_complex else x.abs()

    def rare(case, r, dtype):
        x = wide(case, r, dtype)
        return torch.empty(x.shape, dtype=dtype) if dtype in OPAQUE else x.to(dtype)

    def body(r):
        found = {}
        for dtype in dtypes:
            for i, case in enumerate(table):
                try:
                    y = case.call(rare(case, r, dtype), r)
                    assert y.dtype == dtype
                    found[str(dtype), i] = y.to(torch.complex64 if dtype.is_complex else torch.float32)
                except (TypeError, dc.CollectiveMismatchError) as error:
                    found[str(dtype), i] = f"{type(error).__name__}: {error}"
        return found, dc.all_reduce(torch.tensor(r)).item()

    everything = run(body, range(N))
    assert [total for _, total in everything] == [3] * N
    for dtype in dtypes:
        for i, case in enumerate(table):
            of_ranks = [found[str(dtype), i] for found, _ in everything]
            op = case.arguments.get("op", "sum" if case.name in ADDS else None)
            if op in ("max", "min") if dtype == torch.complex32 else dtype in OPAQUE or op is not None:
                for error in of_ranks:
                    assert re.match(rf"TypeError: {case.name}: (x|op): got .*{dtype}, expected ", error), error
                continue
            expected = case.truth([wide(case, r, dtype) for r in range(N)])
            for a, b in zip(of_ranks, expected, strict=True):
                if op is not None:
                    torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3, msg=f"{case} {dtype}")
                else:
                    torch.testing.assert_close(a, b.to(dtype).to(a.dtype), rtol=0, atol=0, msg=f"{case} {dtype}")


def test_gradients_that_cannot_be_added_up():
    x = torch.ones(4).to(torch.float8_e5m2).requires_grad_()
    for collective in (dc.all_gather, dc.broadcast, dc.shift, dc.scatter, dc.sum_gradients):
        with pytest.raises(
            TypeError, match=r"x: got torch.float8_e5m2 that requires a gradient, expected a dtype whose"
        ):
            collective(x)
        with torch.no_grad():
            assert collective(x).dtype == x.dtype
        assert not collective(x.detach()).requires_grad


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
@runs_on("rules", "truth")
def test_replicated_tensors_of_every_dtype_are_compared(run):
    checked = run is rules

    def body(r, dtype, differs):
        x = torch.tensor([2.0, 0.0, 4.0, 2.0, 0.5, 1.0]).to(dtype)
        if differs and r == 2:
            x[2:] = torch.zeros(4).to(dtype)
        with dc.check_mode(checked):
            y = dc.sum_gradients(x)
            return y, dc.split(x)

    def number(y):
        return y.to(torch.complex128 if y.is_complex() else torch.float64).tolist()

    for dtype in sorted(arguments.MOVED, key=str):
        x = torch.tensor([2.0, 0.0, 4.0, 2.0, 0.5, 1.0]).to(dtype)
        for r, (y, part) in enumerate(run(body, range(N), [dtype] * N, [False] * N)):
            assert y.dtype == part.dtype == dtype
            assert number(y) == number(x) and number(part) == number(x[2 * r : 2 * r + 2])
        with pytest.raises(dc.CollectiveMismatchError if checked else Exception, match="rank 0 and rank 2"):
            run(body, range(N), [dtype] * N, [True] * N)


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16])
@runs_on("rules", "gloo")
def test_autocast_to_the_other_half_precision(run, to):
    """Of which PyTorch's cat gives an error, on some ranks only."""
    other = torch.bfloat16 if to == torch.float16 else torch.float16

    def body(r):
        found = []
        for enabled in (False, r != 1):
            x = torch.arange(4.0).add(r).to(other).requires_grad_()
            with torch.autocast("cpu", to, enabled=enabled):
                ys = dc.all_reduce([x, x.sum()]), dc.all_gather([x], sizes="auto"), [dc.all_reduce(x, "max")]
                y = torch.cat([y.view(-1).float() for y in (*ys[0], *ys[1], *ys[2])])
            y.square().sum().backward()
            found.append((y.detach(), x.grad))
        return found

    for plain, cast in run(body, range(3)):
        torch.testing.assert_close(plain, cast)
