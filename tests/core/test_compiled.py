"""torch.compile(fullgraph=True): every call equals eager, in order, without graph breaks or recompilation."""

import importlib
import itertools
import os
import re
import tempfile
from functools import partial

import properties
import pytest
import torch
import torch.distributed as dist
from releases import compiles, generated, one_graph
from runs import MPI_TOO, python, refusal, rules, runs_on, spawned, truth
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.tensor import Replicate
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint

import diffcoll as dc
from diffcoll.testing import cases, spawn

pytestmark = [pytest.mark.timeout(300), compiles]
SEED = 1


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def gradient(f, x, *more):
    return torch.autograd.grad(f(x, *more), x)[0]


def same(found, expected):
    torch.testing.assert_close(found, expected)


# ── every call, in one graph ─────────────────────────────────────────────────────────────────────────────


def of_table(table, r, compiler):
    """The calls of a table in one program: their names, and how far results and gradients are from those of truth."""

    def program(xs):
        return [case.call(x, r) for case, x in zip(table, xs, strict=True)]

    first = partial(cases.derivatives, orders=1)
    found = first([(case, r) for case in table], compiler(program), SEED)
    expected = [cases.in_truth(case, SEED, first) for case in table]
    pairs = zip(table, found, expected, strict=True)
    return [(f"{case.name}({case.label})", max(cases.errors(m, t, r).values())) for case, m, t in pairs]


@pytest.mark.parametrize(
    ("n", "compiler", "select"),
    [
        (2, one_graph, properties.once),
        pytest.param(2, one_graph, list, marks=pytest.mark.slow),
        pytest.param(3, generated, list, marks=pytest.mark.slow),
    ],
)
def test_the_whole_table_in_one_graph(n, compiler, select):
    def body(r):
        return of_table(select(cases.table(n)), r, compiler), graphs()

    for errors, count in spawn(body, range(n), timeout=280):
        assert count == 1
        for what, error in errors:
            assert error < 1e-12, what


@pytest.mark.parametrize("backend", ["gloo", MPI_TOO])
def test_ranks_may_be_compiled_or_not(backend):
    """With `async_op` all ranks are, or none is."""
    table = [case for case in properties.once(cases.table(3)) if "async_op" not in case.arguments]
    ways = [(True, False, False), (False, True, True)]

    def body(r):
        return [of_table(table, r, one_graph if way[r] else lambda program: program) for way in ways]

    for of_rank in spawned(body, range(3), backend=backend, timeout=280):
        for way, errors in zip(ways, of_rank, strict=True):
            for what, error in errors:
                assert error < 1e-12, (what, way)


