"""GradientAverager misused: gradients kept, averagers constructed twice, parameters replaced."""

import copy
import io
import itertools
import logging
import re
import time
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from runs import gloo, rules
from torch import nn
from torch.nn.utils import parametrizations, prune
from training import RUNS, attach, batch, everywhere, mlp, on_two, refused, same

import diffcoll as dc
from diffcoll.core.torch_private.tensors import storage_uses
from diffcoll.testing import new_group, simulate, spawn


def averaged(n, k=0, model=None):
    """Return the mean of the ranks' gradients, computed in one process."""
    model = model or mlp()
    model.zero_grad()
    for r in range(n):
        (model(batch(r, k)).square().sum() / n).backward()
    return [p.grad for p in model.parameters()]


# ── gradients that the user holds ────────────────────────────────────────────────────────────────────────

KEPT = {
    "the gradient": lambda p: p.grad,
    "a detached view": lambda p: p.grad.detach(),
    "a flat view": lambda p: p.grad.view(-1),
    "one number": lambda p: p.grad.view(-1)[0],
    "an array": lambda p: p.grad.numpy(),
    "its storage": lambda p: p.grad.untyped_storage(),
    "a capsule": lambda p: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p.grad)),
    "a graph": lambda p: (torch.ones(()).double().requires_grad_() * p.grad).sum(),
    "another's gradient": lambda p: setattr(other := nn.Parameter(torch.empty_like(p)), "grad", p.grad) or other,
}


def numbers(kept):
    if isinstance(kept, torch.UntypedStorage):
        return list(bytes(kept))
    if isinstance(kept, nn.Parameter):
        return kept.grad.tolist()
    if isinstance(kept, torch.Tensor) and kept.grad_fn is not None:
        return (kept.grad_fn.next_functions[0][0]._saved_other).tolist()
    return kept.tolist()


@on_two
def test_a_gradient_that_is_kept_is_never_written_again(where):
    """By whatever reference, on one rank only too; gradients of all ranks stay right."""

    def body(r):
        ways = (("mean", None), ("sum", None), ("mean", torch.float32))
        for reduction, comm in ways if where == "rules" else ways[:1]:
            tolerance = 1e-12 if comm is None else 1e-5
            for bucket_mb in (1e-4, 25):
                model = mlp()
                averager = dc.GradientAverager(model, bucket_mb=bucket_mb, reduction=reduction, comm_dtype=comm)
                scale = dc.get_world_size() if reduction == "sum" else 1
                history = []
                for k, keep in enumerate(KEPT.values()):
                    model.zero_grad()
                    model(batch(r, k)).square().sum().backward()
                    same([p.grad / scale for p in model.parameters()], averaged(2, k), tolerance)
                    if r == 1 or k % 2:
                        for p in list(model.parameters())[k % 2 :: 2]:
                            kept = keep(p)
                            history.append((kept, numbers(kept)))
                for kept, before in history:
                    assert numbers(kept) == before
                averager.detach()

    RUNS[where](body, range(2))


def test_memory_is_taken_only_where_a_gradient_is_kept():
    """Otherwise every step uses the same memory, whether gradients are set to None, zeroed or accumulated."""
    model = mlp()
    averager = dc.GradientAverager(model, bucket_mb=1e-4)

    def memory():
        return [bucket.row.data_ptr() for bucket in averager._reducer.buckets]

    def step(set_to_none=True):
        model.zero_grad(set_to_none=set_to_none)
        model(batch(0)).square().sum().backward()

    step()
    step()
    before = memory()
    assert len(before) > 1
    for set_to_none in (True, False, True):
        step(set_to_none)
    with averager.no_sync():
        step()
    model(batch(0)).square().sum().backward()
    assert memory() == before
    g = model[2].bias.grad  # accumulated in place, as without an averager
    model(batch(0)).square().sum().backward()
    assert g is model[2].bias.grad
    assert memory() == before
    step()
    assert sum(a != b for a, b in zip(memory(), before, strict=True)) == 1
    del g
    now = memory()
    step()
    step()
    assert memory() == now


