"""Some ranks run a compiled function and others the same function uncompiled: right, or an error on every rank."""

import itertools

import pytest
import torch
from releases import compiles, one_graph

import diffcoll as dc
from diffcoll.testing import simulate, spawn

pytestmark = [pytest.mark.timeout(300), compiles]


def numbers(r, rows=6):
    return torch.linspace(0.4 + 0.1 * r, 1.3 - 0.2 * r, 2 * rows, dtype=torch.float64).view(rows, 2).requires_grad_()


def gradients(f, *xs):
    return torch.autograd.grad(f(*xs), xs)


def raised(f, *xs):
    with pytest.raises(Exception) as caught:
        f(*xs)
    return type(caught.value).__name__, str(caught.value)


# ── scatter ──────────────────────────────────────────────────────────────────────────────────────────────


def scatters(x, r):
    later = dc.scatter(x.cos(), 1, sizes=[1, 2, 3], async_op=True)
    y = dc.scatter(x * 2, src=2)
    a, b = dc.scatter((x.sin(), x.float()[:3]), src=0)
    return ((r + 2) * (y.square() + a)).sum() + ((r + 3) * b.double().square()).sum() + (r * later.wait().exp()).sum()


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def test_scatter(backend):
    def body(r):
        x = numbers(r)
        compiled = one_graph(lambda x: scatters(x, r))
        return [
            gradients(compiled if which[r] else lambda x: scatters(x, r), x)[0]
            for which in itertools.product((False, True), repeat=3)
        ]

    xs = [numbers(r) for r in range(3)]
    torch.autograd.backward(simulate(scatters, xs, range(3)))
    for x, found in zip(xs, spawn(body, range(3), backend=backend, timeout=200), strict=True):
        for g in found:
            torch.testing.assert_close(g, x.grad, rtol=1e-6, atol=1e-6)  # one leaf is float32


def test_a_scatter_of_another_tensor_than_was_compiled_is_an_error_on_every_rank():
    def body(r):
        def compiled(x, **options):
            return one_graph(lambda x: dc.scatter(x, **options))(x)

        x = torch.arange(6.0) + r
        on_one = compiled if r == 1 else dc.scatter
        texts = [
            raised(lambda: on_one(x[:3] if r == 1 else x)),
            raised(lambda: on_one(x.double() if r == 1 else x)),
            raised(lambda: compiled(x.view(3, 2) if r == 1 else x.view(6, 1))),
            raised(lambda: compiled(x, sizes=[3, 3, 0] if r == 1 else None)),
            raised(lambda: compiled(x.clone().requires_grad_() if r == 0 else x)),
            raised(lambda: on_one([x, x] if r == 1 else [x])),
            raised(lambda: compiled([x] if r == 1 else x)),
            raised(lambda: compiled(x, src=int(r == 1))),
        ]
        return texts, dc.all_reduce(torch.tensor([r + 1.0])).tolist()

    for texts, after in spawn(body, range(3), timeout=200):
        other = "scatter: x: rank 1 was compiled for another shape, dtype, device or requires_grad of x, dim or sizes"
        structure = "scatter: x: got another structure on rank 1, expected a tree with the paths of rank 0's"
        tree = "scatter: x: got a tree on rank 1, expected a tensor or None"
        source = "scatter: src: got 0, 1, 0 on the ranks in order, expected the same on all"
        expected = [other] * 5 + [structure, tree, source]
        for (kind, text), start in zip(texts, expected, strict=True):
            assert (kind, text[: len(start)]) == ("CollectiveMismatchError", start)
        assert after == [6]