class Doubled(torch.autograd.Function):
    """The identity, whose backward calls collectives."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gy):
        later = dc.all_reduce(gy * 3, async_op=True)
        block = dc.reduce_scatter(dc.all_gather(gy, dim=1), "max", dim=1)
        return later.wait() + dc.sum_gradients(gy) + dc.all_reduce([block], "product")[0]


def in_the_backward_of_a_users_function(x, r):
    return (Doubled.apply(x.sin()) * torch.tensor([[1.0 + r, 2.0], [3.0, 4.0 - r]], dtype=x.dtype)).sum()


def sizes_that_are_known_at_run_time_only(x, r):
    """The reduction is by parts, however small x is."""
    return ((r + 2) * dc.all_reduce(dc.gather_batch(x).tree, "max")).sum()


def awaited_in_another_order(x, r):
    calls = [dc.all_reduce, dc.all_gather, partial(dc.all_reduce, op="product"), partial(dc.gather, dst=1)]
    pending = [call(x * (0.3 * i + 1), async_op=True) for i, call in enumerate(calls)]
    later = dc.scan(x.sin())
    return sum(((i + 1.0) * (r + 2) * pending[i].wait().cos()).sum() for i in (2, 0, 3, 1)) + later.sum()


def mapped(x, r):
    later = torch.func.vmap(lambda x: dc.all_gather(x, async_op=True).wait() * (r + 1), 1, 1)(x)[:2]
    weights = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=x.dtype)  # else the sum is that of the transposed results
    return (weights * later * torch.func.vmap(partial(dc.all_gather, dim=0), 1)(x.sin())[:, :2].T).sum()


REPLICATE = Replicate()


def traced_python(x, r):
    """A tree, keyword spellings, and a placement of DTensor."""
    y = dc.all_reduce({"a": x, "b": [x.float(), None]}, op="mean", grad_placement=REPLICATE)
    return (y["a"] * dc.gather(x, dst=1, dim=-1, sizes=[2, 2]).sum()).sum() + y["b"][0].double().square().sum()


@pytest.mark.parametrize(
    "program",
    [
        in_the_backward_of_a_users_function,
        sizes_that_are_known_at_run_time_only,
        awaited_in_another_order,
        mapped,
        traced_python,
    ],
)
def test_programs(program):
    def body(r):
        x = torch.tensor([[1.0, 2.0 + r], [0.5, r]], dtype=torch.float64, requires_grad=True)
        return [gradient(f, x) for f in (lambda x: program(x, r), one_graph(lambda x: program(x, r)))]

    for eager, compiled in spawn(body, range(2), timeout=200):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("compiler", [one_graph, pytest.param(generated, marks=pytest.mark.slow)])
def test_dynamic_sizes_need_at_most_two_graphs(compiler):
    def loss(x, w):
        y = dc.all_gather(x @ w, sizes="auto")
        z = dc.all_gather(x @ w)
        similar = torch.nn.functional.normalize(z) @ z.T
        products = dc.all_reduce((x @ w).sum(1), "product")
        return similar.logsumexp(1).sum() + y.square().sum() + products.sin().sum()

    def body(r):
        w = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
        compiled, automatic = compiler(loss, dynamic=True), compiler(lambda x, w: loss(x, w))
        errors, counts = [], []
        for f in (compiled, automatic):
            before = graphs()
            for batch in (4, 5, 9, 4, 7):
                x = torch.randn(batch, 3, generator=torch.Generator().manual_seed(batch + r), dtype=torch.float64)
                g, h = (gradient(lambda w, f=f, x=x: f(x, w), w) for f in (f, loss))
                errors.append(float((g - h).abs().max() / h.abs().max()))
            counts.append(graphs() - before)
        marked = torch.ones(4 if r == 0 else 0, 2)  # a size that stays symbolic as an argument
        if r == 0:
            torch._dynamo.mark_dynamic(marked, 0)
        total = one_graph(lambda x: dc.all_gather(x, sizes=[x.shape[0], 0] if r == 0 else [4, 0]).sum(0))(marked)
        return max(errors), counts, total.tolist()

    for error, counts, total in spawn(body, range(2), timeout=200):
        assert error < 1e-12
        assert counts[0] == 1 and counts[1] <= 2
        assert total == [4, 4]


def test_groups_and_meshes():
    def body(r):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

        def program(x):
            pair = dc.all_reduce(x, group=groups[r % 2])
            row, column = dc.all_gather(x, group=mesh["b"]), dc.all_reduce(x, "max", group=mesh["a"])
            return pair.sum() + (row * (r + 1)).sum() + column.sum()

        x = torch.tensor([r + 1.0, -r], requires_grad=True)
        same(gradient(one_graph(program), x), gradient(program, x))
        with dc.set_default_group(groups[r % 2]):
            default = one_graph(dc.all_reduce)(x).tolist()
        return default, one_graph(dc.all_reduce)(x).tolist()

    for r, found in enumerate(spawn(body, range(4), timeout=110)):
        assert found == ([4 + 2 * (r % 2), -2 - 2 * (r % 2)], [10, -6])


FIRST_USE = """
import sys, torch, diffcoll as dc
x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
dc.all_reduce(x, "product").sum().backward()
assert not {"torch._dynamo", "torch._inductor.lowering"} & set(sys.modules)

def program(x):
    batch = dc.gather_batch(x)
    assert isinstance(batch, dc.GatheredBatch)
    blocks = [block * (r + 2) for r, block in dc.ring(x)]
    return batch[0] * 3 + blocks[0] + dc.truth.all_reduce([x * 7])[0] + dc.nn.functional.clip_loss(x, x.flip(1), 2.0)