def test_memory_that_other_processes_share_is_given_up():
    model = mlp()
    averager = dc.GradientAverager(model)
    model(batch(0)).square().sum().backward()
    model.zero_grad()
    model(batch(0)).square().sum().backward()
    kept = model[0].weight.grad.share_memory_().clone()
    before = averager._reducer.buckets[0].row.data_ptr()
    model.zero_grad()
    model(batch(1)).square().sum().backward()
    assert averager._reducer.buckets[0].row.data_ptr() != before
    assert not torch.equal(kept, model[0].weight.grad)


def test_the_cotangent_that_autograd_makes_the_gradient_is_not_written():
    """Autograd may make views of the user's cotangent the gradient, even of two parameters."""

    def body(r):
        a, b = (nn.Parameter(torch.zeros(4, dtype=torch.double)) for _ in range(2))
        dc.GradientAverager([a, b], comm_dtype=torch.float32)
        gy = torch.arange(4.0, dtype=torch.double) * (r + 1)
        given = gy.clone()
        (a.view(2, 2) + b.view(2, 2) * 1).backward(gy.view(2, 2))
        assert torch.equal(gy, given)
        return a.grad, b.grad

    for found in gloo(body, range(2)):
        same(found, [torch.arange(4.0, dtype=torch.double) * 1.5] * 2)


def test_uses_of_memory_are_counted():
    """The private count includes every tensor on a storage, and nothing else."""
    x = torch.zeros(4)
    alone = storage_uses(x)
    assert alone == storage_uses(torch.empty(1))
    kept = []
    for keep in (lambda: x[1:], x.detach, lambda: x.data, x.numpy, x.untyped_storage, lambda: memoryview(x.numpy())):
        before = storage_uses(x)
        kept.append(keep())
        assert storage_uses(x) > before
    kept.clear()
    assert storage_uses(x) == alone


# ── one averager for each parameter ──────────────────────────────────────────────────────────────────────


def loss(model, r, k=0):
    return model(batch(r, k)).square().sum()


def backward(model, r, k=0):
    loss(model, r, k).backward()


@everywhere
def test_a_new_averager_takes_over(where):
    """On the same module or the same parameters, whether the user holds the old averager or not."""

    def body(r):
        model = mlp()
        first = dc.GradientAverager(model, reduction="sum")
        backward(model, r)
        made = [
            lambda: dc.GradientAverager(model, bucket_mb=1e-4),
            lambda: dc.GradientAverager(list(model.parameters())[::-1]),
            lambda: dc.GradientAverager(model, group=new_group([0, 1])),
        ]
        for make in made:
            make()
            for k in range(2):
                model.zero_grad()
                backward(model, r, k)
                same([p.grad for p in model.parameters()], averaged(2, k))
        model.append(nn.Linear(2, 1).double())  # the module has changed too
        last = dc.GradientAverager(model)
        model.zero_grad()
        backward(model, r)
        assert all(p.grad is not None for p in model.parameters())
        for call in (first.synchronize, lambda: first.join([1]).__next__(), first.no_sync().__enter__):
            assert "this averager was detached, or a newer one has taken over" in refused(call)
        last.detach()
        last.detach()  # a second time, without effect
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        backward(model, r, k=r)
        return found

    found = RUNS[where](body, range(2))
    same(found[0], found[1], 0)


