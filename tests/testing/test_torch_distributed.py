"""Code that calls torch.distributed, unchanged: the same on simulated ranks as on gloo processes."""

import contextlib
import gc
import os
import re
import threading
import time
import weakref
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.nn.functional as dist_nn
from field import gather_layer
from releases import RELEASE
from runs import new_group
from torch import nn
from torch.distributed import all_gather as imported_all_gather
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map
from verdicts import ruled

import diffcoll as dc
from diffcoll.testing import simulate, spawn

pytestmark = [  # releases of torch since 2.13 name some of its functions deprecated
    pytest.mark.filterwarnings("ignore:.?torch.distributed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The combination of ranks . tag:FutureWarning"),
]


def numbers(r, *shape, of=3):
    """Small whole numbers, exact in every dtype, different on every rank."""
    return torch.randint(-of, of + 1, shape, generator=torch.Generator().manual_seed(17 + r)).double()


def empty(*shape):
    return torch.empty(shape).double()


def done(call, y, *arguments, **more):
    """Return y after a call that writes to it."""
    call(y, *arguments, **more)
    return y


# ── programs, of their rank ──────────────────────────────────────────────────────────────────────────────


def as_lists(found):
    return tree_map(lambda x: x.tolist() if isinstance(x, torch.Tensor) else x, found)


def queries(r):
    n = dist.get_world_size()
    assert dist.is_available() and dist.is_initialized()
    group = dist.new_group([n - 1])
    whole = dist.group.WORLD
    return [
        (dist.get_rank(), n, str(dist.get_backend()), dist.get_backend_config(), dist.get_process_group_ranks(whole)),
        (dist.get_rank(group), dist.get_world_size(group), whole.rank(), whole.size(), dist.get_global_rank(whole, r)),
        group is dist.GroupMember.NON_GROUP_MEMBER,
        None if r < n - 1 else (dist.get_group_rank(group, r), dist.get_process_group_ranks(group)),
    ]


def reductions(r):
    ops = dist.ReduceOp
    found = [
        done(dist.all_reduce, numbers(r, 2, 3).abs().to(dtype), op)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
        for op in (ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX)
    ]
    found += [done(dist.all_reduce, numbers(r, 5, of=9).long(), op) for op in (ops.BAND, ops.BOR, ops.BXOR)]
    found.append(done(dist.all_reduce, numbers(r, 3), ops.AVG))
    found.append(torch.view_as_real(done(dist.all_reduce, torch.complex(numbers(r, 3), numbers(r + 9, 3)))))
    leaf = done(dist.all_reduce, numbers(r, 2).requires_grad_())  # in place, without a trace in the graph
    y = done(dist.all_reduce, leaf * 2)
    ((r + 1) * y.sum()).backward()
    return [*found, leaf, y, leaf.grad]


def gathers(r):
    """Of blocks that are 0-d, empty or not contiguous, and in place."""
    n, x, transposed = dist.get_world_size(), numbers(r, 2, 3), numbers(r, 3, 2).t()
    found = [
        done(imported_all_gather, [torch.empty_like(block) for _ in range(n)], block)
        for block in (numbers(r), numbers(r, 0, 2), x)
    ]
    table, own = torch.full((3, 2, n), -1.0).double(), torch.zeros(2 * n)
    dist.all_gather([table[:, :, s].t() for s in range(n)], x)
    own[2 * r : 2 * r + 2] = numbers(r, 2)
    dist.all_gather_into_tensor(own, own[2 * r : 2 * r + 2])
    found += [done(dist.all_gather_into_tensor, empty(2 * n, 3), block) for block in (x, transposed)]
    found.append(done(dist.all_gather_into_tensor, empty(3, 2 * n).t(), transposed))
    return [*found, table, own]


