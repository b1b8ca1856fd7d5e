"""torch.compile(fullgraph=True): every call equals eager, in order, without a graph break or a new graph."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import diffcoll as dc
from diffcoll.testing import cases, simulate, spawn

pytestmark = pytest.mark.timeout(300)
SEED = 1


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("n", "backend"), [(2, "aot_eager"), pytest.param(3, "inductor", marks=pytest.mark.slow)])
def test_the_whole_table_in_one_graph(n, backend):
    def body(r):
        table = [case for case in cases.table(n) if None not in case.shapes]
        assert len(table) > 50

        def program(xs):
            return [case.call(x, r) for case, x in zip(table, xs, strict=True)]

        compiled = torch.compile(program, fullgraph=True, backend=backend)
        found = cases.together_on_rank(table, r, SEED, compiled)
        assert graphs() == 1
        truth = [cases.in_truth(case, SEED, orders=1) for case in table]
        pairs = zip(table, found, truth, strict=True)
        return [(f"{case.name}({case.label})", max(cases.errors(m, t, r).values())) for case, m, t in pairs]

    for of_rank in spawn(body, range(n), timeout=280):
        for what, error in of_rank:
            assert error < 1e-12, what


def test_order_is_kept_and_nothing_is_dropped():
    """Collectives that do not depend on each other, of other sizes on every rank, and results that a rank ignores."""

    def program(x, r):
        a = dc.all_gather(x.repeat(1 + 3 * r, 1), sizes="auto")
        b = dc.all_reduce(x.exp().sum(0), "max")
        c = dc.all_gather(x.sin().repeat(8 - 7 * r, 1), sizes=[16, 2])
        d = dc.broadcast(x.cos(), src=1)
        e = dc.reduce_scatter(x.tanh())
        unused = dc.all_reduce(x * 2)
        again = dc.all_reduce(x * 2)
        if r == 0:
            return a.sum() + (c * c).sum() + d.sum() + e.sum() + b.sum() + again.sum() + 0 * unused.sum()
        return e.square().sum() + d.sum() + c.sum() + b.sum() + a.square().sum() + unused.sum() + again.sum()

    def body(r):
        x = torch.linspace(-1, 1 + r, 8, dtype=torch.float64).view(2, 4).requires_grad_()
        y = torch.compile(lambda x: program(x, r), fullgraph=True)(x)
        (g,) = torch.autograd.grad(y, x)
        z = program(x, r)
        (h,) = torch.autograd.grad(z, x)
        ignoring = torch.compile(lambda x: (dc.all_reduce(x), dc.all_reduce(x + 1))[r], fullgraph=True)
        return y - z, (g - h).abs().max(), ignoring(x.detach())[0, 0].item()

    found = spawn(body, range(2), timeout=60)
    assert all(max(abs(y), g) < 1e-12 for y, g, _ in found)
    assert [value for *_, value in found] == [-2, 0]


def test_one_graph_for_all_steps_and_batch_sizes():
    def loss(x, w):
        y = dc.all_gather(x @ w, sizes="auto")
        z = dc.all_gather(x @ w)
        similar = torch.nn.functional.normalize(z) @ z.T
        products = dc.all_reduce((x @ w).sum(1), "product")
        return similar.logsumexp(1).sum() + y.square().sum() + products.sin().sum()

    def body(r):
        w = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
        compiled = torch.compile(loss, fullgraph=True, dynamic=True)
        errors = []
        for batch in (4, 5, 9, 4):
            x = torch.randn(batch, 3, generator=torch.Generator().manual_seed(batch + r), dtype=torch.float64)
            (g,), (h,) = (torch.autograd.grad(f(x, w), w) for f in (compiled, loss))
            errors.append(float((g - h).abs().max() / h.abs().max()))
        return max(errors), graphs()

    for error, count in spawn(body, range(2), timeout=60):
        assert error < 1e-12
        assert count == 1


def test_groups_meshes_transforms_and_messages():
    def raised(fn, *arguments):
        try:
            torch.compile(fn, fullgraph=True, backend="aot_eager")(*arguments)
        except Exception as error:
            return str(error)
        return ""

    def body(r):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

        def program(x):
            pair = dc.all_reduce(x, group=groups[r % 2])
            row, column = dc.all_gather(x, group=mesh["b"]), dc.all_reduce(x, "max", mesh["a"])
            return pair.sum() + (row * (r + 1)).sum() + column.sum()

        x = torch.tensor([r + 1.0, -r], requires_grad=True)
        compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
        (g,), (h,) = (torch.autograd.grad(f(x), x) for f in (compiled, program))

        mapped = torch.compile(torch.func.vmap(dc.all_reduce), fullgraph=True, backend="aot_eager")(x).tolist()
        loss = lambda x: dc.all_reduce(x).square().sum()  # noqa: E731
        refused = [raised(torch.func.grad(loss), x.detach())]
        refused.append(raised(lambda x: torch.func.jvp(loss, (x,), (x,)), x.detach()))
        with dc.set_default_group(groups[r % 2]):
            default = torch.compile(dc.all_reduce, fullgraph=True, backend="aot_eager")(x).tolist()
        again = torch.compile(dc.all_reduce, fullgraph=True, backend="aot_eager")(x).tolist()
        wrong = raised(lambda x: dc.all_reduce(x, "mode"), x)
        none = raised(lambda x: dc.scatter(None), x)
        return (g - h).tolist(), refused, mapped, default, again, wrong, none

    for r, (apart, refused, mapped, default, again, wrong, none) in enumerate(spawn(body, range(4), timeout=60)):
        assert apart == [0, 0]
        assert all("within torch.func.grad, vjp, jvp, … or forward_ad cannot be compiled" in text for text in refused)
        assert mapped == again
        assert default == [4 + 2 * (r % 2), -2 - 2 * (r % 2)]
        assert again == [10, -6]
        assert "all_reduce: op: got mode, expected" in wrong
        assert "scatter: x: got None, expected a tensor on every rank under torch.compile" in none


def test_a_simulated_world_is_refused():
    compiled = torch.compile(dc.all_reduce, fullgraph=True, backend="aot_eager")
    for rules in (True, False):
        with pytest.raises(Exception, match=r"torch\.compile does not work within a simulated world"):
            simulate(compiled, [torch.ones(2)] * 2, rules=rules)


def test_the_world_of_one_compiles_and_eager_code_pays_no_import():
    code = (
        "import sys, torch, diffcoll as dc\n"
        "x = torch.ones(2, requires_grad=True)\n"
        "dc.all_reduce(x, 'product').sum().backward()\n"
        "assert not {'torch._dynamo', 'torch._inductor.lowering'} & set(sys.modules)\n"
        "torch.compile(lambda x: dc.all_reduce(x).sum(), fullgraph=True, backend='aot_eager')(x).backward()\n"
        "assert x.grad.tolist() == [2, 2]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_tensors_left_by_a_transform():
    """They are wrapped still; PyTorch's own ops unwrap them, and so do we."""
    left = []
    torch.func.grad(lambda x: left.append(x * 2) or x.sum())(torch.ones(3))
    assert dc.all_reduce(left[0]).tolist() == [2, 2, 2]
    assert simulate(lambda r: dc.all_gather(left[0]).tolist(), range(2), rules=True) == [[2] * 6] * 2
