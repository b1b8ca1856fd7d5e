"""Every dtype and memory layout, on gloo and simulated."""

import re

import pytest
import torch
from runs import mpi, rules, runs_on

import diffcoll as dc
from diffcoll.core.reductions import REDUCTIONS
from diffcoll.testing import cases
from diffcoll.testing.cases import Case

N = 3
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
COMMON = [*FLOATS, *INTEGERS, torch.bool]
QUANTIZED = [torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4]
RARE = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)} - {*COMMON, *QUANTIZED}, key=str)
#: What PyTorch itself cannot copy or concatenate.
OPAQUE = [dtype for dtype in RARE if re.match(r"torch\.(u?int[1-7]$|bits|float4_)", str(dtype))]
ADDS = ("all_reduce", "reduce_scatter", "reduce", "scan")
TABLE = [
    *(case for case in cases.table(N) if not callable(case.arguments.get("op"))),
    *(Case(name, ((3, 2),) * N, {"op": op}) for name in ADDS[:3] for op in REDUCTIONS),
]


def wide(dtype):
    """The dtype in which results are compared."""
    return dtype if dtype in COMMON else torch.complex64 if dtype.is_complex else torch.float32


def numbers(case, rank, dtype):
    """Return the case's values, small enough for exact sums in all dtypes."""
    scaled = (case.x(rank, seed=3) * 4).round().clamp(-12, 12)
    signed = dtype.is_complex or (dtype in COMMON and dtype != torch.uint8)
    return (scaled if signed else scaled.abs()).to(wide(dtype))


def is_refused(case, dtype):
    """Whether the call is a TypeError for this dtype."""
    op = case.arguments.get("op", "sum" if case.name in ADDS else None)
    if op is None or dtype in OPAQUE:
        return dtype in OPAQUE
    if dtype in RARE and dtype != torch.complex32:
        return True
    if dtype.is_complex or dtype == torch.bool:
        return (op in ("max", "min")) == dtype.is_complex
    return dtype in INTEGERS and op in ("mean", "logsumexp")


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
@pytest.mark.parametrize("dtypes", [FLOATS, [*INTEGERS, torch.bool], RARE], ids=["floats", "integers", "rare"])
@runs_on("rules", "gloo", "mpi")
def test_a_dtype_works_or_is_an_error_of_its_own_rank(run, dtypes):
    """Values are those of truth; errors are the same on all engines, and nothing has been sent before."""
    if run is mpi and dtypes is RARE:
        dtypes = [torch.uint16, torch.float8_e5m2, torch.int4, torch.complex32]

    def attempt(case, r, dtype):
        x = numbers(case, r, dtype)
        try:
            y = case.call(torch.empty(x.shape, dtype=dtype) if dtype in OPAQUE else x.to(dtype), r)
        except (TypeError, dc.CollectiveMismatchError) as error:
            return f"{type(error).__name__}: {error}"
        assert y.dtype == dtype
        return y.to(wide(dtype))

    def body(r):
        with dc.check_mode(run is rules):  # which compares replicated tensors of every dtype, too
            found = [attempt(case, r, dtype) for dtype in dtypes for case in TABLE]
        return found, dc.all_reduce(torch.tensor(r)).item()

    founds, totals = zip(*run(body, range(N)), strict=True)
    assert totals == (3,) * N
    of_calls = zip(*founds, strict=True)
    for dtype in dtypes:
        for case in TABLE:
            found = next(of_calls)
            if is_refused(case, dtype):
                for text in found:
                    assert re.match(rf"TypeError: {case.name}: (x|op): ", text), (case, dtype, text)
                continue
            tolerance = {"rtol": 2e-2, "atol": 1e-3} if dtype == torch.complex32 else {}
            expected = case.truth([numbers(case, r, dtype) for r in range(N)])
            for y, right in zip(found, expected, strict=True):
                torch.testing.assert_close(y, right.to(dtype).to(y.dtype), **tolerance, msg=f"{case} {dtype}")


@runs_on("rules", "gloo")
def test_half_precisions_are_added_up_in_single(run):
    def body(r):
        # each rank's numbers at another place, so that some element shows it whatever the order of the sum
        big = torch.tensor([60000.0, 60000.0, -60000.0], dtype=torch.float16).roll(r)
        # 256 + 1 is 256 in bfloat16: successive sums in bfloat16 would lose the ones
        small = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16).roll(r)
        return dc.all_reduce(big).tolist(), dc.all_reduce(small).tolist()

    assert run(body, range(N)) == [([60000] * N, [258] * N)] * N


@runs_on("rules", "gloo")
def test_layouts_that_differ_from_rank_to_rank(run):
    """Ranks may use different layouts of the same shape: values are sent, not memory."""
    calls = {"all_reduce": (), "broadcast": (1,), "shift": (), "all_to_all": (2, 1), "scan": ()}
    xs = [torch.arange(24.0).reshape(1, 2, 3, 4) + 100 * r for r in range(N)]

    def body(r):
        x = (xs[0], xs[1].to(memory_format=torch.channels_last), torch.stack([xs[2], -xs[2]], -1)[..., 0])[r]
        before = x.clone()
        ys = [getattr(dc, name)(x, *arguments) for name, arguments in calls.items()]
        assert torch.equal(x, before)
        return ys

    for (name, arguments), of_ranks in zip(calls.items(), zip(*run(body, range(N)), strict=True), strict=True):
        assert all(map(torch.equal, of_ranks, getattr(dc.truth, name)(xs, *arguments))), name


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
