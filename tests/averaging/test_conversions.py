"""GradientAverager on modules whose parameters are replaced, swapped or converted after it was attached."""

import contextlib
import re
from functools import partial

import pytest
import torch
from runs import rules
from torch import nn
from training import attach, batch, by_each_reduction, mlp, refused, shares

import diffcoll as dc


def expected(n, reduction, model, k=0):
    """Return the reduced gradients of the ranks' losses at the model's parameters, by one process."""
    weights = shares(reduction, [(r, r + 1) for r in range(n)])
    return torch.autograd.grad(sum(w * loss(model, r, k) for r, w in enumerate(weights)), list(model.parameters()))


def loss(model, r, k=0):
    return model(batch(r, k, next(model.parameters()).dtype)).square().sum()


def same(found, wanted, tolerance=1e-12):
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1), (a, b)


# ── replaced ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_module_in_the_place_of_a_freed_one():
    """The new module may have the id of the old one, which was freed before; the same for new parameters."""

    def body(r):
        for _ in range(20):
            model = nn.Module()
            model.body, model.head = nn.Linear(3, 2), nn.Linear(2, 2)
            averager = dc.GradientAverager(model)

            def of_both(model=model):
                model.forward = lambda x: model.head(model.body(x))
                return model(batch(r).float()).sum()

            of_both().backward()
            for _ in range(2):
                del model.head
                model.head = nn.Linear(2, 2)
                model.zero_grad()
                text = refused(lambda: of_both().backward())
                assert text.startswith("GradientAverager: head.weight: the module got this parameter after")
            averager.detach()

    rules(body, range(2))


def test_all_parameters_replaced_again_and_again():
    """New parameters are hooked in forward, also one with the id of an earlier, freed one."""

    def body(r):
        model = nn.Linear(3, 2)
        dc.GradientAverager(model)
        for k in range(10):
            for name in ("weight", "bias"):
                p = getattr(model, name)
                delattr(model, name)
                setattr(model, name, nn.Parameter(p.detach() + k))
                del p
            text = refused(lambda: model(batch(r).float()).sum().backward())
            assert text.startswith("GradientAverager: weight: the module got this parameter after")

    rules(body, range(2))


# ── swapped ──────────────────────────────────────────────────────────────────────────────────────────────

SWAPS = {
    "load_state_dict": (
        lambda model: model.load_state_dict(mlp().state_dict()),
        r"0\.weight(.|\n)*Cannot swap t1 because it has weakref",
    ),
    "a conversion": (lambda model: model.float(), r"Couldn't swap Linear\.weight"),
    "by hand": (
        lambda model: torch.utils.swap_tensors(model[2].bias, nn.Parameter(torch.zeros(2).double())),
        "Cannot swap t1 because it has weakref",
    ),
}


@contextlib.contextmanager
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@by_each_reduction
@pytest.mark.parametrize("given", ["a module", "parameters"])
def test_swapped_parameters_are_refused(given, reduction):
    """PyTorch drops the hooks of a tensor that it swaps, so the averager makes it refuse; `detach` allows it again."""

    def body(r):
        model = mlp()
        averager, backward = attach(model if given == "a module" else model.parameters(), reduction)
        backward(lambda: loss(model, r), r + 1)
        before = [p.detach().clone() for p in model.parameters()]
        for swap, text in SWAPS.values():
            with swapping():
                assert re.search(text, refused(lambda: swap(model)))  # noqa: B023
            same([p.detach() for p in model.parameters()], before, 0)
            model.zero_grad()
            backward(lambda: loss(model, r, 1), r + 1)
            same([p.grad for p in model.parameters()], expected(2, reduction, model, 1))
        averager.detach()
        with swapping():
            for swap, _ in SWAPS.values():
                swap(model)

    rules(body, range(2))


# ── converted, and converted back ────────────────────────────────────────────────────────────────────────


def there_and_back(model):
    model.half()
    model.float()


def other_memory(model):
    for p in model.parameters():
        p.data = p.data.clone()
        if p.grad is not None:
            p.grad.data = p.grad.data.clone()


