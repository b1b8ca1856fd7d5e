"""torch.compile(fullgraph=True): every call equals eager, in order, without graph breaks or recompilation."""

import importlib
import os
import re
import tempfile
import threading
from functools import partial

import properties
import pytest
import torch
import torch.distributed as dist
from releases import compiles, generated, one_graph
from runs import python, refusal, rules, runs_on, truth
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import diffcoll as dc
from diffcoll.testing import cases, spawn

pytestmark = [pytest.mark.timeout(300), compiles]
SEED = 1


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("n", "backend", "select"),
    [
        (2, "aot_eager", properties.once),
        pytest.param(2, "aot_eager", list, marks=pytest.mark.slow),
        pytest.param(3, "inductor", list, marks=pytest.mark.slow),
    ],
)
def test_the_whole_table_in_one_graph(n, backend, select):
    table = select(case for case in cases.table(n) if None not in case.shapes)
    assert len(table) > 25

    def body(r):
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


def test_names_that_are_imported_at_their_first_use(monkeypatch):
    for name in ("GatheredBatch", "average_gradients", "gather_batch", "nn", "ring", "truth"):
        monkeypatch.delitem(vars(dc), name, raising=False)

    def program(x):
        batch = dc.gather_batch(x)
        assert isinstance(batch, dc.GatheredBatch)
        blocks = [block * (r + 2) for r, block in dc.ring(x)]
        pairs = dc.nn.functional.clip_loss(x, x.flip(1), logit_scale=2.0)
        return [batch[0] * 3, *blocks, dc.average_gradients(x * 5), *dc.truth.all_reduce([x * 7]), pairs]

    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(SEED))
    compiled = torch.compile(program, fullgraph=True, backend="eager")(x)
    assert not {"average_gradients", "gather_batch", "nn", "ring", "truth"} - vars(dc).keys()
    torch.testing.assert_close(compiled, program(x))


def test_order_is_kept_and_nothing_is_dropped():
    """Independent collectives, of different sizes on every rank, and results that a rank does not use."""

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
        y = generated(lambda x: program(x, r))(x)
        (g,) = torch.autograd.grad(y, x)
        z = program(x, r)
        (h,) = torch.autograd.grad(z, x)
        ignoring = generated(lambda x: (dc.all_reduce(x), dc.all_reduce(x + 1))[r])
        return y - z, (g - h).abs().max(), ignoring(x.detach())[0, 0].item()

    found = spawn(body, range(2), timeout=110)
    assert all(max(abs(y), g) < 1e-12 for y, g, _ in found)
    assert [value for *_, value in found] == [-2, 0]


def test_inductor_keeps_the_order_of_the_program():
    """In the generated code of two ranks for which the lowest peak memory requires different orders.

    Until torch 2.14 Inductor does not order effects; `_keep_in_order` does, and without it the ranks' orders differ.
    """

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
            orders.append(re.findall(r"ops\.diffcoll\.(\w+)\.default\(", code.pop()))
        return orders

    for of_rank in spawn(body, range(2), timeout=280):  # caches are disabled
        assert of_rank == [
            ["AllGather", "Gather", "AllToAll", "AllReduce"],
            ["AllGather", "ReduceScatter", "Broadcast", "AllToAll"],
        ]


@pytest.mark.parametrize("compiler", [one_graph, pytest.param(generated, marks=pytest.mark.slow)])
def test_one_graph_for_all_steps_and_batch_sizes(compiler):
    def loss(x, w):
        y = dc.all_gather(x @ w, sizes="auto")
        z = dc.all_gather(x @ w)
        similar = torch.nn.functional.normalize(z) @ z.T
        products = dc.all_reduce((x @ w).sum(1), "product")
        return similar.logsumexp(1).sum() + y.square().sum() + products.sin().sum()

    def body(r):
        w = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
        compiled = compiler(loss, dynamic=True)
        errors = []
        for batch in (4, 5, 9, 4):
            x = torch.randn(batch, 3, generator=torch.Generator().manual_seed(batch + r), dtype=torch.float64)
            (g,), (h,) = (torch.autograd.grad(f(x, w), w) for f in (compiled, loss))
            errors.append(float((g - h).abs().max() / h.abs().max()))
        return max(errors), graphs()

    for error, count in spawn(body, range(2), timeout=110):
        assert error < 1e-12
        assert count == 1


