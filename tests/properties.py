"""Properties that every collective must have in every case.

A property is a generator: it yields the body that every rank runs, is sent all ranks' results, and asserts.
So the same property can be checked on simulated ranks, case by case, and on real processes, all cases in one run.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diffcoll.core import maps, rules
from diffcoll.testing import cases
from diffcoll.testing.cases import Case, real_inner

Body = Callable[[int], Any]
Property = Callable[[Case], Generator[Body, list[Any], None]]
SEED = 1
EXACT = 1e-12

#: Memory layouts: dimensions exchanged, every second element, or an offset of a larger tensor.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x,
    "strided": lambda x: torch.stack([x, torch.full_like(x, 77)], -1)[..., 0],
    "offset": lambda x: torch.cat([x.new_full((3,), 77), x.reshape(-1)])[3:].view(x.shape),
}


@dataclass(frozen=True)
class LaidOut(Case):
    """A call whose inputs have one of these layouts."""

    layout: str = "contiguous"

    def x(self, rank: int, seed: int) -> Tensor:
        return LAYOUTS[self.layout](super().x(rank, seed))


def on_rank(case: Case, r: int, seed: int, measure: cases.Measure = cases.derivatives) -> cases.Measured:
    """Measure the call on this rank; all ranks do, and `cases.in_truth` does in one graph."""
    return measure([(case, r)], lambda xs: [case.call(x, r) for x in xs], seed)[0]


def is_linear(case: Case) -> bool:
    return case.arguments.get("op", "sum") in ("sum", "mean")


def value_and_gradients_to_third_order_are_those_of_truth(case: Case) -> Generator[Body, list[Any], None]:
    measure = partial(cases.derivatives, orders=3)
    got = yield lambda r: on_rank(case, r, SEED, measure)
    expected = cases.in_truth(case, SEED, measure)
    for r, measured in enumerate(got):
        for name, error in cases.errors(measured, expected, r).items():
            assert error < EXACT, f"{case}: {name} of rank {r} is off by {error:.1e}"


def the_input_is_untouched_and_the_output_its_own(case: Case) -> Generator[Body, list[Any], None]:
    def body(r: int) -> tuple[bool, ...]:
        x = case.x(r, SEED)
        before = x.clone()
        y = case.call(x, r)
        shares = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and y.numel() > 0
        contiguous = [case.call(LAYOUTS[layout](x), r).is_contiguous() for layout in ("transposed", "strided")]
        return torch.equal(x, before), type(y) is Tensor, not shares, *contiguous  # whatever the strides of x

    assert (yield body) == [(True,) * 5] * case.size, case


def the_output_may_be_changed_in_place(case: Case) -> Generator[Body, list[Any], None]:
    """Gradients to second order equal those of the same formula out of place; x is not modified with y."""

    def body(r: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        def gradients(in_place: bool) -> list[Tensor]:
            leaf = case.x(r, SEED).requires_grad_()
            y = case.call(leaf, r)
            before = leaf.detach().clone()
            w = case.w(y, r, SEED)
            y = y.mul_(2).add_(1) if in_place else y * 2 + 1
            loss = real_inner(w, y.sin()) + 0 * real_inner(leaf, leaf)
            (g,) = torch.autograd.grad(loss, leaf, create_graph=True)
            (h,) = torch.autograd.grad(real_inner(case.v(g, r, SEED), g), leaf)
            assert torch.equal(leaf, before), case
            return [y.detach(), g.detach(), h]

        with torch.no_grad():  # in which a collective might return x itself
            x = case.x(r, SEED)
            case.call(x, r).fill_(7)
        return gradients(True), gradients(False), [x, case.x(r, SEED)]

    for changed, expected, xs in (yield body):
        for a, b in zip(changed, expected, strict=True):
            _close([a], [b], case)
        assert torch.equal(*xs), case


def shared(f: maps.Linear) -> tuple[bool, bool]:
    """Whether x, and whether y, is replicated."""
    return f.of_replicated, getattr(f, "replicated", False)


def the_adjoint_is_the_adjoint(case: Case) -> Generator[Body, list[Any], None]:
    """Σ_r ⟨(F x)_r, y_r⟩ = Σ_r ⟨x_r, (F* y)_r⟩, one term for a replicated tensor; the adjoint of the adjoint is F."""
    if not is_linear(case):
        return

    def body(r: int) -> tuple[complex, complex]:
        x, f = _rule(case, r)
        fx = rules.apply(f, x)
        assert torch.equal(rules.apply(f.adjoint.adjoint, x), fx), case
        assert shared(f) == case.shared == shared(f.adjoint)[::-1], case
        y = case.w(fx, r, SEED)
        return _inner(fx, y), _inner(x, rules.apply(f.adjoint, y))

    left, right = zip(*(yield body), strict=True)
    shared_x, shared_y = case.shared
    left, right = (left[0] if shared_y else sum(left)), (right[0] if shared_x else sum(right))
    assert abs(left - right) <= EXACT * max(1.0, abs(left)), f"{case}: {left} ≠ {right}"


def the_jvp_is_that_of_truth(case: Case) -> Generator[Body, list[Any], None]:
    got = yield lambda r: on_rank(case, r, SEED, cases.tangents)
    expected = cases.in_truth(case, SEED, cases.tangents)
    for name in ("output", "tangent"):
        _close([m[name] for m in got], [m[name] for m in expected], case)


def vmap_is_a_loop(case: Case) -> Generator[Body, list[Any], None]:
    def body(r: int) -> list[tuple[Tensor, Tensor]]:
        xs = [case.x(r, SEED + i) for i in range(3)]
        loop = torch.stack([case.call(x, r) for x in xs])
        pairs = []
        for dim in {0, xs[0].dim()}:
            mapped = torch.func.vmap(lambda x: case.call(x, r), in_dims=dim)(torch.stack(xs, dim))
            pairs.append((mapped, loop))
        return pairs

    for pairs in (yield body):
        for mapped, loop in pairs:
            _close([mapped], [loop], case)  # not bitwise: the order of summation may differ


def _is_small(case: Case) -> bool:
    """Whether x is real, of the same shape on all ranks, and small enough for whole Jacobians."""
    return not case.dtype.is_complex and len(set(case.shapes)) == 1 and 0 < torch.Size(case.shapes[0]).numel() <= 12


def every_transform_gives_the_gradients_of_truth(case: Case) -> Generator[Body, list[Any], None]:
    """Of torch.func and functional, and both kinds of checkpoints; to second order where they nest."""
    if not _is_small(case):
        return

    def body(r: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        x = case.x(r, SEED)
        w = case.w(case.call(x, r), r, SEED)
        v = case.v(x, r, SEED)

        def loss(x: Tensor) -> Tensor:
            return (w * case.call(x, r).sin()).sum()

        def checkpointed(reentrant: bool) -> Tensor:
            leaf = x.clone().requires_grad_()
            checkpoint(loss, leaf, use_reentrant=reentrant).backward()
            return leaf.grad

        first = [torch.func.grad(loss)(x), torch.func.vjp(loss, x)[1](torch.ones((), dtype=x.dtype))[0]]
        first += [torch.func.jacrev(loss)(x), torch.func.vmap(torch.func.grad(loss))(torch.stack([x, x]))[1]]
        first += [checkpointed(True), checkpointed(False)]
        second = [torch.autograd.functional.hvp(loss, x, v)[1]]
        second += [torch.func.grad(lambda x: torch.func.jvp(loss, (x,), (v,))[1])(x)]
        hessian = torch.func.jacfwd(torch.func.jacrev(loss))(x)
        along = torch.func.jvp(torch.func.grad(loss), (x,), (torch.ones_like(x),))[1]
        return first, second, [hessian.flatten(x.dim()).sum(-1), along]

    first, second, of_ones = zip(*(yield body), strict=True)
    expected = cases.in_truth(case, SEED)
    for found in zip(*first, strict=True):
        _close(found, [m["gradient"] for m in expected], case)
    for found in zip(*second, strict=True):
        _close(found, [m["second"] for m in expected], case)
    hessians, along = zip(*of_ones, strict=True)
    _close(hessians, along, case)


def modes_change_nothing(case: Case) -> Generator[Body, list[Any], None]:
    """autocast, a default device, no_grad and inference_mode keep values and dtypes; the last two record no graph."""

    def body(r: int) -> tuple[list[Tensor], bool]:
        x = case.x(r, SEED)
        leaf = x.clone().requires_grad_()
        with torch.device("meta"):
            y = case.call(x.clone().requires_grad_(), r)
            y.backward(torch.ones_like(y, device="cpu"))
        found = [y.detach()]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(case.call(x, r))
        with torch.no_grad():
            found.append(case.call(leaf, r))
        with torch.inference_mode():
            found.append(case.call(x, r).clone())
        return [y.detach() for y in (case.call(x, r), *found)], any(y.requires_grad for y in found)

    for (plain, *others), recorded in (yield body):
        assert not recorded, case
        for y in others:
            assert y.dtype == plain.dtype, case
            _close([y], [plain], case)


ALL = [
    value_and_gradients_to_third_order_are_those_of_truth,
    the_input_is_untouched_and_the_output_its_own,
    the_output_may_be_changed_in_place,
    the_adjoint_is_the_adjoint,
    the_jvp_is_that_of_truth,
    vmap_is_a_loop,
    every_transform_gives_the_gradients_of_truth,
    modes_change_nothing,
]


def once(table: Iterable[Case]) -> list[Case]:
    """Return the first case of each collective, reduction, and async_op or not."""
    found: dict[tuple[str, ...], Case] = {}
    for case in table:
        found.setdefault((case.name, str(case.arguments.get("op")), str(case.arguments.get("async_op"))), case)
    return list(found.values())


def pairs(table: Sequence[Case]) -> list[tuple[Property, Case]]:
    """Return every property with every case, but transforms, which run a call many times, with the cases of `once`."""
    transforms = every_transform_gives_the_gradients_of_truth
    several = [(holds, case) for case in table for holds in ALL if holds is not transforms]
    return several + [(transforms, case) for case in once(filter(_is_small, table))]


def hold(pairs: Iterable[tuple[Property, Case]], n: int, run: Callable[..., list[Any]]) -> set[Property]:
    """Assert properties of cases on n ranks, all in one run; return the properties that apply to a case."""
    started = [(p, g, body) for p, case in pairs if (body := next(g := p(case), None)) is not None]
    bodies = [body for *_, body in started]
    results = run(lambda r: [body(r) for body in bodies], range(n))
    for i, (_, g, _) in enumerate(started):
        try:
            g.send([of_rank[i] for of_rank in results])
        except StopIteration:
            continue
        raise AssertionError("a property yields once")
    return {p for p, *_ in started}


def _rule(case: Case, r: int) -> tuple[Tensor, maps.Linear]:
    """Return an x for the map of a call, and the map, which is read from the autograd graph."""
    x = case.x(r, SEED)
    y = case.call(x.requires_grad_(), r)
    node = y.grad_fn
    while not hasattr(node, "f"):  # a mean of half precision ends with a conversion
        node = node.next_functions[0][0]
    like = rules.apply(node.f.adjoint, y.detach())
    return case.v(like, r, SEED), node.f


def _close(got: Sequence[Tensor], expected: Sequence[Tensor], case: Case) -> None:
    for r, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert cases.error(a, b, expected) < EXACT, f"{case}: rank {r}"


def _inner(a: Tensor, b: Tensor) -> complex:
    return complex((a.conj() * b).sum())
