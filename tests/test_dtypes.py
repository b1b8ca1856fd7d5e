"""Every dtype and memory layout, on gloo and simulated."""

import pytest
import torch

import diffcoll as dc
from diffcoll.testing import cases, simulate, spawn

N = 3
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
ADDS = ("all_reduce", "reduce_scatter", "reduce", "scan")


def simulated(*call):
    return simulate(*call, rules=True)


def numbers(case, rank, dtype):
    """The case's numbers in another dtype, small enough to be added up exactly in all of them."""
    x = case.x(rank, seed=3)
    if x is None:
        return None
    scaled = (x * 4).round().clamp(-12, 12)
    return (scaled.abs() if dtype == torch.uint8 else scaled).to(dtype)


@pytest.mark.parametrize("run", [simulated, spawn], ids=["rules", "gloo"])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_every_collective(run, dtype):
    table = [
        case
        for case in cases.table(N)
        if not (dtype == torch.bool and (case.name in ADDS or "op" in case.arguments))
        and not (dtype in INTEGERS and case.arguments.get("op") in ("mean", "logsumexp", cases.largest_whole))
        and not (dtype.is_complex and case.arguments.get("op") in ("max", "min", cases.median))
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_in_half_precision(dtype):
    def body(r):
        x = torch.tensor([1.0 + r, 2.0], dtype=dtype, requires_grad=True)
        (dc.all_reduce(x, "mean").square().sum() * (r + 1)).backward()
        return x.grad

    for g in spawn(body, range(N)):  # y = (2, 2); Σ (r + 1) 2 y / 3
        assert g.dtype == dtype
        assert g.tolist() == [8, 8]


@pytest.mark.parametrize("run", [simulated, spawn], ids=["rules", "gloo"])
def test_half_precisions_are_added_up_in_single(run):
    def body(r):
        big = torch.tensor([60000.0, 60000.0, -60000.0][r : r + 1], dtype=torch.float16)
        # 256 + 1 is 256 in bfloat16: added one by one the ones would be lost
        small = torch.tensor([256.0, 1.0, 1.0][r : r + 1], dtype=torch.bfloat16)
        mean = torch.full((1,), 65504.0 - 32 * r, dtype=torch.float16)
        return dc.all_reduce(big).item(), dc.all_reduce(small).item(), dc.all_reduce(mean, "mean").item()

    assert run(body, range(N)) == [(60000, 258, 65472)] * N


@pytest.mark.parametrize("run", [simulated, spawn], ids=["rules", "gloo"])
def test_layouts_that_differ_from_rank_to_rank(run):
    """What travels is the numbers, not the memory: ranks may lay the same shape out differently."""

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


@pytest.mark.parametrize("run", [simulated, spawn], ids=["rules", "gloo"])
def test_lazy_conjugates(run):
    """x.conj() and the imaginary part of a conjugate are views with a flag; what is sent has to be the numbers."""

    def body(r):
        z = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128) * (r + 1)
        z.requires_grad_()
        y = dc.all_gather(z.conj(), stack=True)
        negative = dc.all_reduce(z.detach().conj().imag)
        weights = torch.tensor([[1j], [2.0], [3 + 1j]], dtype=torch.complex128) * (r + 1)
        (weights * y).sum().real.backward()
        return y.detach().resolve_conj(), negative.resolve_neg(), z.grad.resolve_conj()

    for r, (y, negative, g) in enumerate(run(body, range(N))):
        assert torch.equal(y[1], torch.tensor([2 - 4j, 6 + 2j], dtype=torch.complex128))
        assert negative.tolist() == [-12, 6]
        # ℓ = Re Σ w conj(z): the gradient, in PyTorch's convention, is w summed over ranks, 1 + 2 + 3 times
        assert torch.equal(g, torch.full((2,), 6 * [1j, 2, 3 + 1j][r], dtype=torch.complex128))


def test_inference_and_no_grad():
    def body(r):
        with torch.inference_mode():
            a = dc.reduce_scatter(torch.ones(4, 3) * r, dim=1)
        with torch.no_grad():
            b = dc.reduce_scatter(torch.ones(4, 3, requires_grad=True) * r, dim=1)
        c = dc.reduce_scatter(torch.ones(4, 3, requires_grad=True) * r, dim=1)
        return a.sum().item(), b.requires_grad, c.requires_grad, c.is_inference()

    assert spawn(body, range(N)) == [(12, False, True, False)] * N