def test_groups_meshes_transforms_and_messages():
    def raised(fn, *arguments):
        try:
            one_graph(fn)(*arguments)
        except Exception as error:
            return str(error)
        return ""

    def body(r):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

        def program(x):
            pair = dc.all_reduce(x, group=groups[r % 2])
            row, column = dc.all_gather(x, group=mesh["b"]), dc.all_reduce(x, "max", group=mesh["a"])
            return pair.sum() + (row * (r + 1)).sum() + column.sum()

        x = torch.tensor([r + 1.0, -r], requires_grad=True)
        compiled = one_graph(program)
        (g,), (h,) = (torch.autograd.grad(f(x), x) for f in (compiled, program))

        mapped = one_graph(torch.func.vmap(dc.all_reduce))(x).tolist()
        loss = lambda x: dc.all_reduce(x).square().sum()  # noqa: E731
        refused = [raised(torch.func.grad(loss), x.detach())]
        refused.append(raised(lambda x: torch.func.jvp(loss, (x,), (x,)), x.detach()))
        with dc.set_default_group(groups[r % 2]):
            default = one_graph(dc.all_reduce)(x).tolist()
        again = one_graph(dc.all_reduce)(x).tolist()
        wrong = raised(lambda x: dc.all_reduce(x, "mode"), x)
        none = raised(lambda x: dc.scatter(None), x)
        return (g - h).tolist(), refused, mapped, default, again, wrong, none

    for r, (apart, refused, mapped, default, again, wrong, none) in enumerate(spawn(body, range(4), timeout=110)):
        assert apart == [0, 0]
        assert all("within torch.func.grad, vjp, jvp, … or forward_ad cannot be compiled" in text for text in refused)
        assert mapped == again
        assert default == [4 + 2 * (r % 2), -2 - 2 * (r % 2)]
        assert again == [10, -6]
        assert "all_reduce: op: got mode, expected" in wrong
        assert "scatter: x: got None, expected a tensor on every rank under torch.compile" in none


def test_a_simulated_world_is_refused():
    compiled = one_graph(dc.all_reduce)
    for run in (rules, truth):
        with pytest.raises(Exception, match=r"torch\.compile, .* do not work within a simulated world"):
            run(compiled, [torch.ones(2)] * 2)


def test_the_world_of_one_compiles_and_eager_code_pays_no_import():
    code = (
        "import sys, torch, diffcoll as dc\n"
        "x = torch.ones(2, requires_grad=True)\n"
        "dc.all_reduce(x, 'product').sum().backward()\n"
        "assert not {'torch._dynamo', 'torch._inductor.lowering'} & set(sys.modules)\n"
        "torch.compile(lambda x: dc.all_reduce(x).sum(), fullgraph=True, backend='aot_eager')(x).backward()\n"
        "assert x.grad.tolist() == [2, 2]\n"
    )
    python("-c", code)


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


# ── tracers of eager code ────────────────────────────────────────────────────────────────────────────────


def waits(x):
    pending = dc.all_gather(x, async_op=True)
    return x.sin().sum() * pending.wait()


def everything(x):
    """A sum, a gather, a product, a tree, an identity forward, and an asynchronous collective."""
    y, z = dc.all_reduce([x, 2 * x], "mean")
    y = dc.all_reduce(y * z, "product") + dc.sum_gradients(x).cos() + dc.reduce_scatter(dc.all_gather(x) ** 2)
    return waits(y.square()).sum() + dc.all_reduce(y.t(), grad_placement="replicate").t()


def ignores(x):
    dc.all_reduce(x)
    return x * 2