compiled = torch.compile(program, fullgraph=True, backend="aot_eager")(x)
torch.testing.assert_close(compiled, program(x))
"""


def test_one_rank_compiles_names_at_their_first_use_and_eager_code_pays_no_import():
    python("-c", FIRST_USE)


# ── order, and results that are not used ─────────────────────────────────────────────────────────────────


def test_order_is_kept_and_nothing_is_dropped():
    """Independent collectives, of different sizes on every rank, and results that a rank does not use."""

    def program(x, r):
        a = dc.all_gather(x.repeat(1 + 3 * r, 1), sizes="auto")
        b = dc.all_reduce(x.exp().sum(0), "max")
        c = dc.all_gather(x.sin().repeat(8 - 7 * r, 1), sizes=[16, 2])
        d = dc.broadcast(x.t().cos(), src=1)  # not contiguous, but d is
        e = dc.reduce_scatter(x.tanh())
        unused = dc.all_reduce(x * 2)
        again = dc.all_reduce(x * 2)
        if r == 0:
            return a.sum() + (c * c).sum() + d.sum() + e.sum() + b.sum() + again.sum() + 0 * unused.sum()
        return e.square().sum() + d.sum() + c.sum() + b.sum() + a.square().sum() + unused.sum() + again.sum()

    def body(r):
        x = torch.linspace(-1, 1 + r, 8, dtype=torch.float64).view(2, 4).requires_grad_()
        y, z = generated(lambda x: program(x, r))(x), program(x, r)
        same((y, torch.autograd.grad(y, x)), (z, torch.autograd.grad(z, x)))
        ignoring = generated(lambda x: (dc.all_reduce(x), dc.all_reduce(x + 1))[r])
        constant = generated(lambda x: x + dc.all_reduce(torch.ones(2, 4, dtype=torch.float64)))  # is not folded
        return ignoring(x.detach())[0, 0].item(), (constant(x.detach()) - x)[0, 0].item()

    assert spawn(body, range(2), timeout=200) == [(-2, 2), (0, 2)]


def test_inductor_keeps_the_order_of_the_program():
    """In the generated code of two ranks for which the lowest peak memory requires different orders."""

    def large_and_small(x, r):
        a = dc.all_gather(x.sin().repeat(63 if r == 0 else 1, 1), sizes=[126, 2])
        b = dc.gather(x.cos().repeat(1 if r == 0 else 63, 1), dst=1, sizes=[2, 126])
        dc.all_to_all(x)
        c = dc.all_reduce(x.exp())
        return c.sum() + b.square().sum() + a.square().sum() if r == 0 else a.sum() + b.sum() + c.sum()

    def used_late_or_not(x, r):
        a = dc.all_gather(x)
        b = dc.reduce_scatter(x.repeat(512, 1))
        dc.broadcast(x)
        c = dc.all_to_all(x.sin())
        return a.sum() * b.sum() * c.sum() if r == 0 else b.sum() * c.sum()

    class WrittenError(Exception):
        pass

    def body(r):
        config = importlib.import_module("torch._inductor.config")  # by name: spawn cannot send the module
        code = []

        def keep(text):  # stops the compilation, so nothing runs and a wrong order cannot hang
            code.append(text)
            raise WrittenError

        orders = []
        for program in (large_and_small, used_late_or_not):
            with pytest.MonkeyPatch.context() as patch, config.patch(force_disable_caches=True):
                patch.setattr("torch._inductor.graph.GraphLowering.save_output_code", staticmethod(keep))
                with pytest.raises(Exception, match="WrittenError"):
                    torch.compile(partial(program, r=r), fullgraph=True)(torch.ones(2, 4))
            orders.append(re.findall(r"ops\.diffcoll\.apply\.default\(\w+, '\w+\|(\w+)\|", code.pop()))
        return orders

    for of_rank in spawn(body, range(2), timeout=280):  # caches are disabled
        assert of_rank == [
            ["all_gather", "gather", "all_to_all", "all_reduce"],
            ["all_gather", "reduce_scatter", "broadcast", "all_to_all"],
        ]


def test_checkpoints_keep_the_results_of_collectives():
    def layer(x):
        y = dc.all_reduce(x.sin()).square() * dc.all_reduce(x.detach(), "max")
        later = dc.all_gather(y * x, sizes="auto", async_op=True)
        return dc.all_reduce(y, "product") * later.wait().square().sum(0) + dc.sum_gradients(x).exp()

    def recompute(*_, **__):
        return checkpoint.CheckpointPolicy.MUST_RECOMPUTE

    selective = {"context_fn": partial(checkpoint.create_selective_checkpoint_contexts, recompute)}

    def program(x, **options):
        return dc.all_gather(checkpoint.checkpoint(layer, x, use_reentrant=False, **options)).cos().sum()

    def body(r):
        x = torch.tensor([0.1, 0.2 + r], dtype=torch.float64, requires_grad=True)
        expected = gradient(program, x)
        # the second backend uses Inductor's partitioner
        for backend, options in (("aot_eager", {}), *(("aot_eager_decomp_partition", o) for o in ({}, selective))):
            compiled = torch.compile(partial(program, **options), fullgraph=True, backend=backend)
            same(gradient(compiled, x), expected)

    spawn(body, range(2), timeout=100)


# ── graphs and eager code ────────────────────────────────────────────────────────────────────────────────


def test_a_pending_crosses_the_boundary_of_a_graph():
    """Started in a graph and awaited in eager code or in another graph; or started in eager code."""

    def started(x):
        return dc.all_gather(x.sin(), async_op=True), dc.all_reduce([x * 3, x.cos()], async_op=True)

    def awaited(gathered, summed, r):
        z = gathered.wait().square()
        x, y = summed.wait()
        return ((r + 1.0) * z).sum() + (x * y).sum()

    def body(r):
        x = torch.linspace(0.4 + 0.1 * r, 1.3, 12, dtype=torch.float64).view(6, 2).requires_grad_()
        expected = gradient(lambda x: awaited(*started(x), r), x)
        same(gradient(lambda x: awaited(*one_graph(started)(x), r), x), expected)
        same(gradient(lambda x: one_graph(awaited)(*one_graph(started)(x), r), x), expected)
        breaks = torch.compile(awaited, backend="aot_eager")
        same(gradient(lambda x: breaks(*started(x), r), x), expected)
        pending = dc.all_reduce(x, async_op=True)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            one_graph(lambda pending: pending.wait() * 2)(pending)
        pending.wait()

    spawn(body, range(2), timeout=200)


@pytest.mark.parametrize("backend", ["gloo", MPI_TOO])
def test_check_mode_compares_what_is_compiled(backend):
    """Enabled after the graphs were compiled."""

    def body(r):
        total, gathered, shifted = (one_graph(f) for f in (dc.all_reduce, dc.all_gather, dc.shift))
        x = torch.tensor([1.0, 2.0 + r], requires_grad=True)

        def both(x):
            return total(x).sum() + gathered(x).square().sum()

        def unused_on_one_rank():
            y, z = total(x), gathered(x)
            (y if r == 1 else z).sum().backward()

        expected, texts = gradient(both, x), []
        with dc.check_mode():
            for differs in (
                lambda: dc.all_reduce(x, async_op=True).wait() if r == 1 else total(x),
                lambda: (dc.all_gather if r == 1 else total)(x),
                lambda: (gathered if r == 1 else total)(x),
                lambda: total(torch.ones(2 + r)),
                lambda: total(torch.ones(2, dtype=torch.float64 if r == 1 else torch.float32)),
                unused_on_one_rank,
            ):
                texts.append(refusal(dc.CollectiveMismatchError, differs))
                assert dc.all_reduce(torch.tensor([r + 1.0])).tolist() == [3.0]
            same(gradient(both, x), expected)
            for compiled, eager in ((total, dc.all_reduce), (shifted, dc.shift)):  # one call, compiled or not
                same((compiled if r == 1 else eager)(x), compiled(x))
        return texts

    one, other = spawned(body, range(2), backend=backend, timeout=100)
    assert one == other
    assert all(f" at {__file__}:" in text for text in one)


# ── errors where a graph would be wrong ──────────────────────────────────────────────────────────────────


def test_simulated_ranks_run_uncompiled():
    for run in (rules, truth):
        assert [y.tolist() for y in run(one_graph(dc.all_reduce), [torch.ones(2)] * 2)] == [[2, 2]] * 2


def test_wrong_calls_and_transforms_around_a_graph():
    """torch.func and forward mode within a graph: PyTorch has no rules for ops there. Nor is a region compiled."""
    summed = lambda x: dc.all_reduce(x).square().sum()  # noqa: E731

    def in_region(x):
        with dc.joint_backward() as joint:
            return joint(summed(x))

    wrong = [
        ("all_reduce: op: ", lambda x: dc.all_reduce(x, "summ")),
        ("joint_backward", in_region),
        ("all_reduce", torch.func.grad(summed)),
        ("all_reduce", lambda x: torch.func.jvp(summed, (x,), (x,))),
        ("broadcast: src: ", lambda x: dc.broadcast(x, src=2)),
    ]

    def body(r):
        x = torch.tensor([r + 1.0, -r])
        return [refusal(Exception, one_graph(f), x) for _, f in wrong], one_graph(dc.all_reduce)(x).tolist()

    for texts, after in spawn(body, range(2), timeout=110):
        assert all(named in text for (named, _), text in zip(wrong, texts, strict=True))
        assert after == [3, -1]
    # Without a test's imports, in which Dynamo traces less.
    code = "import torch, diffcoll as dc; torch.compile(dc.all_reduce, fullgraph=True)(torch.ones(2), 'summ')"
    assert "all_reduce: op: got summ" in python("-c", code, returns=1).stderr


def test_a_graph_refuses_to_run_where_it_would_be_wrong():
    """Dynamo guards on none of these contexts; the ops check them."""

    def in_region(graph, x):
        with dc.joint_backward() as joint:
            joint(graph(x).sum()).backward()

    def in_dual_level(graph, x):
        with forward_ad.dual_level():
            graph(forward_ad.make_dual(x, torch.ones(2)))

    def body(r, folder):
        mean = one_graph(lambda x: dc.all_reduce(x, "mean"))
        x = torch.tensor([1.0, 2.0 + r])
        leaf = x.clone().requires_grad_()
        mean(leaf).sum().backward()
        exported = torch.export.export(Module(lambda x: dc.all_reduce(x, "mean")), (x,)).module()
        mean(x)
        for graph, y, around in itertools.product((mean, exported), (x, leaf), (in_region, in_dual_level)):
            refusal(RuntimeError, around, graph, y)
        refusal(RuntimeError, lambda: torch.func.jvp(exported, (x,), (x,)))

        with torch.inference_mode():  # which, as vmap, changes nothing
            same([mean(x), torch.vmap(exported)(torch.stack([x, x]))[1]], [torch.tensor([1.0, 3.0])] * 2)
        leaf.grad = None
        y = mean(leaf).sum()
        with dc.joint_backward() as joint:  # the forward was outside the region
            joint(y + dc.all_reduce(leaf).sum()).backward()
        same(leaf.grad, torch.tensor([4.0, 4.0]))

        dist.destroy_process_group()
        del os.environ["WORLD_SIZE"]  # else a call without a group is an error
        for graph in (mean, exported):
            refusal(RuntimeError, graph, x)
        alone = one_graph(lambda x: dc.all_reduce(x))
        assert alone(x).tolist() == x.tolist()
        if r < 2:  # another group of the same name
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=r, world_size=2)
            for graph in (mean, exported, alone):
                refusal(RuntimeError, graph, x)
            torch.compiler.reset()
            assert mean(x).tolist() == [1, 2.5]

    with tempfile.TemporaryDirectory() as folder:
        spawn(body, range(3), [folder] * 3, timeout=100)


# ── other tracers ────────────────────────────────────────────────────────────────────────────────────────


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def everything(x):
    """A sum, a gather, a product, a tree, an identity forward, and an asynchronous collective."""
    y, z = dc.all_reduce([x, 2 * x], "mean")
    y = dc.all_reduce(y * z, "product") + dc.sum_gradients(x).cos() + dc.reduce_scatter(dc.all_gather(x) ** 2)
    pending = dc.all_gather(y.square(), async_op=True)
    later = x.sin().sum() * pending.wait()
    return later.sum() + dc.all_reduce(y.t(), grad_placement="replicate").t()


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    def body(r):
        x = torch.tensor([[1.0, 2.0 + r]])
        exported = torch.export.export(Module(everything), (x,), strict=strict).module()
        other = (x * 3 + r).requires_grad_()
        same(exported(other), everything(other))
        same(*(gradient(lambda x, f=f: f(x).sum(), other) for f in (exported, everything)))

    spawn(body, range(2), timeout=100)


def test_tracers_that_run_eager_code_are_refused():
    """They would record the results of this run, silently."""

    def body(r):
        x = torch.tensor([[1.0, 2.0 + r]])
        for mode in ("real", "symbolic"):
            refusal(RuntimeError, make_fx(everything, tracing_mode=mode), x)
        refusal(RuntimeError, torch.func.linearize, everything, x)
        with FakeTensorMode() as fake:
            refusal(RuntimeError, everything, fake.from_tensor(x))
        refusal(RuntimeError, torch.jit.trace, everything, x)
        refusal(TypeError, torch.fx.symbolic_trace, everything)
        assert dc.all_reduce(torch.tensor([r + 1.0])).tolist() == [3.0]  # the ranks' messages still match

    spawn(body, range(2), timeout=100)


@runs_on("rules", "gloo", "mpi")
def test_tensors_left_by_a_transform(run):
    """They are still wrapped; PyTorch's ops unwrap them."""

    def body(r):
        left = []
        torch.func.grad(lambda x: left.append(x * (r + 1)) or x.sum())(torch.ones(3))
        found = [dc.all_reduce(left[0]), dc.all_gather(left[0], async_op=True).wait(), dc.reduce(left[0], dst=1)]
        return [y.tolist() for y in found]

    common = [3, 3, 3], [1, 1, 1, 2, 2, 2]
    assert run(body, range(2)) == [[*common, [0, 0, 0]], [*common, [3, 3, 3]]]