@on_two
def test_averagers_that_share_some_parameters(where):
    """An error on every rank, even if only one rank has such an averager; the first one still works."""

    def body(r):
        model = mlp()
        head = dc.GradientAverager(model[2])
        texts = [refused(lambda: dc.GradientAverager(model), ValueError)]
        texts += [refused(lambda: dc.GradientAverager([model[2].bias]), ValueError)]
        head.detach()
        dc.GradientAverager(model)
        backward(model, r)
        same([p.grad for p in model.parameters()], averaged(2))
        other = mlp()
        if r == 0:
            other = model
        return texts, refused(lambda: dc.GradientAverager(other), dc.CollectiveMismatchError)

    for (whole, part), differs in RUNS[where](body, range(2)):
        assert whole.startswith(
            "GradientAverager: module_or_params: got weight, which another GradientAverager averages"
        )
        assert part.startswith("GradientAverager: module_or_params: got bias, which another GradientAverager averages")
        assert "call detach() on that one first" in whole
        assert "rank 0: 0.weight (4, 3) torch.float64, taken over\n  rank 1: 0.weight (4, 3) torch.float64" in differs


def test_simulated_ranks_that_share_a_module():
    model = mlp()
    with pytest.raises(ValueError, match=r"parameters that another simulated rank holds as well"):
        simulate(lambda r: dc.GradientAverager(model), range(2), rules=True)


def test_after_its_group_was_destroyed():
    def body(r):
        model = mlp()
        averager = dc.GradientAverager(model)
        backward(model, r)
        dist.destroy_process_group()
        texts = [refused(lambda: backward(model, r)), refused(averager.synchronize)]
        averager.detach()
        model.zero_grad()
        backward(model, r)
        assert model[0].weight.grad is not None
        return texts

    for texts in spawn(body, range(2)):
        for text in texts:
            assert re.match(r"GradientAverager: its group was destroyed; call detach\(\), or make", text)


DDP = nn.parallel.DistributedDataParallel


def test_with_distributed_data_parallel():
    """In any order of construction, on all parameters or some: an error in the first backward at the latest."""

    def body(r):
        wrapped = DDP(mlp()), nn.Sequential(DDP(mlp()))
        texts = [refused(lambda wrap=wrap: dc.GradientAverager(wrap), TypeError) for wrap in wrapped]
        for as_view, bucket_mb in itertools.product((False, True), (25, 1e-5)):
            for ddp_first in (True, False):
                for some in (lambda m: m, lambda m: m[2], lambda m: list(m.parameters())):
                    model = mlp()
                    wrap = partial(DDP, model, gradient_as_bucket_view=as_view)
                    ddp = wrap() if ddp_first else None
                    averager = dc.GradientAverager(some(model), bucket_mb=bucket_mb)
                    ddp = ddp or wrap()
                    texts.append(refused(lambda ddp=ddp: backward(ddp, r)))
                    averager.detach()
        model, other = mlp(), mlp()
        dc.GradientAverager(model)  # DDP on another module is no conflict
        backward(DDP(other), r)
        backward(model, r)
        same([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
        with dc.check_mode():
            ddp = DDP(model)
            texts.append(refused(lambda: backward(ddp, r)))
        return texts

    for texts in gloo(body, range(2)):
        assert len(texts) == 2 + 4 * 6 + 1
        for text in texts:
            assert text.startswith("GradientAverager: ")
            words = "DistributedDataParallel.*, (too|which averages its gradients); remove one of the two"
            assert re.search(words, text)


def test_with_fsdp():
    def body(r):
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        mesh = dist.init_device_mesh("cpu", (2,))
        texts = []
        for shard in (
            partial(fully_shard, mesh=mesh),
            partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=False),
            partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True),
        ):
            sharded = shard(mlp())
            texts.append(refused(lambda sharded=sharded: dc.GradientAverager(sharded), TypeError))
            texts.append(refused(lambda sharded=sharded: dc.GradientAverager(sharded.parameters()), TypeError))
            model = mlp()
            averager = dc.GradientAverager(model)
            later = shard(model)
            texts.append(refused(lambda later=later: backward(later, r)))
            averager.detach()
        return texts

    for texts in spawn(body, range(2)):
        assert len(texts) == 9
        for text in texts:
            assert re.match(r"GradientAverager: .*reduces its (own )?gradient", text), text


# ── parameters that change ───────────────────────────────────────────────────────────────────────────────