def rooted(r):
    n = dist.get_world_size()
    last = n - 1
    total = done(dist.reduce, numbers(r, 3), dst=last, op=dist.ReduceOp.MAX)
    rows = [empty(2) for _ in range(n)] if r == last else None
    dist.gather(numbers(r, 2), rows, dst=last)
    given = [numbers(r + s, 2) for s in range(n)] if r == last else None
    part = done(dist.scatter, empty(2), given, src=last)
    return [done(dist.broadcast, numbers(r, 3), src=last), total if r == last else None, rows, part]


def scattered_reductions(r):
    n, ops = dist.get_world_size(), dist.ReduceOp
    return [
        done(dist.reduce_scatter_tensor, empty(2, 3), numbers(r, 2 * n, 3)),
        done(dist.reduce_scatter_tensor, empty(2), numbers(r, 2 * n), ops.AVG),
        done(dist.reduce_scatter_tensor, empty(2), numbers(r, 2 * n), ops.PRODUCT),
        done(dist.reduce_scatter, empty(r + 1), [numbers(r + s, s + 1) for s in range(n)]),
        done(dist.reduce_scatter, empty(2), [numbers(r + s, 2) for s in range(n)], ops.MAX),
    ]


def exchanges(r):
    n = dist.get_world_size()
    sizes = [(r + 2 * s) % 3 for s in range(n)]  # to each rank, some of them zero
    theirs = [(s + 2 * r) % 3 for s in range(n)]
    found = [
        done(dist.all_to_all_single, empty(sum(theirs), 2), numbers(r, sum(sizes), 2), theirs, sizes),
        done(dist.all_to_all_single, empty(2 * n), numbers(r, 2 * n)),
    ]
    if RELEASE >= (2, 12):  # whose gloo can
        found.append(done(dist.all_to_all, [empty(2, 2) for _ in range(n)], [numbers(r + s, 2, 2) for s in range(n)]))
    return found


def dtypes(r):
    """Of what is moved."""
    n, found = dist.get_world_size(), []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64):
        x = numbers(r, 2).abs().to(dtype)
        row = done(dist.all_gather_into_tensor, torch.empty(2 * n, dtype=dtype), x)
        found += [
            row,
            done(dist.all_to_all_single, torch.empty_like(row), row * (r + 1)),
            done(dist.broadcast, x, n - 1),
        ]
    return found


def asynchronous(r):
    pair, other = dist.new_group(), dist.new_group()
    a, b = numbers(r, 3), numbers(r + 5, 3)
    works = [dist.all_reduce(x, group=g, async_op=True) for g, x in ((pair, a), (other, b))[:: 1 if r else -1]]
    for work in works:
        assert work.wait() and work.is_completed()
    twice, several = numbers(r, 3), numbers(r, 4)
    for tensors in ([twice, twice], [several[:3], several[1:]]):
        dist.group.WORLD.allreduce_coalesced(tensors).wait()
    future = dist.all_reduce(numbers(r, 1), async_op=True).get_future()
    return [a, b, twice, several, future.wait()]