class PassesThrough(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def test_tracers_record_one_op_for_each_collective(backend):
    def body(r):
        def same(found, expected):
            torch.testing.assert_close(found, expected)

        x, t = torch.tensor([[1.0, 2.0 + r]]), torch.tensor([[0.3, -1.0 * r]])
        other = x * 3 + r
        for mode in ("real", "fake", "symbolic") if backend == "gloo" else ("fake",):
            same(make_fx(everything, tracing_mode=mode)(x)(other), everything(other))
        assert "diffcoll.AllReduce" in make_fx(ignores)(x).code  # although its result is not used

        def gradient(x):
            return torch.func.grad(lambda x: everything(x).sum())(x)

        same(make_fx(gradient)(x)(other), gradient(other))
        both, swapped, mapped = torch.stack([x, t]), torch.stack([t, x]), torch.vmap(everything)
        same(make_fx(mapped)(both)(swapped), mapped(swapped))
        y, tangents = torch.func.linearize(everything, x)
        same((y, tangents(t)), torch.func.jvp(everything, (x,), (t,)))
        same(tangents(2 * t), 2 * tangents(t))

        class Module(torch.nn.Module):
            forward = staticmethod(everything)

        for strict in (False, True) if backend == "gloo" else ():
            same(torch.export.export(Module(), (x,), strict=strict).module()(other), everything(other))

        with FakeTensorMode() as fake:
            inside = everything(fake.from_tensor(x))
        outside = dc.all_gather(inside[0])  # sends nothing
        assert (type(outside), outside.shape) == (type(inside), (4,))
        pair = everything(TwoTensor(x, other))
        same((pair.a, pair.b), (everything(x), everything(other)))
        for mode in (PassesThrough(), FlopCounterMode(display=False)):
            leaf = x.clone().requires_grad_()
            with mode:
                everything(leaf).sum().backward()
            same(leaf.grad, gradient(x))

        refused = []
        in_region = dc.joint_backward()
        for program in (
            lambda: torch.jit.trace(everything, x),
            lambda: torch.fx.symbolic_trace(ignores),
            lambda: torch.func.functionalize(everything)(x),
            lambda: in_region.__enter__() and make_fx(everything)(x),
        ):
            refused.append(refusal((RuntimeError, TypeError), program))
        in_region.__exit__(None, None, None)
        assert dc.all_reduce(torch.tensor([r + 1.0])).tolist() == [3.0]  # the ranks' messages still match
        return refused

    for jit, symbols, functional, joint in spawn(body, range(2), backend=backend, timeout=100):
        assert "all_reduce: torch.jit.trace cannot record a collective; use torch.export or torch.compile" in jit
        assert "all_reduce: x: got Proxy, expected a dense torch.Tensor" in symbols
        assert "Functionalize rule" in functional
        assert "within joint_backward" in joint


def test_tracers_in_a_simulated_world():
    for run in (truth, rules):
        for mode in ("real", "fake"):
            trace = make_fx(lambda x: dc.all_gather(x), tracing_mode=mode)
            with pytest.raises(RuntimeError, match="linearize do not work within a simulated world"):
                run(trace, [torch.ones(2)] * 2)


# ── a graph that is called in another context than it was compiled in ────────────────────────────────────


def test_a_graph_refuses_to_run_where_it_would_be_wrong():
    """Dynamo guards on none of these contexts; the ops check them."""

    def body(r, folder):
        mean = one_graph(lambda x: dc.all_reduce(x, "mean"))
        x = torch.tensor([1.0, 2.0 + r])
        leaf = x.clone().requires_grad_()
        mean(leaf).sum().backward()
        values = [mean(x)]
        exported = make_fx(lambda x: dc.all_reduce(x, "mean"))(x)

        def in_region(graph, x):
            with dc.joint_backward() as joint:
                y = graph(x).sum()
                joint(y if r == 0 else torch.tensor(1.0)).backward()

        def in_dual_level(graph, x):
            with forward_ad.dual_level():
                graph(forward_ad.make_dual(x, torch.ones(2)))

        refused = [
            *(refusal(Exception, partial(in_region, graph, y)) for graph in (mean, exported) for y in (x, leaf)),
            *(refusal(Exception, partial(in_dual_level, graph, y)) for graph in (mean, exported) for y in (x, leaf)),
            refusal(Exception, lambda: torch.func.jvp(exported, (x,), (x,))),
            refusal(Exception, lambda: torch.func.grad(lambda x: exported(x).sum())(x)),
        ]

        thread = threading.Thread(target=lambda: values.append(mean(x)))
        thread.start()
        thread.join()
        with torch.no_grad(), torch.autocast("cpu"):
            values.append(mean(leaf))
        with torch.inference_mode():
            values.append(mean(x))
        values.append(torch.vmap(exported)(torch.stack([x, x]))[1])
        y = mean(leaf).sum()
        with dc.joint_backward() as joint:  # the forward was outside the region
            joint(y + dc.all_reduce(leaf).sum()).backward()
        values.append(leaf.grad)

        dist.destroy_process_group()
        del os.environ["WORLD_SIZE"]  # else a call without a group is an error
        after = [refusal(Exception, lambda: mean(x)), refusal(Exception, lambda: exported(x))]
        alone = one_graph(lambda x: dc.all_reduce(x))
        assert alone(x).tolist() == x.tolist()
        if r < 2:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=r, world_size=2)
            after += [
                refusal(Exception, lambda: mean(x)),
                refusal(Exception, lambda: exported(x)),
                refusal(Exception, lambda: alone(x)),
            ]
            torch.compiler.reset()
            assert mean(x).tolist() == [1, 2.5]
        return refused, [v.tolist() for v in values], after

    with tempfile.TemporaryDirectory() as folder:
        found = spawn(body, range(3), [folder] * 3, timeout=100)
    for r, (refused, values, after) in enumerate(found):
        assert all("all_reduce: a compiled or traced graph within joint_backward: the chain" in t for t in refused[:4])
        assert all("graph was called within torch.func.jvp, forward_ad and the like" in t for t in refused[4:9])
        assert "setup_context" in refused[9]  # PyTorch's own error
        assert values == [[1, 3]] * 5 + [[1 + 1 + 3] * 2]
        gone = f"for rank {r} of 3 in the group '0', and that group is no more; "
        elsewhere = f"is rank {r} of 2 in it now"
        alone = "in the group 'the world of one rank', and a group has been set up since; compile it again"
        for text, words in zip(after, [gone, gone, elsewhere, elsewhere, alone], strict=False):
            assert words in text
        assert len(after) == (5 if r < 2 else 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Inductor
def test_results_are_as_dense_as_the_graph_says():
    x = torch.arange(6.0).view(2, 3)
    y = generated(lambda x: dc.sum_gradients(x.t()))(x)
    assert y.tolist() == x.t().tolist()
    assert y.stride() == dc.sum_gradients(x.t()).stride() == (2, 1)


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_check_mode_compares_what_is_compiled(backend):
    """Enabled after the graphs were compiled. If ops were not compared, a rank that runs eager code would hang."""

    def body(r):
        total, gathered = (one_graph(f) for f in (dc.all_reduce, dc.all_gather))
        x = torch.tensor([1.0, 2.0 + r], requires_grad=True)
        (total(x).sum() + gathered(x).square().sum()).backward()
        expected, x.grad = x.grad, None
        texts = []

        def unused_on_one_rank():
            y, z = total(x), gathered(x)
            (y if r == 1 else z).sum().backward()

        with dc.check_mode():
            for differs in (
                lambda: (dc.all_reduce if r == 1 else total)(x),
                lambda: dc.all_reduce(x, async_op=True).wait() if r == 1 else total(x),
                lambda: (gathered if r == 1 else total)(x),
                lambda: total(torch.ones(2 + r)),
                lambda: total(torch.ones(2, dtype=torch.float64 if r == 1 else torch.float32)),
                unused_on_one_rank,
            ):
                texts.append(refusal(dc.CollectiveMismatchError, differs))
                assert dc.all_reduce(torch.tensor([r + 1.0])).tolist() == [3.0]
            (total(x).sum() + gathered(x).square().sum()).backward()  # raises nothing
            assert x.grad.tolist() == expected.tolist()
            traced = make_fx(lambda x: dc.all_gather(x, sizes=[2, 2]))(x.detach())
            assert traced(x.detach()).tolist() == [1, 2, 1, 3]
        return texts

    one, other = spawn(body, range(2), backend=backend, timeout=100)
    assert one == other
    total = "compiled AllReduce(torch.float32 (2,), replicated=False, deterministic=False, mean=False) at "
    words = [total, total, "compiled AllGather(", "(3,)", "float64", "compiled ReduceScatter("]
    for text, expected in zip(one, words, strict=True):
        assert expected in text
        assert f" at {__file__}:" in text


# ── in checkpoints ───────────────────────────────────────────────────────────────────────────────────────


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
        (expected,) = torch.autograd.grad(program(x), x)
        # the second backend uses Inductor's partitioner
        for backend, options in (("aot_eager", {}), *(("aot_eager_decomp_partition", o) for o in ({}, selective))):
            compiled = torch.compile(partial(program, **options), fullgraph=True, backend=backend)
            (found,) = torch.autograd.grad(compiled(x), x)
            torch.testing.assert_close(found, expected)

    spawn(body, range(2), timeout=100)


def test_sizes_that_are_symbols():
    """A size that is marked dynamic stays symbolic as an argument."""

    def body(r):
        def program(x):
            return dc.all_gather(x, sizes=[x.shape[0], 0] if r == 0 else [4, 0]).sum(0)

        compiled = one_graph(program)
        x = torch.ones(4 if r == 0 else 0, 2)
        if r == 0:
            torch._dynamo.mark_dynamic(x, 0)
        return compiled(x).tolist()

    assert spawn(body, range(2), timeout=110) == [[4, 4]] * 2
