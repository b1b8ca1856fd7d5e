"""Gradients that the user replaces, and hooks that lose information."""

from functools import partial

import pytest
import torch
from runs import rules
from torch import nn
from training import LEFT, RUNS, attach, by_each_reduction, on_two, refused

import diffcoll as dc


def made(reduction, **arguments):
    w = nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.double))
    averager, of = attach([w], reduction, **arguments)

    def backward(x):
        of(lambda: w.sum() * x)
        return w.grad.tolist()[0]

    return w, averager, backward


@on_two
@by_each_reduction
def test_a_reduced_gradient_that_was_replaced(where, reduction):
    """Right for a mean, else an error, since a gradient of this rank's own cannot be told from it; right in place."""

    def body(r):
        w, _, backward = made(reduction)
        backward(2.0 * r)
        w.grad.mul_(0.5)
        found = [backward(1.0 + r)]
        w.grad = w.grad * 0.5
        if reduction == "mean":
            return found, backward(3.0 * r)
        text = refused(lambda: backward(3.0 * r))
        w.grad = None
        assert backward(1.0) == pytest.approx({"sum": 3.0, "weighted": 1.0}[reduction])
        w.grad = torch.zeros(2, dtype=torch.double)
        assert backward(1.0) == pytest.approx({"sum": 3.0, "weighted": 1.0}[reduction])
        return found, text

    factor = {"sum": 3.0}.get(reduction, 1.0)
    text = (
        "GradientAverager: 0: its gradient was replaced after its reduction, and would be reduced twice; modify it in "
        "place, or call zero_grad() before backward"
    )
    for found, second in RUNS[where](body, range(3)):
        assert found == [pytest.approx(factor * (0.5 * 2.0 + 2.0))]
        assert second == (pytest.approx(0.5 * 3.0 + 3.0) if reduction == "mean" else text)


@by_each_reduction
def test_a_lossy_hook_receives_what_was_not_reduced_yet(reduction):
    """Also if the gradient is not zeroed: a hook that keeps one eighth of a row reduces each gradient once."""
    rows = []

    def eighth(bucket):
        rows.append(bucket.row.tolist())
        return bucket.all_reduce(bucket.row / 8).wait()

    def body(r):
        _, _, backward = made(reduction, comm_hook=eighth)
        return [backward(8.0 * (r + 1)), backward(16.0 * r), backward(0.0)]

    found = rules(body, range(3))
    n = 1.0 if reduction == "sum" else 3.0
    assert found == [pytest.approx([6 / n, 12 / n, 12 / n])] * 3
    assert sorted(row[0] for row in rows) == [0.0, 0.0, 0.0, 0.0, 8.0, 16.0, 16.0, 24.0, 32.0]