@pytest.mark.parametrize("zeroed", ["to None", "in place", "no"])
@pytest.mark.parametrize("given", ["a module", "parameters"])
@by_each_reduction
def test_converted_and_converted_back(reduction, given, zeroed):
    """`.grad` is then the same object with other memory, and the parameter has another AccumulateGrad."""

    def body(r):
        for convert in (there_and_back, other_memory):
            model = mlp(torch.float)
            averager, backward = attach(model if given == "a module" else model.parameters(), reduction)
            for k in range(3):
                convert(model)
                if zeroed != "no":
                    model.zero_grad(set_to_none=zeroed == "to None")
                earlier = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
                wanted = expected(3, reduction, model, k)
                backward(partial(loss, model, r, k), r + 1)
                same([p.grad for p in model.parameters()], [a + b for a, b in zip(earlier, wanted, strict=True)], 1e-5)
            averager.detach()

    rules(body, range(3))


def test_converted_between_forward_and_backward_and_between_micro_batches():
    """The graph has the old AccumulateGrad."""

    def body(r):
        model = mlp(torch.float)
        averager, backward = attach(model, "weighted")
        wanted = expected(2, "weighted", model)
        averager.set_weight(r + 1)
        before = loss(model, r)
        other_memory(model)
        model(batch(r, dtype=torch.float))
        before.backward()
        same([p.grad for p in model.parameters()], wanted, 1e-5)
        model.zero_grad()
        for k in range(2):
            other_memory(model)
            there_and_back(model)
            backward(lambda k=k: model(batch(r, 2 * k, torch.float)).sum(), reduces=k == 1)
        losses = [model(batch(s, 2 * k, torch.float)).sum() for s in range(2) for k in range(2)]
        same([p.grad for p in model.parameters()], torch.autograd.grad(sum(losses) / 4, list(model.parameters())), 1e-2)

    rules(body, range(2))


def test_a_gradient_that_is_kept_over_a_conversion():
    """The converted `.grad` is no view of the bucket; the kept one still is, and is never written again."""
    model = mlp(torch.float)
    dc.GradientAverager(model)
    model(batch(0, dtype=torch.float)).sum().backward()
    kept = [p.grad.view(-1) for p in model.parameters()]
    values = [g.clone() for g in kept]
    there_and_back(model)
    model(batch(1, dtype=torch.float)).sum().backward()
    same(kept, values, 0)


def test_memory_of_a_gradient_that_is_exchanged_in_backward():
    """Once the gradient was copied into its bucket this is an error on all ranks, like any other change."""

    def body(r):
        model = nn.Linear(200, 100)
        dc.GradientAverager(model)

        def exchange(p):
            p.grad.data = p.grad.data * 2

        if r == 1:
            model.weight.register_post_accumulate_grad_hook(exchange)
        text = refused(lambda: model(torch.ones(1, 200)).sum().backward())
        assert ("weight: its gradient was changed" if r == 1 else "a rank has left this backward") in text

    rules(body, range(2))


# ── modules that cannot be averaged as they are ──────────────────────────────────────────────────────────


def test_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    text = refused(lambda: dc.GradientAverager(model), ValueError)
    assert text == (
        "GradientAverager: module_or_params: got 0.weight, which is not initialized yet, expected initialized "
        "parameters; initialize lazy modules by a forward pass first, on all ranks"
    )
    model(torch.ones(1, 3))
    dc.GradientAverager(model)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.int8])
def test_dtypes_in_which_nothing_can_be_added(dtype):
    text = refused(lambda: dc.GradientAverager(mlp(), comm_dtype=dtype), TypeError)
    assert text == (
        f"GradientAverager: comm_dtype: got {dtype}, expected torch.float16, torch.bfloat16, torch.float32, "
        "torch.float64, in which gradients can be added, or None"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules():
    """PyTorch compiles forward hooks: an error that says so; a scripted module is averaged."""

    def body(r):
        model = mlp()
        averager = dc.GradientAverager(model, broadcast_buffers="each forward")
        text = refused(lambda: torch.jit.script(model), AttributeError)
        assert text.startswith("GradientAverager: torch.jit.script compiles forward hooks")
        assert "call detach() first; to train the scripted module, make a GradientAverager of its named" in text
        traced = torch.jit.trace(model, batch(r), check_trace=False)
        same([traced(batch(r))], [model(batch(r))], 1e-12)
        averager.detach()
        scripted = torch.jit.script(model)
        text = refused(lambda: dc.GradientAverager(nn.Sequential(scripted)), TypeError)
        assert text.startswith("GradientAverager: module_or_params: 0: is scripted, and cannot be watched for new")
        averager = dc.GradientAverager(scripted.named_parameters())
        loss(scripted, r).backward()
        same([p.grad for p in scripted.parameters()], expected(2, "mean", mlp()))

    rules(body, range(2))