def coalesced(r):
    n, group = dist.get_world_size(), dist.group.WORLD
    totals, rows = [numbers(r, 3), numbers(r + 1, 2)], [empty(2 * n), empty(n)]
    with c10d._coalescing_manager(group):
        for x in totals:
            dist.all_reduce(x)
    with c10d._coalescing_manager(group):
        for row in rows:
            dist.all_gather_into_tensor(row, numbers(r, row.numel() // n))
    gathered = fc.all_gather_into_tensor_coalesced([numbers(r, 2), numbers(r, 1)], group)
    scattered = fc.reduce_scatter_tensor_coalesced([numbers(r, 2 * n), numbers(r, n)], "sum", [0, 0], group)
    return [totals, rows, [y + 0 for y in gathered + scattered]]


def messages(r):
    n, got = dist.get_world_size(), torch.full((2,), 7.0).double()
    if r > 0:
        dist.recv(got, src=r - 1)
    if r < n - 1:
        dist.send(got + numbers(r, 2), dst=r + 1)
    if r > 0:
        dist.send(numbers(r, 1), 0, tag=5)
        works = [dist.isend(torch.tensor([float(r * tag)]), 0, tag=tag) for tag in (6, 7)]
        dist.barrier()
        [work.wait() for work in works]
        return got
    received = [(dist.recv(x := empty(1), tag=5), x) for _ in range(1, n)]
    dist.barrier()
    of_ranks = torch.empty(2, n - 1, 1)
    for s in range(1, n):  # in either order
        dist.recv(of_ranks[0, s - 1], s, tag=6)
        dist.irecv(of_ranks[1, n - 1 - s], n - s, tag=7).wait()
    return [got, sorted(received), of_ranks]


def ring(r):
    """As SigLIP's exchange with both neighbours: batched messages, and the reverse in backward."""
    n = dist.get_world_size()
    left, right = (r - 1) % n, (r + 1) % n

    def exchange(both):
        (to_left, to_right), found = both, torch.empty_like(both)
        operations = [
            dist.P2POp(dist.isend, to_right, right),
            dist.P2POp(dist.irecv, found[0], left),
            dist.P2POp(dist.isend, to_left, left, tag=1),
            dist.P2POp(dist.irecv, found[1], right, tag=1),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return found

    return [] if n == 1 else gradient_of(ruled(exchange, lambda g: exchange(g.contiguous())), r, 2, 3)


def objects(r):
    n = dist.get_world_size()
    everyone, here, gathered, part = [None] * n, [{"r": r}, r], [None] * n if r == 0 else None, [None]
    dist.all_gather_object(everyone, {"rank": r, "text": "x" * r})
    dist.broadcast_object_list(here, src=n - 1)
    dist.gather_object((r, "it"), gathered, dst=0)
    dist.scatter_object_list(part, [f"for {s}" for s in range(n)] if r == 0 else None, src=0)
    return [everyone, here, gathered, part]


def subgroups(r):
    n = dist.get_world_size()
    ends = dist.new_group(sorted({0, n - 1}))
    local, _ = dist.new_subgroups(1)
    one = dist.new_group([r], use_local_synchronization=True)
    line = init_device_mesh("cpu", (n,), mesh_dim_names=("data",))
    table = init_device_mesh("cpu", (1, n), mesh_dim_names=("model", "data"))
    groups = [local, one, line["data"].get_group(), table.get_group("data")]
    found = [done(dist.all_reduce, numbers(r, 2), group=group) for group in groups]
    if r in (0, n - 1):
        x = done(dist.all_reduce, numbers(r, 2), group=ends)
        found.append(done(dist.broadcast, x * (r + 1), src=n - 1, group=ends))
    dist.barrier()
    dist.barrier(group=local)
    dist.monitored_barrier()
    dist.destroy_process_group(one)
    return [found, line.get_local_rank(), table.get_coordinate(), dist.get_rank(local)]


def gradient_of(f, r, *shape):
    """f's value, and the gradient from a cotangent that differs between ranks."""
    x = numbers(r, *shape).requires_grad_()
    y = f(x)
    y = torch.cat(list(y)) if isinstance(y, (tuple, list)) else y
    (numbers(r + 23, *y.shape) * y).sum().backward()
    return [y.detach() + 0, x.grad]


def layers(r):
    n = dist.get_world_size()
    return [
        gradient_of(gather_layer, r, 2, 3),
        gradient_of(dist_nn.all_reduce, r, 3),
        gradient_of(dist_nn.all_gather, r, 3),
        gradient_of(lambda x: dist_nn.broadcast(x, n - 1), r, 3),
        gradient_of(lambda x: dist_nn.all_to_all_single(torch.empty_like(x), x), r, 2 * n),
        gradient_of(lambda x: dist_nn.reduce_scatter(torch.empty(2).double(), list(x)), r, n, 2),
    ]


def functional(r):
    n, group = dist.get_world_size(), dist.group.WORLD
    return [
        fc.all_reduce(numbers(r, 3), "sum", group) + 0,
        fc.all_gather_tensor(numbers(r, 2, 3), 1, group) + 0,
        fc.all_reduce(fc.all_reduce(numbers(r, 3), "max", group), "sum", list(range(n))) + 0,
        [y + 0 for y in fc.all_reduce_coalesced([numbers(r, 3), numbers(r + 1, 2)], "sum", group)],
        fc.broadcast(numbers(r, 2), n - 1, group) + 0,
        fc.reduce_scatter_tensor(numbers(r, 2 * n), "avg", 0, group) + 0,
        gradient_of(lambda x: fc.all_gather_tensor_autograd(x, 0, group), r, 2, 3),
        gradient_of(lambda x: fc.all_to_all_single_autograd(x, [2] * n, [2] * n, group), r, 2 * n),
    ]


def parallel(r):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        parallel(numbers(r + 10 * step, 4, 3)).square().sum().backward()
        optimizer.step()
    return [p.detach().float() for p in model.parameters()]


def with_diffcoll(r):
    n = dist.get_world_size()
    ends = dist.new_group(sorted({0, n - 1}))
    mesh = init_device_mesh("cpu", (n,))
    x = numbers(r, 3).requires_grad_()
    y = dc.all_reduce(x) + 2 * dc.all_reduce(x, group=dist.group.WORLD) + 5 * dc.all_reduce(x, group=mesh)
    y = y + (dc.all_gather(x, group=ends).sum() if r in (0, n - 1) else 0)
    ((r + 2) * y).sum().backward()
    dist.all_reduce(x.grad)
    pair = new_group([n - 1])
    z = numbers(r, 3)
    if r == n - 1:
        dist.all_reduce(z, group=pair)
    return [y.detach(), x.grad, dc.get_rank(dist.group.WORLD), dc.get_world_size(mesh), z]


PROGRAMS = [queries, reductions, gathers, rooted, scattered_reductions, exchanges, dtypes, asynchronous, coalesced]
PROGRAMS += [messages, ring, objects, subgroups, layers, functional, parallel, with_diffcoll]


@cache
def on_gloo(n):
    return spawn(lambda r: [program(r) for program in PROGRAMS], range(n))


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_same_as_gloo(program, n):
    found = simulate(program, range(n))
    expected = [results[PROGRAMS.index(program)] for results in on_gloo(n)]
    assert as_lists(found) == as_lists(expected)


def test_what_nccl_has():
    """Means of integers, which are truncated, blocks of other sizes, and a new dimension."""

    def body(r):
        mean = done(dist.all_reduce, torch.tensor([-r, r + 2]), dist.ReduceOp.AVG)
        uneven = done(dist.all_gather, [empty(s) for s in range(3)], torch.full((r,), float(r)).double())
        return as_lists([mean, *uneven, done(dist.all_gather_into_tensor, empty(3, 1), torch.ones(1).double() * r)])

    assert simulate(body, range(3)) == [[[-1, 3], [], [1], [2, 2], [[0], [1], [2]]]] * 3


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────

HERE = r"at \S*test_torch_distributed.py:\d+"


def ones(n):
    return torch.ones(n)


def both_send(r):  # gloo and NCCL do not buffer either: this hangs there
    dist.send(ones(1), 1 - r)
    dist.recv(ones(1), 1 - r)


def groups_in_another_order(call):
    def body(r):
        groups = dist.group.WORLD, new_group([0, 1])
        for group in groups[:: 1 if r else -1]:
            call(ones(1), group=group)

    return body


def message(send, receive):
    """Rank 1 sends to rank 0."""
    return lambda r: dist.send(send, 0) if r else dist.recv(receive, 1)


#: Calls that do not fit together, by the rank r of two.
MISMATCHES = {
    "collectives": lambda r: dist.all_reduce(ones(1)) if r else dist.broadcast(ones(1), 0),
    "libraries": lambda r: dist.all_reduce(ones(1)) if r else dc.all_reduce(ones(1)),
    "op": lambda r: dist.all_reduce(ones(1), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][r]),
    "src": lambda r: dist.broadcast(ones(1), r),
    "shape": lambda r: dist.all_reduce(ones(r + 1)),
    "shape of a reduction": lambda r: dist.reduce(ones(2 - r), 0),  # one number can be added to two
    "dtype": lambda r: dist.all_reduce(ones(1) if r else ones(1).long()),
    "one rank's own": lambda r: dist.reduce_scatter_tensor(ones(1), ones(2).double()),
    "one part": lambda r: dist.all_gather([ones(1), ones(2)], ones(1)),
    "coalesced": lambda r: dist.group.WORLD.allreduce_coalesced([ones(1) for _ in range(r + 1)]).wait(),
    "groups": groups_in_another_order(dist.all_reduce),
    "groups, diffcoll": groups_in_another_order(dc.all_reduce),
    "both send": both_send,
    "nobody sends": lambda r: dist.recv(ones(1)),
    "tags": lambda r: dist.send(ones(1), 0, tag=3) if r else dist.recv(ones(1), 1, tag=2),
    "sizes of messages": message(ones(3), ones(2)),
    "dtypes of messages": message(ones(2), ones(2).double()),
}
#: Where only rank 0 waits.
ALONE = {
    "a rank has ended": lambda r: r or dist.barrier(),
    "a rank has ended, diffcoll": lambda r: r or dc.all_gather(ones(2)),
    "nobody is left to send": lambda r: r or dist.recv(ones(1), 1),
    "a new group": lambda r: r or dist.new_group([0, 1]),
}


@pytest.mark.parametrize("name", [*MISMATCHES, *ALONE])
def test_mismatches_and_deadlocks_are_found_at_once(name):
    """The error says where each rank waits."""
    body = {**MISMATCHES, **ALONE}[name]
    fails(dc.CollectiveMismatchError, rf"rank 0 .*{HERE}" if name in ALONE else rf"{HERE}.*{HERE}", body)


def fails(error, words, body):
    with pytest.raises(error, match=re.compile(words, re.DOTALL)):
        simulate(body, range(2))
    assert not dist.is_initialized()


WRONG = {
    "too few": lambda: dist.all_gather([ones(1)], ones(1)),
    "too many": lambda: dist.reduce_scatter(ones(1), [ones(1)] * 3),
    "remainder": lambda: dist.reduce_scatter_tensor(ones(1), ones(3)),
    "op": lambda: dist.all_reduce(ones(1), dist._make_nccl_premul_sum(2.0)),
    "sizes": lambda: dist.all_to_all_single(ones(2), ones(3), [1, 1], [1, 1]),
    "sizes, meta": lambda: dist.all_to_all_single(ones(2).to("meta"), ones(3).to("meta"), [1, 1], [1, 1]),
    "twice": lambda: dist.init_process_group("gloo"),
    "transform": lambda: torch.func.vmap(lambda x: (dist.all_reduce(x), x)[1])(ones(2)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    fails((RuntimeError, ValueError), "", lambda r: WRONG[name]())


def test_functions_compiled_before_run_uncompiled():
    """Graphs have no guard for the default group."""

    @torch.compile(backend="eager")
    def total(x):
        if dist.is_initialized():
            dist.all_reduce(x)
        return x * 1

    assert total(ones(1)) == 1
    assert simulate(lambda r: total(torch.tensor([r + 1.0])).item(), range(2)) == [3, 3]
    assert total(ones(1)) == 1
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compilers_are_refused(fullgraph, monkeypatch):
    """As in a process that has not imported Dynamo before."""

    def loss(x):
        dist.all_reduce(x)
        return x * dist.get_rank()

    torch._dynamo.reset()
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: contextlib.nullcontext())
    fails(
        RuntimeError,
        "torch.distributed: torch.compile, export, make_fx and linearize do not work on simulated ranks",
        lambda r: torch.compile(loss, backend="eager", fullgraph=fullgraph)(ones(1)),
    )


# ── groups and meshes that ranks share, as through globals ───────────────────────────────────────────────


@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize("call", [dist.all_reduce, dc.all_reduce], ids=["torch", "diffcoll"])
def test_a_group_of_another_rank(call, default):
    """Raises, also after its ranks have ended, and so does a communication that they have not waited for."""
    kept = {}

    def body(r):
        kept["work"] = dist.irecv(ones(1), 1 - r)
        kept.setdefault("group", dist.group.WORLD if default else dist.new_group([r]))
        dist.barrier()
        call(ones(1), group=kept["group"])

    with pytest.raises((RuntimeError, ValueError)) as raised:
        simulate(body, range(2))
    assert not isinstance(raised.value, dc.CollectiveMismatchError)  # a rank has been refused, none waits
    for later in (kept["group"].barrier, kept["work"].wait):
        with pytest.raises(RuntimeError):
            later()


#: Questions to a mesh of the first of four ranks, and how many get an error, in its simulation and in a later one.
QUESTIONS = {
    "get_coordinate": (lambda mesh: mesh.get_coordinate(), (3, 3)),
    "get_local_rank": (lambda mesh: mesh.get_local_rank("data"), (2, 4)),
    "get_group": (lambda mesh: mesh.get_group("data"), (2, 4)),
    "diffcoll": (lambda mesh: dc.all_reduce(ones(1), group=mesh["data"]), (2, 4)),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_mesh_of_another_rank(name):
    """Its answer is right for the rank that asks, or an error; a mesh that each rank makes works, and slices of it."""
    question, errors = QUESTIONS[name]
    kept = {}

    def body(r):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
        assert mesh.get_coordinate() == mesh["model", "data"].get_coordinate() == (r // 2, r % 2)
        assert mesh["data"].get_local_rank() == r % 2
        try:
            return question(kept.setdefault("mesh", mesh)) == question(mesh)
        except (RuntimeError, ValueError):
            return "an error"

    for expected in errors:
        found = simulate(body, range(4))
        assert found.count("an error") == expected and found.count(True) == 4 - expected


# ── nothing is left behind ───────────────────────────────────────────────────────────────────────────────


def test_worlds_of_several_threads_take_turns():
    """Random numbers and the environment are neither mixed nor left changed."""
    before = dict(os.environ)

    def body(r):
        drawn = [torch.rand(()).item()]
        for _ in range(20):
            dist.barrier()
            time.sleep(0.0005)  # another thread's turn
            drawn.append(torch.rand(()).item())
        return os.environ["WORLD_SIZE"], drawn

    found, alone = {}, {n: simulate(body, range(n)) for n in (2, 3, 4)}
    threads = [threading.Thread(target=lambda n=n: found.update({n: simulate(body, range(n))})) for n in alone]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == alone and dict(os.environ) == before


def test_within_real_processes():
    """The caller's own process group is hidden from the ranks, and there again afterwards."""

    def body(r):
        x, y = torch.tensor(r + 1), torch.tensor(r + 1)
        sums = simulate(lambda s: (dist.all_reduce(z := torch.tensor(10 * s + r)), z.item())[1], range(3))
        with pytest.raises(KeyError):
            simulate(lambda r: {}[r], range(3))
        assert init_device_mesh("cpu", (2,), mesh_dim_names=("data",))["data"].get_coordinate() == (r,)
        dist.all_reduce(x)
        y = fc.all_reduce(y, "sum", dist.group.WORLD)
        return sums, x.item(), y.item(), dist.get_rank(), dc.get_world_size()

    assert spawn(body, range(2)) == [([30 + 3 * r] * 3, 3, 3, r, 2) for r in range(2)]


def test_memory_is_released():
    alive = []

    def body(r):
        x = torch.ones(1000)
        alive.append(weakref.ref(x))
        dist.all_reduce(x)
        dist.all_reduce(torch.ones(1), async_op=True)  # never waited for
        y = torch.ops._c10d_functional.all_reduce(torch.ones(1, device="meta"), "sum", dist.group.WORLD.group_name)
        alive.append(weakref.ref(y))
        alive.append(weakref.ref(dist.new_group()))
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()

    simulate(body, range(2))
    gc.collect()
    assert [x() for x in alive] == [None] * 6