@pytest.mark.parametrize("arguments", [{}, {"comm_dtype": torch.float16}, {"bucket_mb": 1e-6}], ids=str)
@by_each_reduction
def test_gradients_that_are_views_of_a_flat_buffer(reduction, arguments):
    """They stay so, and the buffer is filled in every step, with micro-batches and without zeroing, too."""

    def body(r):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        averager, of = attach(model, reduction, **arguments)
        flat = torch.zeros(sum(p.numel() for p in model.parameters()))
        parts = flat.split([p.numel() for p in model.parameters()])
        views = [part.view_as(p) for part, p in zip(parts, model.parameters(), strict=True)]
        for p, view in zip(model.parameters(), views, strict=True):
            p.grad = view

        def backward(x, reduces=True):
            of(lambda: model(torch.full((1, 3), x)).sum(), reduces=reduces)

        found = []
        for step in range(4):
            if step != 2:
                flat.zero_()
            if step == 3:
                backward(float(r + step), reduces=False)
            backward(float(r + 2 * step))
            assert all(p.grad is view for p, view in zip(model.parameters(), views, strict=True))
            found.append(flat.clone())
        assert averager.skip_step(False) is False
        return found

    def alone(xs):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        for x in xs:
            model(torch.full((1, 3), float(x))).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    found = rules(body, range(3))
    n = {"sum": 1}.get(reduction, 3)
    first, second, third = (alone([r + 2 * step for r in range(3)]) / n for step in range(3))
    last = alone([r + 6 for r in range(3)] + [r + 3 for r in range(3)]) / (6 if reduction == "weighted" else n)
    for of_rank in found:
        for a, b in zip(of_rank, [first, second, second + third, last], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


def flat_model(reduction, is_flat=True, **arguments):
    """Two parameters whose gradients are views of a buffer, or are not."""
    w, v = (nn.Parameter(torch.ones(2, dtype=torch.double)) for _ in range(2))
    averager, of = attach([w, v], reduction, **arguments)
    flat = torch.zeros(4, dtype=torch.double)
    if is_flat:
        w.grad, v.grad = flat.split(2)

    def backward(x, weight=1.0, reduces=False, dead=False):
        """The gradient of w is x, that of v is 2 x, or zero if it is dead; both are used."""
        of(lambda: (x * w).sum() + (0.0 if dead else 2.0 * x) * v.sum(), weight, reduces)

    return [w, v], averager, flat, backward


ZEROS = {
    "zero_": lambda flat, parameters: flat.zero_(),
    "data": lambda flat, parameters: flat.data.zero_(),
    "numpy": lambda flat, parameters: flat.numpy().fill(0.0),
    "zero_grad": lambda flat, parameters: torch.optim.SGD(parameters).zero_grad(set_to_none=False),
}
WAYS = [*(("rules", zero) for zero in ZEROS), ("gloo", "zero_")]
#: How a user drops gradients, in a flat buffer and without.
DROPS = {
    **ZEROS,
    "in place": lambda _, parameters: torch.optim.SGD(parameters).zero_grad(set_to_none=False),
    "to None": lambda _, parameters: torch.optim.SGD(parameters).zero_grad(),
    "each by data": lambda _, parameters: [p.grad.data.zero_() for p in parameters],
}
ALL_WAYS = [*(("rules", drop) for drop in DROPS), ("gloo", "zero_")]
LOSSLESS = {"comm_hook": lambda bucket: bucket.all_reduce(bucket.row)}


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize(("where", "zero"), WAYS)
def test_a_flat_buffer_that_is_zeroed_drops_the_weight(where, zero, dead):
    """Between micro-batches, on rank 1 only; also if one of the gradients was zero before, and with synchronize."""

    def body(r):
        parameters, averager, flat, backward = flat_model("weighted")
        found = []
        for synchronizes in (False, True, False):
            flat.zero_()
            if r == 1:
                backward(50.0, 7.0, dead=dead)
                ZEROS[zero](flat, parameters)
            backward(1.0 + r, 2.0 + r)
            backward(3.0 * r, 1.0, reduces=not synchronizes)
            if synchronizes:
                averager.synchronize()
            found.append(flat.tolist())
        return found

    mean = sum((2.0 + r) * (1.0 + r) + 3.0 * r for r in range(3)) / sum(3.0 + r for r in range(3))
    assert RUNS[where](body, range(3)) == [[pytest.approx([mean, mean, 2 * mean, 2 * mean])] * 3] * 3


def numbers(flat, parameters):
    """What is in the gradients, and in the buffer if they are views of it."""
    found = torch.cat([p.grad for p in parameters])
    assert parameters[0].grad.data_ptr() != flat.data_ptr() or torch.equal(found, flat)
    return found.tolist()


@pytest.mark.parametrize(("where", "drop"), ALL_WAYS)
def test_a_rank_that_drops_its_gradients_and_synchronizes(where, drop):
    """It contributes zeros of weight zero."""

    def body(r):
        parameters, averager, flat, backward = flat_model("weighted", drop in ZEROS)
        backward(1.0 + r, 2.0 + r)
        if r == 1:
            DROPS[drop](flat, parameters)
        averager.synchronize()
        assert (parameters[0].grad.data_ptr() == flat.data_ptr()) == (drop in ZEROS)
        return numbers(flat, parameters)

    mean = (2.0 * 1.0 + 4.0 * 3.0) / 6.0
    assert RUNS[where](body, range(3)) == [pytest.approx([mean, mean, 2 * mean, 2 * mean])] * 3


def reduced_or_text(call, gradient):
    """Return what is in the gradient after the call, or the text of its error."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return gradient().tolist()


@pytest.mark.parametrize("modified", [False, True])
def test_a_batch_whose_gradients_are_zero_in_a_flat_buffer(modified):
    """It counts; if something has written to the buffer since, nobody knows whether it was dropped: all ranks raise."""

    def body(r):
        _, averager, flat, backward = flat_model("weighted")
        backward(0.0, 5.0)
        if modified and r == 1:
            flat.zero_()
        found = reduced_or_text(averager.synchronize, lambda: flat)
        flat.zero_()
        backward(1.0 + r, 1.0, reduces=True)
        return found, flat.tolist()

    found = rules(body, range(3))
    assert [after for _, after in found] == [pytest.approx([2.0, 2.0, 4.0, 4.0])] * 3
    if not modified:
        assert [before for before, _ in found] == [[0.0] * 4] * 3
        return
    assert found[1][0] == (
        "GradientAverager: 0, …: all gradients are zero, and views of memory that was modified after they were "
        "accumulated, so whether the weight of their batch counts is not known; call set_weight(0) for a batch without "
        "gradients, or do not write to that memory before the reduction"
    )
    assert all(LEFT in found[r][0] for r in (0, 2))


@pytest.mark.parametrize(("where", "drop"), ALL_WAYS)
@pytest.mark.parametrize(
    "arguments", [{"reduction": "sum"}, {"reduction": "weighted"}, {"reduction": "mean", **LOSSLESS}]
)
def test_gradients_that_are_dropped_within_an_accumulation(where, drop, arguments):
    """After a reduction that was not zeroed: neither its result nor the micro-batch before counts."""

    def body(r):
        parameters, _, flat, backward = flat_model(is_flat=drop in ZEROS, **arguments)
        backward(1.0 + r, reduces=True)
        found = [numbers(flat, parameters)]
        backward(10.0 * r)  # added to it
        backward(2.0 + r, reduces=True)
        found.append(numbers(flat, parameters))
        backward(20.0 * r + 1.0)
        DROPS[drop](flat, parameters)
        backward(3.0 * r, reduces=True)
        assert (parameters[0].grad.data_ptr() == flat.data_ptr()) == (drop in ZEROS)
        return [*found, numbers(flat, parameters)]

    n = 1.0 if arguments["reduction"] == "sum" else 3.0
    m = 2.0 if arguments["reduction"] == "weighted" else 1.0  # two micro-batches of weight one
    steps = [6 / n, 6 / n + (30 + 9) / n / m, 9 / n]
    assert RUNS[where](body, range(3)) == [[pytest.approx([g, g, 2 * g, 2 * g]) for g in steps]] * 3


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("change", ["half", "zeros"])
def test_a_flat_buffer_that_is_modified_within_an_accumulation(change, dead):
    """An error if that is not to zero, or if it cannot be seen, since the gradient was zero before; on all ranks."""

    def body(r):
        _, _, flat, backward = flat_model("sum", bucket_mb=1e-6)
        backward(1.0 + r, reduces=True)
        backward(2.0 - r, dead=dead)
        if r == 1:
            flat.mul_(0.5 if change == "half" else 0.0)
        if change == "zeros" and not dead:
            backward(1.0, reduces=True)
            return flat.tolist()
        return refused(lambda: backward(1.0, reduces=True))

    found = rules(body, range(3))
    if change == "zeros" and not dead:
        assert found[1] == [3.0 + 2.0] * 2 + [6.0 + 4.0] * 2
        return
    assert found[1].endswith(
        ": its gradient was changed while backward calls were added to a reduced gradient; call zero_grad() before the "
        "first of them, or synchronize() before the change"
    )


# ── hooks of the user's, and gradients that the user assigns ─────────────────────────────────────────────


HOOKS = {
    "in place": lambda p: p.grad.mul_(p.grad[0].clone()),
    "data": lambda p: p.grad.data.mul_(p.grad[0].clone()),
    "replaced": lambda p: setattr(p, "grad", p.grad * p.grad[0]),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("how", HOOKS)
@pytest.mark.parametrize(("where", "size"), [("rules", 2), ("rules", 10000), ("gloo", 2), ("gloo", 10000)])
def test_a_hook_that_changes_a_gradient_in_a_flat_buffer(where, size, how, first):
    """Registered before or after the averager, and of another parameter: as without an averager."""

    def body(r):
        parameters = [nn.Parameter(torch.ones(size, dtype=torch.double)) for _ in range(3)]
        flat = torch.zeros(3 * size, dtype=torch.double)
        averager = partial(dc.GradientAverager, parameters, bucket_mb=1e-6, broadcast_parameters=False)
        if not first:
            averager()
        for p in parameters:
            p.register_post_accumulate_grad_hook(lambda p: (HOOKS[how](p), None)[1])
        # The gradient of the first is accumulated last.
        parameters[0].register_hook(lambda g: (flat[-size:].add_(100.0 * r), None)[1])
        if first:
            averager()
        for _ in range(2):  # buckets are sent within backward from the second one on
            flat.zero_()
            for p, part in zip(parameters, flat.split(size), strict=True):
                p.grad = part
            y = parameters[0].sum() * (r + 3.0)
            y = y + parameters[1].sum() * (r + 2.0)
            (y + parameters[2].sum() * (r + 1.0)).backward()
        return [p.grad[1].item() for p in parameters]

    squares = [sum((r + k) ** 2 for r in range(3)) / 3 for k in (3, 2, 1)]
    for found in RUNS[where](body, range(3)):
        assert found[:2] == pytest.approx(squares[:2])
        assert found[2] == pytest.approx(squares[2] + (0.0 if how == "replaced" else 100.0))


@pytest.mark.parametrize("reduction", ["sum", "mean", "weighted"])
@on_two
def test_one_of_several_reduced_gradients_was_replaced(where, reduction):
    """On one rank: an error on all ranks, unless the mean is the same; also if it is not used again."""

    def body(r):
        parameters = [nn.Parameter(torch.ones(2, dtype=torch.double)) for _ in range(3)]
        _, of = attach(parameters, reduction)
        found = []

        def backward(*used):
            of(lambda: sum(p.sum() * (r + 1.0) for p in used))

        for used in (parameters, parameters[1:]):
            for p in parameters:
                p.grad = None
            backward(*parameters)
            if r == 1:
                parameters[0].grad = parameters[0].grad * 1.0
            found.append(reduced_or_text(lambda used=used: backward(*used), lambda: parameters[0].grad))
        for p in parameters:
            p.grad = None
        backward(*parameters)
        return found, parameters[0].grad.tolist()

    for r, (found, after) in enumerate(RUNS[where](body, range(3))):
        assert after == [6.0 if reduction == "sum" else 2.0] * 2
        if reduction == "mean":
            assert found == [pytest.approx([x] * 2) for x in (4.0, 2.0)]
        elif r != 1:
            assert all(LEFT in text for text in found)
        else:
            words = "0: its gradient was replaced after its reduction, and would be reduced"
            assert all(words in text for text in found)


@on_two
def test_gradients_that_the_user_assigns_and_synchronizes(where):
    """Whatever is in `.grad` is reduced, in each step."""

    def body(r):
        w = nn.Parameter(torch.ones(2))
        averager, found = dc.GradientAverager([w], reduction="sum", hooks=False), []
        for k in range(3):
            w.grad = torch.full((2,), r + 1.0 + k)
            averager.synchronize()
            found.append(w.grad[0].item())
        return found

    assert RUNS[where](body, range(3)) == [[6.0, 9.0, 12.0]] * 3


@on_two
def test_a_zero_gradient_of_an_unused_parameter_needs_no_weight(where):
    """As in a flat buffer that was zeroed; one that is not zero is an error on all ranks."""

    def body(r):
        w, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
        _, backward = attach([w, unused], "weighted")
        unused.grad = torch.zeros(2)
        backward(w.sum() * (r + 1), 1 + 2 * r)
        found = w.grad.tolist(), unused.grad.tolist()
        _, backward = attach([w, unused], "weighted")
        w.grad, unused.grad = None, torch.full((2,), float(r))
        return found, refused(lambda: backward(w.sum()))

    results = RUNS[where](body, range(2))
    assert [found for found, _ in results] == [([1.75] * 2, [0.0] * 2)] * 2
    assert LEFT in results[0][1]
    assert "1: its gradient was not multiplied by the weight" in results[1][1]


# ── hooks of the user's ──────────────────────────────────────────────────────────────────────────────────


@on_two
@by_each_reduction
def test_hooks_of_the_user_get_this_ranks_own_gradient(where, reduction):
    """Also if they were registered after the averager, in torch.autograd.grad, and in a graph that is used again."""

    def body(r):
        w, averager, _ = made(reduction)
        seen = []
        w.register_hook(lambda g: seen.append(g[0].item()) or g * 2)
        weight = 1 + 2 * r
        if reduction == "weighted":
            averager.set_weight(weight)
        loss = w.sum() * (r + 1)
        own = [torch.autograd.grad(loss, w, retain_graph=True)[0][0].item() for _ in range(2)]
        with averager.no_sync():
            loss.backward(retain_graph=True)
        own += [torch.autograd.grad(loss, w, retain_graph=True)[0][0].item()]
        loss.backward(retain_graph=True)
        reduced = w.grad[0].item()
        averager.detach()
        w.grad = None
        loss.backward()
        return seen, own, reduced, w.grad[0].item()

    total = {"mean": 1.5, "sum": 3.0, "weighted": (1 * 1 + 3 * 2) / 4}[reduction]
    for r, found in enumerate(RUNS[where](body, range(2))):
        g = r + 1.0
        assert found == ([g] * 6, [2 * g] * 3, pytest.approx(2 * 2 * total), 2 * g)


@pytest.mark.parametrize("reduction", ["sum", "weighted"])
def test_a_backward_within_a_hook_of_the_same_parameter(reduction):
    """The pre-hook belongs to each AccumulateGrad: both gradients are multiplied by the weight once."""

    def body(r):
        w, averager, _ = made(reduction)
        inner = []

        def nested(g):
            if not inner:
                inner.append(True)
                with torch.enable_grad(), averager.no_sync():
                    (w.double().sum() * 10.0).backward()

        w.register_hook(nested)
        if reduction == "weighted":
            averager.set_weight(r + 1)
        with averager.no_sync():
            (w.sum() * (r + 1)).backward()
        averager.synchronize()
        return w.grad[0].item()

    total = {"sum": 1 + 10 + 2 + 10, "weighted": (1 * 11 + 2 * 12) / 3}[reduction]
    assert rules(body, range(2)) == [pytest.approx(total)] * 2


@pytest.mark.parametrize("where", ["rules", "gloo"])
@pytest.mark.parametrize("place", ["leaf", "inner", "accumulated", "pre-hook", "post-hook"])
def test_backward_within_a_hook_of_another_tensor(where, place):
    """As sentence-transformers' cached losses do: nothing of the outer graph may follow the hook. Reduced once."""

    def body(r):
        w, _, _ = made("sum")
        leaf = torch.ones(2, dtype=torch.double, requires_grad=True)
        inner = leaf * 1.0

        def nested(*_):
            for k in (1, 10):  # two chunks
                with torch.enable_grad():
                    (w.sum() * k * (r + 1)).backward()

        {
            "leaf": leaf.register_hook,
            "inner": inner.register_hook,
            "accumulated": leaf.register_post_accumulate_grad_hook,
            "pre-hook": inner.grad_fn.register_prehook,
            "post-hook": inner.grad_fn.register_hook,
        }[place](nested)
        found = []
        for _ in range(2):
            w.grad = None
            inner.sum().backward(retain_graph=True)
            found.append(w.grad[0].item())
        return found

    assert RUNS[where](body, range(2)) == [[33.0, 33.0]] * 2


@pytest.mark.parametrize("where", ["rules", "gloo"])
@pytest.mark.parametrize("place", ["leaf", "inner"])
def test_an_error_after_a_backward_within_a_hook(where, place):
    """It ends the outer pass, which reduces nothing; the next ones reduce once each."""

    def body(r):
        w, _, _ = made("sum")
        leaf = torch.ones(2, dtype=torch.double, requires_grad=True)
        inner = leaf * 1.0
        errors = [ValueError("once")]

        def nested(_):
            with torch.enable_grad():
                (w.sum() * (r + 1)).backward()
            if errors:
                raise errors.pop()

        {"leaf": leaf, "inner": inner}[place].register_hook(nested)
        with pytest.raises(ValueError, match="once"):
            inner.sum().backward(retain_graph=True)
        found = [w.grad[0].item()]
        for _ in range(2):
            w.grad = None
            inner.sum().backward(retain_graph=True)
            found.append(w.grad[0].item())
        return found

    assert RUNS[where](body, range(2)) == [[1.0, 3.0, 3.0], [2.0, 3.0, 3.0]]


@pytest.mark.parametrize("reduction", ["sum", "weighted"])
def test_the_averagers_hook_was_removed(reduction):
    """An error, not a gradient without its weight, or with the reduced one in it."""

    def body(r):
        w, _, backward = made(reduction)
        backward(1.0 + r)
        w._backward_hooks.clear()
        with pytest.raises(RuntimeError, match="without the averager's tensor hook, which was removed; make a new"):
            backward(1.0 + r)
        w, _, backward = made(reduction)
        return backward(1.0 + r)

    assert rules(body, range(2)) == [{"sum": 3.0, "weighted": 1.5}[reduction]] * 2