@everywhere
def test_parameters_unfrozen_after_the_start(where):
    """Averaged from the first backward after the change, whatever was frozen before, also with weights."""

    def body(r):
        for reduction in ("mean", "weighted"):
            for start in ([0], [2], [0, 2], []):
                model = mlp()
                for i in start:
                    model[i].requires_grad_(False)
                averager, of = attach(model, reduction, bucket_mb=1e-4)
                assert [p.requires_grad for p in model.parameters()] == [i not in start for i in (0, 0, 2, 2)]
                for k, live in enumerate([[0], [2], [0, 2], [2]]):
                    for i in (0, 2):
                        model[i].requires_grad_(i in live)
                    model.zero_grad()
                    of(partial(loss, model, r, k), 3)
                    expected = averaged(2, k)
                    same(
                        [p.grad for i in live for p in model[i].parameters()],
                        [expected[i + j] for i in live for j in (0, 1)],
                    )
                averager.detach()

    RUNS[where](body, range(2))


def replaced_by_assign(m):
    m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True)


def replaced_by_hand(m):
    m[2].weight = nn.Parameter(m[2].weight.detach().clone())


def another_module(m):
    m[2] = nn.Linear(4, 2).double()


REPLACED = {
    "assign": (replaced_by_assign, "0.weight"),
    "by hand": (replaced_by_hand, "2.weight"),
    "a parametrization": (lambda m: parametrizations.weight_norm(m[0]), "0.parametrizations.weight.original0"),
    "of all": (
        lambda m: [parametrizations.weight_norm(m[i], n) for i in (0, 2) for n in ("weight", "bias")],
        "0.param",
    ),
    "another module": (another_module, "2.weight"),
    "one more": (lambda m: m.append(nn.Linear(2, 2).double()), "3.weight"),
    "another dtype": (lambda m: m.float().double().half().float(), "0.weight"),
    "another shape": (lambda m: [setattr(p, "data", p.data[:1]) for p in m[2].parameters()], "2.weight"),
}


def test_parameters_that_are_replaced():
    """The next backward raises and names the first one; a new averager replaces the old one."""

    def body(r):
        for how, (replace, name) in REPLACED.items():
            model = mlp()
            dc.GradientAverager(model)
            for k in range(2):
                model.zero_grad()
                backward(model, r, k)
            replace(model)
            model.zero_grad()
            x = batch(r).to(model[0].bias.dtype)
            loss = model(x).square().sum()
            for _ in range(2):
                text = refused(partial(loss.backward, retain_graph=True))
                assert text.startswith(f"GradientAverager: {name}"), (how, text)
                assert "make a new GradientAverager, which replaces this one" in text
            dc.GradientAverager(model)
            model.zero_grad()
            plain = copy.deepcopy(model)
            model(x).square().sum().backward()
            expected = averaged(2, model=plain) if model[0].bias.dtype == torch.double else []
            found = [p.grad for p in model.parameters()][: len(expected)]
            same(found, expected)

    rules(body, range(2))
    gloo(body, range(2))


def test_what_is_no_replaced_parameter():
    """Pruning renames parameters, functional_call replaces them temporarily, copies have no averager."""

    def body(r):
        model = mlp()
        dc.GradientAverager(model)
        prune.custom_from_mask(model[0], "bias", torch.tensor([1, 1, 1, 1]))
        backward(model, r)
        same([dict(model.named_parameters())[n].grad for n in ("0.bias_orig", "2.weight")], averaged(2)[1:3])
        prune.remove(model[0], "bias")
        model = mlp()
        dc.GradientAverager(model)
        others = {name: nn.Parameter(p.detach() + 1) for name, p in model.named_parameters()}
        torch.func.functional_call(model, others, batch(r)).sum().backward()
        alone = next(iter(others.values())).grad.clone()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            replaced_by_hand(copied)
            backward(copied, r)
        torch.func.grad(lambda ps: torch.func.functional_call(model, ps, batch(r)).sum())(
            dict(model.named_parameters())
        )
        backward(model, r)
        return alone, [p.grad for p in model.parameters()]

    found = gloo(body, range(2))
    same(found[0][1], found[1][1], 0)
    assert not torch.equal(found[0][0], found[1][0])


