"""The functions of torch.distributed with shapes, dtypes and ops: simulated ranks return and refuse what gloo does."""

from functools import cache
from types import FunctionType

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.nn.functional
from releases import RELEASE
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_map

from diffcoll.testing import simulate, spawn

pytestmark = [
    pytest.mark.skipif(RELEASE < (2, 13), reason="what gloo refuses differs between releases of torch"),
    pytest.mark.filterwarnings("ignore:.?torch.distributed:FutureWarning"),
]


def x(r, *shape):
    """Small numbers, different on every rank and at every place."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) * (r + 2) - 7


def empty(*shape):
    return torch.full(shape, -1.0)


def into(call, y, *more, **options):
    call(y, *more, **options)
    return y


# ── rows: name, f(r, n, group) ───────────────────────────────────────────────────────────────────────────


def gathered(r, n, g, outputs, shape):
    return into(dist.all_gather, [empty(*s) for s in outputs], x(r, *shape), group=g)


def gathered_into(r, n, g, output, shape):
    return into(dist.all_gather_into_tensor, empty(*output), x(r, *shape), group=g)


def coalesced(r, n, g, outer, inner):
    outputs = [[empty(2) for _ in range(inner)] for _ in range(outer)]
    inputs = [x(r, 2), x(r + 5, 2)]
    return into(dist.all_gather_coalesced, outputs, inputs, group=g)


def scattered(r, n, g, output, shape, op=dist.ReduceOp.SUM):
    return into(dist.reduce_scatter_tensor, empty(*output), x(r, *shape), op, group=g)


def scattered_list(r, n, g, output, shapes):
    return into(dist.reduce_scatter, empty(*output), [x(r + s, *shape) for s, shape in enumerate(shapes)], group=g)


def exchanged(r, n, g, inputs, outputs):
    return into(dist.all_to_all, [empty(*s) for s in outputs], [x(r + s, *t) for s, t in enumerate(inputs)], group=g)


def managed(r, n, g, device):
    y, z = [x(r, 3), x(r + 1, 2)], [empty(2 * n), empty(n)]
    with c10d._coalescing_manager(g, device):
        for t in y:
            dist.all_reduce(t, group=g)
    with c10d._coalescing_manager(g, device):
        for t in z:
            dist.all_gather_into_tensor(t, x(r, t.numel() // n), group=g)
    return y, z


def of_dtype(r, n, g, dtype):
    """The calls that move or sum a dtype, each with its outcome."""

    def cast(*shape):
        return x(r, *shape).to(dtype)

    def outcome(call):
        try:
            found = call()
        except Exception:
            return "refused"
        return [t.tolist() if t.dtype != torch.float8_e4m3fn else t.float().tolist() for t in found]

    calls = [
        lambda: [into(dist.broadcast, cast(3), n - 1, group=g)],
        lambda: into(
            dist.all_gather, [cast(2) * 0 for _ in range(n)] if "float8" not in str(dtype) else [], cast(2), group=g
        ),
        lambda: [into(dist.all_gather_into_tensor, torch.empty(2 * n, dtype=dtype), cast(2), group=g)],
        lambda: [into(dist.all_to_all_single, torch.empty(2 * n, dtype=dtype), cast(2 * n), group=g)],
        lambda: [into(dist.reduce_scatter_tensor, torch.empty(2, dtype=dtype), cast(2 * n), group=g)],
    ]
    ops = dist.ReduceOp
    calls += [
        lambda op=op: [into(dist.all_reduce, cast(3), op, group=g)]
        for op in (ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX, ops.AVG, ops.BAND, ops.BOR, ops.BXOR)
    ]
    return [outcome(call) for call in calls]


def transposed(r, n, g):
    y = empty(3, 2 * n).t()
    dist.all_gather_into_tensor(y, x(r, 3, 2).t(), group=g)
    return y


def over_both(f, *more):
    return lambda r, n, g: f(r, n, g, *(m(n) if isinstance(m, FunctionType) else m for m in more))


SAME = {
    "all_gather": over_both(gathered, lambda n: [(2, 3)] * n, (2, 3)),
    "all_gather, 0-d": over_both(gathered, lambda n: [()] * n, ()),
    "all_gather, empty": over_both(gathered, lambda n: [(0, 2)] * n, (0, 2)),
    "all_gather_coalesced": over_both(coalesced, lambda n: n, 2),
    "all_gather_into_tensor": over_both(gathered_into, lambda n: (2 * n, 3), (2, 3)),
    "all_gather_into_tensor, strides": transposed,
    "all_gather_into_tensor, empty": over_both(gathered_into, (0, 3), (0, 3)),
    "reduce_scatter_tensor": over_both(scattered, (2, 3), lambda n: (2 * n, 3)),
    "reduce_scatter_tensor, mean": over_both(scattered, (2,), lambda n: (2 * n,), dist.ReduceOp.AVG),
    "reduce_scatter": over_both(scattered_list, (3, 2), lambda n: [(3, 2)] * n),
    "reduce_scatter, uneven": lambda r, n, g: scattered_list(r, n, g, (r + 1,), [(s + 1,) for s in range(n)]),
    "all_to_all": over_both(exchanged, lambda n: [(2, 2)] * n, lambda n: [(2, 2)] * n),
    "coalescing": over_both(managed, None),
    "coalesced, functional": lambda r, n, g: [
        y + 0
        for y in fc.all_gather_into_tensor_coalesced([x(r, 2), x(r, 1)], g)
        + fc.reduce_scatter_tensor_coalesced([x(r, 2 * n), x(r, n)], "sum", [0, 0], g)
    ],
}
DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.bool, torch.float8_e4m3fn, torch.uint16]
SAME |= {str(dtype): over_both(of_dtype, dtype) for dtype in DTYPES}


@cache
def on_gloo():
    """The outcomes of all rows, by number of ranks and rank: of all three ranks, then of ranks 0 and 1."""

    def body(r):
        found = {}
        for n, group in ((3, dist.group.WORLD), (2, dist.new_group([0, 1]))):
            for name, call in SAME.items() if r < n else ():
                try:
                    found[n, name] = as_lists(call(r, n, group))
                except Exception as error:
                    found[n, name] = f"{type(error).__name__}: {error}"
        return found

    return spawn(body, range(3))


def as_lists(found):
    return tree_map(lambda t: t.tolist() if isinstance(t, torch.Tensor) else t, found)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", SAME)
def test_returns_what_gloo_returns(name, n):
    found = simulate(lambda r: as_lists(SAME[name](r, n, dist.group.WORLD)), range(n))
    right = [outcomes[n, name] for outcomes in on_gloo()[:n]]
    if name in map(str, DTYPES):  # gloo refuses some dtypes and ops, which simulated ranks do not
        found = [
            [theirs if theirs == "refused" else ours for ours, theirs in zip(*of_rank, strict=True)]
            for of_rank in zip(found, right, strict=True)
        ]
    assert found == right