def stepping(p, zero):
    optimizer = torch.optim.SGD([p], lr=0.1)

    def step(_):
        optimizer.step()
        if zero is not None:
            optimizer.zero_grad(set_to_none=zero)

    return p.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize(("where", "before"), [("rules", True), ("rules", False), ("gloo", True)])
def test_an_optimizer_that_steps_within_backward(where, before):
    """The rank that has it names the parameter, all ranks raise, and the next step without it is right."""

    def body(r):
        texts = []
        cases = itertools.product(((25, True), (1e-4, False), (1e-4, None)), ([0, 1, 2, 3], [1]), ([0, 1], [1]))
        for (bucket_mb, zero), which, ranks in cases:
            model = mlp()
            of_model = list(model.parameters())
            stepped = [of_model[i] for i in which] if r in ranks else []
            handles = [stepping(p, zero) for p in stepped] if before else []
            averager = dc.GradientAverager(model, bucket_mb=bucket_mb)
            handles = handles or [stepping(p, zero) for p in stepped]
            text = refused(partial(backward, model, r))
            if r in ranks:
                assert "as by an optimizer that steps within backward" in text, (text, zero, which)
                assert which != [1] or text.startswith("GradientAverager: 0.bias: its ")
            else:
                assert "a rank has left this backward by an error" in text
            for handle in handles:
                handle.remove()
            model.load_state_dict(mlp().state_dict())
            model.zero_grad()
            backward(model, r)
            same([p.grad for p in of_model], averaged(2))
            averager.detach()
            texts.append(text)
        return len(texts)

    assert RUNS[where](body, range(2)) == [12, 12]


def test_a_value_that_changes_between_a_nested_backward_and_the_outer_one():
    """The parameter has a gradient of each of the two."""

    def body(r):
        p, q = (nn.Parameter(torch.ones(2)) for _ in range(2))
        dc.GradientAverager([p, q])

        def inner(_):
            with torch.enable_grad():
                p.sum().backward()
            with torch.no_grad():
                p.add_(1)

        q.register_hook(inner)
        return refused((p.exp().sum() * q.sum()).backward)

    for text in rules(body, range(2)):
        assert text.startswith("GradientAverager: 0: its value was changed in backward")


def test_frozen_integers_are_sent_once():
    def body(r):
        model = mlp()
        model.quantized = nn.Parameter(torch.tensor([r + 1, -3], dtype=torch.int8), requires_grad=False)
        model.flags = nn.Parameter(torch.tensor([r == 0]), requires_grad=False)
        dc.GradientAverager(model)
        backward(model, r)
        same([p.grad for p in mlp().parameters()], [None] * 4)
        same([p.grad for p in model.parameters()][2:], averaged(2))
        return model.quantized.tolist(), model.flags.tolist()

    assert gloo(body, range(2)) == [([1, -3], [True])] * 2


# ── a backward that raises ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("check", [False, True])
def test_detach_after_a_backward_that_failed(check):
    """The other ranks raise at once, wherever in backward the exception was; a new averager works."""

    def body(r):
        for where in range(4):
            model = mlp()
            averager = dc.GradientAverager(model, bucket_mb=1e-4)
            backward(model, r)
            model.zero_grad()

            def refuse(g):
                raise KeyError("in a hook")

            if r == 1 and where < 3:
                list(model.parameters())[where].register_hook(refuse)
            with dc.check_mode(check):
                if r == 1 and where == 3:
                    embedding = torch.sparse_coo_tensor([[0, 1], [1, 2]], [1.0, 2.0], (4, 3)).double()
                    model[0].weight.register_hook(lambda g, e=embedding: e)
                start = time.monotonic()
                text = refused(lambda model=model: backward(model, r), Exception)
                averager.detach()
                assert time.monotonic() - start < 30
            assert "in a hook" in text or "sparse" in text or "left this backward by an error" in text
            model = mlp()
            dc.GradientAverager(model)
            backward(model, r)
            same([p.grad for p in model.parameters()], averaged(2))

    gloo(body, range(2))


# ── torch.compile ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_step_with_backward_in_it(backend):
    """Hooks are not traced: the number of graphs does not grow with the steps, and there is no warning."""

    def body(r):
        records = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("torch._dynamo").addHandler(handler)
        for reduction in ("mean", "weighted"):
            model = mlp()
            averager, of = attach(model, reduction, bucket_mb=1e-4)

            def step(x, model=model, averager=averager, of=of):
                model.zero_grad()
                for k in range(2):
                    of(lambda: model(x).square().sum(), r + 1, reduces=k == 1)
                averager.synchronize()

            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            compiled = torch.compile(step, backend=backend)
            for k in range(12):
                with warnings.catch_warnings(record=True) as caught:
                    compiled(batch(r, k))
                found = [p.grad.clone() for p in model.parameters()]
                step(batch(r, k))
                same(found, [p.grad for p in model.parameters()])
                records += [str(w.message) for w in caught]
                if k == 4:
                    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            assert graphs <= 2
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
            model.zero_grad()
            whole = torch.compile(model, backend=backend, fullgraph=True)
            of(whole(batch(r)).square().sum())
            same([p.grad for p in model.parameters()], averaged(2))
        return records

    assert spawn(body, range(2), timeout=280) == [[], []]


def test_a_hook_is_not_traced():
    """Dynamo does not trace a marked hook or its callees; the mark is set without importing Dynamo."""
    from diffcoll.core.torch_private.tracing import untraced

    calls = []

    @untraced
    def hook(x):
        calls.append(torch.compiler.is_dynamo_compiling())
        return helper(x)

    def helper(x):
        calls.append(torch.compiler.is_dynamo_compiling())
        return x.sin()

    @torch.compile(backend="eager")
    def calling(x):
        return hook(x).cos()

    for call in (calling, torch.compile(hook, backend="eager")):
        calls.clear()
        call(torch.ones(2))
        assert calls == [False, False]


@everywhere
def test_hooks_on_some_ranks_only(where):
    def body(r):
        w = [torch.nn.Parameter(torch.ones(1))]
        return refused(lambda: dc.GradientAverager(w, hooks=r != 1), dc.CollectiveMismatchError)

    for text in RUNS[where](body, range(2)):
        assert re.search(r"arguments differ; .*\n  rank 0: hooks=True\n  rank 1: hooks=False", text)


@everywhere
def test_a_join_within_a_join(where):
    """The outer loop raises on all ranks, also on one that has run out of batches."""

    def body(r):
        averager = dc.GradientAverager([torch.nn.Parameter(torch.tensor(1.0))])
        found = []
        with pytest.raises(RuntimeError) as caught:
            for x in averager.join([1.0, 2.0][: 2 - r]):
                found.append(x)
                if len(found) == 2:  # rank 1 repeats its batch
                    found += averager.join([3.0])
        assert found == [1.0, 2.0 - r, 3.0]
        return str(caught.value)

    for text in RUNS[where](body, range(2)):
        assert text == (
            "GradientAverager.join: another join() has begun since, expected one loop at a time; "
            "end this loop before the next"
        )


def test_a_join_that_is_closed_within_the_next():
    """A loop left by break, whose iterator is still referenced, does not change the weights of the next loop."""

    def body(r):
        w = torch.nn.Parameter(torch.tensor(1.0))
        averager = dc.GradientAverager([w])
        found = []
        left = averager.join([1.0, 2.0, 3.0][: 3 - r])
        next(left)
        for x in averager.join([1.0, 2.0, 3.0][: 3 - r]):
            w.grad = None
            (w * x * (r + 1)).backward()
            found.append(w.grad.item())
            left.close()
        return found

    assert rules(body, range(2)) == [[1.5, 3.0, 3.0]] * 2
